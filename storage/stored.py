"""Owns the one read of what a database holds of studies: fetched at once, then validated.

The tables are Optuna's and are read without it: a trial over which Optuna would stumble (a state or
verdict that nobody knows, an attribute that is no JSON) is an `Unreadable` here, and costs nobody
else anything. A study is three statements whatever its size, and so are all of a database. Nothing
is validated while the transaction lasts, so that no driver waits for it. Knows no files.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import sqlalchemy
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, WrapValidator, field_validator
from sqlalchemy import case, column, func, select, table

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import InputError, quote
from search_spaces.models import SIZE_MAX, SIZES
from search_spaces.validation import explain
from storage import keys
from storage.definition import (
    RunningTrial,
    StudyDefinition,
    Unreadable,
    UnreadableStudy,
)
from storage.records import SEARCH, Errand, TrialRecord

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")

TRIAL_TEXT_MAX = 2**20
"""Characters of one attribute of a trial; a real one has a few thousand."""
STUDY_TEXT_MAX = 2**24
"""The same of a study, which knows of every run."""
NAMED_MAX = 5
"""Trials that cannot be read of which each has a line of its own."""
MANY = 1000
"""Trials that are worth telling Python of."""
_TOO_LONG = "(too long)"
"""Stands for a text that is longer, and is no JSON itself."""
_INTEGER_END = 2**63
"""Where the whole numbers end that a database can hold; none that was measured is larger."""
_RUNNING, _QUEUED, _FAILED = "RUNNING", "WAITING", "FAIL"
_ENDED = frozenset({"COMPLETE", "PRUNED", _FAILED})

_STUDIES = table("studies", column("study_id"), column("study_name"))
_STUDY_ATTRIBUTES = table(
    "study_user_attributes", column("study_id"), column("key"), column("value_json")
)
_TRIALS = table("trials", column("trial_id"), column("study_id"), column("number"), column("state"))
_TRIAL_ATTRIBUTES = table(
    "trial_user_attributes", column("trial_id"), column("key"), column("value_json")
)

_Condition = sqlalchemy.ColumnElement[bool]
_Texts = Mapping[str, Any]
"""By key, of one study or trial: an attribute's text, and none where it has no such attribute."""


class _Row(NamedTuple):
    """A trial as the database has it, not yet validated."""

    number: Any
    state: Any
    texts: _Texts


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
    format: int = 0
    """How it is stored; 0 by versions that did not say."""
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
        rows = _fetched_trials(connection, _TRIALS.c.study_id == study_id)
    return _stored_trials(rows.get(study_id, []))


def refuse_unreadable(engine: sqlalchemy.Engine, name: str) -> None:
    """Raise where what is stored of a study itself cannot be read, be its trials as they may.

    Raises:
        InputError: says what, and what to do.
    """
    with engine.connect() as connection:
        rows = connection.execute(_studies_of(_STUDIES.c.study_name == name)).all()
    texts = {key: text for _, _, key, text in rows}
    if texts.keys().isdisjoint((keys.DEFINITION, keys.RUNS)):
        return
    _refuse_newer(name, texts)
    found = _study(name, texts, ())
    if isinstance(found, UnreadableStudy):
        raise InputError(unreadable_words(found))
    if found.damaged:
        raise InputError(
            f"study {quote(name)} cannot be gone on with: {'; '.join(found.damaged)}; "
            f"{_from_what_is_left(name)}"
        )


def _refuse_newer(name: str, texts: _Texts) -> None:
    """Raise where a later version wrote a study in a way that this one would overlook or undo."""
    try:
        number = _value(_COUNT, keys.FORMAT, texts.get(keys.FORMAT, "0"))
    except _UnreadableError:
        # What is damaged there is said beside all else that is.
        return
    if number > keys.FORMAT_WRITTEN:
        raise InputError(
            f"study {quote(name)} cannot be gone on with: {newer_words(number)}: go on with "
            "that one (`pip install -U qlora-sweep`), or start another study with --study; `sweep "
            "status` and `sweep best` show what they can of it"
        )


