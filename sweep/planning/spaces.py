"""Spaces as plans take them: the one that a GPU's name means, and a space's rows.

A row is every micro-batch of otherwise equal configurations.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from search_spaces.config import TrialConfig
from search_spaces.dimensions import Choices, Dimension, FloatRange
from search_spaces.knobs import KNOBS
from search_spaces.loading import load_space, parse_space, preset_name
from search_spaces.space import SearchSpace
from search_spaces.starting import starting_text

SpaceKind = Literal["preset", "file", "standard"]
"""Where a space comes from: shipped under its name, written by the user, or made for a GPU."""

ROWS_MAX = 6_000
CONFIGURATIONS_MAX = 60_000
"""Spaces with more of either, or with a continuous dimension, are judged by a sample of rows."""
ROWS_SAMPLED = 1_500
BATCHES_MAX = 256
"""Micro-batches that are looked at in one row."""
VALUES_SHOWN = 16
"""Rows or columns that the table takes from one dimension."""


@dataclass(frozen=True)
class Asked:
    """What was asked of a GPU, for the answer to say."""

    kind: SpaceKind | None = None
    """None where one configuration is asked about, and no space."""
    held: Mapping[str, Any] = field(default_factory=dict)
    """Settings that were typed: they are fixed, and the rest of the space is searched."""
    run_command: str = ""
    """What to type to measure on the GPU what is searched here."""


NOT_ASKED = Asked()


@cache
def own_space(gpu: str, model: str | None) -> tuple[SearchSpace, SpaceKind]:
    """Return the space that a GPU's name means, and where it comes from.

    It is the preset of that name, else what `sweep init --gpu` writes for the GPU and the model.

    Raises:
        InputError: no such model.
        EnvironmentFault: a hub id, and the hub is not to be had.
    """
    if preset_name(gpu) is not None:
        return load_space(gpu), "preset"
    return parse_space(starting_text(gpu, model), label=gpu), "standard"


def rows(space: SearchSpace) -> Iterator[list[TrialConfig]]:
    """Yield configurations that differ in their micro-batch alone, the smallest first.

    All of the space where that is little enough, else a sample that is the same every time.
    """
    others = {key: d for key, d in space.dimensions.items() if key != "micro_batch_size"}
    batches = _batches(space)
    # Rows that are left out are not counted.
    kept = len(space.together) / math.prod(len(space.values_of(key)) for key in space.together[0])
    for values in _row_values(others, kept=kept, batches=len(batches), seed=space.seed):
        params = dict(zip(others, values, strict=True))
        if not space.leaves_out(params):
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
    dimensions: Mapping[str, Dimension], *, kept: float, batches: int, seed: int
) -> Iterator[tuple[Any, ...]]:
    columns = [dimension.values() for dimension in dimensions.values()]
    known = [column for column in columns if column is not None]
    most = min(ROWS_MAX, CONFIGURATIONS_MAX // batches)
    if len(known) == len(columns) and kept * math.prod(map(len, known)) <= most:
        yield from itertools.product(*known)
        return
    drawn = dict(dimensions)
    if "seq_len" in drawn:
        # So few lengths that each has many rows, and a place in the table.
        lengths = evenly_spaced(drawn["seq_len"].values() or (), most=VALUES_SHOWN)
        drawn["seq_len"] = Choices(choices=tuple(lengths))
    lean = list(_leanest(drawn))
    yield from lean
    draw = random.Random(seed)
    for _ in range(min(ROWS_SAMPLED, most) - len(lean)):
        yield tuple(_drawn(dimension, draw) for dimension in drawn.values())


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
