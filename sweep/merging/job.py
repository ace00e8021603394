"""A merge from the parent's side: what is typed checked, a child that merges, and a directory that
is there whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.checkpoints import INDEX, SINGLE, check_weights
from search_spaces.documents import home_expanded, read_json
from search_spaces.errors import EnvironmentFault, InputError, words_of
from search_spaces.models import ModelSpec, fetch_weights, load_model_spec
from storage import files
from storage.files import require_parent
from sweep.child_environment import child_environment
from sweep.merging.adapter import WEIGHTS, Adapter, TensorInfo, read_adapter, read_tensors
from sweep.merging.plan import MergedDtype, MergePlan, natural_dtype, plan_merge
from sweep.merging.report import MergeDone, MergeOrder, MergeReport
from sweep.subprocess_jobs import run_subprocess

ROWS = 4
_COMMAND = (sys.executable, "-P", "-m", "sweep.merging")
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_TOKENIZER_ITSELF = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SLACK_BYTES = 64 * 2**20
"""Of the disk, for config, index and tokenizer."""


@dataclass(frozen=True)
class MergeRequest:
    """What was typed."""

    adapter: str
    output: str
    model: str | None = None
    """The base; None for the one that the adapter names."""
    dtype: MergedDtype | None = None
    """Of the merged model; None for what the base is stored in."""
    rows: int = ROWS
    """To compare logits on; 0 for none."""


def merge(
    request: MergeRequest, *, on_news: Callable[[Mapping[str, Any]], None] = lambda _: None
) -> MergeReport:
    """Merge an adapter into its base, and say how near the result is to base plus adapter.

    Args:
        request: what was typed.
        on_news: called with ``{"merged", "of"}`` in bytes, and ``{"compared", "of"}`` in models.

    Raises:
        InputError: no such adapter or base, or they cannot be merged; nothing was written.
        EnvironmentFault: no room on the disk, or no memory; nothing is left of it.
    """
    began = time.monotonic()
    if request.rows < 0:
        raise InputError(f"--rows must be at least 0, got {request.rows}")
    output = _new_directory(request.output)
    adapter = read_adapter(request.adapter)
    base, label = _base(adapter, request)
    config = read_json(base / "config.json", label=f"{label}/config.json")
    tensors = _base_tensors(base, label=label)
    dtype = request.dtype or natural_dtype(tensors)
    plan = plan_merge(adapter, tensors, config, dtype=dtype)
    with _written_whole(output) as directory:
        _check_room(output, plan)
        tokenizer = _put_beside(plan, adapter, base, directory)
        order = MergeOrder(
            base=str(base),
            adapter=str(adapter.directory),
            weights=str(adapter.directory / WEIGHTS),
            directory=str(directory),
            dtype=dtype,
            pieces=list(plan.pieces),
            rows=request.rows,
        )
        answer = run_subprocess(
            _COMMAND,
            order.model_dump(mode="json"),
            on_news=on_news,
            environment=child_environment(),
        )
        done = MergeDone.model_validate(answer)
        _write_card(directory, adapter, label, dtype)
    return MergeReport(
        output=str(output),
        adapter=request.adapter,
        base=label,
        dtype=dtype,
        weights_merged=sum(piece.product is not None for piece in plan.pieces),
        weights_replaced=sum(piece.file is None for piece in plan.pieces),
        weights_bytes=plan.nbytes,
        seconds=time.monotonic() - began,
        tokenizer=tokenizer,
        **done.model_dump(),
    )


def _new_directory(typed: str) -> Path:
    """Return where the merged model goes.

    Raises:
        InputError: something is there already, or it is in no directory that exists.
    """
    path = home_expanded(typed)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise InputError(f"--output: {typed} is not a directory: name a new one")
    if path.is_dir() and any(path.iterdir()):
        raise InputError(f"--output: {typed} is not empty: name a new directory")
    require_parent(path)
    return path.absolute()


def _base(adapter: Adapter, request: MergeRequest) -> tuple[Path, str]:
    """Return the directory of the base's weights, and what a person calls the base.

    Raises:
        InputError: there is no such model, or it has no weights in safetensors.
        EnvironmentFault: the hub cannot be reached.
    """
    name = request.model or adapter.base
    if name is None:
        raise InputError(f"adapter '{request.adapter}' names no base: name it with --model")
    try:
        spec = load_model_spec(name)
    except InputError as error:
        hint = "" if request.model else " (the adapter names it; say where it is with --model)"
        raise InputError(f"{error}{hint}") from error
    if spec.source == "shipped":
        raise InputError(
            f"base '{name}' is an architecture without weights, so there is nothing to merge into: "
            "name the trained one, a directory or hub id, with --model"
        )
    path = fetch_weights(name) if spec.source == "hub" else spec.path
    assert path is not None, "a directory has a path"
    check_weights(ModelSpec(name, "directory", spec.config, path))
    return path, name


def _base_tensors(base: Path, *, label: str) -> dict[str, TensorInfo]:
    """Return what the headers of the base's files say, in the order of the index or the file."""
    index = base / INDEX
    names = [SINGLE]
    if index.exists():
        names = sorted(set(read_json(index, label=f"{label}/{INDEX}")["weight_map"].values()))
    return {
        tensor: info
        for name in names
        for tensor, info in read_tensors(base / name, label=f"{label}/{name}")
    }


