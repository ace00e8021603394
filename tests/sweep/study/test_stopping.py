from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reports import units
from reports.sentences import stopped_words
from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, InputError
from storage.ranking import rank
from storage.reading import read_study
from storage.records import (
    Crashed,
    Lost,
    Outcome,
    OutOfMemory,
    TimedOut,
    TrialRecord,
    Verdict,
)
from storage.study import OpenStudy
from sweep.sampling.guided import GuidedSampler, Outlook
from sweep.sampling.samplers import make_sampler
from sweep.study.events import StopReason
from sweep.study.stopping import ConsecutiveFailures, Stopping, price_of
from tests.sweep.simulated_device import (
    BUDGET,
    SPACE,
    Exact,
    OneFactor,
    a_definition,
    a_record,
    a_space,
    a_study,
    at_speed,
    best_speed,
    peak_bytes,
    tokens_per_second,
    train,
)
from tests.sweep.study.driven import a_forecaster, drive

RECORDS = [
    a_record(TrialConfig(), number=0, is_baseline=True),
    a_record(TrialConfig(lora_rank=8), number=1),
]


class Physical:
    """Forecasts the simulated GPU's speed, but for a factor common to all."""

    def predict(self, config: TrialConfig) -> float:
        return tokens_per_second(config)

    def physics(self, configs: Sequence[TrialConfig]) -> OneFactor:
        return OneFactor(np.log([1.2 * c.tokens_per_step / self.predict(c) for c in configs]))

    def learn(self, record: TrialRecord) -> None:
        pass


class SmallerIsFaster(Physical):
    """Forecasts that a small rank is half as fast again."""

    def predict(self, config: TrialConfig) -> float:
        return tokens_per_second(config) * (1.5 if config.lora_rank == 8 else 1.0)


def run(
    home: Path, answer: Any = train, speed: Physical | None = None, **changes: Any
) -> tuple[StopReason, OpenStudy]:
    """Run a guided study of the simulated GPU to its end."""
    space = a_space(**changes)
    forecaster = a_forecaster(predictor=Exact(), speed=speed or Physical())
    sampler = make_sampler("guided", space, seed=0, forecaster=forecaster)
    assert isinstance(sampler, GuidedSampler)
    with a_study(home, sampler=sampler, **changes) as study:
        stopping = Stopping(
            space,
            outlook=lambda besides: sampler.outlook(study.study, besides=besides),
            fastest_of=partial(sampler.fastest_of, study.study),
        )
        return drive(study, answer, forecaster=forecaster, stopping=stopping), study


def test_a_guided_study_ends_when_it_knows_and_says_what_is_left(tmp_path: Path) -> None:
    reason, study = run(tmp_path)
    records = study.records()
    assert reason is StopReason.GAIN_SPENT
    assert len(records) < 30
    found = max(r.measurement.tokens_per_second for r in records if r.measurement)
    assert found > 0.98 * best_speed(a_space())
    snapshot = read_study("study", url=f"sqlite:///{tmp_path}/sweep.db", home=tmp_path)
    assert snapshot.ended["reason"] == "gain_spent"
    assert 0 <= snapshot.ended["most_promising"]["gain"] < 0.01
    assert json.loads(json.dumps(snapshot.ended)) == snapshot.ended
    promising = snapshot.ended["most_promising"]
    assert promising["gain_if_better"] == pytest.approx(promising["gain"] / promising["chance"])
    expected = f"is expected to be more than {units.share(promising['gain'])} faster."
    assert stopped_words(snapshot) == f"Stopped: no untested configuration {expected}"


TWO_RANKS: dict[str, Any] = {
    "dimensions": SPACE["dimensions"] | {"lora_rank": {"choices": [8, 16]}},
    "fixed": {"target_modules": "attention"},
}


def two_ranks(config: TrialConfig) -> Outcome:
    is_faster = peak_bytes(config) <= BUDGET and config.lora_rank == 8
    return at_speed(config, 1.5 * tokens_per_second(config)) if is_faster else train(config)


def of_rank(study: OpenStudy, rank: int) -> list[TrialRecord]:
    return [r for r in study.records() if r.config.lora_rank == rank and not r.is_baseline]


def test_the_fastest_of_the_baselines_class_is_measured_too(tmp_path: Path) -> None:
    reason, study = run(tmp_path, two_ranks, SmallerIsFaster(), **TWO_RANKS)
    assert reason is StopReason.GAIN_SPENT
    assert of_rank(study, 8)
    (owed,) = of_rank(study, 16)
    assert owed.number == max(r.number for r in study.records())
    assert owed.verdict is Verdict.FITS
    assert tokens_per_second(owed.config) > 0.99 * best_speed(a_space())


def test_of_the_baselines_class_two_are_tried_at_most(tmp_path: Path) -> None:
    def never(config: TrialConfig) -> Outcome:
        is_lost = config.lora_rank == 16 and config != a_space(**TWO_RANKS).baseline_config()
        return OutOfMemory(stage="forward") if is_lost else two_ranks(config)

    reason, study = run(tmp_path, never, SmallerIsFaster(), **TWO_RANKS)
    assert reason is StopReason.GAIN_SPENT
    assert [r.verdict for r in of_rank(study, 16)] == [Verdict.OOM] * 2


