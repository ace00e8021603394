"""A training's output directory: whose it is, who writes there now, whether there is room, and what
is there at the end: adapter, tokenizer, model card, figures and loss curve, all or none.

`run.json` says what is trained there, `training.json` that it is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qlora_sweep.reports import format as units
from qlora_sweep.reports.loss import loss_page
from qlora_sweep.search_spaces.checkpoints import ADAPTER, ADAPTER_CONFIG
from qlora_sweep.search_spaces.documents import exists, is_directory, read_json
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, quote, words_of
from qlora_sweep.storage import files
from qlora_sweep.storage.files import require_parent
from qlora_sweep.sweep.data.tokenizers import TokenizerFiles
from qlora_sweep.sweep.finetuning import checkpoints
from qlora_sweep.sweep.finetuning.checkpoints import RESERVED
from qlora_sweep.sweep.finetuning.results import TrainedAdapter, base_of, model_card

RUN = "run.json"
TRAINING = "training.json"
LOG = "training.log"
_LOCK = ".lock"
_FINISHING = ".finishing"
_LEFT = {_LOCK, RESERVED, RUN, LOG, f"{LOG}.1"}
"""What a training leaves that has no checkpoint: none of it is lost to another one."""
_IN_FLIGHT = 3
"""Checkpoints: those that are kept, and the one that is being written."""
_BESIDE_BYTES = 32 * 2**20
"""A tokenizer, a page with plotly in it, logs."""


def _is_empty(output: Path) -> bool:
    """Whether nothing is in a directory that anybody would miss, or there is none."""
    label = f"--output: {output}"
    if not exists(output, label=label):
        require_parent(output)
        return True
    if not is_directory(output, label=label):
        raise InputError(f"{label} is a file: name a directory")
    return all(path.name in _LEFT or checkpoints.is_left(path) for path in output.iterdir())


def known_run(output: Path) -> dict[str, Any] | None:
    """Return what is trained in a directory; None where nothing is.

    Raises:
        InputError: what says so cannot be read.
    """
    path = output / RUN
    if not exists(path, label=str(path)):
        return None
    return read_json(path, label=str(path))


def is_done(output: Path) -> bool:
    """Whether the training of a directory has ended with its adapter."""
    return (output / TRAINING).is_file()


def refuse_taken(output: Path) -> None:
    """Refuse a directory for a new training where something is in it.

    Raises:
        InputError: says what, and what to do.
    """
    if _is_empty(output):
        return
    what = "is not empty: name a new directory"
    if known_run(output) is not None:
        newest = next(iter(checkpoints.steps_of(output)), 0)
        what = (
            f"holds a training that was begun (step {newest}): --resume resumes it, or name "
            "another directory"
        )
        if is_done(output):
            what = "holds a training that is done: name another directory"
    raise InputError(f"--output: {output} {what}")


def refuse_another(output: Path, run: Mapping[str, Any]) -> None:
    """Refuse to resume a training as another one.

    Raises:
        InputError: nothing is there to resume, or it differs, with what differs.
    """
    begun = known_run(output)
    if begun is None:
        raise InputError(
            f"--resume: {output} holds no training, so there is nothing to resume: leave --resume "
            "out"
        )
    if differing := _differences(begun, run):
        raise InputError(
            f"--resume: {output} holds another training: {'; '.join(differing)}. Type what it was "
            "begun with, or name another directory"
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], *, of: str = "") -> list[str]:
    differences = []
    for key in sorted(old.keys() | new.keys()):
        before = old.get(key)
        now = new.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            differences += _differences(before, now, of="" if key == "config" else f"{key} ")
        elif before != now:
            differences.append(f"{of}{key} was {quote(before)} and is {quote(now)}")
    return differences


@contextlib.contextmanager
def held(output: Path) -> Iterator[None]:
    """Hold a directory, which is made where it is missing; no other process trains there meanwhile.

    Raises:
        InputError: another process does.
        EnvironmentFault: it cannot be made or written.
    """
    try:
        output.mkdir(exist_ok=True)
        lock = files.open_append(output / _LOCK)
    except FileExistsError as error:
        raise InputError(f"--output: {output} is a file: name a directory") from error
    except OSError as error:
        raise EnvironmentFault(f"--output: {words_of(error)}") from error
    with lock:
        try:
            files.lock(lock.fileno())
        except BlockingIOError as error:
            raise InputError(f"--output: another training writes {output} now") from error
        yield


def begin(output: Path, run: Mapping[str, Any], *, checkpoint_bytes: int) -> None:
    """Say what is trained in a directory from now on, and keep the room that its end takes.

    Raises:
        EnvironmentFault: the disk has no room for a training; says how much is needed.
    """
    checkpoints.release(output)
    needed = _IN_FLIGHT * checkpoint_bytes + _BESIDE_BYTES
    free = shutil.disk_usage(output).free
    if free < needed:
        raise EnvironmentFault(
            f"--output: the disk of {output} has {units.gib(free)} free, and checkpoints and the "
            f"adapter take up to {units.gib(needed)}: free some space, or name another disk"
        )
    try:
        files.replace(output / RUN, (json.dumps(run, indent=2) + "\n").encode())
    except OSError as error:
        raise EnvironmentFault(f"cannot write {output / RUN}: {words_of(error)}") from error
    # A file system that cannot keep room has none kept.
    with contextlib.suppress(OSError), open(output / RESERVED, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, checkpoint_bytes + _BESIDE_BYTES)


def finish(trained: TrainedAdapter, tokenizer: TokenizerFiles) -> dict[str, Any]:
    """Write what a training came to, and return what `training.json` says.

    All files are written under a name that begins with a dot and get their own once the disk has
    them, `training.json` last.

    Raises:
        EnvironmentFault: the disk does not take it; the last checkpoint stays.
    """
    output = Path(trained.job.output)
    document = trained.to_json()
    assert trained.result.checkpoint is not None, "a training that keeps nothing is not finished"
    checkpoint = Path(trained.result.checkpoint)
    staging = output / _FINISHING
    checkpoints.release(output)
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        # Built from an architecture alone, the base has no name that PEFT could have taken.
        config = json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = base_of(trained.job.spec)
        pages = {
            ADAPTER_CONFIG: json.dumps(config, indent=2, sort_keys=True) + "\n",
            "README.md": model_card(trained),
            "loss.html": _loss_page(trained, checkpoint),
            TRAINING: json.dumps(document, indent=2) + "\n",
        }
        for file in tokenizer.files:
            copy = staging / file.relative_to(tokenizer.directory)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
        for name, text in pages.items():
            (staging / name).write_text(text, encoding="utf-8")
        shutil.copyfile(checkpoint / ADAPTER, staging / ADAPTER)
        files.synchronize(*staging.rglob("*"), staging)
        for path in sorted(staging.iterdir(), key=lambda path: (path.name == TRAINING, path.name)):
            # A directory of an earlier attempt is in the way of its own.
            shutil.rmtree(output / path.name, ignore_errors=True)
            path.replace(output / path.name)
        files.synchronize(output)
    except OSError as error:
        raise EnvironmentFault(
            f"cannot write {output}: {words_of(error)}. Nothing is lost: the last checkpoint is "
            "there, and the same command with --resume writes the adapter"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    checkpoints.remove(output)
    return document


def _loss_page(trained: TrainedAdapter, checkpoint: Path) -> str:
    result = trained.result
    course = json.loads((checkpoint / checkpoints.COURSE).read_text(encoding="utf-8"))
    return loss_page(
        title=f"{trained.job.spec.name} · loss",
        losses=course["losses"],
        learning_rates=course["learning_rates"],
        evaluations=course["evaluations"],
        final=None if result.eval_loss is None else (result.steps, result.eval_loss),
    )
