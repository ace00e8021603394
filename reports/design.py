"""Owns a study as an experiment: which settings varied, in which steps, and what goes together.

Pure. Two settings are alike where they train alike, however they are spelled. Knows nothing of what
the steps are worth.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from search_spaces.config import KNOBS, TrialConfig, canonical
from search_spaces.space import SearchSpace
from storage.definition import StudySnapshot
from storage.ranking import rankable
from storage.records import OUT_OF_MEMORY, TrialRecord

TRIALS_PER_VALUE = 5
"""A number with fewer trials for each of its values is fitted by a slope."""
VALUES_APART = 8
"""A number with more values is told by a slope as well."""
# What follows from another setting where it is not written out is no difference of its own.
_AS_WRITTEN = ("lora_alpha", "effective_batch_size")


Quantity = Literal["speed", "memory"]


Settings = Mapping[str, Any]


def settings_of(config: TrialConfig) -> Settings:
    """Return what a configuration sets, alike for two that train alike."""
    resolved = canonical(config).model_dump(mode="python")
    return resolved | {key: getattr(config, key) for key in _AS_WRITTEN}


@dataclass(frozen=True)
class Seen:
    """One configuration that was measured, or that did not fit."""

    record: TrialRecord
    settings: Settings

    @cached_property
    def log_speed(self) -> float:
        """Logarithm of the tokens/s."""
        measured = self.record.measurement
        assert measured is not None, "what did not fit has no speed"
        return math.log(measured.tokens_per_second)

    @cached_property
    def log_half(self) -> float:
        """Half of the speed's own 95 % interval, in logarithms."""
        measured = self.record.measurement
        ends = None if measured is None else measured.speed_interval
        return 0.0 if ends is None else math.log(ends[1] / ends[0]) / 2

    @cached_property
    def peak_bytes(self) -> float:
        """Peak allocated bytes."""
        measured = self.record.measurement
        assert measured is not None, "what did not fit has no peak"
        return float(measured.peak_allocated_bytes)

    @cached_property
    def values(self) -> tuple[Any, ...]:
        """Its settings without their keys, which are in one order for all."""
        return tuple(self.settings.values())

    def value(self, quantity: Quantity) -> float:
        """Return what was measured of a quantity, where differences of it are told."""
        return self.log_speed if quantity == "speed" else self.peak_bytes


@dataclass(frozen=True)
class Knob:
    """A setting that a study varied, with the values that were measured."""

    key: str
    levels: tuple[Any, ...]
    is_slope: bool
    reference: Any
    """What the words of a setting that is no number are set against."""

    @property
    def is_doubling(self) -> bool:
        """Whether its slope is told per doubling; else from its least to its largest value."""
        return self.is_slope and min(self.levels) > 0 and isinstance(self.levels[0], int)

    def contrasts(self) -> tuple[tuple[Any, Any], ...]:
        """Return the changes to tell: neighbours of a number, or each word against the usual."""
        if len(self.levels) < 2 or self.is_slope:
            return ((self.levels[0], self.levels[-1]),)
        if _are_numbers(self.levels):
            return tuple(zip(self.levels, self.levels[1:], strict=False))
        return tuple((self.reference, v) for v in self.levels if v != self.reference)

    def scale(self, value: Any) -> float:
        """Return where a value is on the slope, whose unit is what is told."""
        if self.is_doubling:
            return math.log2(value)
        return float((value - self.levels[0]) / (self.levels[-1] - self.levels[0]))

    def columns(self, seen: Sequence[Seen]) -> list[list[float]]:
        """Return its columns of a fit: one for a slope, else one for each value but the first."""
        values = [one.settings[self.key] for one in seen]
        if self.is_slope:
            return [[self.scale(value) for value in values]]
        return [[float(value == level) for value in values] for level in self.levels[1:]]

    def weights(self, contrast: tuple[Any, Any]) -> list[float]:
        """Return how a contrast weighs those columns."""
        if self.is_slope:
            return [1.0]
        before, after = contrast
        return [float(level == after) - float(level == before) for level in self.levels[1:]]


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


