"""Owns which configurations of a space have different tensors, one of each kind.

Knows nothing of profiles, or of how they are made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.dimensions import Dimension, FloatRange
from search_spaces.knobs import KNOBS
from search_spaces.space import BATCHES, SearchSpace


def one_of_each_kind(space: SearchSpace) -> Iterator[TrialConfig]:
    """Yield a configuration for each set of tensors that a space's configurations can have, and the
    baseline.

    Each is as long as any is, so that one beyond an attention window is among them.
    """
    yield space.baseline_config()
    params = {key: dimension.first for key, dimension in space.dimensions.items()}
    params |= {key: value for key, value in _whole_batches(space).items() if key in params}
    if "seq_len" in params:
        params["seq_len"] = max(space.values_of("seq_len"))
    kinds = {
        key: _kinds(dimension, _KIND_OF[key])
        for key, dimension in space.dimensions.items()
        if key in _KIND_OF
    }
    for row in itertools.product(*kinds.values()):
        each = {**params, **dict(zip(kinds, row, strict=True))}
        if space.goes_together(each):
            yield space.config(each)


def _of_layers(share: float) -> tuple[bool, bool]:
    """Whether some layers are of the one kind, and whether some are of the other."""
    return share > 0, share < 1


_KIND_OF: dict[str, Callable[[Any], Any]] = {
    **{key: knob.traced for key, knob in KNOBS.items() if knob.traced},
    "checkpoint_fraction": _of_layers,
    "quantized_fraction": _of_layers,
}


def _whole_batches(space: SearchSpace) -> dict[str, Any]:
    return dict(zip(BATCHES, space.batches[0], strict=True)) if space.batches else {}


def _kinds(dimension: Dimension, kind_of: Callable[[Any], Any]) -> list[Any]:
    """Return a value of each kind; in a range without steps, of the kinds of its ends."""
    values = dimension.values()
    if values is None:
        assert isinstance(dimension, FloatRange), "only a range of numbers has no list of values"
        values = (dimension.low, dimension.at(0.5), dimension.high)
    return list({repr(kind_of(value)): value for value in values}.values())
