"""Ranges and spaces built in code: their values, sizes and round trips."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from search_spaces.config import TrialConfig
from search_spaces.space import Choices, FloatRange, IntRange, SearchSpace


def test_a_range_of_whole_numbers_ends_at_the_last_whole_step() -> None:
    assert IntRange(low=8, high=20, step=8).values() == (8, 16)


@given(
    low=st.floats(0, 1),
    width=st.floats(0, 1),
    step=st.floats(0.001, 1),
)
def test_no_value_of_a_range_lies_beyond_its_ends(low: float, width: float, step: float) -> None:
    values = FloatRange(low=low, high=low + width, step=step).values()
    assert values is not None
    assert all(low - 1e-9 <= value <= low + width for value in values)
    assert len(set(values)) == len(values)


def test_steps_of_a_tenth_are_tenths() -> None:
    assert FloatRange(low=0.0, high=0.4, step=0.1).values() == (0.0, 0.1, 0.2, 0.3, 0.4)


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


@pytest.mark.parametrize(
    ("effective", "micro", "fits"), [(8, (1, 2, 8), True), (8, (1, 3), False), (None, (3,), True)]
)
def test_batches_must_go_into_each_other_in_every_combination(
    effective: int | None, micro: tuple[int, ...], fits: bool
) -> None:
    values = {
        "name": "s",
        "dimensions": {"micro_batch_size": Choices(choices=micro)},
        "fixed": {"effective_batch_size": effective},
    }
    if fits:
        assert SearchSpace.model_validate(values).size() == len(micro)
    else:
        with pytest.raises(ValidationError, match="not a multiple of micro_batch_size 3"):
            SearchSpace.model_validate(values)
