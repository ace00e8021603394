"""What Optuna is told of a trial, what a study is about, and what its ledger says of all."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from importlib import metadata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from qlora_sweep.search_spaces.config import CONFIG_KEYS, TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.space import Objective
from qlora_sweep.storage.codec import (
    FAULT_VIOLATION,
    LEAST_VIOLATION,
    OptunaResult,
    directions,
    to_optuna,
)
from qlora_sweep.storage.definition import differences
from qlora_sweep.storage.environment import PACKAGES, fingerprint
from qlora_sweep.storage.ledger import MAX_ATTEMPTS, TrialLedger, attempts, next_number
from qlora_sweep.storage.records import (
    RETRYABLE,
    Carried,
    Crashed,
    Diverged,
    DominatedOutOfMemory,
    Ineffective,
    Invalid,
    Lost,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    PrunedSlow,
    RunKind,
    TimedOut,
    TrialRecord,
)
from tests.storage.builders import BUDGET, a_definition, a_measurement, a_record, fits

ALL: tuple[Objective, ...] = ("tokens_per_second", "peak_memory", "trainable_parameters")
SINGLE: tuple[Objective, ...] = ("tokens_per_second",)
PREDICTION = PredictionRecord(peak_allocated_bytes=30 * GIB, peak_reserved_bytes=31 * GIB)


def optuna_result(record: TrialRecord, *, objectives: tuple[Objective, ...]) -> OptunaResult:
    return to_optuna(record, objectives=objectives, budget_bytes=BUDGET)


def ran_out(peak_gib: int | None = None) -> OutOfMemory:
    peak = None if peak_gib is None else peak_gib * GIB
    # The peak and the failed request need not have been there at once: their sum bounds nothing.
    return OutOfMemory(stage="forward", peak_allocated_bytes=peak, requested_bytes=6 * GIB)


UNFIT: list[tuple[Outcome, float, float]] = [
    # outcome, peak in GiB that it is told with, violation
    (ran_out(), 20.0, LEAST_VIOLATION),
    (ran_out(19), 20.0, LEAST_VIOLATION),
    (ran_out(25), 25.0, 0.25),
    (PredictedOutOfMemory(predicted_bytes=40 * GIB), 40.0, 1.0),
    (DominatedOutOfMemory(by=3), 20.0, LEAST_VIOLATION),
    (Diverged(step=1), 20.0, FAULT_VIOLATION),
    (Invalid(rule="r"), 20.0, FAULT_VIOLATION),
    (Ineffective(setting="compile"), 20.0, FAULT_VIOLATION),
]


@pytest.mark.parametrize(
    ("outcome", "values", "violation"),
    [
        (fits(1234.5, peak=15 * GIB), (1234.5, 15.0, 1000.0), -0.25),
        (PrunedSlow(measurement=a_measurement(500.0)), (500.0, 10.0, 1000.0), -0.5),
        # What does not count is told with the worst finite values.
        *((outcome, (0.0, peak, 0.0), violation) for outcome, peak, violation in UNFIT),
    ],
)
def test_a_trial_of_several_objectives_is_told_with_all_of_them(
    outcome: Outcome, values: tuple[float, ...], violation: float
) -> None:
    told = optuna_result(a_record(outcome=outcome), objectives=ALL)
    assert (told.state, told.values, told.violation) == (TrialState.COMPLETE, values, violation)
    assert told.intermediate is None
    assert directions(ALL) == ["maximize", "minimize", "maximize"]
    if isinstance(outcome, OutOfMemory | DominatedOutOfMemory):
        # Where memory was predicted the violation grows with it.
        predicted = a_record(outcome=outcome, prediction=PREDICTION)
        assert optuna_result(predicted, objectives=SINGLE).violation == 0.5


def test_a_slow_trial_is_pruned_where_there_is_one_objective() -> None:
    told = optuna_result(
        a_record(outcome=PrunedSlow(measurement=a_measurement(500.0))), objectives=SINGLE
    )
    assert (told.state, told.values) == (TrialState.PRUNED, None)
    assert told.intermediate == (6, 500.0)
    assert told.violation <= 0


@pytest.mark.parametrize("outcome", [TimedOut(phase="build"), Crashed(phase="build"), Lost()])
def test_a_trial_that_may_be_retried_is_failed(outcome: Outcome) -> None:
    told = optuna_result(a_record(outcome=outcome), objectives=ALL)
    assert (told.state, told.values) == (TrialState.FAIL, None)
    assert told.violation > 0


@pytest.mark.parametrize("outcome", [fits(), *(row[0] for row in UNFIT), Lost()])
def test_what_a_person_sees_in_the_dashboard_is_short_and_the_record_is_whole(
    outcome: Outcome,
) -> None:
    record = a_record(7, outcome, is_baseline=True, prediction=PREDICTION)
    attributes = json.loads(json.dumps(optuna_result(record, objectives=SINGLE).attributes))
    assert TrialRecord.model_validate(attributes["record"]) == record
    assert attributes["verdict"] == record.verdict
    assert attributes.get("peak_gib") == (10.0 if record.measurement else None)
    assert all(math.isfinite(v) for v in attributes.values() if isinstance(v, float))


# What a study is about, and where it ran


@pytest.mark.parametrize("key", sorted(set(CONFIG_KEYS) - {"micro_batch_size"}))
def test_a_setting_that_is_written_out_with_the_recipes_value_is_no_difference(key: str) -> None:
    recipe = TrialConfig().model_dump(mode="json")
    left_out, written = a_definition(), a_definition(fixed={key: recipe[key]})
    assert differences(left_out, written) == differences(written, left_out) == ()
    other = a_definition(fixed={"adapter_dtype": "bf16"})
    assert differences(left_out, other) == ('fixed.adapter_dtype: "fp32" -> "bf16"',)


def test_a_fingerprint_is_plain_json_with_a_version_for_every_package() -> None:
    found = fingerprint(device="cpu")
    assert json.loads(json.dumps(found)) == found
    assert set(found["versions"]) == set(PACKAGES)
    assert found["versions"]["optuna"] == metadata.version("optuna")
    assert found["python"] == platform.python_version()
    assert (found["cores"] >= 1, bool(found["cpu"])) == (True, True)
    assert (found["gpu"], found["driver"], found["cuda_driver"]) == (None, None, None)
    known = fingerprint(device="cuda", gpu="NVIDIA GB10", driver="580.1")
    assert (known["gpu"], known["driver"], known["cuda_driver"]) == ("NVIDIA GB10", "580.1", None)


CRASH: Outcome = Crashed(phase="build")
INTERRUPTED: Outcome = Lost(detail="somebody asked", is_interrupted=True)
OUTCOMES = (fits(), OutOfMemory(stage="forward"), CRASH, TimedOut(phase="warmup"), Lost())
HERE = Carried(study="other", identity="f00d", number=3)


@st.composite
def trials(draw: st.DrawFn) -> list[TrialRecord]:
    """Trials in the order in which they are told: late ones have a lower number."""
    numbers = draw(st.lists(st.integers(0, 30), max_size=25))
    return [
        a_record(
            number,
            draw(st.sampled_from(OUTCOMES)),
            batch=draw(st.sampled_from((1, 2, 3))),
            purpose=(purpose := draw(st.sampled_from(("search", "search", "search", "confirm")))),
            series=int(purpose != "search"),
            carried=draw(st.sampled_from((None, None, HERE))),
            device_seconds=draw(st.sampled_from((0.0, 1.5))),
        )
        for number in numbers
    ]


def to_retry(records: Sequence[TrialRecord], *, since: int = 0) -> tuple[TrialConfig, ...]:
    """What never concluded and was tried fewer than three times, by looking at all trials."""
    concluded = {r.config for r in records if r.verdict not in RETRYABLE}
    never = dict.fromkeys(r.config for r in records if r.config not in concluded)
    return tuple(c for c in never if attempts(records, c, since=since) < MAX_ATTEMPTS)


def spent_of(records: Sequence[TrialRecord], *, since: int) -> int:
    """All trials but those that are tried again; what failed to the last counts once."""
    known = [record for record in records if record.carried is None]
    concluded = {record.config for record in known if record.verdict not in RETRYABLE}
    failed = {record.config for record in known} - concluded
    final = sum(record.verdict not in RETRYABLE for record in known)
    return final + len(failed) - len(to_retry(known, since=since))


@settings(max_examples=200, deadline=None)
@given(told=trials(), since=st.integers(0, 20), loaded=st.integers(0, 25))
def test_a_ledger_says_of_any_sequence_of_trials_what_looking_at_all_of_them_says(
    told: list[TrialRecord], since: int, loaded: int
) -> None:
    ledger = TrialLedger(told[:loaded])
    for record in told[loaded:]:
        ledger.add(record)
    last = {record.number: record for record in told}
    known = [last[number] for number in sorted(last)]
    searched = tuple(record for record in known if record.purpose == "search")
    assert ledger.all == tuple(known)
    assert ledger.records == searched
    assert ledger.confirmations == tuple(r for r in known if r.purpose != "search")
    confirming = RunKind(purpose="confirm", series=1)
    assert ledger.next_number == next_number(searched)
    assert ledger.to_retry(since=since) == to_retry(searched, since=since)
    assert ledger.trials_spent(since=since) == spent_of(searched, since=since)
    for batch in (1, 2, 3, 4):
        config = TrialConfig(micro_batch_size=batch)
        assert (config in ledger) == any(record.config == config for record in searched)
        assert ledger.attempts(config, confirming) == attempts(ledger.confirmations, config)


@pytest.mark.parametrize(
    ("outcomes", "is_retried"),
    [
        ([Lost()], True),
        ([CRASH, TimedOut(phase="warmup")], True),
        ([CRASH, CRASH, CRASH], False),
        ([CRASH, fits()], False),
        ([INTERRUPTED] * 20, True),
        ([CRASH, INTERRUPTED, CRASH, INTERRUPTED, CRASH], False),
    ],
)
def test_what_came_to_nothing_is_tried_three_times_at_most(
    outcomes: list[Outcome], is_retried: bool
) -> None:
    records = [a_record(number, outcome) for number, outcome in enumerate(outcomes)]
    assert bool(TrialLedger(records).to_retry()) == is_retried


@pytest.mark.parametrize(
    ("outcome", "seconds", "is_retried"),
    [(CRASH, 1.0, True), (Lost(), 1.0, True), (Lost(), 0.0, False), (fits(), 1.0, False)],
    ids=["crashed", "lost", "took its driver along", "settled"],
)
def test_a_new_run_tries_anew_what_failed_in_the_last(
    outcome: Outcome, seconds: float, is_retried: bool
) -> None:
    records = [a_record(number, outcome, device_seconds=seconds) for number in range(3)]
    assert bool(TrialLedger(records).to_retry(since=next_number(records))) is is_retried
    assert not TrialLedger(records).to_retry()
