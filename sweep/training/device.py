"""The device of a trial, a CUDA GPU or the CPU: its cap, its memory counters, marks in its work."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, Self, cast

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from search_spaces.errors import EnvironmentFault
from storage.records import Stage
from sweep.training.exceptions import is_card_out_of_memory, is_host_out_of_memory

_NEXT_TO_NOTHING_BYTES = 2**20
_NET_BYTES = 2**30
"""What a process on the CPU may take beyond its tensors: scratch memory of libraries and a kernel
for each shape, of which texts make hundreds; events of the profiler, objects of the interpreter."""
_SPILL_SLACK_BYTES = 256 * 2**20
"""Windows tells what is free to some hundred MiB."""
_MARK = "stage: "
_LIBC = ctypes.CDLL(None)


class Mark:
    """A moment in what a device does, passed when all that was queued before it is done.

    This one is the CPU's, which is never behind. A GPU works behind the host that launches its
    kernels: timed by the host, each step would have to be waited for, and the GPU would idle.
    """

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def is_passed(self) -> bool:
        """Whether the device has done all that was queued before."""
        return True

    def wait(self) -> None:
        """Return once it is passed.

        Raises:
            RuntimeError: the device failed before.
        """

    def seconds_since(self, earlier: Self) -> float:
        """Return the device's seconds between two marks that are passed."""
        return self._seconds - earlier._seconds


class CudaMark(Mark):
    """A mark in the current stream of the current GPU, to half a microsecond."""

    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def is_passed(self) -> bool:
        """See `Mark.is_passed`."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See `Mark.wait`."""
        self._event.synchronize()

    def seconds_since(self, earlier: Self) -> float:
        """See `Mark.seconds_since`."""
        return float(earlier._event.elapsed_time(self._event)) / 1000


class Device(Protocol):
    """What a trial needs of the device that it runs on. Bytes throughout."""

    torch_device: torch.device
    _peak_stage: Stage = "load"

    def cap(self, budget_bytes: int) -> None:
        """Refuse, for real, what would take the trainings of this process past the budget."""

    def expand_segments(self, is_expandable: bool) -> None:
        """Make the allocator's segments that are taken from now on grow, or keep their size."""

    def warm_up(self) -> None:
        """Make the libraries take now what they take once, so that no trial is charged for it."""

    def mark(self) -> Mark:
        """Return a mark behind everything that is queued by now."""
        return Mark()

    def release(self) -> None:
        """Give back what nothing refers to any more."""

    def allocated_bytes(self) -> int | None:
        """Bytes of live tensors; None where no counter tells."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak."""

    def observed(self) -> contextlib.AbstractContextManager[None]:
        """Context of the steps whose memory must be seen, for devices that need to watch."""
        ...

    def enter(self, stage: Stage) -> None:
        """Say that another stage of a step begins, so that the peak's is known."""

    def peak_allocated_bytes(self) -> int:
        """Most bytes of live tensors since `reset_peak`."""
        ...

    def peak_stage(self) -> Stage:
        """Stage in which the observed steps peaked; ``load`` where it was before them."""
        return self._peak_stage

    def peak_reserved_bytes(self) -> int | None:
        """Most bytes held by the caching allocator since `reset_peak`; None without one."""
        return None

    def allocator_retries(self) -> int:
        """Times since `reset_peak` that the allocator emptied its cache to serve a request."""
        return 0

    def spilled_bytes(self) -> int:
        """Bytes that the driver put into the host's memory since `reset_peak`: it did not fail."""
        return 0

    def room_bytes(self) -> int | None:
        """Bytes that this process holds or could still have; None where nobody can take them."""
        return None

    def ran_out(self, error: BaseException) -> bool:
        """Whether an exception, still being handled, means that memory ran out."""
        ...


