"""The learning rate of a configuration that names none: what it depends on, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.learning_rates import in_words, learning_rate_of

WIDE = {"hidden_size": 4096}


def rate(model: Mapping[str, Any] = WIDE, **settings: Any) -> float:
    return learning_rate_of(TrialConfig(**settings), model).value


@given(
    rank=st.integers(1, 65_536),
    alpha=st.none() | st.floats(1e-3, 1e6),
    batch=st.integers(1, 65_536),
    width=st.none() | st.integers(1, 10**7),
    method=st.sampled_from(["sft", "dpo", "grpo"]),
)
def test_every_configuration_has_a_rate_that_can_be_named_inside_its_range(
    rank: int, alpha: float | None, batch: int, width: int | None, method: Any
) -> None:
    config = TrialConfig(method=method, lora_rank=rank, lora_alpha=alpha, micro_batch_size=batch)
    found = learning_rate_of(config, {"hidden_size": width})
    assert found.low < found.value < found.high
    assert found.source == "rule"
    named = learning_rate_of(config.changed(learning_rate=found.value), {"hidden_size": width})
    assert (named.value, named.source) == (found.value, "given")


def test_a_rate_that_is_named_is_kept_beside_what_is_recommended() -> None:
    config = TrialConfig(learning_rate=7e-3)
    found = learning_rate_of(config, WIDE)
    assert found.value == 7e-3
    assert found.recommended == rate()
    assert "7e-3, as given" in found.words
    assert in_words(found.recommended) in found.words


def test_pairs_have_far_smaller_rates_than_texts() -> None:
    assert rate(method="dpo") <= rate() / 10


def test_rates_fall_with_the_rank_where_alpha_does_not_stay() -> None:
    """As measured with alpha twice the rank, and as published where it is fixed."""
    ranks = (4, 16, 64, 256)
    rates = [rate(lora_rank=rank) for rank in ranks]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 3 * rates[-1]
    fixed = [rate(lora_rank=rank, lora_alpha=32) for rank in ranks]
    assert max(fixed) < 3 * min(fixed)
    assert fixed == sorted(fixed)


def test_layers_have_the_rate_of_the_set_that_they_are() -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert rate(target_modules=names) == rate(target_modules="attention")
    everything = (*names, "gate_proj", "up_proj", "down_proj")
    assert rate(target_modules=everything) == rate(target_modules="all-linear")


def test_a_batch_is_the_same_however_it_is_made_up() -> None:
    whole = rate(micro_batch_size=16)
    assert rate(micro_batch_size=2, effective_batch_size=16) == whole
    assert rate(micro_batch_size=2, data_parallel=8) == whole


@pytest.mark.parametrize(("number", "words"), [(2e-4, "2e-4"), (1.25e-3, "1.25e-3")])
def test_rates_are_written_as_people_write_them(number: float, words: str) -> None:
    assert in_words(number) == words
