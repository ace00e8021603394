"""Owns writing a file that somebody asked for. Knows nothing of what is in it."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all; missing directories are made.

    A link stays one, and a device or a pipe, ``/dev/null`` say, is written to: putting a file in
    its place, as is done otherwise, would take it from everybody else.

    Raises:
        OSError: it cannot be written there; what was there before is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    place = path.resolve()
    temporary = place.parent / f".{place.name}.{os.getpid()}.tmp"
    try:
        temporary.write_bytes(data)
        temporary.replace(place)
    finally:
        temporary.unlink(missing_ok=True)