class CudaDevice(Device):
    """One CUDA GPU under torch's caching allocator.

    Args:
        can_spill: whether the driver answers a full GPU with the host's memory, as it does under
            Windows; None looks.
    """

    def __init__(self, *, can_spill: bool | None = None) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        card: Any = torch.cuda.get_device_properties(self.torch_device)
        self._total_bytes = int(card.total_memory)
        self._shares_the_hosts = bool(getattr(card, "is_integrated", False))
        is_under_windows = "microsoft" in platform.release().lower()
        self._can_spill = is_under_windows if can_spill is None else can_spill
        self._retries_before = 0
        self._rooms: dict[str, int] = {}
        """What this process had, or could still have, when it was capped and when a trial began."""
        self._is_watching = False
        self._stage: Stage = "load"
        self._peak_seen = 0

    def cap(self, budget_bytes: int) -> None:
        """See `Device.cap`: the allocator raises where reserved memory would pass the budget."""
        # What is reserved, not what is allocated: the driver gives out whole segments, and a GPU
        # is full when they are. At the cap the allocator first gives back what it caches and tries
        # again, as it would on a GPU of that size; `allocator_retries` counts how often.
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / self._total_bytes))
        self._rooms["process"] = self._room_bytes()

    def expand_segments(self, is_expandable: bool) -> None:
        """See `Device.expand_segments`: what the cache holds by then stays of its kind."""
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{is_expandable}")

    def warm_up(self) -> None:
        """See `Device.warm_up`: the cuBLAS workspaces of the forward and of the backward thread."""
        # cuBLAS keeps a workspace for each thread that multiplies, and autograd runs backward on
        # one of its own; they are never given back, whichever trial they were first taken in.
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            weight = torch.zeros(64, 64, device=self.torch_device, dtype=dtype, requires_grad=True)
            (weight @ weight).sum().backward()
        torch.cuda.synchronize()

    def mark(self) -> Mark:
        """See `Device.mark`."""
        return CudaMark()

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
        # What resets the peaks leaves torch's count of retries as it is.
        self._retries_before = self._retries()
        self._rooms["trial"] = self._room_bytes()
        self._stage = self._peak_stage = "load"
        self._peak_seen = self.peak_allocated_bytes()

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """See `Device.observed`: the allocator counts by itself; only the stages are followed."""
        self._is_watching, self._stage = True, "forward"
        try:
            yield
        finally:
            self._note_peak()
            self._is_watching = False

    def enter(self, stage: Stage) -> None:
        """See `Device.enter`."""
        if self._is_watching:
            self._note_peak()
            self._stage = stage

    def _note_peak(self) -> None:
        """Charge the stage that ends with the peak, if it rose in it."""
        peak = self.peak_allocated_bytes()
        if peak > self._peak_seen:
            self._peak_seen, self._peak_stage = peak, self._stage

    def peak_allocated_bytes(self) -> int:
        """See `Device.peak_allocated_bytes`."""
        return int(torch.cuda.max_memory_allocated())

    def peak_reserved_bytes(self) -> int | None:
        """See `Device.peak_reserved_bytes`."""
        return int(torch.cuda.max_memory_reserved())

    def allocator_retries(self) -> int:
        """See `Device.allocator_retries`."""
        return self._retries() - self._retries_before

    def spilled_bytes(self) -> int:
        """See `Device.spilled_bytes`: what was reserved beyond what the GPU had to give.

        Only where a driver can spill: elsewhere more than there was means that a neighbour left.
        """
        if not self._can_spill or not self._rooms:
            return 0
        return bytes_beyond(int(torch.cuda.max_memory_reserved()), room=min(self._rooms.values()))

    def room_bytes(self) -> int | None:
        """See `Device.room_bytes`: None where the host's memory is the GPU's, which all use."""
        return None if self._shares_the_hosts else self._room_bytes()

    def ran_out(self, error: BaseException) -> bool:
        """See `Device.ran_out`: the host's memory is not the GPU's."""
        return is_card_out_of_memory(error)

    def _room_bytes(self) -> int:
        # What the allocator caches is not free to the driver, but it is to this process. Unlike
        # either number, the sum does not move with what is trained: it falls where memory goes to
        # others, or to what this process's own libraries take beside the allocator.
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free) + int(torch.cuda.memory_reserved())

    def _retries(self) -> int:
        return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