def newer_words(number: int) -> str:
    """Return what is said of a study of a format that is not known here."""
    return f"a newer sweep wrote it (format {number}, this one writes {keys.FORMAT_WRITTEN})"


def refuse_unreadable_trials(name: str, trials: StoredTrials) -> None:
    """Raise where a trial cannot be read: it could be run again, or taken for what it is not.

    One that somebody else ended in the database is no reason: what it came to is not in there.

    Raises:
        InputError: says which, and what to do.
    """
    unknown = [trial for trial in trials.unreadable if not trial.was_told_elsewhere]
    if not unknown:
        return
    lines = "".join(f"\n  {words}" for words in unreadable_in_words(unknown))
    raise InputError(
        f"study {quote(name)} cannot be gone on with, as what ran in it is not known for sure:"
        f"{lines}\n{_from_what_is_left(name).capitalize()}"
    )


def unreadable_words(study: UnreadableStudy) -> str:
    """Return why a study cannot be read, and what to do."""
    return (
        f"study {quote(study.name)} cannot be read: {study.reason}; it may be of another version "
        "of sweep: read it with that one, or choose another --study"
    )


def unreadable_in_words(trials: Sequence[Unreadable]) -> tuple[str, ...]:
    """Return what is said of trials that cannot be read: of a few each by itself."""
    named = tuple(map(str, trials[:NAMED_MAX]))
    further = len(trials) - len(named)
    return named if not further else (*named, f"{further:,} further trials cannot be read either")


def _from_what_is_left(name: str) -> str:
    return (
        f"what can be read is carried over to a new study: `sweep run SPACE --from {name} "
        "--study NEW`"
    )


def count_stored_trials(engine: sqlalchemy.Engine, name: str) -> int | None:
    """Return how many trials a study has, readable or not; None where it is not one of sweep's."""
    query = select(func.count(_TRIALS.c.trial_id))
    query = query.where(_TRIALS.c.study_id.in_(_ours(_STUDIES.c.study_name == name)))
    with engine.connect() as connection:
        if connection.execute(_ours(_STUDIES.c.study_name == name)).first() is None:
            return None
        return int(connection.execute(query).scalar_one())


def stored_identity(engine: sqlalchemy.Engine, name: str) -> str | None:
    """Return the identity of a study; None where there is none of that name.

    Empty where it has no identity, or none that can be read.
    """
    with engine.connect() as connection:
        of_that_name = select(_STUDIES.c.study_id).where(_STUDIES.c.study_name == name)
        if connection.execute(of_that_name).first() is None:
            return None
        rows = connection.execute(_studies_of(_STUDIES.c.study_name == name)).all()
    texts = {key: text for _, _, key, text in rows}
    try:
        return _value(_TEXT, keys.IDENTITY, texts.get(keys.IDENTITY))
    except _UnreadableError:
        return ""


def stored_names(engine: sqlalchemy.Engine) -> tuple[str, ...]:
    """Return the names of the studies that are sweep's, oldest first."""
    names = select(_STUDIES.c.study_name).where(_STUDIES.c.study_id.in_(_ours(sqlalchemy.true())))
    with engine.connect() as connection:
        rows = connection.execute(names.order_by(_STUDIES.c.study_id)).all()
    return tuple(str(name) for (name,) in rows)


def _ours(which: _Condition) -> sqlalchemy.Select[Any]:
    """Return the numbers of sweep's studies among those."""
    ours = select(_STUDIES.c.study_id).join_from(
        _STUDIES, _STUDY_ATTRIBUTES, _STUDIES.c.study_id == _STUDY_ATTRIBUTES.c.study_id
    )
    # What a driver stores last is there of every study that it began, be its definition lost.
    return ours.where(which, _STUDY_ATTRIBUTES.c.key.in_((keys.DEFINITION, keys.RUNS)))


