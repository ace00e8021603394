"""Owns which of a person's files a study reads, and by what names it finds them on a machine.

Knows no provider, and copies nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from search_spaces.documents import exists, home_expanded
from search_spaces.errors import EnvironmentFault, words_of
from search_spaces.loading import preset_name
from search_spaces.models import ModelSpec
from search_spaces.texts import TextsChoice
from sweep.data.files import text_files
from sweep.launching.parcel import Input

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
"""Endings of files that hold a model's weights, in lower case."""
_TEMPLATES = "additional_chat_templates"
"""The one directory below a tokenizer's that is of it."""


def located(
    space: str, *, model: ModelSpec, choice: TextsChoice | None
) -> tuple[str | Input, dict[str, Input]]:
    """Return the space as the machine names it, and what else is a file here, by its option.

    Args:
        space: as it was typed.
        model: of the study.
        choice: its texts, named from where the command runs; None without.
    """
    named: dict[str, Input] = {}
    if model.source == "directory" and model.path is not None:
        directory = model.path.absolute()
        named["model"] = Input(directory, place("model", directory))
    if choice is not None:
        for option, name in (("data", choice.texts), ("tokenizer", choice.tokenizer)):
            path = None if name is None else home_expanded(name)
            if path is not None and exists(path, label=str(name)):
                named[option] = Input(path.absolute(), place(option, path))
    preset = preset_name(space)
    if preset is not None:
        return preset, named
    file = home_expanded(space).absolute()
    return Input(file, place("space", file)), named


def carried(
    space: str | Input, named: Mapping[str, Input], *, are_weights_random: bool
) -> tuple[Input, ...]:
    """Return what goes along: of each directory what a study reads, and of weights that are random
    none.
    """
    files = [] if isinstance(space, str) else [space]
    for option, one in named.items():
        with_weights = option == "model" and not are_weights_random
        found = files_below(option, one.local, with_weights=with_weights)
        files += [Input(path, f"{one.name}{below}") for below, path in found]
    return tuple(files)


def place(kind: str, path: Path) -> str:
    """Return where a file or directory is there, by the name that it has here: what a link is
    called says what its text is, as its ending does.
    """
    return f"{kind}/{Path(os.path.abspath(path)).name}"


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
