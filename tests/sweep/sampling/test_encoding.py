from __future__ import annotations

import random
from typing import Any

import pytest
from optuna.distributions import FloatDistribution

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.loading import parse_space, with_fixed
from search_spaces.space import SearchSpace
from sweep.planning.candidates import rows
from sweep.predict.memory.predictor import one_of_each_kind
from sweep.request import RunRequest
from sweep.sampling.encoding import Encoding, identity
from tests.sweep.simulated_device import a_space

DIMENSIONS = [
    pytest.param("target_modules", {"choices": ["qv", ["q_proj", "up_proj"]]}, id="lists"),
    pytest.param("lora_alpha", {"choices": [None, 8, 32.5]}, id="null-and-numbers"),
    pytest.param("compile", {"choices": [True, False]}, id="truth-values"),
    pytest.param("micro_batch_size", {"low": 2, "high": 11, "step": 3}, id="stepped-integers"),
    pytest.param("lora_rank", {"low": 1, "high": 64, "log": True}, id="log-integers"),
    pytest.param("checkpoint_fraction", {"low": 0.1, "high": 0.95, "step": 0.1}, id="steps"),
]


def an_encoding(**dimensions: Any) -> Encoding:
    fixed = {"lora_rank": 16} if "lora_rank" not in dimensions else {}
    return Encoding(a_space(dimensions=dimensions, fixed=fixed))


@pytest.mark.parametrize(("key", "dimension"), DIMENSIONS)
def test_every_value_comes_back_from_optuna_as_it_was_declared(
    key: str, dimension: dict[str, Any]
) -> None:
    encoding = an_encoding(**{key: dimension})
    for value in encoding.space.dimensions[key].values() or ():
        (param,) = encoding.encode({key: value}).values()
        distribution = encoding.distributions[key]
        stored = distribution.to_external_repr(distribution.to_internal_repr(param))
        assert encoding.decode({key: stored}) == {key: value}
        assert distribution._contains(distribution.to_internal_repr(param))


