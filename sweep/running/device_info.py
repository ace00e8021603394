"""The GPUs in this machine: what each is, who uses it, and which a study runs on (`--devices`).

NVML is asked first; what it refuses, CUDA's driver library answers. Nothing here makes a CUDA
context: that would take memory that the trials need.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.gpus import GpuSpec, match_product
from qlora_sweep.storage.environment import fingerprint
from qlora_sweep.sweep.nvml import NVML, GpuProcess, NvmlDevice, visible_gpus

# `CUdevice_attribute`s, as cuda.h numbers them.
_INTEGRATED = 18
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_NAME_BYTES = 256
ALL = "all"
_FREE_BYTES_MISSING = 2**30
"""What an unused GPU may be short of: the driver's own part of it."""
_FREE_SHARE_MISSING = 0.01
"""What of that grows with the GPU."""


@dataclass(frozen=True)
class GpuInfo:
    """A GPU at one moment; None is what no driver told."""

    product: str
    memory_bytes: int
    free_bytes: int | None
    compute_capability: tuple[int, int] | None
    driver: str | None
    cuda: str | None
    """Newest CUDA version that the driver supports."""
    processes: tuple[GpuProcess, ...] = ()
    shares_host_memory: bool = False
    """Whether host and GPU have one memory, which everything on the machine uses."""
    uuid: str | None = None
    """What CUDA knows it by, whatever else is visible."""
    power_limit_watts: float | None = None
    """What the driver enforces."""

    @property
    def known(self) -> GpuSpec | None:
        """The catalogue's GPU that it is; None where it has none of this name and memory."""
        return match_product(self.product, self.memory_bytes)

    def spec(self) -> GpuSpec:
        """Return the catalogue's GPU that it is.

        Raises:
            InputError: the catalogue does not have it.
        """
        known = self.known
        if known is None:
            raise InputError(
                f"the catalogue does not have the {self.size_and_product} that is here: name a "
                "GPU with --gpu (`sweep gpus`)"
            )
        return known

    def is_like(self, other: GpuInfo) -> bool:
        """Whether it is a GPU of the same kind, of which one study may have several."""
        return self.product == other.product and self.known == other.known

    @property
    def size_and_product(self) -> str:
        """What it is called, with its memory: drivers call GPUs of several sizes alike."""
        return f"{self.product} with {units.gib(self.memory_bytes)}"


def environment_with(gpu: GpuInfo | None) -> dict[str, Any]:
    """Return the fingerprint of this machine as the GPU's host; None: its CPU trains."""
    if gpu is None:
        return fingerprint(device="cpu")
    return fingerprint(
        device="cuda",
        gpu=gpu.product,
        driver=gpu.driver,
        cuda_driver=gpu.cuda,
        gpu_memory_bytes=gpu.memory_bytes,
        power_limit_watts=gpu.power_limit_watts,
    )


_UNKNOWN = GpuInfo(
    product="", memory_bytes=0, free_bytes=None, compute_capability=None, driver=None, cuda=None
)


