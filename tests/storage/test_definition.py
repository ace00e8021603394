"""What a study is about: when two definitions differ."""

from __future__ import annotations

import pytest

from search_spaces.config import CONFIG_KEYS, TrialConfig
from storage.definition import differences
from tests.storage.builders import a_definition

RECIPE = TrialConfig().model_dump(mode="json")


@pytest.mark.parametrize("key", sorted(set(CONFIG_KEYS) - {"micro_batch_size"}))
def test_a_knob_that_is_written_out_with_the_recipes_value_is_no_difference(key: str) -> None:
    left_out, written = a_definition(), a_definition(fixed={key: RECIPE[key]})
    assert differences(left_out, written) == differences(written, left_out) == ()


def test_a_knob_with_another_value_than_the_recipes_is_a_difference() -> None:
    other = a_definition(fixed={"adapter_dtype": "bf16"})
    assert differences(a_definition(), other) == ('fixed.adapter_dtype: "fp32" -> "bf16"',)
