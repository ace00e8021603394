"""What an exception means; the messages are those of torch, cuBLAS, cuDNN, Triton and glibc."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lazy import lazily
from tests.sweep.training.tiny import tiny_config

torch = lazily("torch")
exceptions = lazily("sweep.training.exceptions")
SHARED_MEMORY = "out of resource: shared memory, Required: 147456, Hardware limit: 101376."
NO_CARD_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"
NO_HOST_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
)


class OutOfResources(Exception):  # noqa: N818 - Triton's name
    """As triton.runtime.errors has it: the message is made by `__str__`."""

    def __str__(self) -> str:
        return f"{SHARED_MEMORY} Reducing block sizes or `num_stages` may help."


def out_of_memory() -> Exception:
    error: Exception = torch.OutOfMemoryError(NO_CARD_MEMORY)
    return error


def in_passing() -> Exception:
    """An error that was handled is not the cause of the next."""
    error = ValueError("the next thing went wrong")
    error.__context__ = out_of_memory()
    return error


def wrapped(error: Exception) -> Exception:
    """Return what dynamo raises where the backend raised ``error``."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        raise BackendCompilerFailed(lambda: None, error, None) from error
    except BackendCompilerFailed as outer:
        return outer


CUDA = {
    "card": (
        "CUDA error: out of memory",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "No valid triton configs. OutOfMemoryError: CUDA out of memory.",
    ),
    "host": (NO_HOST_MEMORY, "std::bad_alloc"),
    "kernel": (
        f"No valid triton configs. OutOfResources: {SHARED_MEMORY}",
        "CUDA error: too many resources requested for launch",
        "Triton Error [CUDA]: too many resources requested for launch",
    ),
    "neither": (
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED",
        "DataLoader worker is killed: out of shared memory",
    ),
}
"""What a RuntimeError says, by its kind."""
OTHERS: list[tuple[str, Any]] = [
    ("card", out_of_memory),
    ("card", lambda: wrapped(out_of_memory())),
    ("host", MemoryError),
    ("host", lambda: OSError(12, "Cannot allocate memory")),
    ("kernel", OutOfResources),
    ("kernel", lambda: wrapped(OutOfResources())),
    ("neither", in_passing),
    ("neither", lambda: ValueError("Unrecognized model in out of memory lane")),
    ("neither", lambda: OSError(28, "No space left on device")),
]


@pytest.mark.parametrize(
    ("kind", "made"), [*((kind, said) for kind, words in CUDA.items() for said in words), *OTHERS]
)
def test_every_failure_is_of_one_kind(kind: str, made: Any) -> None:
    error = RuntimeError(made) if isinstance(made, str) else made()
    assert exceptions.is_card_out_of_memory(error) is (kind == "card")
    assert exceptions.lacks_kernel_resources(error) is (kind == "kernel")
    # A process on the CPU has no GPU, so what a GPU says is never asked about there.
    assert kind == "card" or exceptions.is_host_out_of_memory(error) is (kind == "host")


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
def test_a_kernel_that_does_not_fit_is_laid_to_the_setting_that_brought_it(
    source: str, knobs: dict[str, object], knob: str
) -> None:
    with pytest.raises(OutOfResources) as raised:
        exec(compile("raise error", f"/lib/{source}", "exec"), {"error": OutOfResources()})
    assert exceptions.knob_at_fault(raised.value, tiny_config(**knobs)) == knob


@pytest.mark.parametrize(
    ("words", "size"), [(NO_CARD_MEMORY, 2**31), (NO_HOST_MEMORY, 2**31), ("ALLOC_FAILED", None)]
)
def test_the_size_that_failed_is_read_from_the_message(words: str, size: int | None) -> None:
    assert exceptions.requested_bytes(RuntimeError(words)) == size
