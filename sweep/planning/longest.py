"""Owns the question of length backwards: how long rows may be on a card, at each micro-batch.

Lengths beyond those of any space are asked about, up to what the model has positions for. Memory
only grows with the length, so that a bisection finds the longest. Pure: a space or a configuration
and what answers for its card in, lengths out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec
from search_spaces.linears import CapacityClass
from search_spaces.models import ModelSpec
from search_spaces.space import SearchSpace
from sweep.planning.forecast import Forecast, Forecaster, Progress, silent
from sweep.planning.plan import Asked
from sweep.planning.recommendation import nearest_capacity
from sweep.planning.spaces import batches_of, structures
from sweep.planning.table import BATCHES, boundary, reshaped
from sweep.predict.memory.prediction import Fit

LENGTH_STEP = 64
"""Lengths are multiples of this."""
NOTHING_HELD = Asked()
POSITIONS_MAX = 1_048_576
"""Lengths end here where a model's config names no last position."""


@dataclass(frozen=True)
class LongestRow:
    """The longest rows at one micro-batch."""

    micro_batch_size: int
    seq_len: int
    """The longest that surely fits; 0 where none does."""
    possible: int
    """The longest that is not surely too long."""
    forecast: Forecast | None
    """The fastest that surely fits at ``seq_len``; None where none does."""


@dataclass(frozen=True)
class Longest:
    """The longest rows on one card."""

    gpu: GpuSpec
    budget_bytes: int
    model: ModelSpec
    asked: Asked
    limit: int
    """The longest that was asked about: what the model has positions for."""
    configurations: int
    """Structures that were tried at each size, all of one capacity class."""
    rows: tuple[LongestRow, ...]
    """By micro-batch, up to the first at which nothing fits."""

    @property
    def best(self) -> LongestRow | None:
        """The longest of all that surely fit; None where nothing does."""
        sure = [row for row in self.rows if row.seq_len]
        return max(sure, key=lambda row: (row.seq_len, row.micro_batch_size), default=None)


