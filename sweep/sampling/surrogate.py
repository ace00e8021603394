"""The surrogate: how fast each configuration is expected to be, and how likely it fits; and the
acquisition: how much it is expected to better what a study has reached.

A calibrated physical model says what is expected, a Gaussian process over the settings what that
leaves unexplained, and the trials how far either is to be trusted: several views of the model
(trusted, loosely, as a mere hint, not at all) are weighed by how likely each makes what was
measured. The improvement is relative to the best so far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.special import log_ndtr, ndtr

from qlora_sweep.search_spaces.space import Objective
from qlora_sweep.sweep.predict.forecast import Forecasts
from qlora_sweep.sweep.predict.speed.predictor import NINE_IN_TEN, StepTimes
from qlora_sweep.sweep.predict.speed.steps import OVERLAP_EXPONENT

Array = NDArray[np.float64]
Codes = NDArray[np.intp]

JITTER = 1e-8
LINEARIZATIONS = 4
"""Times that the physical model is linearized around its fitted factors."""


@dataclass(frozen=True)
class Column:
    """One property of the configurations, as the process compares them."""

    codes: Codes
    """Which of the property's values each configuration has."""
    alike: Array
    """Correlation of two values, from 0 to 1, by their codes."""
    is_kind: bool = False
    """Whether they are words, of which one says nothing of another."""

    @classmethod
    def of_numbers(cls, values: Array, *, scale: float) -> Column:
        """Return a column of numbers; those ``scale`` apart have a correlation of 0.6."""
        unique, codes = np.unique(np.round(values, 9), return_inverse=True)
        apart = (unique[:, None] - unique[None, :]) / scale
        return cls(codes, np.exp(-0.5 * apart**2))

    @classmethod
    def of_kinds(cls, kinds: Sequence[Any], *, common: float) -> Column:
        """Return a column of words; two different ones have a correlation of ``common``."""
        known = {kind: code for code, kind in enumerate(dict.fromkeys(kinds))}
        alike = np.full((len(known), len(known)), common)
        np.fill_diagonal(alike, 1.0)
        codes = np.array([known[kind] for kind in kinds], dtype=np.intp)
        return cls(codes, alike, is_kind=True)


@dataclass(frozen=True)
class View:
    """How far the physical model is trusted."""

    weight: float
    """Probability before anything was measured."""
    offset: float
    """Standard deviation of what each single property adds that the model does not know of."""
    residual: float
    """The same of what all of them together add."""
    trend: float | None = None
    """Of the slopes over the model's log seconds and over log tokens, where the model is but a
    hint; None where its level counts."""
    is_physical: bool = True
    """Whether what the model predicts counts at all."""

    @property
    def is_calibrated(self) -> bool:
        """Whether the model's own level counts, its factors fitted."""
        return self.is_physical and self.trend is None


VIEWS = (
    View(weight=0.60, offset=0.015, residual=0.04),
    View(weight=0.25, offset=0.05, residual=0.08),
    View(weight=0.10, offset=0.15, residual=0.10, trend=1.0),
    View(weight=0.05, offset=0.30, residual=0.30, is_physical=False),
)
"""The first is what makes the steps measured on an H200 most likely, of twelve surfaces of ten
models; `tests/bench/results/README.md` says how they were compared."""
LAUNCH_DOUBT = 8.0
"""By how much more the physical model leaves unexplained of a step that the host holds up, than of
one that the GPU does: by the same comparison."""
LAUNCH_NOISE = 0.04
"""Relative error of such a step's speed beside its own: the host's pace from minute to minute."""
UNTRIED = 0.2
"""Standard deviation that each word (kernels, a compiler, ...) adds of which nothing was tried yet:
what trials of others show to be right may be wrong of it."""
LEAST = 1e-6
_LEVEL = 3.0
"""Standard deviation of a log speed of which nothing is known."""


