"""Which attention a model takes: by its type's class in transformers, and by its config."""

from __future__ import annotations

from typing import Any

import pytest

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.rules import (
    WITHOUT_FLASH,
    WITHOUT_SDPA,
    attention_of,
    own_settings,
)
from tests.search_spaces.small import broken, small_model
from tests.tables import column


def rule(spec: ModelSpec, attention: str) -> str | None:
    found = broken({"attention": attention, "quantization": "none"}, spec)
    return None if found is None else found.rule


@pytest.mark.parametrize(
    "config",
    column(
        """
        {model_type: gemma2}
        {model_type: vaultgemma}
        {model_type: gemma3_text, attn_logit_softcapping: 20}
        {model_type: a_type_of_tomorrow, attn_logit_softcapping: 30.0}
        """
    ),
)
def test_scores_that_are_capped_are_never_left_to_torchs_attention(config: dict[str, Any]) -> None:
    spec = small_model(**config)
    assert own_settings(spec)["attention"][0] == "eager"
    assert rule(spec, "sdpa") == "attention-not-in-model"
    assert rule(spec, "eager") is None
    assert rule(spec, "flash_attention_2") is None


@pytest.mark.parametrize(
    "spec",
    [
        small_model("gemma2", attn_logit_softcapping=None),
        small_model("gemma", final_logit_softcapping=30.0),
    ],
)
def test_scores_without_a_cap_are(spec: ModelSpec) -> None:
    assert attention_of(spec) == "sdpa"
    assert rule(spec, "sdpa") is None


@pytest.mark.parametrize("cap", ["50", True, 0])
def test_a_cap_that_is_none_is_refused_by_its_key(cap: object) -> None:
    with pytest.raises(InputError, match="attn_logit_softcapping"):
        small_model("gemma2", attn_logit_softcapping=cap)


@pytest.mark.parametrize("kind", ["gpt_oss", "granite_swa", "falcon", "bloom"])
def test_sinks_and_position_biases_are_never_left_to_flash_attention(kind: str) -> None:
    assert rule(small_model(kind, alibi=True), "flash_attention_2") == "attention-not-in-model"


def test_falcons_position_biases_are_left_to_torchs_attention() -> None:
    """The eager one of transformers 5.17 adds them to the mask, and to the scores again."""
    spec = small_model("falcon", alibi=True)
    assert attention_of(spec) == "sdpa"
    assert rule(spec, "eager") == "attention-not-in-model"
    assert rule(small_model("falcon", alibi=False), "eager") is None


def test_the_tables_are_what_transformers_has() -> None:
    """Of every type whose class is there: classes are read, none is built."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for kind in sorted(WITHOUT_SDPA | WITHOUT_FLASH):
        known = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
        assert (kind in WITHOUT_SDPA) <= (not known._supports_sdpa), kind
        listed = known._compatible_flash_implementations
        has_flash = known._supports_flash_attn
        has_flash &= listed is None or "flash_attention_2" in listed
        assert (kind in WITHOUT_FLASH) <= (not has_flash), kind
