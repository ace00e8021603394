"""Owns how a sampler sees a study's trials: with what it learns from, and no more.

Optuna reads every attribute of every trial for its samplers, which look at none; of a study of
10,000 trials that is 28 MiB of JSON, parsed a second time beside the driver's own read. Here a
finished trial whose record the driver has comes with that record, and with its attributes when
somebody asks for them. What the driver does not know comes whole, as from Optuna.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import sqlalchemy
from optuna.distributions import BaseDistribution, json_to_distribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import DateTime, column, select, table

from storage.records import TrialRecord

NAMED_MAX = 500
"""Trials that one statement names; where more are wanted, all are fetched."""

_TRIALS = table(
    "trials",
    column("trial_id"),
    column("study_id"),
    column("number"),
    column("state"),
    column("datetime_start", DateTime),
    column("datetime_complete", DateTime),
)
_PARTS = {
    name: table(name, column(key), column("trial_id"), *map(column, columns))
    for name, key, columns in (
        ("trial_params", "param_id", ("param_name", "param_value", "distribution_json")),
        ("trial_values", "trial_value_id", ("objective", "value", "value_type")),
        (
            "trial_intermediate_values",
            "trial_intermediate_value_id",
            ("step", "intermediate_value", "intermediate_value_type"),
        ),
        ("trial_system_attributes", "trial_system_attribute_id", ("key", "value_json")),
        ("trial_user_attributes", "trial_user_attribute_id", ("key", "value_json")),
    )
}
_BEYOND = {"INF_POS": float("inf"), "INF_NEG": float("-inf"), "NAN": float("nan")}
"""What a column of finite numbers cannot hold, by the name beside it."""

_Where = sqlalchemy.ColumnElement[bool]
_Rows = Mapping[int, list[tuple[Any, ...]]]
"""Columns by the trial that they are of, in the order in which they were stored."""


class OnDemand(Mapping[str, Any]):
    """A finished trial's attributes, fetched when they are first read.

    Args:
        record: what they say, as the driver has it.
        fetch: fetches them.
    """

    def __init__(self, record: TrialRecord, fetch: Callable[[], dict[str, Any]]) -> None:
        self.record = record
        self._fetch = fetch
        self._known: dict[str, Any] | None = None

    def _all(self) -> dict[str, Any]:
        if self._known is None:
            self._known = self._fetch()
        return self._known

    def __getitem__(self, key: str) -> Any:
        return self._all()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self._all(), memo)


class SearchStorage(RDBStorage):
    """Optuna's storage, as the one driver of a study uses it."""

    record_of: Callable[[int], TrialRecord | None] = staticmethod(lambda number: None)
    """What the driver has of a finished trial of its study; None for nothing."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make one transaction of all that is written and read meanwhile: all of it or nothing.

        A file is synchronized with the disk once instead of once a value.
        """
        with self.engine.begin() as connection:
            self.remove_session()
            self.scoped_session.configure(bind=connection, join_transaction_mode="rollback_only")
            try:
                yield
            finally:
                self.remove_session()
                self.scoped_session.configure(
                    bind=self.engine, join_transaction_mode="conditional_savepoint"
                )

    def _get_trials(
        self,
        study_id: int,
        states: Container[TrialState] | None,
        included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:
        """Return trials by their numbers in the database: those above one, and some below it.

        Optuna's cache reads through this: once all, then what has changed.
        """
        named = {known for known in included_trial_ids if known <= trial_id_greater_than}
        where = _TRIALS.c.study_id == study_id
        if len(named) <= NAMED_MAX:
            is_new = _TRIALS.c.trial_id > trial_id_greater_than
            is_wanted = sqlalchemy.or_(is_new, _TRIALS.c.trial_id.in_(named)) if named else is_new
            where = sqlalchemy.and_(where, is_wanted)
        with self._reading() as fetch:
            trials = [
                row
                for row in fetch(select(_TRIALS).where(where).order_by(_TRIALS.c.trial_id))
                if (row.trial_id > trial_id_greater_than or row.trial_id in named)
                and (states is None or _state(row) in states)
            ]
            if not trials:
                return []
            known = {
                row.trial_id: record
                for row in trials
                if _state(row).is_finished() and (record := self.record_of(row.number)) is not None
            }
            parts = {name: _fetched(fetch, name, where) for name in _PARTS if "user" not in name}
            unknown = [row.trial_id for row in trials if row.trial_id not in known]
            attributes = _fetched(fetch, "trial_user_attributes", where, among=unknown)
        read = _Reader()
        return [
            read.trial(
                row,
                parts,
                OnDemand(known[row.trial_id], partial(self.get_trial_user_attrs, row.trial_id))
                if row.trial_id in known
                else _texts(attributes.get(row.trial_id, ())),
            )
            for row in trials
        ]

    @contextmanager
    def _reading(self) -> Iterator[Callable[[sqlalchemy.Select[Any]], list[Any]]]:
        session = self.scoped_session()
        try:
            yield lambda statement: list(session.execute(statement).all())
            session.commit()
        except BaseException:
            session.rollback()
            raise
        finally:
            session.close()


def _fetched(
    fetch: Callable[[sqlalchemy.Select[Any]], list[Any]],
    name: str,
    where: _Where,
    *,
    among: Collection[int] | None = None,
) -> _Rows:
    """Return what one table has of some trials.

    Args:
        fetch: runs a statement.
        name: of the table.
        where: says of which trials.
        among: narrows those down; None for all of them.
    """
    if among is not None and not among:
        return {}
    part = _PARTS[name]
    key, trial_id, *columns = part.c
    statement = select(trial_id, *columns).join_from(part, _TRIALS, trial_id == _TRIALS.c.trial_id)
    if among is not None and len(among) <= NAMED_MAX:
        statement = statement.where(trial_id.in_(among))
    rows: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for id, *values in fetch(statement.where(where).order_by(key)):
        rows[id].append(tuple(values))
    return rows


class _Reader:
    """Makes trials of rows; what is the same in thousands of them is made once."""

    def __init__(self) -> None:
        self._distributions: dict[str, BaseDistribution] = {}
        self._values: dict[tuple[str, float], Any] = {}

    def trial(
        self, row: Any, parts: Mapping[str, _Rows], attributes: Mapping[str, Any]
    ) -> FrozenTrial:
        """Return one trial."""

        def of(name: str) -> list[tuple[Any, ...]]:
            return parts[name].get(row.trial_id, [])

        params = of("trial_params")
        values = [_number(value, kind) for _, value, kind in sorted(of("trial_values"))]
        return FrozenTrial(
            number=row.number,
            state=_state(row),
            value=None,
            values=values or None,
            datetime_start=_when(row.datetime_start),
            datetime_complete=_when(row.datetime_complete),
            params={name: self._value(text, value) for name, value, text in params},
            distributions={name: self._distribution(text) for name, _, text in params},
            user_attrs=attributes,  # type: ignore[arg-type]
            system_attrs=_texts(of("trial_system_attributes")),
            intermediate_values={
                step: _number(value, kind) for step, value, kind in of("trial_intermediate_values")
            },
            trial_id=row.trial_id,
        )

    def _distribution(self, text: str) -> BaseDistribution:
        if text not in self._distributions:
            self._distributions[text] = json_to_distribution(text)
        return self._distributions[text]

    def _value(self, text: str, value: float) -> Any:
        if (text, value) not in self._values:
            self._values[text, value] = self._distribution(text).to_external_repr(value)
        return self._values[text, value]


def _state(row: Any) -> TrialState:
    """Return a trial's state; one that nobody knows is as good as failed: nothing is learned."""
    return TrialState.__members__.get(row.state, TrialState.FAIL)


def _texts(rows: Collection[tuple[Any, ...]]) -> dict[str, Any]:
    """Return attributes, less those that are no JSON: whoever reads the study is told of them."""
    values = {}
    for key, text in rows:
        with suppress(ValueError, TypeError):
            values[key] = json.loads(text)
    return values


def _number(value: float | None, kind: str) -> float:
    return _BEYOND[kind] if value is None else value


def _when(moment: datetime | None) -> datetime | None:
    """Return a moment that was stored in UTC by this machine's clock, as Optuna has it."""
    if moment is None:
        return None
    return moment.replace(tzinfo=UTC).astimezone().replace(tzinfo=None)
