"""Models that see: what an image becomes in them, and which of their parts are no decoder's.

Read in transformers 5.17. The tower is frozen and in 16 bits; the decoder trains on its output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import PART_OF, WHOLE, ModelSpec
from qlora_sweep.search_spaces.vision_sizes import ADDING

MARKS = 2
"""Tokens around those of an image that say where it begins and ends."""
Sizes = Mapping[str, Any]
"""A config, or its part."""


@dataclass(frozen=True)
class SeenImage:
    """A square image as a model takes it."""

    side: int
    """Pixels, once it is resized."""
    patches: int
    """Pieces that go through the tower."""
    tokens: int
    """In the row that has it, marks not counted."""


@dataclass(frozen=True)
class Tower:
    """The sizes of a vision transformer."""

    blocks: int
    width: int
    inner: int
    """Width between the matrices of its feed-forward block."""
    projected: int
    """Weights of what makes its output as wide as the decoder, of one token."""
    feed_forward: int = 2
    """Matrices of that block: a gated one has three."""

    def product_flops(self, image: SeenImage) -> float:
        """Return the FLOPs of the products with its weights, of one image's forward pass."""
        of_block = 4 * self.width**2 + self.feed_forward * self.width * self.inner
        products = self.blocks * image.patches * of_block + image.tokens * self.projected
        return 2.0 * products

    def attention_flops(self, image: SeenImage) -> float:
        """Return those of its attention, in which each patch sees all of its image."""
        return 4.0 * self.blocks * image.patches**2 * self.width


@dataclass(frozen=True)
class VisionKind:
    """A type of checkpoint that holds a decoder and what sees for it."""

    parts: tuple[str, ...]
    """What transformers calls the parts beside the decoder."""
    seen: Callable[[Sizes, int], SeenImage]
    """What a square image of so many pixels becomes, of a whole config."""
    tower: Callable[[Sizes], Tower]
    added_layers: Callable[[Sizes], int] = lambda _: 0
    """To the output of how many decoder layers, from the first on, the tower's is added."""
    is_fixed: bool = False
    """Whether each image is resized to one size."""
    returns_tokens: bool = False
    """Whether the tower returns a state for each token of the row, and not for each patch."""


_LEAST_PIXELS = 256**2
_MOST_PIXELS = 4096**2
"""Of an image of Qwen3-VL, as its published processor has them."""


def _seen_by_qwen(whole: Sizes, side: int) -> SeenImage:
    vision = whole["vision_config"]
    merged = int(vision.get("spatial_merge_size", 2))
    step = int(vision.get("patch_size", 16)) * merged
    pieces = round(side / step)
    # As the processor works it out, its rounding included: 239 px become 288.
    pixels = (pieces * step) ** 2
    if pixels > _MOST_PIXELS:
        pieces = max(1, math.floor(side / math.sqrt(side**2 / _MOST_PIXELS) / step))
    elif pixels < _LEAST_PIXELS:
        pieces = math.ceil(side * math.sqrt(_LEAST_PIXELS / side**2) / step)
    return SeenImage(pieces * step, (pieces * merged) ** 2, pieces**2)


def _tower_of_qwen(whole: Sizes) -> Tower:
    vision = whole["vision_config"]
    width = int(vision.get("hidden_size", 1152))
    merged = width * int(vision.get("spatial_merge_size", 2)) ** 2
    mergers = 1 + _added_by_qwen(whole)
    return Tower(
        int(vision.get("depth", 27)),
        width,
        int(vision.get("intermediate_size", 4304)),
        mergers * merged * (merged + int(vision.get("out_hidden_size", 3584))),
    )


def _added_by_qwen(whole: Sizes) -> int:
    if whole["model_type"] not in ADDING:
        return 0
    return len(whole["vision_config"].get("deepstack_visual_indexes", (8, 16, 24)))


