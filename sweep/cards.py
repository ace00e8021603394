"""Owns what NVML says of the card in this machine: product, memory, driver, who else uses it.

Knows nothing of the catalogue or of studies. Nothing here touches CUDA: a context would take
memory that the trials need.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pynvml


@dataclass(frozen=True)
class CardProcess:
    """A process that has memory on the card."""

    pid: int
    used_bytes: int | None
    """None where the driver does not tell, as inside most containers."""


@dataclass(frozen=True)
class Card:
    """The card that CUDA would call 0, at one moment."""

    product: str
    memory_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]
    driver: str
    cuda: str
    """Newest CUDA version that the driver supports."""
    processes: tuple[CardProcess, ...] = ()


def read_card() -> Card | None:
    """Return the card in this machine; None where there is none, or no driver for it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return None
    try:
        with _nvml():
            return _read(_first_visible(visible))
    except pynvml.NVMLError:
        return None


@contextmanager
def _nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _first_visible(visible: str | None) -> Any:
    first = (visible or "0").split(",")[0].strip()
    if first.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(first))
    return pynvml.nvmlDeviceGetHandleByUUID(first)


def _read(handle: Any) -> Card:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    return Card(
        product=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=(int(major), int(minor)),
        driver=pynvml.nvmlSystemGetDriverVersion(),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        processes=_processes(handle),
    )


def _processes(handle: Any) -> tuple[CardProcess, ...]:
    """Return who has memory on the card; nobody where the driver does not say, as in containers."""
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return ()
    return tuple(CardProcess(pid=one.pid, used_bytes=one.usedGpuMemory) for one in running)
