"""Owns holding knobs of a space fixed, so that the rest of it is searched.

Pure: a space and values in, a smaller space or the one configuration that is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from search_spaces.config import TrialConfig, explain_validation, parse_config
from search_spaces.dimensions import read_value
from search_spaces.errors import InputError
from search_spaces.space import Choices, Dimension, SearchSpace

MICRO, WHOLE = "micro_batch_size", "effective_batch_size"


def narrowed(space: SearchSpace, held: Mapping[str, Any]) -> SearchSpace | TrialConfig:
    """Return ``space`` with the values in ``held`` fixed; one configuration where nothing is free.

    Batches that do not go into an effective batch that is held are left out, and the other way
    round.

    Raises:
        InputError: no configuration takes such a value, or no batch of the space goes with it.
    """
    values = {key: read_value(key, value, where="options") for key, value in held.items()}
    fixed = {**space.fixed, **values}
    free = {key: _free(space, key, values) for key in space.dimensions if key not in values}
    if not free:
        return parse_config(fixed, where="options")
    try:
        # Validation of a whole space is what finds batches that do not go into each other.
        return SearchSpace.model_validate(
            {**space.model_dump(), "dimensions": free, "fixed": fixed}
        )
    except ValidationError as error:
        raise InputError(f"space '{space.name}': {explain_validation(error)}") from error


def _free(space: SearchSpace, key: str, held: Mapping[str, Any]) -> Dimension:
    """Return a dimension that stays free, less the batches that what is held rules out."""
    dimension = space.dimensions[key]
    other = {MICRO: WHOLE, WHOLE: MICRO}.get(key, "")
    if held.get(other) is None:
        return dimension
    every = dimension.values() or ()
    kept = [value for value in every if _is_whole(key, value, held[other])]
    if not kept:
        raise InputError(
            f"{other} {held[other]}: no {key} of space '{space.name}' goes with it, got "
            f"{', '.join(map(str, every))}"
        )
    return Choices(choices=tuple(kept))


def _is_whole(key: str, value: Any, other: int) -> bool:
    """Whether a micro-batch goes into an effective batch; no effective batch is one micro-batch."""
    if key == MICRO:
        return bool(other % value == 0)
    return value is None or bool(value % other == 0)
