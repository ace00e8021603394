"""A queue that is none: what sbatch was handed is run by the test, signalled and requeued."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SBATCH = """#!/bin/sh
for last; do :; done
if [ -n "$REFUSED" ]; then echo "sbatch: error: $REFUSED" >&2; exit 1; fi
cp "$last" "$QUEUE/script"
echo "17;cluster"
"""
SCONTROL = """#!/bin/sh
[ "$1 $2" = "requeue 17" ] && touch "$QUEUE/requeued"
"""


class Queue:
    """Runs allocation after allocation of one job, as SLURM would."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        directory.mkdir()
        for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)
        patch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        patch.setenv("QUEUE", str(directory))
        patch.delenv("REFUSED", raising=False)

    @property
    def script(self) -> Path:
        """What was submitted."""
        return self.directory / "script"

    def head(self) -> dict[str, str]:
        """The options in the script's head."""
        found = re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", self.script.read_text(), re.MULTILINE)
        return dict(found)

    def allocation(
        self,
        *,
        number: signal.Signals | None = None,
        when: Callable[[], bool] = lambda: True,
        then: Callable[[], bool] | None = None,
        limit: float = 60.0,
    ) -> tuple[int, bool]:
        """Run the script once; return its exit code and whether it asked to be requeued.

        Args:
            number: the signal that the batch shell, and nothing else of the job, is sent.
            when: that is sent.
            then: when a TERM is sent behind it; None for never.
            limit: seconds from then on, after which all of the job is killed.
        """
        (self.directory / "requeued").unlink(missing_ok=True)
        log = Path(self.head()["output"].replace("%j", "17"))
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            job = subprocess.Popen(
                ["bash", str(self.script)],
                cwd=self.head()["chdir"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "SLURM_JOB_ID": "17"},
                start_new_session=True,
            )
        try:
            if number is not None:
                _wait(when, job)
                job.send_signal(number)
            if then is not None:
                _wait(then, job)
                job.send_signal(signal.SIGTERM)
            code = job.wait(limit)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            for process in (*_children(job.pid), job.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
            job.wait()
        return code, (self.directory / "requeued").exists()


def _children(number: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(n) for n in Path(f"/proc/{number}/task/{number}/children").read_text().split()]
    return []


def _wait(until: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    while not until() and job.poll() is None:
        time.sleep(0.02)