def longest_rows(
    about: SearchSpace | TrialConfig,
    forecaster: Forecaster,
    *,
    asked: Asked = NOTHING_HELD,
    progress: Progress = silent,
) -> Longest:
    """Return how long rows may be at each micro-batch, whichever structure of the space it takes.

    Of several capacity classes it is the one that is nearest to the standard recipe's.

    Raises:
        InputError: memory can be predicted of no structure.
        EnvironmentFault: the tracing process does not answer.
    """
    positions = forecaster.model.max_positions or POSITIONS_MAX
    smallest = {"micro_batch_size": 1, "seq_len": LENGTH_STEP}
    if isinstance(about, TrialConfig):
        tried = _of_one_class([reshaped(about, **smallest)], forecaster)
    else:
        tried = _of_one_class(structures(about, **smallest), forecaster)
    # At the last position, so that what only long rows need is traced as well.
    last = [reshaped(one, micro_batch_size=1, seq_len=positions) for one in tried]
    forecaster.prepare([*last, *tried], progress=progress)
    if tried:
        forecaster.memory(tried[0])
    search = _Search(forecaster, tried, steps=positions // LENGTH_STEP)
    batches = [batch for batch in _batches(about, asked) if any(_goes(batch, one) for one in tried)]
    tell = progress("micro-batches tried")
    rows: list[LongestRow] = []
    for done, batch in enumerate(batches):
        tell(done, len(batches))
        rows.append(search.row(batch))
        if not rows[-1].possible:
            break
    tell(len(batches), len(batches))
    return Longest(
        gpu=forecaster.gpu,
        budget_bytes=forecaster.budget_bytes,
        model=forecaster.model,
        asked=asked,
        limit=positions // LENGTH_STEP * LENGTH_STEP,
        configurations=len(tried),
        rows=tuple(rows),
    )


def _of_one_class(tried: Sequence[TrialConfig], forecaster: Forecaster) -> list[TrialConfig]:
    """Return the valid structures of the class that is recommended from."""
    model = forecaster.model
    valid = [one for one in tried if forecaster.broken(one) is None]
    nearest = nearest_capacity({CapacityClass.of(one, model) for one in valid}, model=model)
    return [one for one in valid if CapacityClass.of(one, model) == nearest]


def _batches(about: SearchSpace | TrialConfig, asked: Asked) -> Sequence[int]:
    """Return the micro-batches to try: the one that was typed, or those of the space."""
    if isinstance(about, SearchSpace):
        return batches_of(about)
    return [about.micro_batch_size] if "micro_batch_size" in asked.held else BATCHES


def _goes(batch: int, config: TrialConfig) -> bool:
    """Whether a micro-batch goes into the effective batch of a configuration."""
    return config.effective_batch_size is None or config.effective_batch_size % batch == 0


class _Search:
    """Finds the longest rows of some structures, from what the micro-batch before had room for."""

    def __init__(self, forecaster: Forecaster, tried: Sequence[TrialConfig], *, steps: int) -> None:
        self._forecaster = forecaster
        self._tried = tried
        self._steps = steps
        self._tokens = {Fit.YES: steps, Fit.UNCERTAIN: steps}
        """Of the last micro-batch, in steps of length: about as many fit at any."""

    def row(self, batch: int) -> LongestRow:
        """Return the longest rows at a micro-batch."""
        column = _Column(self._forecaster, [one for one in self._tried if _goes(batch, one)], batch)
        possible = self._last(column, Fit.UNCERTAIN, count=self._steps)
        sure = self._last(column, Fit.YES, count=possible)
        return LongestRow(
            micro_batch_size=batch,
            seq_len=sure * LENGTH_STEP,
            possible=possible * LENGTH_STEP,
            forecast=column.fastest(sure) if sure else None,
        )

    def _last(self, column: _Column, least: Fit, *, count: int) -> int:
        """Return the last length, in steps, at which anything fits at least so surely."""
        near = min(max(1, self._tokens[least] // column.batch), max(1, count))
        last = boundary(count, lambda steps: column.has(least, steps), near=near)
        self._tokens[least] = last * column.batch
        return last


class _Column:
    """The structures at one micro-batch, at any length.

    What is too long for a structure is so at every greater length, and not asked again.
    """

    def __init__(self, forecaster: Forecaster, tried: Sequence[TrialConfig], batch: int) -> None:
        self.batch = batch
        self._forecaster = forecaster
        self._tried = tried
        self._too_long: dict[tuple[int, Fit], int] = {}
        """By structure and how surely it should fit, the least length at which it does not."""

    def has(self, least: Fit, steps: int) -> bool:
        """Whether any structure fits at a length: surely, or at least perhaps."""
        open_ = [i for i in range(len(self._tried)) if self._is_open(i, least, steps)]
        sized = self._foreseen(open_, steps)
        # The smallest first: hardly more than one is replayed to see that it fits.
        for i in sorted(open_, key=lambda i: self._forecaster.least_bytes(sized[i])):
            if self._fits(sized[i], least):
                return True
            self._too_long[i, least] = steps
        return False

    def fastest(self, steps: int) -> Forecast | None:
        """Return the fastest that surely fits at a length."""
        sized = self._foreseen(range(len(self._tried)), steps).values()
        for config in sorted(sized, key=self._speed, reverse=True):
            if self._forecaster.fit(config) is Fit.YES:
                return self._forecaster.forecast(config)
        return None

    def _is_open(self, structure: int, least: Fit, steps: int) -> bool:
        # What does not even perhaps fit does not surely fit.
        known = (self._too_long.get((structure, fit)) for fit in {least, Fit.UNCERTAIN})
        return all(first is None or steps < first for first in known)

    def _foreseen(self, structures: Iterable[int], steps: int) -> dict[int, TrialConfig]:
        length = steps * LENGTH_STEP
        sized = {
            i: reshaped(self._tried[i], micro_batch_size=self.batch, seq_len=length)
            for i in structures
        }
        self._forecaster.foresee(list(sized.values()))
        return sized

    def _fits(self, config: TrialConfig, least: Fit) -> bool:
        if self._forecaster.is_hopeless(config):
            return False
        fit = self._forecaster.fit(config)
        return fit is Fit.YES or (fit is Fit.UNCERTAIN and least is Fit.UNCERTAIN)

    def _speed(self, config: TrialConfig) -> float:
        return self._forecaster.tokens_per_second(config) or 0.0
