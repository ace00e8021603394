"""Owns the table of batch by sequence length: what fits, how fast, the largest batch per length.

Knows nothing of spaces, prices or terminals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from search_spaces.config import TrialConfig
from sweep.planning.forecast import Forecast, Forecaster
from sweep.planning.settling import settle
from sweep.predict.memory import Fit

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (512, 1024, 2048, 4096)
"""Rows and columns where nothing else is asked."""
BATCH_MAX = 65_536
"""No configuration has a larger micro-batch."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest micro-batches at one length; 0 where none does."""

    sure: int
    """That fits surely."""
    possible: int
    """That is not surely too large."""


@dataclass(frozen=True)
class ShapeTable:
    """One structure at several sizes."""

    base: TrialConfig
    """What every cell has in common, beside micro-batch and length."""
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    cells: Mapping[tuple[int, int], Forecast]
    """By micro-batch and length."""
    largest: Mapping[int, LargestBatch]
    """By length."""


def shape_table(
    forecaster: Forecaster,
    base: TrialConfig,
    *,
    batches: Iterable[int] = BATCHES,
    lengths: Iterable[int] = LENGTHS,
) -> ShapeTable:
    """Return ``base`` at every size; its own size is among them.

    Lengths beyond the model's positions are left out, as are micro-batches that the effective
    batch is no multiple of. Batches end with the first one that fits at no length.
    """
    positions = forecaster.model.max_positions or max(base.seq_len, *lengths)
    columns = sorted({base.seq_len, *(length for length in lengths if length <= positions)})
    allowed = _allowed_batches(base)
    rows = sorted(batch for batch in {base.micro_batch_size, *batches} if batch in allowed)
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
    every = range(1, BATCH_MAX + 1)
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

    if forecaster.broken(sized(0)) is not None:
        return LargestBatch(sure=0, possible=0)
    counts = settle(len(allowed), sized, forecaster=forecaster)
    return LargestBatch(*(allowed[count - 1] if count else 0 for count in counts))
