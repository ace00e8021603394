"""What a person sees of a PostgreSQL server that says nothing, from the first word to the last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.storage import postgres
from tests.storage.proxy import Proxy

ROOT = Path(__file__).parents[2]
SWEEP = [sys.executable, "-P", "-c", "import sys; from sweep.cli import main; sys.exit(main())"]


@contextmanager
def sweep(
    *words: str, environment: Mapping[str, str], home: Path
) -> Iterator[subprocess.Popen[str]]:
    named = {"SWEEP_HOME": str(home), "PYTHONPATH": str(ROOT), **environment}
    with subprocess.Popen(
        [*SWEEP, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | named,
        cwd=home,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(process: subprocess.Popen[str], words: str) -> str:
    """Return what is said on stderr up to a line that holds some words."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if words in line:
            return "".join(said)
    raise AssertionError("".join(said))


@pytest.mark.faults
def test_a_study_whose_database_falls_silent_says_so_and_ends_at_the_first_signal(
    cluster: postgres.Cluster, tmp_path: Path
) -> None:
    with Proxy(cluster.port) as proxy:
        storage = {"SWEEP_STORAGE": proxy.through(cluster.new_database())}
        with sweep("run", "cpu-demo", environment=storage, home=tmp_path) as process:
            until(process, "trial 0")
            proxy.fall_silent()
            until(process, "The database does not answer")
            process.send_signal(signal.SIGTERM)
            # Long before the server's time is up: the first signal is the last that it takes.
            _, said = process.communicate(timeout=20)
            assert process.returncode == 130, said
            assert "the same command resumes" in said
            assert postgres.PASSWORD not in said
        proxy.pass_on()
        again = ("run", "cpu-demo", "--trials", "2", "--no-confirm")
        with sweep(*again, environment=storage, home=tmp_path) as process:
            results, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert "Resuming study" in said
        assert "--storage" not in results
        with sweep("status", environment=storage, home=tmp_path) as process:
            assert process.communicate(timeout=60)[0].count("cpu-demo") >= 1
