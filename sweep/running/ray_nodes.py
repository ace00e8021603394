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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from search_spaces.errors import NAMED_MAX, EnvironmentFault, InputError, install_extra, quote
from search_spaces.gpus import find_gpu, match_product
from search_spaces.redaction import shown
from storage.environment import fingerprint
from sweep.running import child
from sweep.running.device_info import Card, read_cards
from sweep.running.ray_runner import Device, RayRunner, on_node, raylet_environment
from sweep.running.runner import Lane

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
    label = f"--on ray:{quote(address)}"
    if address == AUTO:
        # Ray's own variable for what 'auto' is; empty is unset.
        address = os.environ.get("RAY_ADDRESS") or AUTO
        label = f"RAY_ADDRESS {quote(address)}"
    if address == AUTO:
        return address
    if "://" in address:
        raise InputError(
            f"{label} is the address of a Ray client's server, and sweep drives a cluster from one "
            f"of its machines: run it there, with --on ray:auto or HOST:{DEFAULT_PORT}"
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
            f"--on ray: needs Ray, which is not installed here: {install_extra('ray')}"
        ) from error
    _rehearse(address, seconds)
    # Whatever it is told, Ray prints that a node is lost on stdout, where results go; no public
    # setting keeps it from that. What matters of what it has to say is raised as well.
    worker, logger = ray._private.worker, logging.getLogger("ray")
    loud, level = worker.print_to_stdstream, logger.level
    worker.print_to_stdstream = lambda *_, **__: None
    logger.setLevel(logging.CRITICAL)
    try:
        _join(ray, address)
        yield ray
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
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
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=seconds,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _no_answer(address, f"nothing within {seconds:g} s") from None
    if done.returncode != 0:
        raise _no_answer(address, done.stderr.decode(errors="replace"))


