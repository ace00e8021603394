"""A study that asks what its configurations learn: on which tokens, which of them, how often."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from storage.confirmations import pooled_qualities
from storage.ranking import Ranking, claimed_pair, rank
from storage.records import EpochRecord, Measured, Outcome, QualityReport, TrialRecord
from storage.study import OpenStudy
from sweep.running.replay import ReplayRunner
from sweep.running.runner import Observer, keep_going
from sweep.running.wire import Progress, QualityCommand, TrialRequest
from sweep.sampling.samplers import make_sampler
from sweep.study.driver import TOKENS_MIN, Driver, default_tokens
from sweep.study.stopping import Rival, is_hopeless
from sweep.study.tuner import tune
from tests.sweep.simulated_device import a_measurement, a_study, train
from tests.sweep.study.test_confirmation import Clock, a_forecaster

CONFIRM = {"seconds": 60.0, "repeats": 2, "soak_seconds": 0.0}
SPACE: dict[str, Any] = {
    "dimensions": {"lora_rank": {"choices": [8, 16, 32, 64]}},
    "fixed": {"kernels": "liger", "target_modules": "attention", "micro_batch_size": 8},
    "objectives": ["tokens_per_second", "eval_loss"],
    "weights": "pretrained",
    "data": {"texts": "mine.jsonl"},
    "trials": 6,
    "confirm": False,
}


def a_report(loss: float, *, seed: int = 0, **changes: Any) -> QualityReport:
    values = {
        "eval_loss": loss,
        "eval_tokens": 1000,
        "eval_seq_len": 512,
        "train_tokens": 5000,
        "train_loss": loss - 0.1,
        "steps": 5,
        "seconds": 60.0,
        "seed": seed,
    }
    return QualityReport.model_validate(values | changes)


def loss_of(config: TrialConfig, seed: int) -> float:
    """Falls with the rank, and moves with the seed by less than that."""
    return 2.0 - 0.05 * math.log2(config.lora_rank) + 0.002 * math.sin(7 * seed + config.lora_rank)


class Learning(ReplayRunner):
    """A device that is slower for larger adapters, and says what they learn."""

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        outcome = super().run(request, observe=observe)
        command = request.quality
        if command is None or not isinstance(outcome, Measured):
            return outcome
        report = a_report(loss_of(request.config, command.seed), seed=command.seed)
        measured = outcome.measurement.model_copy(update={"quality": report})
        return Measured(measurement=measured)


def slower_by_rank(config: TrialConfig) -> Outcome:
    step = 0.3 * (1 + config.lora_rank / 400)
    return Measured(
        measurement=a_measurement(
            config,
            tokens_per_second=config.tokens_per_step / step,
            step_seconds=step,
            step_seconds_ci95=(step * 0.999, step * 1.001),
        )
    )


def opened(home: Path, **space: Any) -> OpenStudy:
    study = a_study(home, **(SPACE | space))
    study.study.sampler = make_sampler("grid", study.definition.space, seed=0)
    return study


def qualities(runner: ReplayRunner) -> list[QualityCommand | None]:
    return [request.quality for request in runner.requests]


def driven(home: Path, **space: Any) -> tuple[Learning, Ranking]:
    study = opened(home, **space)
    runner = Learning(otherwise=slower_by_rank)
    with study:
        tune(Driver(study, runner=runner, forecaster=a_forecaster(), clock=Clock()))
        return runner, rank(study.records(), study.definition, study.confirmations())


def test_every_trial_learns_from_the_same_tokens_in_the_same_order(tmp_path: Path) -> None:
    runner, ranking = driven(tmp_path)
    asked = [command for command in qualities(runner) if command is not None]
    assert len({(c.tokens, c.seed, c.eval_seq_len) for c in asked}) == 1
    measured = [r for r in ranking.records if r.verdict == "fits"]
    assert measured
    assert all(r.measurement and r.measurement.quality for r in measured)


def test_the_baselines_speed_says_how_much_a_minute_is_and_it_then_learns_too(
    tmp_path: Path,
) -> None:
    runner, ranking = driven(tmp_path)
    first, second, *rest = qualities(runner)
    assert first is None
    assert runner.ran[0] == runner.ran[1] == ranking.definition.space.baseline_config()
    speed = ranking.baseline.measurement.tokens_per_second  # type: ignore[union-attr]
    assert second is not None
    assert second.tokens == pytest.approx(60 * speed, rel=0.1)
    assert all(command is not None for command in rest)


def test_tokens_that_were_named_are_taken(tmp_path: Path) -> None:
    runner, _ = driven(tmp_path, data={"texts": "mine.jsonl", "quality_tokens": 12_345})
    assert {c and c.tokens for c in qualities(runner)} == {12_345}


def test_a_study_goes_on_with_the_tokens_that_it_chose(tmp_path: Path) -> None:
    runner, _ = driven(tmp_path, trials=2)
    chosen = qualities(runner)[1]

    study = opened(tmp_path)
    again = Learning(otherwise=train)  # Another speed altogether.
    with study:
        tune(Driver(study, runner=again, forecaster=a_forecaster(), clock=Clock()))
    assert chosen is not None
    assert {c and c.tokens for c in qualities(again)} == {chosen.tokens}


@pytest.mark.parametrize(
    ("speed", "loss_tokens", "tokens"),
    [
        (1_234.0, None, 74_000),
        (1_234.0, 10**9, 74_000),
        (1_234.0, 20_400, 20_000),
        (0.1, 10**9, 250),
        (0.1, 3, 250),
    ],
)
def test_a_minute_is_two_digits_and_no_more_than_an_epoch(
    speed: float, loss_tokens: int | None, tokens: int
) -> None:
    epoch = None if loss_tokens is None else an_epoch(loss_tokens)
    assert default_tokens(speed, epoch) == tokens
    assert tokens >= TOKENS_MIN - 10


def an_epoch(loss_tokens: int) -> EpochRecord:
    return EpochRecord(
        rows=10,
        rows_cut=0,
        rows_left_out=0,
        tokens_left_out=0,
        tokens=loss_tokens + 10,
        tokens_cut=0.0,
        padded_tokens=loss_tokens * 2,
        loss_tokens=loss_tokens,
        steps=2,
    )


def test_loss_is_the_less_the_better_and_the_front_holds_what_speed_alone_would_not(
    tmp_path: Path,
) -> None:
    _, ranking = driven(tmp_path)
    assert {r.config.lora_rank for r in ranking.front} == {8, 16, 32, 64}
    document = {r.number: r.measurement.quality.eval_loss for r in ranking.front}  # type: ignore[union-attr]
    assert document[min(document, key=lambda n: document[n])] == pytest.approx(
        loss_of(TrialConfig(lora_rank=64), 0)
    )


def test_a_fit_without_a_loss_is_on_no_front_and_wins_nothing(tmp_path: Path) -> None:
    _, ranking = driven(tmp_path)
    fastest = max(ranking.front, key=lambda r: r.measurement.tokens_per_second)  # type: ignore[union-attr]
    measured = fastest.measurement
    assert measured is not None
    bare = fastest.model_copy(
        update={"outcome": Measured(measurement=measured.model_copy(update={"quality": None}))}
    )
    records = [bare if r.number == fastest.number else r for r in ranking.records]
    other = rank(records, ranking.definition)
    assert fastest.number not in {r.number for r in other.ranked}
    assert fastest.number not in {r.number for r in other.front}
    assert other.winner is not None


def test_the_few_on_the_front_are_trained_with_further_seeds(tmp_path: Path) -> None:
    _, ranking = driven(tmp_path, confirm=CONFIRM)
    seeded = [r for r in ranking.confirmations.records if r.purpose == "quality"]
    seeds = {r.measurement.quality.seed for r in seeded}  # type: ignore[union-attr]
    assert seeds == {1, 2}
    known = [r.measurement.quality for r in ranking.front]  # type: ignore[union-attr]
    several = [q for q in known if q and q.seeds]
    assert several
    for quality in several:
        assert quality.seeds == (0, 1, 2)
        assert quality.eval_loss_ci95 is not None
        low, high = quality.eval_loss_ci95
        assert low < quality.eval_loss < high
    assert len(seeded) == 2 * len(several)
    winner = ranking.winner
    assert winner is not None
    assert winner.measurement is not None
    assert winner.measurement.quality in several


def test_the_two_that_a_claim_is_judged_over_are_trained_with_further_seeds(
    tmp_path: Path,
) -> None:
    baseline = {"lora_rank": 8, "micro_batch_size": 8, "target_modules": "attention"}
    _, ranking = driven(tmp_path, confirm=CONFIRM, baseline=baseline)
    pair = claimed_pair(ranking.ranked)
    assert pair is not None
    assert [record.config.lora_rank for record in pair] == [16, 64]
    assert all(len(r.measurement.quality.seeds) == 3 for r in pair)  # type: ignore[union-attr]


def test_one_seed_is_enough_where_that_is_asked_for(tmp_path: Path) -> None:
    _, ranking = driven(tmp_path, confirm=CONFIRM | {"quality_seeds": 1})
    assert not [r for r in ranking.confirmations.records if r.purpose == "quality"]


def test_a_loss_over_seeds_is_their_mean_with_students_interval() -> None:
    config = TrialConfig()
    runs = [
        learned(number, config, loss, seed=number, purpose="search" if number == 0 else "quality")
        for number, loss in enumerate([2.0, 2.1, 2.2])
    ]
    (report,) = pooled_qualities(runs[:1], runs[1:]).values()
    assert report.eval_loss == pytest.approx(2.1)
    # Student's 4.303 of two degrees of freedom, times 0.1 / sqrt(3).
    assert report.eval_loss_ci95 == pytest.approx((2.1 - 0.2484, 2.1 + 0.2484), abs=1e-4)


def learned(
    number: int, config: TrialConfig, loss: float, *, seed: int, purpose: str
) -> TrialRecord:
    outcome = Measured(
        measurement=a_measurement(config, quality=a_report(loss, seed=seed).model_dump())
    )
    return TrialRecord.model_validate(
        {"number": number, "config": config, "outcome": outcome, "purpose": purpose}
    )


@pytest.mark.parametrize(("share", "is_stopped"), [(0.45, True), (0.55, False)])
def test_only_what_is_less_than_half_as_fast_goes_untrained(share: float, is_stopped: bool) -> None:
    rival = Rival(TrialConfig(), tokens_per_second=1000.0, peak_allocated_bytes=1)
    progress = Progress(phase="measure", step=6, tokens_per_second_high=1000.0 * share)
    verdict = is_hopeless(
        progress,
        config=TrialConfig(lora_rank=64),
        rivals=[rival],
        objectives=("tokens_per_second", "eval_loss"),
    )
    assert verdict is is_stopped


def test_slow_trials_are_never_stopped_where_loss_alone_is_asked_for() -> None:
    rival = Rival(TrialConfig(), tokens_per_second=1000.0, peak_allocated_bytes=1)
    progress = Progress(phase="measure", step=6, tokens_per_second_high=1.0)
    assert not is_hopeless(
        progress, config=TrialConfig(), rivals=[rival], objectives=("eval_loss",)
    )


def test_a_driver_that_dies_before_the_baseline_has_learned_leaves_no_half_result(
    tmp_path: Path,
) -> None:
    runner, _ = driven(tmp_path)
    first, second, *rest = (request.attempt for request in runner.requests)
    assert first is None, "a result without a loss would be taken over by the next driver"
    assert second is not None
    assert None not in rest
