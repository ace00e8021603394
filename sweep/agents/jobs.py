"""Commands that were started for an agent, and go on whether or not anybody waits.

Each has a directory `jobs/NAME` beside the studies' files: what it was, what it said and what it
printed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.errors import InputError, did_you_mean
from qlora_sweep.sweep.paths import runs_directory

SWEEP = (sys.executable, "-P", "-m", "qlora_sweep")
"""Runs a command of this installation."""
_FIRST_SECONDS = 5.0
"""What is refused is refused by then."""
_LAST_LINES = 15


@dataclass(frozen=True)
class Job:
    """A command that goes on by itself."""

    name: str
    words: Sequence[str]
    """What was typed, without `sweep`."""
    pid: int

    @property
    def directory(self) -> Path:
        """Where its files are."""
        return directory_of(self.name)

    @property
    def said(self) -> list[str]:
        """The last lines of what it told a person."""
        lines = (self.directory / "log.txt").read_text(encoding="utf-8", errors="replace")
        return lines.splitlines()[-_LAST_LINES:]

    @property
    def document(self) -> dict[str, Any] | None:
        """What it printed; None as long as that is nothing."""
        with suppress(ValueError):
            printed = (self.directory / "printed.json").read_text(encoding="utf-8")
            return dict(json.loads(printed))
        return None


def directory_of(name: str) -> Path:
    """Return where a job's files are."""
    return runs_directory() / "jobs" / name


@dataclass
class Jobs:
    """The jobs that were started here, by this server or one before it."""

    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, words: Sequence[str]) -> Job:
        """Start a command, and return once it was not refused at once.

        Raises:
            InputError: it ended within seconds, and not well; says what it said.
        """
        name = self._new_name(words[0])
        directory = directory_of(name)
        directory.mkdir(parents=True)
        with (
            (directory / "printed.json").open("wb") as out,
            (directory / "log.txt").open("wb") as log,
        ):
            process = subprocess.Popen(
                SWEEP + tuple(words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                # A signal that ends the server does not end it.
                start_new_session=True,
            )
        job = Job(name, words, process.pid)
        known = {"words": list(words), "pid": process.pid}
        (directory / "job.json").write_text(json.dumps(known), encoding="utf-8")
        self._processes[name] = process
        with suppress(subprocess.TimeoutExpired):
            process.wait(_FIRST_SECONDS)
        if process.returncode not in (None, 0, 1):
            raise InputError("\n".join(job.said) or f"it ended with {process.returncode}")
        return job

    def find(self, name: str) -> Job:
        """Return a job by its name.

        Raises:
            InputError: there is none of that name.
        """
        try:
            known = json.loads((directory_of(name) / "job.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            nearest = did_you_mean(name, self.names)
            raise InputError(f"no job '{name}'{nearest}") from None
        return Job(name, known["words"], known["pid"])

    @property
    def names(self) -> list[str]:
        """All jobs, the oldest first."""
        return sorted(path.parent.name for path in directory_of("").glob("*/job.json"))

    def is_running(self, job: Job) -> bool:
        """Whether a job has not ended yet."""
        if job.name in self._processes:
            return self._processes[job.name].poll() is None
        try:
            typed = Path(f"/proc/{job.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        # Another process may have that number by now.
        return [word.encode() for word in job.words] == typed[len(SWEEP) : -1]

    def exit_code(self, job: Job) -> int | None:
        """Return what a job ended with; None while it runs, and where another server began it."""
        if job.name in self._processes:
            return self._processes[job.name].poll()
        return None

    def stop(self, job: Job) -> None:
        """Ask a job to end, as Ctrl-C does: what it has measured or trained is kept."""
        if self.is_running(job):
            with suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGINT)

    def _new_name(self, command: str) -> str:
        started = f"{command}-{datetime.now():%Y%m%d-%H%M%S}"
        while directory_of(started).exists():
            time.sleep(0.1)
            started = f"{command}-{datetime.now():%Y%m%d-%H%M%S}"
        return started
