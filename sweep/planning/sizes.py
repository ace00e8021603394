"""What fits by size: the table of micro-batch by length, and the longest sequences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec
from search_spaces.knobs import MICRO_BATCH_MAX
from search_spaces.linears import CapacityClass
from search_spaces.models import ModelSpec
from search_spaces.space import SearchSpace
from sweep.planning.recommendation import nearest_capacity
from sweep.planning.spaces import NOT_ASKED, Asked, batches_of, structures
from sweep.predict.forecast import Forecast, Forecaster, Forecasts, Progress, silent
from sweep.predict.memory.prediction import Fit

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (512, 1024, 2048, 4096)
"""Rows and columns of the table of one structure."""
LENGTH_STEP = 64
"""The longest sequences are multiples of this."""
POSITIONS_MAX = 1_048_576
"""Lengths end here where a model's config names no last position."""

Size = tuple[int, int]
"""Micro-batch and sequence length."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest micro-batches at one length; 0 where none does."""

    sure: int
    """That fits surely."""
    possible: int
    """That is not surely too large."""


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


def shape_table(forecaster: Forecaster, base: TrialConfig) -> ShapeTable:
    """Return ``base`` at every size; its own size is among them.

    Lengths beyond the model's positions are left out, as are micro-batches that the effective batch
    is no multiple of. Batches end with the first one that fits at no length.
    """
    positions = forecaster.model.max_positions or max(base.seq_len, *LENGTHS)
    lengths = sorted({base.seq_len, *(length for length in LENGTHS if length <= positions)})
    batches = [b for b in sorted({base.micro_batch_size, *BATCHES}) if _goes(b, base)]
    sizes = [(batch, length) for batch in batches for length in lengths]
    forecasts = forecaster.forecast([reshaped(base, *size) for size in sizes])
    cells: dict[Size, Forecast] = {}
    for batch in batches:
        row = {size: forecasts[at] for at, size in enumerate(sizes) if size[0] == batch}
        cells |= row
        if batch >= base.micro_batch_size and all(cell.fit is Fit.NO for cell in row.values()):
            break
    shown = tuple(dict.fromkeys(batch for batch, _ in cells))
    largest = {length: _largest_batch(forecaster, base, length) for length in lengths}
    return ShapeTable(base, shown, tuple(lengths), cells, largest)


def reshaped(base: TrialConfig, batch: int, length: int) -> TrialConfig:
    """Return ``base`` at another size."""
    return base.model_copy(update={"micro_batch_size": batch, "seq_len": length})


def _goes(batch: int, config: TrialConfig) -> bool:
    """Whether a micro-batch goes into the effective batch of a configuration."""
    return config.effective_batch_size is None or config.effective_batch_size % batch == 0


def _largest_batch(forecaster: Forecaster, base: TrialConfig, length: int) -> LargestBatch:
    most = min(base.effective_batch_size or MICRO_BATCH_MAX, MICRO_BATCH_MAX)
    allowed = [batch for batch in range(1, most + 1) if _goes(batch, base)]

    def fit(batch: int) -> Fit:
        return forecaster.forecast([reshaped(base, batch, length)]).fit(0)

    first = forecaster.forecast([reshaped(base, allowed[0], length)])[0]
    if first.broken is not None or first.memory is None:
        return LargestBatch(sure=0, possible=0)
    # Memory only grows with the micro-batch.
    possible = bisect_left(allowed, True, key=lambda batch: fit(batch) is Fit.NO)
    sure = bisect_left(allowed, True, hi=possible, key=lambda batch: fit(batch) is not Fit.YES)
    return LargestBatch(*(allowed[count - 1] if count else 0 for count in (sure, possible)))


@dataclass(frozen=True)
class LongestRow:
    """The longest sequences at one micro-batch."""

    micro_batch_size: int
    seq_len: int
    """The longest that surely fits; 0 where none does."""
    possible: int
    """The longest that is not surely too long."""
    forecast: Forecast | None
    """The fastest that surely fits at ``seq_len``; None where none does."""


