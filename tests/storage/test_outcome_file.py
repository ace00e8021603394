from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from storage.directory import OUTCOME_BYTES_MAX, OutcomeFile
from storage.records import Attempt, Crashed, Outcome, OutOfMemory
from tests.storage.builders import fits

CONFIG = TrialConfig(micro_batch_size=8)


def attempt(name: str) -> Attempt:
    return Attempt(id=name, study="study", number=0, started_at="2025-01-01T00:00:00+00:00")


@pytest.fixture
def left(tmp_path: Path) -> OutcomeFile:
    return OutcomeFile(tmp_path / "runs" / "study" / "outcome.json")


@pytest.mark.parametrize(
    "outcome", [fits(), OutOfMemory(stage="backward", step=3), Crashed(phase="attach", detail="x")]
)
def test_an_outcome_is_taken_as_it_was_left_as_often_as_it_is_asked_for(
    left: OutcomeFile, outcome: Outcome
) -> None:
    left.write(attempt("one"), CONFIG, outcome)
    assert left.take("one", CONFIG) == outcome
    assert left.take("one", CONFIG) == outcome


def test_another_attempt_or_configuration_takes_nothing(left: OutcomeFile) -> None:
    assert left.take("one", CONFIG) is None
    left.write(attempt("one"), CONFIG, fits())
    assert left.take("two", CONFIG) is None
    assert left.take("one", TrialConfig(micro_batch_size=4)) is None


def test_only_the_last_outcome_is_kept_and_for_the_user_alone(left: OutcomeFile) -> None:
    for name in ("one", "two"):
        left.write(attempt(name), CONFIG, fits())
    assert left.take("one", CONFIG) is None
    assert left.take("two", CONFIG) == fits()
    assert [path.name for path in left.path.parent.iterdir()] == ["outcome.json"]
    assert left.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"\xff\xfe",
        b"null",
        b"[]",
        b"[" * 100_000,
        b'{"attempt": "one"}',
        b'{"attempt": "one", "config": {}, "outcome": {"verdict": "crashed", "phase": "run"}}',
        b'{"attempt": "one", "config": {"wheels": 4}, "outcome": {}}',
        b"1" * 5000,
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


def test_a_directory_a_pipe_or_a_link_in_its_place_is_none(
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


def test_writing_replaces_a_planted_link_and_never_what_it_leads_to(
    left: OutcomeFile, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    left.path.parent.mkdir(parents=True)
    left.path.symlink_to(victim)
    left.write(attempt("one"), CONFIG, fits())
    assert victim.read_text() == "mine"
    assert left.take("one", CONFIG) == fits()


def test_a_place_that_cannot_be_written_is_a_fault_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(EnvironmentFault, match=r"runs/outcome\.json"):
        OutcomeFile(tmp_path / "runs" / "outcome.json").write(attempt("one"), CONFIG, fits())
