"""Owns what was typed of a rental: what of it cannot be, the machine it names, what is planned.

Knows no provider, and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.errors import InputError
from search_spaces.gpus import find_gpu
from search_spaces.space import SearchSpace
from sweep.launching.rental import Machine
from sweep.planning.question import PlanRequest

BEFORE = {
    "gpu": "--gpu",
    "cards": "--cards",
    "study": "--study",
    "max_dollars": "--max-dollars",
    "as_json": "--json",
}
"""Options of `sweep run` that `sweep launch` has itself."""
NOT_THERE = {"storage": "--storage", "carried": "--from", "ray": "--ray"}
"""Those that name what a rented machine cannot see."""


@dataclass(frozen=True)
class LaunchRequest:
    """What was typed."""

    space: str
    on: str
    gpu: str | None = None
    cards: int = 1
    cloud: str | None = None
    is_spot: bool = False
    max_dollars: float | None = None
    prices: str | None = None
    typed_prices: tuple[str, ...] = ()
    volume: str | None = None
    study: str | None = None
    output: str | None = None
    is_forced: bool = False
    is_sure: bool = False
    as_json: bool = False
    words: tuple[str, ...] = ()
    """For `sweep run`, as they were typed."""


@dataclass(frozen=True)
class RunOptions:
    """What the words for `sweep run` came to, as the command itself reads them."""

    overrides: Mapping[str, Any]
    """Keys of the space with what was typed instead; None where nothing was."""
    held: Mapping[str, Any]
    """Knobs that are held."""
    others: Mapping[str, Any]
    """What else a run takes, by its parameters; None or False where it was not typed."""

    def typed(self, key: str) -> bool:
        """Whether something was typed for one of these."""
        return {**self.others, **self.overrides}.get(key) not in (None, False)


def refuse_what_cannot_be(request: LaunchRequest) -> None:
    """Raise an `InputError` where what was typed cannot be meant of a rented machine."""
    dollars = request.max_dollars
    if dollars is not None and not (dollars > 0 and math.isfinite(dollars)):
        raise InputError(f"--max-dollars must be more than 0, and a number, got {dollars:g}")


def refuse_options(run: RunOptions) -> None:
    """Raise an `InputError` where an option of the run is not one of a rented machine."""
    for key, option in BEFORE.items():
        if run.typed(key):
            raise InputError(f"{option} is an option of launch: write it before the --")
    for key, option in NOT_THERE.items():
        if run.typed(key):
            raise InputError(f"{option} names what a rented machine cannot see: leave it out")


def asked_machine(request: LaunchRequest, space: SearchSpace) -> Machine:
    """Return the machine that is asked for; the space's own card where none was typed.

    Raises:
        InputError: neither names a card of the catalogue.
    """
    name = request.gpu or space.gpu
    if request.gpu in ("auto", "cpu"):
        raise InputError(f"--gpu {request.gpu} is no card to rent: name one (`sweep gpus`)")
    if name in ("auto", "cpu"):
        raise InputError(
            f"space '{space.name}' is for gpu {name}: name the card to rent with --gpu "
            "(`sweep gpus`)"
        )
    if request.cards < 1:
        raise InputError(f"--cards must be at least 1, got {request.cards}")
    cloud = None if request.cloud is None else request.cloud.strip().lower()
    return Machine(find_gpu(name), request.cards, cloud, request.is_spot)


def plan_request(request: LaunchRequest, run: RunOptions, machine: Machine) -> PlanRequest:
    """Return what the planner is asked: how long that study takes on that card."""
    return PlanRequest(
        space=request.space,
        gpus=(machine.card.name,),
        model=run.overrides.get("model"),
        data=run.overrides.get("data") or {},
        configuration=run.held,
        prices=None if request.prices is None else Path(request.prices),
        typed_prices=request.typed_prices,
    )
