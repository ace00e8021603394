"""Images in a walk without data: how many there are and of which size is known, and no more.

What transformers works out of an image's size on the host, or asks of a mask's values, has no
answer on the meta device; the tensors that it makes have known shapes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from qlora_sweep.sweep.training.eight_bit import changed
from qlora_sweep.sweep.training.images import SeeingRows

_TAPS = 4
"""Places of the learned grid that each patch's position lies between."""
_AXES = 2
_ROTATED_AXES = 3
"""Time, height and width, of each token."""


def image_inputs(
    model: PreTrainedModel, side: int, tokens: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return what goes in beside tokens (rows, length), with an image in each row."""
    made = SeeingRows(side, model.config).inputs(torch.empty_like(tokens, dtype=torch.bool))
    if "image_grid_thw" in made:
        # Else they are worked out token by token.
        made["position_ids"] = tokens.new_empty(_ROTATED_AXES, *tokens.shape)
    return made


@contextlib.contextmanager
def known_images(model: PreTrainedModel, side: int | None) -> Iterator[None]:
    """Let a model that sees find what follows from its images' size, for a while.

    Args:
        model: on the meta device.
        side: pixels of each image; None where there are none.
    """
    if side is None:
        yield
        return
    module = sys.modules[type(model).__module__]
    image = SeeingRows(side, model.config).image
    stand_ins = _StandIns(image.patches, image.tokens)
    changes: list[tuple[Any, str, Any]] = []
    for name in (
        "get_vision_interpolation_indices_and_weights",
        "get_vision_position_ids",
        "get_vision_attention_seqlens",
        "create_bidirectional_mask",
    ):
        if hasattr(module, name):
            changes.append((module, name, getattr(stand_ins, name)))
    decoder = type(model.get_decoder())
    if hasattr(decoder, "_deepstack_process"):
        changes.append((decoder, "_deepstack_process", stand_ins.deepstack))
    with changed(changes), _Chosen(image.tokens):
        yield


class _Chosen(TorchFunctionMode):
    """Answers what a mask of the images' tokens chooses, of which there are as many in each row.

    Args:
        tokens: of an image.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function."""
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_meta:
            if func is torch.Tensor.tolist:
                return [self._tokens] * len(first)
            if func is torch.Tensor.__getitem__ and _is_mask(args[1]):
                mask = args[1]
                chosen = len(mask) * self._tokens * mask.shape[2:].numel()
                return first.new_empty(chosen, *first.shape[mask.dim() :])
        return func(*args, **(kwargs or {}))


def _is_mask(index: object) -> bool:
    if not isinstance(index, torch.Tensor) or not index.is_meta:
        return False
    return index.dtype == torch.bool and index.dim() > 1


class _StandIns:
    """What transformers' functions of these names return.

    Args:
        patches: of an image.
        tokens: of an image.
    """

    def __init__(self, patches: int, tokens: int) -> None:
        self._patches = patches
        self._tokens = tokens

    def get_vision_interpolation_indices_and_weights(
        self, grid: torch.Tensor, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        patches = len(grid) * self._patches
        indices = torch.empty(patches, _TAPS, dtype=torch.int64, device="meta")
        return indices, torch.empty(patches, _TAPS, device="meta")

    def get_vision_position_ids(self, grid: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        patches = len(grid) * self._patches
        return torch.empty(patches, _AXES, dtype=torch.int64, device="meta")

    def get_vision_attention_seqlens(
        self, grid: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """All images at once: what their attentions take one after another is as much."""
        return torch.tensor([0, len(grid) * self._patches]), None

    def create_bidirectional_mask(self, *, inputs_embeds: torch.Tensor, **_: Any) -> torch.Tensor:
        """Part of the patches are padding, which no other sees."""
        rows, patches = inputs_embeds.shape[:2]
        return torch.empty(rows, 1, patches, patches, dtype=torch.bool, device="meta")

    @property
    def deepstack(self) -> Any:
        """Adds the tower's output to that of a decoder layer, at the images' places."""

        def process(_: Any, hidden: torch.Tensor, mask: torch.Tensor, seen: torch.Tensor) -> Any:
            return _Added.apply(hidden, mask, seen.to(hidden.dtype))

        return process


class _Added(torch.autograd.Function):
    """A copy of the states, at whose images' places something is added: picked, added, put back."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, mask: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        places = torch.empty(mask.dim(), len(seen), dtype=torch.int64, device="meta")
        ctx.save_for_backward(places)
        ctx.shape = seen.shape
        copy = hidden.clone()
        _picked = torch.empty_like(seen, dtype=hidden.dtype)
        _sum = torch.empty_like(_picked)
        return copy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # The gradient with zeros where something was put, and that of what was picked.
        grad = grads[0].clone()
        _picked = grads[0].new_empty(ctx.shape)
        _spread = torch.zeros_like(grad)
        return grad + _spread, None, None