def _seen_by_gemma3(whole: Sizes, _: int) -> SeenImage:
    vision = whole["vision_config"]
    side = int(vision.get("image_size", 224))
    patches = (side // int(vision.get("patch_size", 16))) ** 2
    return SeenImage(side, patches, int(whole.get("mm_tokens_per_image", 256)))


def _tower_of_siglip(whole: Sizes) -> Tower:
    vision = whole["vision_config"]
    width = int(vision.get("hidden_size", 768))
    return Tower(
        int(vision.get("num_hidden_layers", 12)),
        width,
        int(vision.get("intermediate_size", 3072)),
        width * int(whole["text_config"]["hidden_size"]),
    )


_GEMMA4_TOKENS = 280
"""Of an image, at most, as Gemma 4's published processor has it."""


def _seen_by_gemma4(whole: Sizes, _: int) -> SeenImage:
    vision = whole["vision_config"]
    pooled = int(vision.get("pooling_kernel_size", 3))
    # All that the tower is given is padded to the patches of the most tokens.
    patches = _GEMMA4_TOKENS * pooled**2
    pieces = math.isqrt(patches) // pooled
    return SeenImage(pieces * pooled * int(vision.get("patch_size", 16)), patches, pieces**2)


def _tower_of_gemma4(whole: Sizes) -> Tower:
    vision = whole["vision_config"]
    width = int(vision.get("hidden_size", 768))
    return Tower(
        int(vision.get("num_hidden_layers", 16)),
        width,
        int(vision.get("intermediate_size", 3072)),
        width * int(whole["text_config"]["hidden_size"]),
        feed_forward=3,
    )


_QWEN = VisionKind(("visual",), _seen_by_qwen, _tower_of_qwen, _added_by_qwen)
VISION: Mapping[str, VisionKind] = {
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "gemma3": VisionKind(
        ("vision_tower", "multi_modal_projector"),
        _seen_by_gemma3,
        _tower_of_siglip,
        is_fixed=True,
    ),
    "gemma4": VisionKind(
        ("vision_tower", "embed_vision", "audio_tower", "embed_audio"),
        _seen_by_gemma4,
        _tower_of_gemma4,
        is_fixed=True,
        returns_tokens=True,
    ),
}
"""By the type of the checkpoint."""


def vision_kind(model: ModelSpec) -> VisionKind | None:
    """Return the kind of a model that sees; None where its tower is not known or cannot be built,
    or it has none."""
    if model.vision_fault is not None:
        return None
    return VISION.get(str(model.config.get(WHOLE, {}).get("model_type")))


def whole_config(model: ModelSpec) -> dict[str, Any]:
    """Return the config of the whole checkpoint that a decoder is stored in."""
    whole = model.config[WHOLE]
    own = {key: value for key, value in model.config.items() if key not in (WHOLE, PART_OF)}
    return {**whole, "text_config": {**own, **whole.get("text_config", {})}}


def seen_image(config: TrialConfig, model: ModelSpec) -> SeenImage | None:
    """Return what a configuration's images become in a model; None where it has none, or the model
    does not see."""
    found = tower_of(config, model)
    if found is None:
        return None
    _, image = found
    return image


def tower_of(config: TrialConfig, model: ModelSpec) -> tuple[Tower, SeenImage] | None:
    """Return the tower and the image that each row has; None where rows are text alone."""
    # Asked of each configuration of a plan, of which most have none.
    if config.image_size is None:
        return None
    kind = vision_kind(model)
    if kind is None:
        return None
    whole = whole_config(model)
    return kind.tower(whole), kind.seen(whole, config.image_size)


def tower_flops(config: TrialConfig, model: ModelSpec) -> float:
    """Return the FLOPs of the tower for one row; 0 where a row has no image."""
    found = tower_of(config, model)
    if found is None:
        return 0.0
    tower, image = found
    return tower.product_flops(image) + tower.attention_flops(image)


def least_length(image: SeenImage) -> int:
    """Return the fewest tokens of a row with an image: its own, its marks, and text around them."""
    return image.tokens + MARKS + 2


def not_of_images(config: TrialConfig, model: ModelSpec, *, has_dataset: bool) -> str | None:
    """Return why a model does not train on images so; None where it does."""
    if model.vision_fault is not None:
        return model.vision_fault
    image = seen_image(config, model)
    if image is None:
        known = ", ".join(sorted(VISION))
        cure = "leave image_size out, or name the directory of a checkpoint that sees"
        return (
            f"the config of {model.name} has no vision tower that is known here: {cure} ({known})"
        )
    least = least_length(image)
    if config.seq_len < least:
        size = f"{config.image_size:,} px is {image.tokens:,} tokens of {model.name}"
        which = f"which do not go into seq_len {config.seq_len:,}: use {least:,} or more"
        return f"an image of {size}, {which}"
    if has_dataset:
        return "a dataset's images are not read yet: leave the dataset out, and rows are random"
    others = {
        "method": "sft",
        "trainer": "sweep",
        "sharding": "none",
        "packing": "none",
        "data_parallel": 1,
    }
    for key, own in others.items():
        if getattr(config, key) != own:
            return f"images are trained on with {key} {own} alone"
    return None
