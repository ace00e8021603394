"""The host's memory, as far as a GPU reads it and writes to it. An exported script carries this
file beside it: it needs torch alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import torch

SLOTS = 2
"""Places on a GPU for what comes from the host: one is read while the other is filled."""
ALIGNMENT = 512
"""Bytes that each part begins at a multiple of."""
_KEPT_BYTES = 2**30
"""Of the host's memory, left to all else."""


class HostMemoryError(MemoryError):
    """The host has too little memory, or may pin too little of it."""


def check_apart(device: torch.device) -> None:
    """See that a device has memory beside the host's.

    Raises:
        HostMemoryError: it has not.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if getattr(properties, "is_integrated", False):
            raise HostMemoryError("this GPU shares the host's memory, so that nothing is saved")


def aligned(size: int) -> int:
    """Return the bytes that a part of so many takes among those of a layer."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def available_bytes() -> int:
    """Return what the host, or the container, has left to give without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = dict(line.split(":") for line in lines)
    available = int(sizes["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        counts = (group / "memory.stat").read_text(encoding="ascii").split()
    except OSError:
        return available
    if limit == "max":
        return available
    # Of files that were read, as a model's, which the kernel lets go of where memory is wanted.
    files = int(dict(zip(counts[::2], counts[1::2], strict=True)).get("inactive_file", 0))
    return min(available, int(limit) - used + files)


def check_room(size: int, *, what: str) -> None:
    """See that so many bytes fit the host's memory.

    Args:
        size: bytes.
        what: is to lie there, in words.

    Raises:
        HostMemoryError: they do not.
    """
    available = available_bytes()
    if size + _KEPT_BYTES > available:
        raise HostMemoryError(
            f"{what} on the host need {size / 2**30:.2f} GiB more of its memory, of which "
            f"{available / 2**30:.2f} GiB are left"
        )


def pinned(size: int, device: torch.device, *, what: str) -> torch.Tensor:
    """Return bytes (size,) on the host, pinned where a GPU reads them.

    torch's own allocator of pinned memory rounds each size up to a power of two.

    Args:
        size: bytes.
        device: what reads them.
        what: is to lie there, in words, for an error.

    Raises:
        HostMemoryError: there is too little.
    """
    check_room(size, what=what)
    try:
        memory = torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:
        raise HostMemoryError(f"no {size:,} bytes on the host: {error}") from error
    if device.type == "cuda":
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
        if int(code) != 0:
            # The next kernel would be told of this error.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            raise HostMemoryError(f"the host pins no {size:,} bytes more (CUDA error {int(code)})")
    return memory


def unpin(memory: Iterable[torch.Tensor], device: torch.device) -> None:
    """Let the host do as it likes with what was pinned for a device, once nothing reads it."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    for each in memory:
        if each.numel() > 0:
            torch.cuda.cudart().cudaHostUnregister(each.data_ptr())


class Slots:
    """Places on a device for what comes from the host, and the stream that copies.

    Args:
        device: where the slots are; a CPU copies at once.
        count: how many there are.
        size: bytes of each.

    Attributes:
        memory: of each slot (bytes,).
    """

    def __init__(self, device: torch.device, *, count: int = SLOTS, size: int = 0) -> None:
        self.device = device
        self.memory = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self._stream: torch.cuda.Stream | None = None
        self._arrived: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._arrived = [torch.cuda.Event() for _ in range(count)]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy, once all is done that is launched by now."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def fill(self, slot: int, source: torch.Tensor) -> None:
        """Begin to copy bytes into a slot that nothing reads which is yet to be launched."""
        self.copy(source, self.memory[slot][: source.numel()])
        if self._stream is not None:
            self._arrived[slot].record(self._stream)

    def await_slot(self, slot: int) -> None:
        """Have what is launched from now on wait for what fills a slot."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived[slot])

    def await_all(self) -> None:
        """Have what is launched from now on wait for every copy."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
