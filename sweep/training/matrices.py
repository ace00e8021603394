"""The matrices of a model that is there: which of their weights are in 4 or 8 bits, and the FLOPs
of multiplying with them.

bitsandbytes replaces `torch.nn.Linear` alone; experts that transformers keeps as one tensor a
layer, and linear layers of a class of their own, stay in 16 bits without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import bitsandbytes as bnb
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from search_spaces.config import TrialConfig
from search_spaces.linears import attention_width, training_flops_per_token
from sweep.training.eight_bit import EightBitLinear

if TYPE_CHECKING:
    from sweep.training.adapters import Attached

LINEAR = (torch.nn.Linear, Conv1D)
_NEVER = (torch.nn.Embedding, torch.nn.modules.conv._ConvNd)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of a layer's experts."""
_ROUTED = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
"""What configs call the number of experts that a token is sent to."""


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
    kept = tuple(f"{name}." for name in get_keys_to_not_convert(model))
    square = int(model.config.get_text_config().hidden_size) ** 2
    for path, module in model.named_modules():
        if isinstance(module, _NEVER) or f"{path}.".startswith(kept):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, LINEAR):
                is_matrix = name == "weight"
            else:
                size = parameter.numel()
                is_matrix = parameter.ndim >= 3 or (parameter.ndim == 2 and size > square)
            if is_matrix:
                is_packed = isinstance(module, bnb.nn.Linear4bit | EightBitLinear)
                weights = _weights(module) if isinstance(module, LINEAR) else parameter.numel()
                yield Matrix(f"{path}.{name}", weights, is_packed)


def _weights(linear: Any) -> int:
    """Return how many weights a linear layer has; packed ones are two in a byte."""
    if isinstance(linear, Conv1D):
        return int(linear.weight.numel())
    return int(linear.in_features * linear.out_features)


def quantized_share(model: PreTrainedModel, *, left: Iterable[str] = ()) -> float:
    """Return how many of the matrices' weights are in 4 or 8 bits, from 0 to 1.

    Args:
        model: a base without adapters.
        left: names of modules that are to be in 16 bits, and do not count.
    """
    starts = tuple(f"{name}." for name in left)
    counted = [matrix for matrix in matrices(model) if not matrix.name.startswith(starts)]
    total = sum(matrix.weights for matrix in counted)
    packed = sum(matrix.weights for matrix in counted if matrix.is_packed)
    return packed / total if total else 1.0


def flops_per_token(
    attachment: Attached, model_config: PreTrainedConfig, seq_len: int
) -> float | None:
    """Return the FLOPs that a step needs for each token, counted on the model that is there; None
    where its modules do not tell."""
    text = model_config.get_text_config()
    frozen = adapters = 0.0
    for name, weights in _multiplied(attachment, text):
        if weights is None:
            return None
        if ".lora_" in name:
            adapters += weights
        else:
            frozen += weights
    return training_flops_per_token(
        frozen=frozen,
        adapters=adapters,
        layers=len(attachment.layers),
        attention_width=attention_width(
            hidden=text.hidden_size,
            heads=getattr(text, "num_attention_heads", None) or 1,
            head_dim=getattr(text, "head_dim", None),
        ),
        seq_len=seq_len,
    )


def _multiplied(attachment: Attached, text: PreTrainedConfig) -> Iterator[tuple[str, float | None]]:
    """Yield of each module with how many weights each token is multiplied; None where it is of a
    kind that is not known. A token meets as many experts as the router sends it to."""
    count = next((getattr(text, key) for key in _EXPERTS if hasattr(text, key)), None)
    routed = next((getattr(text, key) for key in _ROUTED if hasattr(text, key)), None)
    share = routed / count if isinstance(count, int) and isinstance(routed, int) else None
    modules = dict(attachment.model.named_modules())
    experts = tuple(f"{name}." for name in modules if name.rpartition(".")[2] == "experts")
    for name, module in modules.items():
        if isinstance(module, LINEAR):
            part = share if name.startswith(experts) else 1
            yield name, None if part is None else _weights(module) * part
        elif not isinstance(module, torch.nn.Embedding):
            shapes = [p.shape for p in module.parameters(recurse=False) if p.ndim > 1]
            is_of_experts = any(len(shape) == 3 for shape in shapes)
            for shape in shapes:
                if share is None or len(shape) > 3 or shape[0] != count:
                    yield name, None
                elif len(shape) == 3:
                    yield name, shape.numel() * share
                elif not is_of_experts:
                    # A router; beside experts it would be their biases.
                    yield name, shape.numel()


def flops_per_step(
    attachment: Attached,
    model_config: PreTrainedConfig,
    config: TrialConfig,
    *,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> float | None:
    """Return the FLOPs of an optimizer step of one GPU, padding included; None where not known.

    Args:
        attachment: base and adapters.
        model_config: the base's.
        config: what is trained.
        shapes: rows and width of micro-batches that stand for all; None for full rows.
    """
    if shapes is None:
        each = flops_per_token(attachment, model_config, config.seq_len)
        return each and each * config.tokens_per_step / config.data_parallel
    work = 0.0
    for rows, width in shapes:
        # Flattened rows stay apart: no token has more before it than its own row has.
        each = flops_per_token(attachment, model_config, min(width, config.seq_len))
        if each is None:
            return None
        work += rows * width * each
    return config.accumulation_steps * work / len(shapes)
