"""The stated uncertainty of a speed against steps that were measured: ours, and published ones.

`published_speeds.jsonl` holds what others published: the configuration as far as it is known, what
had to be guessed and what that may do, where it was read. A row is `strong` where its configuration
is known completely, and `weak` where something was guessed that moves its time by more than 5 %,
the host's share of another framework's short micro-batches included; claims are tested on strong
rows. No constant of the prediction was chosen by the rows of a `held_out` split; those of the H100
did make its stated uncertainty the widest.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Any

import pytest

from search_spaces.config import TrialConfig, parse_config
from search_spaces.gpus import GpuSpec, find_gpu, gpu_catalogue
from search_spaces.models import ModelSpec, load_model_spec
from sweep.predict.speed.predictor import NINE_IN_TEN, Calibration, StepTimes, calibrate, within
from tests.sweep.predict.predicted_steps import predict_step, predict_steps
from tests.sweep.predict.rows import DATA, HELD_OUT, STUDY_STEPS, TABLE, Row, config_of, model_of
from tests.sweep.predict.rows import read_rows as rows_in

H200, MISTRAL = find_gpu("h200"), load_model_spec("mistral-7b-v0.3")
CLAIMED_SHARE = 0.9
"""`SpeedPrediction.step_seconds_range`: nine in ten steps."""
WIDEST = GpuSpec.model_fields["device_uncertainty"].default
STUDY = [(config_of(row), float(row["step_seconds"])) for row in STUDY_STEPS]
PUBLISHED = rows_in("published_speeds.jsonl")


@dataclass(frozen=True)
class Outcome:
    """A step that was measured, and what was predicted of it."""

    measured_over_predicted: float
    log_spread: float

    @property
    def error(self) -> float:
        return abs(self.measured_over_predicted - 1.0)

    @property
    def is_inside(self) -> bool:
        low, high = within(1.0, self.log_spread)
        return low <= self.measured_over_predicted <= high


def outcomes_of(
    steps: Sequence[tuple[TrialConfig, float]],
    *,
    model: ModelSpec = MISTRAL,
    gpu: GpuSpec = H200,
    calibration: Calibration | None = None,
) -> list[Outcome]:
    """Configurations and their measured seconds, predicted all at once."""
    configs = [config for config, _ in steps]
    predictions = predict_steps(configs, model=model, gpu=gpu, calibration=calibration)
    return [
        Outcome(seconds / prediction.step_seconds, prediction.log_spread)  # type: ignore[union-attr]
        for (_, seconds), prediction in zip(steps, predictions, strict=True)
    ]


def share_inside(outcomes: Iterable[Outcome]) -> float:
    return statistics.mean(outcome.is_inside for outcome in outcomes)


def published(calibration: Calibration | None = None, **only: str) -> list[Outcome]:
    """What was published, of the rows that have such values."""
    models = json.loads((DATA / "published_models.json").read_text(encoding="utf-8"))
    found: list[Outcome] = []
    for row in (row for row in PUBLISHED if only.items() <= row.items()):
        spec = ModelSpec(row["model"], "directory", models[row["model"]])
        step = parse_config(row["config"]), row["step_seconds"]
        about: dict[str, Any] = {"model": spec, "gpu": find_gpu(row["card"])}
        found += outcomes_of([step], **about, calibration=calibration)
    return found


def test_every_published_row_says_where_it_is_from_and_what_was_guessed() -> None:
    assert len(PUBLISHED) >= 50
    for row in PUBLISHED:
        assert row["source"].startswith("https://")
        assert date.fromisoformat(row["date"]) <= date.today()
        assert all(row[field] for field in ("figure", "framework", "guessed"))
        assert row["split"] in ("development", "held_out")
        assert row["strength"] in ("strong", "weak")
        assert row["step_seconds"] > 0.0


@pytest.mark.parametrize(
    "card", sorted({row["card"] for row in PUBLISHED if row["strength"] == "strong"})
)
def test_the_median_of_a_gpus_published_steps_is_within_what_is_stated_of_it(card: str) -> None:
    outcomes = published(card=card, strength="strong")
    median = statistics.median(o.measured_over_predicted for o in outcomes)
    assert abs(median - 1.0) <= find_gpu(card).device_uncertainty
    assert share_inside(outcomes) >= CLAIMED_SHARE


def test_steps_that_were_held_out_are_within_what_is_stated() -> None:
    outcomes = published(split="held_out", strength="strong")
    assert len(outcomes) >= 20
    assert share_inside(outcomes) >= CLAIMED_SHARE


def test_a_gpu_states_less_than_the_widest_only_where_several_of_its_steps_are_known() -> None:
    known = [row["card"] for row in PUBLISHED]
    for name, gpu in gpu_catalogue().items():
        is_known = name == "h200" or known.count(name) >= 3
        assert gpu.device_uncertainty <= WIDEST
        assert is_known or gpu.device_uncertainty == WIDEST


@cache
def ours(file: str, *, by_host: bool) -> list[Outcome]:
    """Rows of a file whose steps the host's launches bound, or the GPU."""
    rows: dict[str, list[Row]] = {"table": TABLE, "held out": HELD_OUT, "study": STUDY_STEPS}
    found = []
    for row in rows[file]:
        config, model = config_of(row), model_of(row)
        step = predict_step(config, model=model, gpu=H200)
        if (step.bottleneck == "launch") is by_host:
            found.append(Outcome(row["step_seconds"] / step.step_seconds, step.log_spread))
    return found


