"""What befalls the machine while a study runs: its disk is full, files may not grow, it sleeps."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.faults import short_study
from tests.faults.driving import PATIENCE_SECONDS, a_driver, finish, said, wait_until
from tests.faults.short_study import Place

KIB = 1024
ENDS = (0, 3)
"""All was done in spite of it, or the environment is at fault."""


def _let_no_file_grow_beyond(size: int) -> None:
    # Python leaves SIGXFSZ ignored, so that a write fails where it would kill others.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize(
    "size",
    [1, pytest.param(128 * KIB, marks=pytest.mark.faults)],
)
def test_a_study_whose_files_may_not_grow_resumes_later(tmp_path: Path, size: int) -> None:
    place = Place(tmp_path)
    limit = partial(_let_no_file_grow_beyond, size)
    with a_driver(place, beat_seconds=0.0, prepare=limit) as process:
        status = process.wait(timeout=PATIENCE_SECONDS)
    assert status in ENDS, said(place)
    assert "mistake in sweep" not in said(place)
    assert finish(place) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    place.home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", place.home],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("only root mounts a small disk")
    yield place
    subprocess.run(["umount", place.home], check=True)


@pytest.mark.faults
@pytest.mark.parametrize("left_kib", [0, 16])
def test_a_disk_that_fills_up_loses_nothing_that_was_measured(
    small_disk: Place, left_kib: int
) -> None:
    place = small_disk
    with a_driver(place) as process:
        wait_until(lambda: len(place.said("told")) > 1, process)
        free = os.statvfs(place.home)
        room = free.f_bavail * free.f_frsize - left_kib * KIB
        (place.home / "ballast").write_bytes(b"x" * max(room, 0))
        status = process.wait(timeout=PATIENCE_SECONDS)
    assert status in ENDS, said(place)
    assert "mistake in sweep" not in said(place)
    (place.home / "ballast").unlink()
    assert finish(place) == []


@pytest.mark.faults
def test_a_driver_that_was_stopped_for_a_while_resumes(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with a_driver(place) as process:
        wait_until(lambda: len(place.said("ran")) > 1, process)
        process.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        assert list(short_study.broken_at_once(place)) == []
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=PATIENCE_SECONDS) == 0, said(place)
    assert finish(place) == []
