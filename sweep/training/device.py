"""The device of a trial, a CUDA GPU or the CPU: its cap, its memory counters, marks in its work."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, cast

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.storage.records import Stage
from qlora_sweep.sweep.training.exceptions import is_gpu_out_of_memory, is_host_out_of_memory

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


@dataclass(frozen=True)
class Memory:
    """A device's counters since `reset_peak`."""

    peak_allocated_bytes: int
    """Most bytes of live tensors."""
    peak_stage: Stage
    """In which the observed steps peaked; ``load`` where it was before them."""
    peak_reserved_bytes: int | None = None
    """Most bytes held by the caching allocator; None without one."""
    allocator_retries: int = 0
    """Times that the allocator emptied its cache to serve a request."""
    spilled_bytes: int = 0
    """That the driver put into the host's memory, and did not fail."""


class Device(Protocol):
    """What a process trains on. Another kind of GPU is another class, in `DEVICE_TYPES`; what it
    does not say itself is as on a CPU."""

    torch_device: torch.device

    @staticmethod
    def is_available() -> bool:
        """Whether torch finds one."""
        return True

    @staticmethod
    def choose(index: int) -> None:
        """Make one of those that can be seen this process's own, before it is opened."""
        return

    @staticmethod
    def count() -> int | None:
        """Return how many can be seen; None where that limits nothing."""
        return None

    @staticmethod
    def product() -> str:
        """Return what the driver calls the one that was chosen."""
        return "CPU"

    @staticmethod
    def pci_bus_id() -> str | None:
        """Return where the one that was chosen is plugged in; None where it is in no slot."""
        return None

    @staticmethod
    def random_states() -> list[torch.Tensor]:
        """Return the states of its random generators; none where they are the host's."""
        return []

    @property
    def rng_devices(self) -> list[torch.device]:
        """Devices whose random generators `torch.random.fork_rng` has to keep."""
        return []

    def cap(self, budget_bytes: int) -> None:
        """Keep the trainings of this process within a budget."""

    def stop_limiting_host(self) -> None:
        """Let this process take what it likes of the host's memory from now on."""
        return

    def expand_segments(self, is_expandable: bool) -> None:
        """Make the allocator's segments that are taken from now on grow, or keep their size, where
        it has any."""
        return

    def warm_up(self) -> None:
        """Take now what libraries take once, so that no trial is charged for it."""

    def mark(self) -> Mark:
        """Return a mark behind everything that is queued by now."""
        return Mark()

    def release(self) -> None:
        """Give back what nothing refers to any more."""

    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors."""

    def reset_peak(self) -> None:
        """Start a new peak."""

    def observed(self) -> AbstractContextManager[None]:
        """Follow the stages of the steps inside."""

    def enter(self, stage: Stage) -> None:
        """Let another stage begin."""

    def memory(self) -> Memory:
        """Return the counters since `reset_peak`."""

    def room_bytes(self) -> int | None:
        """Return the bytes that this process holds or could still have; None where that is not
        its own to have."""
        return None

    def ran_out(self, error: BaseException) -> bool:
        """Whether an exception, still being handled, means that memory ran out."""


class CudaDevice(Device):
    """One CUDA GPU under torch's caching allocator."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        properties: Any = torch.cuda.get_device_properties(self.torch_device)
        self._total_bytes = int(properties.total_memory)
        self._shares_the_hosts = bool(getattr(properties, "is_integrated", False))
        # Under Windows the driver answers a full GPU with the host's memory.
        self._can_spill = "microsoft" in platform.release().lower()
        self._retries_before = 0
        self._rooms: dict[str, int] = {}
        """What this process had, or could still have, when it was capped and when a trial began."""
        self._stage: Stage | None = None
        """Of the step that is observed."""
        self._peak_stage: Stage = "load"
        self._peak_seen = 0

    @staticmethod
    def is_available() -> bool:
        """See `Device.is_available`."""
        return torch.cuda.is_available()

    @staticmethod
    def choose(index: int) -> None:
        """See `Device.choose`."""
        torch.cuda.set_device(index)

    @staticmethod
    def count() -> int | None:
        """See `Device.count`."""
        return torch.cuda.device_count()

    @staticmethod
    def product() -> str:
        """See `Device.product`."""
        return torch.cuda.get_device_name()

    @staticmethod
    def pci_bus_id() -> str | None:
        """See `Device.pci_bus_id`."""
        gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        return f"{gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"

    @staticmethod
    def random_states() -> list[torch.Tensor]:
        """See `Device.random_states`."""
        return torch.cuda.get_rng_state_all()

    @property
    def rng_devices(self) -> list[torch.device]:
        """See `Device.rng_devices`."""
        return [self.torch_device]

    def cap(self, budget_bytes: int) -> None:
        """Refuse, for real, what would take the trainings of this process past the budget."""
        # What is reserved, not what is allocated: the driver gives out whole segments, and a GPU
        # is full when they are. At the cap the allocator first gives back what it caches and tries
        # again, as it would on a GPU of that size; `allocator_retries` counts how often.
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / self._total_bytes))
        self._rooms["process"] = self._room_bytes()

    def expand_segments(self, is_expandable: bool) -> None:
        """Make the allocator's segments that are taken from now on grow, or keep their size; what
        the cache holds by then stays of its kind."""
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{is_expandable}")

    def warm_up(self) -> None:
        """Take now the cuBLAS workspaces of the forward and of the backward thread, so that no
        trial is charged for them."""
        # cuBLAS keeps a workspace for each thread that multiplies, and autograd runs backward on
        # one of its own; they are never given back, whichever trial they were first taken in.
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            weight = torch.zeros(64, 64, device=self.torch_device, dtype=dtype, requires_grad=True)
            (weight @ weight).sum().backward()
        torch.cuda.synchronize()

    def mark(self) -> Mark:
        """Return a mark behind everything that is queued by now."""
        return CudaMark()

    def release(self) -> None:
        """Give back what nothing refers to any more."""
        gc.collect()
        torch.cuda.empty_cache()

    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors."""
        return torch.cuda.memory_allocated()

    def reset_peak(self) -> None:
        """Start a new peak."""
        torch.cuda.reset_peak_memory_stats()
        # What resets the peaks leaves torch's count of retries as it is.
        counts = torch.cuda.memory_stats()
        self._retries_before = counts.get("num_alloc_retries", 0)
        self._rooms["trial"] = self._room_bytes()
        self._peak_stage = "load"
        self._peak_seen = counts.get("allocated_bytes.all.peak", 0)

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Follow the stages of the steps inside; the allocator counts by itself."""
        self._stage = "forward"
        try:
            yield
        finally:
            self.enter("load")
            self._stage = None

    def enter(self, stage: Stage) -> None:
        """Let another stage begin, and charge the one that ends with the peak if it rose in it."""
        if self._stage is None:
            return
        peak = torch.cuda.max_memory_allocated()
        if peak > self._peak_seen:
            self._peak_seen = peak
            self._peak_stage = self._stage
        self._stage = stage

    def memory(self) -> Memory:
        """Return the counters since `reset_peak`."""
        counts = torch.cuda.memory_stats()
        reserved = counts.get("reserved_bytes.all.peak", 0)
        spilled_bytes = 0
        # Elsewhere more than there was to have means that a neighbour left.
        if self._can_spill and self._rooms:
            spilled_bytes = bytes_beyond(reserved, min(self._rooms.values()))
        return Memory(
            peak_allocated_bytes=counts.get("allocated_bytes.all.peak", 0),
            peak_stage=self._peak_stage,
            peak_reserved_bytes=reserved,
            allocator_retries=counts.get("num_alloc_retries", 0) - self._retries_before,
            spilled_bytes=spilled_bytes,
        )

    def room_bytes(self) -> int | None:
        """Return the bytes that this process holds or could still have; None where the host's
        memory is the GPU's, which all use."""
        if self._shares_the_hosts:
            return None
        return self._room_bytes()

    def ran_out(self, error: BaseException) -> bool:
        """Whether an exception, still being handled, means that the GPU's memory ran out."""
        return is_gpu_out_of_memory(error)

    def _room_bytes(self) -> int:
        # What the allocator caches is not free to the driver, but it is to this process. Unlike
        # either number, the sum does not move with what is trained: it falls where memory goes to
        # others, or to what this process's own libraries take beside the allocator.
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free) + torch.cuda.memory_reserved()


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
        self._memory = Memory(0, "load")
        self._budget: int | None = None
        self._failed_at_limit = False

    def cap(self, budget_bytes: int) -> None:
        """Keep the budget, from the next `reset_peak` on.

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

    def stop_limiting_host(self) -> None:
        """Lift the limit on private memory until the next `reset_peak`: what a long training keeps
        beside its tensors is no part of the budget."""
        _limit_data(resource.RLIM_INFINITY)

    def warm_up(self) -> None:
        """Take now what is taken once: threads and their stacks, kernels, the profiler."""
        for dtype in (torch.bfloat16, torch.float32):
            weight = torch.randn(512, 512, dtype=dtype, requires_grad=True)
            with self.observed():
                (weight @ weight).sum().backward()

    def release(self) -> None:
        """Give back what nothing refers to any more."""
        gc.collect()
        # The heap keeps what was freed, and the limit on private memory would count it.
        _LIBC.malloc_trim(0)

    def allocated_bytes(self) -> int:
        """Return the bytes of every tensor storage that Python can reach."""
        # torch counts no allocations on the CPU. Views share a storage, which counts once.
        storages = {}
        for item in gc.get_objects():
            # Not isinstance: it would wake the lazy modules among the objects.
            if issubclass(type(item), torch.Tensor) and not issubclass(type(item), DTensor):
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def reset_peak(self) -> None:
        """Start a new peak: what is not a tensor by now is not this trial's either."""
        self._memory = Memory(self.allocated_bytes(), "load")
        self._failed_at_limit = False
        self._limit()

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Follow every allocation while the context is open."""
        before = self.allocated_bytes()
        watch = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        watch.start()
        try:
            yield
        except BaseException:
            # Asked now: the limit is lifted below, and set anew for what is there afterwards.
            self._failed_at_limit = _is_at_limit()
            raise
        finally:
            # What the profiler takes to sum up is not the training's.
            if self._budget is not None:
                _limit_data(resource.RLIM_INFINITY)
            try:
                watch.stop()
                highest, stage = _highest_total(watch)
                if before + highest > self._memory.peak_allocated_bytes:
                    self._memory = Memory(before + highest, stage)
                del watch
            finally:
                self._limit()

    def enter(self, stage: Stage) -> None:
        """Let another stage begin: a mark among the profiler's events."""
        with record_function(_MARK + stage):
            pass

    def _limit(self) -> None:
        """Let the process hold the budget's worth of tensors on top of what is not a tensor."""
        if self._budget is not None:
            others = _bytes_of("VmData") - self.allocated_bytes()
            _limit_data(others + self._budget + _NET_BYTES)

    def memory(self) -> Memory:
        """Return the peak since `reset_peak`."""
        return self._memory

    def ran_out(self, error: BaseException) -> bool:
        """Whether memory ran out: at the limit, libraries fail in ways of their own."""
        if is_host_out_of_memory(error):
            return True
        return self._budget is not None and (self._failed_at_limit or _is_at_limit())