def _read(
    engine: sqlalchemy.Engine, which: _Condition
) -> tuple[StoredStudy | UnreadableStudy, ...]:
    with engine.connect() as connection:
        studies = connection.execute(_studies_of(which)).all()
        trials = _fetched_trials(connection, _TRIALS.c.study_id.in_(_ours(which)))
    found = []
    for (id, name), rows in groupby(studies, key=itemgetter(0, 1)):
        texts = {key: text for _, _, key, text in rows}
        if not texts.keys().isdisjoint((keys.DEFINITION, keys.RUNS)):
            found.append(_study(str(name), texts, trials.get(id, [])))
    return tuple(found)


def _studies_of(which: _Condition) -> sqlalchemy.Select[Any]:
    attributes = _STUDY_ATTRIBUTES
    text = _limited(attributes.c.value_json, STUDY_TEXT_MAX)
    return (
        select(_STUDIES.c.study_id, _STUDIES.c.study_name, attributes.c.key, text)
        .join_from(_STUDIES, attributes, _STUDIES.c.study_id == attributes.c.study_id)
        .where(which, attributes.c.key.in_(keys.STUDY_KEYS))
        .order_by(_STUDIES.c.study_id)
    )


def _fetched_trials(connection: sqlalchemy.Connection, which: _Condition) -> dict[Any, list[_Row]]:
    """Return the trials of studies by the database's number of those, in the order they began."""
    begun: dict[Any, dict[str, Any]] = {}
    for trial_id, key, text in connection.execute(_begun(which)):
        begun.setdefault(trial_id, {})[key] = text
    by_study: dict[Any, list[_Row]] = {}
    for study_id, trial_id, number, state, record, config in connection.execute(_trials_of(which)):
        texts = begun.get(trial_id, {}) | {keys.RECORD: record, keys.CONFIG: config}
        by_study.setdefault(study_id, []).append(_Row(number, state, texts))
    return by_study


def _trials_of(which: _Condition) -> sqlalchemy.Select[Any]:
    """Return what selects a row for each trial, with what tells of one that ended."""
    trials = _TRIALS
    record, config = _TRIAL_ATTRIBUTES.alias("record"), _TRIAL_ATTRIBUTES.alias("config")
    joined: sqlalchemy.FromClause = trials
    for attribute, key in ((record, keys.RECORD), (config, keys.CONFIG)):
        is_of_it = sqlalchemy.and_(
            attribute.c.trial_id == trials.c.trial_id, attribute.c.key == key
        )
        joined = joined.outerjoin(attribute, is_of_it)
    identity = (trials.c.study_id, trials.c.trial_id, trials.c.number, trials.c.state)
    texts = (
        case((attribute.c.trial_id.is_(None), None), else_=_limited(text, TRIAL_TEXT_MAX))
        for attribute, text in ((record, record.c.value_json), (config, config.c.value_json))
    )
    order = (trials.c.study_id, trials.c.trial_id)
    return select(*identity, *texts).select_from(joined).where(which).order_by(*order)


def _begun(which: _Condition) -> sqlalchemy.Select[Any]:
    """Return what selects the rest that is known of trials that have not ended."""
    trials, attributes = _TRIALS, _TRIAL_ATTRIBUTES
    return (
        select(
            trials.c.trial_id, attributes.c.key, _limited(attributes.c.value_json, TRIAL_TEXT_MAX)
        )
        .join_from(trials, attributes, attributes.c.trial_id == trials.c.trial_id)
        .where(
            which,
            sqlalchemy.cast(trials.c.state, sqlalchemy.String) == _RUNNING,
            attributes.c.key.in_(keys.BEGUN_KEYS),
        )
    )


def _limited(text: sqlalchemy.ColumnElement[Any], most: int) -> sqlalchemy.ColumnElement[Any]:
    """Return an attribute's text, and not that which is absurdly long."""
    return case((text.is_(None), ""), (func.length(text) <= most, text), else_=_TOO_LONG)