@pytest.mark.parametrize("by_host", [False, True])
def test_what_is_stated_of_the_h200_is_what_our_own_steps_show(by_host: bool) -> None:
    outcomes = [o for file in ("table", "held out", "study") for o in ours(file, by_host=by_host)]
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
        ("table", False, 0.03, 0.08),
        ("table", True, 0.14, 0.43),
        ("held out", False, 0.04, 0.15),
        ("held out", True, 0.17, 0.46),
        ("study", False, 0.035, 0.09),
    ],
)
def test_steps_on_the_h200_stay_as_well_predicted_as_they_were_from_the_data_sheet(
    file: str, by_host: bool, median: float, ninth_of_ten: float
) -> None:
    ratios = (outcome.measured_over_predicted for outcome in ours(file, by_host=by_host))
    errors = sorted(abs(1.0 / ratio - 1.0) for ratio in ratios)
    assert len(errors) >= 20
    assert statistics.median(errors) <= median
    assert errors[int(0.9 * len(errors))] <= ninth_of_ten


@pytest.mark.parametrize("trials", [1, 2, 3, 5, 10, 20])
def test_after_trials_the_rest_of_a_study_is_within_what_is_then_stated(trials: int) -> None:
    chance, outcomes = random.Random(5), list[Outcome]()
    for _ in range(20):
        chosen = chance.sample(STUDY, k=len(STUDY))
        calibration = calibrate(chosen[:trials], model=MISTRAL, gpu=H200)
        outcomes += outcomes_of(chosen[trials:], calibration=calibration)
    assert share_inside(outcomes) >= CLAIMED_SHARE
    # Five bring the median of the rest within 5 %.
    assert trials < 5 or statistics.median(o.error for o in outcomes) <= 0.05


def test_more_trials_make_it_surer_and_none_makes_it_less_sure_than_the_gpu_alone() -> None:
    known = [None, *(calibrate(STUDY[:count], model=MISTRAL, gpu=H200) for count in (1, 5, 20))]
    stated = [outcomes_of(STUDY[:1], calibration=one)[0].log_spread for one in known]
    assert stated == sorted(stated, reverse=True)
    assert stated[-1] < 0.5 * stated[0]


def test_a_step_is_as_uncertain_as_what_it_waits_for() -> None:
    stated = []
    for config in (parse_config({"micro_batch_size": size}) for size in (1, 64)):
        (share,) = StepTimes([config], model=MISTRAL, gpu=H200).launch_shares
        expected = share * H200.launch_seconds.uncertainty + (1 - share) * H200.device_uncertainty
        stated.append(predict_step(config, model=MISTRAL, gpu=H200).log_spread)
        assert stated[-1] == pytest.approx(math.atanh(expected) / NINE_IN_TEN)
    assert stated[1] < 0.08 < 0.18 < stated[0]


def test_fp16_is_slower_than_bf16_by_what_its_products_were_measured_to_lose() -> None:
    """Measured on the H200: 2 to 11 % slower. The catalogue's products alone lose 4 %."""
    configs = [TrialConfig(micro_batch_size=16, compute_dtype=d) for d in ("fp16", "bf16")]
    fp16, bf16 = StepTimes(configs, model=MISTRAL, gpu=H200).seconds
    assert 1.02 < fp16 / bf16 < 1.11
