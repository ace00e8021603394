"""Owns the one read of what a database holds of studies: fetched at once, then validated.

The tables are Optuna's and are read without it: a trial over which Optuna would stumble (a state or
verdict that nobody knows, an attribute that is no JSON) is an `Unreadable` here, and costs nobody
else anything. A study is two statements whatever its size, and so are all of a database. Nothing is
validated while the transaction lasts, so that no driver waits for it. Knows no files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal, TypeVar

import sqlalchemy
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, WrapValidator, field_validator
from sqlalchemy import case, column, func, select, table

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import InputError, quote
from search_spaces.models import checked_config
from search_spaces.validation import explain
from storage import keys
from storage.definition import (
    RunningTrial,
    StudyDefinition,
    Unreadable,
    UnreadableStudy,
    names_cost,
)
from storage.records import SEARCH, Errand, TrialRecord

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")

TRIAL_BYTES_MAX = 2**20
"""Of one attribute of a trial; a real one has a few thousand."""
STUDY_BYTES_MAX = 2**24
"""Of one attribute of a study, which knows of every run."""
_INTEGER_END = 2**63
"""Where the whole numbers end that a database can hold; none that was measured is larger."""
_LIVE, _FAILED = frozenset({"RUNNING"}), "FAIL"
_ENDED = frozenset({"COMPLETE", "PRUNED", _FAILED})
_QUEUED = frozenset({"WAITING"})

_STUDIES = table("studies", column("study_id"), column("study_name"))
_STUDY_ATTRIBUTES = table(
    "study_user_attributes", column("study_id"), column("key"), column("value_json")
)
_TRIALS = table("trials", column("trial_id"), column("study_id"), column("number"), column("state"))
_TRIAL_ATTRIBUTES = table(
    "trial_user_attributes", column("trial_id"), column("key"), column("value_json")
)

_Row = Sequence[Any]
_Texts = Mapping[str, _Row]
"""By key, of one study or trial: a text, which is none where it is too long, and its length."""


@dataclass(frozen=True)
class StoredTrials:
    """What is stored of a study's trials, each part by number."""

    records: tuple[TrialRecord, ...] = ()
    """Of trials that ended, those that measured winners again included."""
    running: tuple[RunningTrial, ...] = ()
    """Of trials that were begun and have not ended; no configuration where that was not stored."""
    unreadable: tuple[Unreadable, ...] = ()
    total: int = 0
    """Trials of whatever state, also those that were only asked for."""


@dataclass(frozen=True)
class StoredStudy:
    """A study as the database has it."""

    name: str
    definition: StudyDefinition
    trials: StoredTrials
    identity: str = ""
    environments: tuple[dict[str, Any], ...] = ()
    """Fingerprint of each run, oldest first."""
    wall_seconds: float = 0.0
    ended: dict[str, Any] | None = None
    named_cost: bool = False
    """Whether it was started with an objective that there is no more."""
    damaged: tuple[str, ...] = ()
    """What else is stored of it and cannot be read, in words."""


def read_stored(engine: sqlalchemy.Engine, name: str) -> StoredStudy | UnreadableStudy | None:
    """Return one study; None where there is none of that name, or it is not one of sweep's."""
    found = _read(engine, _STUDIES.c.study_name == name)
    return found[0] if found else None


def read_all_stored(engine: sqlalchemy.Engine) -> tuple[StoredStudy | UnreadableStudy, ...]:
    """Return every study that is one of sweep's, oldest first, as they stood at one moment."""
    return _read(engine, sqlalchemy.true())


def read_stored_trials(engine: sqlalchemy.Engine, study_id: int) -> StoredTrials:
    """Return the trials of a study by the database's number of it."""
    with engine.connect() as connection:
        rows = connection.execute(_trials_of(_TRIALS.c.study_id == study_id)).all()
    return stored_trials(rows)


def count_stored_trials(engine: sqlalchemy.Engine, name: str) -> int | None:
    """Return how many trials a study has, readable or not; None where it is not one of sweep's."""
    query = select(func.count(_TRIALS.c.trial_id))
    query = query.where(_TRIALS.c.study_id.in_(_ours(_STUDIES.c.study_name == name)))
    with engine.connect() as connection:
        if connection.execute(_ours(_STUDIES.c.study_name == name)).first() is None:
            return None
        return int(connection.execute(query).scalar_one())


