"""The shipped presets, each a short overlay of one base that explains everything.

The space that a person starts from is composed in the same way for their GPU and model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from qlora_sweep.search_spaces.config import TrialConfig, as_typed
from qlora_sweep.search_spaces.documents import parse_yaml, validate
from qlora_sweep.search_spaces.gpus import GIB, GpuSpec, find_gpu
from qlora_sweep.search_spaces.kinds import AMPERE, COMPUTE_DTYPES, EIGHT_BIT
from qlora_sweep.search_spaces.linears import has_experts, parameters, unquantized
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.rules import (
    LIGER_MODEL_TYPES,
    OVERFLOWS_FP16,
    WITHOUT_CHECKPOINTING,
    hands_on_more,
    own_settings,
)
from qlora_sweep.search_spaces.sizes import offered_batches, offered_lengths
from qlora_sweep.search_spaces.space import DEFAULT_MODEL, SearchSpace

DEMO = "cpu-demo"
"""The preset for a machine without a GPU."""
_PRESET_SCHEMA = "../space.schema.json"
_SECTIONS = ("dimensions", "fixed", "baseline")
_USUAL_PARAMETERS = 7e9
"""What an architecture that is not known from here is taken to have."""
_CPU_BYTES_EACH = 4
"""Of a model's parameters: the base in 16 bits, and as much for what a training keeps."""


@cache
def preset_texts() -> dict[str, str]:
    """Return the YAML of every shipped preset, by name: complete, with all comments."""
    return {name: _preset_text(name) for name in _overlays()}


@cache
def preset_space(name: str, gpu: str | None = None, model: str | None = None) -> SearchSpace:
    """Return a shipped preset for a GPU and a model: its own, or those that a person names.

    What is searched follows from both; all else, the baseline among it, is the preset's.

    Args:
        name: of the preset.
        gpu: a GPU of the catalogue; None for the preset's.
        model: what a person names; None for the preset's.

    Raises:
        InputError: no such GPU or model, or the two do not go together.
        EnvironmentFault: a hub id, and the hub is not to be had.
    """
    document = parse_yaml(_preset_text(name, gpu, model), label=f"{name}.yaml")
    return validate(SearchSpace, document.values, document)


def _preset_text(name: str, gpu: str | None = None, model: str | None = None) -> str:
    overlay = _overlays()[name]
    title = overlay.partition("\n\n")[0]
    if name == DEMO:
        if gpu == "cpu":
            gpu = None
        parts = [_base_text(), overlay]
    else:
        spec = find_gpu(gpu or _said(overlay, "gpu"))
        trained = load_model_spec(model or _said(overlay, "model") or DEFAULT_MODEL)
        parts = [_base_text(), _searched(spec, trained), overlay]
        if gpu is not None:
            gpu = spec.name
    return _composed(_PRESET_SCHEMA, title, parts + _asked(gpu, model))


def _asked(gpu: str | None, model: str | None) -> list[str]:
    """Return an overlay of what a person names; none where they name nothing."""
    lines = []
    if gpu is not None:
        lines.append(f"gpu: {json.dumps(gpu)}")
    if model is not None:
        lines.append(f"model: {json.dumps(model)}")
    if not lines:
        return []
    return ["\n".join(lines)]


def _said(overlay: str, key: str) -> str:
    """Return the word that an overlay says of a key at its top; empty where it says nothing."""
    found = re.search(rf"^{key}: (\S+)$", overlay, re.MULTILINE)
    if found is None:
        return ""
    return found[1]


@cache
def _base_text() -> str:
    return (files("qlora_sweep.search_spaces") / "base.yaml").read_text(encoding="utf-8")


@cache
def _overlays() -> dict[str, str]:
    """Return what each preset says beside the base, by name."""
    shipped = sorted(
        (files("qlora_sweep.search_spaces") / "presets").iterdir(), key=lambda file: file.name
    )
    return {file.name.removesuffix(".yaml"): file.read_text("utf-8") for file in shipped}


def schema_path() -> str:
    """Return where the shipped schema of a space file is."""
    return str(files("qlora_sweep.search_spaces") / "space.schema.json")


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
        entry = _Entry(list(lines[at:end]), mark + key)
        if key in _SECTIONS and not rest and not mark:
            entry.lines = [lines[at]]
            entry.section = _entries(lines[at + 1 : end], "  ")
        while found and not found[-1].key and found[-1].lines[0].startswith(f"{indent}# "):
            entry.comment[:0] = found.pop().lines
        found.append(entry)
        at = end
    return found