def _is_at_limit() -> bool:
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    is_limited = limit != resource.RLIM_INFINITY
    return is_limited and _bytes_of("VmData") + _NEXT_TO_NOTHING_BYTES > limit


def _highest_total(watch: profile) -> tuple[int, Stage]:
    """Return the highest running total of allocated minus freed bytes, and the stage it was in."""
    results: Any = watch.profiler and watch.profiler.kineto_results
    if not results:
        return 0, "load"
    total = highest = 0
    stage = highest_stage = "load"
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        name = event.name()
        if name.startswith(_MARK):
            stage = name.removeprefix(_MARK)
        elif name == "[memory]":
            total += event.nbytes()
            if total > highest:
                highest = total
                highest_stage = stage
    return highest, cast(Stage, highest_stage)


def _limit_data(soft: int) -> None:
    """Limit this process's private memory, where the user's limit (`ulimit -d`) is no lower."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # Who is not root may not raise the hard one.
    if soft == resource.RLIM_INFINITY:
        soft = hard
    elif hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _bytes_of(kind: str) -> int:
    """Return what the kernel counts of this process under a name (Linux): ``VmData`` is what
    `RLIMIT_DATA` limits."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    values = dict(line.split(":", maxsplit=1) for line in status.splitlines())
    return int(values[kind].split()[0]) * 1024


def bytes_beyond(reserved_bytes: int, room: int) -> int:
    """Return how much of what was reserved a GPU with so much room cannot have held itself."""
    beyond = reserved_bytes - room
    if beyond <= _SPILL_SLACK_BYTES:
        return 0
    return beyond


DEVICE_TYPES: Mapping[str, type[CudaDevice] | type[CpuDevice]] = {
    "cuda": CudaDevice,
    "cpu": CpuDevice,
}
"""By torch's names, as `search_spaces.kinds.DEVICES` has them."""


def open_device(name: str) -> Device:
    """Return the device that torch calls ``cuda`` or ``cpu``."""
    return DEVICE_TYPES[name]()
