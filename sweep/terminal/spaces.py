"""`sweep init` and `sweep schema`: what a person needs to write a search space."""

from __future__ import annotations

import shlex

from qlora_sweep.search_spaces.presets import starting_text
from qlora_sweep.search_spaces.schema import schema_text
from qlora_sweep.storage.files import checked_output, write_output
from qlora_sweep.sweep.running.device_info import read_gpu
from qlora_sweep.sweep.terminal.console import note, say, say_as_is


def schema() -> None:
    """Print the JSON Schema of a space file."""
    say_as_is(schema_text().removesuffix("\n"))


def init(*, gpu: str | None, model: str | None, output: str | None, is_forced: bool) -> None:
    """Print a space to start from, or write it and print what to type next."""
    path = checked_output(
        output,
        what="a search space",
        endings=(".yaml", ".yml"),
        is_forced=is_forced,
        # It is meant to be changed: one that sweep wrote is a person's own too.
        is_marked=False,
    )
    gpu_name = _gpu_here() if gpu is None or gpu == "auto" else gpu
    text = starting_text(gpu_name, model)
    if path is None:
        say_as_is(text.removesuffix("\n"))
        return
    write_output(path, text.encode())
    typed = shlex.quote(str(path))
    commands = f"sweep run {typed}"
    if gpu_name != "cpu":
        # What is predicted is a GPU's memory and speed; a CPU is measured.
        commands = f"sweep plan {typed}, or {commands}"
    say(f"Wrote {path}; next: {commands}")


def _gpu_here() -> str:
    """Return the catalogue's name of the GPU in this machine; the CPU where there is none."""
    here = read_gpu()
    if here is None:
        note("No NVIDIA GPU here, so the space is for the CPU; --gpu names a GPU.")
        return "cpu"
    return here.spec().name
