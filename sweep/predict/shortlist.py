"""The configurations of a space that can be the fastest of their class: found by bounds, not drawn.

A space that follows a question has millions of combinations. What is recommended of them, and what
that is compared with, is found class by class (`Kind`).

- A *row* is all combinations that differ in their micro-batch alone. Memory only grows along it, so
  a few predictions tell the largest micro-batches that surely fit, and that may.
- Speeds are quick to predict and peaks are not. So a row's memory is looked at only while the
  fastest that it could be, whatever fits, is not slower than what was found by more than a tie.
- First come all combinations of the settings that matter most (`FIRST`), with every share of
  recomputed layers. Then the fastest are refined: each setting is turned, one at a time, again with
  every share and every micro-batch, until nothing is faster.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.config import (
    BATCH_KEYS,
    CAPACITY_KEYS,
    SETTINGS,
    SIZE_KEYS,
    TrialConfig,
)
from qlora_sweep.search_spaces.dimensions import FloatRange
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.kinds import QUANTIZATIONS, Numerics
from qlora_sweep.search_spaces.linears import CapacityClass, nearest_capacity
from qlora_sweep.search_spaces.preference import TIE, plainness
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.sweep.predict.forecast import Forecaster, Progress, SpeedForecast, silent
from qlora_sweep.sweep.predict.memory.prediction import Fit

WHOLE_MAX = 4_000
"""Combinations up to which every row of a space is looked at."""
FIRST = (
    "compute_dtype",
    "quantization",
    "kernels",
    "compile",
    "packing",
    "data_parallel",
    "sharding",
)
"""Settings of which all combinations are looked at first."""
SHARE = "checkpoint_fraction"
"""The setting that buys memory for larger micro-batches: every value of it is always looked at."""
WAITING = "checkpoint_offload"
"""Buys more of it for no speed, where layers are recomputed: structures that differ in it alone
count as one of the fastest few."""
FIRST_MAX = 256
"""Combinations of `FIRST` that are looked at; of a space with more, those of its first settings."""
POINTS = 9
"""Values that are taken of a range of numbers that has no steps."""
STRUCTURES_FIRST, ROWS_FIRST = 3, 12
"""Of one class, the fastest by what bounds them, which mostly rule the others out."""
SIZES_FIRST = 7
"""Micro-batches of a row that are looked at first, evenly spread by their logarithm."""
OF_4_BITS = frozenset(["quantized_fraction", "offload_fraction"])
"""Settings that a base in 4 bits alone knows."""
REFINED = 2
"""Fastest structures of a class around which settings are turned."""
CARRIED = 6
"""Fastest structures of a class that are looked at first in another one."""
BATCHES_TIMED, BATCHES_TIMED_RISING = 10, 3
"""Micro-batches of a row that bound its speed, evenly spread by their logarithm. A larger one may
be slower, as rows are padded to the longest or a tensor leaves the GPU's cache; where neither is,
few do."""
BETWEEN_TIMED = 0.03
"""Relative: how much faster a micro-batch between those may be."""
ESTIMATED_WITHIN = 0.04
"""Relative: how much faster than its estimate a row may turn out to be."""
NEAR_MAX = 16
"""Rows of a class among which the plainest is looked for."""
SIZES_LOOKED_AT = 48
"""Micro-batches of such a row."""
SURE_SHARE = 0.95
"""Of a budget, about as much as surely fits: the first guess."""
STARTS_TRIED = 32
"""First micro-batches of a row that a rule may forbid: too few tokens, or nothing to group."""

Params = Mapping[str, Any]
"""A value for each dimension but the micro-batch."""
_SURE_SPEED = attrgetter("sure_speed")
_IS_SURE = attrgetter("is_sure")
_IS_POSSIBLE = attrgetter("is_possible")


class Kind(NamedTuple):
    """What speeds compare within: what an adapter can learn, from how much context, and how its
    products are rounded."""

    capacity: CapacityClass
    seq_len: int
    numerics: Numerics


@dataclass(frozen=True)
class Pick:
    """A configuration that was found, and whether it fits."""

    config: TrialConfig
    fit: Fit


@dataclass(eq=False)
class _Row:
    """Combinations that differ in their micro-batch alone, the smallest first."""

    params: Params
    kind: Kind
    configs: Sequence[TrialConfig]
    """By micro-batch; the first is one that no rule forbids."""
    fits: dict[int, Fit | None] = field(default_factory=dict)
    """Of those that were looked at; None where only a replay tells."""
    peaks: dict[int, int] = field(default_factory=dict)
    """Least allocated bytes, alike."""
    speeds: dict[int, float] = field(default_factory=dict)
    """Predicted tokens/s, alike."""
    sure: int = -1
    """The largest that surely fits; -1 for none."""
    possible: int = -1
    """The largest that may fit; -1 for none."""
    estimate: float | None = None
    """The speed that it is expected to reach, by peaks of rows like it; None where nothing is."""
    refusal: InputError | None = None
    """Why no memory is predicted, where none is."""
    is_open: bool = False
    """Whether a replay may find a larger one that surely fits."""
    is_fitted: bool = False

    @property
    def bound(self) -> float:
        """The speed that it may reach, whatever fits."""
        return max(self.speeds.values(), default=0.0) * (1.0 + BETWEEN_TIMED)

    @property
    def hope(self) -> float:
        """No less than the speed that it will turn out to have, as a rule."""
        assert self.estimate is not None, "only what is estimated is hoped for"
        return min(self.bound, self.estimate * (1.0 + ESTIMATED_WITHIN))

    @property
    def structure(self) -> tuple[Any, ...]:
        """What tells it apart beside its share of recomputed layers."""
        return tuple(value for key, value in self.params.items() if key != SHARE)

    @property
    def relatives(self) -> tuple[Any, ...]:
        """What tells it apart beside that, and where the inputs of those layers wait."""
        apart = (SHARE, WAITING)
        return tuple(value for key, value in self.params.items() if key not in apart)

    @property
    def share(self) -> float:
        """Its share of recomputed layers."""
        return self.configs[0].checkpoint_fraction

    @property
    def is_sure(self) -> bool:
        """Whether anything of it surely fits."""
        return self.sure >= 0

    @property
    def is_possible(self) -> bool:
        """Whether anything of it may fit."""
        return self.possible >= 0

    @property
    def is_predicted(self) -> bool:
        """Whether its memory was looked at and is predicted."""
        return self.is_fitted and self.refusal is None

    def best(self, last: int) -> tuple[float, int]:
        """Return the fastest up to a micro-batch, and which; minus infinity for none."""
        best = (float("-inf"), -1)
        for at, speed in self.speeds.items():
            if at <= last:
                best = max(best, (speed, at))
        return best

    @property
    def sure_speed(self) -> float:
        """The speed of the fastest that surely fits; minus infinity for none."""
        return self.best(self.sure)[0]

    @property
    def possible_speed(self) -> float:
        """The speed of the fastest that may fit; minus infinity for none."""
        return self.best(self.possible)[0]

    def size_at(self, place: int) -> int:
        """Return a micro-batch of it; 0 for none."""
        if place < 0:
            return 0
        return self.configs[place].micro_batch_size

    def order(self, last: int) -> tuple[float, int]:
        """Return what sorts rows by their fastest up to a micro-batch: its speed, then its tokens
        where none is known."""
        speed, at = self.best(last)
        if at < 0:
            return speed, 0
        return speed, self.configs[at].tokens_per_micro_batch


@dataclass(eq=False)
class _Class:
    """The rows of one kind."""

    kind: Kind
    rows: list[_Row] = field(default_factory=list)

    @property
    def is_possible(self) -> bool:
        """Whether anything of it may fit."""
        return any(map(_IS_POSSIBLE, self.rows))

    @property
    def fastest(self) -> float:
        """The speed of the fastest that surely fits; minus infinity for none."""
        return max(map(_SURE_SPEED, self.rows), default=float("-inf"))

    @property
    def least(self) -> float:
        """The speed that is within a tie of that."""
        return self.fastest / (1.0 + TIE)

    def open_structures(self, most: int) -> list[list[_Row]]:
        """Return the rows of structures of which nothing is estimated and that may be as fast, by
        their share of recomputed layers; the fastest structures first."""
        structures: dict[tuple[Any, ...], list[_Row]] = {}
        for row in self.rows:
            if row.estimate is None and not row.is_fitted:
                structures.setdefault(row.structure, []).append(row)
        least = self.least
        left = [alike for alike in structures.values() if _bound(alike) >= least]
        left.sort(key=_bound, reverse=True)
        taken: list[list[_Row]] = []
        families: set[tuple[Any, ...]] = set()
        for alike in left:
            families.add(alike[0].relatives)
            if len(families) > most:
                break
            taken.append(sorted(alike, key=attrgetter("share")))
        return taken

    def open_rows(self) -> list[_Row]:
        """Return rows whose memory is estimated and was not looked at, and that may be as fast, the
        fastest first."""
        least = self.least
        left: list[_Row] = []
        for row in self.rows:
            if row.estimate is not None and not row.is_fitted and row.hope >= least:
                left.append(row)
        return sorted(left, key=attrgetter("hope"), reverse=True)

    def near_rows(self) -> list[_Row]:
        """Return rows that surely reach a speed within a tie of the fastest: the fastest few of
        each compute dtype and type of the base."""
        by_types: dict[tuple[str, str], list[_Row]] = {}
        for row in sorted(self.rows_from(self.least), key=_SURE_SPEED, reverse=True):
            first = row.configs[0]
            by_types.setdefault((first.compute_dtype, first.quantization), []).append(row)
        near: list[_Row] = []
        for rows in by_types.values():
            near += rows[:NEAR_MAX]
        return near

    def rows_from(self, least: float) -> list[_Row]:
        """Return the rows that surely reach a speed."""
        return [row for row in self.rows if row.sure_speed >= least]

    def fastest_rows(self, most: int) -> list[_Row]:
        """Return the fastest rows that surely fit, or may where none surely does, no two of which
        are relatives."""
        able = sorted(filter(_IS_SURE, self.rows), key=_SURE_SPEED)
        if not able:
            able = sorted(filter(_IS_POSSIBLE, self.rows), key=attrgetter("possible_speed"))
        fastest: dict[tuple[Any, ...], _Row] = {}
        for row in reversed(able):
            fastest.setdefault(row.relatives, row)
        return list(fastest.values())[:most]


class Shortlist:
    """Looks for the fastest of each class.

    Args:
        space: what is looked over.
        forecaster: of the GPU; its speed and memory decide.
        progress: told of what takes its time.

    Raises:
        InputError: memory can be predicted of no configuration.
        EnvironmentFault: the tracing process does not answer.
    """

    def __init__(
        self, space: SearchSpace, forecaster: Forecaster, *, progress: Progress = silent
    ) -> None:
        self._space = space
        self._forecaster = forecaster
        self._progress = progress
        self._values = {key: _listed(space, key) for key in space.dimensions}
        self._values.pop("micro_batch_size", None)
        self._classes: dict[Kind, _Class] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._known_capacities: dict[tuple[Any, Any], CapacityClass] = {}
        """By rank and target modules as they are spelled."""
        self._known_batches: dict[tuple[Any, ...], list[int]] = {}
        """By GPUs and effective batch."""
        self.invalid: Counter[str] = Counter()
        """Configurations that a rule forbids, by rule."""
        self.is_whole = (space.size() or WHOLE_MAX + 1) <= WHOLE_MAX
        """Whether every row was looked at."""
        if self.is_whole:
            self._look(self._rows(self._values), is_whole=True)
        else:
            self._search()
        refused = self.refused
        if refused and not self._predicted_rows:
            raise refused[0][0]

    @property
    def _all_rows(self) -> Iterator[_Row]:
        for of in self._classes.values():
            yield from of.rows

    @property
    def _predicted_rows(self) -> list[_Row]:
        return list(filter(attrgetter("is_predicted"), self._all_rows))

    @property
    def _possible_rows(self) -> list[_Row]:
        return list(filter(_IS_POSSIBLE, self._all_rows))

    # What was found

    @cached_property
    def capacity(self) -> CapacityClass | None:
        """The capacity class that is recommended from: of those that may fit the one that was asked
        for, the standard recipe's by default; None where nothing may fit."""
        able = {row.kind.capacity for row in self._possible_rows}
        return nearest_capacity(able, self._forecaster.model)

    def counts(self) -> tuple[int, int, int]:
        """Return how many of the configurations that were looked at surely fit, may, and cannot."""
        sure = 0
        possible = 0
        total = 0
        for row in self._predicted_rows:
            sure += row.sure + 1
            possible += row.possible + 1
            total += len(row.configs)
        return sure, possible - sure, total - possible

    @property
    def refused(self) -> list[tuple[InputError, int]]:
        """Why no memory is predicted, and of how many configurations, a row each."""
        return [(row.refusal, len(row.configs)) for row in self._all_rows if row.refusal]

    @property
    def least_bytes(self) -> int | None:
        """The smallest peak of the rows of which nothing may fit; None where some of each does."""
        impossible = [row for row in self._predicted_rows if row.possible < 0]
        return min((row.peaks[0] for row in impossible), default=None)

    def picks(self) -> list[Pick]:
        """Return of each class the fastest that surely fits and the plainest that is as fast, the
        plainest first; and the fastest that may fit, where it is faster."""
        self._look_closer()
        found: list[Pick] = []
        for of in self._classes.values():
            found += self._picks_of(of)
        return found

    def _picks_of(self, of: _Class) -> list[Pick]:
        fastest = max(of.rows, key=lambda row: row.order(row.sure))
        speed, at = fastest.best(fastest.sure)
        picked = dict[TrialConfig, Fit]()
        if at >= 0:
            row, plain = self._plainest(of, speed, attrgetter("sure"))
            picked[row.configs[plain]] = Fit.YES
            picked.setdefault(fastest.configs[at], Fit.YES)
        riskier = max(of.rows, key=lambda row: row.order(row.possible))
        faster, where = riskier.best(riskier.possible)
        if where >= 0 and at < 0:
            row, plain = self._plainest(of, faster, attrgetter("possible"))
            picked[row.configs[plain]] = Fit.UNCERTAIN
        if where >= 0 and (at < 0 or faster > speed * (1.0 + TIE)):
            picked.setdefault(riskier.configs[where], Fit.UNCERTAIN)
        return [Pick(config, fit) for config, fit in picked.items()]

    def _plainest(
        self, of: _Class, speed: float, last_of: Callable[[_Row], int]
    ) -> tuple[_Row, int]:
        """Return the plainest of a class that is within a tie of a speed.

        Args:
            of: the class.
            speed: of its fastest.
            last_of: returns the last place of a row that fits, surely or perhaps.
        """
        least = speed / (1.0 + TIE)
        found: list[tuple[tuple[float, ...], _Row, int]] = []
        for row in of.rows:
            last = last_of(row)
            # Speed hardly falls with the micro-batch, so the smallest needs least.
            for at, known in sorted(row.speeds.items()):
                if at <= last and at in row.peaks and known >= least:
                    found.append((plainness(row.configs[at], row.peaks[at]), row, at))
                    break
        _, row, at = min(found, key=itemgetter(0))
        return row, at

    def candidates(self, most: int) -> list[tuple[dict[str, Any], TrialConfig]]:
        """Return what a study may try, with the values that the space has for it: the plainest of
        those that are as fast as any, and of each row the largest micro-batches that surely fit and
        that may, and smaller ones, the fastest first.

        Of the recommended capacity class they are many, of any other few.
        """
        found: list[tuple[float, _Row, int]] = []
        for row in self._all_rows:
            for at, speed in row.speeds.items():
                is_wanted = at <= row.possible
                if row.kind.capacity != self.capacity:
                    is_wanted = is_wanted and at == row.sure
                if is_wanted:
                    found.append((speed, row, at))
        found.sort(key=itemgetter(0), reverse=True)
        self._look_closer()
        wanted: dict[tuple[_Row, int], None] = {}
        for of in self._classes.values():
            if any(map(_IS_SURE, of.rows)):
                wanted[self._plainest(of, of.fastest, attrgetter("sure"))] = None
        for _, row, at in found:
            wanted[row, at] = None
        candidates: list[tuple[dict[str, Any], TrialConfig]] = []
        for row, at in itertools.islice(wanted, most):
            config = row.configs[at]
            params = dict(row.params)
            if "micro_batch_size" in self._space.dimensions:
                params["micro_batch_size"] = config.micro_batch_size
            candidates.append((params, config))
        return candidates

    @property
    def lengths(self) -> tuple[int, ...]:
        """The sequence lengths of the space."""
        return tuple(self._values.get("seq_len") or self._space.values_of("seq_len"))

    def surely_fitting(self) -> list[TrialConfig]:
        """Return of each row that was looked at the largest micro-batch that surely fits."""
        return [row.configs[row.sure] for row in filter(_IS_SURE, self._all_rows)]

    def largest(self, length: int) -> tuple[int, int]:
        """Return the largest micro-batches of the recommended capacity class that surely fit at a
        length, and that may; 0 where none does."""
        rows: list[_Row] = []
        for row in self._all_rows:
            if row.kind.capacity == self.capacity and row.kind.seq_len == length:
                rows.append(row)
        most = max(map(attrgetter("share"), rows), default=0.0)
        left: list[_Row] = []
        for row in rows:
            if not row.is_fitted and row.share == most and self._is_lean(row):
                left.append(row)
        self._fit(left)
        sure = 0
        possible = 0
        for row in rows:
            sure = max(sure, row.size_at(row.sure))
            possible = max(possible, row.size_at(row.possible))
        return sure, possible

    def _is_lean(self, row: _Row) -> bool:
        """Whether a row holds its base, and computes its loss, in what needs least memory."""
        keys = ("quantization", "double_quant", "kernels")
        return all(row.params.get(key) == self._first.get(key) for key in keys)

    def at_sizes(
        self, batches: Sequence[int], lengths: Sequence[int], numerics: Numerics
    ) -> dict[tuple[int, int], Pick]:
        """Return the fastest of the recommended capacity class and a class of numerics at each
        size, which fits if anything does; batches that do not go into others are left out."""
        points: dict[tuple[int, int], list[tuple[_Row, int]]] = {}
        for length in lengths:
            for row in self._near_fastest(length, numerics):
                for at, config in enumerate(row.configs):
                    if config.micro_batch_size in batches:
                        points.setdefault((config.micro_batch_size, length), []).append((row, at))
        every = list(itertools.chain.from_iterable(points.values()))
        self._predict(every)
        self._time(every)
        found: dict[tuple[int, int], Pick] = {}
        for size, some in points.items():
            row, at = max(some, key=_fit_then_speed)
            found[size] = Pick(row.configs[at], self._known_fit(row, at))
        for size in itertools.product(batches, lengths):
            sized = self._first | dict(zip(SIZE_KEYS, size, strict=True))
            if size not in found and self._space.holds_batches_of(sized):
                # What a rule forbids at that size.
                found[size] = Pick(self._space.config(sized), Fit.NO)
        return found

    def _near_fastest(self, length: int, numerics: Numerics) -> list[_Row]:
        """Return the rows of the fastest structures of the recommended capacity class."""
        assert self.capacity is not None, "something may fit"
        of = self._classes.get(Kind(self.capacity, length, numerics))
        if of is None:
            return []
        if self.is_whole:
            return of.rows
        structures = set(map(attrgetter("structure"), of.fastest_rows(1)))
        return [row for row in of.rows if row.structure in structures or not structures]

    def _known_fit(self, row: _Row, at: int) -> Fit:
        """Return whether a configuration fits, by a replay where only that tells."""
        known = row.fits.get(at)
        if known is None:
            known = row.fits[at] = self._forecaster.forecast([row.configs[at]]).fit(0)
        return known

    # The search

    @cached_property
    def _capacities(self) -> dict[CapacityClass, Params]:
        """The values that make each capacity class, the first of equal ones."""
        values = {key: self._values[key] for key in CAPACITY_KEYS if key in self._values}
        found: dict[CapacityClass, Params] = {}
        for params in _combinations(values):
            config = self._space.config(self._first | params)
            found.setdefault(CapacityClass.of(config, self._forecaster.model), params)
        return found

    @cached_property
    def _first(self) -> dict[str, Any]:
        """One combination: of each dimension the value that needs least memory."""
        leanest = {key: _leanest(key, values) for key, values in self._values.items()}
        whole = next(iter(self._space.batches), None)
        if whole is not None:
            for key, value in zip(BATCH_KEYS, whole, strict=True):
                if key in self._space.dimensions:
                    leanest[key] = value
        return leanest

    def _search(self) -> None:
        """Look for the fastest of each class of the recommended capacity: the nearest to the
        standard recipe's of which anything may fit."""
        lengths = sorted(self.lengths)
        for capacity in self._nearest_first():
            own = dict(self._capacities[capacity])
            classes: Collection[_Class] = self._search_length(own, lengths[0])
            for length in lengths[1:]:
                # What is fast at one length is so at the next one, as far as it fits there.
                like = _fastest_rows(classes, CARRIED)
                classes = self._look(self._carried(like, own | self._at(length))).values()
                if not any(map(_IS_POSSIBLE, classes)):
                    classes = self._search_length(own, length)
            if self._possible_rows:
                break

    def _at(self, length: int) -> dict[str, Any]:
        """Return a length as the value of its dimension, where it has one."""
        if "seq_len" not in self._values:
            return {}
        return {"seq_len": length}

    def _search_length(self, capacity: Params, length: int) -> Collection[_Class]:
        """Look for the fastest of each class of numerics of a capacity class at a length."""
        own = {**self._first, **capacity, **self._at(length)}
        values: dict[str, Sequence[Any]] = {}
        for key, value in own.items():
            if key in self._values:
                values[key] = (value,)
        for key in _firsts(self._values):
            values[key] = self._values[key]
            if key == "compute_dtype":
                values[key] = _plainest_of_each_numerics(values[key])
        classes = self._look(self._rows(values)).values()
        self._refine(classes)
        return classes

    def look_at_other_capacities(self, seq_len: int, numerics: Numerics) -> None:
        """Look for the fastest of each other capacity class at a length, in a class of numerics."""
        capacity = self.capacity
        if capacity is None or self.is_whole:
            return
        fastest = self._classes[Kind(capacity, seq_len, numerics)].fastest_rows(1)
        shares = self._values.get(SHARE, ())
        rows: list[_Row] = []
        for like in fastest:
            near: list[Any] = []
            for at, share in enumerate(shares):
                if share == like.params[SHARE]:
                    near += shares[max(0, at - 2) : at + 4]
            for other, own in self._capacities.items():
                if other != capacity:
                    rows += self._with_shares({**like.params, **own}, near)
        self._look(rows)

    def look_beside_fastest(self) -> None:
        """Look for the fastest of each other capacity class at the length and in the numerics of
        the fastest that may fit."""
        able = self._possible_rows
        if able:
            fastest = max(able, key=lambda row: row.order(row.possible)).kind
            self.look_at_other_capacities(fastest.seq_len, fastest.numerics)

    def _nearest_first(self) -> Iterator[CapacityClass]:
        """Yield the capacity classes in the order in which they are recommended."""
        left = dict.fromkeys(self._capacities)
        while left:
            nearest = nearest_capacity(left, self._forecaster.model)
            assert nearest is not None, "there are classes"
            yield nearest
            del left[nearest]

    def _carried(self, rows: Sequence[_Row], own: Params) -> Iterator[_Row]:
        """Yield the structures of rows with other values of some settings, and every share; what
        fitted on the GPU there may have to wait on the host here."""
        for row in rows:
            params = {**row.params, **own}
            yield from self._with_every_share(params)
            for waits in self._values.get(WAITING, ()):
                yield from self._with_every_share({**params, WAITING: waits})

    def _with_every_share(self, params: Params) -> Iterator[_Row]:
        yield from self._with_shares(params, self._values.get(SHARE, ()))

    def _with_shares(self, params: Params, shares: Sequence[Any]) -> Iterator[_Row]:
        """Yield the rows of a combination with some shares of recomputed layers; with its own where
        there are none."""
        values: dict[str, Sequence[Any]] = {key: (value,) for key, value in params.items()}
        if shares:
            values[SHARE] = shares
        yield from self._rows(values)

    def _refine(self, classes: Collection[_Class]) -> None:
        """Turn one setting after another of the fastest of classes, until nothing is faster."""
        # Of settings of which all combinations were looked at, compute dtypes alone were not all.
        fixed = {"seq_len", SHARE}
        fixed.update(CAPACITY_KEYS, _firsts(self._values))
        fixed.discard("compute_dtype")
        turned: list[str] = []
        for key, values in self._values.items():
            if len(values) > 1 and key not in fixed:
                turned.append(key)
        done: set[tuple[Any, ...]] = set()
        while True:
            rows = [row for row in _fastest_rows(classes, REFINED) if row.relatives not in done]
            if not rows:
                return
            changed: list[_Row] = []
            for row in rows:
                done.add(row.relatives)
                for key in turned:
                    for params in self._turned(row.params, key):
                        changed += self._with_every_share(params)
            kinds = set(map(attrgetter("kind"), classes))
            self._look(row for row in changed if row.kind in kinds)

    def _turned(self, params: Params, key: str) -> Iterator[Params]:
        """Yield a combination with every value of a setting; of one that a base in 4 bits alone
        knows, with every such base, as another one may be faster with it."""
        bases = [params]
        if key in OF_4_BITS and "quantization" in self._values:
            bases.clear()
            for name in self._values["quantization"]:
                if QUANTIZATIONS[name].bits == 4:
                    bases.append({**params, "quantization": name})
        for base in bases:
            for value in self._values[key]:
                yield {**base, key: value}

    # Rows

    def _rows(self, values: Mapping[str, Sequence[Any]]) -> Iterator[_Row]:
        """Yield the rows of combinations of values that were not looked at."""
        for params in _combinations(values):
            if self._space.leaves_out(params):
                continue
            row = self._row(params)
            if row is not None:
                yield row

    def _row(self, params: dict[str, Any]) -> _Row | None:
        if params.get(SHARE) == 0 and False in self._values.get(WAITING, ()):
            # Nothing is recomputed, so nothing waits.
            params = {**params, WAITING: False}
        key = tuple(repr(params[name]) for name in self._values)
        if key in self._seen:
            return None
        self._seen.add(key)
        batches = self._batches(params)
        if not batches:
            return None
        rule = ""
        tried = batches[:STARTS_TRIED]
        for start, size in enumerate(tried):
            first = self._config(params, size)
            violation = self._forecaster.violation(first)
            if violation is None:
                self.invalid[rule] += start
                kind = Kind(self._capacity_of(first), first.seq_len, first.numerics)
                return _Row(params, kind, _Configs(first, batches[start:]))
            rule = violation.rule
            if start == 0:
                last = self._config(params, tried[-1])
                if self._forecaster.violation(last) is not None:
                    # It is not the micro-batch that is forbidden.
                    break
        self.invalid[rule] += len(batches)
        return None

    def _config(self, params: Params, size: int) -> TrialConfig:
        """Return a combination's configuration; each of its values was read with the space."""
        written = {key: _as_read(value) for key, value in params.items()}
        return self._any.changed(**written, micro_batch_size=size)

    @cached_property
    def _any(self) -> TrialConfig:
        """A configuration of the space."""
        return self._space.config(self._first)

    def _capacity_of(self, config: TrialConfig) -> CapacityClass:
        key = config.lora_rank, config.target_modules
        if key not in self._known_capacities:
            self._known_capacities[key] = CapacityClass.of(config, self._forecaster.model)
        return self._known_capacities[key]

    def _batches(self, params: Params) -> Sequence[int]:
        """Return the micro-batches that go with a combination, the smallest first."""
        together = (params.get("data_parallel"), params.get("effective_batch_size"))
        if together not in self._known_batches:
            batches: list[int] = []
            for size in sorted(set(self._space.values_of("micro_batch_size"))):
                if self._space.holds_batches_of({**params, "micro_batch_size": size}):
                    batches.append(size)
            self._known_batches[together] = batches
        return self._known_batches[together]

    # Predictions

    def _look(self, rows: Iterable[_Row], *, is_whole: bool = False) -> dict[Kind, _Class]:
        """Look at rows while they may be as fast as what was found; return their classes."""
        found: dict[Kind, _Class] = {}
        added: list[_Row] = []
        for row in rows:
            of = self._classes.setdefault(row.kind, _Class(row.kind))
            of.rows.append(row)
            found[row.kind] = of
            added.append(row)
        self._time_some((row, len(row.configs) - 1) for row in added)
        if is_whole:
            self._look_at_memory(added)
        else:
            # The fastest few rule most others out, before anything of those is traced.
            for most in (STRUCTURES_FIRST, len(added)):
                structures: list[list[_Row]] = []
                for of in found.values():
                    structures += of.open_structures(most)
                self._estimate(structures)
                for most_rows in (ROWS_FIRST, len(added)):
                    left: list[_Row] = []
                    for of in found.values():
                        left += of.open_rows()[:most_rows]
                    self._look_at_memory(left)
        for of in found.values():
            self._resolve(of, is_whole=is_whole)
        return found

    def _look_at_memory(self, rows: Sequence[_Row]) -> None:
        """Find which configurations of some rows fit, and how fast they are."""
        self._fit(rows)
        lasts: list[tuple[_Row, int]] = []
        for row in rows:
            lasts += itertools.product([row], {row.sure, row.possible} - {-1})
        self._time_some(lasts)

    def _estimate(self, structures: Sequence[Sequence[_Row]]) -> None:
        """Estimate which speed each row will reach, by the peaks of a few rows of each structure.

        A peak is nearly a straight line over the micro-batch, and over the share of recomputed
        layers where some are and some are not.

        Args:
            structures: the rows of each, by their share of recomputed layers.
        """
        anchors: dict[_Row, list[int]] = {}
        for alike in structures:
            for row in _anchors(alike):
                top = len(row.configs) - 1
                anchors[row] = sorted({0, min(top, math.isqrt(top))})
        points: list[tuple[_Row, int]] = []
        for row, places in anchors.items():
            points += itertools.product([row], places)
        self._predict(points)
        largest: dict[_Row, int] = {}
        for alike in structures:
            lines = {row: _line(row, anchors[row]) for row in alike if row in anchors}
            largest |= dict(self._expected(alike, lines))
        self._time_some(largest.items())
        for row, last in largest.items():
            row.estimate, _ = row.best(last)

    def _time_some(self, lasts: Iterable[tuple[_Row, int]]) -> None:
        """Predict those speeds that tell how fast rows may be up to a place each."""
        most = BATCHES_TIMED
        if self._rises:
            most = BATCHES_TIMED_RISING
        points: list[tuple[_Row, int]] = []
        for row, last in lasts:
            points += itertools.product([row], _spread(last + 1, most))
        self._time(points)

    @cached_property
    def _rises(self) -> bool:
        """Whether speed can only rise with the micro-batch: nothing is padded, and no tensor leaves
        the GPU's cache."""
        speed = self._forecaster.target_speed or self._forecaster.speed
        if not isinstance(speed, SpeedForecast) or self._forecaster.shapes is not None:
            return False
        return speed.gpu.cache is None

    def _expected(
        self, alike: Sequence[_Row], lines: Mapping[_Row, tuple[float, float]]
    ) -> Iterator[tuple[_Row, int]]:
        """Yield rows of one structure with the largest micro-batch that may be expected to fit;
        where not even the smallest is, the row is done.

        Args:
            alike: the rows, by their share of recomputed layers.
            lines: peaks of some of them, as constant and slope over the place.
        """
        budget = self._forecaster.budget_bytes
        _, least, most = _anchors(alike)
        for row in alike:
            if row in lines:
                constant, slope = lines[row]
                if row.fits[0] is Fit.NO:
                    row.is_fitted = True
                    continue
            else:
                share = (row.share - least.share) / (most.share - least.share)
                constant = (1.0 - share) * lines[least][0] + share * lines[most][0]
                slope = (1.0 - share) * lines[least][1] + share * lines[most][1]
            last = len(row.configs) - 1
            if slope > 0:
                last = min(max(int((budget - constant) / slope), 0), last)
            yield row, last

    def _look_closer(self) -> None:
        """Predict what tells the plainest of each class: speeds of all sizes, and peaks, of the
        rows that are within a tie of the fastest."""
        points: list[tuple[_Row, int]] = []
        for of in self._classes.values():
            for row in of.near_rows():
                points += itertools.product([row], _spread(row.sure + 1, SIZES_LOOKED_AT))
        self._time(points)
        least = {kind: of.least for kind, of in self._classes.items()}
        self._predict(point for point in points if _speed(point) >= least[point[0].kind])

    def _resolve(self, of: _Class, *, is_whole: bool) -> None:
        """Replay steps where only that tells what fits, as far as it may be the fastest."""
        while True:
            rows = filter(attrgetter("is_open"), of.rows)
            row = max(rows, key=attrgetter("possible_speed"), default=None)
            if row is None or not (is_whole or row.possible_speed > of.fastest):
                return
            self._replay(row)

    def _replay(self, row: _Row) -> None:
        """Find the largest micro-batches of a row again, each looked at as closely as it takes."""
        first = row.sure + 1

        def may_fit(at: int) -> bool:
            return self._known_fit(row, at) is not Fit.NO

        def surely_fits(at: int) -> bool:
            return self._known_fit(row, at) is Fit.YES

        row.possible = _last(range(first, row.possible + 1), may_fit)
        row.sure = _last(range(first, row.possible + 1), surely_fits)
        row.is_open = False
        self._time((row, last) for last in (row.sure, row.possible) if last >= 0)

    def _time(self, points: Iterable[tuple[_Row, int]]) -> None:
        """Predict the speed of some micro-batches of rows."""
        missing = list(dict.fromkeys(p for p in points if p[1] not in p[0].speeds))
        if not missing:
            return
        speeds = self._speeds(list(map(_config, missing)))
        for (row, at), speed in zip(missing, speeds.tolist(), strict=True):
            row.speeds[at] = speed

    def _speeds(self, configs: Sequence[TrialConfig]) -> NDArray[np.float64]:
        """Return tokens/s on the GPU that the answer is for; 0 where nothing is known."""
        target = self._forecaster.target_speed
        if isinstance(target, SpeedForecast):
            return np.nan_to_num(target.times(configs).tokens_per_second)
        return self._forecaster.forecast(configs).tokens_per_second

    def _predict(self, points: Iterable[tuple[_Row, int]]) -> None:
        """Predict whether some micro-batches of rows fit, as far as that takes no replay."""
        missing = list(dict.fromkeys(p for p in points if p[1] not in p[0].fits))
        if not missing:
            return
        configs = list(map(_config, missing))
        forecasts = self._forecaster.forecast(configs, progress=self._progress)
        quick = forecasts.fits
        least = forecasts.least_bytes.tolist()
        refused = forecasts.unpredicted
        has_dataset = self._forecaster.shapes is not None
        for number, (row, at) in enumerate(missing):
            fit = quick[number]
            if number in refused:
                row.refusal = refused[number]
                fit = Fit.NO
            elif at and has_dataset and self._forecaster.violation(configs[number]) is not None:
                # The dataset is too small for such a micro-batch.
                fit = Fit.NO
            row.fits[at] = fit
            row.peaks[at] = least[number]

    def _fit(self, rows: Sequence[_Row]) -> None:
        """Find the largest micro-batches of rows that surely fit, and that may."""
        searches = {row: _largest(row, self._forecaster.budget_bytes) for row in rows}
        while searches:
            points: list[tuple[_Row, int]] = []
            for row, search in list(searches.items()):
                wanted = next(search, None)
                if wanted is None:
                    row.is_fitted = True
                    del searches[row]
                else:
                    points += itertools.product([row], wanted)
            self._predict(points)