@dataclass(frozen=True)
class Observed:
    """What was measured: rows of the configurations, and each one's log tokens/s."""

    rows: Codes
    log_speed: Array
    noise: Array
    """Standard deviation of each."""


@dataclass(frozen=True)
class Mixture:
    """A quantity's logarithm for every configuration, as a mixture of normal distributions."""

    weights: Array
    """Of each view. (views,)"""
    means: Array
    """(views, configurations)"""
    deviations: Array
    """(views, configurations)"""

    @cached_property
    def mean(self) -> Array:
        """Expected logarithm."""
        return np.asarray(self.weights @ self.means)

    @cached_property
    def deviation(self) -> Array:
        """Standard deviation of the logarithm."""
        second = self.weights @ (self.deviations**2 + self.means**2)
        return np.asarray(np.sqrt(np.maximum(second - self.mean**2, 0.0)))

    def surer(self, share: float) -> Mixture:
        """Return one distribution of the same mean, with so much of the deviation."""
        deviation = np.maximum(share * self.deviation, LEAST)
        return Mixture(np.ones(1), self.mean[None, :], deviation[None, :])


class SpeedSurrogate:
    """Predicts the log speed of every configuration from what was measured of some.

    Args:
        columns: the properties by which they are compared.
        log_tokens: logarithm of each one's tokens per optimizer step.
        physics: predicts their steps; None where nothing does.
    """

    def __init__(
        self, columns: Sequence[Column], *, log_tokens: Array, physics: StepTimes | None
    ) -> None:
        self._columns = [column for column in columns if len(column.alike) > 1]
        self._log_tokens = log_tokens
        self._physics = physics
        # Of each configuration:
        self._launch_shares = self._headroom = np.zeros(len(log_tokens))
        self._log_seconds = log_tokens
        """Of the model as it is before any trial."""
        if physics is not None:
            self._launch_shares = physics.launch_shares
            left = np.maximum(1.0 - self._launch_shares, LEAST)
            self._headroom = -np.log(left) / OVERLAP_EXPONENT
            self._log_seconds = physics.log_seconds(np.zeros(len(physics.spread)), slice(None))

    def posterior(self, observed: Observed) -> Mixture:
        """Return the log speeds of all configurations, given what was measured."""
        rows = observed.rows
        noise = np.hypot(observed.noise, LAUNCH_NOISE * self._launch_shares[rows])
        observed = replace(observed, noise=noise)
        views = [view for view in VIEWS if self._physics is not None or not view.is_physical]
        if not self._columns:
            views = views[:1]
        shape = (len(self._log_tokens), len(rows))  # (configurations, observed)
        together = np.ones(shape)
        single = np.zeros(shape)
        untried = np.zeros(len(self._log_tokens))  # (configurations,)
        for column in self._columns:
            alike = column.alike[:, column.codes[rows]][column.codes]
            together *= alike
            single += alike
            if column.is_kind and len(rows):
                untried += ~np.isin(column.codes, column.codes[rows])
        means: list[Array] = []
        deviations: list[Array] = []
        likelihoods: list[float] = []
        for view in views:
            mean, deviation, likelihood = self._under(view, observed, together, single)
            means.append(mean)
            deviations.append(deviation)
            likelihoods.append(likelihood)
        logs = np.log([view.weight for view in views]) + likelihoods  # (views,)
        weights = np.exp(logs - logs.max())
        return Mixture(
            weights / weights.sum(),
            np.array(means),
            np.hypot(deviations, UNTRIED * np.sqrt(untried)),
        )

    def _under(
        self, view: View, observed: Observed, together: Array, single: Array
    ) -> tuple[Array, Array, float]:
        """Return mean and deviation of every log speed, (configurations,) each, and the log
        likelihood of the measured.

        Log speed is a prior, plus a basis times normal weights, plus residuals.

        Args:
            view: how far the model is trusted.
            observed: what was measured.
            together: correlation of all configurations with the measured, in all columns at once;
                (configurations, observed).
            single: the same of each column, added up.
        """
        rows = observed.rows
        doubt = np.ones(len(self._log_tokens))  # (configurations,)
        if view.is_calibrated:
            doubt += LAUNCH_DOUBT * self._launch_shares
        share = view.offset**2 / max(1, len(self._columns))
        scale = doubt[:, None] * doubt[rows][None, :]
        residuals = (share * single + view.residual**2 * together) * scale
        if view.is_calibrated:
            prior, basis, spread = self._calibrated(observed, residuals[rows])
        else:
            prior, basis, spread = self._hinted(view, observed)
        wide = basis @ spread  # (configurations, weights)
        unexplained = (view.offset**2 + view.residual**2) * doubt**2
        before = np.einsum("ij,ij->i", wide, basis) + unexplained
        if not len(rows):
            return prior, np.sqrt(before), 0.0
        across = wide @ basis[rows].T + residuals  # (configurations, observed)
        covariance = across[rows] + np.diag(observed.noise**2 + JITTER)
        factor = cho_factor(covariance, lower=True)
        errors = observed.log_speed - prior[rows]
        pulled = cho_solve(factor, errors)
        mean = prior + across @ pulled
        known = np.einsum("ij,ji->i", across, cho_solve(factor, across.T))
        likelihood = -0.5 * errors @ pulled - np.log(np.diag(factor[0])).sum()
        deviation = np.sqrt(np.maximum(before - known, 1e-10))
        if view.is_calibrated:
            # Launches that cost nothing would leave the GPU's own seconds: a step that the host
            # holds up is known badly, and is no faster than that by any surprise.
            deviation = np.minimum(deviation, deviation / doubt + self._headroom / NINE_IN_TEN)
        return mean, deviation, float(likelihood)

    def _calibrated(self, observed: Observed, residuals: Array) -> tuple[Array, Array, Array]:
        """Return the physical model, linearized around the factors that fit what was measured:
        prior, (configurations,), basis, (configurations, factors), and covariance of the
        factors."""
        physics = self._physics
        assert physics is not None, "a calibrated view needs a physical model"
        rows = observed.rows
        spread = physics.spread
        factors = np.zeros(len(spread))
        residuals = residuals + np.diag(observed.noise**2)
        for _ in range(LINEARIZATIONS if len(rows) else 0):
            slopes = -physics.slopes(factors, rows)
            seconds = physics.log_seconds(factors, rows)
            straight = self._log_tokens[rows] - seconds - slopes @ factors
            covariance = slopes @ spread @ slopes.T + residuals
            pulled = cho_solve(cho_factor(covariance), observed.log_speed - straight)
            factors = spread @ slopes.T @ pulled
        basis = -physics.slopes(factors, slice(None))
        seconds = physics.log_seconds(factors, slice(None))
        return self._log_tokens - seconds - basis @ factors, basis, spread

    def _hinted(self, view: View, observed: Observed) -> tuple[Array, Array, Array]:
        """Return one level for all, with slopes over what the model predicts where that counts."""
        levels = observed.log_speed if len(observed.rows) else self._log_tokens - self._log_seconds
        prior = np.full(len(self._log_tokens), float(np.mean(levels)))
        columns = [np.ones_like(self._log_tokens)]
        variances = [_LEVEL**2]
        if view.trend is not None:
            for hint in (self._log_seconds, self._log_tokens):
                columns.append(hint - hint.mean())
                variances.append(view.trend**2)
        return prior, np.stack(columns, axis=1), np.diag(variances)