def _check_room(output: Path, plan: MergePlan) -> None:
    """Refuse beforehand what the disk cannot hold."""
    parent = output
    while not parent.exists():
        parent = parent.parent
    needed, free = plan.nbytes + _SLACK_BYTES, shutil.disk_usage(parent).free
    if free < needed:
        raise EnvironmentFault(
            f"--output: the merged model takes {needed / 2**30:.1f} GiB, and {parent} has "
            f"{free / 2**30:.1f} GiB free: nothing was written"
        )


@contextmanager
def _written_whole(output: Path) -> Iterator[Path]:
    """Yield a directory beside ``output`` that takes its name once it is whole, or is removed.

    What a merge that was killed has left of one is removed.
    """
    temporary = output.with_name(f".{output.name}.merging")
    try:
        with _held(temporary, output):
            try:
                yield temporary
                mode = (temporary / "config.json").stat().st_mode
                for path in temporary.iterdir():
                    # safetensors makes its files for their owner alone; these are to be shared.
                    path.chmod(mode)
                    _sync(path)
                temporary.rename(output)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise EnvironmentFault(f"--output: {words_of(error)}: nothing was kept") from error


@contextmanager
def _held(temporary: Path, output: Path) -> Iterator[None]:
    """Make a directory anew and hold it; nobody else writes there meanwhile.

    Raises:
        InputError: another merge does.
        OSError: it cannot be made.
    """
    temporary.mkdir(exist_ok=True)
    descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            files.lock(descriptor)
        except BlockingIOError as error:
            raise InputError(f"--output: another merge writes {output} now") from error
        for path in temporary.iterdir():
            path.unlink()
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    """Wait until the disk has a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_beside(plan: MergePlan, adapter: Adapter, base: Path, directory: Path) -> str | None:
    """Write config, generation config and tokenizer; return whose tokenizer it is."""
    text = json.dumps(plan.config, indent=2, sort_keys=True) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    if (base / "generation_config.json").exists():
        shutil.copyfile(base / "generation_config.json", directory / "generation_config.json")
    # The adapter's own comes first: a training may have added tokens or a chat template.
    for whose, source in (("adapter", adapter.directory), ("base", base)):
        if any((source / name).exists() for name in _TOKENIZER_ITSELF):
            for name in _TOKENIZER:
                if (source / name).exists():
                    shutil.copyfile(source / name, directory / name)
            return whose
    return None


def _write_card(directory: Path, adapter: Adapter, base: str, dtype: MergedDtype) -> None:
    """Write a model card of what was merged."""
    is_hub_id = not Path(base).is_absolute() and base.count("/") == 1 and base[0] not in ".~"
    head = ["---", *([f"base_model: {base}"] if is_hub_id else []), "library_name: transformers"]
    text = "\n".join(
        [
            *head,
            "tags:",
            "- merge",
            "---",
            "",
            f"# {base} with the adapter {adapter.directory.name} merged into it",
            "",
            f"Weights in {dtype}, worked out in fp32 from the 16-bit base. The adapter was perhaps "
            "trained on that base",
            "in 4 or 8 bits: this model is then near what was trained, and not the same.",
            "",
        ]
    )
    (directory / "README.md").write_text(text, encoding="utf-8")
