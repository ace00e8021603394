"""The sizes of what sees for a decoder, as the config of the whole checkpoint has them.

Defaults and keys were read in transformers 5.17; types that are not named here are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qlora_sweep.search_spaces.errors import InputError, quote

ADDING = ("qwen3_vl", "qwen3_vl_moe")
"""Types whose tower's states are added to those of decoder layers, too."""
AXES = 3
"""Time, height and width, by which an image's tokens are told apart."""
STEP_MAX = 4096
"""Pixels of the largest image that is resized to whole pieces: none of them is wider."""


@dataclass(frozen=True)
class _Keys:
    """Where a type's config has its sizes."""

    sizes: tuple[str, ...]
    """In ``vision_config``, each a whole number."""
    image_token: str
    image_token_default: int


_OF_QWEN = _Keys(
    (
        "depth",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "out_hidden_size",
        "patch_size",
        "spatial_merge_size",
        "temporal_patch_size",
        "num_position_embeddings",
    ),
    "image_token_id",
    151_655,
)
_OF_QWEN_3_5 = replace(_OF_QWEN, image_token_default=248_056)
_KEYS = {
    "qwen3_vl": _OF_QWEN,
    "qwen3_vl_moe": _OF_QWEN,
    "qwen3_5": _OF_QWEN_3_5,
    "qwen3_5_moe": _OF_QWEN_3_5,
    "gemma3": _Keys(
        (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "image_size",
            "patch_size",
        ),
        "image_token_index",
        262_144,
    ),
    "gemma4": _Keys(
        (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "patch_size",
            "pooling_kernel_size",
        ),
        "image_token_id",
        258_880,
    ),
}


def check_vision(
    whole: Mapping[str, Any], decoder: Mapping[str, Any], *, label: str, most: int
) -> None:
    """Refuse sizes of a tower that could not be built, or would not go with its decoder.

    Args:
        whole: the config of a checkpoint with a ``vision_config``; empty for none.
        decoder: the config of its decoder, whose sizes are checked.
        label: begins the message.
        most: no size reaches it.

    Raises:
        InputError: names the key.
    """
    kind = whole.get("model_type")
    keys = _KEYS.get(str(kind))
    if keys is None:
        return
    vision = whole["vision_config"]
    for key in keys.sizes:
        if key in vision:
            _check_whole(vision[key], 1, most, label=f"{label}: vision_config: {key}")
    if str(kind).startswith("qwen"):
        _check_qwen(vision, decoder, label=f"{label}: vision_config")
        _check_sections(whole.get("text_config", decoder), label=label)
    if kind in ADDING:
        _check_added(vision, decoder, label=f"{label}: vision_config")
    if kind == "gemma3":
        _check_gemma3(whole, label=label)
    token = whole.get(keys.image_token, keys.image_token_default)
    last = decoder["vocab_size"] - 1
    _check_whole(token, 0, last, label=f"{label}: {keys.image_token}, one of its vocabulary,")


def _check_qwen(vision: Mapping[str, Any], decoder: Mapping[str, Any], *, label: str) -> None:
    width = vision.get("out_hidden_size", 3584)
    hidden = decoder["hidden_size"]
    if width != hidden:
        raise InputError(f"{label}: out_hidden_size must be the decoder's {hidden}, got {width}")
    inner = vision.get("hidden_size", 1152)
    heads = vision.get("num_heads", 16)
    if inner % heads:
        raise InputError(f"{label}: hidden_size {inner} is not a multiple of num_heads {heads}")
    step = vision.get("patch_size", 16) * vision.get("spatial_merge_size", 2)
    if step > STEP_MAX:
        raise InputError(
            f"{label}: patch_size times spatial_merge_size must be {STEP_MAX:,} pixels or less, "
            f"got {step:,}"
        )


def _check_sections(text: Mapping[str, Any], *, label: str) -> None:
    """Refuse other shares of the rotary frequencies than one for time, height and width each."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = rope.get("mrope_section", [1, 1, 1])
    are_whole = isinstance(sections, list) and all(isinstance(one, int) for one in sections)
    if not are_whole or len(sections) != AXES:
        raise InputError(
            f"{label}: mrope_section must list {AXES} whole numbers, got {quote(sections)}"
        )


def _check_added(vision: Mapping[str, Any], decoder: Mapping[str, Any], *, label: str) -> None:
    indexes = vision.get("deepstack_visual_indexes", (8, 16, 24))
    if not isinstance(indexes, list | tuple):
        words = "deepstack_visual_indexes must be a list of numbers of blocks"
        raise InputError(f"{label}: {words}, got {quote(indexes)}")
    for index in indexes:
        last = vision.get("depth", 27) - 1
        _check_whole(index, 0, last, label=f"{label}: each of deepstack_visual_indexes")
    layers = decoder["num_hidden_layers"]
    if len(indexes) > layers:
        words = f"deepstack_visual_indexes must be {layers} or fewer, one for each decoder layer"
        raise InputError(f"{label}: {words}, got {len(indexes)}")


def _check_gemma3(whole: Mapping[str, Any], *, label: str) -> None:
    vision = whole["vision_config"]
    across = vision.get("image_size", 224) // vision.get("patch_size", 16)
    tokens = whole.get("mm_tokens_per_image", 256)
    what = f"{label}: mm_tokens_per_image"
    _check_whole(tokens, 1, max(1, across**2), label=what)
    root = math.isqrt(tokens)
    if root**2 != tokens or across % root:
        raise InputError(f"{what} must be a square that divides {across} x {across}, got {tokens}")


def _check_whole(value: object, least: int, most: int, *, label: str) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:  # type: ignore[operator]
        raise InputError(
            f"{label} must be a whole number from {least} to {most:,}, got {quote(value)}"
        )
