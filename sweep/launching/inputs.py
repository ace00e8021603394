"""Which of a person's files a study reads, and where it finds them on another machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from search_spaces.documents import exists, home_expanded
from search_spaces.errors import EnvironmentFault, InputError, words_of
from search_spaces.loading import preset_name
from search_spaces.models import load_model_spec
from storage.directory import SPOOL
from storage.directory import STUDY as IDENTITY
from sweep.data.rows import is_on_hub
from sweep.data.texts import text_files
from sweep.paths import runs_directory
from sweep.request import BESIDE, RunRequest

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Endings of files that hold a model's weights, in lower case."""
_TEMPLATES = "additional_chat_templates"
"""The one directory below a tokenizer's that is of it."""


def packed(
    request: RunRequest, *, with_weights: bool = False
) -> tuple[RunRequest, dict[str, Path]]:
    """Return a request as another machine reads it, and what goes along, by its path beside it.

    Args:
        request: what was typed here.
        with_weights: whether pretrained weights of a directory here go along.

    Raises:
        InputError: something that was typed or named is not right, or is here alone.
    """
    name, space = request.named()
    model, files = load_model_spec(space.model), dict[str, Path]()

    def put(kind: str, path: Path) -> str:
        # What a link is called says what its dataset is, as its ending does.
        there = f"{kind}/{Path(os.path.abspath(path)).name}"
        is_whole = kind == "model" and space.weights == "pretrained"
        found = files_below(kind, path, with_weights=is_whole)
        files.update((f"{there}{below}", file.absolute()) for below, file in found)
        return f"{BESIDE}{there}"

    overrides = dict(request.overrides)
    changes: dict[str, Any] = {"overrides": overrides, "study": name, "storage": None}
    if preset_name(request.space) is None:
        changes["space"] = put("space", home_expanded(request.space))
    if model.source == "directory" and model.path is not None:
        if space.weights == "pretrained" and not with_weights:
            raise InputError(
                f"the weights in {space.model} do not go along: name a hub id, or log in there and "
                "run it beside them"
            )
        overrides["model"] = put("model", model.path)
    if space.data is not None:
        data = space.data.model_dump()
        for kind, key in (("data", "texts"), ("tokenizer", "tokenizer")):
            path = None if data[key] is None else home_expanded(data[key])
            if path is not None and exists(path, label=data[key]):
                data[key] = put(kind, path)
            elif key == "texts" and not is_on_hub(data[key]):
                text_files(data[key])
        overrides["data"] = data
    if request.carried is not None:
        changes["carried"] = _put_spool(files, request.carried)
    return request.model_copy(update=changes), files


def _put_spool(files: dict[str, Path], carried: str) -> str:
    """Let a study's spool go along, with the file that says whose it is."""
    path = home_expanded(carried)
    if not ("/" in carried or path.suffix == ".jsonl"):
        path = runs_directory() / carried / SPOOL
    if not path.is_file():
        raise InputError(f"--from {carried}: {path}: no such file")
    there = f"from/{path.absolute().parent.name}"
    files.update(
        (f"{there}/{file.name}", file.absolute())
        for file in (path, path.with_name(IDENTITY))
        if file.is_file()
    )
    return f"{BESIDE}{there}/{path.name}"


def files_below(kind: str, path: Path, *, with_weights: bool = False) -> Iterator[tuple[str, Path]]:
    """Yield the files of an option's that a study reads, each behind what is below the option's
    own name there: ``/a/b.jsonl``, and nothing for a file that is named itself.

    Args:
        kind: ``data``, ``model`` or ``tokenizer``.
        path: a file, or a directory; what is hidden in it is left out.
        with_weights: those of a model, too.

    Raises:
        InputError: there are no texts in it.
        EnvironmentFault: it cannot be read.
    """
    if not path.is_dir():
        yield "", path
    elif kind == "data":
        for _, file in text_files(str(path)):
            yield f"/{file.relative_to(path)}", file
    else:
        for file in _beside(path):
            if with_weights or file.suffix.lower() not in WEIGHTS:
                yield f"/{file.relative_to(path)}", file


def _beside(directory: Path) -> list[Path]:
    """Return the files of a model or tokenizer that are not hidden."""
    try:
        found = sorted((*directory.iterdir(), *directory.glob(f"{_TEMPLATES}/*")))
    except OSError as error:
        raise EnvironmentFault(f"{directory}: cannot be read: {words_of(error)}") from error
    return [file for file in found if file.is_file() and not file.name.startswith(".")]
