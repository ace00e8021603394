"""Owns what differs between a CUDA card and the CPU: the cap, memory counters, failures of
allocation.

Knows nothing of models or configurations.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

_CUDA_OOM_SIGNS = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "cuda runtime error (2)",
)
_CPU_OOM_SIGNS = (
    "can't allocate memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "out of memory",
)
_NEXT_TO_NOTHING_BYTES = 2**20
_LIBC = ctypes.CDLL(None)
_REQUESTED = re.compile(r"(?:Tried to allocate|tried to allocate) ([\d.]+) ?(bytes|KiB|MiB|GiB)?")
_UNITS = {None: 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Device(Protocol):
    """What the trial needs from the device it runs on. Bytes throughout."""

    torch_device: torch.device

    def cap(self, budget_bytes: int) -> None:
        """Refuse, for real, what would take the trainings of this process past the budget."""
        ...

    def warm_up(self) -> None:
        """Make the libraries take now what they take once, so that no trial is charged for it."""
        ...

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        ...

    def release(self) -> None:
        """Give back what nothing refers to any more."""
        ...

    def allocated_bytes(self) -> int | None:
        """Bytes of live tensors; None where no counter tells."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak."""
        ...

    def observed(self) -> contextlib.AbstractContextManager[None]:
        """Context of the steps whose memory must be seen, for devices that need to watch."""
        ...

    def peak_allocated_bytes(self) -> int:
        """Most bytes of live tensors since `reset_peak`."""
        ...

    def peak_reserved_bytes(self) -> int | None:
        """Most bytes held by the caching allocator since `reset_peak`; None without one."""
        ...

    def allocator_retries(self) -> int:
        """Times since `reset_peak` that the allocator emptied its cache to serve a request."""
        ...

    def ran_out(self, error: BaseException) -> bool:
        """Whether an exception, still being handled, means that memory ran out."""
        ...


class CudaDevice:
    """One CUDA card under torch's caching allocator."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._retries_before = 0

    def cap(self, budget_bytes: int) -> None:
        """See `Device.cap`: the allocator raises where reserved memory would pass the budget."""
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total))

    def warm_up(self) -> None:
        """See `Device.warm_up`: the cuBLAS workspaces of the forward and of the backward thread."""
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            weight = torch.zeros(64, 64, device=self.torch_device, dtype=dtype, requires_grad=True)
            (weight @ weight).sum().backward()
        self.synchronize()

    def synchronize(self) -> None:
        """See `Device.synchronize`."""
        torch.cuda.synchronize()

    def release(self) -> None:
        """See `Device.release`."""
        gc.collect()
        torch.cuda.empty_cache()

    def allocated_bytes(self) -> int | None:
        """See `Device.allocated_bytes`."""
        return int(torch.cuda.memory_allocated())

    def reset_peak(self) -> None:
        """See `Device.reset_peak`."""
        torch.cuda.reset_peak_memory_stats()
        self._retries_before = self._retries()

    def observed(self) -> contextlib.AbstractContextManager[None]:
        """See `Device.observed`: the allocator counts by itself."""
        return contextlib.nullcontext()

    def peak_allocated_bytes(self) -> int:
        """See `Device.peak_allocated_bytes`."""
        return int(torch.cuda.max_memory_allocated())

    def peak_reserved_bytes(self) -> int | None:
        """See `Device.peak_reserved_bytes`."""
        return int(torch.cuda.max_memory_reserved())

    def allocator_retries(self) -> int:
        """See `Device.allocator_retries`."""
        return self._retries() - self._retries_before

    def ran_out(self, error: BaseException) -> bool:
        """See `Device.ran_out`."""
        return is_out_of_memory(error)

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


class CpuDevice:
    """The CPU, with a budget that the kernel enforces on this process's private memory
    (`RLIMIT_DATA`).

    Peaks are read from the allocations that torch's profiler sees in the observed steps, on top of
    the
    tensors that were there before; they repeat to the byte.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._peak = 0
        self._budget: int | None = None

    def cap(self, budget_bytes: int) -> None:
        """See `Device.cap`: in force from the next `reset_peak` on."""
        self._budget = budget_bytes

    def warm_up(self) -> None:
        """See `Device.warm_up`: threads and their stacks, kernels, the profiler."""
        for dtype in (torch.bfloat16, torch.float32):
            weight = torch.randn(512, 512, dtype=dtype, requires_grad=True)
            with self.observed():
                (weight @ weight).sum().backward()

    def synchronize(self) -> None:
        """See `Device.synchronize`: the CPU is never behind."""

    def release(self) -> None:
        """See `Device.release`."""
        gc.collect()
        _LIBC.malloc_trim(0)

    def allocated_bytes(self) -> int | None:
        """See `Device.allocated_bytes`: every tensor storage that Python can reach."""
        storages = {}
        for item in gc.get_objects():
            # Not isinstance: it would wake the lazy modules among the objects.
            if issubclass(type(item), torch.Tensor):
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def reset_peak(self) -> None:
        """See `Device.reset_peak`: what is not a tensor by now is not this trial's either."""
        self._peak = self.allocated_bytes() or 0
        self._arm()

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """See `Device.observed`: follow every allocation while the context is open."""
        before = self.allocated_bytes() or 0
        watch = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        watch.start()
        try:
            yield
        finally:
            # What the profiler takes to sum up is not the training's.
            self._disarm()
            watch.stop()
            self._peak = max(self._peak, before + _highest_total(watch))
            del watch
            self._arm()

    def _arm(self) -> None:
        """Let the process hold the budget's worth of tensors on top of what is not a tensor."""
        if self._budget is not None:
            limit = _private_bytes() - (self.allocated_bytes() or 0) + self._budget
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))

    def _disarm(self) -> None:
        if self._budget is not None:
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_DATA, unlimited)

    def peak_allocated_bytes(self) -> int:
        """See `Device.peak_allocated_bytes`."""
        return self._peak

    def peak_reserved_bytes(self) -> int | None:
        """See `Device.peak_reserved_bytes`."""
        return None

    def allocator_retries(self) -> int:
        """See `Device.allocator_retries`."""
        return 0

    def ran_out(self, error: BaseException) -> bool:
        """See `Device.ran_out`: at the limit, libraries fail in ways of their own."""
        if is_out_of_memory(error) or self._budget is None:
            return is_out_of_memory(error)
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        return _private_bytes() + _NEXT_TO_NOTHING_BYTES > limit


def _highest_total(watch: profile) -> int:
    """Return the highest running total of allocated minus freed bytes in a profile."""
    results = watch.profiler.kineto_results if watch.profiler is not None else None
    events: list[Any] = [] if results is None else results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    total = highest = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest


def _private_bytes() -> int:
    """Return the bytes that `RLIMIT_DATA` counts for this process now (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData line")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out: the allocator's, the driver's, cuBLAS's,
    Triton's.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if type(error).__name__ == "OutOfResources":
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        s in text for s in _CUDA_OOM_SIGNS + _CPU_OOM_SIGNS
    )


def requested_bytes(error: BaseException) -> int | None:
    """Return the size of the allocation that failed, where the message tells it."""
    found = _REQUESTED.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def open_device(kind: str) -> Device:
    """Return the device called ``cuda`` or ``cpu``."""
    return CudaDevice() if kind == "cuda" else CpuDevice()
