"""What an exception means; the messages are those of torch, cuBLAS, cuDNN, Triton and glibc."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from sweep.training.exceptions import (
    is_card_out_of_memory,
    is_host_out_of_memory,
    knob_at_fault,
    lacks_kernel_resources,
    requested_bytes,
)
from tests.sweep.training.tiny import tiny_config

SHARED_MEMORY = "out of resource: shared memory, Required: 147456, Hardware limit: 101376."


class OutOfResources(Exception):  # noqa: N818 - Triton's name
    """As triton.runtime.errors has it: the message is made by `__str__`."""

    def __str__(self) -> str:
        return f"{SHARED_MEMORY} Reducing block sizes or `num_stages` may help."


def wrapped(error: Exception) -> Exception:
    """Return what dynamo raises where the backend raised ``error``."""
    try:
        raise BackendCompilerFailed(lambda: None, error, None) from error
    except BackendCompilerFailed as outer:
        return outer


CARD = {
    "allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "runtime": RuntimeError("CUDA error: out of memory"),
    "driver": RuntimeError("CUDA driver error: out of memory"),
    "triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "dynamo": wrapped(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")),
    "inductor": RuntimeError("No valid triton configs. OutOfMemoryError: CUDA out of memory."),
}
HOST = {
    "python": MemoryError(),
    "torch": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "c++": RuntimeError("std::bad_alloc"),
    "fork": OSError(12, "Cannot allocate memory"),
}
KERNEL = {
    "triton": OutOfResources(),
    "dynamo": wrapped(OutOfResources()),
    "inductor": RuntimeError(f"No valid triton configs. OutOfResources: {SHARED_MEMORY}"),
    "launch": RuntimeError("CUDA error: too many resources requested for launch"),
    "registers": RuntimeError("Triton Error [CUDA]: too many resources requested for launch"),
}
NEITHER = {
    "illegal": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "no handle": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED"),
    "shared memory": RuntimeError("DataLoader worker is killed: out of shared memory"),
    "model": ValueError("Unrecognized model in out of memory lane"),
    "disk": OSError(28, "No space left on device"),
}
ALL = {"card": CARD, "host": HOST, "kernel": KERNEL, "neither": NEITHER}


@pytest.mark.parametrize(
    ("kind", "error"),
    [(kind, error) for kind, errors in ALL.items() for error in errors.values()],
    ids=[f"{kind}-{name}" for kind, errors in ALL.items() for name in errors],
)
def test_every_failure_is_of_one_kind(kind: str, error: Exception) -> None:
    assert is_card_out_of_memory(error) is (kind == "card")
    assert lacks_kernel_resources(error) is (kind == "kernel")
    # A process on the CPU has no GPU, so what a GPU says is never asked about there.
    if kind != "card":
        assert is_host_out_of_memory(error) is (kind == "host")


def test_an_error_that_was_handled_in_passing_is_not_the_cause() -> None:
    error = ValueError("the next thing went wrong")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert not is_card_out_of_memory(error)


@pytest.mark.parametrize(
    ("source", "knobs", "knob"),
    [
        ("liger_kernel/ops/rope.py", {"kernels": "liger", "compile": True}, "kernels"),
        ("torch/_inductor/runtime/triton_heuristics.py", {"compile": True}, "compile"),
        ("torchinductor_root/ab/cab.py", {"compile": True}, "compile"),
        ("flash_attn/flash_attn_interface.py", {"kernels": "liger"}, "attention"),
        ("transformers/integrations/flex_attention.py", {}, "attention"),
        ("somewhere.py", {"kernels": "liger"}, "kernels"),
        ("somewhere.py", {"compile": True}, "compile"),
        ("somewhere.py", {}, "attention"),
    ],
)
def test_a_kernel_that_does_not_fit_is_laid_to_the_knob_that_brought_it(
    source: str, knobs: dict[str, object], knob: str
) -> None:
    with pytest.raises(OutOfResources) as raised:
        exec(
            compile("raise error", str(Path("/lib") / source), "exec"), {"error": OutOfResources()}
        )
    assert knob_at_fault(raised.value, tiny_config(**knobs)) == knob


def test_the_size_that_failed_is_read_from_the_message() -> None:
    assert requested_bytes(CARD["allocator"]) == 2 * 2**30
    assert requested_bytes(HOST["torch"]) == 2**31
    assert requested_bytes(CARD["cublas"]) is None
