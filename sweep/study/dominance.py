"""Owns when one configuration needs at least the memory of another, whatever the device.

Only relations that hold by construction are claimed: what is not claimed costs one trial, what is
claimed wrongly hides a configuration that fits. Knows nothing of budgets, predictions or trials.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from search_spaces.config import TrialConfig
from search_spaces.linears import resolve_targets
from search_spaces.models import ModelSpec


@dataclass(frozen=True)
class Footprint:
    """A configuration as far as memory goes: what it grows with, and what must be equal."""

    lora_rank: int
    modules: frozenset[str]
    tokens: tuple[int, int]
    """Micro-batch and sequence length."""
    recomputed_layers: float
    is_accumulating: bool
    """Whether the gradients of one micro-batch live through the forward pass of the next."""
    has_dropout: bool
    """A dropout keeps a masked copy of each adapter's input; how much it drops changes nothing."""
    is_upcast: bool
    is_compiled: bool
    structure: tuple[object, ...]
    """Everything else that shapes memory."""


def footprint(config: TrialConfig, *, model: ModelSpec) -> Footprint:
    """Return what of ``config`` matters to memory. The scale of LoRA, for one, does not."""
    return Footprint(
        lora_rank=config.lora_rank,
        modules=frozenset(resolve_targets(config, model)),
        tokens=(config.micro_batch_size, config.seq_len),
        recomputed_layers=round(config.checkpoint_fraction * model.hidden_layers),
        is_accumulating=config.accumulation_steps > 1,
        has_dropout=config.lora_dropout > 0,
        is_upcast=config.upcast_fp32,
        is_compiled=config.compile,
        structure=(
            config.effective_batch_size,
            config.compute_dtype,
            config.quantization,
            config.double_quant,
            config.kernels,
            config.attention,
            config.optimizer,
        ),
    )


def base_alone(whole: Footprint) -> Footprint:
    """Return the least that any configuration like ``whole`` can need: its base, without training.

    What could not even be loaded cannot be trained with smaller adapters or shorter rows either.
    """
    return replace(
        whole,
        lora_rank=0,
        modules=frozenset(),
        tokens=(0, 0),
        recomputed_layers=float("inf"),
        is_accumulating=False,
        has_dropout=False,
    )


def dominates(larger: Footprint, smaller: Footprint) -> bool:
    """Return whether ``larger`` is at least as large everywhere, with all else equal."""
    if _must_be_equal(larger) != _must_be_equal(smaller):
        return False
    return (
        larger.lora_rank >= smaller.lora_rank
        and larger.modules >= smaller.modules
        and all(a >= b for a, b in zip(larger.tokens, smaller.tokens, strict=True))
        and _keeps_as_much(larger.recomputed_layers, smaller.recomputed_layers)
        and larger.is_accumulating >= smaller.is_accumulating
        and larger.has_dropout >= smaller.has_dropout
        and larger.is_upcast >= smaller.is_upcast
    )


def _must_be_equal(one: Footprint) -> tuple[object, ...]:
    if not one.is_compiled:
        return (one.structure,)
    # A compiler decides for itself what each graph keeps: only the shapes through it may differ.
    graph = (one.lora_rank, one.modules, one.recomputed_layers, one.has_dropout, one.is_upcast)
    return one.structure, graph


def _keeps_as_much(recomputed: float, other_recomputed: float) -> bool:
    """Whether recomputing so many layers keeps at least as much as recomputing the others.

    A recomputed layer is whole again during its own backward pass, with its output's gradient
    beside it, so recomputing one layer more may save nothing. Two more always save.
    """
    return recomputed == other_recomputed or recomputed + 2 <= other_recomputed
