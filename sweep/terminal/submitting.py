"""Owns what `sweep submit` does, from the words of the run to the job's number.

Knows nothing of the job's script, or of what a queue takes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from search_spaces.documents import home_expanded
from search_spaces.errors import EnvironmentFault, InputError, quote
from search_spaces.models import load_model_spec
from search_spaces.redaction import redact
from storage.files import make_directory
from storage.outputs import checked_output, write_output
from storage.urls import SqliteUrl, parse_url
from sweep.data.tokenizers import find_tokenizer
from sweep.launching.slurm import Allocation, Job, find_sbatch, job_script
from sweep.launching.slurm import submit as hand_in
from sweep.paths import STORAGE, runs_directory, storage_url
from sweep.running.device_info import check_spelling
from sweep.study.asked import named
from sweep.terminal.commands import DONE
from sweep.terminal.console import STDOUT, note, say, say_as_is
from sweep.terminal.driving import carried_source
from sweep.terminal.places import places
from sweep.terminal.typed import call, respelled

SCRIPT = "slurm.sh"
"""Of a study's job, in its directory."""


def submit(
    words: Sequence[str],
    *,
    command: Any,
    allocation: Allocation,
    environment: str | None,
    output: str | None,
    is_forced: bool,
) -> int:
    """Submit a study, or only write its job's script.

    Args:
        words: of the `sweep run`, behind its name.
        command: that `sweep run`.
        allocation: what was typed of what the job asks for.
        environment: directory of the one to run in; None for this one.
        output: file of the script, or `STDOUT`, where nothing is to be submitted.
        is_forced: whether that may replace a file that sweep did not write.

    Raises:
        InputError: of job, run or queue, what was typed is not right. Nothing was submitted.
        EnvironmentFault: there is no queue here, or a file cannot be written.
    """
    checked_output(
        output, what="a job's script", endings=(".sh", ".sbatch", ".slurm"), is_forced=is_forced
    )
    hand_over = partial(
        _submit,
        words=words,
        command=command,
        allocation=allocation,
        environment=environment,
        output=output,
    )
    return call(command, words, drive=hand_over)


def _submit(
    space_name: str,
    *,
    words: Sequence[str],
    command: Any,
    allocation: Allocation,
    environment: str | None,
    output: str | None,
    overrides: Mapping[str, Any],
    held: Mapping[str, Any],
    study: str | None,
    storage: str | None,
    on: str | None,
    cards: str | None,
    ray: str | None,
    carried: str | None,
    **_: Any,
) -> int:
    """Do it once the run's own options are read."""
    name, space = named(space_name, overrides=overrides, held=held, study=study)
    if space.data is not None:
        with suppress(_OnHubError):
            find_tokenizer(space.data.tokenizer, load_model_spec(space.model), fetch=_leave)
    # Whether there are such cards, or such a cluster, the job sees.
    places(on=on, cards=cards, ray=ray, space=space_name, overrides=overrides, warn=note)
    if cards is not None:
        check_spelling(cards)
        if space.gpu == "cpu":
            raise InputError(f"--cards {cards}: space '{space.name}' is for the CPU, which is one")
    if carried is not None:
        carried_source(carried, of=name, url=storage_url(storage))
    files = runs_directory().absolute() / name
    gpus = allocation.gpus or ("1" if space.gpu != "cpu" else None)
    allocation = replace(allocation, gpus=None if gpus == "0" else gpus)
    run = [*respelled(command, words, without={"study", "storage"}), f"--study={name}"]
    if space.gpu != "cpu" and allocation.gpu_count > 1 and cards is None and ray is None:
        # What was asked of the queue is there to be used.
        run.append("--cards=all")
    job = Job(
        study=name,
        command=(_python(environment), "-P", "-m", "sweep", "run", *run, *_storage(storage)),
        directory=Path.cwd(),
        files=files,
        variables={"SWEEP_HOME": str(files.parents[1])},
    )
    script = job_script(job, allocation)
    if output is None:
        return _hand_in(script, name=name, files=files)
    if output == STDOUT:
        say_as_is(script)
        return DONE
    write_output(Path(output), script.encode())
    note(f"Not submitted. SLURM writes its log only where this is there: {files}")
    say(output)
    return DONE


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
        raise InputError(f"--env {environment}: {quote(str(python))} is no program")
    return str(python)


def _storage(typed: str | None) -> list[str]:
    """Return how the job is told of the database, from wherever it is started.

    Raises:
        InputError: a password would stand in the script, which others may read.
    """
    url = storage_url(typed)
    database = parse_url(url)
    if isinstance(database, SqliteUrl):
        return [f"--storage={database}"]
    if redact(url) == url:
        return [f"--storage={url}"]
    if typed is not None:
        raise InputError(
            "--storage: its password would stand in the job's script: set "
            f"{STORAGE} instead, which the job inherits, or leave it to ~/.pgpass"
        )
    return []


def _hand_in(script: str, *, name: str, files: Path) -> int:
    find_sbatch()
    path = files / SCRIPT
    try:
        make_directory(files)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror or error}") from error
    write_output(path, script.encode())
    number = hand_in(path)
    note(f"Its log: {files}/slurm-{number}.log. How it stands: sweep status {name} --watch")
    say(f"Submitted study {name} as job {number}.")
    return DONE
