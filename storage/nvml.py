"""Owns asking NVML: a session, the card that CUDA would call 0, figures that a driver may refuse.

Knows nothing of what the figures are for. ``nvml`` is pynvml everywhere; tests hand in another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pynvml


@contextmanager
def session(nvml: Any = pynvml) -> Iterator[bool]:
    """Open NVML; yields whether there is one."""
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        ask(nvml.nvmlShutdown)


def first_visible(nvml: Any = pynvml) -> Any:
    """Return the handle of the first device that ``CUDA_VISIBLE_DEVICES`` leaves visible; None
    where there is none.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    if first.isdigit():
        return ask(nvml.nvmlDeviceGetHandleByIndex, int(first))
    return ask(nvml.nvmlDeviceGetHandleByUUID, first)


def ask(question: Any, *arguments: Any) -> Any:
    """Return NVML's answer; None where this card's driver does not give it.

    What is refused differs by card: one whose memory is the host's has no memory figures, a slice
    of a card no clocks, a container no processes. One refusal says nothing of the others.
    """
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


def driver_version(nvml: Any = pynvml) -> str | None:
    """Return the driver's version."""
    version = ask(nvml.nvmlSystemGetDriverVersion)
    return None if version is None else str(version)


def cuda_version(nvml: Any = pynvml) -> str | None:
    """Return the newest CUDA version that the driver supports, as in ``12.8``."""
    version = ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
    return None if version is None else f"{version // 1000}.{version % 1000 // 10}"
