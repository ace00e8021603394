"""Owns what an exception of a training means: memory ran out, a kernel does not fit this card, or
neither.

Reads exceptions alone. Knows nothing of devices, trials or counters.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

import torch

from search_spaces.config import TrialConfig

_CARD_MEMORY = re.compile(
    r"CUDA out of memory"
    r"|CUDA (?:driver )?error: out of memory"
    r"|cuda runtime error \(2\)"
    r"|Triton Error \[CUDA\]: out of memory"
    r"|(?:CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
)
"""The card's own memory. `CUBLAS_STATUS_NOT_INITIALIZED` is not among them: a card without memory
says so as well, but so does a broken driver, and a verdict that hides larger configurations needs
to be sure."""
_HOST_MEMORY = re.compile(
    r"can't allocate memory|Cannot allocate memory|std::bad_alloc"
    r"|DefaultCPUAllocator: not enough memory"
)
_HOST_ALLOCATOR = "DefaultCPUAllocator"
_KERNEL_RESOURCES = re.compile(
    r"\bOutOfResources\b|out of resource: |too many resources requested for launch"
)
"""Shared memory, registers or threads of one block: more of the card's memory would not help."""
_REQUESTED = re.compile(r"(?:Tried to allocate|tried to allocate) ([\d.]+) ?(bytes|KiB|MiB|GiB)?")
_UNITS = {None: 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_card_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the card's memory ran out, and not the host's."""
    if lacks_kernel_resources(error):
        return False
    return any(_says_card_memory(cause) for cause in _causes(error))


def is_host_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the memory of the process ran out."""
    return any(
        isinstance(cause, torch.OutOfMemoryError | MemoryError)
        or (
            isinstance(cause, RuntimeError | OSError)
            and _HOST_MEMORY.search(str(cause)) is not None
        )
        for cause in _causes(error)
    )


def lacks_kernel_resources(error: BaseException) -> bool:
    """Whether a kernel asks for more shared memory or registers than a block of this card has.

    Triton raises `OutOfResources`; inductor wraps it in its own exceptions and quotes it; a launch
    that asks for too many registers is the driver's error. None of them has to do with how much
    memory is free, so no larger configuration follows from it.
    """
    return any(
        type(cause).__name__ == "OutOfResources" or _KERNEL_RESOURCES.search(str(cause)) is not None
        for cause in _causes(error)
    )


def knob_of_kernel(error: BaseException, config: TrialConfig) -> str:
    """Return the knob that brought the kernel that failed: by the code that it was called from."""
    for source in _sources(error):
        if "liger_kernel" in source:
            return "kernels"
        if "inductor" in source or "_dynamo" in source:
            return "compile"
        if "flash_attn" in source or "attention" in source:
            return "attention"
    if config.compile:
        return "compile"
    return "attention" if config.kernels == "hf" else "kernels"


def requested_bytes(error: BaseException) -> int | None:
    """Return the size of the allocation that failed, where the message tells it."""
    match = _REQUESTED.search(str(error))
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def _says_card_memory(error: BaseException) -> bool:
    text = str(error)
    if _HOST_ALLOCATOR in text:
        return False
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _CARD_MEMORY.search(text) is not None
    )


def _sources(error: BaseException) -> Iterator[str]:
    """Yield the files that an exception went through, from where it was raised outwards."""
    for cause in _causes(error):
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        yield from (frame.f_code.co_filename for frame in reversed(frames))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from; not what happened to be handled just then."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__
