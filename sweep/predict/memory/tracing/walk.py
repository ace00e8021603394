"""Owns walking one training step of a model without data, and marking where its segments begin.

The optimizer is not walked: its states and its update are known by number of elements, without any
code. Knows nothing of how the model was built or what the profile is used for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils

from sweep.predict.memory.polynomials import Symbols
from sweep.predict.memory.tracing.cuda import Cuda
from sweep.predict.memory.tracing.ledger import Ledger
from sweep.predict.memory.tracing.model import Traceable
from sweep.training.attributes import changed


@dataclass(frozen=True)
class Walk:
    """What a step came to."""

    ledger: Ledger
    tells_halves_apart: bool
    """Whether it would be another one in the other 16-bit type."""


def walk(
    target: Traceable,
    *,
    symbols: Symbols,
    autocast_dtype: torch.dtype | None,
    has_flash: bool,
    is_checkpointed: bool,
    is_packed: bool = False,
) -> Walk:
    """Run forward and backward once and return what was counted, with a mark at each boundary.

    Marks in order: ``embed``, ``forward 0..n-1``, ``head``, ``head_backward``, ``backward n-1..0``.
    """
    cuda = Cuda(autocast_dtype, padded_length=symbols.p, has_flash=has_flash)
    if is_checkpointed:
        _checkpoint(target, cuda)
    ledger = Ledger(
        ignored=[*target.model.parameters(), *target.model.buffers()],
        layers=len(target.layers),
        is_odd=symbols.is_unexplained,
    )
    with ledger, _boundaries(target.layers, ledger), _texts_in_rows(is_packed):
        ledger.mark("embed")
        tokens = torch.empty(symbols.b, symbols.s, dtype=torch.int64, device="meta")
        batch = {"input_ids": tokens, "labels": torch.empty_like(tokens)}
        if is_packed:
            batch["position_ids"] = torch.empty_like(tokens)
        loss = _forward(target, cuda, batch, widens=autocast_dtype is not None)
        ledger.mark("head_backward")
        torch.autograd.backward(loss)
    return Walk(ledger, tells_halves_apart=cuda.tells_halves_apart)


def _forward(
    target: Traceable, cuda: Cuda, batch: dict[str, torch.Tensor], *, widens: bool
) -> torch.Tensor:
    """As accelerate runs it: under autocast, its 16-bit outputs then widened to fp32."""
    with cuda.region():
        output = target.model(**batch)
    if widens:
        wide = {name: _widened(value) for name, value in output.items()}
        return wide["loss"]
    return output.loss


def _widened(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


def _checkpoint(target: Traceable, cuda: Cuda) -> None:
    """Recompute every layer, and enter autocast again for that, as torch does."""
    target.base.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={
            "use_reentrant": False,
            "context_fn": lambda: (contextlib.nullcontext(), cuda.region()),
        }
    )
    for layer in target.layers:
        layer.gradient_checkpointing = True


def _texts_in_rows(is_packed: bool) -> contextlib.AbstractContextManager[None]:
    """Let transformers find several texts in a packed row: its positions have no values to say."""
    found = (masking_utils, "find_packed_sequence_indices", _texts_of_tokens)
    return changed([found] if is_packed else [])


def _texts_of_tokens(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the text of each token as transformers' function of that place does, by the same
    operators; but for its question whether there is one alone, which has no answer without data."""
    before_first = position_ids[:, :1] - 1
    steps = torch.diff(position_ids, prepend=before_first, dim=-1)
    return (steps != 1).cumsum(-1)


@contextlib.contextmanager
def _boundaries(layers: list[torch.nn.Module], ledger: Ledger) -> Iterator[None]:
    """Mark where each layer's forward and backward pass begin."""
    is_done = [False]
    hooks = []
    for index, layer in enumerate(layers):
        is_last = index == len(layers) - 1
        hooks.append(layer.register_forward_pre_hook(_entering(ledger, index, is_done)))
        hooks.append(layer.register_forward_hook(_leaving(ledger, index, is_last, is_done)))
    yield
    for hook in hooks:
        hook.remove()


def _entering(ledger: Ledger, index: int, is_done: list[bool]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        if not is_done[0]:
            ledger.mark(f"forward {index}")

    return hook


def _leaving(ledger: Ledger, index: int, is_last: bool, is_done: list[bool]) -> Callable[..., None]:
    def hook(_module: Any, _args: Any, output: Any) -> None:
        if is_done[0]:
            return
        tensor = output[0] if isinstance(output, tuple) else output
        # The gradient of a layer's output arrives when its backward pass is about to begin.
        tensor.register_hook(lambda _grad: ledger.mark(f"backward {index}"))
        if is_last:
            # Hooks run again where a layer is recomputed in the backward pass; from here on its
            # gradients mark the boundaries.
            is_done[0] = True
            # What the layer's frame still holds dies after this hook, and is the layer's.
            ledger.mark_next("head")

    return hook
