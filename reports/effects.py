"""Owns what each setting is worth: the change of speed and of memory from one value to another.

Pure: a study's snapshot in, a value out. Trials that differ in one setting alone are a matched
pair, and the pairs' ratios are told where there are enough of them. Where there are not, a linear
fit of the logarithm of speed, and of the peak, by every setting that varied says what the study
determines, with what the fit misses in its interval. What was never varied apart from another is
unknown: a median of everything tried at one value would be the effect of its company. Only the
speeds of one process and of at least six steps are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from reports import units
from reports.design import Knob, Quantity, Sample, Seen
from reports.regression import Estimate, LinearFit, Vector, mean_estimate
from search_spaces.config import KNOBS, canonical
from storage.definition import StudySnapshot

PAIRS_ENOUGH = 6
"""From so many matched pairs on they are told rather than the fit, whose interval is narrower than
that of fewer."""
DEGREES_ENOUGH = 3
"""The fewest trials that a fit must have beyond what it determines: with fewer, what it misses is
hardly seen."""
ARROW = " → "
_NAMED = 3

Basis = Literal["pairs", "fit", "pair"]
"""Several matched pairs, the fitted model, or a single pair."""


@dataclass(frozen=True)
class Change:
    """A change of one quantity, and what tells it."""

    estimate: Estimate
    """Ratio of tokens/s, or difference of peak allocated bytes; of a single pair's memory without
    an interval, as peaks repeat to the byte."""
    basis: Basis
    count: int
    """Matched pairs, or trials that were fitted."""
    pair: str = ""
    """From what to what a single pair went, where that is not the whole step of its effect."""


@dataclass(frozen=True)
class Effect:
    """What going from one value of a setting to another is worth."""

    key: str
    before: str
    """In words that stand alone; empty for a slope per doubling."""
    after: str
    speed: Change | None
    memory: Change | None
    untold: str = ""
    """Why the change of speed cannot be told; empty where it is."""
    would_tell: str = ""
    """Which two trials would tell."""
    unfit_after: int = 0
    """Matched pairs of which only the first fitted."""
    unfit_before: int = 0
    """Matched pairs of which only the second fitted."""

    @property
    def label(self) -> str:
        """The change in words: ``hf kernels → liger kernels``."""
        return f"{self.before}{ARROW}{self.after}" if self.before else self.after


@dataclass(frozen=True)
class Effects:
    """What a study tells of its settings."""

    effects: tuple[Effect, ...]
    """In the order of the space's dimensions."""
    trials: int
    """With a speed that counts."""
    left_out: int
    """Measured in so few steps that their speed has no interval."""
    measured_on: str


def effects_of(snapshot: StudySnapshot) -> Effects | None:
    """Return what a study tells of its settings; None where fewer than two trials were measured."""
    study = _Study(Sample.of(snapshot))
    sample = study.sample
    if len(sample.measured) < 2:
        return None
    target = snapshot.definition.target
    return Effects(
        effects=tuple(
            _effect(study, knob, contrast) for knob in sample.knobs for contrast in knob.contrasts()
        ),
        trials=len(sample.timed),
        left_out=len(sample.untimed),
        measured_on=target.emulated_on or target.gpu,
    )


@dataclass(frozen=True)
class _Fitted:
    fit: LinearFit
    places: Mapping[str, range]
    """Which columns are a setting's."""
    width: int

    def contrast(self, knob: Knob, contrast: tuple[Any, Any]) -> Vector:
        weights = np.zeros(self.width)
        weights[list(self.places[knob.key])] = knob.weights(contrast)
        return weights

    def company(self, knob: Knob, contrast: tuple[Any, Any]) -> tuple[str, ...]:
        """Return the settings that a contrast was never varied apart from, the most tied first."""
        owners = {column: key for key, columns in self.places.items() for column in columns}
        tied = self.fit.entangled(self.contrast(knob, contrast))
        names = dict.fromkeys(owners[column] for column in tied if column in owners)
        return tuple(name for name in names if name != knob.key)


