"""A Ray cluster: joining it within seconds or saying why not, what its nodes are, which of them a
study runs on, and a runner on each of their GPUs.

Nothing here imports ray at the module's head, as whoever uses no cluster need not have it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from search_spaces.errors import NAMED_MAX, EnvironmentFault, InputError, install_extra, quote
from search_spaces.gpus import find_gpu, match_product
from search_spaces.redaction import shown
from storage.environment import fingerprint
from sweep.processes import Child
from sweep.running import ends
from sweep.running.device_info import Card, read_card
from sweep.running.on_ray.runner import Device, RayRunner, raylet_environment

AUTO = "auto"
CPU = "cpu"
DEFAULT_PORT = 6379
"""Of a head node, where nobody chose another."""
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_CONNECT_SECONDS = 5.0
_JOIN_SECONDS = 30.0
"""Until Ray has let a process in: it takes two, on a machine with much to do ten."""
_LOOK_SECONDS = 60.0
"""Until a node has looked at itself: our packages are imported there first."""
_PLACE_SECONDS = 120.0
"""Until the actors have begun; those of a GPU that another job of the cluster holds never do."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Said once for each driver otherwise, of something that does not touch us.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_REHEARSAL = """
import sys
from sweep.processes import bind_to_parent
bind_to_parent(int(sys.argv[2]))
import ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
except Exception as error:
    print(error, file=sys.stderr)
    sys.exit(1)
"""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def checked_address(address: str) -> str:
    """Return where a cluster is, as Ray takes it: ``auto`` or ``HOST:PORT``.

    Raises:
        InputError: it is neither.
    """
    label = f"--ray {quote(address)}"
    if address == AUTO:
        # Ray's own variable for what 'auto' is; empty is unset.
        address = os.environ.get("RAY_ADDRESS") or AUTO
        label = f"RAY_ADDRESS {quote(address)}"
    if address == AUTO:
        return address
    if "://" in address:
        raise InputError(
            f"{label} is the address of a Ray client's server, and sweep drives a cluster from one "
            f"of its machines: run it there, with --ray auto or HOST:{DEFAULT_PORT}"
        )
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise InputError(
            f"{label} is not where a Ray cluster is: it must be auto or HOST:PORT, as in "
            f"10.0.0.1:{DEFAULT_PORT}"
        )
    return address


@contextmanager
def joined(address: str, *, seconds: float = _JOIN_SECONDS) -> Iterator[Any]:
    """Join the cluster at an address and yield the module ``ray``; leave it in the end.

    With it end the actors that were started inside. Where this process dies, Ray ends them.

    Args:
        address: ``auto`` or ``HOST:PORT``.
        seconds: that a cluster gets to let this process in.

    Raises:
        InputError: it is neither.
        EnvironmentFault: Ray is not installed, or no cluster answers there within some seconds.
    """
    address = checked_address(address)
    os.environ.update(_QUIET)
    try:
        import ray
    except ImportError as error:
        raise EnvironmentFault(
            f"--ray needs Ray, which is not installed here: {install_extra('ray')}"
        ) from error
    _rehearse(address, seconds)
    with _quiet(ray):
        _join(ray, address)
        try:
            yield ray
        finally:
            with contextlib.suppress(Exception):
                ray.shutdown()


@contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Keep what Ray has to say off our streams: it is raised as well, where it matters.

    Whatever it is told, Ray prints that a node is lost on stdout, where results go; no public
    setting keeps it from that.
    """
    worker = ray._private.worker
    loud, worker.print_to_stdstream = worker.print_to_stdstream, lambda *_, **__: None
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        worker.print_to_stdstream = loud


