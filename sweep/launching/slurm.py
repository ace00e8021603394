"""A study as a job of a SLURM queue: the script that requeues itself before each time limit, and
handing it to ``sbatch``."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from search_spaces.errors import EnvironmentFault, InputError, quote, words_of
from storage.files import WRITTEN_BY

WARNING_SECONDS = 300
"""Before the limit, at most, in which a running trial ends or is given up. A trial takes seconds;
one that compiles takes a minute or two."""
LIMIT_SECONDS_MIN = 120
"""SLURM counts in minutes, and its signal may come up to one early."""
IDLE_ALLOCATIONS_MAX = 3
"""In a row without a result, after which a job does not requeue itself: they would never end."""
_OWN_TERM_SLACK_SECONDS = 30
"""SLURM's own TERM comes at the limit, this much early at most; one before that is a person's."""
_SBATCH_SECONDS = 120.0
_ONE_WORD = re.compile(r"[^\s'\"\\]+")
_GPUS = re.compile(r"(?:[\w.-]+:)*\d{1,4}")
_OPTION = re.compile(r"--?\w[\w-]*(?:=[^\s'\"\\]+)?")
_CARDS = re.compile(r"-G.*|--?(?:gres|gpus(?:-per-\w+)?)(?:[= ].*)?")
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
            raise InputError(
                "--with gpus must be a count, or type and count as in a100:2, "
                f"got {quote(self.gpus)}"
            )
        if self.limit_seconds is not None and self.limit_seconds < LIMIT_SECONDS_MIN:
            raise InputError(
                f"--with time must be at least {LIMIT_SECONDS_MIN // 60}m, "
                f"got {self.limit_seconds:g} s"
            )
        for option in self.options:
            if _CARDS.fullmatch(_dashed(option)) is not None:
                raise InputError(
                    f"--with {option}: it would stand in the place of gpus: ask for GPUs with "
                    "--with gpus=2 or gpus=a100:2"
                )
            if "\n" in option or _OPTION.fullmatch(_dashed(option)) is None:
                raise InputError(
                    "--with: a setting of slurm is an option of sbatch, as in constraint=a100, "
                    f"got {quote(option)}"
                )

    @property
    def gpu_count(self) -> int:
        """How many GPUs it has."""
        return 0 if self.gpus is None else int(self.gpus.rpartition(":")[2])

    @property
    def warning_seconds(self) -> int:
        """How long before its limit a job is told to stop."""
        limit = self.limit_seconds
        return WARNING_SECONDS if limit is None else int(min(WARNING_SECONDS, limit // 3))

    def directives(self) -> Iterator[str]:
        """Yield the options that sbatch reads in a script's head."""
        if self.limit_seconds is not None:
            yield f"--time={_time(self.limit_seconds)}"
        if self.gpus is not None:
            yield f"--gres=gpu:{self.gpus}"
        # Behind the others: of an option that is given twice sbatch takes the last.
        yield from map(_dashed, self.options)


def _dashed(option: str) -> str:
    return option if option.startswith("-") else f"--{option}"


