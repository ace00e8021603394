"""One configuration and one space built in code: defaults, values, sizes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from qlora_sweep.search_spaces.config import TrialConfig, canonical, parse_config
from qlora_sweep.search_spaces.dimensions import Choices, FloatRange, IntRange
from qlora_sweep.search_spaces.errors import InputError, words_of
from qlora_sweep.search_spaces.space import SearchSpace
from tests.tables import cases


@pytest.mark.parametrize(
    ("values", "expected"),
    cases(
        """
        {} | [32.0, 4, 1, 2048, 2048]
        {micro_batch_size: 4, effective_batch_size: 16, seq_len: 100} | [32.0, 16, 4, 400, 1600]
        # A step is of all GPUs, a micro-batch of each.
        {data_parallel: 2, effective_batch_size: 32} | [32.0, 32, 4, 2048, 16384]
        """
    ),
)
def test_sizes_of_a_step_follow_from_the_batches(
    values: dict[str, Any], expected: tuple[float, ...]
) -> None:
    config = parse_config(values)
    found = (config.alpha, config.samples_per_step, config.accumulation_steps)
    assert (*found, config.tokens_per_micro_batch, config.tokens_per_step) == tuple(expected)


def test_the_key_does_not_depend_on_the_order_or_form_of_values() -> None:
    one = parse_config({"target_modules": ["v_proj", "q_proj"], "lora_alpha": "16"})
    other = parse_config({"lora_alpha": 16.0, "target_modules": ("q_proj", "v_proj", "q_proj")})
    assert one == other
    assert one.key() == other.key()
    assert parse_config({"lora_rank": 8}).changes_from(TrialConfig()) == {"lora_rank": 8}


def test_a_file_may_write_out_null_for_what_is_left_to_its_default() -> None:
    nulls = dict.fromkeys(("lora_alpha", "effective_batch_size", "learning_rate"))
    assert parse_config(nulls) == TrialConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_rnak": 8}, "here: unknown key 'lora_rnak'; did you mean 'lora_rank'?"),
        ({3: 8}, "here: unknown key '3'"),
        ({"lora_rank": 2.0}, "lora_rank must be a whole number, got 2.0"),
        ({"lora_rank": 16**5000}, "got a number too long to show"),
        ({"lora_alpha": 0}, "lora_alpha must be greater than 0, got 0"),
        ({"checkpoint_fraction": True}, "checkpoint_fraction must be a number, got true"),
        ({"upcast_fp32": 1}, "upcast_fp32 must be true or false, got 1"),
        ({"target_modules": "qvo"}, "or a list of module names, got 'qvo'"),
        ({"target_modules": []}, "target_modules must list at least one module name, none empty"),
        ({"target_modules": 3}, "target_modules must be a name or a list of module names, got 3"),
        ({"kernels": "x" * 500}, "got '" + "x" * 119 + "..."),
        (
            {"micro_batch_size": 3, "effective_batch_size": 8},
            "a multiple of micro_batch_size, ",
        ),
        ({"data_parallel": 2, "effective_batch_size": 12}, "times data_parallel, got 12, 4 and 2"),
    ],
)
def test_a_bad_value_is_refused_with_key_and_value(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_config(values, where="here")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 3},
        {"seq_len": 512.0},
        {"quantization": "nf5"},
        {"lora_rnak": 8},
    ],
)
def test_what_cannot_exist_is_not_made_of_what_can(changes: dict[str, Any]) -> None:
    config = TrialConfig(micro_batch_size=4, data_parallel=2, effective_batch_size=16)
    with pytest.raises(ValidationError):
        config.changed(**changes)


# Settings


@pytest.mark.parametrize(
    ("one", "other", "same"),
    cases(
        """
        {quantization: none} | {quantization: none, double_quant: false} | true
        {} | {double_quant: false} | false
        {lora_rank: 8} | {lora_rank: 8, lora_alpha: 16} | true
        {lora_rank: 8} | {lora_rank: 8, lora_alpha: 8} | false
        {micro_batch_size: 8} | {micro_batch_size: 8, effective_batch_size: 8} | true
        {micro_batch_size: 8} | {micro_batch_size: 4, effective_batch_size: 8} | false
        """
    ),
)
def test_configurations_that_train_the_same_way_are_one(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    resolved = canonical(parse_config(one))
    assert (resolved == canonical(parse_config(other))) is same
    assert canonical(resolved) == resolved


# Ranges


@given(low=st.floats(0, 1), width=st.floats(0, 1), step=st.floats(0.001, 1))
def test_no_value_of_a_range_lies_beyond_its_ends(low: float, width: float, step: float) -> None:
    values = FloatRange(low=low, high=low + width, step=step).values()
    assert values is not None
    assert all(low - 1e-9 <= value <= low + width for value in values)
    assert len(set(values)) == len(values)


def test_a_range_ends_at_its_last_whole_step_and_tenths_are_tenths() -> None:
    assert IntRange(low=8, high=20, step=8).values() == (8, 16)
    assert FloatRange(low=0.0, high=0.4, step=0.1).values() == (0.0, 0.1, 0.2, 0.3, 0.4)


# Spaces


def a_space(**values: Any) -> SearchSpace:
    return SearchSpace.model_validate(
        {"name": "s", "dimensions": {"checkpoint_fraction": {"choices": [0.0, 1.0]}}} | values
    )


def test_a_baseline_carries_the_fixed_values_unless_it_names_them() -> None:
    fixed = {"lora_rank": 64, "seq_len": 128, "micro_batch_size": 1}
    inherits = a_space(fixed=fixed).baseline_config()
    assert inherits == TrialConfig(lora_rank=64, seq_len=128, micro_batch_size=1)
    overrides = a_space(fixed=fixed, baseline={"lora_rank": 16, "seq_len": 512})
    assert overrides.baseline_config() == TrialConfig(micro_batch_size=1)
    # A dimension is what is searched: the reference is the recipe's.
    free = a_space(dimensions={"lora_rank": {"choices": [64, 128]}})
    assert free.baseline_config() == TrialConfig()


@pytest.mark.parametrize(
    ("fixed", "baseline", "expected"),
    cases(
        """
        {effective_batch_size: 8} | {} | [4, 8]
        {effective_batch_size: 6} | {} | [3, 6]
        {effective_batch_size: 7} | {} | [1, 7]
        {micro_batch_size: 3} | {effective_batch_size: 8} | [2, 8]
        {effective_batch_size: 8} | {micro_batch_size: 2} | [2, 8]
        {effective_batch_size: 6} | {effective_batch_size: null} | [4, null]
        """
    ),
)
def test_the_micro_batch_that_a_baseline_inherits_gives_way_to_its_effective_batch(
    fixed: dict[str, Any], baseline: dict[str, Any], expected: tuple[int, int | None]
) -> None:
    searched = {"dimensions": {"micro_batch_size": {"choices": [1]}}}
    more = {} if "micro_batch_size" in {*fixed, *baseline} else searched
    found = a_space(fixed=fixed, baseline=baseline, **more).baseline_config()
    assert (found.micro_batch_size, found.effective_batch_size) == tuple(expected)


@pytest.mark.parametrize(
    ("dimension", "alpha", "is_held"),
    cases(
        """
        # Twice the rank where nothing is said.
        {choices: [null, 64]} | 32 | true
        {choices: [null, 64]} | 33 | false
        {low: 16.0, high: 40.0} | | true
        {low: 16.0, high: 40.0} | 50 | false
        """
    ),
)
def test_a_space_holds_what_trains_as_one_of_its_configurations(
    dimension: dict[str, Any], alpha: float | None, is_held: bool
) -> None:
    space = a_space(dimensions={"lora_alpha": dimension})
    assert (space.params_of(TrialConfig(lora_alpha=alpha)) is not None) is is_held


def test_a_space_holds_nothing_beside_its_fixed_values() -> None:
    space = a_space(fixed={"seq_len": 64})
    assert space.params_of(TrialConfig(seq_len=64)) is not None
    assert space.params_of(TrialConfig(seq_len=65)) is None


def test_combinations_whose_batches_do_not_go_into_each_other_are_not_in_the_space() -> None:
    space = a_space(
        dimensions={
            "micro_batch_size": IntRange(low=2, high=5),
            "lora_rank": Choices(choices=(8, 16)),
            "effective_batch_size": Choices(choices=(None, 4, 6)),
        }
    )
    held = [space.config(params) for params in space.combinations()]
    assert space.size() == len(held) == 2 * (4 + 2 + 2)
    assert all(config.samples_per_step % config.micro_batch_size == 0 for config in held)
    assert space.params_of(TrialConfig(micro_batch_size=3, effective_batch_size=6)) is not None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("foo"), "'foo' is missing"),
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied"),
        (OSError(24, "Too many open files"), "Too many open files"),
        (ValueError("not so\nat all"), "not so"),
        (MemoryError(), "memory error"),
    ],
)
def test_an_exception_is_told_by_what_it_says(error: Exception, words: str) -> None:
    assert words_of(error) == words
