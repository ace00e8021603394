"""Owns what a person needs to write a search space: one to start from, and its schema."""

from __future__ import annotations

import shlex
from pathlib import Path

from search_spaces.documents import exists
from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.gpus import match_product
from search_spaces.schema import schema_text
from search_spaces.starting import starting_text
from sweep.running.device_info import read_card
from sweep.terminal.console import STDOUT, note, say, say_as_is

DONE = 0


def schema() -> int:
    """Print the JSON Schema of a space file."""
    say_as_is(schema_text().removesuffix("\n"))
    return DONE


def init(*, gpu: str | None, model: str | None, output: Path | None) -> int:
    """Print a space to start from, or write it and print what to type next."""
    card = gpu or _card_here()
    text = starting_text(card, model)
    if output is None or str(output) == STDOUT:
        say_as_is(text.removesuffix("\n"))
        return DONE
    if exists(output, label=str(output)):
        raise InputError(f"--output: {output} is there already: name another file")
    try:
        # Never over something that has come to be there since.
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise InputError(f"--output: {output} is there already: name another file") from error
    except OSError as error:
        raise EnvironmentFault(f"cannot write {output}: {error.strerror}") from error
    typed = shlex.quote(str(output))
    # What is predicted is a card's memory and speed; a CPU is measured.
    planned = "" if card == "cpu" else f"sweep plan {typed}, or "
    say(f"Wrote {output}; next: {planned}sweep run {typed}")
    return DONE


def _card_here() -> str:
    """Return the catalogue's name of the card in this machine; the CPU where there is none."""
    card = read_card()
    if card is None:
        note("No NVIDIA GPU here, so the space is for the CPU; --gpu names a card.")
        return "cpu"
    spec = match_product(card.product)
    if spec is None:
        raise InputError(f"the catalogue does not know '{card.product}': name a card with --gpu")
    return spec.name