def _time(seconds: float) -> str:
    """Return a limit as SLURM writes it, in whole minutes, never more than was typed."""
    days, minutes = divmod(int(seconds // 60), 24 * 60)
    return f"{days}-{minutes // 60:02}:{minutes % 60:02}:00"


@dataclass(frozen=True)
class Job:
    """A study as a job."""

    study: str
    program: tuple[str, ...]
    """What resumes the study, called with the file of its request."""
    request: str
    """What the study is, in one line, with nothing in it that depends on where it is started but
    ``directory``."""
    directory: Path
    """Where it is started; absolute."""
    files: Path
    """The study's own directory, with its spool, where the job's log goes; absolute."""
    variables: Mapping[str, str]
    """Set beside those that sbatch hands on."""


def job_script(job: Job, allocation: Allocation) -> str:
    """Return the script of a job that goes on with itself until its study has ended.

    Raises:
        InputError: a directory's name cannot stand in a script's head.
    """
    for path in (job.directory, job.files):
        if _ONE_WORD.fullmatch(str(path)) is None or "%" in str(path):
            raise InputError(
                f"{quote(str(path))}: SLURM takes no directory with a space, a quote or % in it"
            )
    head = [
        f"--job-name=sweep-{job.study}",
        "--nodes=1",
        "--ntasks=1",
        f"--chdir={job.directory}",
        f"--output={job.files}/slurm-%j.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{allocation.warning_seconds}",
        *allocation.directives(),
    ]
    variables = [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
    warning = allocation.warning_seconds
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {WRITTEN_BY}.",
            *(f"#SBATCH {line}" for line in head),
            "",
            f"# Study {job.study}: goes on with itself before each time limit, until it has ended.",
            *variables,
            f"files={shlex.quote(str(job.files))}",
            'request="$files/slurm.run.json"',
            f"printf '%s' {shlex.quote(job.request)} >\"$request\" || exit 3",
            f'command=({shlex.join(job.program)} "$request")',
            f"ask_again={max(1, warning * 2 // 5)} end={max(2, warning * 4 // 5)}  # seconds",
            f"cancelled_within={warning - _OWN_TERM_SLACK_SECONDS}  # seconds behind the warning",
            f"idle_max={IDLE_ALLOCATIONS_MAX}",
            _BODY,
        ]
    )


_BODY = r"""
set -u
spool="$files/spool.jsonl"
idle_file="$files/slurm-${SLURM_JOB_ID:?is set by SLURM: submit this with sbatch}.idle"
child="" asked=0 asked_at=0 because="" warned_at=0

results() { if [ -e "$spool" ]; then wc -l <"$spool"; else echo 0; fi; }
ask() {
    asked=$((asked + 1))
    [ "$asked" -gt 1 ] || asked_at=$SECONDS
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
# At the limit SLURM itself sends it; behind the warning, and before that, it is a cancellation.
told() {
    if [ "$because" != limit ] || [ $((SECONDS - warned_at)) -lt "$cancelled_within" ]; then
        because=told
    fi
}
# The limit is near; and: the job is cancelled, or another one takes its place.
trap 'because=${because:-limit}; warned_at=$SECONDS; ask' USR1
trap 'told; ask' TERM

before=$(results)
"${command[@]}" &
child=$!
# What asked before there was anybody to be asked.
[ "$asked" -eq 0 ] || kill -TERM "$child" 2>/dev/null
while kill -0 "$child" 2>/dev/null; do
    if [ "$asked" -gt 0 ]; then
        waited=$((SECONDS - asked_at))
        if [ "$asked" -eq 1 ] && [ "$waited" -ge "$ask_again" ]; then ask; fi
        if [ "$waited" -ge "$end" ]; then kill -KILL "$child" 2>/dev/null; fi
    fi
    sleep 1 &
    wait "$!"
done
wait "$child"
code=$?

# Done, nothing fits, bad input, an error of sweep's own: no other allocation would change that.
if [ "$code" -le 2 ] || [ "$code" -eq 4 ]; then
    rm -f "$idle_file"
    exit "$code"
fi
# Cancelled, which may reach the study alone; whoever preempted it requeues it.
if [ "$because" != limit ]; then
    case "$because $code" in
        told* | " 129" | " 130" | " 138" | " 143") exit "$code" ;;
    esac
fi

idle=0
if [ "$(results)" -eq "$before" ]; then
    idle=$(($(cat "$idle_file" 2>/dev/null || echo 0) + 1))
fi
echo "$idle" >"$idle_file"
# A fault without a limit in sight may be this node's, but only where something was done before it.
if [ "$because" != limit ] && [ "$idle" -gt 0 ]; then idle=$idle_max; fi
if [ "$idle" -ge "$idle_max" ]; then
    echo "Exit code $code and no new result: not requeued. Submit it again once that is mended." >&2
    rm -f "$idle_file"
    exit "$code"
fi
echo "Exit code $code: requeued, to go on where this allocation stopped." >&2
scontrol requeue "$SLURM_JOB_ID" || {
    echo "SLURM did not requeue it: submit it again, to go on." >&2
    exit "$code"
}
"""


def find_sbatch() -> str:
    """Return where the queue's program is.

    Raises:
        EnvironmentFault: there is none here.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise EnvironmentFault(
            "there is no sbatch here, so nothing was submitted: run this on a machine of the "
            "cluster, or print the script with --dry-run and submit it there"
        )
    return sbatch


def hand_in(script: Path) -> str:
    """Hand a script to the queue and return the job's number.

    Raises:
        InputError: sbatch refuses it; in its own words.
        EnvironmentFault: there is no sbatch here, or it does not reach its controller.
    """
    done = _called([find_sbatch(), "--parsable", str(script)])
    if done.returncode != 0:
        refused = f"sbatch: {_words(done.stderr)}"
        raise (EnvironmentFault if _AWAY.search(refused) else InputError)(refused)
    # With a cluster's name behind it, where there are several.
    return done.stdout.strip().partition(";")[0]


def _called(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SBATCH_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"sbatch cannot be run: {words_of(error)}") from error


def _words(stderr: str) -> str:
    """Return what sbatch says, in one line and without its name before each."""
    lines = [re.sub(r"^sbatch: (?:error: )?", "", line.strip()) for line in stderr.splitlines()]
    return " ".join(line for line in lines if line) or "it refused, and did not say why"
