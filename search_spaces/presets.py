"""The shipped presets, each a short overlay of one base that explains everything.

The space that a person starts from is composed in the same way for their GPU and model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from search_spaces.config import EIGHT_BIT
from search_spaces.documents import parse_yaml, validate
from search_spaces.gpus import GIB, GpuSpec, find_gpu
from search_spaces.linears import parameters
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.rules import AMPERE, EIGHT_BIT_SINCE
from search_spaces.space import DEFAULT_MODEL, SearchSpace

DEMO = "cpu-demo"
"""The preset for a machine without a GPU."""
_SECTIONS = ("dimensions", "fixed", "baseline")
_USUAL_PARAMETERS = 7e9
"""What an architecture that is not known from here is taken to have."""
_CPU_BYTES_EACH = 4
"""Of a model's parameters: the base in 16 bits, and as much for what a training keeps."""


@cache
def preset_texts() -> dict[str, str]:
    """Return the YAML of every shipped preset, by name: complete, with all comments."""
    base = (files("search_spaces") / "base.yaml").read_text(encoding="utf-8")
    shipped = sorted((files("search_spaces") / "presets").iterdir(), key=lambda file: file.name)
    overlays = {file.name.removesuffix(".yaml"): file.read_text("utf-8") for file in shipped}
    return {
        name: _composed("../space.schema.json", text.partition("\n\n")[0], base, text)
        for name, text in overlays.items()
    }


def schema_path() -> str:
    """Return where the shipped schema of a space file is."""
    return str(files("search_spaces") / "space.schema.json")


@dataclass
class _Entry:
    """A key of a space's text, or an example of one (``#trials: 40``), with the comment above it;
    without a key, a line that stands by itself."""

    lines: list[str]
    key: str = ""
    """With its ``#`` where it is an example."""
    comment: list[str] = field(default_factory=list)
    section: list[_Entry] | None = None


def _entries(lines: Sequence[str], indent: str = "") -> list[_Entry]:
    found: list[_Entry] = []
    at = 0
    while at < len(lines):
        begun = re.match(rf"{indent}(#?)(\w+):(.*)", lines[at])
        if begun is None:
            found.append(_Entry([lines[at]]))
            at += 1
            continue
        mark, key, rest = begun.groups()
        end = at + 1
        while end < len(lines) and lines[end].startswith(f"{indent}{mark}  "):
            end += 1
        entry = _Entry([*lines[at:end]], mark + key)
        if key in _SECTIONS and not rest and not mark:
            entry.lines, entry.section = [lines[at]], _entries(lines[at + 1 : end], "  ")
        while found and not found[-1].key and found[-1].lines[0].startswith(f"{indent}# "):
            entry.comment[:0] = found.pop().lines
        found.append(entry)
        at = end
    return found


def _composed(
    schema: str, title: str, text: str, overlay: str, *, without: Sequence[str] = ()
) -> str:
    """Return a text with an overlay's keys, and their comments, in place of its own.

    What the overlay searches is no longer fixed, and the other way round.
    """
    entries = [each for each in _entries(text.splitlines()) if each.key not in without]
    others = [each for each in _entries(overlay.splitlines()) if each.key != "extends"]
    own, new = ({each.key: each.section or [] for each in of} for of in (entries, others))
    for here, there in (("dimensions", "fixed"), ("fixed", "dimensions")):
        moved = {each.key for each in new.get(here, ()) if each.key.isidentifier()}
        own[there][:] = [each for each in own[there] if each.key not in moved]
    _put(entries, others)
    head = f"# yaml-language-server: $schema={schema}\n{title}\n#\n"
    return head + "".join(f"{line}\n" for line in _lines(entries))


def _put(entries: list[_Entry], others: Sequence[_Entry]) -> None:
    for new in (each for each in others if each.key):
        keys = [at for at, old in enumerate(entries) if old.key.isidentifier()]
        same = [at for at, old in enumerate(entries) if old.key.strip("#") == new.key.strip("#")]
        if not same:
            entries.insert(max(keys, default=-1) + 1, new)
            continue
        # An example only where the text has no such key.
        same.sort(key=lambda at: at not in keys)
        old = entries[same[0]]
        new.comment = new.comment or old.comment
        if new.section is not None and old.section is not None:
            old.comment = new.comment
            _put(old.section, new.section)
        else:
            entries[same[0]] = new


def _lines(entries: Sequence[_Entry]) -> Iterator[str]:
    for entry in entries:
        yield from (*entry.comment, *entry.lines, *_lines(entry.section or ()))


@cache
def _presets() -> dict[str, SearchSpace]:
    read = {name: parse_yaml(text, label=name) for name, text in preset_texts().items()}
    return {name: validate(SearchSpace, of.values, of) for name, of in read.items()}