def stored_names(engine: sqlalchemy.Engine) -> tuple[str, ...]:
    """Return the names of the studies that are sweep's, oldest first."""
    names = select(_STUDIES.c.study_name).where(_STUDIES.c.study_id.in_(_ours(sqlalchemy.true())))
    with engine.connect() as connection:
        rows = connection.execute(names.order_by(_STUDIES.c.study_id)).all()
    return tuple(str(name) for (name,) in rows)


def _ours(which: sqlalchemy.ColumnElement[bool]) -> sqlalchemy.Select[Any]:
    """Return the numbers of sweep's studies among those."""
    ours = select(_STUDIES.c.study_id).join_from(
        _STUDIES, _STUDY_ATTRIBUTES, _STUDIES.c.study_id == _STUDY_ATTRIBUTES.c.study_id
    )
    # What a driver stores last is there of every study that it began, be its definition lost.
    return ours.where(which, _STUDY_ATTRIBUTES.c.key.in_((keys.DEFINITION, keys.RUNS)))


def _read(
    engine: sqlalchemy.Engine, which: sqlalchemy.ColumnElement[bool]
) -> tuple[StoredStudy | UnreadableStudy, ...]:
    with engine.connect() as connection:
        studies = connection.execute(_studies_of(which)).all()
        trials = connection.execute(_trials_of(_TRIALS.c.study_id.in_(_ours(which)))).all()
    by_study = {id: list(rows) for id, rows in groupby(trials, key=itemgetter(0))}
    found = []
    for (id, name), rows in groupby(studies, key=itemgetter(0, 1)):
        texts = {row[2]: row[3:] for row in rows}
        if not texts.keys().isdisjoint((keys.DEFINITION, keys.RUNS)):
            found.append(_study(str(name), texts, by_study.get(id, [])))
    return tuple(found)


def _studies_of(which: sqlalchemy.ColumnElement[bool]) -> sqlalchemy.Select[Any]:
    attributes = _STUDY_ATTRIBUTES
    return (
        select(_STUDIES.c.study_id, _STUDIES.c.study_name, attributes.c.key, *_limited(attributes))
        .join_from(_STUDIES, attributes, _STUDIES.c.study_id == attributes.c.study_id)
        .where(which, attributes.c.key.in_(keys.STUDY_KEYS))
        .order_by(_STUDIES.c.study_id)
    )


def _trials_of(which: sqlalchemy.ColumnElement[bool]) -> sqlalchemy.Select[Any]:
    trials, attributes = _TRIALS, _TRIAL_ATTRIBUTES
    is_of_it = attributes.c.trial_id == trials.c.trial_id
    wanted = sqlalchemy.and_(is_of_it, attributes.c.key.in_(keys.TRIAL_KEYS))
    identity = (trials.c.study_id, trials.c.trial_id, trials.c.number, trials.c.state)
    return (
        select(*identity, attributes.c.key, *_limited(attributes))
        .join_from(trials, attributes, wanted, isouter=True)
        .where(which)
        .order_by(trials.c.study_id, trials.c.trial_id)
    )


def _limited(attributes: sqlalchemy.TableClause) -> tuple[sqlalchemy.ColumnElement[Any], ...]:
    """Return an attribute's text, or nothing of it where it is absurdly long, and its length."""
    longest = STUDY_BYTES_MAX if attributes is _STUDY_ATTRIBUTES else TRIAL_BYTES_MAX
    length = func.length(attributes.c.value_json)
    return case((length <= longest, attributes.c.value_json), else_=None), length


def _study(name: str, texts: _Texts, rows: Sequence[_Row]) -> StoredStudy | UnreadableStudy:
    try:
        definition, named_cost = _definition(texts)
    except _UnreadableError as error:
        return UnreadableStudy(name, str(error), len({row[1] for row in rows}))
    damaged: list[str] = []

    def attribute(key: str, kind: TypeAdapter[T], otherwise: T) -> T:
        try:
            return _value(key, kind, texts) if key in texts else otherwise
        except _UnreadableError as error:
            damaged.append(str(error))
            return otherwise

    return StoredStudy(
        name=name,
        definition=definition,
        trials=stored_trials(rows),
        identity=attribute(keys.IDENTITY, _TEXT, ""),
        environments=tuple(run["environment"] for run in attribute(keys.RUNS, _RUNS, [])),
        wall_seconds=attribute(keys.WALL_SECONDS, _SECONDS, 0.0),
        ended=attribute(keys.ENDED, _END, None),
        named_cost=named_cost,
        damaged=tuple(damaged),
    )


