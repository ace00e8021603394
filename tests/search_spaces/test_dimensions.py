"""Ranges and spaces built in code: their values, sizes and round trips."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from search_spaces.config import TrialConfig
from search_spaces.dimensions import Choices, FloatRange, IntRange
from search_spaces.errors import InputError
from search_spaces.space import SearchSpace


def test_a_range_of_whole_numbers_ends_at_the_last_whole_step() -> None:
    assert IntRange(low=8, high=20, step=8).values() == (8, 16)


@given(low=st.floats(0, 1), width=st.floats(0, 1), step=st.floats(0.001, 1))
def test_no_value_of_a_range_lies_beyond_its_ends(low: float, width: float, step: float) -> None:
    values = FloatRange(low=low, high=low + width, step=step).values()
    assert values is not None
    assert all(low - 1e-9 <= value <= low + width for value in values)
    assert len(set(values)) == len(values)


def test_steps_of_a_tenth_are_tenths() -> None:
    assert FloatRange(low=0.0, high=0.4, step=0.1).values() == (0.0, 0.1, 0.2, 0.3, 0.4)


@given(share=st.floats(0, 1), is_log=st.booleans())
def test_a_share_of_a_range_comes_back_from_its_value(share: float, is_log: bool) -> None:
    line = FloatRange(low=1e-6, high=1e-2, log=is_log)
    value = line.at(share)
    assert line.low <= value <= line.high
    assert line.share_of(value) == pytest.approx(share, abs=1e-9)


def test_half_way_along_a_log_range_is_the_geometric_mean() -> None:
    assert FloatRange(low=1e-5, high=1e-3, log=True).at(0.5) == pytest.approx(1e-4)
    assert FloatRange(low=1.0, high=3.0).at(0.5) == 2.0
    assert [FloatRange(low=1e-5, high=1e-3, log=True).at(end) for end in (-1, 2)] == [1e-5, 1e-3]


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
    ("fixed", "baseline", "micro", "effective"),
    [
        ({"effective_batch_size": 8}, {}, 4, 8),
        ({"effective_batch_size": 6}, {}, 3, 6),
        ({"effective_batch_size": 2}, {}, 2, 2),
        ({"effective_batch_size": 7}, {}, 1, 7),
        ({"micro_batch_size": 3}, {"effective_batch_size": 8}, 2, 8),
        ({"effective_batch_size": 8}, {"micro_batch_size": 2}, 2, 8),
        ({"effective_batch_size": 6}, {"effective_batch_size": None}, 4, None),
    ],
)
def test_the_micro_batch_that_a_baseline_inherits_gives_way_where_batches_do_not_go_into_each_other(
    fixed: dict[str, Any], baseline: dict[str, Any], micro: int, effective: int | None
) -> None:
    searched = {"dimensions": {"micro_batch_size": {"choices": [1]}}}
    space = a_space(
        fixed=fixed, baseline=baseline, **({} if "micro_batch_size" in fixed else searched)
    )
    found = space.baseline_config()
    assert (found.micro_batch_size, found.effective_batch_size) == (micro, effective)


def test_a_baseline_that_names_batches_that_do_not_go_into_each_other_is_refused() -> None:
    with pytest.raises(InputError, match="multiple of micro_batch_size, got 6 and 4"):
        a_space(baseline={"micro_batch_size": 4, "effective_batch_size": 6}).baseline_config()


@pytest.mark.parametrize(
    ("space", "config", "is_held"),
    [
        ({"dimensions": {"lora_alpha": {"choices": [None, 64]}}}, {"lora_alpha": 32}, True),
        ({"dimensions": {"lora_alpha": {"choices": [32, 64]}}}, {}, True),
        ({"dimensions": {"lora_alpha": {"choices": [None, 64]}}}, {"lora_alpha": 33}, False),
        ({"dimensions": {"lora_alpha": {"low": 16.0, "high": 40.0}}}, {}, True),
        ({"dimensions": {"lora_alpha": {"low": 16.0, "high": 40.0}}}, {"lora_alpha": 50}, False),
        ({"fixed": {"lora_alpha": 32}}, {}, True),
        ({"dimensions": {"effective_batch_size": {"choices": [4, 8]}}}, {}, True),
        ({"fixed": {"effective_batch_size": 4}}, {}, True),
        ({"fixed": {"quantization": "none"}}, {"quantization": "none", "double_quant": 0}, True),
        ({"dimensions": {"lora_dropout": {"low": 0.0, "high": 0.1}}}, {"lora_dropout": 0.2}, False),
    ],
)
def test_a_space_holds_what_trains_as_one_of_its_configurations(
    space: dict[str, Any], config: dict[str, Any], is_held: bool
) -> None:
    wanted = TrialConfig.model_validate(
        config | ({"double_quant": False} if "double_quant" in config else {})
    )
    assert (a_space(**space).params_of(wanted) is not None) is is_held


def test_a_space_counts_its_combinations_and_knows_what_it_holds() -> None:
    space = SearchSpace(
        name="s",
        dimensions={
            "micro_batch_size": Choices(choices=(1, 2)),
            "target_modules": Choices(choices=("qv", ["v_proj", "q_proj"])),
            "lora_rank": IntRange(low=8, high=16, step=8),
        },
        fixed={"seq_len": 64},
    )
    assert space.size() == len(list(space.combinations())) == 8
    config = space.config({"lora_rank": 16, "target_modules": ["q_proj", "v_proj"]})
    assert config.seq_len == 64
    assert space.params_of(TrialConfig(seq_len=64, micro_batch_size=3)) is None
    assert space.params_of(TrialConfig(seq_len=65, micro_batch_size=2, target_modules="qv")) is None
    for params in space.combinations():
        found = space.params_of(space.config(params))
        assert found is not None
        assert space.config(found) == space.config(params)


def test_a_continuous_dimension_has_no_size() -> None:
    space = SearchSpace(name="s", dimensions={"lora_dropout": FloatRange(low=0, high=1)})
    assert space.size() is None
    with pytest.raises(ValueError, match="no combinations"):
        next(space.combinations())


@pytest.mark.parametrize("micro", [3, 32])
def test_an_effective_batch_that_a_baseline_inherits_is_never_moved(micro: int) -> None:
    space = a_space(fixed={"effective_batch_size": 8}, baseline={"micro_batch_size": micro})
    with pytest.raises(
        InputError, match=f"baseline: micro_batch_size {micro} does not go into effective_batch_si"
    ):
        space.baseline_config()


@pytest.mark.parametrize(
    ("effective", "micro", "kept"),
    [(8, (1, 2, 8), (1, 2, 8)), (8, (1, 3), (1,)), (None, (3,), (3,))],
)
def test_batches_that_do_not_go_into_the_effective_batch_are_left_out(
    effective: int | None, micro: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    space = a_space(
        dimensions={"micro_batch_size": {"choices": micro}},
        fixed={"effective_batch_size": effective},
    )
    assert space.dimensions == {"micro_batch_size": Choices(choices=kept)}
    assert space.size() == len(kept)
    assert SearchSpace.model_validate(space.model_dump(mode="json")) == space


def test_combinations_whose_batches_do_not_go_into_each_other_are_not_in_the_space() -> None:
    space = a_space(
        dimensions={
            "micro_batch_size": IntRange(low=2, high=5),
            "lora_rank": Choices(choices=(8, 16)),
            "effective_batch_size": Choices(choices=(None, 4, 6)),
        }
    )
    assert space.dimensions["micro_batch_size"] == IntRange(low=2, high=5)
    held = [space.config(params) for params in space.combinations()]
    assert space.size() == len(held) == 2 * (4 + 2 + 2)
    assert all(config.samples_per_step % config.micro_batch_size == 0 for config in held)
    assert space.params_of(TrialConfig(micro_batch_size=3, effective_batch_size=6)) is not None


def test_a_space_in_which_no_batches_go_into_each_other_is_refused() -> None:
    with pytest.raises(ValidationError, match="multiple of micro_batch_size, got 7 and 2 or 4"):
        a_space(
            dimensions={"micro_batch_size": {"choices": [2, 4]}}, fixed={"effective_batch_size": 7}
        )
