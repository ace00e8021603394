"""Owns whether a space holds any configuration that the rules allow, however large the space is.

Knows nothing of memory. A rule reads few keys: which ones is seen by watching it, and it is then
asked about every value of those keys alone, whatever the other dimensions hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Literal, cast

from pydantic import BaseModel

from search_spaces.config import CONFIG_KEYS, TrialConfig
from search_spaces.errors import InputError
from search_spaces.models import ModelSpec
from search_spaces.rules import RULES, Rule, Setting, Violation
from search_spaces.space import BATCHES, SearchSpace

ROWS_MAX = 100_000
"""Combinations of what one rule reads that are looked at; a rule with more is left undecided."""
STEPS_MAX = 1_000_000
"""Attempts to meet several rules at once; what is still open then counts as possible."""

MISNAMED = "unknown-target-module"
"""The rule against what is not there under its name."""

Row = Mapping[str, int]
"""By dimension, the position of a value among the dimension's."""


def refuse_impossible(
    asked: SearchSpace | TrialConfig,
    *,
    model: ModelSpec,
    compute_capability: tuple[int, int] | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    has_texts: bool = False,
) -> None:
    """Refuse a space in which nothing can be valid, and a configuration that names no real module.

    Any other configuration that a rule forbids is one that does not fit: that is an answer. Without
    a compute capability only what no card could run is refused.

    Raises:
        InputError: names the rules, and why.
    """
    if isinstance(asked, SearchSpace):
        broken = obstacles(
            asked,
            model=model,
            compute_capability=compute_capability,
            device=device,
            has_texts=has_texts,
        )
        what = f"space '{asked.name}': no configuration is valid"
    else:
        reason = RULES[MISNAMED](asked, Setting(model, device, compute_capability))
        broken = () if reason is None else (Violation(MISNAMED, reason),)
        what = "target_modules"
    if broken:
        raise InputError(f"{what}: {'; '.join(f'{rule.rule}: {rule.reason}' for rule in broken)}")


def obstacles(
    space: SearchSpace,
    *,
    model: ModelSpec,
    compute_capability: tuple[int, int] | None,
    device: Literal["cuda", "cpu"],
    has_texts: bool = False,
) -> tuple[Violation, ...]:
    """Return the rules that leave no configuration of ``space`` valid; none where one is.

    Exact, but for a rule that reads a range without steps, or too many values to go through: such a
    rule is taken to allow something.

    Args:
        space: what may be tried.
        model: what would be trained.
        compute_capability: of the card; None on a CPU, or where it is not known.
        device: where it would run.
        has_texts: whether it would train on texts, and not on full-length random rows.
    """
    setting = Setting(model, device, compute_capability, has_texts)
    dimensions = _Dimensions(space)
    tables = (_table(dimensions, name, rule, setting) for name, rule in RULES.items())
    forbidding = [table for table in tables if table is not None and table.reason is not None]
    exclusive = [table for table in forbidding if not table.allowed]
    # Small tables first: what contradicts each other is then found before much is gone through.
    ordered = [table.allowed for table in sorted(forbidding, key=lambda table: len(table.allowed))]
    if not exclusive and _is_common(ordered, {}, itertools.count()):
        return ()
    return tuple(Violation(table.rule, table.reason or "") for table in exclusive or forbidding)


@dataclass(frozen=True)
class _Table:
    """What one rule says of every combination of the dimensions that it reads."""

    rule: str
    allowed: tuple[Row, ...]
    reason: str | None
    """Why it forbids the first one that it forbids; None where it forbids nothing."""


class _Watched:
    """A configuration that notes which of its keys are read, by its own members as well."""

    def __init__(self, config: TrialConfig) -> None:
        self._config = config
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name in CONFIG_KEYS:
            self.read.add(name)
            return getattr(self._config, name)
        member = getattr(TrialConfig, name)
        if isinstance(member, property) and member.fget is not None:
            return member.fget(self)
        if isinstance(member, FunctionType) and not hasattr(BaseModel, name):
            return MethodType(member, self)
        # What pydantic makes of the whole configuration may read anything.
        self.read.update(CONFIG_KEYS)
        return getattr(self._config, name)


class _Dimensions:
    """The values of a space's dimensions, worked out once."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._columns = {key: dimension.values() for key, dimension in space.dimensions.items()}
        self._first = {key: dimension.first for key, dimension in space.dimensions.items()}

    def among(self, keys: set[str]) -> set[str]:
        """Return those of the keys that are dimensions."""
        return keys & self._first.keys()

    def rows(self, keys: Sequence[str]) -> Iterator[Row] | None:
        """Return every combination of some dimensions; None where there are too many, or no end."""
        columns = [self._columns[key] for key in keys]
        sizes = [len(column) for column in columns if column is not None]
        if len(sizes) < len(columns) or math.prod(sizes) > ROWS_MAX:
            return None
        positions = itertools.product(*map(range, sizes))
        return (dict(zip(keys, row, strict=True)) for row in positions)

    def config(self, row: Row) -> TrialConfig | None:
        """Return a configuration with a row's values, and the first of every other dimension.

        None where the row's batches do not go into each other, or it is left out of the space.
        """
        values = {key: (self._columns[key] or ())[position] for key, position in row.items()}
        params = {**self._first, **values}
        batches = (dict(zip(BATCHES, pair, strict=True)) for pair in self._space.batches)
        others = ({**both, **row} for both in batches for row in self._space.together)
        for known in itertools.chain([params], others):
            possible = {**params, **known, **values}
            if self._space.goes_together(possible):
                return self._space.config(possible)
        return None


def _table(dimensions: _Dimensions, name: str, rule: Rule, setting: Setting) -> _Table | None:
    """Ask a rule about every combination of what it reads; None where those are too many."""
    keys: set[str] = set()
    while (rows := dimensions.rows(sorted(keys))) is not None:
        allowed, reason = [], None
        for row in rows:
            config = dimensions.config(row)
            if config is None:
                continue
            watched = _Watched(config)
            why = rule(cast(TrialConfig, watched), setting)
            more = dimensions.among(watched.read) - keys
            if more:
                # What a rule reads may depend on what it read before: ask again about more.
                keys |= more
                break
            if why is None:
                allowed.append(row)
            else:
                reason = reason or why
        else:
            return _Table(name, tuple(allowed), reason)
    return None


def _is_common(tables: Sequence[tuple[Row, ...]], chosen: Row, steps: Iterator[int]) -> bool:
    """Whether a row of each table agrees with the others and with what was chosen before."""
    if not tables:
        return True
    for row in tables[0]:
        if next(steps) > STEPS_MAX:
            return True
        agrees = all(chosen.get(key, position) == position for key, position in row.items())
        if agrees and _is_common(tables[1:], {**chosen, **row}, steps):
            return True
    return False