def starting_text(gpu: str, model: str | None) -> str:
    """Return a commented space for a GPU, ready to be run.

    It is the preset of the GPU, or else of that which has about as much memory for each of the
    model's parameters. It has no name: the file's names it, and its study.

    Args:
        gpu: a GPU of the catalogue, or ``cpu``.
        model: what a person names; None for the preset's.

    Raises:
        InputError: no such GPU or model, or the two do not go together.
        EnvironmentFault: a hub id, and the hub is not to be had.
    """
    spec = None if gpu == "cpu" else find_gpu(gpu)
    chosen = DEMO if spec is None else _nearest(spec, model)
    trained = load_model_spec(model or _presets()[chosen].model)
    overlay = [f"gpu: {'cpu' if spec is None else spec.name}"]
    if model is not None:
        overlay.append(f"model: {json.dumps(model)}")
    if spec is not None:
        overlay += _for_gpu(spec, chosen, trained)
    elif trained.name != _presets()[DEMO].model:
        room = math.ceil((parameters(trained) or _USUAL_PARAMETERS) * _CPU_BYTES_EACH / GIB)
        overlay += [
            "# In GiB. A CPU has no memory of its own, so it must be said: here "
            f"{_CPU_BYTES_EACH} bytes for each of the model's parameters.",
            "# On a CPU a trial of a billion of them takes minutes.",
            f"budget_gib: {room}",
        ]
    words = "a CPU" if spec is None else spec.name
    title = f"# A search space for {words}, to be changed: `sweep run THIS-FILE`."
    text = preset_texts()[chosen].partition("\n#\n# Every key")
    return _composed(
        schema_path(),
        title,
        f"# Every key{text[2]}",
        "\n".join(overlay),
        without=("name", "description"),
    )


def _nearest(spec: GpuSpec, model: str | None) -> str:
    """Return the preset with the most similar memory for each parameter; the GPU's own first."""
    spaces = _presets()
    if spec.name in spaces and model is None:
        return spec.name
    asked = _bytes_each(spec, load_model_spec(model or DEFAULT_MODEL))
    distance = {
        name: abs(math.log(_bytes_each(find_gpu(space.gpu), load_model_spec(space.model)) / asked))
        for name, space in spaces.items()
        if space.gpu != "cpu"
    }
    return min(distance, key=lambda name: (distance[name], name != spec.name))


def _bytes_each(spec: GpuSpec, model: ModelSpec) -> float:
    return spec.budget_bytes / (parameters(model) or _USUAL_PARAMETERS)


def _for_gpu(spec: GpuSpec, chosen: str, model: ModelSpec) -> Iterator[str]:
    """Yield what of the chosen preset is otherwise for this GPU and model: lengths that the model
    takes, and the types that the GPU multiplies."""
    space, limit = _presets()[chosen], model.max_positions or math.inf
    units = [kind for kind, since in EIGHT_BIT_SINCE.items() if spec.compute_capability >= since]
    has_bf16 = spec.compute_capability >= AMPERE

    def own(values: Sequence[Any]) -> list[Any]:
        plain = [x for x in values if x not in EIGHT_BIT and (x != "bf16" or has_bf16)]
        return [*plain, *units] if set(values) & set(EIGHT_BIT) else plain

    yield "dimensions:"
    if chosen != spec.name:
        whose = f"Those of the preset {chosen}, which has about as much memory for each parameter."
        yield f"  # {whose}"
        yield f"  micro_batch_size: {_flow(space.values_of('micro_batch_size'))}"
    lengths = [n for n in space.values_of("seq_len") if n <= limit] or [limit]
    yield f"  seq_len: {_flow(lengths)}"
    if not has_bf16:
        yield "  # The GPU has no bf16; fp16 needs loss scaling. fp32 is there as well."
    yield f"  compute_dtype: {_flow(own(space.values_of('compute_dtype')))}"
    yield f"  quantization: {_flow(own(space.values_of('quantization')))}"
    left = [{key: own(of) for key, of in entry.items()} for entry in space.leave_out]
    entries = [entry for entry in left if all(entry.values())]
    yield "leave_out:" if entries else "leave_out: []"
    yield from (f"  - {_flow(entry)}" for entry in entries)
    yield "baseline:"
    yield f"  seq_len: {min(space.baseline['seq_len'], limit)}"
    if not has_bf16:
        yield "  compute_dtype: fp16"


def _flow(value: Any) -> str:
    """Return a value on one line of YAML."""
    plain = list(value) if isinstance(value, tuple) else value
    return str(
        yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=math.inf)
    ).strip()
