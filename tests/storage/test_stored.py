"""A database from elsewhere: what of it cannot be read is said of the one study and trial."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.storage.codec import FORMAT_WRITTEN
from qlora_sweep.storage.definition import StudySnapshot, UnreadableStudy
from qlora_sweep.storage.reading import list_studies, read_study, shown_storage
from qlora_sweep.storage.records import OutOfMemory, RunKind
from tests.storage.builders import DISTRIBUTIONS, a_record, begun, fits, open_it, run_one

DAMAGED = 2
"""The trial that is damaged: the fastest, so that it would be missed."""
SPEEDS = (1000.0, 1100.0, 2000.0, 900.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with two studies of four trials that ended and one that runs."""
    home = tmp_path_factory.mktemp("whole")
    url = f"sqlite:///{home}/sweep.db"
    for name in ("mine", "other"):
        with open_it(url, home, name=name) as study:
            for speed, batch in zip(SPEEDS, (1, 2, 4, 8), strict=True):
                run_one(study, fits(speed), batch=batch)
            trial = study.ask(DISTRIBUTIONS)
            record = study.records()[0]
            study.begin(trial, record.config, "2025-01-01T00:00:00+00:00")
    return home / "sweep.db"


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "sweep.db"
    copy.write_bytes(whole.read_bytes())
    return copy


def change(path: Path, statement: str, *values: Any) -> int:
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, values).rowcount


def the_study(path: Path, name: str = "mine") -> StudySnapshot:
    return read_study(name, url=f"sqlite:///{path}", home=path.parent)


OF_TRIAL = (
    "trial_id = (SELECT trial_id FROM trials JOIN studies USING (study_id) "
    "WHERE study_name = 'mine' AND number = ?)"
)


def put(path: Path, key: str, text: Any, *, number: int = DAMAGED) -> None:
    """Write an attribute of a trial by hand."""
    query = f"UPDATE trial_user_attributes SET value_json = ? WHERE key = ? AND {OF_TRIAL}"
    assert change(path, query, text, key, number) == 1


def stored_text(path: Path, key: str, *, number: int = DAMAGED) -> Any:
    query = f"SELECT value_json FROM trial_user_attributes WHERE key = ? AND {OF_TRIAL}"
    with closing(sqlite3.connect(path)) as connection:
        (text,) = connection.execute(query, (key, number)).fetchone()
    return json.loads(text)


def configured(record: dict[str, Any], **changes: Any) -> Any:
    return record | {"config": record["config"] | changes}


def measured(record: dict[str, Any], **changes: Any) -> Any:
    outcome = record["outcome"]
    return record | {"outcome": outcome | {"measurement": outcome["measurement"] | changes}}


UNSOUND: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an unknown verdict": (
        lambda r: r | {"outcome": {"verdict": "melted"}},
        "outcome has an unknown 'verdict': 'melted'",
    ),
    "a newer configuration": (lambda r: configured(r, lora_colour="red"), "unknown key 'lora_col"),
    "the result of another trial": (lambda r: r | {"number": 0}, "is of trial 0"),
    "a rank beyond bounds": (lambda r: configured(r, lora_rank=10**300), "lora_rank"),
    "a negative peak": (lambda r: measured(r, peak_allocated_bytes=-1), "peak_allocated_bytes"),
}


ROWS: dict[str, tuple[str, str]] = {
    "text that is cut": (
        "UPDATE trial_user_attributes SET value_json = '{\"a' WHERE key = 'record' AND ",
        "Unterminated",
    ),
    "an unknown distribution": (
        'UPDATE trial_params SET distribution_json = \'{"name": "X"}\' WHERE ',
        "distribution",
    ),
    "a choice that is none": ("UPDATE trial_params SET param_value = 99 WHERE ", "cannot be read"),
}
"""What Optuna itself cannot read."""


@pytest.mark.parametrize("what", [*UNSOUND, *ROWS])
def test_an_unsound_trial_is_left_out_and_run_again_and_the_others_stay(
    what: str, path: Path
) -> None:
    if what in ROWS:
        query, words = ROWS[what]
        assert change(path, query + OF_TRIAL, DAMAGED)
    else:
        how, words = UNSOUND[what]
        put(path, "record", json.dumps(how(stored_text(path, "record"))))
    mine = the_study(path)
    assert DAMAGED not in [record.number for record in mine.records]
    assert len(mine.records) == 3
    assert any(re.search(f"trial {DAMAGED}: .*({words})", said) for said in mine.warnings)
    with open_it(f"sqlite:///{path}", path.parent, name="mine") as study:
        assert len(study.records()) == 3
        # What a sampler reads.
        assert len(study.study.get_trials(states=(TrialState.COMPLETE,))) == 3
        study.recover()
        assert TrialConfig(micro_batch_size=4) not in study.ledger
        run_one(study, batch=4)
    assert [record.number for record in the_study(path).records] == [0, 1, 3, 4, 5]


def test_a_malformed_time_is_a_fault_of_the_database(path: Path) -> None:
    change(path, f"UPDATE trials SET datetime_start = 'next week' WHERE {OF_TRIAL}", DAMAGED)
    with pytest.raises(EnvironmentFault, match=r"next week.*put a copy in its place"):
        the_study(path)


