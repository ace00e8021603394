"""One configuration: its defaults, what follows from them, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.config import TrialConfig, parse_config
from search_spaces.errors import InputError, did_you_mean, quote


def test_the_defaults_are_the_published_recipe() -> None:
    config = TrialConfig()
    assert (config.alpha, config.samples_per_step, config.accumulation_steps) == (32.0, 4, 1)
    assert (config.tokens_per_micro_batch, config.tokens_per_step) == (2048, 2048)


def test_accumulation_follows_from_the_effective_batch() -> None:
    config = parse_config({"micro_batch_size": 4, "effective_batch_size": 16, "seq_len": 100})
    assert (config.accumulation_steps, config.tokens_per_step) == (4, 1600)


def test_the_key_does_not_depend_on_the_order_or_form_of_values() -> None:
    one = parse_config({"target_modules": ["v_proj", "q_proj"], "lora_alpha": "16"})
    other = parse_config({"lora_alpha": 16.0, "target_modules": ("q_proj", "v_proj", "q_proj")})
    assert one == other
    assert one.key() == other.key()


def test_changes_are_told_from_another_configuration() -> None:
    assert parse_config({"lora_rank": 8}).changes_from(TrialConfig()) == {"lora_rank": 8}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora_rnak": 8}, "here: unknown key 'lora_rnak'; did you mean 'lora_rank'?"),
        ({3: 8}, "here: unknown key '3'"),
        ({"lora_rank": 0}, "here: lora_rank must be at least 1, got 0"),
        ({"lora_rank": 2.0}, "lora_rank must be a whole number, got 2.0"),
        ({"lora_rank": 10**30}, "lora_rank must be at most 65536, got 10000000"),
        ({"lora_rank": 16**5000}, "got a number too long to show"),
        ({"seq_len": None}, "seq_len must be a whole number, got null"),
        ({"lora_alpha": 0}, "lora_alpha must be greater than 0, got 0"),
        ({"lora_alpha": "lots"}, "lora_alpha must be a number, got 'lots'"),
        ({"lora_dropout": 1.5}, "lora_dropout must be at most 1.0, got 1.5"),
        ({"checkpoint_fraction": True}, "checkpoint_fraction must be a number, got true"),
        (
            {"compute_dtype": "bf8"},
            "compute_dtype must be one of 'bf16', 'fp16', 'fp32', 'fp8' or 'int8'",
        ),
        ({"upcast_fp32": 1}, "upcast_fp32 must be true or false, got 1"),
        ({"target_modules": []}, "target_modules must list at least one module name, none empty"),
        ({"target_modules": 3}, "target_modules must be a name or a list of module names, got 3"),
        ({"target_modules": ["q_proj", ""]}, "target_modules must list at least one module name"),
        ({"target_modules": "{}"}, "got '{}'"),
        ({"kernels": "x" * 500}, "got '" + "x" * 119 + "..."),
        (
            {"micro_batch_size": 3, "effective_batch_size": 8},
            "here: effective_batch_size must be a multiple of micro_batch_size, got 8 and 3",
        ),
    ],
)
def test_a_bad_value_is_refused_with_key_and_value(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_config(values, where="here")
    assert message in str(caught.value)


@given(st.dictionaries(st.sampled_from(list(TrialConfig.model_fields)), st.none() | st.text()))
def test_whatever_is_accepted_comes_back_from_json(values: dict[str, Any]) -> None:
    try:
        config = parse_config(values)
    except InputError:
        return
    assert parse_config(config.model_dump(mode="json")) == config


def test_the_nearest_word_is_named_and_otherwise_all_of_a_few() -> None:
    assert did_you_mean("a01", ["a10", "h200"]) == "; did you mean 'a10'?"
    assert did_you_mean("h100", ["h100-80gb", "h200"]) == "; did you mean 'h100-80gb'?"
    assert did_you_mean("A100", ["a10", "v100", "a100-40", "A100-80"]) == (
        "; did you mean 'a100-40' or 'A100-80'?"
    )
    assert did_you_mean("a", ["a3", "a2", "a1", "a4"]) == "; did you mean 'a3', 'a2' or 'a1'?"
    assert did_you_mean("zzz", ["b", "a"]) == "; known are a, b"
    assert did_you_mean("zzz", []) == did_you_mean("zzz", map(str, range(99))) == ""
    assert did_you_mean("h100:2", ["h100-80gb", "h200"]) == "; did you mean 'h100-80gb'?"


def test_a_long_value_is_cut_in_messages() -> None:
    assert quote("abc") == "'abc'"
    assert len(quote("x" * 1000)) < 130


def test_a_step_is_of_all_cards_and_a_micro_batch_of_each() -> None:
    config = parse_config({"micro_batch_size": 4, "seq_len": 512, "data_parallel": 2})
    assert (config.samples_per_step, config.accumulation_steps) == (8, 1)
    assert (config.tokens_per_step, config.tokens_per_micro_batch) == (4096, 2048)
    longer = parse_config({"micro_batch_size": 4, "data_parallel": 2, "effective_batch_size": 32})
    assert longer.accumulation_steps == 4


def test_the_cards_micro_batches_go_into_the_effective_batch() -> None:
    with pytest.raises(InputError, match="times data_parallel, got 12, 4 and 2"):
        parse_config({"micro_batch_size": 4, "data_parallel": 2, "effective_batch_size": 12})
