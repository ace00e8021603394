"""The presets are the manual of a space file; its schema is what an editor completes and checks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from qlora_sweep.search_spaces.config import CONFIG_KEYS, SETTINGS, TARGET_SETS, TrialConfig
from qlora_sweep.search_spaces.dimensions import Choices, FloatRange, IntRange
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import GIB, find_gpu, gpu_catalogue
from qlora_sweep.search_spaces.loading import load_space, parse_space
from qlora_sweep.search_spaces.models import load_model_spec, shipped_models
from qlora_sweep.search_spaces.presets import preset_texts, schema_path, starting_text
from qlora_sweep.search_spaces.rules import attention_of, violation
from qlora_sweep.search_spaces.schema import schema_text, space_schema
from qlora_sweep.search_spaces.space import (
    ConfirmBudget,
    Objective,
    SamplerName,
    SearchSpace,
    StepBudget,
    Weights,
)
from qlora_sweep.storage.definition import Target
from qlora_sweep.sweep.study.targets import check_budget
from tests.search_spaces.test_space_files import ADDED, SMALL

PRESETS = preset_texts()
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
    for name, text in PRESETS.items():
        for start, lines in examples(text):
            yield pytest.param(name, start, lines, id=f"{name}-{lines[0].strip()}")


@pytest.mark.parametrize(("name", "start", "lines"), list(every_example()))
def test_every_commented_example_is_a_space_when_uncommented(
    name: str, start: int, lines: list[str]
) -> None:
    space = parse_space(uncommented(PRESETS[name], start, lines), label=f"{name}.yaml")
    assert space != parse_space(PRESETS[name], label=f"{name}.yaml") or _says_a_default(lines)


def _says_a_default(lines: list[str]) -> bool:
    """Whether an example writes out what holds without it."""
    values = yaml.safe_load("\n".join(lines))
    steps, confirm = StepBudget().model_dump(), ConfirmBudget().model_dump()
    defaults = {"learning_rate": 2e-4, "steps": steps, "confirm": confirm, **steps}
    return all(defaults.get(key, object()) == value for key, value in values.items())


def allowed_values() -> set[str]:
    """Every word that a value of a space or of a configuration may be."""
    words = {*get_args(Objective), *get_args(SamplerName), *get_args(Weights), *TARGET_SETS}
    for field in TrialConfig.model_fields.values():
        words |= {word for word in get_args(field.annotation) if isinstance(word, str)}
    words |= set(get_args(SearchSpace.model_fields["numerics"].annotation))
    return words | {"auto", "cpu"}


@pytest.mark.parametrize("name", PRESETS)
def test_all_that_a_space_may_hold_is_in_every_preset(name: str) -> None:
    models = (SearchSpace, StepBudget, ConfirmBudget, IntRange, FloatRange, Choices)
    wanted = {key for model in models for key in model.model_fields}
    wanted |= {"time_budget", *CONFIG_KEYS}
    if name != "cpu-demo":
        # What needs a GPU is not searched there.
        wanted |= allowed_values()
    assert wanted - set(re.findall(r"[\w-]+", PRESETS[name])) == set()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_whole_file_and_right_by_the_schema(name: str) -> None:
    text = PRESETS[name]
    assert parse_space(text, label="mine.yaml").name == name
    assert text.startswith("# yaml-language-server: $schema=../space.schema.json\n")
    assert faults(text) == []


# The space that a person starts from


@pytest.mark.parametrize("gpu", ["cpu", *gpu_catalogue()])
def test_every_gpu_has_a_space_to_start_from_that_a_run_takes(gpu: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(starting_text(gpu, None), encoding="utf-8")
    space = load_space(str(file))
    assert (space.gpu, space.name) == (gpu, "mine")
    assert faults(file.read_text(encoding="utf-8")) == []
    if gpu != "cpu":
        model, capability = load_model_spec(space.model), find_gpu(gpu).compute_capability
        for config in (space.baseline_config(), space.config(next(space.combinations()))):
            broken = violation(config, model=model, compute_capability=capability, device="cuda")
            assert broken is None
    if gpu in PRESETS:
        own = space.model_copy(update={"name": gpu, "description": load_space(gpu).description})
        assert own == load_space(gpu)


@pytest.mark.parametrize("model", [model.name for model in shipped_models()])
def test_every_model_has_one_whose_lengths_and_budget_it_takes(model: str) -> None:
    spec = load_model_spec(model)
    space = parse_space(starting_text("a10", model), label="mine.yaml")
    assert space.model == model
    limit = spec.max_positions or 10**9
    assert max(*space.values_of("seq_len"), space.baseline_config().seq_len) <= limit
    assert space.values_of("attention") == (attention_of(spec),)
    on_cpu = parse_space(starting_text("cpu", model), label="mine.yaml")
    target = Target(gpu="cpu", device="cpu", budget_bytes=int((on_cpu.budget_gib or 0) * GIB))
    check_budget(on_cpu, spec, target)


def test_a_gpu_without_bf16_starts_without_it() -> None:
    space = parse_space(starting_text("t4", None), label="mine.yaml")
    assert space.values_of("compute_dtype") == ("fp16", "int8")
    assert space.baseline_config().compute_dtype == "fp16"


def test_experts_may_go_to_the_host_of_any_gpu_that_has_memory_of_its_own() -> None:
    for gpu, model, offers in (
        ("rtx-3060", "qwen3-30b-a3b", True),
        ("a10", "qwen3-30b-a3b", True),
        ("h200", "qwen3-30b-a3b", True),
        ("rtx-3060", "qwen3-8b", False),
        ("rtx-3060", "gemma-4-26b-a4b", True),
        ("gb10", "qwen3-next-80b-a3b", False),
    ):
        space = parse_space(starting_text(gpu, model), label="mine.yaml")
        assert ("offload_fraction" in space.dimensions) == offers
        types = set(space.values_of("compute_dtype"))
        assert bool(types & {"fp8", "int8"}) == (model == "qwen3-8b")


def test_an_editor_finds_the_schema_of_a_starting_space() -> None:
    first, _, _ = starting_text("a10", None).partition("\n")
    assert first == f"# yaml-language-server: $schema={schema_path()}"
    assert Path(schema_path()).is_file()


@pytest.mark.parametrize(("gpu", "model"), [("a11", None), ("a10", "demmo")])
def test_there_is_none_of_an_unknown_gpu_or_model(gpu: str, model: str | None) -> None:
    with pytest.raises(InputError, match="unknown"):
        starting_text(gpu, model)


LEAST = "dimensions: {micro_batch_size: [1, 2]}\n"


@cache
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator.check_schema(space_schema())
    return jsonschema.Draft7Validator(json.loads(schema_text()))


def faults(text: str) -> list[str]:
    return [fault.message for fault in validator().iter_errors(yaml.safe_load(text))]


def test_the_shipped_schema_is_of_the_code_and_explains_every_key_and_value() -> None:
    shipped = (files("qlora_sweep.search_spaces") / "space.schema.json").read_text(encoding="utf-8")
    assert shipped == schema_text(), "run: sweep schema > search_spaces/space.schema.json"
    schema = space_schema()
    properties = schema["properties"]
    assert properties["gpu"]["enum"][2:] == list(gpu_catalogue())
    assert properties["model"]["anyOf"][0]["enum"] == [m.name for m in shipped_models()]
    sections = [properties, schema["$defs"]["StepBudget"]["properties"]]
    for section in ("dimensions", "fixed", "baseline"):
        assert list(properties[section]["properties"]) == list(SETTINGS)
        sections.append(properties[section]["properties"])
    assert all(value["description"] for section in sections for value in section.values())


RIGHT = [
    LEAST,
    "dimensions: {seq_len: {low: 64, high: 512, step: 64}, lora_dropout: {low: 0.0, high: 0.1}}",
    "dimensions: {lora_rank: {low: 4, high: 64, log: true}, compile: {choices: [true, false]}}",
    "dimensions: {lora_dropout: {low: 0.01, high: 0.1, log: true}, packing: [none, packed]}",
    "dimensions: {target_modules: [qv, [q_proj, v_proj]], lora_alpha: [16, null]}",
    LEAST + "fixed:\nbaseline:\nsteps:\n",
    LEAST + "confirm: false\ntime_budget: 10m\nmodel: org/name\nmax_dollars: 2.5\nbudget_gib: 20",
    LEAST + "confirm: {seconds: 8}\nsteps: {measured_max: 8}\nobjectives: [peak_memory]",
]


@pytest.mark.parametrize("text", RIGHT)
def test_what_can_be_read_is_right(text: str) -> None:
    parse_space(text, label="mine.yaml")
    assert faults(text) == []


@pytest.mark.parametrize("text", [text for text, _ in ADDED])
def test_a_mistake_is_marked_in_the_editor_as_it_is_when_it_is_read(text: str) -> None:
    assert faults(f"{SMALL}{text}\n")