class _Configs(Sequence[TrialConfig]):
    """A row's configurations, each made when it is first asked for."""

    def __init__(self, first: TrialConfig, batches: Sequence[int]) -> None:
        self._first = first
        self._batches = batches
        self._made: dict[int, TrialConfig] = {0: first}

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, at: Any) -> Any:
        if at not in self._made:
            self._made[at] = self._first.changed(micro_batch_size=self._batches[at])
        return self._made[at]


def structures(space: SearchSpace) -> list[TrialConfig]:
    """Return the combinations of a space that are looked at first, of every capacity class, in
    their smallest size."""
    values = {key: _listed(space, key) for key in space.dimensions if key != "seq_len"}
    whole = set(CAPACITY_KEYS)
    whole.update(_firsts(values))
    for key, known in values.items():
        if key not in whole:
            values[key] = [_leanest(key, known)]
    values.pop("micro_batch_size", None)
    if "seq_len" in space.dimensions:
        values["seq_len"] = [min(_listed(space, "seq_len"))]
    sizes = sorted(set(space.values_of("micro_batch_size")))
    found: dict[TrialConfig, None] = {}
    for params in _combinations(values):
        for size in sizes:
            sized = {**params, "micro_batch_size": size}
            if space.goes_together(sized):
                found[space.config(sized)] = None
                break
    return list(found)


