"""Owns which card a study is for, and whether the machine can stand in for it.

Pure: a space and what NVML read of the card go in. Knows nothing of NVML, storage or runners.
"""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.gpus import GIB, GpuSpec, find_gpu, match_product
from search_spaces.space import SearchSpace
from storage.definition import Target
from sweep.cards import Card

UNKNOWN_CARD_RESERVE_BYTES = GIB
"""Context, libraries and headroom on a card that the catalogue does not have."""
ADVICE = (
    "`sweep doctor` says what is wrong, `sweep plan` answers without a GPU, and "
    "`sweep run cpu-demo` is a study on the CPU"
)


@dataclass(frozen=True)
class ResolvedTarget:
    """A target, and what the rules need to know of the card behind it."""

    target: Target
    compute_capability: tuple[int, int] | None
    """The least of the target's and its host's; None on a CPU."""


def resolve_target(space: SearchSpace, card: Card | None) -> ResolvedTarget:
    """Return what the study of ``space`` is for on a machine with ``card``.

    Raises:
        InputError: no such card, or a budget that is missing or more than the card has.
        EnvironmentFault: there is no card here, or a smaller one than asked for.
    """
    if space.gpu == "cpu":
        return ResolvedTarget(_cpu(space), None)
    wanted = None if space.gpu == "auto" else find_gpu(space.gpu)
    if card is None:
        asked = "a GPU" if wanted is None else f"the {wanted.name}"
        raise EnvironmentFault(
            f"space '{space.name}' is for {asked}, and this machine shows no NVIDIA GPU: {ADVICE}"
        )
    host = match_product(card.product)
    if wanted is None or wanted == host:
        return ResolvedTarget(_itself(space, card, host), card.compute_capability)
    return ResolvedTarget(
        _emulated(space, card, wanted), min(card.compute_capability, wanted.compute_capability)
    )


def _cpu(space: SearchSpace) -> Target:
    if space.budget_gib is None:
        raise InputError(
            f"space '{space.name}': budget_gib is missing: gpu cpu has no memory of its own, so "
            "say how much a training may take"
        )
    return Target(gpu="cpu", device="cpu", budget_bytes=int(space.budget_gib * GIB))


def _itself(space: SearchSpace, card: Card, spec: GpuSpec | None) -> Target:
    if spec is None:
        available = card.memory_bytes - UNKNOWN_CARD_RESERVE_BYTES
        name = card.product
    else:
        # A slice of a card, or one with ECC on, has less than the catalogue says.
        available = spec.budget_bytes - max(0, spec.memory_bytes - card.memory_bytes)
        name = spec.name
    return Target(gpu=name, device="cuda", budget_bytes=_budget(space, available, card=name))


def _emulated(space: SearchSpace, card: Card, spec: GpuSpec) -> Target:
    available = card.memory_bytes - UNKNOWN_CARD_RESERVE_BYTES
    if available < spec.budget_bytes:
        raise EnvironmentFault(
            f"the {card.product} here has {card.memory_bytes / GIB:.1f} GiB and cannot stand in "
            f"for the {spec.name}, whose trainings may take {spec.budget_bytes / GIB:.1f} GiB"
        )
    return Target(
        gpu=spec.name,
        device="cuda",
        budget_bytes=_budget(space, spec.budget_bytes, card=spec.name),
        emulated_on=card.product,
    )


def _budget(space: SearchSpace, available: int, *, card: str) -> int:
    """Return the tighter of what the card has and what the space allows."""
    if space.budget_gib is None:
        return available
    asked = int(space.budget_gib * GIB)
    if asked > available:
        raise InputError(
            f"space '{space.name}': budget_gib {space.budget_gib:g} is more than the "
            f"{available / GIB:.1f} GiB that a training has on the {card}"
        )
    return asked