@dataclass(frozen=True)
class _Study:
    """The trials of a study, and what is fitted to them."""

    sample: Sample

    @cached_property
    def fits(self) -> Mapping[Quantity, _Fitted]:
        """The fits of both quantities by every setting that varied, also outside the space."""
        return {"speed": self._fitted("speed"), "memory": self._fitted("memory")}

    def _fitted(self, quantity: Quantity) -> _Fitted:
        seen = self.sample.seen(quantity)
        columns: list[list[float]] = [[1.0] * len(seen)]
        places: dict[str, range] = {}
        for knob in (*self.sample.knobs, *self.sample.beside):
            added = knob.columns(seen)
            places[knob.key] = range(len(columns), len(columns) + len(added))
            columns += added
        values = np.array([one.value(quantity) for one in seen], dtype=float)
        matrix: Vector = np.array(columns, dtype=float).T
        return _Fitted(LinearFit.of(matrix, values), places, len(columns))


def _effect(study: _Study, knob: Knob, contrast: tuple[Any, Any]) -> Effect:
    speed = _change(study, knob, contrast, "speed")
    memory = _change(study, knob, contrast, "memory")
    is_told = speed is not None
    # Where single pairs are all there is, their own step is what is told, and no slope.
    steps = {change.pair for change in (speed, memory) if change is not None}
    own = steps.pop() if len(steps) == 1 else ""
    before, after = own.split(ARROW) if own else _words(knob, contrast)
    return Effect(
        knob.key,
        before,
        after,
        speed=speed,
        memory=memory,
        untold="" if is_told else _why_untold(study, knob, contrast),
        would_tell="" if is_told else _would_tell(study.sample, knob, contrast),
        unfit_after=_one_sided(study.sample, knob, contrast),
        unfit_before=_one_sided(study.sample, knob, contrast[::-1]),
    )


def _words(knob: Knob, contrast: tuple[Any, Any]) -> tuple[str, str]:
    before, after = (units.short(units.phrase(knob.key, value)) for value in contrast)
    if len(knob.levels) < 2:
        return "", KNOBS[knob.key].label
    if knob.is_doubling:
        ends = f"{units.short(contrast[0])} to {units.short(contrast[1])}"
        return "", f"twice the {KNOBS[knob.key].label} ({ends})"
    return before, after


def _change(
    study: _Study, knob: Knob, contrast: tuple[Any, Any], quantity: Quantity
) -> Change | None:
    """Return a change by what tells it best; None where nothing does."""
    if len(knob.levels) < 2:
        return None
    pairs = _pairs(study.sample, knob, contrast, quantity)
    fitted = study.fits[quantity]
    weights = fitted.contrast(knob, contrast)
    is_ratio = quantity == "speed"
    if len(pairs) >= PAIRS_ENOUGH:
        return Change(_of_pairs(pairs, is_ratio=is_ratio), "pairs", len(pairs))
    if fitted.fit.degrees >= DEGREES_ENOUGH and fitted.fit.tells(weights):
        estimate = fitted.fit.estimate(weights)
        told = _exponential(estimate) if is_ratio else estimate
        return Change(told, "fit", len(study.sample.seen(quantity)))
    if len(pairs) == 1:
        return _single(pairs[0], knob, is_ratio=is_ratio)
    if pairs:
        return Change(_of_pairs(pairs, is_ratio=is_ratio), "pairs", len(pairs))
    return None


@dataclass(frozen=True)
class _Pair:
    """The difference of one matched pair, and half of the interval that its two trials give it."""

    difference: float
    half: float
    ends: tuple[Any, Any]
    """The values of the setting that it went from and to."""


def _pairs(
    sample: Sample, knob: Knob, contrast: tuple[Any, Any], quantity: Quantity
) -> tuple[_Pair, ...]:
    """Return the matched pairs of a contrast; no trial is in two of them.

    Of a slope each group of trials that differ in it alone counts as one, by its own slope.
    """
    groups = sample.groups("timed" if quantity == "speed" else "measured", knob).values()
    if knob.is_slope:
        return tuple(_slope(group, knob, quantity) for group in groups if len(group) > 1)
    before, after = contrast
    return tuple(
        _Pair(
            group[after].value(quantity) - group[before].value(quantity),
            group[before].log_half + group[after].log_half,
            contrast,
        )
        for group in groups
        if before in group and after in group
    )


def _slope(group: Mapping[Any, Seen], knob: Knob, quantity: Quantity) -> _Pair:
    places = np.array([knob.scale(level) for level in group])
    heights = np.array([one.value(quantity) for one in group.values()])
    away = places - places.mean()
    pull = away / float(away @ away)
    halves = np.array([one.log_half for one in group.values()])
    ends = min(group), max(group)
    return _Pair(float(pull @ heights), float(np.abs(pull) @ halves), ends)


