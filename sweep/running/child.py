"""Owns the worker as a child process: how it is started, its two pipes, how it is ended.

Knows nothing of trials, or of what the messages mean.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from sweep.paths import cache_directory
from sweep.running.wire import WorkerMessage, WorkerSettings, worker_message_adapter

_CPU_ENVIRONMENT = {
    # A study for the CPU never sees a card, whatever library looks for one.
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
_MEANT_FOR_OTHERS = (
    "ACCELERATE_",
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Starts of variables that tell accelerate how another training is to run, on which device too, and
torch's allocator how to cut memory: that is part of the configuration.
"""


class WorkerEnded(Exception):  # noqa: N818 - an end is not always an error
    """The worker's pipe closed."""


class WorkerSilent(Exception):  # noqa: N818 - nor is silence
    """The worker gave no sign of life within its phase's deadline."""


class WorkerProcess:
    """One worker: a process group of its own, and two pipes."""

    def __init__(self, settings: WorkerSettings, *, log_path: Path, module: str) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe()
        environment = _environment(settings.device)
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                # -P: a module of the user's directory must not shadow ours.
                [sys.executable, "-P", "-m", module, str(write_end)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Not stdout, which C libraries print to as they like.
                pass_fds=[write_end],
                # A group of its own: Ctrl-C in the terminal reaches the tuner alone, and one signal
                # ends the worker with everything that it started, compilers for one.
                start_new_session=True,
                env=environment,
            )
        # The child's copy is then the only one, so that its death closes the pipe.
        os.close(write_end)
        self._messages = read_end
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(read_end, selectors.EVENT_READ)
        self.send(settings.model_dump_json())

    def send(self, line: str) -> None:
        """Write one line to the worker.

        Raises:
            WorkerEnded: it does not read any more.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise WorkerEnded from error

    def next_message(self, *, timeout: float) -> WorkerMessage:
        """Return its next message.

        Raises:
            WorkerSilent: none came in time.
            WorkerEnded: the pipe closed, or what came is no message.
        """
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise WorkerSilent
            chunk = os.read(self._messages, 65536)
            if not chunk:
                raise WorkerEnded
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return worker_message_adapter.validate_json(line)
        except ValidationError as error:
            raise WorkerEnded from error

    def kill(self) -> None:
        """End the worker's whole process group and wait for it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()

    def close(self, *, patience: float = 0.0) -> int:
        """Free the pipes and return the exit status; after ``patience`` seconds, by force."""
        try:
            status = self.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self.process.wait()
        self._selector.close()
        os.close(self._messages)
        if self.process.stdin is not None:
            try:
                self.process.stdin.close()
            except OSError:
                # What was still to be flushed was for a process that is gone.
                self.process.stdin = None
        return status


def _environment(device: str) -> dict[str, str]:
    """Return the variables that a worker starts with."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_MEANT_FOR_OTHERS)}
    # By default the compiler's files are in /tmp, and gone with the next start of the machine.
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(cache_directory() / "compiled")}
    return kept | inherited | _QUIET | (_CPU_ENVIRONMENT if device == "cpu" else {})