def _study(name: str, texts: _Texts, rows: Sequence[_Row]) -> StoredStudy | UnreadableStudy:
    try:
        definition = _definition(texts)
    except _UnreadableError as error:
        return UnreadableStudy(name, str(error), len(rows))
    damaged: list[str] = []

    def attribute(key: str, kind: TypeAdapter[T], otherwise: T) -> T:
        try:
            return _value(kind, key, texts[key]) if key in texts else otherwise
        except _UnreadableError as error:
            damaged.append(str(error))
            return otherwise

    return StoredStudy(
        name=name,
        definition=definition,
        trials=_stored_trials(rows),
        identity=attribute(keys.IDENTITY, _TEXT, ""),
        environments=tuple(run["environment"] for run in attribute(keys.RUNS, _RUNS, [])),
        wall_seconds=attribute(keys.WALL_SECONDS, _SECONDS, 0.0),
        ended=attribute(keys.ENDED, _END, None),
        format=attribute(keys.FORMAT, _COUNT, 0),
        damaged=tuple(damaged),
    )


def _stored_trials(rows: Sequence[_Row]) -> StoredTrials:
    records: list[TrialRecord] = []
    running: list[RunningTrial] = []
    unreadable: list[Unreadable] = []
    numbers: Counter[Any] = Counter()
    with _kept() if len(rows) >= MANY else nullcontext():
        for row in rows:
            numbers[row.number] += 1
            try:
                match _trial(row):
                    case TrialRecord() as record:
                        records.append(record)
                    case RunningTrial() as trial:
                        running.append(trial)
            except _UnreadableError as error:
                number = row.number if _is_number(row.number) else None
                is_foreign = isinstance(error, _NoRecordError)
                unreadable.append(Unreadable(number, str(error), is_foreign))
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


@contextmanager
def _kept() -> Iterator[None]:
    """Look for garbage neither in what is made meanwhile nor ever in what is then there.

    Thousands of records have no cycles, and looking through them all again and again took longer
    than reading them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


class _UnreadableError(Exception):
    """Says in words what of a trial or of a study cannot be read."""


class _NoRecordError(_UnreadableError):
    """A trial ended, and not by sweep, which stores a record in the same transaction."""


def _trial(row: _Row) -> TrialRecord | RunningTrial | None:
    """Return what is stored of one trial; None of one that never began."""
    if not _is_number(row.number):
        raise _UnreadableError(f"its number is {quote(row.number)}")
    if row.state in _ENDED:
        return _ended_trial(row)
    if row.state == _RUNNING:
        return _running_trial(row.number, row.texts)
    if row.state == _QUEUED:
        return None
    raise _UnreadableError(f"its state {quote(row.state)} is not known")


def _ended_trial(row: _Row) -> TrialRecord | None:
    text, config = row.texts[keys.RECORD], row.texts[keys.CONFIG]
    if text is None:
        # What was begun and never ran is told as failed; nothing else ends without a record.
        if row.state == _FAILED:
            return None
        raise _NoRecordError("it has no record")
    record = _validated(TrialRecord, keys.RECORD, text)
    if record.number != row.number:
        raise _UnreadableError(f"its record is of trial {record.number}")
    implausible = next(_implausible(record), None)
    if implausible is not None:
        raise _UnreadableError(f"in its record {implausible}")
    # Both were written by the same code, so that the text of the one is nearly always in the other.
    if config is None or _holds(text, config):
        return record
    if canonical(_validated(TrialConfig, keys.CONFIG, config)) != canonical(record.config):
        raise _UnreadableError("its record is of another configuration than it began with")
    return record


def _holds(record: Any, config: Any) -> bool:
    """Whether the text of a record has that of a configuration in its place."""
    is_whole = isinstance(config, str) and config.endswith("}")
    return is_whole and isinstance(record, str) and f'"{keys.CONFIG}": {config}' in record


def _running_trial(number: int, texts: _Texts) -> RunningTrial:
    config, errand = texts[keys.CONFIG], texts.get(keys.PURPOSE)
    purpose = SEARCH if errand is None else _validated(Errand, keys.PURPOSE, errand)
    started, attempt = (
        None if key not in texts else _value(_OPTIONAL_TEXT, key, texts[key])
        for key in (keys.STARTED_AT, keys.ATTEMPT)
    )
    return RunningTrial(
        number,
        None if config is None else _validated(TrialConfig, keys.CONFIG, config),
        started,
        purpose.purpose,
        purpose.confirms,
        purpose.series,
        attempt,
    )


def _validated(model: type[Model], key: str, text: Any) -> Model:
    _check_length(key, text)
    try:
        return model.__pydantic_validator__.validate_json(text)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise _UnreadableError(_reason(error, key, model)) from None


def _check_length(key: str, text: Any) -> None:
    if not text:
        raise _UnreadableError(f"its {key} is empty")
    if text == _TOO_LONG:
        raise _UnreadableError(f"its {key} is too long to be one")


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
    parts = _parts(record)
    numbers = itertools.chain.from_iterable(_numbers(type(part))(part.__dict__) for part in parts)
    # Nothing and zero are plausible. A sum tells of what is no number, which has no place in order.
    known = list(filter(None, numbers))
    is_bounded = min(known) >= 0 and max(known) < _INTEGER_END
    if is_bounded and math.isfinite(sum(known)) and _is_interval(record) and _has_peak(record):
        return
    for part in parts:
        for name, value in part.__dict__.items():
            if isinstance(value, int | float) and not _can_be(name, value):
                yield f"{name} is {quote(value)}"
    if not _is_interval(record):
        yield "step_seconds_ci95 is no interval of seconds"
    if not _has_peak(record):
        yield "peak_allocated_bytes is 0"


def _has_peak(record: TrialRecord) -> bool:
    return record.measurement is None or record.measurement.peak_allocated_bytes > 0


def _parts(record: TrialRecord) -> list[BaseModel]:
    """Return the models that hold a record's numbers."""
    measured = record.measurement
    outcome = record.outcome if measured is None else measured
    parts: list[BaseModel] = [record, record.config, outcome]
    beside = (record.prediction, record.carried, None if measured is None else measured.soak)
    parts.extend(part for part in beside if part is not None)
    return parts


