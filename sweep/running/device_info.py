"""Owns what is known of the card in this machine: product, memory, driver, who else uses it.

NVML is asked first; what it refuses, CUDA's driver library answers. Knows nothing of the catalogue
or of studies. Nothing here makes a CUDA context: that would take memory that the trials need.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sweep.nvml import NVML, CardProcess, NvmlCard, first_visible_card

_INTEGRATED, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 18, 75, 76
"""`CUdevice_attribute`s, as cuda.h numbers them."""
_NAME_BYTES = 256


@dataclass(frozen=True)
class Card:
    """The card that CUDA would call 0, at one moment; None is what no driver told."""

    product: str
    memory_bytes: int
    free_bytes: int | None
    compute_capability: tuple[int, int] | None
    driver: str | None
    cuda: str | None
    """Newest CUDA version that the driver supports."""
    processes: tuple[CardProcess, ...] = ()
    shares_host_memory: bool = False
    """Whether host and card have one memory, which everything on the machine uses."""


class CudaDriver(Protocol):
    """What CUDA's own library says of its first device."""

    def product(self) -> str | None:
        """Return its name."""
        ...

    def memory_bytes(self) -> int | None:
        """Return all its memory."""
        ...

    def compute_capability(self) -> tuple[int, int] | None:
        """Return its compute capability."""
        ...

    def is_integrated(self) -> bool:
        """Whether its memory is the host's."""
        ...


class LibCuda:
    """`CudaDriver` through libcuda, which needs no context for what is asked here."""

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        self._device = device

    def product(self) -> str | None:
        """See `CudaDriver.product`."""
        name = ctypes.create_string_buffer(_NAME_BYTES)
        if self._library.cuDeviceGetName(name, _NAME_BYTES, self._device) != 0:
            return None
        return name.value.decode("utf-8", errors="replace")

    def memory_bytes(self) -> int | None:
        """See `CudaDriver.memory_bytes`."""
        total = ctypes.c_size_t()
        if self._library.cuDeviceTotalMem_v2(ctypes.byref(total), self._device) != 0:
            return None
        return total.value

    def compute_capability(self) -> tuple[int, int] | None:
        """See `CudaDriver.compute_capability`."""
        major, minor = self._attribute(_CAPABILITY_MAJOR), self._attribute(_CAPABILITY_MINOR)
        return None if major is None or minor is None else (major, minor)

    def is_integrated(self) -> bool:
        """See `CudaDriver.is_integrated`."""
        return bool(self._attribute(_INTEGRATED))

    def _attribute(self, which: int) -> int | None:
        value = ctypes.c_int()
        found = self._library.cuDeviceGetAttribute(ctypes.byref(value), which, self._device)
        return value.value if found == 0 else None


def open_cuda() -> CudaDriver | None:
    """Return CUDA's driver with its first device; None where there is neither."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    if library.cuInit(0) != 0 or library.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    return LibCuda(library, device.value)


def read_card(
    *, nvml: Any = NVML, open_cuda: Callable[[], CudaDriver | None] = open_cuda
) -> Card | None:
    """Return the card in this machine; None where there is none, or no driver for it.

    Args:
        nvml: what pynvml is; tests hand in another.
        open_cuda: opens CUDA's driver; called only for what NVML does not tell.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return None
    with first_visible_card(nvml) as card:
        known = None if card is None else _told_by_nvml(card)
        if known is not None and known.memory_bytes and known.compute_capability and known.product:
            return known
        return _completed(known or _UNKNOWN, open_cuda())


_UNKNOWN = Card(
    product="", memory_bytes=0, free_bytes=None, compute_capability=None, driver=None, cuda=None
)


def _told_by_nvml(card: NvmlCard) -> Card:
    memory = card.memory()
    return Card(
        product=card.product() or "",
        memory_bytes=memory.total if memory else 0,
        free_bytes=memory.free if memory and memory.total else None,
        compute_capability=card.compute_capability(),
        driver=card.driver_version(),
        cuda=card.cuda_version(),
        processes=card.processes(),
    )


def _completed(known: Card, cuda: CudaDriver | None) -> Card | None:
    """Return the card with what CUDA tells where NVML told nothing.

    Without memory in all there is no card: nothing can be planned for it.
    """
    product, total = known.product, known.memory_bytes
    capability, is_integrated = known.compute_capability, False
    if cuda is not None:
        product = product or cuda.product() or ""
        capability = capability or cuda.compute_capability()
        total = total or cuda.memory_bytes() or 0
        is_integrated = cuda.is_integrated()
    if not total:
        return None
    return replace(
        known,
        product=product or "NVIDIA GPU",
        memory_bytes=total,
        compute_capability=capability,
        shares_host_memory=is_integrated,
    )
