"""What an exception of a training means: memory ran out, a kernel does not fit, or neither."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import Outcome

DETAIL_LENGTH = 600

_GPU_MEMORY = re.compile(
    r"CUDA out of memory"
    r"|CUDA (?:driver )?error: out of memory"
    r"|cuda runtime error \(2\)"
    r"|Triton Error \[CUDA\]: out of memory"
    r"|(?:CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
)
"""The GPU's own memory. `CUBLAS_STATUS_NOT_INITIALIZED` is not among them: a GPU without memory
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
"""Shared memory, registers or threads of one block: more of the GPU's memory would not help."""
_SOURCES = {
    "liger_kernel": "kernels",
    "inductor": "compile",
    "_dynamo": "compile",
    "flash_attn": "attention",
    "attention": "attention",
}
"""The setting that brings a kernel, by what is in the names of the files that call it."""
_REQUESTED = re.compile(r"(?:Tried to allocate|tried to allocate) ([\d.]+) ?(bytes|KiB|MiB|GiB)?")
_UNITS = {None: 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class TrialEnded(Exception):  # noqa: N818 - the end of a trial may be an answer
    """The trial is over before it was measured."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.verdict)
        self.outcome = outcome


def is_gpu_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the GPU's memory ran out, and not the host's."""
    if lacks_kernel_resources(error):
        return False
    for cause in _causes(error):
        if _HOST_ALLOCATOR in str(cause):
            continue
        if isinstance(cause, torch.OutOfMemoryError):
            return True
        if isinstance(cause, RuntimeError) and _GPU_MEMORY.search(str(cause)):
            return True
    return False


def is_host_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the memory of the process ran out."""
    for cause in _causes(error):
        if isinstance(cause, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(cause, RuntimeError | OSError) and _HOST_MEMORY.search(str(cause)):
            return True
    return False


def lacks_kernel_resources(error: BaseException) -> bool:
    """Whether a kernel asks for more shared memory or registers than a block of this GPU has.

    Triton raises `OutOfResources`; inductor wraps it in its own exceptions and quotes it; a launch
    that asks for too many registers is the driver's error. None of them has to do with how much
    memory is free, so no larger configuration follows from it.
    """
    return any(
        type(cause).__name__ == "OutOfResources" or _KERNEL_RESOURCES.search(str(cause)) is not None
        for cause in _causes(error)
    )


def setting_at_fault(error: BaseException, config: TrialConfig) -> str | None:
    """Return the setting whose layers do not compile, or that brought a kernel that does not fit,
    by the code it was called from; None where an exception that is not of memory means neither."""
    if not lacks_kernel_resources(error):
        # Dynamo also raises what the traced code raised, and then names the lines it was tracing.
        is_dynamos_own = isinstance(error, torch._dynamo.exc.TorchDynamoException)
        is_compilers = is_dynamos_own or "from user code:" in str(error)
        if config.compile and is_compilers:
            return "compile"
        return None
    # What is kept from being compiled passes through dynamo's files too.
    sources = [
        (part, name) for part, name in _SOURCES.items() if name != "compile" or config.compile
    ]
    for cause in _causes(error):
        # From where it was raised outwards.
        for frame, _ in reversed(list(traceback.walk_tb(cause.__traceback__))):
            for part, setting in sources:
                if part in frame.f_code.co_filename:
                    return setting
    if config.compile:
        return "compile"
    if config.kernels_kind.fuses_loss:
        return "kernels"
    return "attention"


def requested_bytes(error: BaseException) -> int | None:
    """Return the size of the allocation that failed, where the message tells it."""
    match = _REQUESTED.search(str(error))
    if match is None:
        return None
    return int(float(match[1]) * _UNITS[match[2]])


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from; not what happened to be handled just then."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__
