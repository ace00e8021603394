"""The short study driven by a process of its own, for what befalls it from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.faults import short_study
from tests.faults.short_study import ROOT, Place

PATIENCE_SECONDS = 150.0
"""A database that is away for longer than a minute ends a driver."""


@contextmanager
def a_driver(
    place: Place, *, beat_seconds: float = 0.03, prepare: Callable[[], None] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a driver; it is killed at the end if it still runs.

    Args:
        place: where its study is.
        beat_seconds: how long it takes from one sign of life of a trial to the next.
        prepare: done in its process before it begins.
    """
    command = [sys.executable, "-m", "tests.faults.short_study", str(place.directory)]
    command += [place.server or "", str(beat_seconds)]
    with (place.directory / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=output, preexec_fn=prepare
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait while a driver runs and something is not so yet."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so() and process.poll() is None:
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)


def said(place: Place) -> str:
    """Return what the last driver printed."""
    return (place.directory / "output").read_text(errors="replace")[-600:]


def finish(place: Place) -> list[str]:
    """Resume the study without a fault, and return what does not hold of it then."""
    with a_driver(place, beat_seconds=0.0) as process:
        status = process.wait(timeout=PATIENCE_SECONDS)
    if status != 0:
        return [f"resumed: ended with {status}: {said(place)}"]
    return list(short_study.broken(place))
