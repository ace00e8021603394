"""What stands beside a result: the command, the GPU, its driver, the versions, the date."""

from __future__ import annotations

import datetime
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sweep.running.device_info import read_card

OUT_OF_TIME = 75
"""Exit status of a command of this directory that has rows left to measure (`EX_TEMPFAIL`)."""
LIBRARIES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "liger-kernel",
    "flash-attn",
)


def stamp() -> dict[str, Any]:
    """Return where, when and with what a command of this directory ran."""
    card = read_card()
    return {
        "command": " ".join(["python", *(_short(word) for word in sys.argv)]),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "card": None if card is None else card.product,
        "card_memory_bytes": None if card is None else card.memory_bytes,
        "driver": None if card is None else card.driver,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
    }


def _short(word: str) -> str:
    """Leave out where on this machine the project lies, and the results."""
    path = Path(word)
    root = Path(__file__).parents[2]
    if path.is_relative_to(root):
        return str(path.relative_to(root))
    return path.name if path.is_absolute() else word


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
