"""The longest sequence that a model's rotary position embeddings reach.

Scaling comes in two ways. Some types of it lengthen what ``max_position_embeddings`` says by their
``factor``; with others that key states the lengthened value already. Which does which was read in
``modeling_rope_utils`` of transformers 5.17 and in published configs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qlora_sweep.search_spaces.errors import InputError, quote

KEYS = ("rope_scaling", "rope_parameters")
"""Where a config has it: the first was written until transformers 4, and counts where both are."""

_LENGTHENS = ("linear", "dynamic", "yarn")
"""Types whose factor multiplies the positions that were trained. llama3, longrope and the others
have what the model reaches in ``max_position_embeddings``."""
_NEEDS_FACTOR = ("linear", "dynamic")
_STATED_ALL_THE_SAME = frozenset({"gemma3_text"})
"""Model types whose positions are stated as lengthened, whatever the type: Gemma 3 says 131,072
with a linear factor of 8."""
_WINDOWED = ("sliding_attention", "chunked_attention", "linear_attention")
"""Layers that see a window, or keep a state: their positions end with no length."""


def longest_length(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a sequence may have; None where the config does not say.

    Args:
        config: a checked ``config.json``.
    """
    stated = config.get("max_position_embeddings")
    if stated is None:
        return None
    positions = int(stated)
    if config.get("model_type") in _STATED_ALL_THE_SAME:
        return positions
    lengths = [_lengthened(rope, config, positions) for rope in _ropes(config).values()]
    return min(lengths, default=positions)


def check_ropes(config: Mapping[str, Any], *, label: str, most: int) -> None:
    """Refuse scaling from which no length follows.

    Args:
        config: a parsed ``config.json`` whose sizes are checked.
        label: begins the message.
        most: tokens that no model reaches.

    Raises:
        InputError: names the key.
    """
    for key in KEYS:
        if not isinstance(config.get(key), dict | None):
            raise InputError(f"{label}: {key} must be an object or null, got {quote(config[key])}")
    named = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    for rope in _ropes(config).values():
        kind = _type_of(rope)
        factor = rope.get("factor")
        if factor is None and kind in _NEEDS_FACTOR:
            raise InputError(f"{label}: {named}: type {kind} needs a factor")
        if factor is not None and not _is_positive(factor):
            raise InputError(
                f"{label}: {named}: factor must be a number above 0, got {quote(factor)}"
            )
        if kind == "su" and rope.get("original_max_position_embeddings") is None:
            raise InputError(
                f"{label}: {named}: type su is the former name of longrope, and transformers 5.17 "
                "finds no original_max_position_embeddings for it: write longrope"
            )
        original = _original(rope, config)
        if original is not None and not _is_positive(original):
            what = "original_max_position_embeddings must be a number above 0"
            raise InputError(f"{label}: {named}: {what}, got {quote(original)}")
    longest = longest_length(config)
    if longest is not None and longest > most:
        raise InputError(
            f"{label}: {named}: its factor makes {longest:,} positions; no model has over {most:,}"
        )


def _ropes(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the scaling of each kind of layers whose positions count; one where all are alike."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by_layer = {kind: rope for kind, rope in found.items() if isinstance(rope, dict)}
    if not by_layer or "rope_type" in found or "type" in found:
        return {"": found}
    counting: dict[str, Mapping[str, Any]] = {
        kind: rope for kind, rope in by_layer.items() if kind not in _WINDOWED
    }
    return counting or dict(by_layer)


def _type_of(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _original(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Return the positions that were trained before they were lengthened; None where unsaid.

    Phi-3 and its like say it outside of the scaling, and transformers asks there first.
    """
    outside = config.get("original_max_position_embeddings")
    return rope.get("original_max_position_embeddings") if outside is None else outside


def _lengthened(rope: Mapping[str, Any], config: Mapping[str, Any], positions: int) -> int:
    factor = rope.get("factor")
    if _type_of(rope) not in _LENGTHENS or factor is None:
        return positions
    trained = _original(rope, config)
    if trained is None:
        trained = positions
    return max(positions, int(factor * trained))


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
