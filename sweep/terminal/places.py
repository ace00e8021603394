"""Where the trials of a study run that this process drives: on GPUs of this machine, on those of a
Ray cluster, or nowhere, where they were recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from search_spaces.errors import InputError, quote
from search_spaces.loading import load_space
from search_spaces.space import SearchSpace
from storage.surfaces import Surface, read_surface
from sweep.request import Where
from sweep.running.device_info import (
    Card,
    ChosenCard,
    cards_for,
    choose_cards,
    read_card,
    read_cards,
)
from sweep.running.ray_nodes import Cluster, checked_address, joined
from sweep.running.replay import ReplayRunner
from sweep.running.runner import Lanes, Runner
from sweep.study import recorded
from sweep.study.session import Prepared, lanes_on_ray, supervised_runner
from sweep.terminal.console import announce_if_slow


class Places(Protocol):
    """Where trials run; left at the end of a ``with``."""

    def first(self) -> Card | None:
        """Return the GPU that decides what a study is for: all that run its trials are like it."""
        ...

    def narrowed(self, space: SearchSpace) -> SearchSpace:
        """Return what of a space can be run here."""
        return space

    def given_to(self, prepared: Prepared) -> Prepared:
        """Return a study with the GPUs that it runs on."""
        ...

    def new_runner(self, prepared: Prepared) -> Runner | Lanes:
        """Return what runs the trials of a study."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def places(
    where: Where,
    *,
    devices: str | None,
    space: str,
    overrides: Mapping[str, Any],
    warn: Callable[[str], None],
) -> Places:
    """Return where a run of a space is to run that this process drives.

    Args:
        where: this machine, a Ray cluster, or a recorded surface.
        devices: that were typed.
        space: a preset or a YAML file.
        overrides: keys of the space with what was typed instead.
        warn: told of GPUs that others hold.

    Raises:
        InputError: GPUs were named where none of this machine's take part, or an address is none.
    """
    if where.kind == "local":
        return OnCards(devices)
    if where.kind not in ("ray", "recorded"):
        raise InputError(
            f"on must be local, ray:ADDRESS or recorded:SURFACE here, got {quote(str(where))}: "
            f"`sweep run --on {where}` starts a study elsewhere"
        )
    if devices is not None:
        whose = (
            "Ray hands out the GPUs of its nodes" if where.kind == "ray" else "no GPU takes part"
        )
        raise InputError(f"--devices and --on {where}: {whose}: leave --devices out")
    if where.kind == "recorded":
        return OnRecorded(read_surface(where.address))
    checked_address(where.address)
    return OnRay(where.address, space=space, overrides=overrides, warn=warn)


@dataclass
class OnCards(Places):
    """The GPUs that were typed, read from this machine when a space asks for one."""

    typed: str | None
    cards: tuple[ChosenCard, ...] = ()

    def first(self) -> Card | None:
        """See `Places.first`."""
        if self.typed is None:
            return read_card()
        self.cards = self.cards or choose_cards(self.typed, read_cards())
        return self.cards[0].card

    def given_to(self, prepared: Prepared) -> Prepared:
        """See `Places.given_to`.

        Raises:
            InputError: it runs on none, or fewer than one of its trials trains on.
            EnvironmentFault: nothing was typed, and not so many GPUs are to be had.
        """
        size = prepared.cards_per_trial
        if self.typed is None:
            return replace(prepared, cards=() if size == 1 else cards_for(size, read_cards()))
        if not self.cards:
            raise InputError(
                f"--devices {self.typed}: space '{prepared.space.name}' is for the CPU"
            )
        if len(self.cards) < size:
            raise InputError(
                f"--devices {self.typed}: data_parallel {size} trains on {size} GPUs at once, and "
                f"{len(self.cards)} {'is' if len(self.cards) == 1 else 'are'} named"
            )
        return replace(prepared, cards=self.cards)

    def new_runner(self, prepared: Prepared) -> Runner | Lanes:
        """See `Places.new_runner`."""
        return supervised_runner(prepared)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""


class OnRay(Places):
    """A Ray cluster, joined when a space asks for a GPU, or for what runs its trials."""

    def __init__(
        self,
        address: str,
        *,
        space: str,
        overrides: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        self._address = address
        self._space = space
        self._overrides = overrides
        self._warn = warn
        self._stack = ExitStack()
        self._joined: Cluster | None = None

    def first(self) -> Card | None:
        """See `Places.first`."""
        return self._cluster().card(self._overrides.get("gpu") or load_space(self._space).gpu)

    def given_to(self, prepared: Prepared) -> Prepared:
        """Return the study as it is: its GPUs are not this machine's.

        Raises:
            InputError: a trial trains on several GPUs.
        """
        if prepared.cards_per_trial > 1:
            raise InputError(
                f"--on ray:{self._address}: data_parallel {prepared.cards_per_trial} trains on "
                "many GPUs at once, and a trial has one on a cluster: run it on one machine, with "
                "--devices"
            )
        return prepared

    def new_runner(self, prepared: Prepared) -> Runner | Lanes:
        """See `Places.new_runner`."""
        return lanes_on_ray(prepared, self._cluster(), warn=self._warn)

    def _cluster(self) -> Cluster:
        if self._joined is None:
            announce_if_slow("Asking the nodes of the Ray cluster ...")
            self._joined = Cluster(self._stack.enter_context(joined(self._address)))
        return self._joined

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@dataclass
class OnRecorded(Places):
    """Nowhere: trials were recorded, and answer as they did."""

    surface: Surface
    _runner: ReplayRunner = field(default_factory=ReplayRunner)

    def first(self) -> Card:
        """See `Places.first`."""
        return recorded.card_of(self.surface)

    def narrowed(self, space: SearchSpace) -> SearchSpace:
        """See `Places.narrowed`."""
        return recorded.space_of(self.surface, space)

    def given_to(self, prepared: Prepared) -> Prepared:
        """See `Places.given_to`.

        Raises:
            InputError: the surface is of a model of that name and another architecture, or of
                nothing that the space holds.
        """
        if prepared.model.fingerprint != self.surface.model.fingerprint:
            raise InputError(f"{self.surface.name}: its {prepared.model.name} is another model")
        definition = prepared.definition
        target = recorded.target_of(self.surface, definition.target)
        surface = recorded.within(self.surface, prepared.space, budget_bytes=target.budget_bytes)
        self._runner = recorded.runner_of(surface, budget_bytes=target.budget_bytes)
        return replace(
            prepared,
            definition=definition.model_copy(update={"target": target}),
            resolved=replace(prepared.resolved, target=target),
            surface=surface,
            clock=lambda: self._runner.device_seconds,
        )

    def new_runner(self, prepared: Prepared) -> Runner:
        """See `Places.new_runner`."""
        return self._runner

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""
