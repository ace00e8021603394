"""One thing goes wrong at the n-th operation of a study, for every n: nothing is lost or left open.

A sweep goes on until a study completes in which nothing fired, so that no count is assumed. The
whole of it takes the best part of an hour of one core; here every so manieth operation is struck.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.nth_operation import every

ROOT = Path(__file__).parents[2]
QUICK = {
    "database": (
        "storage call:killed:49",
        "storage call:interrupted twice:73",
        "commit:answer lost:19",
        "commit:locked after:37",
        "SQL statement:database I/O error:86",
        "beat:clock back:61",
    ),
    "files and worker": (
        *("beat:killed:61", "file write:disk full:7", "file write:killed after:8"),
        *("worker's message:worker killed after:4", "worker's message:driver killed:7"),
    ),
}


def swept(*sweeps: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.faults.nth_operation", *sweeps]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", QUICK)
def test_a_fault_at_one_operation_of_many_loses_nothing(what: str) -> None:
    results = swept(*QUICK[what])
    assert [words for result in results for words in result["broken"]] == []
    assert all(result["cases"] > 0 for result in results)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("operation", "kind"), every())
def test_a_fault_at_any_operation_loses_nothing(operation: str, kind: str) -> None:
    (result,) = swept(f"{operation}:{kind}")
    assert result["broken"] == []
    assert result["cases"] > 0
