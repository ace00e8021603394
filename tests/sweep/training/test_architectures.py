"""Configs that transformers has no decoder for, and lengths that only scaled positions reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import ModelSpec, checked_config, load_model_spec
from qlora_sweep.storage.records import Measured
from tests.lazy import lazily
from tests.sweep.training.tiny import BRIEF, TINY, outcome_of, tiny_config

models = lazily("qlora_sweep.sweep.training.model")

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
VISION: dict[str, Any] = {**TINY.config, "model_type": "clip_vision_model"}


@pytest.mark.parametrize(
    "spec",
    [
        load_model_spec(str(CONFIGS / "custom")),
        ModelSpec("tomorrow", "directory", {**TINY.config, "model_type": "llama9"}),
        ModelSpec("seen", "directory", VISION),
    ],
    ids=lambda spec: spec.name,
)
def test_a_type_without_a_decoder_is_told_in_a_sentence(spec: ModelSpec) -> None:
    with pytest.raises(InputError, match="never run") as caught:
        models.architecture_of(spec)
    assert spec.model_type in str(caught.value)


@pytest.mark.parametrize("lacking", ["vocab_size", "model_type"])
def test_a_config_of_own_code_that_says_it_in_own_words_is_told_so(lacking: str) -> None:
    config = {**TINY.config, "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    del config[lacking]
    with pytest.raises(InputError, match="never run"):
        checked_config(config, label="own/config.json")


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 2.0},
    ],
    ids=lambda rope: rope.get("type", rope.get("rope_type")),
)
def test_a_trial_is_as_long_as_scaled_positions_reach(rope: dict[str, Any]) -> None:
    config = {**TINY.config, "model_type": "llama", "max_position_embeddings": 64}
    spec = ModelSpec(
        "long", "directory", checked_config({**config, "rope_scaling": rope}, label="")
    )
    longest = spec.max_positions
    assert longest is not None
    asked = tiny_config(seq_len=longest, micro_batch_size=1)
    assert isinstance(outcome_of(asked, spec=spec, steps=BRIEF), Measured)
