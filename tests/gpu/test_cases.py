"""What the tests on a GPU say without one: what they train can be trained, and is everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.rules import violation
from tests.gpu import cases

TESTS = Path(__file__).parents[1]
GPU = find_gpu("h200")


def declared_values(name: str) -> set[Any] | None:
    """Return all values that a setting can have, or None where it is a number or free."""
    annotation = TrialConfig.model_fields[name].annotation
    if annotation is bool:
        return {True, False}
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return None


@pytest.mark.parametrize("name", TrialConfig.model_fields)
def test_the_cases_hold_every_value_of_every_setting(name: str) -> None:
    tried = cases.VALUES.get(name, ())
    if name in cases.ELSEWHERE:
        return
    values = declared_values(name)
    if values is None:
        assert tried
        return
    elsewhere = {value for value in values if f"{name}={value}" in cases.ELSEWHERE}
    assert set(tried) | elsewhere == values


def test_what_is_tried_elsewhere_is_a_value_and_a_test_that_is_there() -> None:
    for what, file in cases.ELSEWHERE.items():
        name, _, value = what.partition("=")
        assert name in TrialConfig.model_fields
        if value and (values := declared_values(name)) is not None:
            assert value in values
        assert (TESTS / file).is_file()


def trained_on_a_gpu() -> list[tuple[dict[str, Any], bool]]:
    """Return the configurations of each suite, and whether it trains on a dataset."""
    from tests.gpu import test_memory_limits, test_prediction, test_texts_on_a_gpu

    suites = [(cases.CASES, False), (test_prediction.CASES, False)]
    suites.append((list(test_memory_limits.TOO_LARGE.values()), False))
    suites.append((test_texts_on_a_gpu.CASES, True))
    return [(settings, on_dataset) for suite, on_dataset in suites for settings in suite]


def test_every_configuration_of_the_cases_is_one_that_no_rule_forbids() -> None:
    from tests.gpu.rig import SMALL, small_config

    for settings, on_dataset in trained_on_a_gpu():
        found = violation(
            small_config(**settings),
            model=SMALL,
            compute_capability=GPU.compute_capability,
            device="cuda",
            has_dataset=on_dataset,
        )
        assert found is None, settings
