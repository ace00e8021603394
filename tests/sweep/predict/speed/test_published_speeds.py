"""The stated uncertainty of a speed against steps that were measured: ours, and published ones.

`published_speeds.jsonl` holds what others published: the configuration as far as it is known, what
had to be guessed and what that may do, where it was read. No constant of the prediction was chosen
by the rows of a `held_out` split; those of the H100 did make its stated uncertainty the widest.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig, parse_config
from search_spaces.gpus import GpuSpec, find_gpu, gpu_catalogue
from search_spaces.models import ModelSpec, load_model_spec
from sweep.predict.speed.predictor import Calibration, StepTimes, calibrate
from tests.sweep.predict.predicted_steps import predict_step, predict_steps

DATA = Path(__file__).parents[3] / "data"
H200 = find_gpu("h200")
CLAIMED_SHARE = 0.9
"""`SpeedPrediction.uncertainty`: nine in ten steps."""
WIDEST = GpuSpec.model_fields["device_uncertainty"].default


@dataclass(frozen=True)
class Outcome:
    """A step that was measured, and what was predicted of it."""

    measured_over_predicted: float
    uncertainty: float

    @property
    def error(self) -> float:
        return abs(self.measured_over_predicted - 1.0)

    @property
    def is_inside(self) -> bool:
        return self.error <= self.uncertainty


def outcome(
    config: TrialConfig,
    seconds: float,
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    calibration: Calibration | None = None,
) -> Outcome:
    (one,) = outcomes_of([(config, seconds)], model=model, gpu=gpu, calibration=calibration)
    return one


def outcomes_of(
    steps: Sequence[tuple[TrialConfig, float]],
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    calibration: Calibration | None = None,
) -> list[Outcome]:
    """Configurations and their measured seconds, predicted all at once."""
    configs = [config for config, _ in steps]
    predictions = predict_steps(configs, model=model, gpu=gpu, calibration=calibration)
    return [
        Outcome(seconds / prediction.step_seconds, prediction.uncertainty)
        for (_, seconds), prediction in zip(steps, predictions, strict=True)
    ]


def share_inside(outcomes: Iterable[Outcome]) -> float:
    return statistics.mean(outcome.is_inside for outcome in outcomes)


@cache
def published_rows() -> list[dict[str, Any]]:
    return read_rows("published_speeds.jsonl")


def read_rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / file).read_text(encoding="utf-8").splitlines()]


@cache
def published_models() -> dict[str, dict[str, Any]]:
    text = (DATA / "published_models.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def published(
    card: str | None = None, split: str | None = None, calibration: Calibration | None = None
) -> list[Outcome]:
    return [
        outcome(
            parse_config(row["config"]),
            row["step_seconds"],
            model=ModelSpec(row["model"], "directory", published_models()[row["model"]]),
            gpu=find_gpu(row["card"]),
            calibration=calibration,
        )
        for row in published_rows()
        if card in (None, row["card"]) and split in (None, row["split"])
    ]


CARDS_WITH_ROWS = sorted({row["card"] for row in published_rows()})


def test_every_published_row_says_where_it_is_from_and_what_was_guessed() -> None:
    assert len(published_rows()) >= 50
    for row in published_rows():
        assert row["source"].startswith("https://")
        assert date.fromisoformat(row["date"]) <= date.today()
        assert all(row[field] for field in ("figure", "framework", "guessed"))
        assert row["split"] in ("development", "held_out")
        assert row["step_seconds"] > 0.0


@pytest.mark.parametrize("card", CARDS_WITH_ROWS)
def test_the_median_of_a_cards_published_steps_is_within_what_is_stated_of_it(card: str) -> None:
    outcomes = published(card)
    median = statistics.median(o.measured_over_predicted for o in outcomes)
    assert abs(median - 1.0) <= find_gpu(card).device_uncertainty
    assert share_inside(outcomes) >= CLAIMED_SHARE


def test_steps_that_were_held_out_are_within_what_is_stated() -> None:
    outcomes = published(split="held_out")
    assert len(outcomes) >= 20
    assert share_inside(outcomes) >= CLAIMED_SHARE


def test_a_card_states_less_than_the_widest_only_where_several_of_its_steps_are_known() -> None:
    known = [row["card"] for row in published_rows()]
    for name, card in gpu_catalogue().items():
        if name != "h200" and known.count(name) < 3:
            assert card.device_uncertainty == WIDEST
        assert card.device_uncertainty <= WIDEST


@cache
def measured_on_h200(file: str) -> list[tuple[ModelSpec, TrialConfig, float]]:
    return [
        (load_model_spec(model_of(row["model"])), parse_config(row["config"]), row["step_seconds"])
        for row in read_rows(file)
        if row.get("step_seconds") is not None
    ]


def model_of(name: str) -> str:
    directory = DATA / "models" / name
    return str(directory) if directory.exists() else name


OUR_ROWS = ("measurements_h200.jsonl", "held_out_h200.jsonl", "study_steps_h200.jsonl")


def uncalibrated(file: str, *, by_host: bool) -> list[Outcome]:
    return [
        outcome(config, seconds, model=model, gpu=H200)
        for model, config, seconds in measured_on_h200(file)
        if is_bound_by_host(config, model) == by_host
    ]


def is_bound_by_host(config: TrialConfig, model: ModelSpec) -> bool:
    return predict_step(config, model=model, gpu=H200).bottleneck == "launch"


@pytest.mark.parametrize("by_host", [False, True])
def test_what_is_stated_of_the_h200_is_what_our_own_steps_show(by_host: bool) -> None:
    outcomes = [o for file in OUR_ROWS for o in uncalibrated(file, by_host=by_host)]
    assert len(outcomes) > 40
    assert share_inside(outcomes) >= CLAIMED_SHARE
    ninth_of_ten = statistics.quantiles([o.error for o in outcomes], n=10)[-1]
    stated = H200.launch_seconds.uncertainty if by_host else H200.device_uncertainty
    assert 0.5 * stated <= ninth_of_ten <= stated


@pytest.mark.parametrize(
    ("file", "by_host", "median", "ninth_of_ten"),
    # At most what they were before the catalogue had measured rates, the tail of the studies apart
    # (0.05 then, at a median of 0.035).
    [
        ("measurements_h200.jsonl", False, 0.03, 0.08),
        ("measurements_h200.jsonl", True, 0.14, 0.43),
        ("held_out_h200.jsonl", False, 0.04, 0.15),
        ("held_out_h200.jsonl", True, 0.17, 0.46),
        ("study_steps_h200.jsonl", False, 0.035, 0.09),
    ],
)
def test_steps_on_the_h200_stay_as_well_predicted_as_they_were_from_the_data_sheet(
    file: str, by_host: bool, median: float, ninth_of_ten: float
) -> None:
    rows = [r for r in measured_on_h200(file) if is_bound_by_host(r[1], r[0]) == by_host]
    errors = sorted(
        abs(predict_step(config, model=model, gpu=H200).step_seconds / seconds - 1.0)
        for model, config, seconds in rows
    )
    assert statistics.median(errors) <= median
    assert errors[int(0.9 * len(errors))] <= ninth_of_ten


@pytest.mark.parametrize("trials", [1, 2, 3, 5, 10, 20])
def test_after_trials_the_rest_of_a_study_is_within_what_is_then_stated(trials: int) -> None:
    rows = measured_on_h200("study_steps_h200.jsonl")
    (model,) = {row[0].name: row[0] for row in rows}.values()
    steps = [(config, seconds) for _, config, seconds in rows]
    chance = random.Random(5)
    outcomes = []
    for _ in range(20):
        chosen = chance.sample(steps, k=len(steps))
        calibration = calibrate(chosen[:trials], model=model, gpu=H200)
        outcomes += outcomes_of(chosen[trials:], model=model, gpu=H200, calibration=calibration)
    assert share_inside(outcomes) >= CLAIMED_SHARE


def test_more_trials_make_it_surer_and_none_makes_it_less_sure_than_the_card_alone() -> None:
    rows = measured_on_h200("study_steps_h200.jsonl")
    model, config, _ = rows[0]
    trials = [(config, seconds) for _, config, seconds in rows]
    stated = [
        predict_step(config, model=model, gpu=H200, calibration=calibration).uncertainty
        for calibration in (
            None,
            calibrate(trials[:1], model=model, gpu=H200),
            calibrate(trials[:5], model=model, gpu=H200),
            calibrate(trials[:20], model=model, gpu=H200),
        )
    ]
    assert stated == sorted(stated, reverse=True)
    assert stated[-1] < 0.5 * stated[0]


def test_a_step_is_as_uncertain_as_what_it_waits_for() -> None:
    model = load_model_spec("mistral-7b-v0.3")
    quick, slow = (parse_config({"micro_batch_size": size}) for size in (1, 64))
    for config in (quick, slow):
        (share,) = StepTimes([config], model=model, gpu=H200).launch_shares
        expected = share * H200.launch_seconds.uncertainty + (1 - share) * H200.device_uncertainty
        stated = predict_step(config, model=model, gpu=H200).uncertainty
        assert stated == pytest.approx(expected)
    short = predict_step(quick, model=model, gpu=H200).uncertainty
    long = predict_step(slow, model=model, gpu=H200).uncertainty
    assert long < 0.13 < 0.35 < short


def test_launches_cost_what_the_cards_entry_says() -> None:
    model = load_model_spec("mistral-7b-v0.3")
    config = parse_config({"micro_batch_size": 1, "seq_len": 128})
    low, typical, high = (
        predict_step(
            config,
            model=model,
            gpu=H200.model_copy(
                update={
                    "launch_seconds": H200.launch_seconds.model_copy(update={"typical": seconds})
                }
            ),
        ).step_seconds
        for seconds in (
            H200.launch_seconds.low,
            H200.launch_seconds.typical,
            H200.launch_seconds.high,
        )
    )
    assert low < 0.75 * typical < typical < high / 1.25


def test_fp16_is_slower_than_bf16_by_what_its_products_were_measured_to_lose() -> None:
    """Measured on the H200: 2 to 11 % slower. The catalogue's products alone lose 4 %."""
    model = load_model_spec("mistral-7b-v0.3")
    both = [
        predict_step(
            parse_config({"micro_batch_size": 16, "compute_dtype": dtype}), model=model, gpu=H200
        ).step_seconds
        for dtype in ("fp16", "bf16")
    ]
    assert 1.02 < both[0] / both[1] < 1.11
