"""`sweep run --on slurm`: from the request of a study to the job's number."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from search_spaces.documents import home_expanded
from search_spaces.errors import EnvironmentFault, InputError, quote
from search_spaces.models import load_model_spec
from search_spaces.redaction import redact
from search_spaces.space import parse_duration
from storage.files import make_directory
from storage.outputs import write_output
from storage.urls import SqliteUrl, parse_url
from sweep.data.tokenizers import find_tokenizer
from sweep.launching.slurm import Allocation, Job, find_sbatch, hand_in, job_script
from sweep.paths import STORAGE, runs_directory, storage_url
from sweep.request import RunRequest, Where
from sweep.running.device_info import check_spelling
from sweep.terminal.commands import DONE
from sweep.terminal.console import note, say, say_as_is, say_json
from sweep.terminal.driving import carried_source

SCRIPT = "slurm.sh"
"""Of a study's job, in its directory."""


def submit(request: RunRequest, where: Where, *, is_dry: bool) -> int:
    """Submit a study as a job that requeues itself before each time limit; or print its script.

    Args:
        request: what was typed.
        where: what the job asks the queue for, and the environment that it runs in.
        is_dry: whether the script is printed, and nothing submitted.

    Raises:
        InputError: of study, job or queue, what was typed is not right. Nothing was submitted.
        EnvironmentFault: there is no queue here, or a file cannot be written.
    """
    name, space = request.named()
    if space.data is not None:
        with suppress(_OnHubError):
            find_tokenizer(space.data.tokenizer, load_model_spec(space.model), fetch=_leave)
    if request.devices is not None:
        # Whether there are such GPUs, the job sees.
        check_spelling(request.devices)
        if space.gpu == "cpu":
            raise InputError(
                f"--devices {request.devices}: space '{space.name}' is for the CPU, which is one"
            )
    if request.carried is not None:
        carried_source(request.carried, of=name, url=storage_url(request.storage))
    each = 0 if space.gpu == "cpu" else max(space.values_of("data_parallel"))
    allocation = _allocation(where, devices=request.devices, least=each)
    files = runs_directory().absolute() / name
    devices = request.devices
    if space.gpu != "cpu" and allocation.gpu_count > 1 and devices is None:
        # What was asked of the queue is there to be used.
        devices = "all"
    changes = {"study": name, "devices": devices, "storage": _storage(request.storage)}
    job = Job(
        study=name,
        program=(_python(where.settings.get("env")), "-P", "-m", "sweep", "run"),
        request=request.model_copy(update=changes).model_dump_json(),
        directory=Path.cwd(),
        files=files,
        variables={"SWEEP_HOME": str(files.parents[1])},
    )
    script = job_script(job, allocation)
    if is_dry:
        note(f"Not submitted. SLURM writes its log only where this is there: {files}")
        if request.as_json:
            say_json({"study": name, "on": "slurm", "script": script})
        else:
            say_as_is(script)
        return DONE
    number = _hand_in(script, files=files)
    note(f"Its log: {files}/slurm-{number}.log. How it stands: sweep status {name} --watch")
    if request.as_json:
        say_json({"study": name, "on": "slurm", "job": number})
    else:
        say(f"Submitted study {name} as job {number}.")
    return DONE


def _allocation(where: Where, *, devices: str | None, least: int) -> Allocation:
    """Return what was typed of the job: settings that are not ours are sbatch's own options.

    Args:
        where: those settings.
        devices: that were typed.
        least: GPUs that a trial needs.
    """
    settings = dict(where.settings)
    settings.pop("env", None)
    if devices not in (None, "all") and not devices.isdecimal():
        raise InputError(f"--devices {devices}: SLURM numbers a job's GPUs: name how many")
    wanted = int(devices) if devices is not None and devices != "all" else least
    gpus = settings.pop("gpus", str(wanted))
    time = settings.pop("time", None)
    try:
        seconds = None if time is None else parse_duration(time)
    except InputError as error:
        raise InputError(f"--with time: {error}") from error
    allocation = Allocation(
        limit_seconds=seconds,
        gpus=None if gpus == "0" else gpus,
        options=tuple(f"{key}={value}" if value else key for key, value in settings.items()),
    )
    if allocation.gpu_count < wanted:
        raise InputError(f"--with gpus={gpus}: the study runs on {wanted}: ask for as many")
    return allocation


class _OnHubError(Exception):
    """It is fetched where the job runs."""


def _leave(name: str) -> Path:
    raise _OnHubError(name)


def _python(environment: str | None) -> str:
    """Return the Python of an environment; of this one where none was named."""
    if environment is None:
        return sys.executable
    python = home_expanded(environment).absolute() / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise InputError(f"--with env={environment}: {quote(str(python))} is no program")
    return str(python)


def _storage(typed: str | None) -> str | None:
    """Return the database as the job is told of it, from wherever it is started.

    Raises:
        InputError: a password would stand in the script, which others may read.
    """
    url = storage_url(typed)
    database = parse_url(url)
    if isinstance(database, SqliteUrl):
        return str(database)
    if redact(url) == url:
        return url
    if typed is not None:
        raise InputError(
            "--storage: its password would stand in the job's script: set "
            f"{STORAGE} instead, which the job inherits, or leave it to ~/.pgpass"
        )
    return None


def _hand_in(script: str, *, files: Path) -> str:
    """Write a job's script and submit it; return the job's number."""
    find_sbatch()
    path = files / SCRIPT
    try:
        make_directory(files)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror or error}") from error
    write_output(path, script.encode())
    return hand_in(path)
