"""What a study is about: when two definitions differ, and reading those of earlier versions."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.config import CONFIG_KEYS, TrialConfig
from storage.definition import StudyDefinition, differences
from tests.storage.builders import a_definition

RECIPE = TrialConfig().model_dump(mode="json")


@pytest.mark.parametrize("key", sorted(set(CONFIG_KEYS) - {"micro_batch_size"}))
def test_a_knob_that_is_written_out_with_the_recipes_value_is_no_difference(key: str) -> None:
    left_out, written = a_definition(), a_definition(fixed={key: RECIPE[key]})
    assert differences(left_out, written) == differences(written, left_out) == ()


def test_a_knob_with_another_value_than_the_recipes_is_a_difference() -> None:
    other = a_definition(fixed={"adapter_dtype": "bf16"})
    assert differences(a_definition(), other) == ('fixed.adapter_dtype: "fp32" -> "bf16"',)


@pytest.mark.parametrize(("micro", "expected"), [(3, 3), (8, 8), (2, None)])
def test_a_baseline_whose_batch_an_earlier_version_rounded_is_read_as_it_was_run(
    micro: int, expected: int | None
) -> None:
    stored: dict[str, Any] = a_definition(fixed={"effective_batch_size": 4}).model_dump(mode="json")
    stored["space"]["baseline"] = {"micro_batch_size": micro}
    baseline = StudyDefinition.model_validate(stored).space.baseline_config()
    assert (baseline.micro_batch_size, baseline.effective_batch_size) == (micro, expected or 4)
