"""docs/settings.md: every setting as declared, and its measured effect on speed and memory.

Run as ``python -m tests.docs.settings_page``; a test holds the page to what this makes of the
declarations and of the committed measurements. An effect is that of matched pairs: two measured
configurations of one model in one file that differ in that setting alone.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

from qlora_sweep.search_spaces.config import (
    OPTION_KEYS,
    SETTINGS,
    TrialConfig,
    canonical,
    number_kind,
)
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.loading import shipped_presets
from qlora_sweep.search_spaces.schema import space_schema
from qlora_sweep.storage.surfaces import read_surface
from qlora_sweep.sweep.export.trainers import trainers

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"
SURFACES = ("mistral-7b-v0.3_h200", "tinyllama-1.1b_h200")
TABLES = ("measurements_h200", "held_out_h200", "several_gpus_h200")
PER_DOUBLING = "micro_batch_size"
"""Its values are too many to show: each pair counts for as many doublings as it spans."""
PER_TOKENS = 1024


@dataclass(frozen=True)
class Row:
    """One measured configuration."""

    file: str
    model: str
    config: TrialConfig
    tokens_per_second: float
    peak_bytes: int


@dataclass(frozen=True)
class Pair:
    """The same training with one value and with another."""

    model: str
    change: str
    speed: float
    """Of the second over that of the first."""
    gib: float
    """Peak allocated memory, the second's less the first's."""


def measured() -> Iterator[Row]:
    """Yield every committed measurement that has a speed and a peak."""
    for name in SURFACES:
        surface = read_surface(str(ROOT / "tests/data/surfaces" / f"{name}.jsonl"))
        for row in surface.rows:
            if row.tokens_per_second and row.peak_allocated_bytes:
                numbers = row.tokens_per_second, row.peak_allocated_bytes
                yield Row(name, surface.model.name, row.config, *numbers)
    for name in TABLES:
        text = (ROOT / "tests/data" / f"{name}.jsonl").read_text(encoding="utf-8")
        for values in map(json.loads, text.splitlines()):
            if values.get("step_seconds"):
                config = TrialConfig.model_validate(values["config"])
                speed = config.samples_per_step * config.seq_len / values["step_seconds"]
                yield Row(name, values["model"], config, speed, values["peak_allocated_bytes"])


def pairs(rows: Iterable[Row], key: str) -> Iterator[Pair]:
    """Yield what a setting changed between rows that differ in nothing else."""
    groups: dict[tuple[str, ...], list[tuple[Any, Row]]] = defaultdict(list)
    for row in rows:
        values = _matched(row.config)
        value = values.pop(key)
        groups[row.file, row.model, json.dumps(values, sort_keys=True)].append((value, row))
    for same in groups.values():
        for (a, first), (b, second) in combinations(
            sorted(same, key=lambda one: _order(key, one[0])), 2
        ):
            yield _pair(key, (a, first), (b, second))


def _matched(config: TrialConfig) -> dict[str, Any]:
    """Return what has to be equal; what follows another by default goes with that."""
    values = canonical(config).model_dump(mode="json")
    if values["lora_alpha"] == 2 * values["lora_rank"]:
        values["lora_alpha"] = None
    if values["effective_batch_size"] == values["micro_batch_size"] * values["data_parallel"]:
        values["effective_batch_size"] = None
    return values


def _order(key: str, value: Any) -> Any:
    """Return where a value stands: from the default on, or up where it is a number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return value != json.loads(json.dumps(TrialConfig.model_fields[key].default)), str(value)


def _pair(key: str, first: tuple[Any, Row], second: tuple[Any, Row]) -> Pair:
    (a, before), (b, after) = first, second
    speed = after.tokens_per_second / before.tokens_per_second
    gib = (after.peak_bytes - before.peak_bytes) / GIB
    if key == PER_DOUBLING:
        tokens = (b - a) * after.config.seq_len
        return Pair(
            after.model, "each doubling", speed ** (1 / log2(b / a)), gib * PER_TOKENS / tokens
        )
    return Pair(after.model, f"{_shown(a)} to {_shown(b)}", speed, gib)


def _shown(value: Any) -> str:
    return f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"


def effects(rows: list[Row], key: str) -> list[str]:
    """Return the lines of a setting's table; none if no pair differs only in it."""
    found: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs(rows, key):
        found[pair.change, pair.model].append(pair)
    if not found:
        return []
    unit = f"GiB per {PER_TOKENS:,} tokens more" if key == PER_DOUBLING else "peak, GiB"
    head = [f"| change | model | pairs | speed | {unit} |", "|---|---|---|---|---|"]
    places = sorted(found.items(), key=_place)
    return [*head, *(_line(change, model, same) for (change, model), same in places), ""]