@dataclass(frozen=True)
class PredictedPeaks:
    """Predicted peaks of the configurations, with their uncertainty."""

    log_bytes: Array
    uncertainty: Array
    """Relative: all but a few truths are within it."""
    kinds: Codes
    """Of which prediction's errors each partakes; all of a kind state the same uncertainty."""


_RATIOS = np.linspace(-0.7, 0.7, 281)
"""Log of truth over prediction, common to all configurations of a kind."""
_SPREADS = np.array([0.003, 0.006, 0.012, 0.025, 0.05, 0.1, 0.2])
"""How far single configurations may lie from that."""
_ROOMS = np.unique(np.append(np.linspace(-1.5, 1.5, 61), np.linspace(-0.2, 0.2, 201)))
"""Log distances to the budget at which a chance is worked out; between them it is a line."""
_DOUBT = 0.1
"""Probability that a prediction is off by more than it states."""


def chance_to_fit(
    peaks: PredictedPeaks, seen: Iterable[tuple[int, float, bool]], *, log_budget: float
) -> Array:
    """Return the probability that each configuration's peak is within the budget.

    It is 1 where the peak is not predicted.

    Args:
        peaks: as predicted.
        seen: rows of trials, the logarithm of the bytes that each took, and whether it was more.
        log_budget: logarithm of the budget.
    """
    chance = np.ones(len(peaks.log_bytes))
    for kind in np.unique(peaks.kinds):
        of_kind = peaks.kinds == kind
        stated = float(peaks.uncertainty[of_kind].max())
        weights = _ratio_weights(stated, peaks, seen, kind)
        room = log_budget - peaks.log_bytes[of_kind]
        chance[of_kind] = np.interp(room, _ROOMS, _chances() @ weights.ravel())
    return np.nan_to_num(chance, nan=1.0)


