"""The GPUs in this machine: product, memory, driver, who else uses them.

NVML is asked first; what it refuses, CUDA's driver library answers. Nothing here makes a CUDA
context: that would take memory that the trials need.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from storage.environment import fingerprint
from sweep.nvml import NVML, CardProcess, NvmlCard, first_visible_card, visible_cards

_INTEGRATED, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 18, 75, 76
"""`CUdevice_attribute`s, as cuda.h numbers them."""
_NAME_BYTES = 256


@dataclass(frozen=True)
class Card:
    """A card at one moment; None is what no driver told."""

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
    uuid: str | None = None
    """What CUDA knows it by, whatever else is visible."""


def environment_with(card: Card | None) -> dict[str, Any]:
    """Return the fingerprint of this machine as the card's host; None: its CPU trains."""
    if card is None:
        return fingerprint(device="cpu")
    return fingerprint(device="cuda", gpu=card.product, driver=card.driver, cuda_driver=card.cuda)


_UNKNOWN = Card(
    product="", memory_bytes=0, free_bytes=None, compute_capability=None, driver=None, cuda=None
)


def ask_cuda() -> Card | None:
    """Return what CUDA's own library says of its first device; None where there is neither."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name, total = (
        ctypes.c_int(),
        ctypes.create_string_buffer(_NAME_BYTES),
        ctypes.c_size_t(),
    )
    if library.cuInit(0) != 0 or library.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None

    def attribute(which: int) -> int | None:
        value = ctypes.c_int()
        error = library.cuDeviceGetAttribute(ctypes.byref(value), which, device)
        return value.value if error == 0 else None

    # What fails leaves its buffer as it is: no name, no bytes.
    library.cuDeviceGetName(name, _NAME_BYTES, device)
    library.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    major, minor = attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)
    return replace(
        _UNKNOWN,
        product=name.value.decode("utf-8", errors="replace"),
        memory_bytes=total.value,
        compute_capability=None if major is None or minor is None else (major, minor),
        shares_host_memory=bool(attribute(_INTEGRATED)),
    )


def read_card(*, nvml: Any = NVML, ask_cuda: Callable[[], Card | None] = ask_cuda) -> Card | None:
    """Return the card that CUDA would call 0; None where there is none, or no driver for it.

    Without memory in all there is no card: nothing can be planned for it.

    Args:
        nvml: what pynvml is; tests hand in another.
        ask_cuda: asks CUDA's own library; called only for what NVML does not tell.
    """
    if _is_hidden():
        return None
    with first_visible_card(nvml) as card:
        known = _UNKNOWN if card is None else _as_nvml_says(card)
    if known.product and known.memory_bytes and known.compute_capability:
        return known
    cuda = ask_cuda() or _UNKNOWN
    whole = replace(
        known,
        product=known.product or cuda.product or "NVIDIA GPU",
        memory_bytes=known.memory_bytes or cuda.memory_bytes,
        compute_capability=known.compute_capability or cuda.compute_capability,
        shares_host_memory=cuda.shares_host_memory,
    )
    return whole if whole.memory_bytes else None


def read_cards(
    *, nvml: Any = NVML, ask_cuda: Callable[[], Card | None] = ask_cuda
) -> tuple[Card, ...]:
    """Return every card that CUDA would see, in its order: what CUDA calls 0 comes first.

    Args:
        nvml: what pynvml is; tests hand in another.
        ask_cuda: asks CUDA's own library of the first card what NVML does not tell.
    """
    if _is_hidden():
        return ()
    with visible_cards(nvml) as cards:
        first, *others = [_as_nvml_says(card) for card in cards] or [_UNKNOWN]
    if not first.memory_bytes:
        whole = read_card(nvml=nvml, ask_cuda=ask_cuda)
        if whole is None:
            return ()
        first = whole
    # One of which nothing is known would shift the numbers of those behind it.
    return (first, *takewhile(lambda card: card.memory_bytes > 0, others))


def _is_hidden() -> bool:
    """Whether the environment hides every card from CUDA."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def _as_nvml_says(card: NvmlCard) -> Card:
    memory = card.memory()
    return Card(
        product=card.product() or "",
        memory_bytes=memory.total if memory else 0,
        free_bytes=memory.free if memory and memory.total else None,
        compute_capability=card.compute_capability(),
        driver=card.driver_version(),
        cuda=card.cuda_version(),
        processes=card.processes(),
        uuid=card.uuid(),
    )