def _composed(schema: str, title: str, texts: Sequence[str], *, without: Sequence[str] = ()) -> str:
    """Return a text with the keys of overlays, and their comments, in place of its own.

    What an overlay searches is no longer fixed, and the other way round.

    Args:
        schema: where an editor finds it.
        title: comment at the top.
        texts: the text and its overlays, each over all before it.
        without: keys to leave out.
    """
    entries: list[_Entry] = []
    for text in texts:
        found = _entries(text.splitlines())
        kept = [entry for entry in found if entry.key != "extends" and entry.key not in without]
        if entries:
            _overlay(entries, kept)
        else:
            entries = kept
    lines = [f"# yaml-language-server: $schema={schema}", title, "#"]
    lines += _lines(entries)
    return "\n".join(lines) + "\n"


def _overlay(entries: list[_Entry], others: Sequence[_Entry]) -> None:
    sections = {entry.key: entry for entry in entries}
    for entry in others:
        place = _OTHER_PLACE.get(entry.key)
        if place is None or entry.section is None:
            continue
        moved = {setting.key for setting in entry.section if setting.key.isidentifier()}
        before = sections[place].section or []
        sections[place].section = [setting for setting in before if setting.key not in moved]
    _put(entries, others)


_OTHER_PLACE = {"dimensions": "fixed", "fixed": "dimensions"}
"""Where a setting no longer stands that an overlay has in a section."""


def _put(entries: list[_Entry], others: Sequence[_Entry]) -> None:
    for new in others:
        if not new.key:
            continue
        keys = []
        same = []
        for at, old in enumerate(entries):
            if old.key.isidentifier():
                keys.append(at)
            if old.key.strip("#") == new.key.strip("#"):
                same.append(at)
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
        yield from entry.comment
        yield from entry.lines
        yield from _lines(entry.section or ())


def starting_text(gpu: str, model: str | None) -> str:
    """Return a commented space for a GPU, ready to be run.

    What it searches follows from the GPU and the model. The baseline is that of the GPU's preset,
    or else of the preset which has about as much memory for each of the model's parameters. It has
    no name: the file's names it, and its study.

    Args:
        gpu: a GPU of the catalogue, or ``cpu``.
        model: what a person names; None for the preset's.

    Raises:
        InputError: no such GPU or model, or the two do not go together.
        EnvironmentFault: a hub id, and the hub is not to be had.
    """
    parts = [_base_text()]
    if gpu == "cpu":
        words = "a CPU"
        overlay = _overlays()[DEMO]
        trained = load_model_spec(model or _said(overlay, "model") or DEFAULT_MODEL)
        parts.append(overlay)
        parts += _asked(gpu, model)
        if trained.name != _said(overlay, "model"):
            parts += [_room_on_cpu(trained), "\n".join(_fixed(own_settings(trained)))]
    else:
        spec = find_gpu(gpu)
        words = spec.name
        overlay = _overlays()[_nearest(spec, model)]
        trained = load_model_spec(model or _said(overlay, "model") or DEFAULT_MODEL)
        parts += [_searched(spec, trained), overlay]
        parts += _asked(gpu, model)
        parts.append(_baseline_for(spec, trained, overlay))
    title = f"# A search space for {words}, to be changed: `sweep run THIS-FILE`."
    return _composed(schema_path(), title, parts, without=("name", "description"))


def _room_on_cpu(model: ModelSpec) -> str:
    room = math.ceil((parameters(model) or _USUAL_PARAMETERS) * _CPU_BYTES_EACH / GIB)
    return (
        "# In GiB. A CPU has no memory of its own, so it must be said: here "
        f"{_CPU_BYTES_EACH} bytes for each of the model's parameters.\n"
        "# On a CPU a trial of a billion of them takes minutes.\n"
        f"budget_gib: {room}"
    )


