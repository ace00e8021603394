"""Owns asking NVML: one card, each of its figures by itself, and none where the driver refuses.

Nothing else imports pynvml. Knows nothing of what the figures are for, nor anything of ours, so
that the room that trains may ask as well as the rooms above it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pynvml

NVML: Any = pynvml
"""The library; a test hands another to what takes one."""
_THROTTLE_BITS = {
    "power": pynvml.nvmlClocksThrottleReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "hw_thermal": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "sw_thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}


@dataclass(frozen=True)
class CardProcess:
    """A process that has memory on the card."""

    pid: int
    used_bytes: int | None
    """None where the driver does not tell, as inside most containers."""


@dataclass(frozen=True)
class CardMemory:
    """A card's memory, in bytes of all processes together."""

    total: int
    free: int
    used: int


@contextmanager
def first_visible_card(nvml: Any = NVML) -> Iterator[NvmlCard | None]:
    """Yield the first card that ``CUDA_VISIBLE_DEVICES`` leaves visible; None where there is none.

    Args:
        nvml: what pynvml is; tests hand in another.
    """
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
        if first.isdigit():
            handle = _ask(nvml.nvmlDeviceGetHandleByIndex, int(first))
        else:
            handle = _ask(nvml.nvmlDeviceGetHandleByUUID, first)
        yield None if handle is None else NvmlCard(handle, nvml)
    finally:
        _ask(nvml.nvmlShutdown)


def card_at(pci_bus_id: str, nvml: Any = NVML) -> NvmlCard | None:
    """Return the card on that bus, to be asked as long as this process lives; None without NVML."""
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    handle = _ask(nvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id)
    return None if handle is None else NvmlCard(handle, nvml)


class NvmlCard:
    """A card, asked anew at each call.

    What is refused differs by card: one whose memory is the host's has no memory figures, a slice
    of a card no clocks, a container no processes. One refusal says nothing of the others.
    """

    def __init__(self, handle: Any, nvml: Any) -> None:
        self._handle = handle
        self._nvml = nvml

    def product(self) -> str | None:
        """Return its name."""
        name = _ask(self._nvml.nvmlDeviceGetName, self._handle)
        return None if name is None else str(name)

    def memory(self) -> CardMemory | None:
        """Return its memory."""
        memory = _ask(self._nvml.nvmlDeviceGetMemoryInfo, self._handle)
        if memory is None:
            return None
        return CardMemory(int(memory.total), int(memory.free), int(memory.used))

    def compute_capability(self) -> tuple[int, int] | None:
        """Return its compute capability."""
        capability = _ask(self._nvml.nvmlDeviceGetCudaComputeCapability, self._handle)
        return None if capability is None else (int(capability[0]), int(capability[1]))

    def processes(self) -> tuple[CardProcess, ...]:
        """Return who has memory on it; nobody where the driver does not say, as in containers."""
        running = _ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, self._handle) or ()
        return tuple(CardProcess(process.pid, process.usedGpuMemory) for process in running)

    def sm_clock_mhz(self) -> int | None:
        """Return the clock of its multiprocessors."""
        clock: int | None = _ask(
            self._nvml.nvmlDeviceGetClockInfo, self._handle, pynvml.NVML_CLOCK_SM
        )
        return clock

    def throttle_reasons(self) -> tuple[str, ...]:
        """Return what holds its clocks down."""
        reasons = _ask(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._handle) or 0
        return tuple(name for name, bit in _THROTTLE_BITS.items() if reasons & bit)

    def energy_joules(self) -> float | None:
        """Return the energy it has used since the driver was loaded, every process together."""
        millijoules = _ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        return None if millijoules is None else float(millijoules) / 1000.0

    def driver_version(self) -> str | None:
        """Return the driver's version."""
        version = _ask(self._nvml.nvmlSystemGetDriverVersion)
        return None if version is None else str(version)

    def cuda_version(self) -> str | None:
        """Return the newest CUDA version that the driver supports, as in ``12.8``."""
        version = _ask(self._nvml.nvmlSystemGetCudaDriverVersion_v2)
        return None if version is None else f"{version // 1000}.{version % 1000 // 10}"


def _ask(question: Any, *arguments: Any) -> Any:
    """Return NVML's answer; None where this card's driver does not give it."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
