"""The presets are the manual of a space file: all that one may hold is in them, and it parses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic.fields import FieldInfo

from search_spaces.config import CONFIG_KEYS, TrialConfig
from search_spaces.dimensions import Choices, FloatRange, IntRange
from search_spaces.knobs import TARGET_SETS
from search_spaces.loading import parse_space
from search_spaces.space import Objective, SamplerName, SearchSpace, Weights

PRESETS = sorted((Path(__file__).parents[2] / "search_spaces" / "presets").glob("*.yaml"))
_EXAMPLE = re.compile(r"^(\s*)#(?=[\w ]*\w+:)(?! )(.*)$")
_CONTINUED = re.compile(r"^#(  \w+: .*)$")


def examples(text: str) -> list[tuple[int, list[str]]]:
    """Return each commented example: its first line's index, and its lines without the ``#``."""
    found: list[tuple[int, list[str]]] = []
    for index, line in enumerate(text.splitlines()):
        continued, begun = _CONTINUED.match(line), _EXAMPLE.match(line)
        if continued and found and found[-1][0] + len(found[-1][1]) == index:
            found[-1][1].append(continued[1])
        elif begun:
            found.append((index, [begun[1] + begun[2]]))
    return found


def uncommented(text: str, start: int, lines: list[str]) -> str:
    """Take an example's ``#`` away, and the other line of the same key, as the preset says."""
    key = lines[0].split(":")[0].strip()
    replaced = text.splitlines()
    replaced[start : start + len(lines)] = lines
    kept = [
        line
        for index, line in enumerate(replaced)
        if not re.match(rf"\s*{key}:", line) or start <= index < start + len(lines)
    ]
    return "\n".join(kept) + "\n"


def every_example() -> Iterator[Any]:
    for path in PRESETS:
        for start, lines in examples(path.read_text(encoding="utf-8")):
            yield pytest.param(path, start, lines, id=f"{path.stem}-{lines[0].strip()}")


@pytest.mark.parametrize(("path", "start", "lines"), list(every_example()))
def test_every_commented_example_is_a_space_when_uncommented(
    path: Path, start: int, lines: list[str]
) -> None:
    text = path.read_text(encoding="utf-8")
    space = parse_space(uncommented(text, start, lines), label=path.name)
    assert space != parse_space(text, label=path.name) or _says_a_default(lines)


def _says_a_default(lines: list[str]) -> bool:
    """Whether an example writes out what holds without it."""
    values = yaml.safe_load("\n".join(lines))
    defaults = {
        "lora_alpha": None,
        "learning_rate": 2e-4,
        "steps": {k: f.default for k, f in steps_fields().items()},
        **{k: f.default for k, f in steps_fields().items()},
        "confirm": {k: f.default for k, f in confirm_fields().items()},
    }
    return all(defaults.get(key, object()) == value for key, value in values.items())


def confirm_fields() -> dict[str, FieldInfo]:
    return type(SearchSpace.model_fields["confirm"].default).model_fields


def steps_fields() -> dict[str, FieldInfo]:
    return type(SearchSpace.model_fields["steps"].default).model_fields


def allowed_values() -> set[str]:
    """Every word that a value of a space or of a configuration may be."""
    words = {*get_args(Objective), *get_args(SamplerName), *get_args(Weights), *TARGET_SETS}
    for field in TrialConfig.model_fields.values():
        words |= {word for word in get_args(field.annotation) if isinstance(word, str)}
    words |= set(get_args(SearchSpace.model_fields["numerics"].annotation))
    return words | {"auto", "cpu"}


def words_of(path: Path) -> set[str]:
    return set(re.findall(r"[\w-]+", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_all_that_a_space_may_hold_is_in_every_preset(path: Path) -> None:
    ranges = {*IntRange.model_fields, *FloatRange.model_fields, *Choices.model_fields}
    wanted = {
        *SearchSpace.model_fields,
        "time_budget",
        *steps_fields(),
        *confirm_fields(),
        *CONFIG_KEYS,
        *ranges,
        *allowed_values(),
    }
    assert wanted - words_of(path) == set()


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_has_examples_of_what_it_does_not_use(path: Path) -> None:
    keys = {lines[0].split(":")[0].strip() for _, lines in examples(path.read_text("utf-8"))}
    assert {"time_budget", "objectives", "sampler", "seq_len", "lora_rank"} <= keys


def test_the_presets_explain_the_same_things_in_the_same_words() -> None:
    common = [
        {line for line in path.read_text("utf-8").splitlines() if line.lstrip().startswith("# ")}
        for path in PRESETS
        if path.stem != "cpu-demo"
    ]
    said_by_all = set.intersection(*common)
    # What differs is the GPU's own: its memory, its batches, its lengths, its baseline.
    assert all(len(lines - said_by_all) <= 8 for lines in common)
