"""The fingerprint of the machine and the libraries that a run of a study used.

Versions are read from package metadata: nothing here imports torch, or asks a driver. What cannot
be read, or was not told, is null.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.kinds import DeviceName
from qlora_sweep.search_spaces.redaction import redacted

PACKAGES = (
    "qlora-sweep",
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "liger-kernel",
    "flash-linear-attention",
    "trl",
    "datasets",
    "triton",
    "optuna",
)


OF_GPU = ("gpu", "driver", "cuda_driver", "gpu_memory_bytes", "power_limit_watts")
"""Its product name, its driver's version, the newest CUDA that this supports, the memory that it
reports, and the power limit, which decides the clocks, and so the speed."""


def fingerprint(*, device: DeviceName, **of_gpu: str | float | None) -> dict[str, Any]:
    """Return plain JSON values.

    Keys: ``device``, those of `OF_GPU`, ``python``, ``os``, ``cpu``, ``cores``, ``commit`` and
    ``versions`` (by package).

    Args:
        device: what trials run on.
        of_gpu: what is known of the GPU that runs them, by the keys of `OF_GPU`.
    """
    found: dict[str, Any] = {
        "device": device,
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": _commit(Path(__file__).resolve().parent.parent),
        "versions": {name: _version(name) for name in PACKAGES},
    }
    for key in OF_GPU:
        found[key] = of_gpu.get(key)
    # What drivers and systems call themselves is anybody's text.
    return {key: redacted(value) for key, value in found.items()}


def _cpu() -> str:
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if found := re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def _commit(root: Path) -> str | None:
    """Return the commit, with ``-dirty`` where files differ; None where ``root`` is no checkout."""
    if (root / ".git").exists():
        describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        command = ["git", "-C", str(root), *describe]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
            return done.stdout.strip()
    return None


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
