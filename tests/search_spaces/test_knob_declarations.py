"""What is declared of each setting agrees with the values that it takes."""

from __future__ import annotations

import pytest

from search_spaces.config import KNOBS, TrialConfig, canonical


@pytest.mark.parametrize("key", KNOBS)
def test_every_value_that_a_declaration_names_is_one_of_the_knob(key: str) -> None:
    knob = KNOBS[key]
    for value in (*knob.lean_first, *knob.tried):
        assert knob.phrase(getattr(TrialConfig.model_validate({key: value}), key))


@pytest.mark.parametrize("key", KNOBS)
def test_every_setting_is_explained(key: str) -> None:
    assert (TrialConfig.model_fields[key].description or "").endswith(".")


def test_what_a_value_comes_to_is_found_once() -> None:
    config = TrialConfig(quantization="none")
    resolved = canonical(config)
    assert resolved.changes_from(config) == {
        "lora_alpha": 32.0,
        "effective_batch_size": 4,
        "double_quant": False,
    }
    assert canonical(resolved) == resolved


def test_a_share_of_layers_is_spread_evenly_and_begins_with_the_first() -> None:
    config = TrialConfig(quantized_fraction=0.75, checkpoint_fraction=0.5)
    assert config.quantized_layers(8) == {0, 1, 2, 4, 5, 6}
    assert config.checkpointed_layers(8) == {0, 2, 4, 6}
    assert TrialConfig(quantization="none").quantized_layers(8) == frozenset()


def test_a_base_without_quantization_is_one_whatever_is_asked_of_its_constants() -> None:
    bases = {TrialConfig(quantization="none", double_quant=d).base() for d in (True, False)}
    assert len(bases) == 1
