"""How close a step in 8 bits comes to the same in 16: on the examples and adapters of a trial, and
of a model's real weights as it is recorded (`fitting`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from qlora_sweep.search_spaces.errors import in_percent
from qlora_sweep.storage.records import EightBitProducts, Faithfulness, ProductErrors
from qlora_sweep.sweep.data.batches import Batch, in_parts, loss_tokens
from qlora_sweep.sweep.training import fitting
from qlora_sweep.sweep.training.adapters import eager
from qlora_sweep.sweep.training.fitting import (
    Fitted,
    LayerErrors,
    all_recomputed,
    as_texts,
    multiplying_in,
    without_dropout,
)
from qlora_sweep.sweep.training.step import TrainingLoop

MICRO_BATCHES = 16
"""On which a step in 8 bits is compared at most. Of two with some fifty supervised tokens together
the loss was 5.4 % off in FP8, where rounding to NF4 made 1.6 %, by chance (SmolLM2-135M on chats of
a dozen tokens, 2026-11-28)."""
COMPARED_TOKENS = 4096
"""So many are enough: by 5,120 tokens a gradient was 46.8 and 47.1 % off, by 10,240 it was 46.0 %
(NF4 in INT8 on an H100, 2026-11-26), where 129 % are accepted."""
LOSS_RESOLUTION = torch.finfo(torch.bfloat16).eps
"""A relative difference of the loss that bf16 itself would not show."""


def products_of(found: Fitted) -> EightBitProducts:
    """Return what fitting came to, as it is recorded."""
    return EightBitProducts(
        errors=tuple(_by_projection(found.layers)),
        most_error=fitting.MOST_ERROR,
        most_gradient_error=fitting.MOST_GRADIENT_ERROR,
        kept_in_16_bits=found.kept_in_16_bits,
        share_in_16_bits=found.share_in_16_bits,
        loss_8_bit=found.loss_8_bit,
        loss_16_bit=found.loss_16_bit,
    )


def _by_projection(errors: Sequence[LayerErrors]) -> Iterator[ProductErrors]:
    """Yield the errors of the layers of one name together, such as all ``down_proj``."""
    together = defaultdict[str, list[LayerErrors]](list)
    for layer in errors:
        projection = layer.name.removesuffix(".base_layer").rpartition(".")[2]
        together[projection].append(layer)
    for projection, layers in together.items():

        def figures(name: str, layers: list[LayerErrors] = layers) -> list[float]:
            return [getattr(layer, name) for layer in layers]

        yield ProductErrors(
            projection=projection,
            layers=len(layers),
            forward=statistics.median(figures("forward")),
            forward_worst=max(figures("forward")),
            forward_16_bit=statistics.median(figures("forward_16_bit")),
            gradient=statistics.median(figures("gradient")),
            gradient_worst=max(figures("gradient")),
            gradient_16_bit=statistics.median(figures("gradient_16_bit")),
        )


def compared(loop: TrainingLoop) -> Faithfulness:
    """Return how loss and gradients of a few micro-batches differ from those in 16 bits.

    The step in 8 bits is the one that trains, compiled or not, but for dropout. Those in 16 bits
    are eager and recompute every layer, to need less memory than that; where it recomputes as well,
    in parts of a micro-batch. Of pairs the completions' likelihood is compared: their own loss and
    its gradients vanish where the chosen one is surely preferred.
    """
    attached = loop.attached
    model = attached.model
    layers = attached.layers
    whole = [loop.next_batch()]
    while len(whole) < MICRO_BATCHES and sum(map(loss_tokens, whole)) < COMPARED_TOKENS:
        whole.append(loop.next_batch())
    parts = whole
    if attached.checkpointed:
        parts = []
        for batch in whole:
            parts += in_parts(batch, 4, loop.rows_per_sample)
    with without_dropout(model), as_texts(loop.trained):
        narrow_loss, narrow = _gradients(loop, whole)
        with eager(layers), all_recomputed(model):
            with multiplying_in(model, None):
                wide_loss, wide = _gradients(loop, parts)
            with multiplying_in(model, "nf4"):
                coarse_loss, coarse = _gradients(loop, parts)
    length = _dot(wide, wide)
    narrow_off = narrow - wide
    coarse_off = coarse - wide
    return Faithfulness(
        loss_error=abs(narrow_loss - wide_loss) / abs(wide_loss),
        gradient_error=(_dot(narrow_off, narrow_off) / length) ** 0.5,
        gradient_cosine=_dot(narrow, wide) / (_dot(narrow, narrow) * length) ** 0.5,
        accepted_gradient_error=(_dot(coarse_off, coarse_off) / length) ** 0.5,
        accepted_loss_error=abs(coarse_loss - wide_loss) / abs(wide_loss),
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


def _gradients(loop: TrainingLoop, batches: Sequence[Batch]) -> tuple[float, torch.Tensor]:
    """Return the loss of micro-batches together, as a mean over supervised tokens, and the gradient
    of all adapters in one row on the host."""
    counts = list(map(loss_tokens, batches))
    loop.optimizer.zero_grad()
    # The mean over no tokens is no number.
    loss = sum(
        loop.add_gradients(batch, weight=count / sum(counts))
        for batch, count in zip(batches, counts, strict=True)
        if count
    )
    trained = loop.attached.trainable_parameters()
    gradients = [p.grad.float().cpu().flatten() for p in trained if p.grad is not None]
    loop.optimizer.zero_grad()
    return loss, torch.cat(gradients)


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.sum(one * other, dtype=torch.float64))