def _rehearse(address: str, seconds: float) -> None:
    """Let another process join first, which can be ended where Ray would wait for minutes, or end
    the process that asked.
    """
    if address != AUTO:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except OSError as error:
            reason = error.strerror or f"nothing within {_CONNECT_SECONDS:g} s"
            raise _no_answer(address, reason) from error
    command = [sys.executable, "-P", "-c", _REHEARSAL, address, str(os.getpid())]
    child = Child(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        _, words = child.process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise _no_answer(address, f"nothing within {seconds:g} s") from None
    finally:
        child.end()
        if child.process.stderr is not None:
            child.process.stderr.close()
    if child.process.returncode != 0:
        raise _no_answer(address, words.decode(errors="replace"))


def _join(ray: Any, address: str) -> None:
    """Join in this process, whose signals stay whose they are: Ray takes SIGTERM for itself."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise _no_answer(address, str(error)) from error
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, handler)


def _no_answer(address: str, words: str) -> EnvironmentFault:
    where = "on this machine (--ray auto)" if address == AUTO else f"at {address}"
    lines = shown(words).strip().splitlines()
    reason = " ".join(line.strip() for line in lines[-6:]) or "nothing"
    return EnvironmentFault(
        f"no Ray cluster answers {where}: {reason.rstrip('.')}. `ray start --head` begins one, "
        f"`ray start --address HOST:{DEFAULT_PORT}` on each further machine joins it, and sweep "
        "runs on any of them"
    )


@dataclass(frozen=True)
class SelfPortrait:
    """A node, as it sees itself."""

    python: str
    """Path of its interpreter."""
    environment: Mapping[str, Any]
    """`storage.environment.fingerprint`, of no device."""
    cards: tuple[Card | None, ...]
    """Those that Ray hands out, in its order; None for one that no driver tells of."""
    missing: tuple[str, ...]
    """Of the paths that it was asked for."""


def look(cards: int, paths: tuple[str, ...]) -> SelfPortrait:
    """Return what this node is; runs on the node, in a process of Ray's.

    Args:
        cards: how many GPUs Ray hands out here.
        paths: what a study needs to find here.
    """
    visible = raylet_environment().get(_VISIBLE)
    names = map(str, range(cards)) if visible is None else map(str.strip, visible.split(","))
    return SelfPortrait(
        python=sys.executable,
        environment=fingerprint(device="cuda" if cards else "cpu"),
        cards=tuple(_card(name) for name in list(names)[:cards]),
        missing=tuple(path for path in paths if not Path(path).exists()),
    )


def _card(name: str) -> Card | None:
    """Return the GPU that CUDA calls by a name; the process serves one question and is done."""
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = name
    try:
        return read_card()
    finally:
        if before is None:
            del os.environ[_VISIBLE]
        else:
            os.environ[_VISIBLE] = before


@dataclass(frozen=True)
class Node:
    """A node of a cluster."""

    id: str
    address: str
    processors: int
    """That Ray hands out; none on a head that is to run nothing."""
    portrait: SelfPortrait

    @property
    def card(self) -> Card | None:
        """The first of its GPUs; all of a chosen node's are alike."""
        return self.portrait.cards[0] if self.portrait.cards else None

    @property
    def products(self) -> tuple[str, ...]:
        """Each of its GPUs' products once."""
        return tuple(dict.fromkeys(card.product for card in self.portrait.cards if card))


def chosen(nodes: Sequence[Node], *, gpu: str) -> tuple[Node, ...]:
    """Return the nodes that a study of a GPU runs on, all of whose GPUs are one product.

    Args:
        nodes: every node of the cluster.
        gpu: as the space or the person names it, ``auto`` or ``cpu``. Of a cluster with several
            products those that it names are taken; where all are one product, that one may stand
            in for it.

    Raises:
        InputError: there are several products, and which one is not said.
        EnvironmentFault: there is no GPU, or a driver does not tell of one.
    """
    if gpu == CPU:
        found = tuple(node for node in nodes if node.processors)
        if found:
            return found
        raise EnvironmentFault(
            "the Ray cluster has no processor to run trials on: see `ray status`"
        )
    with_cards = tuple(node for node in nodes if node.portrait.cards)
    if not with_cards:
        count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
        raise EnvironmentFault(
            f"the Ray cluster has no GPU among its {count}: `ray status` "
            "shows what it has, and `ray start --num-gpus N` says it where Ray finds none by itself"
        )
    for node in with_cards:
        if None in node.portrait.cards:
            raise EnvironmentFault(
                f"node {node.address}: Ray hands out {len(node.portrait.cards)} GPUs, and the "
                "driver there does not tell of each: see `sweep doctor` on it"
            )
    products = list(dict.fromkeys(product for node in with_cards for product in node.products))
    if len(products) == 1:
        return with_cards
    meant = tuple(product for product in products if gpu != AUTO and _is_named(product, gpu))
    only = tuple(node for node in with_cards if node.products == meant)
    if only:
        return only
    raise _several(with_cards, products)


def _is_named(product: str, gpu: str) -> bool:
    spec = match_product(product)
    return spec is not None and spec == find_gpu(gpu)


def _several(nodes: Sequence[Node], products: Sequence[str]) -> InputError:
    found = []
    for product in products:
        on = next(node for node in nodes if product in node.products)
        cards = [card for node in nodes for card in node.portrait.cards if card]
        count = sum(card.product == product for card in cards)
        found.append(f"{count} x {product} (node {on.address})")
    names = [spec.name for product in products if (spec := match_product(product)) is not None]
    choice = " or ".join(f"--gpu {name}" for name in names)
    cure = f"name one with {choice}" if choice else "start a cluster of one of them"
    mixed = next((node.address for node in nodes if len(node.products) > 1), None)
    if mixed is not None:
        cure += f"; on {mixed} start Ray with CUDA_VISIBLE_DEVICES of one product alone"
    return InputError(
        f"a study's cards must be one product, and the Ray cluster has {' and '.join(found)}: "
        f"{cure}"
    )


def refuse_differences(nodes: Sequence[Node], *, here: Mapping[str, Any]) -> None:
    """Refuse nodes whose libraries are not the driver's, or not each other's.

    What the driver lacks it may lack, as it runs no trial; what a build is for, as in
    ``2.11.0+cu129``, is its machine's.

    Args:
        nodes: those that are to run trials.
        here: the driver's `storage.environment.fingerprint`.

    Raises:
        EnvironmentFault: names the first nodes with what differs.
    """
    first, drivers, told = nodes[0], _versions(here), []
    for node in nodes:
        own, others = _versions(node.portrait.environment), _versions(first.portrait.environment)
        told += [
            f"node {node.address} has {name} {own.get(name) or 'none'}, the driver {version}"
            for name, version in drivers.items()
            if version is not None and _differ(name, own.get(name), version)
        ] or [
            f"node {node.address} has {name} {own.get(name) or 'none'}, "
            f"node {first.address} {version or 'none'}"
            for name, version in others.items()
            if _differ(name, own.get(name), version)
        ]
    if told:
        more = f"; and {len(told) - NAMED_MAX} more" if len(told) > NAMED_MAX else ""
        raise EnvironmentFault(
            f"a study's trials compare only under the same versions: {'; '.join(told[:NAMED_MAX])}"
            f"{more}. Install the same on each, as in `pip install 'transformers==VERSION'`"
        )


_COMMIT = "sweep's commit"


def _versions(environment: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the version of everything that a trial's speed depends on, by name."""
    commit = environment.get("commit")
    versions = {
        # Without what its build is for.
        name: None if version is None else version.partition("+")[0]
        for name, version in (environment.get("versions") or {}).items()
    }
    short = commit and commit[:10] + ("-dirty" if commit.endswith("-dirty") else "")
    return {"Python": environment.get("python"), **versions, _COMMIT: short}


def _differ(name: str, there: str | None, known: str | None) -> bool:
    # An installation that is no checkout has no commit to compare.
    return there != known and (name != _COMMIT or bool(there and known))


def refuse_missing(nodes: Iterable[Node]) -> None:
    """Refuse nodes without the files that a study needs.

    Raises:
        EnvironmentFault: names the nodes and what they lack.
    """
    lacking = [node for node in nodes if node.portrait.missing]
    if lacking:
        names = ", ".join(dict.fromkeys(node.address for node in lacking))
        paths = ", ".join(dict.fromkeys(p for node in lacking for p in node.portrait.missing))
        raise EnvironmentFault(
            f"{paths} is not on {names}: each node reads it under the same path, so put it "
            "there, or on a disk that all of them share (XDG_CACHE_HOME moves what sweep prepares)"
        )


@dataclass(frozen=True)
class Place:
    """A runner on one GPU of a node, or on a node without."""

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

    def __init__(self, ray: Any, *, package: str = __name__) -> None:
        self.ray = ray
        """The module, joined to it."""
        self._package = package
        self._here = fingerprint(device="cpu")
        self.nodes = self._look(())

    def card(self, gpu: str) -> Card | None:
        """Return the GPU that a study of ``gpu`` runs on; None for ``cpu``.

        Raises:
            InputError: the cluster has GPUs of several products, and it is none of them.
            EnvironmentFault: the cluster has no GPU, or not the libraries that are here.
        """
        return self._chosen(gpu)[0].card

    def places(
        self,
        new_runner: Callable[..., Any],
        *,
        study: str,
        device: Device,
        gpu: str,
        paths: Sequence[str] = (),
        warn: Callable[[str], None],
    ) -> tuple[Place, ...]:
        """Put a runner on every GPU of the study's product, or one on every node for ``cpu``.

        Args:
            new_runner: starts what runs the trials on a node, given the path of its log and how
                many ``neighbours`` share the node's cores.
            study: names the directory of its logs on each node.
            device: what its trials run on.
            gpu: as for `card`.
            paths: what each node must have.
            warn: told of GPUs that another job of the cluster holds.

        Raises:
            InputError, EnvironmentFault: as for `card`; nothing is left begun.
            EnvironmentFault: a path is not on each node, or every GPU is held by others.
        """
        # A node may have been lost since it was asked first.
        now = self._look(tuple(paths), among=self._chosen(gpu))
        if not now:
            raise EnvironmentFault("every node of the Ray cluster that was to run trials is lost")
        refuse_missing(now)
        there = {node.id for node in now}
        places: list[Place] = []
        for node in self._chosen(gpu):
            count = 0 if node.id not in there else 1
            if count and device == "cuda":
                count = len(node.portrait.cards)
            for number in range(count):
                name = re.sub(r"[^\w.-]", "-", f"{node.address}-{node.id[:8]}-{number}")
                runner = RayRunner(
                    self.ray,
                    partial(new_runner, neighbours=count - 1),
                    home=f"{study}/{name}",
                    device=device,
                    node_id=node.id,
                    address=node.address,
                )
                places.append(Place(node.address, runner))
        try:
            begun = self._begun(places, device)
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
        found = []
        for node, answer in zip(alive, asked, strict=True):
            address = str(node["NodeManagerAddress"])
            portrait = self._portrait(address, answer)
            if addresses[address] > 1:
                # Several nodes on one machine.
                address = f"{address}/{node['NodeID'][:6]}"
            processors = int(node["Resources"].get("CPU", 0))
            found.append(Node(node["NodeID"], address, processors, portrait))
        # Ray tells of them in any order.
        return tuple(sorted(found, key=lambda node: node.address))

    def _asked(self, node: dict[str, Any], paths: tuple[str, ...]) -> Any:
        """Have a node look at itself; return Ray's reference to what it says."""
        strategies = self.ray.util.scheduling_strategies
        here = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        question = self.ray.remote(_question()).options(
            num_cpus=0, max_retries=0, scheduling_strategy=here
        )
        return question.remote(self._package, int(node["Resources"].get("GPU", 0)), paths)

    def _portrait(self, address: str, answer: Any) -> SelfPortrait:
        try:
            found = self.ray.get(answer, timeout=0)
        except self.ray.exceptions.GetTimeoutError as error:
            raise EnvironmentFault(
                f"node {address} of the Ray cluster says nothing of itself for {_LOOK_SECONDS:g} s"
            ) from error
        except self.ray.exceptions.RayError as error:
            why = _last_line(error)
            raise EnvironmentFault(f"node {address} of the Ray cluster: {why}") from error
        if isinstance(found, dict):
            version = self._here["versions"]["qlora-sweep"]
            wanted = "qlora-sweep[ray]" if version is None else f"qlora-sweep[ray]=={version}"
            raise EnvironmentFault(
                f"node {address} of the Ray cluster has not this qlora-sweep "
                f"({ends.shown(found['why'])}): install it there with {found['python']} -m pip "
                f"install '{wanted}', and start Ray from that environment"
            )
        assert isinstance(found, SelfPortrait)
        return found

    def _begun(self, places: Sequence[Place], device: Device) -> list[Place]:
        """Begin with the actors, and return those whose GPU was free, named after it."""
        devices = {place.runner.place(): place for place in places}
        free = len(places)
        if device == "cuda":
            # No more are waited for than Ray has GPUs for.
            free = max(1, min(free, int(self.ray.available_resources().get("GPU", 0))))
        begun, late = self.ray.wait(list(devices), num_returns=free, timeout=_PLACE_SECONDS)
        _close([devices[reference] for reference in late])
        if not begun:
            raise EnvironmentFault(
                f"none of the {len(places)} places of the Ray cluster is free: other jobs hold its "
                "cards or processors, as `ray status` shows"
            )
        try:
            names = {reference: self.ray.get(reference) for reference in begun}
        except self.ray.exceptions.RayError as error:
            raise EnvironmentFault(
                f"a runner cannot be started on the Ray cluster: {_last_line(error)}"
            ) from error
        return [
            replace(place, name=f"{place.name} card {names[reference]}")
            if device == "cuda"
            else place
            for reference, place in devices.items()
            if reference in names
        ]


def _question() -> Callable[[str, int, tuple[str, ...]], Any]:
    """Return what a node is asked.

    A function inside another one goes there as it is, and not as the name of a module, which a
    node without our packages does not have.
    """

    def question(package: str, cards: int, paths: tuple[str, ...]) -> Any:
        import importlib
        import sys

        try:
            node = importlib.import_module(package)
        except ImportError as error:
            return {"python": sys.executable, "why": str(error)}
        return node.look(cards, paths)

    return question


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return ends.shown(lines[-1] if lines else type(error).__name__)


def _close(places: Sequence[Place]) -> None:
    for place in places:
        place.runner.close()