def _place(item: tuple[tuple[str, str], list[Pair]]) -> tuple[list[float], tuple[str, str]]:
    """Return where a line stands: changes of numbers go by the numbers."""
    return [float(number) for number in re.findall(r"[\d.]+", item[0][0])], item[0]


def _line(change: str, model: str, same: list[Pair]) -> str:
    speeds, memory = [one.speed for one in same], [one.gib for one in same]
    return (
        f"| {change} | {model} | {len(same)} | {_spread(speeds, '.2f', 'x ')} | "
        f"{_spread(memory, '+.2f', '')} |"
    )


def _spread(values: list[float], form: str, mark: str) -> str:
    middle = f"{mark}{median(values):{form}}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):{form}} to {max(values):{form}})"


def _values(key: str) -> str:
    """Return the values that a setting takes, in words."""
    schema = space_schema()["properties"]["fixed"]["properties"][key]
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    if kinds[0].get("type") == "boolean":
        return "`true`, `false`"
    if key == "target_modules":
        return "`qv`, `attention`, `all-linear`, or a list of module names"
    if "enum" in kinds[0]:
        return ", ".join(f"`{value}`" for value in kinds[0]["enum"])
    least = f"above {kinds[0]['exclusiveMinimum']:g}," if "minimum" not in kinds[0] else ""
    least = least or f"{kinds[0]['minimum']:g}"
    most = kinds[0]["maximum"]
    noun = "a whole number" if number_kind(key) is int else "a number"
    return f"{noun}, {least} to {most:,.0f}"


MEMORY = {
    "grows": ["- Peak memory can only grow with it, all else equal."],
    "shrinks": ["- Peak memory can only shrink with it, all else equal."],
    "untouched": ["- Peak memory does not depend on it."],
    "unknown": [],
}


def _section(key: str, rows: list[Row], searched: dict[str, str]) -> list[str]:
    setting, field = SETTINGS[key], TrialConfig.model_fields[key]
    default = json.dumps(field.default)
    option = OPTION_KEYS.get(key, f"--set {key}=...")
    said = [
        f"{trainer['name']} `{option}`"
        for trainer in list(trainers().values())[1:]
        for option, value in trainer["options"].items()
        if value == f"${key}"
    ]
    return [
        f"## {key}",
        "",
        " ".join((field.description or "").replace("``", "`").split()),
        "",
        f"- Values: {_values(key)}; default `{default.strip(chr(34))}`. Option: `{option}`.",
        *MEMORY[setting.memory],
        *([f"- Searched by {searched[key]}."] if key in searched else []),
        *([f"- Names: {', '.join(said)}."] if said else []),
        "",
        *effects(rows, key),
    ]


def _searched() -> dict[str, str]:
    """Return which presets have a setting as a dimension."""
    spaces = {space.name: space for space in shipped_presets()}
    found = {
        key: [f"`{name}`" for name, space in spaces.items() if key in space.dimensions]
        for key in SETTINGS
    }
    return {
        key: "every preset" if len(names) == len(spaces) else ", ".join(names)
        for key, names in found.items()
        if names
    }


INTRODUCTION = """\
# Every setting

<!-- Made by `python -m tests.docs.settings_page`: change the declarations or the measurements. -->

A setting is a key of a configuration: a dimension of a space, a fixed value, or an option of
`sweep plan` and `sweep run`. They are declared in `search_spaces/config.py`. Unless stated, peak
memory can grow or shrink with a setting.

The tables show the **measured effect** of a change, in pairs of configurations of one model that
differ only in that setting, on one NVIDIA H200: the number of pairs, the median ratio of speeds and
the median difference of peak allocated memory, with lowest and highest. Ranges are wide because the
effect depends on the other settings. One or two pairs are only an example. Small micro-batches wait
for the host, whose speed varies, and other GPUs have other ratios. A setting without a table has no
such pair in `tests/data`: {files}.
"""


def page() -> str:
    """Return the page."""
    rows = list(measured())
    searched = _searched()
    files = ", ".join(f"`{name}.jsonl`" for name in (*SURFACES, *TABLES))
    sections = [line for key in SETTINGS for line in _section(key, rows, searched)]
    return INTRODUCTION.format(files=files) + "\n" + "\n".join(sections).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
