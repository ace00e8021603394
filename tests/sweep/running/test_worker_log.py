"""The worker's log stays small whatever is printed, and only its end is ever read."""

from __future__ import annotations

import os
import stat
import tracemalloc
from pathlib import Path

import pytest

from search_spaces.errors import EnvironmentFault
from sweep.running.worker_log import WorkerLog


def printed(log: WorkerLog, data: bytes) -> None:
    """Print as a worker does: through a descriptor of the log's, which it inherited."""
    os.write(log.fileno(), data)


def test_a_log_that_grows_too_large_begins_anew_and_keeps_its_end_beside_it(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log", bytes_max=1000)
    for number in range(300):
        printed(log, f"line {number}\n".encode())
        log.keep_small()
        assert (tmp_path / "worker.log").stat().st_size <= 1000
    older = (tmp_path / "worker.log.1").read_bytes()
    assert len(older) <= 1000
    whole = older + (tmp_path / "worker.log").read_bytes()
    assert whole.endswith(b"line 298\nline 299\n")
    assert b"\0" not in whole
    log.close()


def test_what_outgrew_it_at_once_is_cut_to_its_end(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log", bytes_max=1000)
    printed(log, b"x" * 100_000 + b"the end\n")
    log.keep_small()
    kept = (tmp_path / "worker.log.1").read_bytes()
    assert (len(kept), kept[-8:]) == (1000, b"the end\n")
    assert log.tail().endswith("the end")
    printed(log, b"after\n")
    assert (tmp_path / "worker.log").read_bytes() == b"after\n"
    assert log.tail().endswith("the end | after")
    log.close()


def test_the_end_of_a_huge_log_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    log = WorkerLog(path)
    with path.open("ab") as file:
        file.truncate(500 * 10**6)
    printed(log, b"\nfirst\nsecond\n\nthird\nfourth\n")
    tracemalloc.start()
    try:
        assert log.tail() == "second | third | fourth"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
    log.close()


def test_what_an_earlier_worker_printed_is_no_word_of_this_one(tmp_path: Path) -> None:
    first = WorkerLog(tmp_path / "worker.log")
    printed(first, b"somebody else's last words\n")
    first.close()
    log = WorkerLog(tmp_path / "worker.log")
    assert log.tail() == ""
    printed(log, b"mine\n")
    assert log.tail() == "mine"
    assert b"somebody" in (tmp_path / "worker.log").read_bytes()
    log.close()


def test_no_password_and_nothing_unseen_is_in_the_end(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "worker.log")
    printed(log, b"\x1b[2J at postgresql://me:hunter2hunter2@host/db \xff\n")
    assert "hunter2" not in log.tail()
    assert log.tail().isprintable()
    assert "host/db" in log.tail()
    # Cut where the password stands, the name before it would be all that tells what it is.
    printed(log, b"postgresql://me:" + b"p" * 700 + b"@host/db")
    assert "ppp" not in log.tail()
    log.close()


def test_the_log_is_private_from_the_start(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "study" / "worker.log", bytes_max=10)
    printed(log, b"more than ten bytes\n")
    log.keep_small()
    log.close()
    for path in (tmp_path / "study").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "study").stat().st_mode) == 0o700


@pytest.mark.parametrize("plant", ["link", "pipe", "directory"])
def test_what_was_planted_at_its_path_is_refused(tmp_path: Path, plant: str) -> None:
    path, victim = tmp_path / "worker.log", tmp_path / "victim"
    victim.write_bytes(b"mine")
    match plant:
        case "link":
            path.symlink_to(victim)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(EnvironmentFault, match=r"worker\.log"):
        WorkerLog(path)
    assert victim.read_bytes() == b"mine"


def test_a_link_planted_where_the_older_part_goes_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "worker.log.1").symlink_to(victim)
    log = WorkerLog(tmp_path / "worker.log", bytes_max=10)
    printed(log, b"more than ten bytes\n")
    log.keep_small()
    log.close()
    assert victim.read_bytes() == b"mine"
    assert (tmp_path / "worker.log").stat().st_size == 0


def test_a_log_whose_older_part_cannot_be_written_stays_small_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "worker.log.1").mkdir()
    log = WorkerLog(tmp_path / "worker.log", bytes_max=10)
    printed(log, b"more than ten bytes\n")
    log.keep_small()
    assert (tmp_path / "worker.log").stat().st_size == 0
    log.close()
