"""Owns asking a cluster who is in it, and putting a runner on each card that a study may have.

Knows nothing of spaces, or of what is done with the runners.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from search_spaces.errors import EnvironmentFault
from storage.environment import fingerprint
from sweep.running import ends
from sweep.running.device_info import Card
from sweep.running.on_ray.host import HostSettings
from sweep.running.on_ray.node import SelfPortrait
from sweep.running.on_ray.nodes import Node, chosen, refuse_differences, refuse_missing
from sweep.running.on_ray.runner import RayRunner

_PORTRAIT = "sweep.running.on_ray.node"
_LOOK_SECONDS = 60.0
"""Until a node has looked at itself: our packages are imported there first."""
_PLACE_SECONDS = 120.0
"""Until the actors have begun; those of a card that another job of the cluster holds never do."""


@dataclass(frozen=True)
class Place:
    """A runner on one card of a node, or on a node without."""

    name: str
    runner: RayRunner


class Cluster:
    """The machines of a cluster that this process has joined, as they were when it was asked.

    Args:
        ray: the module, joined to it.
        package: what a node answers with; tests name one that is on no machine.

    Raises:
        EnvironmentFault: a node without our packages, or one that does not answer.
    """

    def __init__(self, ray: Any, *, package: str = _PORTRAIT) -> None:
        self.ray = ray
        """The module, joined to it."""
        self._package = package
        self._here = fingerprint(device="cpu")
        self.nodes = self._look(())

    def card(self, gpu: str) -> Card | None:
        """Return the card that a study of ``gpu`` runs on; None for ``cpu``.

        Raises:
            InputError: the cluster has cards of several products, and it is none of them.
            EnvironmentFault: the cluster has no card, or not the libraries that are here.
        """
        return self._chosen(gpu)[0].card

    def places(
        self,
        settings: HostSettings,
        *,
        gpu: str,
        paths: Sequence[str] = (),
        warn: Callable[[str], None],
    ) -> tuple[Place, ...]:
        """Put a runner on every card of the study's product, or one on every node for ``cpu``.

        Args:
            settings: of each of them, but for its place.
            gpu: as for `card`.
            paths: what each node must have.
            warn: told of cards that another job of the cluster holds.

        Raises:
            InputError, EnvironmentFault: as for `card`; nothing is left begun.
            EnvironmentFault: a path is not on each node, or every card is held by others.
        """
        # A node may have been lost since it was asked first.
        now = self._look(tuple(paths), among=self._chosen(gpu))
        if not now:
            raise EnvironmentFault("every node of the Ray cluster that was to run trials is lost")
        refuse_missing(now)
        there = {node.id for node in now}
        places = [
            place
            for node in self._chosen(gpu)
            if node.id in there
            for place in self._places_on(node, settings)
        ]
        try:
            begun = self._begun(places)
        except BaseException:
            _close(places)
            raise
        if len(begun) < len(places):
            warn(
                f"{len(places) - len(begun)} of {len(places)} places of the Ray cluster are held "
                "by other jobs, and are left to them"
            )
        return tuple(begun)

    def _chosen(self, gpu: str) -> tuple[Node, ...]:
        nodes = chosen(self.nodes, gpu=gpu)
        refuse_differences(nodes, here=self._here)
        return nodes

    def _look(self, paths: tuple[str, ...], among: Sequence[Node] = ()) -> tuple[Node, ...]:
        """Let every node, or some, look at itself."""
        wanted = {node.id for node in among}
        alive = [
            node
            for node in self.ray.nodes()
            if node["Alive"] and (not wanted or node["NodeID"] in wanted)
        ]
        asked = [self._asked(node, paths) for node in alive]
        self.ray.wait(asked, num_returns=len(asked), timeout=_LOOK_SECONDS)
        addresses = Counter(node["NodeManagerAddress"] for node in alive)
        found = [
            Node(
                id=node["NodeID"],
                address=_address(node, is_alone=addresses[node["NodeManagerAddress"]] == 1),
                processors=int(node["Resources"].get("CPU", 0)),
                portrait=self._portrait(node["NodeManagerAddress"], answer),
            )
            for node, answer in zip(alive, asked, strict=True)
        ]
        # Ray tells of them in any order.
        return tuple(sorted(found, key=lambda node: node.address))

    def _asked(self, node: dict[str, Any], paths: tuple[str, ...]) -> Any:
        """Have a node look at itself; return Ray's reference to what it says."""
        strategies = self.ray.util.scheduling_strategies
        here = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        look = self.ray.remote(_question()).options(
            num_cpus=0, max_retries=0, scheduling_strategy=here
        )
        cards = int(node["Resources"].get("GPU", 0))
        return look.remote(self._package, cards, paths)

    def _portrait(self, address: str, answer: Any) -> SelfPortrait:
        try:
            found = self.ray.get(answer, timeout=0)
        except self.ray.exceptions.GetTimeoutError as error:
            raise EnvironmentFault(
                f"node {address} of the Ray cluster says nothing of itself for {_LOOK_SECONDS:g} s"
            ) from error
        except self.ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            why = ends.shown(lines[-1] if lines else type(error).__name__)
            raise EnvironmentFault(f"node {address} of the Ray cluster: {why}") from error
        if isinstance(found, dict):
            raise _without_package(address, found, self._here["versions"]["qlora-sweep"])
        assert isinstance(found, SelfPortrait)
        return found

    def _places_on(self, node: Node, settings: HostSettings) -> list[Place]:
        count = len(node.portrait.cards) if settings.target.device == "cuda" else 1
        names = [
            re.sub(r"[^\w.-]", "-", f"{node.address}-{node.id[:8]}-{number}")
            for number in range(count)
        ]
        each = [replace(settings, place=name, neighbours=count - 1) for name in names]
        return [
            Place(node.address, RayRunner(self.ray, one, node_id=node.id, address=node.address))
            for one in each
        ]

    def _begun(self, places: Sequence[Place]) -> list[Place]:
        """Begin with the actors, and return those whose card was free, named after it."""
        devices = {place.runner.place(): place for place in places}
        begun, late = self.ray.wait(
            list(devices), num_returns=self._free(places), timeout=_PLACE_SECONDS
        )
        _close([devices[reference] for reference in late])
        if not begun:
            raise EnvironmentFault(
                f"none of the {len(places)} places of the Ray cluster is free: other jobs hold its "
                "cards or processors, as `ray status` shows"
            )
        try:
            return [
                replace(devices[reference], name=_name(devices[reference], self.ray.get(reference)))
                for reference in devices
                if reference in begun
            ]
        except self.ray.exceptions.RayError as error:
            why = ends.shown(str(error).strip().splitlines()[-1])
            raise EnvironmentFault(
                f"a runner cannot be started on the Ray cluster: {why}"
            ) from error

    def _free(self, places: Sequence[Place]) -> int:
        """Return how many places are to be waited for: no more than Ray has cards for."""
        if places[0].runner.device == "cpu":
            return len(places)
        free = int(self.ray.available_resources().get("GPU", 0))
        return max(1, min(len(places), free))


