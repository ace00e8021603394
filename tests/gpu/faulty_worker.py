"""The real worker on a real GPU, which goes wrong where a configuration's `lora_alpha` says so.

Run as the real one is: ``python -P -m tests.gpu.faulty_worker FD PARENT``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

import torch

from qlora_sweep.sweep.processes import bind_to_parent, leave_a_guard
from qlora_sweep.sweep.running.wire import Progress
from qlora_sweep.sweep.running.worker import Worker
from qlora_sweep.sweep.running.worker import main as serve


def _exit_from_c() -> None:
    """End as bitsandbytes' kernels do on a CUDA error of their own: no Python code runs after."""
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    libc.exit(1)


def _abort() -> None:
    ctypes.CDLL(None).abort()


def _poison_context() -> None:
    """Read out of bounds on the GPU, after which no call of this process to CUDA succeeds."""
    table = torch.zeros(4, device="cuda")
    table[torch.tensor([2**20], device="cuda")].sum().item()


def _segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


FAULTS: dict[float, Callable[[], None]] = {
    1001.0: _exit_from_c,
    1002.0: _abort,
    1003.0: _poison_context,
    1004.0: _segfault,
}
EXIT_FROM_C, ABORT, POISONED_CONTEXT, SEGFAULT = FAULTS


class FaultyWorker(Worker):
    """Goes wrong at its third measured step."""

    def _report(self, progress: Progress) -> bool:
        stopped = super()._report(progress)
        if progress.phase == "measure" and progress.step == 3:
            assert self._open is not None
            FAULTS.get(self._open.request.config.lora_alpha or 0.0, lambda: None)()
        return stopped


def main() -> None:
    """Serve trials as the real worker does, with this one in its place."""
    bind_to_parent(int(sys.argv[2]))
    leave_a_guard(int(sys.argv[1]))
    serve(FaultyWorker)


if __name__ == "__main__":
    main()