def stored_trials(rows: Iterable[_Row]) -> StoredTrials:
    """Return what the rows of one study's trials say.

    Args:
        rows: study, trial, number, state, key, text, length; those of a trial follow each other.
    """
    records: list[TrialRecord] = []
    running: list[RunningTrial] = []
    unreadable: list[Unreadable] = []
    numbers: Counter[Any] = Counter()
    for (_, number, state), its_rows in groupby(rows, key=itemgetter(1, 2, 3)):
        texts = {row[4]: row[5:] for row in its_rows}
        numbers[number] += 1
        try:
            match _trial(number, state, texts):
                case TrialRecord() as record:
                    records.append(record)
                case RunningTrial() as trial:
                    running.append(trial)
        except _UnreadableError as error:
            unreadable.append(Unreadable(number if _is_number(number) else None, str(error)))
    doubled = {number for number, count in numbers.items() if count > 1}
    if doubled:
        unreadable = [trial for trial in unreadable if trial.number not in doubled]
        unreadable += [
            Unreadable(number, f"{numbers[number]} trials have this number")
            for number in doubled
            if _is_number(number)
        ]
    return StoredTrials(
        tuple(sorted((r for r in records if r.number not in doubled), key=_by_number)),
        tuple(sorted((t for t in running if t.number not in doubled), key=_by_number)),
        tuple(sorted(unreadable, key=lambda trial: (trial.number is None, trial.number or 0))),
        numbers.total(),
    )


def _by_number(trial: TrialRecord | RunningTrial) -> int:
    return trial.number