def _combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield each combination of a value of each setting."""
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def _fastest_rows(classes: Iterable[_Class], most: int) -> list[_Row]:
    """Return the fastest few rows of each class, of different structures."""
    rows: list[_Row] = []
    for of in classes:
        rows += of.fastest_rows(most)
    return rows


def _config(point: tuple[_Row, int]) -> TrialConfig:
    row, at = point
    return row.configs[at]


def _speed(point: tuple[_Row, int]) -> float:
    row, at = point
    return row.speeds[at]


def _firsts(values: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return settings of which all combinations are looked at."""
    keys: list[str] = []
    count = 1
    for key in FIRST:
        known = values.get(key, ())
        if len(known) > 1 and count * len(known) <= FIRST_MAX:
            keys.append(key)
            count *= len(known)
    if SHARE in values:
        keys.append(SHARE)
    return keys


def _largest(row: _Row, budget_bytes: int) -> Generator[list[int], None, None]:
    """Find the largest micro-batches of a row that surely fit, and that may.

    Peaks are nearly straight lines over the micro-batch: where the line between what fits and what
    does not meets the budget is guessed, and looked at with its neighbours.

    Yields:
        The places of micro-batches of which predictions are wanted next.
    """
    top = len(row.configs) - 1
    yield [0]
    if row.fits[0] is Fit.NO:
        return
    yield _spread(top + 1, SIZES_FIRST)
    while True:
        row.possible, above_possible = _bracket(row, (Fit.YES, Fit.UNCERTAIN, None))
        row.sure, above_sure = _bracket(row, (Fit.YES,))
        wanted = _between(row, row.possible, above_possible, limit_bytes=budget_bytes)
        limit_bytes = int(SURE_SHARE * budget_bytes)
        wanted |= _between(row, row.sure, above_sure, limit_bytes=limit_bytes)
        if not wanted:
            break
        yield sorted(wanted)
    row.is_open = row.fits.get(row.sure + 1, Fit.NO) is None