def _nearest(spec: GpuSpec, model: str | None) -> str:
    """Return the preset with the most similar memory for each parameter; the GPU's own first."""
    if spec.name in _overlays() and model is None:
        return spec.name
    standard = load_model_spec(DEFAULT_MODEL)
    asked = _bytes_each(spec, load_model_spec(model or DEFAULT_MODEL))
    distance = {}
    for name, overlay in _overlays().items():
        if name != DEMO:
            gpu = find_gpu(_said(overlay, "gpu"))
            distance[name] = abs(math.log(_bytes_each(gpu, standard) / asked))
    return min(distance, key=lambda name: (distance[name], name != spec.name))


def _bytes_each(spec: GpuSpec, model: ModelSpec) -> float:
    return spec.budget_bytes / (parameters(model) or _USUAL_PARAMETERS)


def _searched(spec: GpuSpec, model: ModelSpec) -> str:
    """Return an overlay of what is searched on a GPU with a model: the sizes that may fit, and the
    types, kernels and layers that both take."""
    lengths = offered_lengths(model, spec.budget_bytes)
    batches = offered_batches(model, spec.budget_bytes, lengths)
    has_bf16 = COMPUTE_DTYPES["bf16"].runs_on(spec.compute_capability)
    types: list[str] = []
    if has_bf16:
        types.append("bf16")
    if not has_bf16 or model.model_type not in OVERFLOWS_FP16:
        types.append("fp16")
    bases = ["none"]
    if unquantized(model) is None:
        bases = ["nf4", "none"]
    for name in EIGHT_BIT:
        is_taken = unquantized(model, bits=8) is None
        if is_taken and COMPUTE_DTYPES[name].runs_on(spec.compute_capability):
            bases.append(name)
            # Experts multiply in 16 bits, whatever they are held in.
            if not has_experts(model):
                types.append(name)
    lines = [
        "dimensions:",
        f"  micro_batch_size: {_flow(batches.model_dump(exclude={'step'}))}",
        f"  seq_len: {_flow(lengths)}",
        f"  compute_dtype: {_flow(types)}",
    ]
    decided = dict(own_settings(model))
    fixed = {}
    if "attention" in decided:
        fixed["attention"] = decided.pop("attention")
    # They are dimensions of every preset, and here each has one value.
    lines += [f"  {key}: {_flow([value])}" for key, (value, _) in decided.items()]
    if not decided:
        lines.append(f"  quantization: {_flow(bases)}")
    if has_experts(model) and bases[0] == "nf4" and not spec.shares_host_memory:
        lines.append("  offload_fraction: [0.0, 0.25, 0.5, 0.75, 1.0]")
    if model.model_type not in LIGER_MODEL_TYPES:
        lines.append("  kernels: [hf]")
    is_checkpointed = model.model_type not in WITHOUT_CHECKPOINTING
    if not is_checkpointed:
        lines.append("  checkpoint_fraction: [0.0]")
    if spec.shares_host_memory or not is_checkpointed or hands_on_more(model):
        lines.append("  checkpoint_offload: [false]")
    return "\n".join(lines + _fixed(fixed))


def _fixed(decided: Mapping[str, tuple[Any, str]]) -> list[str]:
    """Return what is fixed of the settings that a model decides, each with the reason."""
    if not decided:
        return []
    lines = ["fixed:"]
    for key, (value, why) in decided.items():
        lines.append(f"  # {why}.")
        lines.append(f"  {key}: {as_typed(value)}")
    return lines


def _baseline_for(spec: GpuSpec, model: ModelSpec, overlay: str) -> str:
    """Return an overlay of a baseline that the GPU and the model take."""
    said = parse_yaml(overlay, label="preset").values.get("baseline", {})
    lines = ["baseline:"]
    length = said.get("seq_len", TrialConfig().seq_len)
    if model.max_positions is not None and length > model.max_positions:
        lines.append(f"  seq_len: {model.max_positions}")
    if spec.compute_capability < AMPERE:
        lines.append("  compute_dtype: fp16")
    for key, (value, _) in own_settings(model).items():
        if key != "attention":
            # Searched in every preset, so that the baseline does not inherit it.
            lines.append(f"  {key}: {as_typed(value)}")
    if len(lines) == 1:
        return ""
    return "\n".join(lines)


def _flow(value: Any) -> str:
    """Return a value on one line of YAML."""
    if isinstance(value, tuple):
        value = list(value)
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf)
    return text.strip()