def _is_number(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < _INTEGER_END


class _UnreadableError(Exception):
    """Says in words what of a trial or of a study cannot be read."""


def _trial(number: Any, state: Any, texts: _Texts) -> TrialRecord | RunningTrial | None:
    """Return what is stored of one trial; None of one that never began."""
    if not _is_number(number):
        raise _UnreadableError(f"its number is {quote(number)}")
    if state in _ENDED:
        return _ended_trial(number, state, texts)
    if state in _LIVE:
        return _running_trial(number, texts)
    if state in _QUEUED:
        return None
    raise _UnreadableError(f"its state {quote(state)} is not known")


def _ended_trial(number: int, state: str, texts: _Texts) -> TrialRecord | None:
    if keys.RECORD not in texts:
        # What was begun and never ran is told as failed; nothing else ends without a record.
        if state == _FAILED:
            return None
        raise _UnreadableError("it has no record")
    record = _validated(TrialRecord, keys.RECORD, texts)
    if record.number != number:
        raise _UnreadableError(f"its record is of trial {record.number}")
    implausible = next(_implausible(record), None)
    if implausible is not None:
        raise _UnreadableError(f"in its record {implausible}")
    config, whole = texts.get(keys.CONFIG), texts[keys.RECORD][0]
    # Both were written by the same code, so that the text of the one is nearly always in the other.
    if config is None or _holds(whole, config[0]):
        return record
    if canonical(_validated(TrialConfig, keys.CONFIG, texts)) != canonical(record.config):
        raise _UnreadableError("its record is of another configuration than it began with")
    return record


def _holds(whole: Any, part: Any) -> bool:
    return isinstance(whole, str) and isinstance(part, str) and part in whole


def _running_trial(number: int, texts: _Texts) -> RunningTrial:
    config = _validated(TrialConfig, keys.CONFIG, texts) if keys.CONFIG in texts else None
    errand = _validated(Errand, keys.PURPOSE, texts) if keys.PURPOSE in texts else SEARCH
    started = _value(keys.STARTED_AT, _OPTIONAL_TEXT, texts) if keys.STARTED_AT in texts else None
    attempt = _value(keys.ATTEMPT, _OPTIONAL_TEXT, texts) if keys.ATTEMPT in texts else None
    return RunningTrial(
        number, config, started, errand.purpose, errand.confirms, errand.series, attempt
    )


def _validated(model: type[Model], key: str, texts: _Texts) -> Model:
    text = _text(key, texts)
    try:
        return model.__pydantic_validator__.validate_json(text)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise _UnreadableError(_reason(error, key, model)) from None


def _text(key: str, texts: _Texts) -> str | bytes:
    text, length = texts[key]
    if isinstance(text, str | bytes):
        return text
    if length is not None:
        raise _UnreadableError(f"its {key} is {length:,} characters long")
    raise _UnreadableError(f"its {key} is empty")


def _reason(error: ValidationError, key: str, model: type[BaseModel] | None = None) -> str:
    """Return why an attribute cannot be read, in one line."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] in ("json_invalid", "string_unicode", "bytes_invalid_encoding"):
        return f"its {key} is no JSON"
    if not first["loc"] and first["type"] in ("model_type", "model_attributes_type"):
        return f"its {key} is no JSON object"
    if first["type"] == "union_tag_invalid":
        return f"its {key} has a verdict that is not known here: {quote(_tag(error))}"
    return f"in its {key} {explain(error, model)}"


def _tag(error: ValidationError) -> object:
    return error.errors(include_url=False)[0].get("ctx", {}).get("tag")


def _implausible(record: TrialRecord) -> Iterator[str]:
    """Yield each number of a record that nobody can have measured: ``step_seconds is nan``."""
    measured = record.measurement
    parts = (record, record.config, record.outcome, measured, record.prediction)
    for part in parts:
        for name, value in {} if part is None else part.__dict__.items():
            values = value if name == "step_seconds_ci95" and value is not None else (value,)
            for number in values:
                if isinstance(number, int | float) and not _can_be(name, number):
                    yield f"{name} is {quote(number)}"


def _can_be(name: str, number: float) -> bool:
    """Whether a number is finite and, but for a loss, not negative."""
    return 0 <= number < _INTEGER_END or (name == "final_loss" and math.isfinite(number))


# A study's own attributes

_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Run(BaseModel):
    environment: dict[str, Any]

    @field_validator("environment")
    @classmethod
    def _versions_are_named(cls, environment: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(environment.get("versions", {}), dict):
            raise ValueError("versions must map keys to values")
        return environment


class _Promise(BaseModel):
    config: TrialConfig
    gain: _Finite | None
    chance: _Finite


class _End(BaseModel):
    reason: str
    open: int | None = None
    most_promising: _Promise | None = None


class _Model(BaseModel):
    name: str
    source: Literal["shipped", "directory", "hub"]
    config: dict[str, Any]
    path: str | None = None


def _unchanged(check: type[BaseModel]) -> WrapValidator:
    """Return what refuses values that ``check`` does not take, and leaves them else as they are."""

    def validate(values: Any, handler: Callable[[Any], Any]) -> Any:
        plain = handler(values)
        check.model_validate(plain)
        return plain

    return WrapValidator(validate)


_TEXT = TypeAdapter(str)
_OBJECT = TypeAdapter(dict[str, Any])
_OPTIONAL_TEXT: TypeAdapter[str | None] = TypeAdapter(str | None)
_SECONDS = TypeAdapter(Annotated[float, Field(ge=0, allow_inf_nan=False)])
_RUNS: TypeAdapter[list[dict[str, Any]]] = TypeAdapter(
    list[Annotated[dict[str, Any], _unchanged(_Run)]]
)
_END: TypeAdapter[dict[str, Any] | None] = TypeAdapter(
    Annotated[dict[str, Any], _unchanged(_End)] | None
)


def _value(key: str, kind: TypeAdapter[T], texts: _Texts) -> T:
    text = _text(key, texts)
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        raise _UnreadableError(_reason(error, key)) from None


def _definition(texts: _Texts) -> tuple[StudyDefinition, bool]:
    """Return what a study is about, and whether it named an objective that there is no more."""
    if keys.DEFINITION not in texts:
        raise _UnreadableError("it has no definition")
    values = _value(keys.DEFINITION, _OBJECT, texts)
    try:
        definition = StudyDefinition.model_validate(values)
        _Model.model_validate(definition.model)
    except ValidationError as error:
        raise _UnreadableError(f"its definition is of another version: {explain(error)}") from None
    if definition.model["config"]:
        try:
            checked_config(definition.model["config"], label="its model")
        except InputError as error:
            raise _UnreadableError(str(error)) from None
    budget = definition.target.budget_bytes
    if not 0 < budget < _INTEGER_END:
        raise _UnreadableError(f"its definition has a budget of {quote(budget)} bytes")
    return definition, names_cost(values)
