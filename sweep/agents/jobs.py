"""Commands that were started for an agent, and go on whether or not anybody waits.

Each has a directory `jobs/NAME` beside the studies' files, which is private as theirs are: what was
typed, what it said, what it printed, and in the end what it ended with.
"""

from __future__ import annotations

import json
import os
import shutil
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

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, did_you_mean
from qlora_sweep.storage.files import make_directory
from qlora_sweep.sweep.paths import runs_directory

SWEEP = (sys.executable, "-P", "-m", "qlora_sweep")
"""Runs a command of this installation."""
_SHELL = ("/bin/sh", "-c", 'umask 077; trap : INT TERM; "$@"; echo $? > "$0/ended"')
"""Keeps what a command ends with, whoever started it has gone or not: the directory comes first."""
_FIRST_SECONDS = 5.0
"""What is refused is refused by then."""
_WELL = frozenset({0, 1})
"""Exit codes of a command that did what it was asked."""
_LAST_LINES, _LINE_MOST, _LAST_BYTES = 15, 400, 20_000


@dataclass(frozen=True)
class Job:
    """A command that goes on by itself."""

    name: str
    directory: Path
    words: Sequence[str]
    """What was typed, without `sweep`."""
    pid: int

    @property
    def said(self) -> list[str]:
        """The last lines of what it told a person."""
        with (self.directory / "log.txt").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return [line[:_LINE_MOST] for line in lines[-_LAST_LINES:]]

    @property
    def document(self) -> dict[str, Any] | None:
        """What it printed; None as long as that is nothing."""
        with suppress(OSError, ValueError):
            printed = (self.directory / "printed.json").read_text(encoding="utf-8")
            return dict(json.loads(printed))
        return None

    @property
    def exit_code(self) -> int | None:
        """What it ended with; None while it runs, and where it was killed."""
        with suppress(OSError, ValueError):
            return int((self.directory / "ended").read_text(encoding="utf-8"))
        return None

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        if self.exit_code is not None:
            return False
        try:
            typed = Path(f"/proc/{self.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        # Another process may have that number by now.
        return str(self.directory).encode() in typed


@dataclass
class Jobs:
    """The jobs that were started here, by this server or one before it."""

    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Waited for now and then, so that none is left behind as a zombie."""

    def start(self, words: Sequence[str]) -> Job:
        """Start a command, and return once it was not refused at once.

        Raises:
            InputError: it was; says what it said. Nothing of it is kept.
            EnvironmentFault: the machine is at fault, alike.
        """
        name, directory = _new_place(words[0])
        with (
            (directory / "printed.json").open("wb") as out,
            (directory / "log.txt").open("wb") as log,
        ):
            process = subprocess.Popen(
                _SHELL + (str(directory),) + SWEEP + tuple(words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                # A signal that ends the server does not end it.
                start_new_session=True,
            )
        self._processes = [one for one in self._processes if one.poll() is None]
        self._processes.append(process)
        job = Job(name, directory, words, process.pid)
        known = {"words": list(words), "pid": process.pid}
        (directory / "job.json").write_text(json.dumps(known), encoding="utf-8")
        with suppress(subprocess.TimeoutExpired):
            process.wait(_FIRST_SECONDS)
        code = job.exit_code
        if code is None or code in _WELL:
            return job
        said = "\n".join(job.said).removeprefix("error: ")
        shutil.rmtree(directory)
        if code == InputError.exit_code:
            raise InputError(said)
        raise EnvironmentFault(said or f"sweep {words[0]} ended with {code}")

    def find(self, name: str) -> Job:
        """Return a job by its name.

        Raises:
            InputError: there is none of that name.
        """
        names = self.names
        if name not in names:
            raise InputError(f"no job '{name}'{did_you_mean(name, names)}")
        directory = _place() / name
        try:
            known = json.loads((directory / "job.json").read_text(encoding="utf-8"))
            return Job(name, directory, known["words"], int(known["pid"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"job '{name}' cannot be read: {error}") from error

    @property
    def names(self) -> list[str]:
        """All jobs, the oldest first."""
        for process in self._processes:
            process.poll()
        return sorted(path.parent.name for path in _place().glob("*/job.json"))

    def stop(self, job: Job) -> None:
        """Ask a job to end, as Ctrl-C does: what it has measured or trained is kept."""
        if job.is_running:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGINT)


def _place() -> Path:
    """Return where all jobs are."""
    return runs_directory().absolute() / "jobs"


def _new_place(command: str) -> tuple[str, Path]:
    """Return a job's name, by its command and the time, and its directory, which is made."""
    make_directory(_place())
    while True:
        name = f"{command}-{datetime.now():%Y%m%d-%H%M%S}"
        with suppress(FileExistsError):
            (_place() / name).mkdir(mode=0o700)
            return name, _place() / name
        time.sleep(0.1)
