"""Owns the fingerprint of the machine and the libraries that a run of a study used.

Versions are read from package metadata: nothing here imports torch or touches CUDA. What cannot be
read is null.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pynvml

from storage.nvml import ask, cuda_version, driver_version, first_visible, session

PACKAGES = (
    "qlora-sweep",
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "liger-kernel",
    "triton",
    "optuna",
)


def fingerprint(*, device: Literal["cuda", "cpu"], nvml: Any = pynvml) -> dict[str, Any]:
    """Return plain JSON values.

    Keys: ``device``, ``gpu``, ``driver``, ``cuda_driver``, ``python``, ``os``, ``cpu``, ``cores``,
    ``commit`` and ``versions`` (by package).

    Args:
        device: what trials run on; the GPU's entries are null for ``cpu``.
        nvml: what pynvml is.
    """
    return {
        "device": device,
        **(_gpu(nvml) if device == "cuda" else _NO_GPU),
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": _commit(Path(__file__).resolve().parent.parent),
        "versions": {name: _version(name) for name in PACKAGES},
    }


_NO_GPU: dict[str, str | None] = {"gpu": None, "driver": None, "cuda_driver": None}


def _gpu(nvml: Any) -> dict[str, str | None]:
    """Return what the driver says of the card that CUDA would call 0; each figure for itself."""
    with session(nvml) as is_there:
        if not is_there:
            return _NO_GPU
        handle = first_visible(nvml)
        name = None if handle is None else ask(nvml.nvmlDeviceGetName, handle)
        return {
            "gpu": None if name is None else str(name),
            "driver": driver_version(nvml),
            "cuda_driver": cuda_version(nvml),
        }


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit(root: Path) -> str | None:
    """Return the commit, with ``-dirty`` where files differ; None where ``root`` is no checkout."""
    if not (root / ".git").exists():
        return None
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
