"""A study that asks what its configurations learn: on which tokens, which of them, how often."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.confirmations import loss_difference, pooled_qualities
from qlora_sweep.storage.ranking import Ranking, rank
from qlora_sweep.storage.records import Measured, Outcome, QualityReport, TrialRecord
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.running.runner import Observer, keep_going
from qlora_sweep.sweep.running.wire import QualityCommand, TrialRequest
from qlora_sweep.sweep.study.driver import default_tokens
from tests.storage.builders import a_quality, an_epoch, changed
from tests.sweep.simulated_device import a_measurement, a_record, at_speed
from tests.sweep.study.driven import a_grid, drive

CONFIRM = {"seconds": 60.0, "repeats": 2, "soak_seconds": 0.0}
SPACE: dict[str, Any] = {
    "dimensions": {"lora_rank": [8, 16, 32, 64]},
    "fixed": {"kernels": "liger", "target_modules": "attention", "micro_batch_size": 8},
    "objectives": ["tokens_per_second", "eval_loss"],
    "weights": "pretrained",
    "data": {"texts": "mine.jsonl"},
    "trials": 6,
    "confirm": False,
}


def loss_of(rank: int, seed: int) -> float:
    """Falls with the rank, and moves with the seed by less than that."""
    return 2.0 - 0.05 * math.log2(rank) + 0.002 * math.sin(7 * seed + rank)


class Learning(ReplayRunner):
    """A device that is slower for larger adapters, and says what they learn."""

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        outcome = super().run(request, observe=observe)
        command = request.quality
        if command is None or not isinstance(outcome, Measured):
            return outcome
        loss = loss_of(request.config.lora_rank, command.seed)
        quality = {"quality": a_quality(loss, seed=command.seed)}
        return Measured(measurement=outcome.measurement.model_copy(update=quality))


def slower_by_rank(config: TrialConfig) -> Outcome:
    return at_speed(config, config.tokens_per_step / (0.3 * (1 + config.lora_rank / 400)))


def qualities(runner: ReplayRunner) -> list[QualityCommand | None]:
    return [request.quality for request in runner.requests]


def driven(home: Path, speed: Any = slower_by_rank, **space: Any) -> tuple[Learning, Ranking]:
    runner = Learning(otherwise=speed)
    with a_grid(home, **(SPACE | space)) as study:
        drive(study, runner)
        return runner, rank(study.records(), study.definition, study.confirmations())


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Learning, Ranking]:
    return driven(tmp_path_factory.mktemp("searched"))


@pytest.fixture(scope="module")
def confirmed(tmp_path_factory: pytest.TempPathFactory) -> Ranking:
    return driven(tmp_path_factory.mktemp("confirmed"), confirm=CONFIRM)[1]


def test_every_trial_learns_from_as_much_as_the_baseline_takes_a_minute_for(searched: Any) -> None:
    runner, ranking = searched
    first, second, *rest = qualities(runner)
    assert first is None
    assert runner.ran[0] == runner.ran[1] == ranking.definition.space.baseline_config()
    speed = ranking.baseline.measurement.tokens_per_second
    assert second.tokens == pytest.approx(60 * speed, rel=0.1)
    # The same tokens in the same order.
    assert {(c.tokens, c.seed, c.eval_seq_len) for c in (second, *rest)} == {
        (second.tokens, second.seed, second.eval_seq_len)
    }
    assert all(r.measurement.quality for r in ranking.records if r.verdict == "fits")
    # A result without a loss would be taken over by the next driver.
    half, *whole = (request.attempt for request in runner.requests)
    assert half is None
    assert None not in whole


def test_tokens_are_as_named_or_as_the_study_chose_before(tmp_path: Path) -> None:
    data = {"texts": "mine.jsonl", "quality_tokens": 12_345}
    runner, _ = driven(tmp_path / "named", data=data)
    assert {c.tokens for c in qualities(runner)} == {12_345}
    first, _ = driven(tmp_path / "chosen", trials=2)
    later, _ = driven(tmp_path / "chosen", lambda config: at_speed(config, 123.0))
    assert {c.tokens for c in qualities(later)} == {qualities(first)[1].tokens}


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
def test_a_minute_or_an_epoch(speed: float, loss_tokens: int | None, tokens: int) -> None:
    epoch = None
    if loss_tokens is not None:
        most = 2 * loss_tokens
        epoch = an_epoch(tokens=most, padded_tokens=most, loss_tokens=loss_tokens)
    assert default_tokens(speed, epoch) == tokens


def test_the_front_holds_what_speed_alone_would_not(searched: Any) -> None:
    _, ranking = searched
    assert {r.config.lora_rank for r in ranking.front} == {8, 16, 32, 64}
    least = min(ranking.front, key=lambda r: r.measurement.quality.eval_loss)
    assert least.measurement.quality.eval_loss == pytest.approx(loss_of(64, 0))


def blocks(losses: Any) -> dict[str, Any]:
    """Return what a report says of held-out examples of these losses, ten tokens each."""
    return {"eval_rows": len(losses), "eval_blocks": [(float(loss), 10) for loss in losses]}


@pytest.mark.parametrize(
    ("rows", "front"),
    [pytest.param(6, {8}, id="six decide nothing"), pytest.param(2000, {8, 16, 32, 64}, id="many")],
)
def test_a_loss_that_the_held_out_examples_do_not_tell_from_the_lowest_counts_as_the_lowest(
    rows: int, front: set[int], searched: Any
) -> None:
    noise = np.random.default_rng(5).normal(size=(65, rows))

    def learned(record: TrialRecord) -> TrialRecord:
        quality = record.measurement.quality
        spread = noise[0] + 0.35 * noise[record.config.lora_rank]
        losses = quality.eval_loss + spread - spread.mean()
        learned_now = QualityReport.model_validate(quality.model_dump() | blocks(losses))
        measured = changed(record.measurement, quality=learned_now)
        return changed(record, outcome=Measured(measurement=measured))

    _, ranking = searched
    records = [learned(r) if r.measurement else r for r in ranking.records]
    ranked = rank([r for r in records if r.measurement.quality], ranking.definition)
    assert {record.config.lora_rank for record in ranked.front} == front


def test_the_interval_of_a_difference_holds_it_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    held = []
    for _ in range(300):
        dataset = random.normal(2.0, 0.5, 64)
        one, other = (dataset + by + random.normal(0, 0.05, 64) for by in (0.02, 0.0))
        reports = [a_quality().model_copy(update=blocks(losses)) for losses in (one, other)]
        low, high = loss_difference(*reports)
        held.append(low <= 0.02 <= high)
        assert (low, high) == loss_difference(*reports)
    assert 0.91 <= np.mean(held) <= 0.985


def test_the_few_on_the_front_are_trained_with_further_seeds(confirmed: Ranking) -> None:
    seeded = [r for r in confirmed.confirmations.records if r.purpose == "quality"]
    assert {r.measurement.quality.seed for r in seeded} == {1, 2}
    several = [q for r in confirmed.front if (q := r.measurement.quality).seeds]
    assert several
    for quality in several:
        assert quality.seeds == (0, 1, 2)
        low, high = quality.eval_loss_ci95
        assert low < quality.eval_loss < high
    assert len(seeded) == 2 * len(several)
    assert confirmed.winner.measurement.quality in several


def test_a_loss_over_seeds_is_their_mean_with_students_interval() -> None:
    def learned(seed: int, loss: float) -> TrialRecord:
        measured = a_measurement(TrialConfig(), quality=a_quality(loss, seed=seed).model_dump())
        purpose = "quality" if seed else "search"
        outcome = Measured(measurement=measured)
        return a_record(TrialConfig(), outcome, number=seed, purpose=purpose)

    runs = [learned(seed, loss) for seed, loss in enumerate([2.0, 2.1, 2.2])]
    (report,) = pooled_qualities(runs[:1], runs[1:]).values()
    assert report.eval_loss == pytest.approx(2.1)
    # Student's 4.303 of two degrees of freedom, times 0.1 / sqrt(3).
    assert report.eval_loss_ci95 == pytest.approx((2.1 - 0.2484, 2.1 + 0.2484), abs=1e-4)
