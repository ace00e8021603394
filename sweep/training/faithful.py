"""How close a step in 8 bits comes to the same step in 16, on the same examples and adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from search_spaces.errors import in_percent
from storage.records import Faithfulness
from sweep.data.batches import Batch
from sweep.training.adapters import Attached, recomputed
from sweep.training.compiling import changed, eager
from sweep.training.step import TrainingLoop
from sweep.training.texts import loss_tokens

MICRO_BATCHES = 2
LOSS_RESOLUTION = torch.finfo(torch.bfloat16).eps
"""A relative difference of the loss that bf16 itself would not show."""

_Gradients = tuple[float, list[torch.Tensor]]
"""The mean loss, and the gradient of each adapter tensor on the host."""


def compared(attachment: Attached, loop: TrainingLoop) -> Faithfulness:
    """Return how loss and gradients of a few micro-batches differ from those in 16 bits.

    The step in 8 bits is the one that trains, compiled or not, but for dropout. Those in 16 bits
    are eager and recompute every layer, to need less memory than that; where it recomputes as well,
    in parts of a micro-batch.
    """
    model, layers = attachment.model, attachment.layers
    base = model.get_base_model()
    whole = [loop.next_batch() for _ in range(MICRO_BATCHES)]
    parts = [p for batch in whole for p in _parts(batch, 4 if attachment.checkpointed else 1)]
    with _without_dropout(model):
        narrow = _gradients(attachment, loop, whole)
        recomputing = recomputed(base, layers, range(len(layers)))
        can_recompute = base.supports_gradient_checkpointing
        with eager(layers), recomputing if can_recompute else nullcontext():
            with multiplying_in(model, None):
                wide = _gradients(attachment, loop, parts)
            with multiplying_in(model, "nf4"):
                coarse = _gradients(attachment, loop, parts)
    return Faithfulness(
        loss_error=abs(narrow[0] - wide[0]) / abs(wide[0]),
        gradient_error=_error(narrow[1], wide[1]),
        gradient_cosine=_dot(narrow[1], wide[1])
        / (_dot(narrow[1], narrow[1]) * _dot(wide[1], wide[1])) ** 0.5,
        accepted_gradient_error=_error(coarse[1], wide[1]),
        accepted_loss_error=abs(coarse[0] - wide[0]) / abs(wide[0]),
    )


def unfaithful(found: Faithfulness) -> str | None:
    """Return why a step in 8 bits does not stand for one in 16; None where it does.

    What everybody accepts of a 4-bit base is the bound: what rounding the weights to NF4 does.
    """
    bounds = (
        ("the loss is", found.loss_error, max(found.accepted_loss_error, LOSS_RESOLUTION)),
        ("gradients are", found.gradient_error, found.accepted_gradient_error),
    )
    for what, error, bound in bounds:
        if not error <= bound:
            return (
                f"{what} {in_percent(error)} off 16-bit compute of the same base, and rounding the "
                f"weights to NF4 would be {in_percent(bound)}"
            )
    return None


def _parts(batch: Batch, count: int) -> Iterator[Batch]:
    """Yield a micro-batch in so many parts, or in as many as it has rows."""
    rows = len(batch["input_ids"])
    for part in torch.arange(rows).chunk(count):
        here = slice(int(part[0]), int(part[-1]) + 1)
        yield {key: value[here] if rows > 1 else value for key, value in batch.items()}


def _gradients(attachment: Attached, loop: TrainingLoop, batches: Sequence[Batch]) -> _Gradients:
    """Return loss and gradients of micro-batches together, as a mean over supervised tokens."""
    counts = [loss_tokens(batch) for batch in batches]
    loop.optimizer.zero_grad()
    loss = 0.0
    for batch, count in zip(batches, counts, strict=True):
        # The mean over no tokens is no number.
        if count:
            loss += loop.add_gradients(batch, weight=count / sum(counts))
    gradients = [
        p.grad.float().cpu() for p in attachment.trainable_parameters() if p.grad is not None
    ]
    loop.optimizer.zero_grad()
    return loss, gradients


def _error(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    between = [a - b for a, b in zip(one, other, strict=True)]
    return (_dot(between, between) / _dot(other, other)) ** 0.5


def _dot(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    both = zip(one, other, strict=True)
    return sum(float(torch.sum(a * b, dtype=torch.float64)) for a, b in both)


def multiplying_in(model: torch.nn.Module, products: str | None) -> AbstractContextManager[None]:
    """Let the layers that multiply in 8 bits do otherwise for a while.

    Args:
        model: whose layers; eager, as what is compiled would be compiled again.
        products: None for 16 bits; ``nf4`` for 16 bits with weights rounded to NF4 once more.
    """
    layers = (m for m in model.modules() if getattr(m, "products", None) is not None)
    return changed((layer, "products", products) for layer in layers)


def _without_dropout(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Drop nothing: two passes would not drop the same."""
    return changed(
        (module, name, 0.0)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and (name == "p" or "dropout" in name)
    )
