"""Owns spaces as planning takes them: a card's standard one, one held at knobs, and its rows.

A row is every micro-batch of otherwise equal configurations. Pure: spaces and values in, spaces and
configurations out. Knows nothing of what fits.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.dimensions import Choices, Dimension, FloatRange
from search_spaces.gpus import GpuSpec
from search_spaces.knobs import KNOBS
from search_spaces.models import ModelSpec
from search_spaces.rules import violation
from search_spaces.space import SearchSpace

LENGTHS = (512, 1024, 2048, 4096)
"""Sequence lengths where nothing else is asked."""
GRID_BATCHES = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
ROWS_MAX = 6_000
CONFIGURATIONS_MAX = 60_000
"""Spaces with more of either, or with a continuous dimension, are judged by a sample of rows."""
ROWS_SAMPLED = 1_500
BATCHES_MAX = 256
"""Micro-batches that are looked at in one row."""
VALUES_SHOWN = 16
"""Rows or columns that the table takes from one dimension."""


def standard_space(gpu: GpuSpec, model: ModelSpec) -> SearchSpace:
    """Return the space of a card that is named without one: the recipe's knobs at rank 16.

    Rank and target modules stay the standard recipe's, as they buy capacity and not speed.
    """
    positions = model.max_positions or LENGTHS[-1]
    lengths = [length for length in LENGTHS if length <= positions] or [positions]
    knobs = {
        "micro_batch_size": GRID_BATCHES,
        "seq_len": lengths,
        **{key: knob.tried for key, knob in KNOBS.items() if knob.tried},
    }
    return SearchSpace.model_validate(
        {
            "name": gpu.name,
            "gpu": gpu.name,
            "model": model.name,
            "dimensions": {key: {"choices": list(values)} for key, values in knobs.items()},
            "fixed": {"compute_dtype": _best_dtype(gpu, model)},
        }
    )


def fitted_to(space: SearchSpace, gpu: GpuSpec, model: ModelSpec) -> SearchSpace:
    """Return a space that is another card's for this one: the same knobs, other micro-batches.

    What fits a small card says nothing of how many fit a large one, and the other way round.
    """
    own = standard_space(gpu, model)
    searched = {"micro_batch_size": own.dimensions["micro_batch_size"]}
    dimensions = {key: searched.get(key, value) for key, value in space.dimensions.items()}
    return space.model_copy(
        update={"name": gpu.name, "gpu": gpu.name, "dimensions": dimensions, "budget_gib": None}
    )


def _best_dtype(gpu: GpuSpec, model: ModelSpec) -> str:
    """Return bf16, or fp16 on a card that is too old for it."""
    broken = violation(
        TrialConfig(), model=model, compute_capability=gpu.compute_capability, device="cuda"
    )
    return "fp16" if broken is not None and broken.rule == "bf16-needs-ampere" else "bf16"


def rows(space: SearchSpace) -> Iterator[list[TrialConfig]]:
    """Yield configurations that differ in their micro-batch alone, the smallest first.

    All of the space where that is little enough, else a sample that is the same every time.
    """
    others = {key: d for key, d in space.dimensions.items() if key != "micro_batch_size"}
    batches = _batches(space)
    for values in _row_values(others, batches=len(batches), seed=space.seed):
        params = dict(zip(others, values, strict=True))
        row = [{**params, **batch} for batch in batches]
        yield [space.config(params) for params in row if space.holds_batches_of(params)]


def structures(space: SearchSpace, **size: int) -> list[TrialConfig]:
    """Return every otherwise different configuration of a space, all at one size.

    Of a space that is judged by a sample, that of the sample.
    """
    sized = (row[0].model_copy(update=size) for row in rows(space) if row)
    return list(dict.fromkeys(sized))


def batches_of(space: SearchSpace) -> list[int]:
    """Return the micro-batches of a space, the smallest first: a dimension's, or the fixed one."""
    batches = (batch.get("micro_batch_size") for batch in _batches(space))
    (fixed, *_) = space.values_of("micro_batch_size")
    return [fixed if batch is None else batch for batch in batches]


def _batches(space: SearchSpace) -> list[dict[str, Any]]:
    dimension = space.dimensions.get("micro_batch_size")
    if dimension is None:
        return [{}]
    batches = evenly_spaced(dimension.values() or (), most=BATCHES_MAX)
    return [{"micro_batch_size": batch} for batch in batches]


def evenly_spaced(values: Iterable[Any], *, most: int) -> list[Any]:
    """Return at most ``most`` of the values in order, evenly spread, both ends among them."""
    ordered = sorted(set(values))
    if len(ordered) <= most:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]


def _row_values(
    dimensions: Mapping[str, Dimension], *, batches: int, seed: int
) -> Iterator[tuple[Any, ...]]:
    columns = [dimension.values() for dimension in dimensions.values()]
    known = [column for column in columns if column is not None]
    most = min(ROWS_MAX, CONFIGURATIONS_MAX // batches)
    if len(known) == len(columns) and math.prod(map(len, known)) <= most:
        yield from itertools.product(*known)
        return
    drawn = {
        key: _few(dimension) if key == "seq_len" else dimension
        for key, dimension in dimensions.items()
    }
    lean = list(_leanest(drawn))
    yield from lean
    draw = random.Random(seed)
    for _ in range(min(ROWS_SAMPLED, most) - len(lean)):
        yield tuple(_drawn(dimension, draw) for dimension in drawn.values())


def _few(dimension: Dimension) -> Dimension:
    """Return so few lengths that each has many rows, and a place in the table."""
    return Choices(choices=tuple(evenly_spaced(dimension.values() or (), most=VALUES_SHOWN)))


def _leanest(dimensions: Mapping[str, Dimension]) -> Iterator[tuple[Any, ...]]:
    """Yield the row that needs least memory at each length: a sample must not miss what fits."""
    columns = {key: _ends(dimension) for key, dimension in dimensions.items()}
    yield from itertools.product(
        *(
            values if key == "seq_len" else [min(values, key=lambda v: _weight(key, v))]
            for key, values in columns.items()
        )
    )


def _ends(dimension: Dimension) -> Sequence[Any]:
    values = dimension.values()
    if values is not None:
        return values
    assert isinstance(dimension, FloatRange)
    return dimension.low, dimension.high


def _weight(key: str, value: Any) -> float:
    """Return a figure that grows with the memory that a value takes, as a rule."""
    lean_first = KNOBS[key].lean_first
    if lean_first:
        return lean_first.index(value) if value in lean_first else len(lean_first)
    if not isinstance(value, int | float):
        return 0.0
    return -float(value) if KNOBS[key].memory == "shrinks" else float(value)


def _drawn(dimension: Dimension, draw: random.Random) -> Any:
    values = dimension.values()
    if values is not None:
        return draw.choice(values)
    assert isinstance(dimension, FloatRange)
    return dimension.at(draw.random())
