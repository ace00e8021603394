"""Owns what fits by size: how many of ever larger batches, and the table of batch by length.

Walking a step for its peak takes a fraction of what replaying it through the allocator does: what
the peak alone rules out is never replayed. The table has either one structure at several sizes, or
the fastest of many structures at each. Knows nothing of prices or terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from search_spaces.config import TrialConfig
from search_spaces.knobs import MICRO_BATCH_MAX
from sweep.planning.forecast import Forecast, Forecaster
from sweep.predict.memory.predictor import Fit

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (512, 1024, 2048, 4096)
"""Rows and columns of the table of one structure."""


@dataclass(frozen=True)
class FitRow:
    """Valid configurations that differ in their micro-batch alone, and how many of them fit."""

    configurations: Sequence[TrialConfig]
    """The smallest micro-batch first."""
    sure: int
    """How many of the first ones fit surely."""
    possible: int
    """How many of the first ones fit surely or perhaps."""


def fit_row(configurations: Sequence[TrialConfig], *, forecaster: Forecaster, near: int) -> FitRow:
    """Return how much of a row fits; arguments as those of `count_fitting`."""
    count, at = len(configurations), configurations.__getitem__
    return FitRow(configurations, *count_fitting(count, at, forecaster=forecaster, near=near))


def count_fitting(
    count: int,
    configuration: Callable[[int], TrialConfig],
    *,
    forecaster: Forecaster,
    near: int = 1,
) -> tuple[int, int]:
    """Return how many of ``count`` valid configurations fit surely, and how many at least perhaps.

    Args:
        count: how many there are.
        configuration: returns the one at an index; a later one never needs less memory.
        forecaster: tells what fits.
        near: a guess of how many fit at least perhaps; a good one saves predictions.
    """
    hopeful = boundary(count, lambda n: not forecaster.is_hopeless(configuration(n - 1)), near=near)

    def fit(number: int) -> Fit:
        return forecaster.fit(configuration(number - 1))

    # Most of what the peak does not rule out fits.
    possible = boundary(hopeful, lambda n: fit(n) is not Fit.NO, near=hopeful)
    return boundary(possible, lambda n: fit(n) is Fit.YES, near=possible), possible


def boundary(count: int, holds: Callable[[int], bool], *, near: int) -> int:
    """Return the last of 1..``count`` up to which ``holds``; 0 where it does not hold for 1.

    What holds for a number must hold for every smaller one. It is asked around ``near`` first, in
    growing steps, so that a good guess costs two questions and a bad one a logarithmic number.
    """
    low, high = 0, count + 1
    probe, step = near, 1
    while low < probe < high:
        if holds(probe):
            low, probe = probe, probe + step
        else:
            high, probe = probe, probe - step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class LargestBatch:
    """The largest micro-batches at one length; 0 where none does."""

    sure: int
    """That fits surely."""
    possible: int
    """That is not surely too large."""


Size = tuple[int, int]
"""Micro-batch and sequence length."""


@dataclass(frozen=True)
class ShapeTable:
    """What fits by micro-batch and sequence length."""

    base: TrialConfig | None
    """What every cell has in common, beside its size; None where each has the fastest structure."""
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    cells: Mapping[Size, Forecast]
    largest: Mapping[int, LargestBatch]
    """By length: of any micro-batch for one structure, else of the micro-batches of the space."""


def fastest_table(
    forecaster: Forecaster,
    rows: Sequence[FitRow],
    *,
    batches: Sequence[int],
    lengths: Sequence[int],
    spare: Mapping[Size, TrialConfig],
) -> ShapeTable:
    """Return the fastest that fits at every size: surely if anything does, else perhaps.

    Where nothing fits, the cell is the structure that comes nearest to it.

    Args:
        forecaster: tells speed and memory.
        rows: every valid configuration, and how much of each row fits.
        batches: micro-batches of the table.
        lengths: sequence lengths of the table.
        spare: a configuration of each size, for where rules forbid all of them.
    """
    cells: dict[Size, Forecast] = {}
    for length in lengths:
        column = _Column(forecaster, [row for row in rows if _length(row) == length])
        cells |= {
            (batch, length): column.at(batch) or forecaster.forecast(spare[batch, length])
            for batch in batches
        }
    largest = {length: _largest_held(rows, length) for length in lengths}
    return ShapeTable(None, tuple(batches), tuple(lengths), dict(sorted(cells.items())), largest)


def _length(row: FitRow) -> int:
    return row.configurations[0].seq_len


def _largest_held(rows: Sequence[FitRow], length: int) -> LargestBatch:
    held = [row for row in rows if _length(row) == length]
    return LargestBatch(
        sure=max((_batch(row, row.sure) for row in held), default=0),
        possible=max((_batch(row, row.possible) for row in held), default=0),
    )


def _batch(row: FitRow, count: int) -> int:
    """Return the largest micro-batch of the first ``count`` configurations."""
    return row.configurations[count - 1].micro_batch_size if count else 0


class _Column:
    """The rows of one length, the fastest first: a row is done with once all of it is slower."""

    def __init__(self, forecaster: Forecaster, rows: Sequence[FitRow]) -> None:
        self._forecaster = forecaster
        able = [(self._top(row), row) for row in rows if row.possible]
        self._able = sorted(able, key=lambda pair: pair[0], reverse=True)
        self._rows = rows

    def _top(self, row: FitRow) -> float:
        # On texts a larger micro-batch may be slower: it pads more.
        possible = row.configurations[: row.possible]
        return max(self._forecaster.tokens_per_second(config) or 0.0 for config in possible)

    def at(self, batch: int) -> Forecast | None:
        """Return the cell of a micro-batch; None where no row has it."""
        return (
            self._fastest(batch, Fit.YES)
            or self._fastest(batch, Fit.UNCERTAIN)
            or self._nearest(batch)
        )

    def _fastest(self, batch: int, wanted: Fit) -> Forecast | None:
        # Asked from the fastest on, so that hardly more than one is replayed to see that it fits.
        for _, config in sorted(self._fitting(batch, wanted), key=lambda pair: -pair[0]):
            forecast = self._forecaster.forecast(config)
            if forecast.fit is wanted:
                return forecast
        return None

    def _fitting(self, batch: int, wanted: Fit) -> list[tuple[float, TrialConfig]]:
        """Return what may be the fastest of those that fit, with its speed."""
        fitting: list[tuple[float, TrialConfig]] = []
        fastest = -1.0
        for top, row in self._able:
            if top < fastest:
                break
            count = row.sure if wanted is Fit.YES else row.possible
            config = _sized(row.configurations[:count], batch)
            if config is not None:
                speed = self._forecaster.tokens_per_second(config) or 0.0
                fitting.append((speed, config))
                fastest = max(fastest, speed)
        return fitting

    def _nearest(self, batch: int) -> Forecast | None:
        """Return the structure that holds the largest micro-batch; of several, the smallest."""
        sized = [(row, _sized(row.configurations, batch)) for row in self._rows]
        held = [(row, config) for row, config in sized if config is not None]
        furthest = max((row.possible for row, _ in held), default=0)
        nearest = [(row, config) for row, config in held if row.possible == furthest]
        _, config = min(nearest, key=lambda pair: self._need(pair[0]), default=(None, None))
        return None if config is None else self._forecaster.forecast(config)

    def _need(self, row: FitRow) -> int:
        """Return the peak of the first that does not fit, which counting the row predicted."""
        first = row.configurations[min(row.possible, len(row.configurations) - 1)]
        return self._forecaster.memory(first).peak_allocated_bytes


def _sized(configurations: Sequence[TrialConfig], batch: int) -> TrialConfig | None:
    return next((c for c in configurations if c.micro_batch_size == batch), None)


def shape_table(forecaster: Forecaster, base: TrialConfig) -> ShapeTable:
    """Return ``base`` at every size; its own size is among them.

    Lengths beyond the model's positions are left out, as are micro-batches that the effective batch
    is no multiple of. Batches end with the first one that fits at no length.
    """
    positions = forecaster.model.max_positions or max(base.seq_len, *LENGTHS)
    columns = sorted({base.seq_len, *(length for length in LENGTHS if length <= positions)})
    allowed = _allowed_batches(base)
    rows = sorted(batch for batch in {base.micro_batch_size, *BATCHES} if batch in allowed)
    cells: dict[tuple[int, int], Forecast] = {}
    shown: list[int] = []
    for batch in rows:
        shown.append(batch)
        row = {(batch, length): _at(forecaster, base, batch, length) for length in columns}
        cells |= row
        if batch >= base.micro_batch_size and all(cell.fit is Fit.NO for cell in row.values()):
            break
    largest = {length: _largest_batch(forecaster, base, length) for length in columns}
    return ShapeTable(base, tuple(shown), tuple(columns), cells, largest)


def _allowed_batches(base: TrialConfig) -> Sequence[int]:
    """Return every micro-batch that the effective batch can be made of."""
    every = range(1, MICRO_BATCH_MAX + 1)
    whole = base.effective_batch_size
    return every if whole is None else [batch for batch in every[:whole] if whole % batch == 0]


def reshaped(base: TrialConfig, *, micro_batch_size: int, seq_len: int) -> TrialConfig:
    """Return ``base`` at another size."""
    return base.model_copy(update={"micro_batch_size": micro_batch_size, "seq_len": seq_len})


def _at(forecaster: Forecaster, base: TrialConfig, batch: int, length: int) -> Forecast:
    return forecaster.forecast(reshaped(base, micro_batch_size=batch, seq_len=length))


def _largest_batch(forecaster: Forecaster, base: TrialConfig, length: int) -> LargestBatch:
    allowed = _allowed_batches(base)

    def sized(index: int) -> TrialConfig:
        return reshaped(base, micro_batch_size=allowed[index], seq_len=length)

    first = forecaster.forecast(sized(0))
    if first.broken is not None or first.memory is None:
        return LargestBatch(sure=0, possible=0)
    counts = count_fitting(len(allowed), sized, forecaster=forecaster)
    return LargestBatch(*(allowed[count - 1] if count else 0 for count in counts))
