"""Owns how step times become a measurement: steadiness, the interval of the median, and what NVML
tells of the card meanwhile.

Pure but for `CardReader`, which reads NVML. Knows nothing of models.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pynvml

from storage.nvml import ask

NEIGHBOUR_BYTES = 2**30
"""So much taken by others since a trial began is a neighbour's: this process's own libraries load
kernels for some hundred MiB with its first steps."""
NEIGHBOUR_BYTES_MEASURING = 256 * 2**20
"""The same while steps are measured, when everything of this process's own is there."""
_THROTTLE_BITS = {
    "power": pynvml.nvmlClocksThrottleReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "hw_thermal": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "sw_thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}


@cache
def _interval_rank(count: int) -> int:
    """Return k such that order statistics k and count+1-k bound the median at 95 % or more; 0 for
    none.

    The number of samples under the median is binomial(count, 1/2), whatever the distribution of
    step times.
    """
    tail, rank = 0.0, 0
    for k in range(count // 2):
        tail += math.comb(count, k) / 2**count
        if 2 * tail > 0.05:
            break
        rank = k + 1
    return rank


def median_interval(seconds: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the median; None for fewer than six samples."""
    rank = _interval_rank(len(seconds))
    if rank == 0:
        return None
    ordered = sorted(seconds)
    return ordered[rank - 1], ordered[-rank]


def is_steady(seconds: Sequence[float], *, tolerance: float = 0.05) -> bool:
    """Whether the last two steps agree: warm-up pays for kernel selection and allocator growth
    until they do.
    """
    if len(seconds) < 2:
        return False
    last, before = seconds[-1], seconds[-2]
    return abs(last - before) <= tolerance * min(last, before)


def is_precise(seconds: Sequence[float], *, relative: float) -> bool:
    """Whether the 95 % interval of the median lies within ``relative`` of it on both sides."""
    interval = median_interval(seconds)
    if interval is None:
        return False
    median = statistics.median(seconds)
    return max(median - interval[0], interval[1] - median) <= relative * median


@dataclass(frozen=True)
class CardReading:
    """One look at the card. Bytes count every process."""

    used_bytes: int | None = None
    sm_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    has_neighbour: bool = False


class CardReader:
    """Reads the card through NVML; a machine without NVML gives empty readings.

    A neighbour is a process that came after `remember`. What was there before is not one, nor is
    this process, which a container's NVML shows under a number that only the host knows.

    Args:
        pci_bus_id: of the card; None for no card.
        nvml: what pynvml is; tests hand in another.
    """

    def __init__(self, pci_bus_id: str | None, *, nvml: Any = pynvml) -> None:
        self._nvml = nvml
        self._handle: Any = None
        self._known: frozenset[int] = frozenset()
        if pci_bus_id is None:
            return
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
        except pynvml.NVMLError:
            self._handle = None
        self.remember()

    def remember(self) -> None:
        """Take the processes of this moment as known; call it when this one is on the card too."""
        self._known = self._processes()

    def read(self) -> CardReading:
        """Return what NVML tells now; each figure it refuses is left empty."""
        if self._handle is None:
            return CardReading()
        nvml = self._nvml
        memory = ask(nvml.nvmlDeviceGetMemoryInfo, self._handle)
        reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._handle) or 0
        return CardReading(
            used_bytes=None if memory is None else int(memory.used),
            sm_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, self._handle, pynvml.NVML_CLOCK_SM),
            throttle_reasons=tuple(name for name, bit in _THROTTLE_BITS.items() if reasons & bit),
            has_neighbour=bool(self._processes() - self._known - {os.getpid()}),
        )

    def _processes(self) -> frozenset[int]:
        if self._handle is None:
            return frozenset()
        running = ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle) or []
        return frozenset(process.pid for process in running)
