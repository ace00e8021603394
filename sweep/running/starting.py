"""Workers' processes before they have settings: they import their libraries, which takes most of a
worker's start, and wait.

Light to import, as the first is started before the command line is looked at.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import IO, Any

from qlora_sweep.search_spaces.kinds import DEVICES
from qlora_sweep.sweep.child_environment import child_environment
from qlora_sweep.sweep.paths import cache_directory
from qlora_sweep.sweep.processes import Child

MODULE = "qlora_sweep.sweep.running"
_CPU_ENVIRONMENT = {
    # A study for the CPU never sees a GPU, whatever library looks for one.
    "CUDA_VISIBLE_DEVICES": "",
    # Fixed sizes and one arena make the budget repeatable: freed tensors go back at once.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    # bitsandbytes compiles its optimizers on the CPU, one C++ build for each shape, in the budget.
    "TORCHDYNAMO_DISABLE": "1",
}
_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONUNBUFFERED": "1",
}
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""Where there is a GPU there is one of these, the second in Linux under Windows."""
_CORES_MIN = 4
"""With fewer cores, imports in the background take time from what is measured."""
_IMPORTED = (
    "sympy torch/_dynamo torch/_inductor networkx torch mpmath peft transformers/utils "
    "transformers/generation transformers/integrations bitsandbytes"
)
"""Packages of which a worker imports much, those first that it would come to last."""


def spawn(
    module: str, *, output: int, environment: Mapping[str, str] | None = None, rank: int = 0
) -> tuple[Child, int]:
    """Start a worker's process, which reads from its stdin; return it, and the pipe that its
    messages come from.

    Args:
        module: what it runs.
        output: the descriptor that it prints to.
        environment: its variables; None for this process's own.
        rank: of those that train together; all but the first are in its session.

    Raises:
        OSError: the machine has no room for another process.
    """
    messages, write_end = os.pipe()
    # -P: a module of the user's directory must not shadow ours.
    command = [sys.executable, "-P", "-m", module, str(write_end), str(os.getpid())]
    if rank:
        command.append(str(rank))
    try:
        child = Child(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[write_end],
            environment=environment,
            has_own_session=rank == 0,
        )
    except BaseException:
        os.close(messages)
        raise
    finally:
        # The child's copy is then the only one, so that its death closes the pipe.
        os.close(write_end)
    return child, messages


class Starting:
    """A worker's process without settings, and the pipes to and from it.

    It ends with the thread that starts it, so that is to be one that stays.

    Args:
        environment: its variables.
        module: what it runs.
        log: where it prints; None for a file of its own.

    Raises:
        OSError: the machine has no room for another process.
    """

    def __init__(
        self, environment: dict[str, str], *, module: str = MODULE, log: Any | None = None
    ) -> None:
        self.environment = environment
        self.module = module
        self.printed: IO[bytes] | None = None
        """What it prints until it has settings, where that is a file of its own."""
        if log is None:
            log = self.printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.child, self.messages = spawn(module, output=log.fileno(), environment=environment)

    def end(self) -> None:
        """End a process that is not needed."""
        self.child.kill()
        self.child.end()
        os.close(self.messages)
        for file in (self.child.process.stdin, self.printed):
            if file is not None:
                file.close()


_waiting: list[Starting] = []
"""The process that the next worker may be; at most one."""


def is_worthwhile() -> bool:
    """Whether a GPU is here, and cores enough to import in the background."""
    has_cores = len(os.sched_getaffinity(0)) >= _CORES_MIN
    return has_cores and any(map(os.path.exists, _DRIVERS))


def compile_libraries() -> None:
    """Compile by all cores what a worker imports, where the installer left that to the imports, as
    uv does: a first worker's then take 10 to 14 s instead of 15 to 21 (H100 host, 2026-11-26).
    """
    torch_spec = find_spec("torch")
    origin = torch_spec and torch_spec.origin
    if not origin or Path(cache_from_source(origin)).exists():
        return
    if sys.pycache_prefix is None and not os.access(Path(origin).parent, os.W_OK):
        # What cannot be kept would be compiled again at every start.
        return
    folders = []
    for name in _IMPORTED.split():
        package, _, rest = name.partition("/")
        spec = find_spec(package)
        if spec is not None:
            folders += [str(Path(f, rest)) for f in spec.submodule_search_locations or ()]
    # -P: a module of the user's directory must not shadow the standard library's.
    command = [sys.executable, "-P", "-m", "compileall", "-qq", "-j", "0", "-x", "/testing/"]
    nowhere = subprocess.DEVNULL
    with contextlib.suppress(OSError):
        subprocess.Popen(
            command + folders, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
        )


def begin(environment: dict[str, str], module: str = MODULE) -> None:
    """Start the process of a worker to come, unless one waits.

    Args:
        environment: its variables, as `worker_environment` returns them.
        module: what it runs.
    """
    if not _waiting:
        # What keeps it from being started does so when it is needed, too, and is said then.
        with contextlib.suppress(OSError):
            _waiting.append(Starting(environment, module=module))


def take(environment: dict[str, str], module: str = MODULE) -> Starting | None:
    """Return the process that was begun, if it is alive and as is asked for; else end it."""
    while _waiting:
        waiting = _waiting.pop()
        is_alike = (waiting.environment, waiting.module) == (environment, module)
        if is_alike and not waiting.child.has_ended():
            return waiting
        waiting.end()
    return None


def worker_environment(
    device: str, *, weights: str = "random", gpus: Sequence[str] = (), concurrent_jobs: int = 0
) -> dict[str, str]:
    """Return the variables that a worker starts with.

    Args:
        device: ``cuda`` or ``cpu``.
        weights: ``pretrained`` ones may need the hub's token.
        gpus: those that it sees, as CUDA names them; none for those of this process.
        concurrent_jobs: others that share the machine's cores with it.
    """
    inherited = child_environment(with_hub_token=weights == "pretrained")
    # Images forbid to write bytecode, and each worker would compile its libraries: half its start.
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)
    # By default the compiler's files are in /tmp, and gone with the next start of the machine.
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(compiler_directory())}
    if concurrent_jobs:
        # Each would take every core to compile, and the steps that another measures would wait:
        # each keeps one to train with, and compiles on its share of the others.
        workers = concurrent_jobs + 1
        share = max(1, (len(os.sched_getaffinity(0)) - workers) // workers)
        kept["TORCHINDUCTOR_COMPILE_THREADS"] = str(share)
    of_device = {}
    if gpus:
        of_device["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if not DEVICES[device].is_gpu:
        of_device = _CPU_ENVIRONMENT
        kept["OMP_NUM_THREADS"] = "1"
    return kept | inherited | _QUIET | of_device


def compiler_directory() -> Path:
    """Return where the compiler keeps its files."""
    return cache_directory() / "compiled"
