"""Owns whether a space holds any configuration that the rules allow, however large the space is.

Knows nothing of memory. A rule reads few keys: which ones is seen by watching it, and it is then
asked about every value of those keys alone, whatever the other dimensions hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

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
) -> None:
    """Refuse a space in which nothing can be valid, and a configuration that names no real module.

    Any other configuration that a rule forbids is one that does not fit: that is an answer. Without
    a compute capability only what no card could run is refused.

    Raises:
        InputError: names the rules, and why.
    """
    if isinstance(asked, SearchSpace):
        broken = obstacles(asked, model=model, compute_capability=compute_capability, device=device)
        what = f"space '{asked.name}': no configuration is valid"
    else:
        reason = RULES[MISNAMED](asked, Setting(model, device, compute_capability))
        broken = () if reason is None else (Violation(MISNAMED, reason),)
        what = "target_modules"
    if broken:
        raise InputError(f"{what}: {'; '.join(f'{one.rule}: {one.reason}' for one in broken)}")


def obstacles(
    space: SearchSpace,
    *,
    model: ModelSpec,
    compute_capability: tuple[int, int] | None,
    device: Literal["cuda", "cpu"],
) -> tuple[Violation, ...]:
    """Return the rules that leave no configuration of ``space`` valid; none where one is.

    Exact, but for a rule that reads a range without steps, or too many values to go through: such a
    rule is taken to allow something.

    Args:
        space: what may be tried.
        model: what would be trained.
        compute_capability: of the card; None on a CPU, or where it is not known.
        device: where it would run.
    """
    setting = Setting(model, device, compute_capability)
    dimensions = _Dimensions(space)
    found = (_table(dimensions, name, rule, setting) for name, rule in RULES.items())
    biting = [table for table in found if table is not None and table.reason is not None]
    alone = [table for table in biting if not table.allowed]
    if not alone and _can_agree(biting):
        return ()
    return tuple(Violation(table.rule, table.reason or "") for table in alone or biting)


@dataclass(frozen=True)
class _Table:
    """What one rule says of every combination of the dimensions that it reads."""

    rule: str
    allowed: tuple[Row, ...]
    reason: str | None
    """Why it forbids the first one that it forbids; None where it forbids nothing."""


class _Watched:
    """A configuration that notes which of its keys are read, by its own properties as well."""

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
        # A method of the whole configuration may read anything.
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

        None where the row's batches do not go into each other: it is not in the space.
        """
        values = {key: (self._columns[key] or ())[position] for key, position in row.items()}
        params = {**self._first, **values}
        batches = (dict(zip(BATCHES, pair, strict=True)) for pair in self._space.batches)
        for known in itertools.chain([params], batches):
            possible = {**params, **known, **values}
            if self._space.holds_batches_of(possible):
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
            said = rule(cast(TrialConfig, watched), setting)
            more = dimensions.among(watched.read) - keys
            if more:
                # What a rule reads may depend on what it read before: ask again about more.
                keys |= more
                break
            if said is None:
                allowed.append(row)
            else:
                reason = reason or said
        else:
            return _Table(name, tuple(allowed), reason)
    return None


def _can_agree(tables: Sequence[_Table]) -> bool:
    """Whether some value of every dimension is allowed by all rules together."""
    # Rules of one dimension first: they leave the others less to go through.
    ordered = sorted(tables, key=lambda table: len(table.allowed[0]))
    narrow: dict[str, set[int]] = {}
    wide: list[tuple[Row, ...]] = []
    for table in ordered:
        rows = tuple(row for row in table.allowed if _is_within(row, narrow))
        if not rows:
            return False
        if len(rows[0]) == 1:
            (key,) = rows[0]
            narrow[key] = {row[key] for row in rows}
        else:
            wide.append(rows)
    steps = itertools.count()
    return _is_common(wide, {}, steps)


def _is_within(row: Row, narrow: Mapping[str, set[int]]) -> bool:
    return all(row[key] in values for key, values in narrow.items() if key in row)


def _is_common(wide: Sequence[tuple[Row, ...]], chosen: Row, steps: Iterator[int]) -> bool:
    """Whether a row of each table agrees with the others and with what was chosen before."""
    if not wide:
        return True
    for row in wide[0]:
        if next(steps) > STEPS_MAX:
            return True
        agrees = all(chosen.get(key, position) == position for key, position in row.items())
        if agrees and _is_common(wide[1:], {**chosen, **row}, steps):
            return True
    return False