def _single(pair: _Pair, knob: Knob, *, is_ratio: bool) -> Change:
    """Return what a single pair shows, of a slope over the pair's own step and not beyond it."""
    words, step = "", 1.0
    if knob.is_slope:
        step = knob.scale(pair.ends[1]) - knob.scale(pair.ends[0])
        words = f"{KNOBS[knob.key].label} {pair.ends[0]:g}{ARROW}{pair.ends[1]:g}"
    whole = _Pair(step * pair.difference, step * pair.half, pair.ends)
    return Change(_of_pairs([whole], is_ratio=is_ratio), "pair", 1, words)


def _of_pairs(pairs: Sequence[_Pair], *, is_ratio: bool) -> Estimate:
    """Return the mean of matched pairs; a single pair has the interval of its two trials."""
    differences = [pair.difference for pair in pairs]
    if len(pairs) == 1:
        half = pairs[0].half if is_ratio else 0.0
        estimate = Estimate(differences[0], differences[0] - half, differences[0] + half)
    else:
        within = math.hypot(*(pair.half for pair in pairs)) / len(pairs) if is_ratio else 0.0
        estimate = mean_estimate(differences, least_half=within)
    return _exponential(estimate) if is_ratio else estimate


def _exponential(estimate: Estimate) -> Estimate:
    return Estimate(*(_exp(end) for end in (estimate.value, estimate.low, estimate.high)))


def _exp(value: float) -> float:
    return math.exp(min(max(value, -50.0), 50.0))


def _one_sided(sample: Sample, knob: Knob, contrast: tuple[Any, Any]) -> int:
    """Return of how many matched pairs the first fitted and the second did not."""
    if len(knob.levels) < 2 or knob.is_slope:
        return 0
    before, after = contrast
    measured, unfit = sample.groups("measured", knob), sample.groups("unfit", knob)
    return sum(before in group and after in unfit.get(rest, {}) for rest, group in measured.items())


def _why_untold(study: _Study, knob: Knob, contrast: tuple[Any, Any]) -> str:
    if len(knob.levels) < 2:
        only = units.short(units.phrase(knob.key, knob.levels[0]))
        return f"every trial that was measured had {only}"
    fitted = study.fits["speed"]
    timed = {one.settings[knob.key] for one in study.sample.timed}
    unseen = [value for value in contrast if value not in timed]
    if unseen and (not knob.is_slope or len(timed) < 2):
        return f"no speed was measured to the end with {units.phrase(knob.key, unseen[0])}"
    # What only a baseline outside the space has beside the rest is nobody's choice: it comes last.
    searched = study.sample.space.dimensions
    tied = sorted(fitted.company(knob, contrast), key=lambda key: key not in searched)
    company = [KNOBS[key].label for key in tied]
    if company:
        more = f" and {len(company) - _NAMED} more" if len(company) > _NAMED else ""
        return f"never varied apart from {', '.join(company[:_NAMED])}{more}"
    spare = units.plural(fitted.fit.degrees, "trial")
    return f"too few trials: {spare} more than there are unknowns, and no pair that differs in it"


def _would_tell(sample: Sample, knob: Knob, contrast: tuple[Any, Any]) -> str:
    """Return which two trials would tell: the fastest one that can be, and its twin."""
    wanted = _wanted(sample, knob, contrast)
    by_speed = sorted(sample.measured, key=lambda one: (-one.log_speed, one.record.number))
    unfit = {canonical(one.record.config) for one in sample.unfit}
    for one in by_speed:
        value = one.settings[knob.key]
        others = (other for other in wanted if other != value) if value in wanted else ()
        for other in others:
            twin = one.record.config.model_copy(update={knob.key: other})
            is_held = sample.space.params_of(twin) is not None
            if is_held and canonical(twin) not in unfit:
                what = units.short(units.phrase(knob.key, other))
                return f"trial {one.record.number}, and the same with {what}"
    return ""


def _wanted(sample: Sample, knob: Knob, contrast: tuple[Any, Any]) -> tuple[Any, ...]:
    """Return the values of which a pair would tell; of a setting that never varied, the space's."""
    if len(knob.levels) > 1:
        return contrast
    return (*knob.levels, *(v for v in sample.space.values_of(knob.key) if v not in knob.levels))