Part = Literal["timed", "measured", "unfit"]
"""Of a sample."""
Groups = Mapping[tuple[Any, ...], Mapping[Any, Seen]]
"""Trials by the settings that they share, then by the value of the setting in which they differ."""


@dataclass(frozen=True)
class Sample:
    """The trials of a study that say something of its settings, each configuration once."""

    space: SearchSpace
    timed: tuple[Seen, ...]
    """Measured in steps enough for an interval, of the space or its baseline."""
    untimed: tuple[Seen, ...]
    """Measured in fewer: their peaks count, their speeds do not."""
    unfit: tuple[Seen, ...]
    """Out of memory, for real or by prediction."""

    @classmethod
    def of(cls, snapshot: StudySnapshot) -> Sample:
        """Return what a study's search says; of one configuration its last trial."""
        last = {canonical(r.config): Seen(r, settings_of(r.config)) for r in _telling(snapshot)}
        measured = [one for one in last.values() if one.record.measurement is not None]
        timed = tuple(one for one in measured if one.log_half > 0.0)
        known = {one.record.number for one in timed}
        return cls(
            snapshot.definition.space,
            timed,
            tuple(one for one in measured if one.record.number not in known),
            tuple(one for one in last.values() if one.record.measurement is None),
        )

    @cached_property
    def measured(self) -> tuple[Seen, ...]:
        """Every configuration that ran to a measurement."""
        return (*self.timed, *self.untimed)

    def seen(self, quantity: Quantity) -> tuple[Seen, ...]:
        """Return the trials that say something of a quantity."""
        return self.timed if quantity == "speed" else self.measured

    def groups(self, part: Part, knob: Knob) -> Groups:
        """Return the trials of a part that differ in a setting alone, by its value."""
        if (part, knob.key) not in self._groups:
            trials: tuple[Seen, ...] = getattr(self, part)
            self._groups[part, knob.key] = _groups_of(trials, knob)
        return self._groups[part, knob.key]

    @cached_property
    def _groups(self) -> dict[tuple[Part, str], Groups]:
        """Those that were asked for."""
        return {}

    @cached_property
    def knobs(self) -> tuple[Knob, ...]:
        """The dimensions of the space, in its order."""
        return tuple(self._knob(key) for key in self.space.dimensions)

    def _knob(self, key: str) -> Knob:
        levels = _ordered(key, {one.settings[key] for one in self.measured})
        usual = settings_of(self.space.baseline_config())[key]
        is_many = len(levels) > VALUES_APART
        is_sparse = len(self.timed) < TRIALS_PER_VALUE * len(levels)
        is_slope = len(levels) > 2 and _are_numbers(levels) and (is_many or is_sparse)
        return Knob(key, levels, is_slope, usual if usual in levels else levels[0])

    @cached_property
    def beside(self) -> tuple[Knob, ...]:
        """What varied though it is no dimension, as a baseline outside the space does."""
        seen = {key: {one.settings[key] for one in self.measured} for key in KNOBS}
        return tuple(
            Knob(key, _ordered(key, levels), is_slope=False, reference=None)
            for key, levels in seen.items()
            if key not in self.space.dimensions and len(levels) > 1
        )


def _telling(snapshot: StudySnapshot) -> Iterator[TrialRecord]:
    for record in sorted(rankable(snapshot.records), key=lambda record: record.number):
        if record.measurement is not None or record.verdict in OUT_OF_MEMORY:
            yield record


def _ordered(key: str, levels: Iterable[Any]) -> tuple[Any, ...]:
    """Return values in order: numbers by size, words the leanest first."""
    known, lean = list(levels), KNOBS[key].lean_first

    def place(value: Any) -> tuple[int, str]:
        return (lean.index(value) if value in lean else len(lean)), str(value)

    return tuple(sorted(known) if _are_numbers(known) else sorted(known, key=place))


def _groups_of(seen: Sequence[Seen], knob: Knob) -> Groups:
    known: dict[tuple[Any, ...], dict[Any, Seen]] = defaultdict(dict)
    place = next((list(one.settings).index(knob.key) for one in seen), 0)
    for one in seen:
        values = one.values
        known[values[:place] + values[place + 1 :]][values[place]] = one
    return known