@cache
def _chances() -> Array:
    """Return the chance to fit by log distance to the budget, and by ratio and spread."""
    apart = _ROOMS[:, None, None] - _RATIOS[None, :, None]
    return np.asarray(ndtr(apart / _SPREADS).reshape(len(_ROOMS), -1))


def _ratio_weights(
    stated: float, peaks: PredictedPeaks, seen: Iterable[tuple[int, float, bool]], kind: int
) -> Array:
    """Return the probability of each ratio and spread, given what was seen of one kind."""
    narrow = np.exp(-0.5 * (_RATIOS / (stated / 3.0)) ** 2)
    broad = np.exp(-0.5 * (_RATIOS / 0.3) ** 2)
    ratio = (1 - _DOUBT) * narrow / narrow.sum() + _DOUBT * broad / broad.sum()
    usual = np.exp(-0.5 * (np.log(_SPREADS / max(stated / 3.0, 0.004)) / 0.7) ** 2)
    spread = usual / usual.sum() + 1e-3
    logs = np.log(ratio)[:, None] + np.log(spread / spread.sum())[None, :]  # (ratios, spreads)
    of_kind = [each for each in seen if peaks.kinds[each[0]] == kind]
    rows = np.array([row for row, _, _ in of_kind], dtype=np.intp)
    is_bound = np.array([bound for _, _, bound in of_kind], dtype=bool)  # (trials,)
    errors = np.array([log_bytes for _, log_bytes, _ in of_kind]) - peaks.log_bytes[rows]
    is_known = ~np.isnan(errors)
    exact = errors[is_known & ~is_bound]
    # The sum of (error - ratio)^2 over all that was measured.
    squares = np.sum(exact**2) - 2.0 * _RATIOS * np.sum(exact) + len(exact) * _RATIOS**2
    logs -= 0.5 * squares[:, None] / _SPREADS[None, :] ** 2 + len(exact) * np.log(_SPREADS)
    bounds, counts = np.unique(errors[is_known & is_bound], return_counts=True)
    for bound, times in zip(bounds, counts, strict=True):
        logs += times * log_ndtr((_RATIOS[:, None] - bound) / _SPREADS[None, :])
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum())


GAIN_MAX = 1.0
"""Share by which a trial can be faster than the best so far, at most: where next to nothing is
known, the far end of a distribution would outweigh all that is likely."""
_SURE = 1e-4
"""Standard deviation of the logarithm of what is known but for rounding."""
_PREDICTED = 0.01
"""The same of predicted memory."""


