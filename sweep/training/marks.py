"""Owns marks in what a device does: a mark is passed when all that was queued before it is done.

A card works behind the host that launches its kernels. Timed by the host, a step would have to be
waited for, and the card would idle while the host begins the next one; marks are read when they
have long been passed. Knows nothing of steps.
"""

from __future__ import annotations

import time
from typing import Any, Protocol, Self

import torch


class Mark(Protocol):
    """A moment in what one device does."""

    def is_passed(self) -> bool:
        """Whether the device has done all that was queued before."""
        ...

    def wait(self) -> None:
        """Return once it is passed.

        Raises:
            RuntimeError: the device failed before.
        """
        ...

    def seconds_since(self, earlier: Self) -> float:
        """Seconds of the device between two marks that are passed."""
        ...


class CudaMark:
    """A mark in the current stream of the current card."""

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
        """See `Mark.seconds_since`: to half a microsecond."""
        return float(earlier._event.elapsed_time(self._event)) / 1000


class CpuMark:
    """A mark on the CPU, which is never behind."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def is_passed(self) -> bool:
        """See `Mark.is_passed`."""
        return True

    def wait(self) -> None:
        """See `Mark.wait`."""

    def seconds_since(self, earlier: Self) -> float:
        """See `Mark.seconds_since`."""
        return self._seconds - earlier._seconds