def _anchors(alike: Sequence[_Row]) -> tuple[_Row, _Row, _Row]:
    """Return the rows of a structure by whose peaks the others' are estimated: the first, and the
    ends of those in which some layers are recomputed and some are not; of fewer than four rows each
    is one of them."""
    inside = alike[1:] or alike
    if len(alike) > 3:
        inside = alike[1:-1]
    return alike[0], inside[0], inside[-1]


def _bound(rows: Sequence[_Row]) -> float:
    """Return the speed that the fastest of some rows may reach, whatever fits."""
    return max(row.bound for row in rows)


def _line(row: _Row, places: Sequence[int]) -> tuple[float, float]:
    """Return a row's peaks as a line over the place, by some of them: constant and slope."""
    first, last = places[0], places[-1]
    slope = (row.peaks[last] - row.peaks[first]) / max(1, last - first)
    return row.peaks[first] - slope * first, slope


def _bracket(row: _Row, wanted: Sequence[Fit | None]) -> tuple[int, int]:
    """Return the last place known to fit as is wanted, -1 for none, and the next known one."""
    last = -1
    above = len(row.configs)
    for at in sorted(row.fits, reverse=True):
        if row.fits[at] in wanted:
            last = at
            break
        above = at
    return last, above


def _between(row: _Row, low: int, high: int, *, limit_bytes: int) -> set[int]:
    """Return guesses, between two places, of where peaks pass a limit; none where nothing is."""
    if high - low <= 1:
        return set()
    guess = (low + high) // 2
    if low >= 0 and high in row.peaks and row.peaks[high] > row.peaks[low]:
        share = (limit_bytes - row.peaks[low]) / (row.peaks[high] - row.peaks[low])
        guess = low + int(share * (high - low))
    near = range(guess - 1, guess + 3)
    return {min(max(at, low + 1), high - 1) for at in near}