def expected_of(objective: Objective, *, forecasts: Forecasts, speed: Mixture) -> Mixture:
    """Return what every candidate is expected to reach of an objective, larger being better: the
    logarithm, or what orders negative values the same way."""
    if objective == "tokens_per_second":
        return speed
    means = _log(_predicted(objective, forecasts, speed.means.shape[1]))[None, :]
    deviation = _PREDICTED if objective == "peak_memory" else _SURE
    return Mixture(np.ones(1), means, np.full_like(means, deviation))


def _predicted(name: Objective, forecasts: Forecasts, rows: int) -> Array:
    """Return an objective's predicted values; all equal where nothing is known of it."""
    if name == "peak_memory" and forecasts.peak_bytes is not None:
        return -np.nan_to_num(forecasts.peak_bytes, nan=np.nanmax(forecasts.peak_bytes))
    if name == "trainable_parameters" and forecasts.trainable_parameters is not None:
        return forecasts.trainable_parameters
    return np.full(rows, -1.0 if name == "peak_memory" else 1.0)


def _log(values: Array) -> Array:
    """Return the logarithm of positive values, and what orders negative ones the same way."""
    sizes = np.log(np.maximum(np.abs(values), 1e-9))
    return np.asarray(np.where(values < 0, -sizes, sizes))


def expected_improvement(expected: Mixture, reached: Array) -> tuple[Array, Array]:
    """Return by how much each candidate is expected to better the best that was reached, relative
    to it, and the probability that it does at all; (candidates,) each.

    Where nothing was reached yet, the first is what is expected, relative to the most.

    Args:
        expected: what candidates reach, from `expected_of`.
        reached: what each trial that counts reached, larger being better; (trials,).
    """
    if not len(reached):
        values = np.exp(expected.mean - expected.mean.max())
        return values, (values > 0).astype(float)
    best = float(_log(reached).max())
    gains_by_view = _improvement(expected, best)  # (views, candidates)
    # What is beyond the largest possible gain does not count.
    gains_by_view -= (1.0 + GAIN_MAX) * _improvement(expected, best + math.log1p(GAIN_MAX))
    gains = expected.weights @ gains_by_view
    chances = expected.weights @ ndtr((expected.means - best) / expected.deviations)
    return np.asarray(gains), np.asarray(chances)


def _improvement(expected: Mixture, level: float) -> Array:
    """Return E[max(0, value / reference - 1)] of values whose logarithm is normal, by view.

    Args:
        expected: the values.
        level: logarithm of the reference.

    Returns:
        (views, candidates).
    """
    means = expected.means
    deviations = expected.deviations
    edge = (means - level) / deviations
    faster = np.exp(np.minimum(means - level + 0.5 * deviations**2, 50.0)) * ndtr(edge + deviations)
    return np.asarray(np.maximum(faster - ndtr(edge), 0.0))


def most_telling(merits: Array, *, most: int) -> list[int]:
    """Return the places of the trials to learn from, in their order: all where there are no more
    than ``most``, and else as many as that.

    A quarter are the best, a quarter the newest. The rest are spread over all there are, and hardly
    change from one trial to the next.

    Args:
        merits: by trial, larger being better; minus infinity where nothing was reached.
        most: trials that a model is fitted to.
    """
    count = len(merits)
    if count <= most:
        return list(range(count))
    quarter = most // 4
    best = np.argsort(-merits, kind="stable")[:quarter]
    chosen = set(range(count - quarter, count))
    chosen.update(best.tolist())
    # Places that a high power of two divides are spread evenly, and stay.
    places = np.setdiff1d(np.arange(count), list(chosen))
    powers = np.where(places == 0, count, places & -places)
    others = places[np.lexsort((places, powers))]
    chosen.update(others[len(others) - (most - len(chosen)) :].tolist())
    return sorted(chosen)