def test_a_study_without_runs_is_read(path: Path) -> None:
    of_study("runs", "[]")(path)
    assert (the_study(path).environment, len(the_study(path).records)) == ({}, 4)


def test_a_trial_that_was_never_begun_is_no_trial_and_no_fault(path: Path) -> None:
    change(path, f"DELETE FROM trial_user_attributes WHERE {OF_TRIAL}", 4)
    for state in ("RUNNING", "WAITING", "FAIL"):
        change(path, f"UPDATE trials SET state = ? WHERE {OF_TRIAL}", state, 4)
        assert (the_study(path).running, len(the_study(path).records)) == ((), 4)


def of_study(key: str, text: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        query = (
            "UPDATE study_user_attributes SET value_json = ? WHERE key = ? AND study_id = "
            "(SELECT study_id FROM studies WHERE study_name = 'mine')"
        )
        assert change(path, query, text, key) == 1

    return damage


def definition(path: Path) -> dict[str, Any]:
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT value_json FROM study_user_attributes WHERE key = 'definition'"
        values: dict[str, Any] = json.loads(connection.execute(query).fetchone()[0])
    return values


DEFINITIONS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a newer key": (lambda d: d | {"moon": 1}, "unknown key 'moon'"),
    "a model without a name": (lambda d: d | {"model": {}}, "name"),
    "no budget": (lambda d: d | {"target": d["target"] | {"budget_bytes": 0}}, "budget_bytes"),
}


@pytest.mark.parametrize("what", DEFINITIONS)
def test_an_unreadable_study_is_listed_beside_the_others(what: str, path: Path) -> None:
    how, words = DEFINITIONS[what]
    of_study("definition", json.dumps(how(definition(path))))(path)
    assert_only_mine_is_unreadable(path, words)


def assert_only_mine_is_unreadable(path: Path, words: str) -> None:
    mine, other = list_studies(f"sqlite:///{path}", path.parent)
    assert isinstance(mine, UnreadableStudy)
    assert isinstance(other, StudySnapshot)
    assert (mine.name, mine.trials) == ("mine", 5)
    assert re.search(words, mine.reason), mine.reason
    with pytest.raises(InputError, match="study 'mine' cannot be read"):
        the_study(path)


# Going on


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("definition", "7", "study 'mine' cannot be .*definition"),
        (
            "runs",
            '[{"started_at": "", "environment": {"versions": 1}}]',
            "study 'mine' cannot be .*versions must map",
        ),
        ("format", str(FORMAT_WRITTEN + 1), r"a newer sweep wrote it \(format 2.*pip install -U"),
    ],
)
def test_an_unreadable_study_is_not_continued_and_not_changed(
    key: str, text: str, words: str, path: Path
) -> None:
    of_study(key, text)(path)
    before = path.read_bytes()
    with pytest.raises(InputError, match=words):
        open_it(f"sqlite:///{path}", path.parent, name="mine")
    if "newer" in words:
        assert_only_mine_is_unreadable(path, words)
    assert path.read_bytes() == before


# What tools for Optuna see of it


def test_tools_for_optuna_see_one_study_and_cannot_write_to_it(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/sweep.db"
    for name in ("other", "mine"):
        with open_it(url, tmp_path, name=name) as study:
            run_one(study, batch=2)
            run_one(study, OutOfMemory(stage="forward"), batch=8)
    before = (tmp_path / "sweep.db").read_bytes()
    with shown_storage("mine", url=url) as storage:
        (shown,) = storage.get_all_studies()
        assert shown.study_name == "mine"
        number = storage.get_study_id_from_name("mine")
        attributes = storage.get_study_system_attrs(number)
        assert attributes["study:metric_names"] == ["tokens_per_second"]
        fitted, ran_out = storage.get_all_trials(number)
        assert storage.get_best_trial(number).number == fitted.number
        for write in (storage.delete_study, storage.create_new_trial):
            with pytest.raises(StorageInternalError):
                write(number)
    assert (tmp_path / "sweep.db").read_bytes() == before
    assert fitted.user_attrs.keys() == {"verdict", "tokens_per_second", "peak_gib"}
    assert ran_out.user_attrs["stage"] == "forward"
    assert fitted.system_attrs["constraints"][0] < 0 < ran_out.system_attrs["constraints"][0]


def test_tools_for_optuna_see_new_trials_and_no_confirmations(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sweep.db"
    with open_it(url, tmp_path) as study, shown_storage("study", url=url) as storage:
        number = storage.get_study_id_from_name("study")
        assert storage.get_all_trials(number) == []
        first = run_one(study)
        assert [t.state for t in storage.get_all_trials(number)] == [TrialState.COMPLETE]
        again = study.ask_again()
        run_kind = RunKind(purpose="confirm", series=1, confirms=first.number)
        record = a_record(again.number, **run_kind.model_dump())
        study.tell(again, begun(study, again, record, run_kind=run_kind))
        assert [t.number for t in storage.get_all_trials(number)] == [first.number]