def test_parameters_are_those_of_the_space() -> None:
    encoding = an_encoding(checkpoint_fraction={"low": 0.1, "high": 0.95, "step": 0.1})
    known = encoding.space.dimensions["checkpoint_fraction"].values()
    assert encoding.decode({"checkpoint_fraction": 0.30000000000000004 + 1e-9})[
        "checkpoint_fraction"
    ] in (known or ())
    encoding = an_encoding(micro_batch_size={"choices": [4, 6]})
    assert encoding.params_of(TrialConfig(micro_batch_size=6)) == {"micro_batch_size": 6}
    assert encoding.params_of(TrialConfig(micro_batch_size=5)) is None
    for is_log in (False, True):
        encoding = an_encoding(lora_alpha={"low": 0.001, "high": 10.0, "log": is_log})
        assert encoding.distributions["lora_alpha"] == FloatDistribution(0.001, 10.0, log=is_log)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({}, {"lora_alpha": 32}, True),
        ({"micro_batch_size": 4}, {"micro_batch_size": 4, "effective_batch_size": 4}, True),
        ({}, {"lora_alpha": 16}, False),
        ({}, {"lora_rank": 8}, False),
    ],
)
def test_configurations_that_train_alike_are_one(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    assert (identity(TrialConfig(**one)) == identity(TrialConfig(**other))) is same


def test_every_combination_comes_with_the_configuration_that_it_stands_for() -> None:
    space = a_space(
        dimensions={
            "target_modules": {"choices": [["v_proj", "q_proj"], "all-linear"]},
            "micro_batch_size": {"choices": [1, 2, 3]},
            "effective_batch_size": {"choices": [None, 4]},
            "checkpoint_fraction": {"choices": [0, 1]},
        },
        fixed={},
    )
    encoding = Encoding(space)
    every = list(encoding.every())
    assert len(every) == encoding.size
    assert all(config == encoding.config(params) for params, config in every)
    by_index = {str(sorted(encoding.combination(index).items())) for index in range(len(every))}
    assert by_index == {str(sorted(params.items())) for params, _ in every}


CARDS = {
    "micro_batch_size": {"choices": [4, 8]},
    "data_parallel": {"choices": [1, 2, 4]},
    "effective_batch_size": {"choices": [16, 32]},
}


def test_every_combination_has_whole_micro_batches_on_every_card() -> None:
    encoding = an_encoding(**CARDS)
    assert encoding.size is not None
    combinations = [encoding.combination(index) for index in range(encoding.size)]
    made = [encoding.config(params) for params in combinations]
    assert [config for _, config in encoding.every()] == made
    pairs = {(c.micro_batch_size, c.data_parallel, c.effective_batch_size) for c in made}
    assert len(pairs) == len(made) == 11
    assert (8, 4, 16) not in pairs
    for params in combinations:
        assert encoding.params_of(encoding.config(params)) == params


@pytest.mark.parametrize(
    ("effective", "kept"),
    [
        ([16, 32], {"micro_batch_size": 8, "data_parallel": 4, "effective_batch_size": 32}),
        # What no effective batch goes with changes the GPUs too.
        ([8, 16], {"micro_batch_size": 8}),
    ],
)
def test_batches_that_do_not_go_into_each_other_keep_the_micro_batch(
    effective: list[int], kept: dict[str, int]
) -> None:
    encoding = an_encoding(**CARDS | {"effective_batch_size": {"choices": effective}})
    drawn = {"micro_batch_size": 8, "data_parallel": 4, "effective_batch_size": 16}
    whole = encoding.with_whole_batches(drawn, draw=random.Random(0))
    assert whole.items() >= kept.items()
    assert encoding.config(whole).accumulation_steps >= 1


def test_what_is_left_out_is_drawn_anew_and_whole_batches_stay() -> None:
    choices = {"target_modules": ["qv", ["q_proj", "up_proj"]], "compute_dtype": ["bf16", "int8"]}
    dimensions = {key: {"choices": values} for key, values in choices.items()}
    left_out = [{"target_modules": [["up_proj", "q_proj"]], "compute_dtype": ["int8"]}]
    space = a_space(dimensions=CARDS | dimensions, fixed={}, leave_out=left_out)
    encoding = Encoding(space)
    batches = {"micro_batch_size": 4, "data_parallel": 2, "effective_batch_size": 16}
    drawn = {**batches, "target_modules": '["q_proj", "up_proj"]', "compute_dtype": "int8"}
    whole = encoding.with_whole_batches(drawn, draw=random.Random(0))
    assert whole.items() >= batches.items()
    assert not space.leaves_out(encoding.decode(whole))
    allowed = drawn | {"compute_dtype": "bf16", "data_parallel": 4, "micro_batch_size": 8}
    repaired = encoding.with_whole_batches(allowed, draw=random.Random(0))
    assert repaired == allowed | {"effective_batch_size": 32}


# What a space leaves out is nowhere: not held, not counted, not drawn, not planned, not traced

TEXT = """
dimensions:
  micro_batch_size: [1, 2]
  compute_dtype: [bf16, int8]
  quantization: [nf4, int8]
  kernels: [hf, fused-loss]
baseline: {micro_batch_size: 1}
"""
LEFT_OUT = """
leave_out:
  - {compute_dtype: [int8], kernels: [hf]}
  - {compute_dtype: [bf16], quantization: [int8]}
"""


def from_text(text: str = "") -> SearchSpace:
    return parse_space(TEXT + text, label="mine.yaml")


def everywhere(space: SearchSpace) -> list[set[TrialConfig]]:
    """Return the configurations of a space as each of its readers sees them."""
    encoding, draw = Encoding(space), random.Random(0)
    by_hand = {
        "micro_batch_size": [1, 2],
        "compute_dtype": ["bf16", "int8"],
        "quantization": ["nf4", "int8"],
        "kernels": ["hf", "fused-loss"],
    }
    drawn = [{key: draw.choice(values) for key, values in by_hand.items()} for _ in range(500)]
    whole = (encoding.with_whole_batches(params, draw=draw) for params in drawn)
    every = [from_text().config(params) for params in from_text().combinations()]
    return [
        {config for config in every if space.holds(config)},
        {config for config in every if space.params_of(config) is not None},
        {config for _, config in encoding.every()},
        {config for row in rows(space) for config in row},
        {encoding.config(params) for params in whole},
    ]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", 16),
        # Of bf16 both kernels, and of INT8 both bases.
        (LEFT_OUT, 2 * (2 + 2)),
        # A base that is stored in 8 bits computes in 16.
        ("numerics: 16-bit\n", 8),
        (f"numerics: 16-bit\n{LEFT_OUT}", 4),
    ],
)
def test_what_is_left_out_is_nowhere(text: str, size: int) -> None:
    space = from_text(text)
    first, *others = everywhere(space)
    assert space.size() == len(first) == size
    assert all(other == first for other in others)
    traced = {config for config in one_of_each_kind(space) if config.micro_batch_size == 1}
    assert all(space.holds(config) for config in traced)


def test_what_is_typed_is_asked_for_whatever_the_file_leaves_out() -> None:
    held = {"compute_dtype": "int8", "kernels": "hf"}
    space = with_fixed(from_text(LEFT_OUT), held)
    assert isinstance(space, SearchSpace)
    assert space.size() == 4


ONE = "dimensions: {micro_batch_size: [1, 2]}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{ONE}numerics: 16-bit\nfixed: {{compute_dtype: fp8}}", "numerics leaves nothing to"),
        (f"{ONE}numerics: 8-bit", "numerics must be one of 'any' or '16-bit', got '8-bit'"),
        (f"{ONE}leave_out: [{{lora_rank: [16]}}]", "leave_out leaves nothing to search"),
        (f"{ONE}leave_out: [{{micro_batch_size: [1]}}]", "cannot name micro_batch_size"),
        (f"{ONE}leave_out: [{{kernels: [liger, hff]}}]", "kernels must be one of"),
    ],
)
def test_what_leaves_nothing_or_names_nothing_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_space(text, label="mine.yaml")


def test_a_run_that_is_held_to_16_bits_is_a_study_of_its_own() -> None:
    name, space = RunRequest(space="a10", overrides={"numerics": "16-bit"}).named()
    own, whole = RunRequest(space="a10").named()
    assert name != own == "a10"
    # Just what the preset searched before there was compute in 8 bits.
    assert (space.size(), whole.size()) == (20_736, 22_464)
