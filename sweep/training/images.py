"""Micro-batches of rows that have an image each.

The tokens of the image stand near the row's beginning, in their places the model puts what its
tower makes of it, and they carry no loss. What goes in beside the tokens has the types and shapes
that transformers' processors make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from qlora_sweep.search_spaces.vision import MARKS, VISION, SeenImage
from qlora_sweep.sweep.data.batches import Batch
from qlora_sweep.sweep.data.collation import IGNORED

_CHANNELS = 3
_FIRST = 1 + MARKS // 2
"""Place of an image's first token: a token of text and a mark come before it."""


def stacked(rows: list[torch.Tensor]) -> Batch:
    """Return full rows as a micro-batch: there is neither padding nor a mask."""
    tokens = torch.stack(rows)
    return {"input_ids": tokens, "labels": tokens.clone()}


class SeeingRows:
    """Makes micro-batches of full rows in which an image takes the place of some tokens.

    Args:
        side: pixels on each side of the images, before they are resized.
        model_config: of a model that sees.
    """

    def __init__(self, side: int, model_config: PretrainedConfig) -> None:
        self._config = model_config
        self._kind = VISION[model_config.model_type]
        self.image = self._kind.seen(model_config.to_dict(), side)

    @property
    def returned(self) -> int:
        """States that the tower returns of an image."""
        return self.image.tokens if self._kind.returns_tokens else self.image.patches

    def __call__(self, rows: list[torch.Tensor]) -> Batch:
        """Return rows (length,) as a micro-batch (rows, length), random images in it."""
        batch = stacked(rows)
        tokens = batch["input_ids"]
        stands_for = self._config.image_token_id
        # A random token may be the one of an image.
        tokens[tokens == stands_for] = 0
        place = slice(_FIRST, _FIRST + self.image.tokens)
        tokens[:, place] = stands_for
        labels = tokens.clone()
        labels[:, place] = IGNORED
        return {**batch, "labels": labels, **self.inputs(tokens == stands_for)}

    def inputs(self, is_image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the model is given beside tokens, on their device.

        Args:
            is_image: of each token (rows, length), whether it stands for a piece of an image.
        """
        return _INPUTS[self._config.model_type](self._config, self.image, is_image)


def _of_qwen(config: Any, image: SeenImage, is_image: torch.Tensor) -> dict[str, torch.Tensor]:
    vision = config.vision_config
    rows = len(is_image)
    width = _CHANNELS * vision.temporal_patch_size * vision.patch_size**2
    pieces = image.side // vision.patch_size
    return {
        "pixel_values": torch.randn(rows * image.patches, width, device=is_image.device),
        # Read by the host, also where there is no data.
        "image_grid_thw": torch.tensor([[1, pieces, pieces]]).repeat(rows, 1),
        "mm_token_type_ids": is_image.int(),
    }


def _of_gemma3(_: Any, image: SeenImage, is_image: torch.Tensor) -> dict[str, torch.Tensor]:
    shape = len(is_image), _CHANNELS, image.side, image.side
    return {
        "pixel_values": torch.randn(shape, device=is_image.device),
        "token_type_ids": is_image.long(),
    }


def _of_gemma4(config: Any, image: SeenImage, is_image: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = len(is_image)
    device = is_image.device
    side = config.vision_config.patch_size
    pieces = image.side // side
    # The places of the patches, and -1 where there is none.
    grid = torch.arange(pieces, device=device)
    places = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), dim=-1).reshape(-1, 2)
    padding = places.new_full((image.patches - len(places), 2), -1)
    return {
        "pixel_values": torch.rand(rows, image.patches, _CHANNELS * side**2, device=device),
        "image_position_ids": torch.cat([places, padding]).repeat(rows, 1, 1),
        "mm_token_type_ids": is_image.long(),
    }


_INPUTS: Mapping[str, Callable[[Any, SeenImage, torch.Tensor], dict[str, torch.Tensor]]] = {
    "qwen3_vl": _of_qwen,
    "qwen3_vl_moe": _of_qwen,
    "qwen3_5": _of_qwen,
    "qwen3_5_moe": _of_qwen,
    "gemma3": _of_gemma3,
    "gemma4": _of_gemma4,
}
"""What a processor makes beside tokens, by the type of the model."""
