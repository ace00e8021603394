"""The stated uncertainty of a speed against steps that were measured: ours, and published ones.

`published_speeds.jsonl` holds what others published: the configuration as far as it is known, what
had to be guessed and what that may do, where it was read. A row is `strong` where its configuration
is known completely, and `weak` where something was guessed that moves its time by more than 5 %,
the host's share of another framework's short micro-batches included; claims are tested on strong
rows. No efficiency of the prediction was chosen by the rows of a `held_out` split; what its
intervals are, and what a GPU is off by as a whole, comes from all strong rows.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache

import pytest

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.gpus import GpuSpec, find_gpu
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.sweep.predict.speed.predictor import Calibration, StepTimes, calibrate, within
from tests.sweep.predict.predicted_steps import predict_step, predict_steps
from tests.sweep.predict.rows import HELD_OUT, STUDY_STEPS, TABLE, Row, config_of, model_of
from tests.sweep.predict.rows import read_rows as rows_in
from tests.sweep.predict.speed import stated_speeds
from tests.sweep.predict.speed.spreads import MeasuredStep, evidence_of
from tests.sweep.predict.speed.stated_speeds import (
    EVIDENCE,
    PAGE,
    dumped,
    evidence,
    with_table,
    without_its_gpu,
    without_its_source,
)

pytestmark = pytest.mark.integration
H200, MISTRAL = find_gpu("h200"), load_model_spec("mistral-7b-v0.3")
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


def test_every_published_row_says_where_it_is_from_and_what_was_guessed() -> None:
    assert len(PUBLISHED) >= 50
    for row in PUBLISHED:
        assert row["source"].startswith("https://")
        assert date.fromisoformat(row["date"]) <= date.today()
        assert all(row[field] for field in ("figure", "framework", "guessed"))
        assert row["split"] in ("development", "held_out")
        assert row["strength"] in ("strong", "weak")
        assert row["step_seconds"] > 0.0


def test_what_is_stated_is_what_the_committed_steps_show() -> None:
    """`python -m tests.sweep.predict.speed.stated_speeds` writes both."""
    assert EVIDENCE.read_text(encoding="utf-8") == dumped(evidence())
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page)


@pytest.mark.parametrize("held_out", [without_its_source, without_its_gpu])
def test_nine_in_ten_steps_of_sources_and_gpus_that_are_not_known_are_inside(
    held_out: Callable[[], Sequence[stated_speeds.Outcome]],
) -> None:
    outcomes = [one for one in held_out() if one.step.is_published]
    assert 0.85 <= statistics.mean(one.is_inside for one in outcomes) <= 0.96
    for bound in ("compute", "bandwidth"):
        assert statistics.mean(one.is_inside for one in outcomes if one.bound == bound) >= 0.85
    assert statistics.median(one.width for one in outcomes) <= 1.65
    assert statistics.median(abs(one.ratio - 1.0) for one in outcomes) <= 0.12
    # A source counts once, however many steps it has.
    by_source: dict[str, list[bool]] = {}
    for one in outcomes:
        by_source.setdefault(one.step.project, []).append(one.is_inside)
    assert statistics.mean(statistics.mean(inside) for inside in by_source.values()) >= 0.8


def test_a_gpu_of_one_source_moves_less_than_one_of_many_and_both_less_than_their_steps() -> None:
    chance = random.Random(3)
    rows = [
        MeasuredStep(gpu, f"{source}", chance.gauss(mean + source / 10, 0.03), 0.0, is_shared=False)
        for gpu, ends, mean in (("one", 0, 0.2), ("many", 2, 0.2), ("other", 2, -0.2))
        for source in range(-ends, ends + 1)
        for _ in range(9)
    ]
    known = evidence_of(rows)
    assert 0.0 < known.gpus["one"].shift < known.gpus["many"].shift < 0.22
    assert known.gpus["many"].gpu < known.gpus["one"].gpu < known.others.gpu
    assert known.others.step == pytest.approx(0.03, abs=0.01)


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


@pytest.mark.parametrize(
    ("file", "by_host", "median", "ninth_of_ten"),
    # Of a GPU that is off by as much as others' steps on it and other GPUs say as well, 3.7 %.
    [
        ("table", False, 0.031, 0.085),
        ("table", True, 0.14, 0.43),
        ("held out", False, 0.05, 0.185),
        ("held out", True, 0.19, 0.43),
        ("study", False, 0.067, 0.12),
    ],
)
def test_steps_on_the_h200_stay_as_well_predicted(
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
    assert share_inside(outcomes) >= 0.85
    # Five bring the median of the rest within 2 %.
    assert trials < 5 or statistics.median(o.error for o in outcomes) <= 0.02


def test_more_trials_make_it_surer_and_none_makes_it_less_sure_than_the_gpu_alone() -> None:
    known = [None, *(calibrate(STUDY[:count], model=MISTRAL, gpu=H200) for count in (1, 5, 20))]
    stated = [outcomes_of(STUDY[:1], calibration=one)[0].log_spread for one in known]
    assert stated == sorted(stated, reverse=True)
    assert stated[-1] < 0.5 * stated[0]


def test_a_step_is_as_uncertain_as_what_it_waits_for() -> None:
    stated = []
    for config in (parse_config({"micro_batch_size": size}) for size in (1, 64)):
        times = StepTimes([config], model=MISTRAL, gpu=H200)
        (share,), known = times.host_shares, H200.speed
        expected = math.hypot((1.0 - share) * known.device, share * known.host)
        stated.append(predict_step(config, model=MISTRAL, gpu=H200).log_spread)
        assert stated[-1] == pytest.approx(expected, rel=0.1)
    assert stated[1] < 0.6 * stated[0]


def test_fp16_is_slower_than_bf16_by_what_its_products_were_measured_to_lose() -> None:
    """Measured on the H200: 2 to 11 % slower. The catalogue's products alone lose 4 %."""
    configs = [TrialConfig(micro_batch_size=16, compute_dtype=d) for d in ("fp16", "bf16")]
    fp16, bf16 = StepTimes(configs, model=MISTRAL, gpu=H200).seconds
    assert 1.02 < fp16 / bf16 < 1.11
