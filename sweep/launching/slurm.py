"""A study as a job of a SLURM queue: its script, handing it to ``sbatch``, and what runs in each
allocation (``python -P -m qlora_sweep.sweep.launching.slurm``): the study, and its requeueing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qlora_sweep.search_spaces.errors import (
    EnvironmentFault,
    InputError,
    SweepError,
    quote,
    words_of,
)
from qlora_sweep.storage.directory import SPOOL
from qlora_sweep.storage.files import WRITTEN_BY, replace
from qlora_sweep.sweep.launching.there import SWEEP, Supervisor, say
from qlora_sweep.sweep.paths import storage_url

WARNING_SECONDS = 300
"""Before the limit, at most, in which a running trial ends or is given up. A trial takes seconds;
one that compiles takes a minute or two."""
LIMIT_SECONDS_MIN = 120
"""SLURM counts in minutes, and its signal may come up to one early."""
IDLE_ALLOCATIONS_MAX = 3
"""In a row without a result, after which a job does not requeue itself: they would never end."""
OWN_TERM_SLACK_SECONDS = 30
"""SLURM's own TERM comes at the limit, this much early at most; one before that is a person's."""
_FINAL = (0, 1, 2, 4)
"""Done, nothing fits, bad input, an error of sweep's own: no other allocation would change that."""
_STOPPED = (129, 130, 138, 143)
"""Ended by SIGHUP, SIGINT, SIGUSR1 or SIGTERM."""
_ONE_WORD = re.compile(r"[^\s'\"\\]+")
_GPUS = re.compile(r"(?:[\w.-]+:)*\d{1,4}")
_OPTION = re.compile(r"--?\w[\w-]*(?:=[^\s'\"\\]+)?")
_GPU_OPTIONS = re.compile(r"-G.*|--?(?:gres|gpus(?:-per-\w+)?)(?:[= ].*)?")
_AWAY = re.compile(r"(?i)contact slurm controller|timed out|connection refused|i/o error")


