from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.config import TrialConfig
from storage.ledger import MAX_ATTEMPTS, Ledger, attempts, next_number
from storage.records import (
    RETRYABLE,
    Carried,
    Crashed,
    Errand,
    Lost,
    Outcome,
    OutOfMemory,
    TimedOut,
    TrialRecord,
)
from tests.storage.builders import a_record, fits

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
    ledger = Ledger(told[:loaded])
    for record in told[loaded:]:
        ledger.add(record)
    last = {record.number: record for record in told}
    known = [last[number] for number in sorted(last)]
    searched = tuple(record for record in known if record.purpose == "search")
    assert ledger.all == tuple(known)
    assert ledger.records == searched
    assert ledger.confirmations == tuple(r for r in known if r.purpose != "search")
    assert ledger.on_errand(Errand(purpose="confirm", series=1)) == ledger.confirmations
    assert ledger.next_number == next_number(searched)
    assert ledger.to_retry(since=since) == to_retry(searched, since=since)
    assert ledger.trials_spent(since=since) == spent_of(searched, since=since)
    for batch in (1, 2, 3, 4):
        config = TrialConfig(micro_batch_size=batch)
        assert (config in ledger) == any(record.config == config for record in searched)


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
    assert bool(Ledger(records).to_retry()) == is_retried


@pytest.mark.parametrize(
    ("outcome", "seconds", "is_retried"),
    [(CRASH, 1.0, True), (Lost(), 1.0, True), (Lost(), 0.0, False), (fits(), 1.0, False)],
    ids=["crashed", "lost", "took its driver along", "settled"],
)
def test_a_new_run_tries_anew_what_failed_in_the_last(
    outcome: Outcome, seconds: float, is_retried: bool
) -> None:
    records = [a_record(number, outcome, device_seconds=seconds) for number in range(3)]
    assert bool(Ledger(records).to_retry(since=next_number(records))) is is_retried
    assert not Ledger(records).to_retry()