def _question() -> Callable[[str, int, tuple[str, ...]], Any]:
    """Return what a node is asked.

    A function inside another one goes there as it is, and not as the name of a module, which a
    node without our packages does not have.
    """

    def look(package: str, cards: int, paths: tuple[str, ...]) -> Any:
        import importlib
        import sys

        try:
            node = importlib.import_module(package)
        except ImportError as error:
            return {"python": sys.executable, "why": str(error)}
        return node.look(cards, paths)

    return look


def _without_package(address: str, found: dict[str, str], version: str | None) -> EnvironmentFault:
    wanted = "qlora-sweep[ray]" if version is None else f"qlora-sweep[ray]=={version}"
    return EnvironmentFault(
        f"node {address} of the Ray cluster has not this qlora-sweep ({ends.shown(found['why'])}): "
        f"install it there with {found['python']} -m pip install '{wanted}', and start Ray from "
        "that environment"
    )


def _address(node: dict[str, Any], *, is_alone: bool) -> str:
    """Return what a person calls a node; several on one machine have their number in it."""
    address = str(node["NodeManagerAddress"])
    return address if is_alone else f"{address}/{node['NodeID'][:6]}"


def _name(place: Place, device: str) -> str:
    return f"{place.name} card {device}" if place.runner.device == "cuda" else place.name


def _close(places: Sequence[Place]) -> None:
    for place in places:
        place.runner.close()
