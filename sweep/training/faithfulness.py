"""How close a step in 8 bits comes to the same in 16: on the examples and adapters of a trial, and
of a model's real weights as it is recorded (`fitting`).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

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
FEWEST_TO_SPREAD = 4
"""Micro-batches with supervised tokens, from which on their differences tell chance from products
that are off. Fewer have `COMPARED_TOKENS` together, by which chance is small."""
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
    batches = [loop.next_batch()]
    while len(batches) < MICRO_BATCHES and sum(map(loss_tokens, batches)) < COMPARED_TOKENS:
        batches.append(loop.next_batch())
    whole = [[batch] for batch in batches]
    parts = whole
    if attached.checkpointed:
        parts = [in_parts(batch, 4, loop.rows_per_sample) for batch in batches]
    with without_dropout(model), as_texts(loop.trained):
        narrow_losses, narrow = _gradients(loop, whole)
        with eager(layers), all_recomputed(model):
            with multiplying_in(model, None):
                wide_losses, wide = _gradients(loop, parts)
            with multiplying_in(model, "nf4"):
                coarse_losses, coarse = _gradients(loop, parts)
    wide_loss = float(wide_losses.sum())
    loss_off = narrow_losses - wide_losses
    tokens = np.array(list(map(loss_tokens, batches)))
    length = _dot(wide, wide)
    narrow_off = narrow - wide
    coarse_off = coarse - wide
    return Faithfulness(
        loss_error=abs(float(loss_off.sum()) / wide_loss),
        loss_error_margin=_margin(loss_off, tokens / tokens.sum()) / abs(wide_loss),
        gradient_error=(_dot(narrow_off, narrow_off) / length) ** 0.5,
        gradient_cosine=_dot(narrow, wide) / (_dot(narrow, narrow) * length) ** 0.5,
        accepted_gradient_error=(_dot(coarse_off, coarse_off) / length) ** 0.5,
        accepted_loss_error=abs(float((coarse_losses - wide_losses).sum()) / wide_loss),
    )


def unfaithful(found: Faithfulness) -> str | None:
    """Return why a step in 8 bits does not stand for one in 16; None where it does.

    What everybody accepts of a 4-bit base is the bound: what rounding the weights to NF4 does. A
    loss counts as over it where that is not the chance of a few short examples.
    """
    loss_bound = max(found.accepted_loss_error, LOSS_RESOLUTION)
    bounds = (
        ("the loss is", found.loss_error, found.loss_error_margin, loss_bound),
        ("gradients are", found.gradient_error, 0.0, found.accepted_gradient_error),
    )
    for what, error, margin, bound in bounds:
        if not error - margin <= bound:
            return (
                f"{what} {in_percent(error)} off 16-bit compute of the same base, and rounding the "
                f"weights to NF4 would be {in_percent(bound)}"
            )
    return None


def _margin(differences: NDArray[np.float64], shares: NDArray[np.float64]) -> float:
    """Return three standard errors of a sum of micro-batches' differences, each of which is in
    proportion to the micro-batch's share of the tokens: of fewer than `FEWEST_TO_SPREAD` nothing,
    as they say too little of how far they spread.

    Args:
        differences: (micro-batches,), in nats.
        shares: (micro-batches,), which add up to one.
    """
    count = np.count_nonzero(shares)
    if count < FEWEST_TO_SPREAD:
        return 0.0
    residuals = differences - shares * differences.sum()
    return 3.0 * math.sqrt(count / (count - 1) * float(np.sum(residuals**2)))


def _gradients(
    loop: TrainingLoop, micro_batches: Sequence[Sequence[Batch]]
) -> tuple[NDArray[np.float64], torch.Tensor]:
    """Return what each micro-batch, which may come in parts, adds to the mean loss of all
    supervised tokens, (micro-batches,), and the gradient of all adapters in one row on the host."""
    tokens = sum(map(loss_tokens, chain.from_iterable(micro_batches)))
    loop.optimizer.zero_grad()
    losses = np.zeros(len(micro_batches))
    for micro_batch, parts in enumerate(micro_batches):
        for part in parts:
            # The mean over no tokens is no number.
            if count := loss_tokens(part):
                losses[micro_batch] += loop.add_gradients(part, weight=count / tokens)
    trained = loop.attached.trainable_parameters()
    gradients = [p.grad.float().cpu().flatten() for p in trained if p.grad is not None]
    loop.optimizer.zero_grad()
    return losses, torch.cat(gradients)


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.sum(one * other, dtype=torch.float64))