def _last(places: range, holds: Callable[[int], bool]) -> int:
    """Return the last of places at which something holds that holds up to it; the one before the
    first where it holds nowhere."""
    return places.start - 1 + bisect_left(places, True, key=lambda at: not holds(at))


def _fit_then_speed(point: tuple[_Row, int]) -> tuple[int, float]:
    """Return what sorts configurations of one size, the one to show last."""
    row, at = point
    order = (Fit.NO, None, Fit.UNCERTAIN, Fit.YES)
    return order.index(row.fits[at]), row.speeds[at]


def _plainest_of_each_numerics(dtypes: Sequence[str]) -> list[str]:
    """Return the compute dtypes of which one after another is looked at, but for those of which a
    plainer one is of the same class of numerics."""
    plainest: dict[str, TrialConfig] = {}
    for dtype in dtypes:
        config = TrialConfig(compute_dtype=dtype)
        known = plainest.setdefault(config.numerics, config)
        if plainness(config, 0) < plainness(known, 0):
            plainest[config.numerics] = config
    return [config.compute_dtype for config in plainest.values()]


def _spread(count: int, most: int) -> list[int]:
    """Return at most so many of the places from 0 to a count, evenly spread by their logarithm, the
    last one among them."""
    if count <= most:
        return list(range(count))
    places = np.geomspace(1, count, most).round().astype(int) - 1
    return sorted(set(places.tolist()))


def _listed(space: SearchSpace, key: str) -> list[Any]:
    """Return the values of a dimension; of a range without steps some of them."""
    dimension = space.dimensions[key]
    values = dimension.values()
    if values is None:
        assert isinstance(dimension, FloatRange), "only a range of numbers has no list of values"
        return list(map(dimension.at, np.linspace(0.0, 1.0, POINTS).tolist()))
    return list(values)


def _as_read(value: Any) -> Any:
    """Return a value as a configuration holds it."""
    if isinstance(value, list | tuple):
        return tuple(sorted(set(value)))
    return value


def _leanest(key: str, values: Sequence[Any]) -> Any:
    """Return the value that needs least memory, as a rule; where none is known to, the standard
    recipe's."""
    setting = SETTINGS[key]
    for lean in setting.lean_first:
        if lean in values:
            return lean
    if setting.memory == "shrinks":
        return max(values)
    if setting.memory == "grows" and all(isinstance(value, int | float) for value in values):
        return min(values)
    standard = getattr(TrialConfig(), key)
    return standard if standard in values else values[0]
