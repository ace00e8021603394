"""The spool and the workers' outcome files: what was written comes back, whatever else is there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from storage.directory import OUTCOME_BYTES_MAX, OutcomeFile, Spool
from storage.records import Attempt, Crashed, Lost, Measured, Outcome, OutOfMemory, held_to_budget
from tests.storage.builders import BUDGET, a_record, fits

CONFIG = TrialConfig(micro_batch_size=8)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "runs" / "study" / "spool.jsonl", "one")


@pytest.fixture
def left(tmp_path: Path) -> OutcomeFile:
    return OutcomeFile(tmp_path / "runs" / "study" / "outcome.json")


def attempt(name: str) -> Attempt:
    return Attempt(id=name, study="study", number=0, started_at="2025-01-01T00:00:00+00:00")


def test_a_spool_gives_back_what_it_was_given_of_its_study(spool: Spool) -> None:
    assert spool.read().records == ()
    assert not spool.path.parent.exists()
    records = a_record(0, attempt_id="a"), a_record(1, Lost(), attempt_id="b")
    Spool(spool.path, "earlier").append(a_record(0, fits(9.0)))
    for record in records:
        spool.append(record)
    assert spool.read().records == records


@pytest.mark.parametrize("torn", [b'{"study": "one", "rec', b"\0\0\0\0", b"\xff\xfe"])
def test_a_torn_last_line_is_ignored_and_does_not_spoil_the_next_result(
    spool: Spool, torn: bytes
) -> None:
    spool.append(a_record(0, attempt_id="a"))
    with spool.path.open("ab") as file:
        file.write(torn)
    assert ([record.number for record in spool.read().records], spool.read().problems) == ([0], ())
    spool.append(a_record(1, attempt_id="b"))
    assert [record.number for record in spool.read().records] == [0, 1]


def test_a_last_line_that_lacks_its_end_alone_is_a_result_and_stays_one(spool: Spool) -> None:
    spool.append(a_record(0, attempt_id="a"))
    spool.path.write_bytes(spool.path.read_bytes().removesuffix(b"\n"))
    assert [record.number for record in spool.read().records] == [0]
    spool.append(a_record(1, attempt_id="b"))
    assert [record.number for record in spool.read().records] == [0, 1]


def test_a_place_that_cannot_be_written_is_a_fault_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(EnvironmentFault, match=r"runs/spool\.jsonl"):
        Spool(tmp_path / "runs" / "spool.jsonl", "one").append(a_record(0))
    with pytest.raises(EnvironmentFault, match=r"runs/outcome\.json"):
        OutcomeFile(tmp_path / "runs" / "outcome.json").write(attempt("one"), CONFIG, fits())


@pytest.mark.parametrize(
    "outcome", [fits(), OutOfMemory(stage="backward", step=3), Crashed(phase="attach", detail="x")]
)
def test_the_last_outcome_is_taken_by_its_attempt_and_configuration_alone(
    left: OutcomeFile, outcome: Outcome
) -> None:
    left.write(attempt("one"), CONFIG, fits())
    left.write(attempt("two"), CONFIG, outcome)
    for _ in range(2):
        assert left.take("two", CONFIG) == outcome
    assert left.take("one", CONFIG) is None
    assert left.take("two", TrialConfig(micro_batch_size=4)) is None
    assert [path.name for path in left.path.parent.iterdir()] == ["outcome.json"]
    assert left.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"attempt": "one"}',
        b'{"attempt": "one", "config": {"wheels": 4}, "outcome": {}}',
        b'{"attempt": "one", "pad": "' + b"x" * OUTCOME_BYTES_MAX + b'"}',
    ],
    ids=lambda content: repr(content[:20]),
)
def test_what_is_no_outcome_is_none(left: OutcomeFile, content: bytes) -> None:
    left.path.parent.mkdir(parents=True)
    left.path.write_bytes(content)
    assert left.take("one", CONFIG) is None


def test_an_outcome_of_a_later_version_is_none(left: OutcomeFile) -> None:
    left.write(attempt("one"), CONFIG, fits())
    entry = json.loads(left.path.read_text())
    entry["outcome"]["verdict"] = "melted"
    left.path.write_text(json.dumps(entry))
    assert left.take("one", CONFIG) is None


def test_a_directory_a_pipe_or_a_link_in_its_place_is_none_and_never_written_through(
    left: OutcomeFile, tmp_path: Path
) -> None:
    left.path.mkdir(parents=True)
    assert left.take("one", CONFIG) is None
    left.path.rmdir()
    os.mkfifo(left.path)
    assert left.take("one", CONFIG) is None
    left.path.unlink()
    elsewhere = OutcomeFile(tmp_path / "planted.json")
    elsewhere.write(attempt("one"), CONFIG, fits())
    left.path.symlink_to(elsewhere.path)
    assert left.take("one", CONFIG) is None
    left.write(attempt("two"), CONFIG, fits(2.0))
    assert left.take("two", CONFIG) == fits(2.0)
    assert elsewhere.take("one", CONFIG) == fits()


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_that_is_no_positive_number_is_a_failure_and_no_fit(speed: float) -> None:
    measured = fits().measurement.model_copy(update={"tokens_per_second": speed})
    outcome = held_to_budget(Measured(measurement=measured), budget_bytes=BUDGET)
    assert isinstance(outcome, Crashed)
    assert "no positive number" in outcome.detail
