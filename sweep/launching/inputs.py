"""Owns which of a person's files a study reads, and by what names it finds them on a machine.

Knows no provider, and copies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from search_spaces.documents import exists, home_expanded
from search_spaces.loading import preset_name
from search_spaces.models import ModelSpec
from search_spaces.texts import TextsChoice
from sweep.launching.parcel import Input

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


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
        named["model"] = Input(directory, f"model/{directory.name}")
    if choice is not None:
        for option, name in (("data", choice.texts), ("tokenizer", choice.tokenizer)):
            path = None if name is None else home_expanded(name)
            if path is not None and exists(path, label=str(name)):
                named[option] = Input(path.absolute(), f"{option}/{path.absolute().name}")
    preset = preset_name(space)
    if preset is not None:
        return preset, named
    file = home_expanded(space).absolute()
    return Input(file, f"space/{file.name}"), named


def carried(
    space: str | Input, named: Mapping[str, Input], *, are_weights_random: bool
) -> tuple[Input, ...]:
    """Return what goes along: of a model whose weights are random, all of it but the weights."""
    model = named.get("model")
    files = [] if isinstance(space, str) else [space]
    files += [one for option, one in named.items() if option != "model"]
    if model is None or not are_weights_random:
        return (*files, *([] if model is None else [model]))
    small = (
        path
        for path in sorted(model.local.iterdir())
        if path.is_file() and path.suffix not in WEIGHTS and not path.name.startswith(".")
    )
    return (*files, *(Input(path, f"{model.name}/{path.name}") for path in small))
