"""Owns being in touch with a Ray cluster: joining it within seconds or saying why not, quietly, and
leaving it.

Nothing else imports ray at a module's head, as whoever uses no cluster need not have it. Knows
nothing of nodes or runners.
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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from search_spaces.errors import EnvironmentFault, InputError, install_extra, quote
from search_spaces.redaction import shown
from sweep.processes import Child

AUTO = "auto"
DEFAULT_PORT = 6379
"""Of a head node, where nobody chose another."""
_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_KNOCK_SECONDS = 5.0
"""Until somebody opens the door at an address."""
_JOIN_SECONDS = 30.0
"""Until Ray has let a process in: it takes two, on a machine with much to do ten."""
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


def checked_address(address: str) -> str:
    """Return where a cluster is, as Ray takes it: ``auto`` or ``HOST:PORT``.

    Raises:
        InputError: it is neither.
    """
    if address == AUTO:
        # Ray's own variable for what 'auto' is; empty is unset.
        address = os.environ.get("RAY_ADDRESS") or AUTO
        label = f"RAY_ADDRESS {quote(address)}"
    else:
        label = f"--ray {quote(address)}"
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
    ray = _imported()
    if address != AUTO:
        _knock(address)
    _rehearse(address, seconds)
    with _quiet(ray):
        _join(ray, address)
        try:
            yield ray
        finally:
            with contextlib.suppress(Exception):
                ray.shutdown()


def _imported() -> Any:
    try:
        import ray
    except ImportError as error:
        raise EnvironmentFault(
            f"--ray needs Ray, which is not installed here: {install_extra('ray')}"
        ) from error
    return ray


@contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Keep what Ray has to say off our streams: it is raised as well, where it matters.

    Whatever it is told, Ray prints the last lines of a lost node's log on stdout, where results
    go.
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


def _knock(address: str) -> None:
    """Try the door: where nobody is, Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
    except OSError as error:
        reason = error.strerror or f"nothing within {_KNOCK_SECONDS:g} s"
        raise _no_answer(address, reason) from error


def _rehearse(address: str, seconds: float) -> None:
    """Let another process join first, which can be ended where Ray would wait for minutes, or end
    the process that asked.
    """
    command = [sys.executable, "-P", "-c", _REHEARSAL, address, str(os.getpid())]
    child = Child(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        try:
            _, words = child.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise _no_answer(address, f"nothing within {seconds:g} s") from None
    finally:
        child.end()
        if child.process.stderr is not None:
            child.process.stderr.close()
    if child.process.returncode != 0:
        raise _no_answer(address, _last_words(words))


def _last_words(words: bytes) -> str:
    lines = shown(words.decode(errors="replace")).strip().splitlines()
    return " ".join(line.strip() for line in lines[-6:]) or "nothing"


def _no_answer(address: str, reason: str) -> EnvironmentFault:
    where = "on this machine (--ray auto)" if address == AUTO else f"at {address}"
    return EnvironmentFault(
        f"no Ray cluster answers {where}: {reason.rstrip('.')}. `ray start --head` begins one, "
        f"`ray start --address HOST:{DEFAULT_PORT}` on each further machine joins it, and sweep "
        "runs on any of them"
    )


def _join(ray: Any, address: str) -> None:
    """Join in this process, whose signals stay whose they are: Ray takes SIGTERM for itself."""
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise _no_answer(address, _last_words(str(error).encode())) from error
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, handler)
