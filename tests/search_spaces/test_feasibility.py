"""A space is refused where nothing in it is valid or a dataset is missing, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlora_sweep.search_spaces.dimensions import Choices, IntRange
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.feasibility import obstacles, refuse_without_dataset
from qlora_sweep.search_spaces.loading import Length, load_space, with_dataset, with_fixed
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.rules import Setting, violation
from qlora_sweep.search_spaces.space import SearchSpace
from tests.tables import cases

MISTRAL = load_model_spec("mistral-7b-v0.3")
TURING, AMPERE = (7, 5), (8, 0)


def among(*values: Any) -> Choices:
    return Choices(choices=values)


def rules_against(
    gpu: tuple[int, int] | None = TURING, *, fixed: dict[str, Any] | None = None, **dimensions: Any
) -> list[str]:
    space = SearchSpace(name="mine", dimensions=dimensions, fixed=fixed or {})
    setting = Setting(MISTRAL, "cpu" if gpu is None else "cuda", gpu)
    found = obstacles(space, setting)
    return [one.rule for one in found]


LEAVING_NOTHING = """
# GPU, the values of each setting, the rules that are named.
turing | {lora_rank: [1, 9], compute_dtype: [bf16]} | [bf16-needs-ampere]
# One valid value is enough, wherever it stands.
turing | {lora_rank: [1, 9], compute_dtype: [bf16, fp16]} | []
# A range without steps that no rule reads stands in no rule's way.
turing | {lora_dropout: {low: 0.0, high: 0.1}} | [bf16-needs-ampere]
# A rule that leaves something is not named beside one that leaves nothing.
turing | {compute_dtype: [bf16, fp16], target_modules: [[w1], [w2]]} | [unknown-target-module]
# Rules that leave nothing only together are all named.
ampere | {compute_dtype: [fp32, int8], attention: [flash_attention_2], seq_len: [4]}
    | [flash-attention-2, eight-bit]
# A rule may read what follows from one setting: how many layers are held in 4 bits.
ampere | {lora_dropout: {low: 0.0, high: 0.1}, quantized_fraction: [0.001]}
    | [quantized-fraction-of-no-layer]