class CpuDevice(Device):
    """The CPU, where a budget of tensors is kept by counting.

    Peaks are read from the allocations that torch's profiler sees in the observed steps, on top of
    the tensors that were there before; they repeat to the byte, and they alone decide what fits.
    The kernel's limit on this process's private memory (`RLIMIT_DATA`) is a net for what is far too
    large: it cannot tell tensors from scratch memory, and what the heap holds free is served
    without asking the kernel at all.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._peak = 0
        self._budget: int | None = None
        self._failed_at_limit = False

    def cap(self, budget_bytes: int) -> None:
        """See `Device.cap`: in force from the next `reset_peak` on.

        Raises:
            EnvironmentFault: a limit of this process's memory leaves less, and would be taken for
                the budget's.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        needed = _bytes_of("VmSize") + budget_bytes + _NET_BYTES
        if limit != resource.RLIM_INFINITY and limit < needed:
            raise EnvironmentFault(
                f"the memory that a process may take (`ulimit -v {limit // 1024}`) leaves no room "
                f"for the budget: raise it, to {2 * needed // 1024} say"
            )
        self._budget = budget_bytes

    def expand_segments(self, is_expandable: bool) -> None:
        """See `Device.expand_segments`: the heap has none."""

    def warm_up(self) -> None:
        """See `Device.warm_up`: threads and their stacks, kernels, the profiler."""
        for dtype in (torch.bfloat16, torch.float32):
            weight = torch.randn(512, 512, dtype=dtype, requires_grad=True)
            with self.observed():
                (weight @ weight).sum().backward()

    def release(self) -> None:
        """See `Device.release`."""
        gc.collect()
        # The heap keeps what was freed, and the limit on private memory would count it.
        _LIBC.malloc_trim(0)

    def allocated_bytes(self) -> int | None:
        """See `Device.allocated_bytes`: every tensor storage that Python can reach."""
        # torch counts no allocations on the CPU. Views share a storage, which counts once.
        storages = {}
        for item in gc.get_objects():
            # Not isinstance: it would wake the lazy modules among the objects.
            if issubclass(type(item), torch.Tensor) and not issubclass(type(item), DTensor):
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def reset_peak(self) -> None:
        """See `Device.reset_peak`: what is not a tensor by now is not this trial's either."""
        self._peak = self.allocated_bytes() or 0
        self._peak_stage = "load"
        self._failed_at_limit = False
        self._arm()

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """See `Device.observed`: follow every allocation while the context is open."""
        before = self.allocated_bytes() or 0
        watch = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        watch.start()
        try:
            yield
        except BaseException:
            # Asked now: the limit is lifted below, and set anew for what is there afterwards.
            self._failed_at_limit = self._is_at_limit()
            raise
        finally:
            # What the profiler takes to sum up is not the training's.
            self._disarm()
            try:
                watch.stop()
                highest, stage = _highest_total(watch)
                if before + highest > self._peak:
                    self._peak, self._peak_stage = before + highest, stage
                del watch
            finally:
                self._arm()

    def enter(self, stage: Stage) -> None:
        """See `Device.enter`: a mark among the profiler's events."""
        with record_function(_MARK + stage):
            pass

    def _arm(self) -> None:
        """Let the process hold the budget's worth of tensors on top of what is not a tensor."""
        if self._budget is not None:
            others = _bytes_of("VmData") - (self.allocated_bytes() or 0)
            _limit_data(others + self._budget + _NET_BYTES)

    def _disarm(self) -> None:
        if self._budget is not None:
            _limit_data(resource.RLIM_INFINITY)

    def peak_allocated_bytes(self) -> int:
        """See `Device.peak_allocated_bytes`."""
        return self._peak

    def ran_out(self, error: BaseException) -> bool:
        """See `Device.ran_out`: at the limit, libraries fail in ways of their own."""
        if is_host_out_of_memory(error) or self._budget is None:
            return is_host_out_of_memory(error)
        return self._failed_at_limit or self._is_at_limit()

    def _is_at_limit(self) -> bool:
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        is_limited = limit != resource.RLIM_INFINITY
        return is_limited and _bytes_of("VmData") + _NEXT_TO_NOTHING_BYTES > limit


def _highest_total(watch: profile) -> tuple[int, Stage]:
    """Return the highest running total of allocated minus freed bytes, and the stage it was in."""
    results = watch.profiler.kineto_results if watch.profiler is not None else None
    events: list[Any] = [] if results is None else results.events()
    total = highest = 0
    stage = highest_stage = "load"
    for event in sorted(events, key=lambda event: event.start_ns()):
        name = event.name()
        if name.startswith(_MARK):
            stage = name.removeprefix(_MARK)
        elif name == "[memory]":
            total += event.nbytes()
            if total > highest:
                highest, highest_stage = total, stage
    return highest, cast(Stage, highest_stage)


def _limit_data(soft: int) -> None:
    """Limit this process's private memory, where somebody's own limit (`ulimit -d`) is no lower."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        # Who is not root may not raise it.
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _bytes_of(kind: str) -> int:
    """Return what the kernel counts of this process under a name (Linux): ``VmData`` is what
    `RLIMIT_DATA` limits."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {kind} line")


def bytes_beyond(reserved_bytes: int, *, room: int) -> int:
    """Return how much of what was reserved a GPU with so much room cannot have held itself."""
    beyond = reserved_bytes - room
    return beyond if beyond > _SPILL_SLACK_BYTES else 0


def open_device(kind: str) -> Device:
    """Return the device called ``cuda`` or ``cpu``."""
    return CudaDevice() if kind == "cuda" else CpuDevice()
