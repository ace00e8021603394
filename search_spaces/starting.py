"""Owns the space that a person starts from: a shipped preset's text, for their GPU and model.

Knows nothing of where it is written.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from functools import cache
from importlib.resources import files

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB, GpuSpec, find_gpu
from search_spaces.linears import parameters
from search_spaces.loading import parse_space, preset_texts, shipped_presets
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.rules import EIGHT_BIT_SINCE, violation
from search_spaces.space import SearchSpace

DEMO = "cpu-demo"
"""The preset for a machine without a GPU."""
_USUAL_PARAMETERS = 7e9
"""What an architecture that is not known from here is taken to have."""
_CPU_BYTES_EACH = 4
"""Of a model's parameters: the base in 16 bits, and as much for what a training keeps."""
_COLUMNS = 120
"""Of a space's comments."""


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
    text = _for(preset_texts()[chosen], gpu="cpu" if spec is None else spec.name, model=model)
    if spec is None and trained.name != _presets()[DEMO].model:
        text = _with_budget(text, trained)
    if spec is not None:
        text = _with_sizes(text, spec, chosen, trained)
        text = _with_dtype(_with_eight_bits(text, spec), spec, trained)
    parse_space(text, label="a new space")
    return text


@cache
def _presets() -> dict[str, SearchSpace]:
    return {space.name: space for space in shipped_presets()}


def schema_path() -> str:
    """Return where the shipped schema of a space file is."""
    return str(files("search_spaces") / "space.schema.json")


def _nearest(spec: GpuSpec, model: str | None) -> str:
    """Return the preset with the most similar memory for each parameter; the GPU's own first."""
    spaces = _presets()
    if spec.name in spaces and model is None:
        return spec.name
    asked = _bytes_each(spec, load_model_spec(model or SearchSpace.model_fields["model"].default))
    distance = {
        name: abs(math.log(_bytes_each(find_gpu(space.gpu), load_model_spec(space.model)) / asked))
        for name, space in spaces.items()
        if space.gpu != "cpu"
    }
    return min(distance, key=lambda name: (distance[name], name != spec.name))


def _bytes_each(spec: GpuSpec, model: ModelSpec) -> float:
    return spec.budget_bytes / (parameters(model) or _USUAL_PARAMETERS)


def _for(text: str, *, gpu: str, model: str | None) -> str:
    """Return a preset's text for another GPU and model, without what is the preset's alone."""
    opening, _, rest = text.partition("\n\n")
    words = "a CPU" if gpu == "cpu" else gpu
    about = f"# A search space for {words}, to be changed: `sweep run THIS-FILE`."
    first = f"# yaml-language-server: $schema={schema_path()}\n{about}"
    kept = "#\n# Copy this file".join(opening.split("#\n# Copy this file")[1:])
    how = kept.partition("`sweep run my-space.yaml`. ")[2]
    if how:
        words = how.replace("\n# ", " ")
        first += "\n#\n" + textwrap.fill(
            words, _COLUMNS, initial_indent="# ", subsequent_indent="# "
        )
    text = f"{first}\n\n{rest}"
    text = re.sub(r"^name: .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^description: .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^gpu: .*$", f"gpu: {gpu}", text, flags=re.MULTILINE)
    if model is not None:
        text = re.sub(r"^model: .*$", lambda _: f"model: {_yaml(model)}", text, flags=re.MULTILINE)
    return text


def _with_budget(text: str, model: ModelSpec) -> str:
    """Return a space for the CPU with room for another model than the demo's tiny one."""
    room = math.ceil((parameters(model) or _USUAL_PARAMETERS) * _CPU_BYTES_EACH / GIB)
    said = (
        f"# In GiB. A CPU has no memory of its own, so it must be said: here {_CPU_BYTES_EACH} "
        "bytes for each of the model's parameters.\n"
        "# On a CPU a trial of a billion of them takes minutes."
    )
    return re.sub(
        r"^# In GiB\..*\n(?:#.*\n)*budget_gib: .*$",
        f"{said}\nbudget_gib: {room}",
        text,
        count=1,
        flags=re.MULTILINE,
    )


def _yaml(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z][\w./-]*", text) else json.dumps(text)


def _with_sizes(text: str, spec: GpuSpec, chosen: str, model: ModelSpec) -> str:
    """Return a space whose lengths the model takes, and which says whose its sizes are."""
    limit = model.max_positions
    if limit is not None:
        space = parse_space(text, label="a new space")
        lengths = [n for n in space.values_of("seq_len") if n <= limit] or [limit]
        text = re.sub(r"^  seq_len: \[.*\]$", f"  seq_len: {lengths}", text, flags=re.MULTILINE)
        if space.baseline.get("seq_len", 0) > limit:
            text = re.sub(r"^  seq_len: \d+$", f"  seq_len: {limit}", text, flags=re.MULTILINE)
    if chosen == spec.name:
        return text
    whose = f"  # Those of the preset {chosen}, which has about as much memory for each parameter."
    comments = r"(?:^  #.*\n)+(?=^  micro_batch_size: \[)"
    return re.sub(comments, f"{whose}\n", text, count=1, flags=re.MULTILINE)


def _with_eight_bits(text: str, spec: GpuSpec) -> str:
    """Return a space with the 8-bit types that the GPU multiplies, in place of its preset's."""
    lists = re.compile(r"^( *[^ #].*?)(, )?(?:fp8, )?int8\]", flags=re.MULTILINE)
    known = EIGHT_BIT_SINCE.items()
    kinds = ", ".join(kind for kind, since in known if spec.compute_capability >= since)
    if not kinds:
        text = re.sub(r"^leave_out:\n(?:  - .*\n)+", "", text, flags=re.MULTILINE)
        return lists.sub(r"\1]", text)
    return lists.sub(rf"\1\g<2>{kinds}]", text)


def _with_dtype(text: str, spec: GpuSpec, model: ModelSpec) -> str:
    """Return a space without bf16 where the GPU is too old for it."""
    broken = violation(
        TrialConfig(), model=model, compute_capability=spec.compute_capability, device="cuda"
    )
    if broken is None or broken.rule != "bf16-needs-ampere":
        return text
    said = "  # The GPU has no bf16; fp16 needs loss scaling. fp32 is there as well.\n"
    dtypes = r"(?:^  #.*\n)*^  compute_dtype: \[bf16, (.*)\]$"
    own = rf"{said}  compute_dtype: [\1]"
    text = re.sub(dtypes, own, text, count=1, flags=re.MULTILINE)
    return f"{text.rstrip()}\n  compute_dtype: fp16\n"