ampere | {lora_dropout: {low: 0.0, high: 0.1}, quantized_fraction: [0.001, 0.5]} | []
"""


@pytest.mark.parametrize(("gpu", "dimensions", "rules"), cases(LEAVING_NOTHING))
def test_the_rules_that_leave_nothing_are_named(
    gpu: str, dimensions: dict[str, Any], rules: list[str]
) -> None:
    capability = {"turing": TURING, "ampere": AMPERE}[gpu]
    searched = {}
    for key, values in dimensions.items():
        searched[key] = {"choices": values} if isinstance(values, list) else values
    assert rules_against(capability, **searched) == rules


def test_a_huge_space_is_decided_by_some_of_it() -> None:
    wide, beyond = IntRange(low=1, high=9_999), IntRange(low=40_000, high=49_999)
    dimensions = {"lora_rank": wide, "micro_batch_size": wide, "compute_dtype": among("fp16")}
    assert rules_against(**dimensions, seq_len=beyond) == ["seq-len-beyond-positions"]
    assert rules_against(**dimensions, seq_len=wide) == []


def test_a_large_space_with_few_valid_configurations_is_not_refused() -> None:
    few = {
        "micro_batch_size": IntRange(low=1, high=900),
        "effective_batch_size": IntRange(low=16, high=900),
        "seq_len": among(512, 1024, 40_960, 65_536),
        "compute_dtype": among("bf16", "fp8", "fp16"),
        "attention": among("flash_attention_2", "sdpa"),
    }
    assert rules_against(TURING, **few) == []


def subsets(*values: Any) -> st.SearchStrategy[Choices]:
    picked = st.lists(st.sampled_from(values), min_size=1, max_size=3, unique_by=str)
    return picked.map(lambda chosen: Choices(choices=tuple(chosen)))


@settings(max_examples=50)
@given(
    st.fixed_dictionaries(
        {
            "compute_dtype": subsets("bf16", "fp16", "fp32"),
            "attention": subsets("sdpa", "flash_attention_2", "eager"),
        },
        optional={
            "kernels": subsets("hf", "fused-loss", "liger"),
            "compile": subsets(True, False),
            "optimizer": subsets("adamw_8bit", "paged_adamw_8bit"),
            "seq_len": subsets(1, 512, 40_000),
            "target_modules": subsets("qv", ["q_proj"], ["w1"]),
        },
    ),
    st.sampled_from([None, (6, 0), TURING, AMPERE]),
)
def test_the_answer_is_that_of_trying_every_configuration(
    dimensions: dict[str, Any], gpu: tuple[int, int] | None
) -> None:
    space = SearchSpace(name="mine", dimensions=dimensions)
    device = "cpu" if gpu is None else "cuda"
    tried = (
        violation(space.config(values), model=MISTRAL, compute_capability=gpu, device=device)
        for values in space.combinations()
    )
    nothing_is_valid = all(one is not None for one in tried)
    assert bool(rules_against(gpu, **dimensions)) is nothing_is_valid


LENGTHS = (Length(256, 0.04), Length(1024, 0.0))
QUALITY = {
    "objectives": ["tokens_per_second", "eval_loss"],
    "weights": "pretrained",
    "data": "mine.jsonl",
}


def a_space(**changes: Any) -> SearchSpace:
    values = {"name": "mine", "dimensions": {"lora_rank": {"choices": [8, 16]}}, **changes}
    return SearchSpace.model_validate(values)


def choices_of(space: SearchSpace, key: str) -> tuple[Any, ...]:
    dimension = space.dimensions[key]
    assert isinstance(dimension, Choices)
    return dimension.choices


@pytest.mark.parametrize(
    ("method", "offered"),
    [("sft", ("none", "packed", "grouped")), ("dpo", ("none", "grouped"))],
)
def test_packing_is_searched_where_nobody_fixed_it_and_pairs_are_never_packed(
    method: str, offered: tuple[str, ...]
) -> None:
    space = a_space(fixed={"method": method})
    found = with_dataset(space, LENGTHS, names_its_lengths=False, is_on_pairs=method == "dpo").space
    assert choices_of(found, "packing") == offered


@pytest.mark.parametrize(
    "held", [{"loss_type": "ipo"}, {"dpo_beta": 0.5}, {"reference": "precomputed"}], ids=str
)
def test_what_only_pairs_have_is_refused_without_them(held: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="add --method dpo"):
        with_fixed(a_space(), held)
    with_fixed(a_space(fixed={"method": "dpo"}), held)


@pytest.mark.parametrize(
    ("changes", "held"),
    [({"fixed": {"packing": "packed"}}, ()), ({}, ("packing",))],
)
def test_packing_that_somebody_named_is_kept(
    changes: dict[str, Any], held: tuple[str, ...]
) -> None:
    space = a_space(**changes)
    offered = with_dataset(space, LENGTHS, names_its_lengths=False, fixed_settings=held).space
    assert offered.fixed == space.fixed
    assert "packing" not in offered.dimensions
    # The baseline does not pack though every trial does.
    assert offered.baseline_config().packing == "none"


def test_a_presets_lengths_give_way_to_those_of_the_texts_and_that_is_said() -> None:
    offered = with_dataset(load_space("a10"), LENGTHS, names_its_lengths=False)
    assert choices_of(offered.space, "seq_len") == (256, 1024)
    (said,) = [note for note in offered.notes if "Lengths" in note]
    assert "in place of 512, 1024, 2048" in said
    assert "256 (cuts 4 %)" in said
    assert "--seq-len" in said


@pytest.mark.parametrize("held", [(), ("seq_len",)])
def test_lengths_that_a_person_named_are_kept(held: tuple[str, ...]) -> None:
    space = a_space(dimensions={"seq_len": {"choices": [64, 128]}})
    offered = with_dataset(space, LENGTHS, names_its_lengths=not held, fixed_settings=held)
    assert choices_of(offered.space, "seq_len") == (64, 128)
    assert not any("Lengths" in note for note in offered.notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    cases(
        """
        {dimensions: {packing: {choices: [none, grouped]}}} | packing grouped needs a
        {baseline: {packing: packed}} | packing packed needs a dataset.*--data
        {objectives: [eval_loss]} | "eval_loss needs a dataset.*weights: pretrained"
        {data: {texts: x, quality_tokens: 500}} | quality_tokens 500 .*add eval_loss .*or leave
        {fixed: {packing: packed}, data: x.jsonl}
        # With a loss that is measured.
        {eval_loss: true, weights: random, model: ./b} | "eval_loss needs weights: pre.*'./b'"
        {eval_loss: true, data: {texts: x, eval_fraction: 0.0}} | data.eval_fraction above 0
        {eval_loss: true}
        {eval_loss: true, data: {texts: x, quality_tokens: 500}}
        """
    ),
)
def test_what_needs_a_dataset_is_refused_without_one_with_what_to_do(
    changes: dict[str, Any], said: str | None
) -> None:
    if changes.get("eval_loss"):
        changes = {**QUALITY, **changes}
        del changes["eval_loss"]
    if said is None:
        refuse_without_dataset(a_space(**changes))
        return
    with pytest.raises(InputError, match=said):
        refuse_without_dataset(a_space(**changes))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: mine.jsonl", "{beside}/mine.jsonl"),
        ("data: {texts: mine.jsonl}", "{beside}/mine.jsonl"),
        # What is not beside the file may be a hub id.
        ("data: org/set", "org/set"),
    ],
)
def test_a_dataset_is_a_path_beside_the_space_file_or_a_hub_id(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "mine.jsonl").write_text("")
    (beside / "space.yaml").write_text(f"{text}\ndimensions: {{lora_rank: [8, 16]}}\n")
    monkeypatch.chdir(tmp_path)
    data = load_space("beside/space.yaml").data
    assert data is not None
    assert (data.texts, data.eval_fraction) == (expected.format(beside=beside), 0.05)
