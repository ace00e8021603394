from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sweep.processes import STOP_SIGNALS, process_pool
from tests.sweep.test_processes import ends_soon, is_running

ROOT = Path(__file__).parents[2]


def sleep_long(_: int) -> None:
    time.sleep(600)


def test_what_a_pool_does_is_given_up_at_once_where_it_is_cut_short() -> None:
    began, pids = time.monotonic(), list[int]()

    def work() -> None:
        with process_pool(2) as pool:
            number = pool.submit(os.getpid)
            for _ in range(20):
                pool.submit(sleep_long, 0)
            pids.append(number.result(timeout=60))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert ends_soon(*pids)
    assert time.monotonic() - began < 60
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


PROGRAM = """
import os, sys, time
from sweep.processes import process_pool
from tests.sweep.test_pools import sleep_long

if __name__ == "__main__":
    with process_pool(2) as pool:
        number = pool.submit(os.getpid)
        futures = [pool.submit(sleep_long, n) for n in range(4)]
        print(number.result(), flush=True)
        futures[0].result()
"""


def test_its_processes_hear_no_signal_and_end_with_their_parent(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        # What a killed parent leaves of semaphores is told there.
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        for ask in STOP_SIGNALS:
            os.kill(number, ask)
        time.sleep(0.2)
        assert is_running(number)
        parent.kill()
    assert ends_soon(number)
