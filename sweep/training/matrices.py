"""Owns which of a model's weights QLoRA means to hold in 4 bits, and how many really are.

bitsandbytes replaces `torch.nn.Linear` alone; experts that transformers keeps as one tensor a
layer, and linear layers of a class of their own, stay in 16 bits without a word. Knows nothing of
configurations or steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from sweep.training.eight_bit import EightBitLinear

_LINEAR = (torch.nn.Linear, Conv1D)
_NEVER = (torch.nn.Embedding, torch.nn.modules.conv._ConvNd)


@dataclass(frozen=True)
class Matrix:
    """The weights of one linear layer, or of all experts of a layer."""

    name: str
    """The parameter's, in the model."""
    weights: int
    is_packed: bool
    """Whether they are in 4 or 8 bits."""


def matrices(model: PreTrainedModel) -> Iterator[Matrix]:
    """Yield every matrix that QLoRA means to quantize, of a base without adapters.

    Linear layers and experts; embeddings and head never are, as transformers decides. A router or
    the state of a recurrent layer is no matrix here: it is smaller than a square of the hidden
    size, or belongs to a convolution.
    """
    kept = {f"{name}." for name in get_keys_to_not_convert(model)}
    square = int(model.config.get_text_config().hidden_size) ** 2
    for path, module in model.named_modules():
        if isinstance(module, _NEVER) or any(f"{path}.".startswith(name) for name in kept):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if _is_matrix(module, name, parameter, square):
                packed = isinstance(module, bnb.nn.Linear4bit | EightBitLinear)
                yield Matrix(f"{path}.{name}", _weights(module, parameter), packed)


def quantized_share(model: PreTrainedModel, *, left: Iterable[str] = ()) -> float:
    """Return how many of the matrices' weights are in 4 or 8 bits, from 0 to 1.

    Args:
        model: a base without adapters.
        left: names of modules that are to be in 16 bits, and do not count.
    """
    counts = {True: 0, False: 0}
    starts = tuple(f"{name}." for name in left)
    for matrix in matrices(model):
        if not matrix.name.startswith(starts):
            counts[matrix.is_packed] += matrix.weights
    total = sum(counts.values())
    return counts[True] / total if total else 1.0


def _is_matrix(module: Any, name: str, parameter: torch.Tensor, square: int) -> bool:
    if isinstance(module, _LINEAR):
        return name == "weight"
    return parameter.ndim >= 3 or (parameter.ndim == 2 and parameter.numel() > square)


def _weights(module: Any, parameter: torch.Tensor) -> int:
    """Return how many weights there are; packed ones are two in a byte."""
    if isinstance(module, bnb.nn.Linear4bit):
        return int(module.in_features * module.out_features)
    return parameter.numel()