def ask_cuda() -> GpuInfo | None:
    """Return what CUDA's own library says of its first device; None where there is neither."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    total = ctypes.c_size_t()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    if library.cuInit(0) != 0 or library.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None

    def attribute(which: int) -> int | None:
        value = ctypes.c_int()
        if library.cuDeviceGetAttribute(ctypes.byref(value), which, device) != 0:
            return None
        return value.value

    # What fails leaves its buffer as it is: no name, no bytes.
    library.cuDeviceGetName(name, _NAME_BYTES, device)
    library.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    capability = None
    major = attribute(_CAPABILITY_MAJOR)
    minor = attribute(_CAPABILITY_MINOR)
    if major is not None and minor is not None:
        capability = (major, minor)
    return replace(
        _UNKNOWN,
        product=name.value.decode("utf-8", errors="replace"),
        memory_bytes=total.value,
        compute_capability=capability,
        shares_host_memory=bool(attribute(_INTEGRATED)),
    )


def read_gpu(
    *, nvml: Any = NVML, ask_cuda: Callable[[], GpuInfo | None] = ask_cuda
) -> GpuInfo | None:
    """Return the GPU that CUDA would call 0; None where there is none, or no driver for it."""
    return next(iter(read_gpus(nvml=nvml, ask_cuda=ask_cuda, most=1)), None)


def read_gpus(
    *,
    nvml: Any = NVML,
    ask_cuda: Callable[[], GpuInfo | None] = ask_cuda,
    most: int | None = None,
) -> tuple[GpuInfo, ...]:
    """Return every GPU that CUDA would see, in its order: what CUDA calls 0 comes first.

    Without memory in all there is no GPU: nothing can be planned for it.

    Args:
        nvml: what pynvml is; tests hand in another.
        ask_cuda: asks CUDA's own library of the first GPU what NVML does not tell.
        most: how many are looked at; None for all of them.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return ()
    with visible_gpus(nvml, most=most) as gpus:
        first, *others = list(map(_as_nvml_says, gpus)) or [_UNKNOWN]
    if not (first.product and first.memory_bytes and first.compute_capability):
        cuda = ask_cuda() or _UNKNOWN
        first = replace(
            first,
            product=first.product or cuda.product or "NVIDIA GPU",
            memory_bytes=first.memory_bytes or cuda.memory_bytes,
            compute_capability=first.compute_capability or cuda.compute_capability,
            shares_host_memory=cuda.shares_host_memory,
        )
    # One of which nothing is known would shift the numbers of those behind it.
    return tuple(takewhile(lambda gpu: gpu.memory_bytes > 0, (first, *others)))


def _as_nvml_says(device: NvmlDevice) -> GpuInfo:
    driver, cuda = device.versions()
    capability = device.ask("nvmlDeviceGetCudaComputeCapability")
    milliwatts = device.ask("nvmlDeviceGetEnforcedPowerLimit")
    gpu = replace(
        _UNKNOWN,
        product=device.ask("nvmlDeviceGetName") or "",
        compute_capability=capability and tuple(capability),
        driver=driver,
        cuda=cuda,
        processes=device.processes(),
        uuid=device.ask("nvmlDeviceGetUUID"),
        power_limit_watts=milliwatts and milliwatts / 1000.0,
    )
    memory = device.memory()
    if memory is None or not memory.total:
        return gpu
    return replace(gpu, memory_bytes=memory.total, free_bytes=memory.free)


@dataclass(frozen=True)
class ChosenGpu:
    """One GPU that a study runs on."""

    index: int
    """Among those that CUDA would see."""
    info: GpuInfo

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"GPU {self.index}"

    @property
    def cuda_name(self) -> str:
        """What ``CUDA_VISIBLE_DEVICES`` calls it, whatever that is now."""
        return self.info.uuid or str(self.index)


def gpus_for(size: int, gpus: Sequence[GpuInfo]) -> tuple[ChosenGpu, ...]:
    """Return the first GPUs of a machine, as many as one trial trains on together.

    Raises as `choose_gpus` does.
    """
    try:
        return choose_gpus(str(size), gpus)
    except (InputError, EnvironmentFault) as error:
        raise type(error)(f"data_parallel {size} needs {size} GPUs for a trial: {error}") from None


def teams_of(gpus: Sequence[ChosenGpu], *, size: int) -> list[tuple[ChosenGpu, ...]]:
    """Return GPUs in groups of so many, which train one configuration at a time; what is left over
    trains none.
    """
    whole = len(gpus) - len(gpus) % size
    return [tuple(gpus[first : first + size]) for first in range(0, whole, size)]


