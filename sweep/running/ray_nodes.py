"""A Ray cluster: joining it within seconds or saying why not, what its nodes are, which of them a
study runs on, and a runner on each of their GPUs.

ray is imported where it is needed: without a cluster it need not be installed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.errors import (
    NAMED_MAX,
    EnvironmentFault,
    InputError,
    install_extra,
    quote,
)
from qlora_sweep.search_spaces.gpus import GpuSpec, find_gpu
from qlora_sweep.search_spaces.kinds import DEVICES, DeviceName
from qlora_sweep.search_spaces.redaction import shown
from qlora_sweep.storage.environment import fingerprint
from qlora_sweep.sweep.running import child
from qlora_sweep.sweep.running.device_info import GpuInfo, read_gpus
from qlora_sweep.sweep.running.ray_runner import RayRunner, Told, as_ray_was_started, on_node
from qlora_sweep.sweep.running.runner import Lane

AUTO = "auto"
CPU = "cpu"
DEFAULT_PORT = 6379
"""Of a head node by default."""
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
from qlora_sweep.sweep.processes import bind_to_parent
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
    parts = _ADDRESS.fullmatch(address)
    if parts is None or not 0 < int(parts["port"]) < 65536:
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
    worker = ray._private.worker
    loud = worker.print_to_stdstream
    logger = logging.getLogger("ray")
    level = logger.level
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
    where = f"at {address}"
    if address == AUTO:
        where = "on this machine (--on ray:auto)"
    lines = shown(words).strip().splitlines()
    reason = " ".join(map(str.strip, lines[-6:])) or "nothing"
    return EnvironmentFault(
        f"no Ray cluster answers {where}: {reason.rstrip('.')}. `ray start --head` begins one, "
        f"`ray start --address HOST:{DEFAULT_PORT}` on each further machine joins it, and sweep "
        "runs on any of them"
    )


@dataclass(frozen=True)
class Node:
    """A node of a cluster, with what it says of itself."""

    id: str
    address: str
    processors: int
    """That Ray hands out; none on a head that is to run nothing."""
    num_gpus: int
    """That Ray hands out."""
    gpus: tuple[GpuInfo, ...]
    """Those of them that the driver there tells of, in Ray's order; all of a chosen node's are
    alike."""
    versions: Mapping[str, str | None]
    """Of what trials compare under, see `versions`."""

    @property
    def products(self) -> tuple[str, ...]:
        """Each of its GPUs' products once."""
        return tuple(dict.fromkeys(gpu.product for gpu in self.gpus))


def versions() -> dict[str, str | None]:
    """Return the versions of this process that each node must have, without what a build is for."""
    installed = fingerprint(device="cpu")["versions"]
    return {
        name: (installed[name] or "none").partition("+")[0] for name in ("qlora-sweep", "torch")
    }


def look(gpus: int) -> dict[str, Any]:
    """Return what a `Node` says of itself; runs on the node, in a process of Ray's.

    Args:
        gpus: how many Ray hands out here.
    """
    # Ray hides them from a process that asks for none.
    as_ray_was_started(_VISIBLE)
    gpus_here: tuple[GpuInfo, ...] = ()
    if gpus:
        gpus_here = read_gpus()[:gpus]
    return {"gpus": gpus_here, "versions": versions()}


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
        able = tuple(node for node in nodes if node.processors)
        if not able:
            raise EnvironmentFault(
                "the Ray cluster has no processor to run trials on: see `ray status`"
            )
        return able
    with_gpus = tuple(node for node in nodes if node.num_gpus)
    if not with_gpus:
        raise EnvironmentFault(
            f"the Ray cluster has no GPU among its {units.plural(len(nodes), 'node')}: "
            "`ray status` shows what it has, and `ray start --num-gpus N` says it where Ray finds "
            "none by itself"
        )
    counts = Counter[str]()
    specs: dict[str, GpuSpec | None] = {}
    addresses: dict[str, str] = {}
    for node in with_gpus:
        if len(node.gpus) < node.num_gpus:
            raise EnvironmentFault(
                f"node {node.address}: Ray hands out {node.num_gpus} GPUs, and the "
                "driver there does not tell of each: see `sweep doctor` on it"
            )
        for visible in node.gpus:
            counts[visible.product] += 1
            specs[visible.product] = visible.known
            addresses.setdefault(visible.product, node.address)
    if len(counts) == 1:
        return with_gpus
    if gpu != AUTO:
        meant = find_gpu(gpu)
        named = tuple(product for product, spec in specs.items() if spec == meant)
        only = tuple(node for node in with_gpus if node.products == named)
        if only:
            return only
    several = (f"{n} x {product} (node {addresses[product]})" for product, n in counts.items())
    choice = " or ".join(f"--gpu {spec.name}" for spec in filter(None, specs.values()))
    cure = "start a cluster of one of them"
    if choice:
        cure = f"name one with {choice}"
    for node in with_gpus:
        if len(node.products) > 1:
            cure += f"; on {node.address} start Ray with CUDA_VISIBLE_DEVICES of one product alone"
            break
    raise InputError(
        f"a study's GPUs must be one product, and the Ray cluster has {' and '.join(several)}: "
        f"{cure}"
    )