@cache
def _numbers(model: type[BaseModel]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Return what gets a model's numbers from its values."""
    wanted = {int, float}
    names = [
        name
        for name, field in model.model_fields.items()
        if not wanted.isdisjoint((field.annotation, *get_args(field.annotation)))
    ]
    # Of a single key it would return no tuple.
    return itemgetter(*names, *names[:1]) if names else lambda _: ()


def _is_interval(record: TrialRecord) -> bool:
    """Whether a measured step's interval is one; of what was not measured there is none."""
    measured = record.measurement
    if measured is None or measured.step_seconds_ci95 is None:
        return True
    low, high = measured.step_seconds_ci95
    return 0 <= low <= high < math.inf


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

    @field_validator("config")
    @classmethod
    def _sizes_are_counts(cls, config: dict[str, Any]) -> dict[str, Any]:
        for key in SIZES:
            value = config.get(key)
            if value is not None and (type(value) is not int or not 1 <= value <= SIZE_MAX):
                raise ValueError(f"has {quote(value)} as its {key}")
        if not isinstance(config.get("model_type", ""), str):
            raise ValueError(f"has {quote(config['model_type'])} as its model_type")
        return config


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
_COUNT = TypeAdapter(Annotated[int, Field(ge=0, strict=True)])
_END: TypeAdapter[dict[str, Any] | None] = TypeAdapter(
    Annotated[dict[str, Any], _unchanged(_End)] | None
)


def _value(kind: TypeAdapter[T], key: str, text: Any) -> T:
    _check_length(key, text)
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        raise _UnreadableError(_reason(error, key)) from None


def _definition(texts: _Texts) -> StudyDefinition:
    """Return what a study is about."""
    if keys.DEFINITION not in texts:
        raise _UnreadableError("it has no definition")
    values = _value(_OBJECT, keys.DEFINITION, texts[keys.DEFINITION])
    try:
        definition = StudyDefinition.model_validate(values)
        _Model.model_validate(definition.model)
    except ValidationError as error:
        raise _UnreadableError(f"its definition is of another version: {explain(error)}") from None
    try:
        definition.space.baseline_config()
    except InputError as error:
        raise _UnreadableError(str(error)) from None
    budget = definition.target.budget_bytes
    if not 0 < budget < _INTEGER_END:
        raise _UnreadableError(f"its definition has a budget of {quote(budget)} bytes")
    return definition