def choose_gpus(typed: str, gpus: Sequence[GpuInfo]) -> tuple[ChosenGpu, ...]:
    """Return the GPUs that ``--devices`` names: ``all``, how many, or which (``0,2``, or ``2,``).

    Args:
        typed: the option's value.
        GPUs: every GPU of the machine, as CUDA counts them.

    Raises:
        InputError: it names none, or more than there are, or GPUs of two products, whose speeds
            are not one study's.
        EnvironmentFault: there is no GPU, or another process has memory on one of them.
    """
    wanted = _indices(typed, len(gpus))
    if not gpus:
        raise EnvironmentFault(
            f"--devices {typed}: this machine shows no NVIDIA GPU; `sweep doctor` says why"
        )
    chosen = tuple(ChosenGpu(index, gpus[index]) for index in wanted)
    first = chosen[0]
    named: dict[str, ChosenGpu] = {}
    for gpu in chosen:
        other = named.setdefault(gpu.cuda_name, gpu)
        if other is not gpu:
            raise InputError(
                f"--devices {typed}: {other.name} and {gpu.name} are one and the same: "
                "CUDA_VISIBLE_DEVICES names it twice"
            )
        if not gpu.info.is_like(first.info):
            alike = [at for at, c in enumerate(gpus) if c.is_like(first.info)]
            raise InputError(
                f"--devices {typed}: {first.name} is a {first.info.size_and_product} and "
                f"{gpu.name} a {gpu.info.size_and_product}, which do not compare in one study: "
                f"choose GPUs of one product, as --devices {_listed(alike)} does"
            )
    free = [gpu.index for gpu in chosen if _in_use(gpu.info) is None]
    for gpu in chosen:
        words = _in_use(gpu.info)
        if words is not None:
            message = f"--devices {typed}: {gpu.name} is in use: {words}: wait until it is free"
            if free:
                message += f", or leave it out with --devices {_listed(free)}"
            raise EnvironmentFault(message)
    return chosen


def check_spelling(typed: str) -> None:
    """Raise `InputError` where ``--devices`` names none, whatever GPUs a machine has."""
    _indices(typed, 0)


def _indices(typed: str, count: int) -> list[int]:
    if typed == ALL:
        return list(range(count))
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*,?", typed):
        raise InputError(f"--devices {typed}: name all, how many (2), or which of them (0,2)")
    there_are = f"{count} GPUs, 0 to {count - 1}"
    if count == 1:
        there_are = "one GPU, 0"
    named = list(map(int, filter(None, typed.split(","))))
    if "," not in typed:
        if named == [0]:
            raise InputError("--devices 0: a study needs a GPU; GPU 0 alone is --devices 0,")
        if named[0] > count > 0:
            raise InputError(f"--devices {typed}: this machine has {there_are}")
        return list(range(min(named[0], count)))
    index, times = Counter(named).most_common(1)[0]
    if times > 1:
        raise InputError(f"--devices {typed}: GPU {index} is named twice")
    missing = [index for index in named if index >= count > 0]
    if missing:
        raise InputError(
            f"--devices {typed}: there is no GPU {missing[0]}; this machine has {there_are}"
        )
    if not count:
        return []
    return named


def _listed(indices: Sequence[int]) -> str:
    """Return GPUs as ``--devices`` takes them; a single number alone would be how many."""
    listed = ",".join(map(str, indices))
    if len(indices) == 1:
        listed += ","
    return listed


def _in_use(gpu: GpuInfo) -> str | None:
    """Return which process has memory on a GPU; None where none has."""
    if gpu.processes:
        first = gpu.processes[0]
        if first.used_bytes is None:
            return f"process {first.pid}"
        return f"process {first.pid} has {units.gib(first.used_bytes)} of it"
    if gpu.free_bytes is None or gpu.shares_host_memory:
        return None
    used = gpu.memory_bytes - gpu.free_bytes
    if used <= _FREE_BYTES_MISSING + _FREE_SHARE_MISSING * gpu.memory_bytes:
        return None
    return f"another process has {units.gib(used)} of it"