@dataclass(frozen=True)
class Longest:
    """The longest sequences on one GPU."""

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
    asked: Asked = NOT_ASKED,
    progress: Progress = silent,
) -> Longest:
    """Return how long sequences may be at each micro-batch, whichever structure that takes.

    Lengths beyond those of any space are asked about. Of several capacity classes it is the one
    that is nearest to the standard recipe's.

    Raises:
        InputError: memory can be predicted of no structure.
        EnvironmentFault: the tracing process does not answer.
    """
    positions = forecaster.model.max_positions or POSITIONS_MAX
    tried = _of_one_class(about, forecaster)
    # At the last position, so that what only long sequences need is traced as well.
    last = [reshaped(one, 1, positions) for one in tried]
    forecasts = forecaster.forecast([*last, *tried], progress=progress)
    if len(tried) in forecasts.refused:
        raise forecasts.refused[len(tried)]
    batches = _batches(about, asked)
    batches = [batch for batch in batches if any(_goes(batch, one) for one in tried)]
    tell = progress("micro-batches tried")
    rows: list[LongestRow] = []
    steps = positions // LENGTH_STEP
    for done, batch in enumerate(batches):
        tell(done, len(batches))
        able = [one for one in tried if _goes(batch, one)]
        rows.append(_longest_row(forecaster, able, batch, most=steps))
        if not rows[-1].possible:
            break
    tell(len(batches), len(batches))
    return Longest(
        gpu=forecaster.gpu,
        budget_bytes=forecaster.budget_bytes,
        model=forecaster.model,
        asked=asked,
        limit=steps * LENGTH_STEP,
        configurations=len(tried),
        rows=tuple(rows),
    )


def _of_one_class(about: SearchSpace | TrialConfig, forecaster: Forecaster) -> list[TrialConfig]:
    """Return the valid structures of the class that is recommended from, at the smallest size."""
    model = forecaster.model
    if isinstance(about, TrialConfig):
        tried = [reshaped(about, 1, LENGTH_STEP)]
    else:
        tried = structures(about, micro_batch_size=1, seq_len=LENGTH_STEP)
    valid = [one for one in tried if forecaster.is_valid(one)]
    nearest = nearest_capacity({CapacityClass.of(one, model) for one in valid}, model=model)
    return [one for one in valid if CapacityClass.of(one, model) == nearest]


def _batches(about: SearchSpace | TrialConfig, asked: Asked) -> Sequence[int]:
    """Return the micro-batches to try: the one that was typed, or those of the space."""
    if isinstance(about, SearchSpace):
        return batches_of(about)
    return [about.micro_batch_size] if "micro_batch_size" in asked.held else BATCHES


def _longest_row(
    forecaster: Forecaster, tried: Sequence[TrialConfig], batch: int, *, most: int
) -> LongestRow:
    possible = _last(forecaster, tried, batch, most=most, wanted=(Fit.YES, Fit.UNCERTAIN))
    sure = _last(forecaster, tried, batch, most=possible, wanted=(Fit.YES,))
    forecasts = _sized(forecaster, tried, batch, sure)
    by_speed = (-forecasts.tokens_per_second).argsort(kind="stable").tolist() if sure else ()
    fastest = next((at for at in by_speed if forecasts.fit(at) is Fit.YES), None)
    return LongestRow(
        batch,
        seq_len=sure * LENGTH_STEP,
        possible=possible * LENGTH_STEP,
        forecast=None if fastest is None else forecasts.few([fastest])[0],
    )


def _last(
    forecaster: Forecaster,
    tried: Sequence[TrialConfig],
    batch: int,
    *,
    most: int,
    wanted: Sequence[Fit],
) -> int:
    """Return the last length, in steps, at which anything fits as is wanted."""
    low, high, able = 0, most, tried
    while low < high:
        middle = (low + high + 1) // 2
        forecasts = _sized(forecaster, able, batch, middle)
        # The smallest first: hardly more than one is replayed to see that it fits.
        order = forecasts.least_bytes.argsort(kind="stable").tolist()
        predicted = [at for at in order if at not in forecasts.refused]
        first = next((i for i, at in enumerate(predicted) if forecasts.fit(at) in wanted), None)
        if first is None:
            high = middle - 1
        else:
            # What is too long for a structure is so at every greater length.
            low, able = middle, [able[at] for at in predicted[first:]]
    return low


def _sized(
    forecaster: Forecaster, structures: Sequence[TrialConfig], batch: int, steps: int
) -> Forecasts:
    length = steps * LENGTH_STEP
    return forecaster.forecast([reshaped(one, batch, length) for one in structures])
