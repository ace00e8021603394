from __future__ import annotations

from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from storage.directory import Spool
from storage.ledger import Ledger, attempts, next_number
from storage.records import Crashed, Lost, Measured, Outcome, OutOfMemory, TimedOut, held_to_budget
from tests.storage.builders import BUDGET, a_record, fits


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "runs" / "study" / "spool.jsonl", "one")


def test_a_spool_gives_back_what_it_was_given(spool: Spool) -> None:
    records = a_record(0, attempt_id="a"), a_record(1, Lost(), attempt_id="b")
    for record in records:
        spool.append(record)
    assert spool.read().records == records


def test_a_spool_that_was_never_written_is_empty_and_stays_away(spool: Spool) -> None:
    assert spool.read().records == ()
    assert not spool.path.parent.exists()


@pytest.mark.parametrize("torn", [b'{"study": "one", "rec', b"\0\0\0\0", b"\xff\xfe"])
def test_a_torn_last_line_is_ignored_and_does_not_spoil_the_next_result(
    spool: Spool, torn: bytes
) -> None:
    spool.append(a_record(0, attempt_id="a"))
    with spool.path.open("ab") as file:
        file.write(torn)
    assert [record.number for record in spool.read().records] == [0]
    spool.append(a_record(1, attempt_id="b"))
    assert [record.number for record in spool.read().records] == [0, 1]


def test_results_of_an_earlier_study_of_the_same_name_are_not_this_ones(spool: Spool) -> None:
    Spool(spool.path, "earlier").append(a_record(0, fits(9.0)))
    spool.append(a_record(1))
    assert [record.number for record in spool.read().records] == [1]


def test_a_spool_that_cannot_be_written_is_a_fault_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(EnvironmentFault, match=r"runs/spool\.jsonl"):
        Spool(tmp_path / "runs" / "spool.jsonl", "one").append(a_record(0))


CRASH: Outcome = Crashed(phase="build")
INTERRUPTED: Outcome = Lost(detail="somebody asked", is_interrupted=True)


@pytest.mark.parametrize(
    ("outcomes", "is_retried"),
    [
        ([], False),
        ([Lost()], True),
        ([CRASH, TimedOut(phase="warmup")], True),
        ([CRASH, CRASH, CRASH], False),
        ([CRASH, fits()], False),
        ([OutOfMemory(stage="load"), CRASH], False),
        ([INTERRUPTED] * 20, True),
        ([CRASH, INTERRUPTED, INTERRUPTED, CRASH], True),
        ([CRASH, INTERRUPTED, CRASH, INTERRUPTED, CRASH], False),
    ],
)
def test_what_came_to_nothing_is_tried_three_times_at_most(
    outcomes: list[Outcome], is_retried: bool
) -> None:
    records = [a_record(number, outcome) for number, outcome in enumerate(outcomes)]
    assert bool(Ledger(records).to_retry()) == is_retried


def test_configurations_are_retried_in_the_order_in_which_they_were_first_tried() -> None:
    records = [a_record(i, CRASH, batch=batch) for i, batch in enumerate((8, 2, 4, 8))]
    assert [config.micro_batch_size for config in Ledger(records).to_retry()] == [8, 2, 4]
    assert attempts(records, TrialConfig(micro_batch_size=8)) == 2


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


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_what_was_interrupted_is_no_attempt_however_often_and_however_early(seconds: float) -> None:
    records = [a_record(number, INTERRUPTED, device_seconds=seconds) for number in range(9)]
    assert attempts(records, records[0].config) == 0
    assert Ledger(records).to_retry(since=next_number(records)) == (records[0].config,)


def test_numbers_go_on_where_the_records_end() -> None:
    assert next_number([]) == 0
    assert next_number([a_record(4), a_record(2)]) == 5


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_no_positive_number_is_a_failure_and_no_fit(speed: float) -> None:
    measured = fits().measurement.model_copy(update={"tokens_per_second": speed})
    outcome = held_to_budget(Measured(measurement=measured), budget_bytes=BUDGET)
    assert isinstance(outcome, Crashed)
    assert "no positive number" in outcome.detail
