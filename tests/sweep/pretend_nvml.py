"""An NVML that answers what a test says, and refuses the rest as real drivers do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml

REFUSED = pynvml.NVMLError_NotSupported()


class PretendNvml:
    """What pynvml is to the product.

    Args:
        answers: by function; an exception is raised, a function called with what was asked, any
            other value returned, what is not there refused.
    """

    def __init__(self, **answers: Any) -> None:
        self.answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetHandleByUUID": "handle",
            "nvmlDeviceGetHandleByPciBusId": "handle",
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        def answer(*asked: Any) -> Any:
            value = self.answers.get(name, REFUSED)
            value = value(*asked) if callable(value) else value
            if isinstance(value, Exception):
                raise value
            return value

        return answer


def memory(total: int, free: int) -> SimpleNamespace:
    """As `nvmlDeviceGetMemoryInfo` answers."""
    return SimpleNamespace(total=total, free=free, used=total - free)


def processes(*pids: int) -> list[SimpleNamespace]:
    """As `nvmlDeviceGetComputeRunningProcesses` answers in a container: no sizes."""
    return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]
