"""The space that a person starts from."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GIB, find_gpu, gpu_catalogue
from search_spaces.loading import load_space, parse_space
from search_spaces.models import load_model_spec, shipped_models
from search_spaces.rules import violation
from search_spaces.starting import schema_path, starting_text
from storage.definition import Target
from sweep.study.targets import check_budget
from tests.search_spaces.test_schema import faults


@pytest.mark.parametrize("gpu", ["cpu", *gpu_catalogue()])
def test_every_card_has_a_space_to_start_from_that_a_run_takes(gpu: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(starting_text(gpu, None), encoding="utf-8")
    space = load_space(str(file))
    assert (space.gpu, space.name) == (gpu, "mine")
    assert faults(file.read_text(encoding="utf-8")) == []
    if gpu != "cpu":
        spec, model = find_gpu(gpu), load_model_spec(space.model)
        capability = spec.compute_capability
        broken = [
            violation(config, model=model, compute_capability=capability, device="cuda")
            for config in (space.baseline_config(), space.config(next(space.combinations())))
        ]
        assert broken == [None, None]


@pytest.mark.parametrize("model", [model.name for model in shipped_models()])
def test_every_model_has_one_whose_rows_it_takes(model: str) -> None:
    space = parse_space(starting_text("a10", model), label="mine.yaml")
    limit = load_model_spec(model).max_positions
    assert space.model == model
    assert limit is None or max(space.values_of("seq_len")) <= limit
    assert limit is None or space.baseline_config().seq_len <= limit


def test_a_cards_own_preset_is_what_it_starts_from() -> None:
    own, preset = parse_space(starting_text("h200", None), label="x.yaml"), load_space("h200")
    assert own.dimensions == preset.dimensions
    assert own.baseline_config() == preset.baseline_config()


def test_sizes_suit_the_memory_that_a_model_leaves() -> None:
    def largest(gpu: str, model: str) -> int:
        space = parse_space(starting_text(gpu, model), label="mine.yaml")
        return max(space.values_of("micro_batch_size"))

    assert largest("a10", "tinyllama-1.1b") > largest("a10", "mistral-7b-v0.3")
    assert largest("h200", "mistral-7b-v0.3") > largest("a10", "mistral-7b-v0.3")


def test_a_card_without_bf16_starts_without_it() -> None:
    space = parse_space(starting_text("t4", None), label="mine.yaml")
    assert space.values_of("compute_dtype") == ("fp16", "int8")
    assert space.baseline_config().compute_dtype == "fp16"
    assert TrialConfig().compute_dtype == "bf16"


@pytest.mark.parametrize(
    "model", [model.name for model in shipped_models() if model.name != "demo"]
)
def test_on_a_cpu_another_model_than_the_demos_has_room(model: str) -> None:
    space, spec = (
        parse_space(starting_text("cpu", model), label="mine.yaml"),
        load_model_spec(model),
    )
    target = Target(gpu="cpu", device="cpu", budget_bytes=int((space.budget_gib or 0) * GIB))
    check_budget(space, spec, target)
    assert faults(starting_text("cpu", model)) == []


def test_the_demos_own_model_keeps_its_tiny_budget() -> None:
    demo = load_space("cpu-demo").budget_gib
    for model in (None, "demo"):
        assert parse_space(starting_text("cpu", model), label="mine.yaml").budget_gib == demo


def test_its_comments_are_filled_lines() -> None:
    opening = starting_text("cpu", None).partition("\n\n")[0].splitlines()[3:]
    assert [len(line) <= 120 for line in opening] == [True] * len(opening)
    assert all(len(line) > 100 for line in opening[:-1])


def test_it_is_commented_and_an_editor_finds_its_schema() -> None:
    first, second, *rest = starting_text("a10", None).splitlines()
    assert first == f"# yaml-language-server: $schema={schema_path()}"
    assert Path(schema_path()).is_file()
    assert second.startswith("# A search space for a10")
    assert sum(line.lstrip().startswith("# ") for line in rest) > 20
    assert not any(line.startswith("name:") for line in rest)


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(InputError, match="unknown GPU 'a11'"):
        starting_text("a11", None)
    with pytest.raises(InputError, match="unknown model 'demmo'"):
        starting_text("a10", "demmo")