def refuse_differences(nodes: Sequence[Node], *, here: Mapping[str, str | None]) -> None:
    """Refuse nodes with another version of sweep or torch than the driver's.

    Args:
        nodes: those that are to run trials.
        here: the driver's `versions`.

    Raises:
        EnvironmentFault: names the first nodes with what differs.
    """
    differences = []
    for node in nodes:
        for name, there in node.versions.items():
            if there != here[name]:
                differences.append(
                    f"node {node.address} has {name} {there}, the driver {here[name]}"
                )
    if differences:
        listed = "; ".join(differences[:NAMED_MAX])
        if len(differences) > NAMED_MAX:
            listed += f"; and {len(differences) - NAMED_MAX} more"
        raise EnvironmentFault(
            f"a study's trials compare only under the same versions: {listed}. Install the same on "
            "each"
        )


class Cluster:
    """The machines of a cluster that this process has joined, as they were when it was asked.

    Args:
        ray: the module, joined to it.
        look: what a node answers with; tests put one here that a node does not have.

    Raises:
        EnvironmentFault: a node without our packages, or one that does not answer.
    """

    def __init__(self, ray: Any, *, look: Callable[[int], dict[str, Any]] = look) -> None:
        self.ray = ray
        alive = self._alive()
        answers = []
        addresses = Counter[str]()
        for node in alive:
            here = on_node(ray, node["NodeID"])
            asked = ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=here)
            answers.append(asked.remote(int(node["Resources"].get("GPU", 0))))
            addresses[node["NodeManagerAddress"]] += 1
        ray.wait(answers, num_returns=len(answers), timeout=_LOOK_SECONDS)
        nodes = []
        for node, answer in zip(alive, answers, strict=True):
            address = str(node["NodeManagerAddress"])
            said = self._said(address, answer)
            if addresses[address] > 1:
                # Several nodes on one machine.
                address = f"{address}/{node['NodeID'][:6]}"
            processors = int(node["Resources"].get("CPU", 0))
            gpus = int(node["Resources"].get("GPU", 0))
            nodes.append(Node(node["NodeID"], address, processors, gpus, **said))
        # Ray tells of them in any order.
        self.nodes = tuple(sorted(nodes, key=lambda node: node.address))

    def _alive(self) -> list[Any]:
        """Return what Ray tells of the nodes that are there now."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def _said(self, address: str, answer: Any) -> dict[str, Any]:
        """Return what a node says of itself."""
        try:
            said: dict[str, Any] = self.ray.get(answer, timeout=0)
        except self.ray.exceptions.GetTimeoutError as error:
            raise EnvironmentFault(
                f"node {address} of the Ray cluster says nothing of itself for {_LOOK_SECONDS:g} s"
            ) from error
        except self.ray.exceptions.RayError as error:
            raise EnvironmentFault(
                f"node {address} of the Ray cluster cannot run this qlora-sweep "
                f"({_last_line(error)}): install it there with pip install "
                f"'qlora-sweep[ray]=={versions()['qlora-sweep']}', and start Ray from that "
                "environment"
            ) from error
        return said

    def gpu_info(self, name: str) -> GpuInfo | None:
        """Return the GPU that a study of the GPU ``name`` runs on; None for ``cpu``.

        Raises:
            InputError: the cluster has GPUs of several products, and it is none of them.
            EnvironmentFault: the cluster has no GPU, or not the libraries that are here.
        """
        return next(iter(self._chosen(name)[0].gpus), None)

    def _chosen(self, gpu: str) -> tuple[Node, ...]:
        nodes = chosen(self.nodes, gpu=gpu)
        refuse_differences(nodes, here=versions())
        return nodes

    def places(
        self,
        new_runner: Callable[..., Any],
        *,
        study: str,
        device: DeviceName,
        gpu: str,
        paths: Sequence[str] = (),
        keep: Callable[[Iterable[bytes]], None],
        warn: Callable[[str], None],
    ) -> tuple[Lane, ...]:
        """Open a lane on every GPU of the study's product, or one on every node for ``cpu``.

        Args:
            new_runner: starts what runs the trials on a node, given the path of its log, its
                ``gpus``, and how many ``concurrent_jobs`` share the node's cores.
            study: its name, in that of the directory of its logs on each node.
            device: what its trials run on.
            gpu: as for `gpu_info`.
            paths: what each node must have.
            keep: told what the workers of earlier drivers left there.
            warn: told of GPUs that another job of the cluster holds.

        Raises:
            InputError, EnvironmentFault: as for `gpu_info`; nothing is left begun.
            EnvironmentFault: a path is not on each node, or every GPU is held by others.
        """
        # A node may have been lost since it was asked.
        alive = set(map(itemgetter("NodeID"), self._alive()))
        runners: list[RayRunner] = []
        token = secrets.token_hex(4)
        # Read before the first actor takes one: no more places are waited for.
        free = len(alive)
        if DEVICES[device].is_gpu:
            free = int(self.ray.available_resources().get("GPU", 0))
        try:
            for node in self._chosen(gpu):
                if node.id not in alive:
                    continue
                count = 1
                if DEVICES[device].is_gpu:
                    count = len(node.gpus)
                for number in range(count):
                    name = re.sub(r"[^\w.-]", "-", f"{node.address}-{node.id[:8]}-{number}")
                    runner = RayRunner(
                        self.ray,
                        partial(new_runner, concurrent_jobs=count - 1),
                        # Another database may have a study of this name, and the same nodes.
                        home=f"{study}-{token}/{name}",
                        device=device,
                        node_id=node.id,
                        address=node.address,
                    )
                    runners.append(runner)
            lanes = self._begun(runners, device, keep, free=free, paths=paths, study=study)
        except BaseException:
            for runner in runners:
                runner.close()
            raise
        if len(lanes) < len(runners):
            warn(
                f"{len(runners) - len(lanes)} of {len(runners)} places of the Ray cluster are held "
                "by other jobs, and are left to them"
            )
        return lanes

    def _begun(
        self,
        runners: Sequence[RayRunner],
        device: DeviceName,
        keep: Callable[[Iterable[bytes]], None],
        free: int,
        **asked_for: Any,
    ) -> tuple[Lane, ...]:
        """Return the lanes of the runners whose actor could begin: those whose GPU was free."""
        asked = {runner.tell(**asked_for): runner for runner in runners}
        wanted = max(1, min(free, len(runners)))
        begun, late = self.ray.wait(list(asked), num_returns=wanted, timeout=_PLACE_SECONDS)
        for reference in late:
            asked[reference].close()
        if not begun:
            raise EnvironmentFault(
                f"none of the {len(runners)} places of the Ray cluster is free: other jobs hold "
                "its GPUs or processors, as `ray status` shows"
            )
        said: dict[RayRunner, Told] = {}
        try:
            for reference in begun:
                said[asked[reference]] = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            raise EnvironmentFault(
                f"a runner cannot be started on the Ray cluster: {_last_line(error)}"
            ) from error
        _refuse_missing(said)
        left: set[bytes] = set()
        for one in said.values():
            left.update(one.left)
        keep(left)
        lanes = []
        for runner in runners:
            if runner in said:
                name = runner.address
                if DEVICES[device].is_gpu:
                    name += f" GPU {said[runner].gpu}"
                lanes.append(Lane(runner, name))
        return tuple(lanes)


def _refuse_missing(said: Mapping[RayRunner, Told]) -> None:
    """Refuse places that do not have what trials read."""
    absent: dict[str, None] = {}
    lacking = []
    for runner, one in said.items():
        if one.missing:
            lacking.append(runner.address)
            absent |= dict.fromkeys(one.missing)
    if lacking:
        raise EnvironmentFault(
            f"{', '.join(absent)} is not on {', '.join(dict.fromkeys(lacking))}: each node reads "
            "it under the same path, so put it there, or on a disk that all of them share "
            "(XDG_CACHE_HOME moves what sweep prepares)"
        )


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return child.shown(lines[-1] if lines else type(error).__name__)