def _join(ray: Any, address: str) -> None:
    """Join in this process, whose signals stay whose they are: Ray takes SIGTERM for itself."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise _no_answer(address, str(error)) from error
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, handler)


def _no_answer(address: str, words: str) -> EnvironmentFault:
    where = "on this machine (--on ray:auto)" if address == AUTO else f"at {address}"
    lines = shown(words).strip().splitlines()
    reason = " ".join(line.strip() for line in lines[-6:]) or "nothing"
    return EnvironmentFault(
        f"no Ray cluster answers {where}: {reason.rstrip('.')}. `ray start --head` begins one, "
        f"`ray start --address HOST:{DEFAULT_PORT}` on each further machine joins it, and sweep "
        "runs on any of them"
    )


def look(gpus: int, paths: tuple[str, ...]) -> dict[str, Any]:
    """Return what a `Node` says of itself; runs on the node, in a process of Ray's.

    Args:
        gpus: how many Ray hands out here.
        paths: what a study needs to find here.
    """
    # Ray hides them from a process that asks for none.
    os.environ.pop(_VISIBLE, None)
    os.environ |= {k: v for k, v in raylet_environment().items() if k == _VISIBLE}
    return {
        "python": sys.executable,
        "environment": fingerprint(device="cuda" if gpus else "cpu"),
        "gpus": gpus,
        "cards": read_cards()[:gpus] if gpus else (),
        "missing": tuple(path for path in paths if not Path(path).exists()),
    }


@dataclass(frozen=True)
class Node:
    """A node of a cluster, with what it says of itself."""

    id: str
    address: str
    processors: int
    """That Ray hands out; none on a head that is to run nothing."""
    python: str
    """Path of its interpreter."""
    environment: Mapping[str, Any]
    """`storage.environment.fingerprint`, of no device."""
    gpus: int
    """That Ray hands out."""
    cards: tuple[Card, ...]
    """Those of them that the driver there tells of, in Ray's order; all of a chosen node's are
    alike."""
    missing: tuple[str, ...]
    """Of the paths that it was asked for."""

    @property
    def products(self) -> tuple[str, ...]:
        """Each of its GPUs' products once."""
        return tuple(dict.fromkeys(card.product for card in self.cards))


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
        if able := tuple(node for node in nodes if node.processors):
            return able
        raise EnvironmentFault(
            "the Ray cluster has no processor to run trials on: see `ray status`"
        )
    with_cards = tuple(node for node in nodes if node.gpus)
    if not with_cards:
        count = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
        raise EnvironmentFault(
            f"the Ray cluster has no GPU among its {count}: `ray status` "
            "shows what it has, and `ray start --num-gpus N` says it where Ray finds none by itself"
        )
    for node in with_cards:
        if len(node.cards) < node.gpus:
            raise EnvironmentFault(
                f"node {node.address}: Ray hands out {node.gpus} GPUs, and the "
                "driver there does not tell of each: see `sweep doctor` on it"
            )
    counts = Counter(card.product for node in with_cards for card in node.cards)
    if len(counts) == 1:
        return with_cards
    specs = {product: match_product(product) for product in counts}
    meant = find_gpu(gpu) if gpu != AUTO else None
    named = tuple(product for product in counts if meant and specs[product] == meant)
    if only := tuple(node for node in with_cards if node.products == named):
        return only
    on = {product: node.address for node in reversed(with_cards) for product in node.products}
    found = " and ".join(f"{n} x {product} (node {on[product]})" for product, n in counts.items())
    choice = " or ".join(f"--gpu {spec.name}" for spec in specs.values() if spec is not None)
    cure = f"name one with {choice}" if choice else "start a cluster of one of them"
    mixed = next((node.address for node in with_cards if len(node.products) > 1), None)
    if mixed is not None:
        cure += f"; on {mixed} start Ray with CUDA_VISIBLE_DEVICES of one product alone"
    raise InputError(
        f"a study's cards must be one product, and the Ray cluster has {found}: {cure}"
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
    first, drivers, told = _versions(nodes[0].environment), _versions(here), []
    for node in nodes:
        own = _versions(node.environment)
        for name in {**drivers, **first}:
            whose, known = "the driver", drivers.get(name)
            if known is None:
                whose, known = f"node {nodes[0].address}", first.get(name)
            there = own.get(name)
            # An installation that is no checkout has no commit to compare.
            if there != known and (name != _COMMIT or (there and known)):
                had = f"node {node.address} has {name} {there or 'none'}"
                told.append(f"{had}, {whose} {known or 'none'}")
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
        return next(iter(self._chosen(gpu)[0].cards), None)

    def places(
        self,
        new_runner: Callable[..., Any],
        *,
        study: str,
        device: Device,
        gpu: str,
        paths: Sequence[str] = (),
        warn: Callable[[str], None],
    ) -> tuple[Lane, ...]:
        """Open a lane on every GPU of the study's product, or one on every node for ``cpu``.

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
        lacking = [node for node in now if node.missing]
        if lacking:
            names = ", ".join(dict.fromkeys(node.address for node in lacking))
            missing = ", ".join(dict.fromkeys(p for node in lacking for p in node.missing))
            raise EnvironmentFault(
                f"{missing} is not on {names}: each node reads it under the same path, so put it "
                "there, or on a disk that all of them share (XDG_CACHE_HOME moves what sweep "
                "prepares)"
            )
        runners: dict[RayRunner, str] = {}
        for node in self._chosen(gpu):
            if node.id not in {each.id for each in now}:
                continue
            count = len(node.cards) if device == "cuda" else 1
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
                runners[runner] = node.address
        try:
            lanes = self._begun(runners, device)
        except BaseException:
            for runner in runners:
                runner.close()
            raise
        if len(lanes) < len(runners):
            warn(
                f"{len(runners) - len(lanes)} of {len(runners)} places of the Ray cluster are held "
                "by other jobs, and are left to them"
            )
        return tuple(lanes)

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

        # A function inside another one goes there as it is, and not as the name of a module, which
        # a node without our packages does not have.
        def question(package: str, gpus: int) -> Any:
            import importlib
            import sys

            try:
                return importlib.import_module(package).look(gpus, paths)
            except ImportError as error:
                return {"python": sys.executable, "why": str(error)}

        asked = [
            self.ray.remote(question)
            .options(
                num_cpus=0, max_retries=0, scheduling_strategy=on_node(self.ray, node["NodeID"])
            )
            .remote(self._package, int(node["Resources"].get("GPU", 0)))
            for node in alive
        ]
        self.ray.wait(asked, num_returns=len(asked), timeout=_LOOK_SECONDS)
        addresses = Counter(node["NodeManagerAddress"] for node in alive)
        found = []
        for node, answer in zip(alive, asked, strict=True):
            address = str(node["NodeManagerAddress"])
            told = self._told(address, answer)
            if addresses[address] > 1:
                # Several nodes on one machine.
                address = f"{address}/{node['NodeID'][:6]}"
            processors = int(node["Resources"].get("CPU", 0))
            found.append(Node(node["NodeID"], address, processors, **told))
        # Ray tells of them in any order.
        return tuple(sorted(found, key=lambda node: node.address))

    def _told(self, address: str, answer: Any) -> dict[str, Any]:
        """Return what a node says of itself."""
        try:
            told: dict[str, Any] = self.ray.get(answer, timeout=0)
        except self.ray.exceptions.GetTimeoutError as error:
            raise EnvironmentFault(
                f"node {address} of the Ray cluster says nothing of itself for {_LOOK_SECONDS:g} s"
            ) from error
        except self.ray.exceptions.RayError as error:
            why = _last_line(error)
            raise EnvironmentFault(f"node {address} of the Ray cluster: {why}") from error
        if "why" in told:
            version = self._here["versions"]["qlora-sweep"]
            wanted = "qlora-sweep[ray]" if version is None else f"qlora-sweep[ray]=={version}"
            raise EnvironmentFault(
                f"node {address} of the Ray cluster has not this qlora-sweep "
                f"({child.shown(told['why'])}): install it there with {told['python']} -m pip "
                f"install '{wanted}', and start Ray from that environment"
            )
        return told

    def _begun(self, runners: Mapping[RayRunner, str], device: Device) -> list[Lane]:
        """Begin with the actors, and return the lanes of those whose GPU was free."""
        free = len(runners)
        if device == "cuda":
            # No more are waited for than Ray has GPUs for, before the first of these takes one.
            free = max(1, min(free, int(self.ray.available_resources().get("GPU", 0))))
        begins = {runner.place(): runner for runner in runners}
        begun, late = self.ray.wait(list(begins), num_returns=free, timeout=_PLACE_SECONDS)
        for reference in late:
            begins[reference].close()
        if not begun:
            raise EnvironmentFault(
                f"none of the {len(runners)} places of the Ray cluster is free: other jobs hold "
                "its cards or processors, as `ray status` shows"
            )
        try:
            names = {begins[reference]: self.ray.get(reference) for reference in begun}
        except self.ray.exceptions.RayError as error:
            raise EnvironmentFault(
                f"a runner cannot be started on the Ray cluster: {_last_line(error)}"
            ) from error
        cards = {r: f" card {name}" if device == "cuda" else "" for r, name in names.items()}
        return [
            Lane(runner, name=address + cards[runner], fault=runner.fault)
            for runner, address in runners.items()
            if runner in cards
        ]


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return child.shown(lines[-1] if lines else type(error).__name__)