@dataclass(frozen=True)
class Allocation:
    """What a job asks the queue for; rejects what would not stand in one line of a script."""

    limit_seconds: float | None = None
    """None for the partition's own."""
    gpus: str | None = None
    """A count, or type and count, as ``a100:2``; None for none."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, as they are typed for it: ``partition=gpu``."""

    def __post_init__(self) -> None:
        if self.gpus is not None and _GPUS.fullmatch(self.gpus) is None:
            must = "must be a count, or type and count as in a100:2"
            raise InputError(f"--with gpus {must}, got {quote(self.gpus)}")
        limit = self.limit_seconds
        if limit is not None and limit < LIMIT_SECONDS_MIN:
            least = f"{LIMIT_SECONDS_MIN // 60}m"
            raise InputError(f"--with time must be at least {least}, got {limit:g} s")
        for option in self.options:
            if _GPU_OPTIONS.fullmatch(_dashed(option)) is not None:
                ask = "ask for GPUs with --with gpus=2 or gpus=a100:2"
                raise InputError(f"--with {option}: it would stand in the place of gpus: {ask}")
            if "\n" in option or _OPTION.fullmatch(_dashed(option)) is None:
                must = "is an option of sbatch, as in constraint=a100"
                raise InputError(f"--with: a setting of slurm {must}, got {quote(option)}")

    @property
    def gpu_count(self) -> int:
        """How many GPUs it has."""
        if self.gpus is None:
            return 0
        return int(self.gpus.rpartition(":")[2])

    @property
    def warning_seconds(self) -> int:
        """How long before its limit a job is told to stop."""
        if self.limit_seconds is None:
            return WARNING_SECONDS
        return int(min(WARNING_SECONDS, self.limit_seconds // 3))

    def directives(self) -> list[str]:
        """Return the options that sbatch reads in a script's head."""
        found = []
        if self.limit_seconds is not None:
            # In whole minutes, never more than was typed.
            days, minutes = divmod(int(self.limit_seconds // 60), 24 * 60)
            found.append(f"--time={days}-{minutes // 60:02}:{minutes % 60:02}:00")
        if self.gpus is not None:
            found.append(f"--gres=gpu:{self.gpus}")
        # Behind the others: of an option that is given twice sbatch takes the last.
        return found + [_dashed(option) for option in self.options]


def _dashed(option: str) -> str:
    if option.startswith("-"):
        return option
    return f"--{option}"


def job_script(
    study: str, allocation: Allocation, *, python: str, request: str, files: Path
) -> str:
    """Return the script of a job that resumes its study until that has ended.

    Args:
        study: its name.
        allocation: what the queue is asked for.
        python: of the environment that the job runs in.
        request: what the study is, in one line, which does not depend on where it is started.
        files: the study's own directory, with its spool, where the job's log goes; absolute.

    Raises:
        InputError: a directory's name cannot stand in a script's head.
    """
    here = Path.cwd()
    warning = allocation.warning_seconds
    for path in (here, files):
        if _ONE_WORD.fullmatch(str(path)) is None or "%" in str(path):
            raise InputError(f"{quote(str(path))}: SLURM takes no space, quote or % in a directory")
    command = shlex.join(
        [python, "-P", "-m", "qlora_sweep.sweep.launching.slurm", str(files), str(warning)]
    )
    asked = "".join(f"\n#SBATCH {line}" for line in allocation.directives())
    return f"""#!/bin/bash
# {WRITTEN_BY}.
#SBATCH --job-name=sweep-{study}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --chdir={here}
#SBATCH --output={files}/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@{warning}{asked}

# Study {study}: resumes before each time limit, until it has ended.
exec {command} <<'REQUEST'
{request}
REQUEST
"""


def submit(script: str, path: Path) -> str:
    """Write a script for its owner alone, hand it to the queue and return the job's number.

    Raises:
        InputError: sbatch refuses it; in its own words.
        EnvironmentFault: there is no sbatch here, or it does not reach its controller.
        OSError: the script cannot be written.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        cure = "run this on a machine of the cluster, or submit there what --dry-run prints"
        raise EnvironmentFault(f"there is no sbatch here: {cure}")
    _write_anew(path, script.encode())
    command = [sbatch, "--parsable", str(path)]
    try:
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"sbatch cannot be run: {words_of(error)}") from error
    if done.returncode != 0:
        said = re.sub(r"(?m)^\s*(sbatch: )?(error: )?", "", done.stderr).split()
        refused = f"sbatch: {' '.join(said) or 'it refused, and did not say why'}"
        if _AWAY.search(refused):
            raise EnvironmentFault(refused)
        raise InputError(refused)
    # With a cluster's name behind it, where there are several.
    return done.stdout.strip().partition(";")[0]


def _write_anew(path: Path, data: bytes) -> None:
    """Write a file for its owner alone: a link, or a file that others may read, gives way."""
    path.unlink(missing_ok=True)
    replace(path, data)


def run_allocation(
    command: list[str],
    files: Path,
    *,
    warning_seconds: float,
    job: str,
    holder: Callable[[], str | None] = lambda: None,
) -> int:
    """Run a study in one allocation of its job, and requeue the job where that is of use.

    Args:
        command: resumes the study.
        files: the study's directory.
        warning_seconds: between the signal that tells of the limit, and the limit.
        job: its number.
        holder: says who drives the study, once this allocation does not.

    Returns:
        The exit code for SLURM: the study's, or 0 where the job was requeued.
    """
    idle_file = files / f"slurm-{job}.idle"
    supervisor = Supervisor()
    results_before = _results(files)

    def hurry() -> None:
        """Ask a study that does not stop again, then end it, before SLURM does."""
        waited = 0.0
        if supervisor.heard:
            waited = time.monotonic() - supervisor.heard[0][1]
        if supervisor.asked == 1 and waited >= 0.4 * warning_seconds:
            supervisor.ask()
        if waited >= 0.8 * warning_seconds and supervisor.child is not None:
            supervisor.child.kill()

    code = supervisor.run(command, tick=hurry, seconds=0.2)
    if code in _FINAL:
        idle_file.unlink(missing_ok=True)
        return code
    is_warned, is_told = _asked(supervisor.heard, warning_seconds)
    # Cancelled, which may reach the study alone; whoever preempted it requeues it.
    if is_told or (code in _STOPPED and not is_warned):
        return code
    other = holder()
    if other is not None:
        # What the spool has got meanwhile is the other's.
        say(f"Exit code {code}, and the study is driven by {other}: not requeued.")
        return code
    idle = 0
    if _results(files) == results_before:
        idle = 1
        if idle_file.exists():
            idle += int(idle_file.read_text())
    replace(idle_file, str(idle).encode())
    # A fault without a limit in sight may be the node's, but only behind a result.
    if idle >= IDLE_ALLOCATIONS_MAX or (idle and not is_warned):
        idle_file.unlink()
        say(f"Exit code {code} and no new result: not requeued. Submit it again once mended.")
        return code
    say(f"Exit code {code}: requeued, to go on where this allocation stopped.")
    if subprocess.run(["scontrol", "requeue", job], check=False).returncode:
        say("SLURM did not requeue it: submit it again, to go on.")
        return code
    return 0


def _results(files: Path) -> int:
    """Return how many results are in a study's spool."""
    spool = files / SPOOL
    if not spool.exists():
        return 0
    return spool.read_bytes().count(b"\n")


def _asked(heard: Sequence[tuple[int, float]], warning_seconds: float) -> tuple[bool, bool]:
    """Return whether signals told of the limit, and whether a person asked to stop."""
    warned_at = None
    is_told = False
    for number, at in heard:
        if number == signal.SIGUSR1:
            warned_at = at
        # At the limit SLURM itself sends TERM; between the warning and that, a person does.
        elif warned_at is None or at - warned_at < warning_seconds - OWN_TERM_SLACK_SECONDS:
            is_told = True
    return warned_at is not None, is_told


def main(arguments: Sequence[str]) -> int:
    """Run a job's study: the directory of its files, seconds of warning, and, for tests, what runs
    in its place; its request is on stdin. Return the exit code for SLURM.
    """
    directory, warning, *command = arguments
    files = Path(directory)
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        say("error: SLURM_JOB_ID is not set: submit this with sbatch")
        return EnvironmentFault.exit_code
    request = files / "slurm.run.json"
    _write_anew(request, sys.stdin.buffer.read())
    os.environ["SWEEP_HOME"] = str(files.parents[1])
    command = command or [sys.executable, "-P", "-c", SWEEP, "run"]
    return run_allocation(
        command + [str(request)],
        files,
        warning_seconds=float(warning),
        job=job,
        holder=partial(_holder, request, files),
    )


def _holder(request: Path, files: Path) -> str | None:
    """Return who drives the study of a request; None where it is not driven, or not known."""
    # What reads databases is not needed before.
    from qlora_sweep.storage.reading import read_study
    from qlora_sweep.sweep.request import RunRequest

    with suppress(SweepError):
        url = storage_url(RunRequest.read(str(request)).storage)
        return read_study(files.name, url=url, home=files.parent).holder
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
