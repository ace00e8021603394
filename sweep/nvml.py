"""What NVML says of a GPU; each figure is None where the driver refuses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pynvml

NVML: Any = pynvml
"""The library; a test hands another to what takes one."""
_HARDWARE_XIDS = frozenset({48, 62, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143})
"""Errors that are the GPU's own and not a program's, which end what runs: uncorrectable memory, a
failed row remapping, links, a GPU off the bus, a firmware that does not answer. By NVIDIA's
catalogue of Xid errors (docs.nvidia.com/deploy/xid-errors)."""
_THROTTLE_BITS = {
    "power": pynvml.nvmlClocksThrottleReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "hw_thermal": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "sw_thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}


@dataclass(frozen=True)
class GpuProcess:
    """A process that has memory on the GPU."""

    pid: int
    used_bytes: int | None
    """None where the driver does not tell, as inside most containers."""


@contextmanager
def visible_gpus(nvml: Any = NVML, *, most: int | None = None) -> Iterator[list[NvmlDevice]]:
    """Yield the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible, in its order.

    Args:
        nvml: what pynvml is; tests hand in another.
        most: how many are looked at; None for all of them.
    """
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        names = [str(index) for index in range(_ask(nvml.nvmlDeviceGetCount) or 1)]
    else:
        names = [name.strip() for name in named.split(",")]
        names[0] = names[0] or "0"
    gpus: list[NvmlDevice] = []
    for name in names[:most]:
        handle = None
        if name.isdigit():
            handle = _ask(nvml.nvmlDeviceGetHandleByIndex, int(name))
        elif name:
            handle = _ask(nvml.nvmlDeviceGetHandleByUUID, name)
        if handle is None:
            # CUDA shows none of what comes after one that is not there.
            break
        gpus.append(NvmlDevice(handle, nvml))
    try:
        yield gpus
    finally:
        _ask(nvml.nvmlShutdown)


def device_at(pci_bus_id: str, nvml: Any = NVML) -> NvmlDevice | None:
    """Return the GPU on that bus, to be asked as long as this process lives; None without NVML."""
    _ask(nvml.nvmlInit)
    handle = _ask(nvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id)
    return None if handle is None else NvmlDevice(handle, nvml)


class NvmlDevice:
    """A GPU, asked anew at each call.

    What is refused differs by GPU: one whose memory is the host's has no memory figures, a slice
    of a GPU no clocks, a container no processes. One refusal says nothing of the others.
    """

    def __init__(self, handle: Any, nvml: Any) -> None:
        self._handle = handle
        self._nvml = nvml

    def ask(self, question: str, *more: Any) -> Any:
        """Return what one of NVML's functions says of the GPU; None where it refuses."""
        return _ask(getattr(self._nvml, question), self._handle, *more)

    def versions(self) -> tuple[str | None, str | None]:
        """Return the driver's version and the newest CUDA that it supports, as in ``12.8``."""
        newest = None
        cuda = _ask(self._nvml.nvmlSystemGetCudaDriverVersion_v2)
        if cuda is not None:
            newest = f"{cuda // 1000}.{cuda % 1000 // 10}"
        return _ask(self._nvml.nvmlSystemGetDriverVersion), newest

    def memory(self) -> Any:
        """Return its ``total``, ``free`` and ``used`` bytes, of all processes together, or None."""
        return self.ask("nvmlDeviceGetMemoryInfo")

    def processes(self) -> tuple[GpuProcess, ...]:
        """Return the processes that have memory on it; none where the driver does not say."""
        running = self.ask("nvmlDeviceGetComputeRunningProcesses") or ()
        return tuple(GpuProcess(process.pid, process.usedGpuMemory) for process in running)

    def sm_clock_mhz(self) -> int | None:
        """Return the clock of its multiprocessors."""
        clock: int | None = self.ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM)
        return clock

    def throttle_reasons(self) -> tuple[str, ...]:
        """Return what holds its clocks down."""
        reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return tuple(name for name, bit in _THROTTLE_BITS.items() if reasons & bit)

    def energy_joules(self) -> float | None:
        """Return the energy it has used since the driver was loaded, every process together."""
        millijoules = self.ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else float(millijoules) / 1000.0


class FaultWatch:
    """Faults of one GPU since the watch began, by NVML; called, it returns them in a few words.

    Args:
        uuid: of the GPU. Of one that is not found by that name nothing is ever said.
        nvml: what pynvml is; tests hand in another.
    """

    def __init__(self, uuid: str, nvml: Any = NVML) -> None:
        self._uuid, self._nvml = uuid, nvml
        self._events: Any = None
        self._found: str | None = None
        # For as long as this process lives, like `device_at`.
        _ask(nvml.nvmlInit)
        handle = _ask(nvml.nvmlDeviceGetHandleByUUID, uuid)
        self._is_known = handle is not None
        if self._is_known:
            self._ecc_errors = self._uncorrected(handle)
            if (events := _ask(nvml.nvmlEventSetCreate)) is not None:
                with suppress(pynvml.NVMLError):
                    kind = pynvml.nvmlEventTypeXidCriticalError
                    nvml.nvmlDeviceRegisterEvents(handle, kind, events)
                    self._events = events

    def __call__(self) -> str | None:
        """Return what is wrong with the GPU; None where nothing is known to be."""
        if self._is_known and self._found is None:
            self._found = self._look()
        return self._found

    def _look(self) -> str | None:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            self._nvml.nvmlDeviceGetMemoryInfo(handle)
        except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_NotFound):
            return "the driver does not find it any more: it has fallen off the bus"
        except pynvml.NVMLError:
            return None
        errors = self._uncorrected(handle) - self._ecc_errors
        if errors > 0:
            return f"{errors} uncorrectable memory error{'s' if errors > 1 else ''} (ECC)"
        while self._events is not None:
            event = _ask(self._nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:
                return None
            if event.eventData in _HARDWARE_XIDS:
                return f"the driver reported Xid {event.eventData}, a fault of the GPU"
        return None

    def _uncorrected(self, handle: Any) -> int:
        kinds = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        return int(_ask(self._nvml.nvmlDeviceGetTotalEccErrors, handle, *kinds) or 0)


def _ask(question: Any, *arguments: Any) -> Any:
    """Return NVML's answer; None where this GPU's driver does not give it."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
