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
import sqlalchemy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from optuna.storages._rdb import models

from search_spaces.errors import InputError
from storage import stored
from storage.best import best_document
from storage.database import close, open_for_writing, reader_of
from storage.definition import StudySnapshot, StudySummary, UnreadableStudy
from storage.reading import count_trials, list_studies, read_study
from storage.removal import remove_study
from storage.shown import shown_storage
from storage.stored import StoredStudy, read_all_stored, read_stored
from storage.tables import SCHEMA
from storage.urls import parse_url
from tests.storage.builders import DISTRIBUTIONS, fits, open_it, run_one

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


def changed(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record | changes


def measured(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(record: dict[str, Any]) -> Any:
        record["outcome"]["measurement"] |= changes
        return record

    return change


def configured(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record | {"config": record["config"] | changes}


RECORDS: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("an unknown verdict", changed(outcome={"verdict": "melted"}), "verdict .*'melted'"),
    ("a key of a newer version", changed(moon="full"), "unknown key 'moon'"),
    ("a newer configuration", configured(lora_colour="red"), "unknown key 'lora_colour'"),
    ("a value of a newer version", configured(kernels="warp"), "kernels .*'warp'"),
    ("no outcome", changed(outcome=None), "outcome"),
    ("a list", lambda _: [1, 2], "no JSON object"),
    ("null", lambda _: None, "no JSON object"),
    ("a text", lambda _: "fits", "no JSON object"),
    ("another's number", changed(number=3), "of trial 3"),
    ("a number below zero", changed(number=-1), "trial -1"),
    ("another configuration", configured(micro_batch_size=1), "another configuration"),
    ("no speed at all", measured(tokens_per_second=float("nan")), "tokens_per_second is nan"),
    ("no end of speed", measured(tokens_per_second=float("inf")), "tokens_per_second is inf"),
    ("a speed in words", measured(tokens_per_second="fast"), "tokens_per_second"),
    ("memory below zero", measured(peak_allocated_bytes=-1), "peak_allocated_bytes is -1"),
    ("no memory at all", measured(peak_allocated_bytes=0), "peak_allocated_bytes is 0"),
    ("memory beyond bounds", measured(peak_allocated_bytes=10**400), "peak_allocated_bytes"),
    ("an interval back to front", measured(step_seconds_ci95=[2.0, 1.0]), "step_seconds_ci95"),
    ("an endless interval", measured(step_seconds_ci95=[1.0, float("inf")]), "step_seconds_ci95"),
    ("a step of no length", measured(step_seconds=float("nan")), "step_seconds is nan"),
    ("time before it began", changed(wall_seconds=-1.0), "wall_seconds is -1"),
    ("a rank beyond bounds", configured(lora_rank=10**300), "lora_rank"),
]
TEXTS: list[tuple[str, Any, str]] = [
    ("nothing", "", "empty"),
    ("no value", None, "empty"),
    ("no JSON", "{", "no JSON"),
    ("binary data", b"\xff\x00\xfe", "no JSON"),
    ("a number", 7, "no JSON object"),
    ("a nesting bomb", "[" * 100_000, "no JSON"),
    ("a nesting bomb that ends", '{"a":' * 5_000 + "1" + "}" * 5_000, "no JSON"),
    ("more than anybody measured", '"' + "x" * 2_000_000 + '"', "too long"),
]


def of_record(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda path: put(path, "record", json.dumps(change(stored_text(path, "record"))))


def of_text(key: str, text: Any) -> Callable[[Path], None]:
    return lambda path: put(path, key, text)


def of_row(assignment: str, *values: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        assert change(path, f"UPDATE trials SET {assignment} WHERE {OF_TRIAL}", *values, DAMAGED)

    return damage


def no_record(path: Path) -> None:
    delete = f"DELETE FROM trial_user_attributes WHERE key = 'record' AND {OF_TRIAL}"
    assert change(path, delete, DAMAGED) == 1


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    **{f"record: {what}": (of_record(how), words) for what, how, words in RECORDS},
    **{f"record: {what}": (of_text("record", text), words) for what, text, words in TEXTS},
    "config: no JSON": (of_text("config", "{"), "config is no JSON"),
    "config: newer": (of_text("config", '{"moon": 1}'), "unknown key 'moon'"),
    "no record": (no_record, "no record"),
    "an unknown state": (of_row("state = 'PAUSED'"), "state 'PAUSED'"),
    "a state that is no text": (of_row("state = ?", b"\xff"), "state"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_trial_that_cannot_be_read_is_named_and_left_out_and_all_else_stays(
    what: str, path: Path
) -> None:
    before, other = the_study(path), best_document(the_study(path, "other"))
    damage, words = DAMAGES[what]
    damage(path)
    after = the_study(path)
    (unreadable,) = after.unreadable
    assert unreadable.number == DAMAGED
    assert after.records == tuple(r for r in before.records if r.number != DAMAGED)
    assert after.running == before.running
    (warning,) = after.warnings
    assert "trial 2 cannot be read" in warning
    assert re.search(words, unreadable.reason), unreadable.reason
    assert len(warning) < 450
    assert best_document(the_study(path, "other")) == other
    best = best_document(after)["best"]
    assert best["number"] == 1, "the fastest of those that are known"
    mine, another = list_studies(f"sqlite:///{path}", path.parent)
    assert isinstance(mine, StudySummary)
    assert isinstance(another, StudySummary)
    assert (mine.trials, mine.unreadable, another.trials, another.unreadable) == (3, 1, 4, 0)


def test_two_trials_of_one_number_are_neither_of_them_believed(path: Path) -> None:
    of_row("number = 1")(path)
    after = the_study(path)
    assert [(t.number, t.reason) for t in after.unreadable] == [(1, "2 trials have this number")]
    assert [r.number for r in after.records] == [0, 3]


@pytest.mark.parametrize("number", [None, -1, "seven", 2**70])
def test_a_trial_without_a_number_is_said_and_left_out(number: Any, path: Path) -> None:
    of_row("number = ?", float(number) if number == 2**70 else number)(path)
    after = the_study(path)
    (unreadable,) = after.unreadable
    assert unreadable.number is None
    assert [r.number for r in after.records] == [0, 1, 3]


@pytest.mark.parametrize("text", ["{", "[1]", '{"moon": 1}', "", None])
def test_a_running_trial_of_which_nothing_can_be_made_is_said(text: Any, path: Path) -> None:
    put(path, "config", text, number=4)
    after = the_study(path)
    assert (after.running, [t.number for t in after.unreadable]) == ((), [4])


def test_a_running_trial_that_has_no_configuration_yet_is_one_that_runs(path: Path) -> None:
    change(path, f"DELETE FROM trial_user_attributes WHERE {OF_TRIAL}", 4)
    (running,) = the_study(path).running
    assert (running.number, running.config, running.started_at) == (4, None, None)
    assert the_study(path).unreadable == ()


def test_what_was_asked_for_or_closed_unbegun_is_no_trial_and_no_fault(path: Path) -> None:
    change(path, f"DELETE FROM trial_user_attributes WHERE {OF_TRIAL}", 4)
    for state in ("WAITING", "FAIL"):
        change(path, f"UPDATE trials SET state = ? WHERE {OF_TRIAL}", state, 4)
        assert (the_study(path).running, the_study(path).unreadable) == ((), ())


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
    "a list": (lambda _: [], "no JSON object|must map"),
    "null": (lambda _: None, "no JSON object|must map"),
    "a newer key": (lambda d: d | {"moon": 1}, "unknown key 'moon'"),
    "a newer objective": (lambda d: d | {"space": d["space"] | {"objectives": ["joy"]}}, "joy"),
    "objectives no list": (lambda d: d | {"space": d["space"] | {"objectives": 7}}, "objectives"),
    "objectives of lists": (
        lambda d: d | {"space": d["space"] | {"objectives": [["cost"], "cost"]}},
        "objectives",
    ),
    "a space no object": (lambda d: d | {"space": [1]}, "space"),
    "a baseline no object": (lambda d: d | {"space": d["space"] | {"baseline": [1]}}, "baseline"),
    "fixed of words": (
        lambda d: (
            d
            | {
                "space": d["space"]
                | {"baseline": {"micro_batch_size": "a"}, "fixed": {"effective_batch_size": "b"}}
            }
        ),
        "batch_size",
    ),
    "no budget": (lambda d: d | {"target": d["target"] | {"budget_bytes": 0}}, "budget of 0"),
    "a model without a name": (lambda d: d | {"model": {}}, "name"),
    "a model of words": (lambda d: d | {"model": d["model"] | {"config": "x"}}, "config"),
    "a model of no size": (
        lambda d: d | {"model": d["model"] | {"config": {"hidden_size": "wide"}}},
        "hidden_size",
    ),
}


@pytest.mark.parametrize("what", DEFINITIONS)
def test_a_study_that_cannot_be_read_is_a_line_of_the_list_and_others_stay(
    what: str, path: Path
) -> None:
    how, words = DEFINITIONS[what]
    other = best_document(the_study(path, "other"))
    of_study("definition", json.dumps(how(definition(path))))(path)
    assert_only_mine_is_unreadable(path, words)
    assert best_document(the_study(path, "other")) == other


@pytest.mark.parametrize("text", ["", None, "{", b"\xff", "[" * 100_000, "NaN", '"a"', "7"])
def test_a_definition_that_is_no_definition_is_a_line_of_the_list(text: Any, path: Path) -> None:
    of_study("definition", text)(path)
    assert_only_mine_is_unreadable(path, "definition")


def test_a_definition_that_was_lost_is_a_line_of_the_list(path: Path) -> None:
    change(path, "DELETE FROM study_user_attributes WHERE key = 'definition' AND study_id = 1")
    assert_only_mine_is_unreadable(path, "no definition")


def assert_only_mine_is_unreadable(path: Path, words: str) -> None:
    mine, other = list_studies(f"sqlite:///{path}", path.parent)
    assert isinstance(mine, UnreadableStudy)
    assert isinstance(other, StudySummary)
    assert (mine.name, mine.trials) == ("mine", 5)
    assert re.search(words, mine.reason), mine.reason
    with pytest.raises(InputError, match="study 'mine' cannot be read"):
        the_study(path)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("runs", "7"),
        ("runs", "[7]"),
        ("runs", '[{"environment": 7}]'),
        ("runs", '[{"environment": {"versions": 7}}]'),
        ("runs", "{"),
        ("wall_seconds", "NaN"),
        ("wall_seconds", "-1"),
        ("wall_seconds", '"long"'),
        ("identity", "7"),
    ],
)
def test_what_else_is_damaged_of_a_study_is_said_and_the_rest_is_read(
    key: str, text: str, path: Path
) -> None:
    before = the_study(path)
    if key == "wall_seconds":
        change(path, "INSERT INTO study_user_attributes VALUES (99, 1, 'wall_seconds', '1.0')")
    of_study(key, text)(path)
    after = the_study(path)
    assert after.records == before.records
    assert key in after.warnings[0]
    assert after.wall_seconds == 0.0


@pytest.mark.parametrize(
    "ended",
    [
        {"reason": "gain_spent", "open": "many", "most_promising": None},
        {"reason": "gain_spent", "open": 1, "most_promising": {"config": {"moon": 1}}},
        {"reason": 7},
        [],
    ],
)
def test_an_end_that_cannot_be_read_is_none(ended: Any, path: Path) -> None:
    values = json.dumps(ended)
    change(path, "INSERT INTO study_user_attributes VALUES (99, 1, 'ended', ?)", values)
    snapshot = the_study(path)
    assert snapshot.ended is None
    assert "ended" in snapshot.warnings[0]


def test_studies_of_other_tools_are_nobodys_fault(path: Path) -> None:
    change(path, "INSERT INTO studies VALUES (77, 'theirs')")
    change(path, "INSERT INTO study_user_attributes VALUES (77, 77, 'colour', '{')")
    change(path, "INSERT INTO trials VALUES (777, 0, 77, 'PAUSED', NULL, NULL)")
    assert [s.name for s in list_studies(f"sqlite:///{path}", path.parent)] == ["mine", "other"]
    with pytest.raises(InputError, match="no study 'theirs'"):
        the_study(path, "theirs")


@pytest.mark.parametrize(
    "name", ["../../x", "a/b", "\x1b[31mred", "nul\x00", "x" * 400, "", "\udc80"]
)
def test_a_name_that_is_no_directorys_is_read_and_touches_no_file(name: str, path: Path) -> None:
    raw = name.encode("utf-8", "surrogateescape")
    change(path, "UPDATE studies SET study_name = CAST(? AS TEXT) WHERE study_name = 'mine'", raw)
    first, _ = list_studies(f"sqlite:///{path}", path.parent)
    assert isinstance(first, StudySummary)
    assert (first.name, first.trials, first.holder) == (name, 4, None)
    assert sorted(p.name for p in path.parent.iterdir()) == ["sweep.db"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def mutated(draw: st.DrawFn, value: Any, depth: int = 0) -> Any:
    """Return JSON with one leaf or branch of it replaced, added or gone."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)) and depth < 6:
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 5)) == 0:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated(draw, value[key], depth + 1)}
    if isinstance(value, list) and value and draw(st.booleans()):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], mutated(draw, value[place], depth + 1), *value[place + 1 :]]
    return draw(JSON)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_value_anywhere_stops_the_reading_and_ranking_of_the_others(
    data: st.DataObject, whole: Path
) -> None:
    path = whole.with_name("mutated.db")
    path.write_bytes(whole.read_bytes())
    which = data.draw(st.sampled_from(["record", "config", "definition"]))
    if which == "definition":
        changed = data.draw(st.composite(lambda draw: mutated(draw, definition(path)))())
        of_study("definition", json.dumps(changed))(path)
    else:
        value = stored_text(path, which)
        changed = data.draw(st.composite(lambda draw: mutated(draw, value))())
        put(path, which, json.dumps(changed))
    mine, other = list_studies(f"sqlite:///{path}", path.parent)
    assert isinstance(other, StudySummary)
    assert (other.best_number, other.trials) == (DAMAGED, 4)
    if isinstance(mine, StudySummary):
        best_document(the_study(path))


# The cost of a read


def statements(path: Path) -> list[str]:
    seen: list[str] = []
    with reader_of(parse_url(f"sqlite:///{path}")) as engine:
        assert engine is not None
        sqlalchemy.event.listen(
            engine, "before_cursor_execute", lambda _c, _k, statement, *_: seen.append(statement)
        )
        read_all_stored(engine)
        read_stored(engine, "mine")
    return [statement for statement in seen if statement != "BEGIN"]


def test_a_read_takes_as_many_statements_whatever_there_is_to_read(path: Path) -> None:
    few = len(statements(path))
    for copy in range(10, 40):
        change(path, "INSERT INTO studies VALUES (?, ?)", copy, f"copy {copy}")
        change(
            path,
            "INSERT INTO study_user_attributes (study_id, key, value_json) "
            "SELECT ?, key, value_json FROM study_user_attributes WHERE study_id = 1",
            copy,
        )
    assert len(statements(path)) == few == 6


def test_a_read_is_of_one_moment_and_lets_go_before_it_validates(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[StoredStudy] = []

    def write_and_go_on(rows: Any) -> Any:
        # A driver that writes meanwhile waits for nobody.
        with closing(sqlite3.connect(path, timeout=0)) as connection, connection:
            connection.execute("DELETE FROM trials")
        return original(rows)

    original = stored._stored_trials
    monkeypatch.setattr(stored, "_stored_trials", write_and_go_on)
    with reader_of(parse_url(f"sqlite:///{path}")) as engine:
        assert engine is not None
        found = read_stored(engine, "mine")
    assert isinstance(found, StoredStudy)
    seen.append(found)
    assert len(seen[0].trials.records) == 4


def test_the_tables_that_are_read_are_those_that_optuna_writes() -> None:
    for table in (
        stored._STUDIES,
        stored._STUDY_ATTRIBUTES,
        stored._TRIALS,
        stored._TRIAL_ATTRIBUTES,
    ):
        theirs = models.BaseModel.metadata.tables[table.name]
        assert {column.name for column in table.columns} <= {c.name for c in theirs.columns}


def test_the_newest_tables_that_are_known_are_those_that_optuna_makes(tmp_path: Path) -> None:
    storage = open_for_writing(parse_url(f"sqlite:///{tmp_path}/sweep.db"))
    try:
        assert storage.get_head_version() == SCHEMA
    finally:
        close(storage)


# Going on


@pytest.mark.parametrize(
    "what", ["record: an unknown verdict", "record: no JSON", "an unknown state", "config: newer"]
)
def test_a_study_with_a_trial_that_cannot_be_read_is_not_gone_on_with(
    what: str, path: Path
) -> None:
    damage, _ = DAMAGES[what]
    damage(path)
    with pytest.raises(InputError, match=r"(?s)trial 2 cannot be read.*--from mine") as refused:
        open_it(f"sqlite:///{path}", path.parent, name="mine")
    assert "cannot be gone on with" in str(refused.value)
    assert [record.number for record in the_study(path).records] == [0, 1, 3]
    with open_it(f"sqlite:///{path}", path.parent, name="other") as study:
        assert len(study.records()) == 4


@pytest.mark.parametrize(("key", "text"), [("definition", "{"), ("runs", "7"), ("identity", "{")])
def test_a_study_that_cannot_be_read_is_not_gone_on_with(key: str, text: str, path: Path) -> None:
    of_study(key, text)(path)
    with pytest.raises(InputError, match=f"study 'mine' cannot be .*{key}"):
        open_it(f"sqlite:///{path}", path.parent, name="mine")


# Shown to other tools, and removed


UNREAD_BY_OPTUNA = ["record: no JSON", "an unknown state", "a state that is no text"]


@pytest.mark.parametrize("what", UNREAD_BY_OPTUNA)
def test_a_study_is_shown_and_removed_whatever_one_of_its_trials_holds(
    what: str, path: Path
) -> None:
    damage, _ = DAMAGES[what]
    damage(path)
    url = f"sqlite:///{path}"
    of_other = best_document(the_study(path, "other"))
    with shown_storage("mine", url=url) as storage:
        (study,) = storage.get_all_studies()
        shown = storage.get_all_trials(storage.get_study_id_from_name("mine"))
    assert (study.study_name, [trial.number for trial in shown]) == ("mine", [0, 1, 3, 4])
    remove_study("mine", url=url, home=path.parent)
    assert [study.name for study in list_studies(url, path.parent)] == ["other"]
    assert best_document(the_study(path, "other")) == of_other
    with closing(sqlite3.connect(path)) as connection:
        (left,) = connection.execute("SELECT count(*) FROM trials").fetchone()
    assert left == 5, "those of the other study"


@pytest.mark.parametrize("key", ["definition", "runs", "identity"])
def test_a_study_that_cannot_be_read_is_shown_and_removed(key: str, path: Path) -> None:
    of_study(key, "{")(path)
    url = f"sqlite:///{path}"
    with shown_storage("mine", url=url) as storage:
        assert len(storage.get_all_trials(storage.get_study_id_from_name("mine"))) == 5
    assert count_trials("mine", url=url) == 5
    remove_study("mine", url=url, home=path.parent)
    assert [study.name for study in list_studies(url, path.parent)] == ["other"]
