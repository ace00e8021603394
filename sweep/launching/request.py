"""Owns what was typed of a rental: what of it cannot be, the machine it names, what is planned.

Knows no provider, and writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.errors import InputError, listed, quote
from search_spaces.gpus import find_gpu
from search_spaces.knobs import KNOBS
from search_spaces.space import SearchSpace
from storage.reading import is_file_name
from sweep.launching.rental import BUCKETS, Machine
from sweep.paths import RESERVED
from sweep.planning.question import PlanRequest

BEFORE = {
    "gpu": "--gpu",
    "cards": "--cards",
    "study": "--study",
    "max_dollars": "--max-dollars",
    "as_json": "--json",
}
"""Options of `sweep run` that `sweep launch` has itself."""
NOT_THERE = {
    "storage": "--storage",
    "carried": "--from",
    "host": "--host",
    "host_python": "--host-python",
    "ray": "--ray",
}
"""Those that name what a rented machine cannot see."""
TYPED_OFF = (*KNOBS, "completions_only")
"""Options that are None where nobody typed them, and False where somebody did."""


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
    output: Path | None = None
    is_sure: bool = False
    as_json: bool = False
    words: tuple[str, ...] = ()
    """For `sweep run`, as they were typed."""
    options: Mapping[str, Any] | None = None
    """The same, as `sweep run` reads them."""

    @property
    def run(self) -> Mapping[str, Any]:
        """What was typed for `sweep run`, without what was not.

        Off is typed too, of a knob that can be on: --no-compile.
        """
        return {
            key: one
            for key, one in (self.options or {}).items()
            if one is not None
            and one != []
            and one != ()
            and (key in TYPED_OFF or one is not False)
        }

    @property
    def model(self) -> str | None:
        """The model, where one was typed."""
        typed = self.run.get("model")
        return typed[0] if isinstance(typed, list | tuple) else typed

    @property
    def held(self) -> dict[str, Any]:
        """Knobs that are held."""
        return {key: one for key, one in self.run.items() if key in KNOBS}

    @property
    def data(self) -> dict[str, Any]:
        """What was typed of texts, by the keys of a space's section."""
        keys = {
            "texts": "data",
            "text_column": "text_column",
            "format": "texts_format",
            "completions_only": "completions_only",
            "tokenizer": "tokenizer",
        }
        return {key: self.run.get(name) for key, name in keys.items()}


def refuse_what_cannot_be(request: LaunchRequest) -> None:
    """Raise an `InputError` where what was typed cannot be meant of a rented machine."""
    for key, option in BEFORE.items():
        if key in request.run:
            raise InputError(f"{option} is an option of launch: write it before the --")
    for key, option in NOT_THERE.items():
        if key in request.run:
            raise InputError(f"{option} names what a rented machine cannot see: leave it out")
    models = request.run.get("model")
    if isinstance(models, list | tuple) and len(models) > 1:
        raise InputError(f"--model names {len(models)} models: rent for one study at a time")
    if request.max_dollars is not None and not request.max_dollars > 0:
        raise InputError(f"--max-dollars must be more than 0, got {request.max_dollars:g}")
    if request.study is not None and (request.study in RESERVED or not is_file_name(request.study)):
        raise InputError(f"--study: {quote(request.study)} cannot name a study")
    if "://" in (request.volume or "") and not str(request.volume).startswith(BUCKETS):
        raise InputError(
            f"--volume: {quote(request.volume)} must begin with {listed(BUCKETS)}, or be a name"
        )
    if request.volume is not None and not re.fullmatch(r"[\w.:/-]+", request.volume, re.ASCII):
        raise InputError(f"--volume: {quote(request.volume)} cannot name a volume or bucket")


def asked_machine(request: LaunchRequest, space: SearchSpace) -> Machine:
    """Return the machine that is asked for; the space's own card where none was typed.

    Raises:
        InputError: neither names a card of the catalogue.
    """
    name = request.gpu or space.gpu
    if name in ("auto", "cpu"):
        raise InputError(
            f"space '{space.name}' is for gpu {name}: name the card to rent with --gpu "
            "(`sweep gpus`)"
        )
    if request.cards < 1:
        raise InputError(f"--cards must be at least 1, got {request.cards}")
    cloud = None if request.cloud is None else request.cloud.strip().lower()
    return Machine(find_gpu(name), request.cards, cloud, request.is_spot)


def plan_request(request: LaunchRequest, machine: Machine) -> PlanRequest:
    """Return what the planner is asked: how long that study takes on that card."""
    return PlanRequest(
        space=request.space,
        gpus=(machine.card.name,),
        model=request.model,
        data=request.data,
        configuration=request.held,
        prices=None if request.prices is None else Path(request.prices),
        typed_prices=request.typed_prices,
    )