def test_nothing_more_is_owed_where_speed_is_not_asked_for(tmp_path: Path) -> None:
    _, study = run(tmp_path, two_ranks, SmallerIsFaster(), **TWO_RANKS, objectives=["peak_memory"])
    assert not of_rank(study, 16)


def test_a_search_that_measured_the_baselines_class_owes_nothing() -> None:
    space = a_space(**TWO_RANKS)
    small, own = TrialConfig(lora_rank=8), TrialConfig(kernels="liger")
    definition = a_definition(**TWO_RANKS)
    stopping = Stopping(
        space, fastest_of=lambda wanted, measured: own if wanted(own) and not measured else None
    )

    def owed(*records: TrialRecord) -> TrialConfig | None:
        return stopping.still_owed(rank(records, definition))

    won = a_record(small, two_ranks(small), number=1)
    assert owed(RECORDS[0], won) == own
    assert owed(RECORDS[0], won, a_record(own, number=2)) is None
    assert owed(a_record(own, number=2)) is None
    assert owed() is None


def test_a_space_of_one_point_is_tried_once(tmp_path: Path) -> None:
    one = {"dimensions": {"micro_batch_size": {"choices": [4]}}, "fixed": {}}
    reason, study = run(tmp_path, **one)
    assert reason is StopReason.EXHAUSTED
    # What is foreseen to be the fastest goes before the baseline.
    assert [r.config.micro_batch_size for r in study.records()] == [4, 8]


def test_where_nothing_can_fit_a_verdict_says_so_and_the_search_ends(tmp_path: Path) -> None:
    huge = {
        "dimensions": {"micro_batch_size": {"choices": [200, 400, 800]}},
        "fixed": {"seq_len": 4096},
        "baseline": {"micro_batch_size": 300},
    }
    reason, study = run(tmp_path, **huge)
    first, baseline = study.records()
    assert reason is StopReason.GAIN_SPENT
    assert first.verdict is Verdict.PREDICTED_OOM
    assert first.config.micro_batch_size == 200
    assert baseline.is_baseline


def test_a_card_on_which_everything_runs_out_ends_a_search(tmp_path: Path) -> None:
    reason, study = run(tmp_path, lambda _: OutOfMemory(stage="load"))
    assert reason is StopReason.GAIN_SPENT
    assert len(study.records()) < 10


def stops(*gains: float, **changes: Any) -> StopReason | None:
    """Why a search ends by what is to be gained, now and before the last trial."""
    answers = {None: Outlook(gains[0]), 1: Outlook(gains[1])}
    stopping = Stopping(a_space(**changes), outlook=answers.__getitem__)
    return stopping.out_of_trials(2, is_exhausted=lambda: False, records=RECORDS)


@pytest.mark.parametrize(
    ("now", "before", "threshold", "reason"),
    [
        (0.005, 0.005, 0.01, StopReason.GAIN_SPENT),
        (0.005, 0.5, 0.01, None),
        (0.5, 0.005, 0.01, None),
        (0.005, 0.005, 0.001, None),
        (0.005, 0.005, 0, None),
        (0.0, 0.0, 0, None),
    ],
)
def test_a_search_ends_where_two_looks_in_a_row_promise_too_little(
    now: float, before: float, threshold: float, reason: StopReason | None
) -> None:
    assert stops(now, before, stop_below_gain=threshold) is reason


def test_a_limit_in_dollars_needs_a_price(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    assert price_of(a_space(), gpu="no-such-card") is None
    assert price_of(a_space(max_dollars=1), gpu="a10") is not None
    with pytest.raises(InputError, match="no price is known for 'no-such-card'"):
        price_of(a_space(max_dollars=1), gpu="no-such-card")


# Trials that fail by the machine's doing

CRASH = Crashed(phase="build", detail="no kernel image")
TIMEOUT = TimedOut(phase="warmup", detail="no sign of life")
STOPPED = Lost(is_interrupted=True)


def counted(*outcomes: Outcome) -> ConsecutiveFailures:
    failures = ConsecutiveFailures()
    for outcome in outcomes:
        failures.count(outcome)
    return failures


def lacking(cause: Any) -> list[Outcome]:
    phases: tuple[Any, ...] = ("build", "attach", "warmup", "measure", "detach")
    return [Crashed(phase=phase, cause=cause, detail="so it was") for phase in phases]


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([CRASH] * 5, "no kernel image"),
        ([TIMEOUT] * 5, "no sign of life"),
        ([*[CRASH] * 4, STOPPED, CRASH], "model cannot be built"),
        # What the host lacks it lacks in whichever phase, and what to do is said.
        (lacking("host_out_of_memory"), "free -h"),
        (lacking("too_few_descriptors"), "ulimit -n"),
    ],
)
def test_failing_alike_again_and_again_is_the_machines_fault(
    outcomes: list[Outcome], said: str
) -> None:
    failures = counted(*outcomes[:-1])
    with pytest.raises(EnvironmentFault, match=said):
        failures.count(outcomes[-1])


@pytest.mark.parametrize(
    "between", [OutOfMemory(stage="forward"), TIMEOUT, Crashed(phase="measure")]
)
def test_anything_else_in_between_begins_the_count_anew(between: Outcome) -> None:
    assert counted(*[CRASH] * 4, between, *[CRASH] * 4)
    assert not counted(*[STOPPED] * 5)
