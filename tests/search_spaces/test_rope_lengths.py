"""How many positions a config's rotary embeddings reach, of configs as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import (
    load_model_spec,
)
from tests.search_spaces.small import broken, small_model

CASES = Path(__file__).parents[1] / "data" / "configs"
YARN_OF_QWEN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
YARN_OF_4096 = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONG = {"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}


def reach(positions: int, **config: Any) -> int | None:
    return small_model(**{"max_position_embeddings": positions, **config}).max_positions


@pytest.mark.parametrize(
    ("key", "kind"), [("rope_scaling", "type"), ("rope_parameters", "rope_type")]
)
@pytest.mark.parametrize(
    ("name", "more", "positions", "expected"),
    [
        ("linear", {"factor": 4.0}, 4096, 16_384),
        ("dynamic", {"factor": 2.5}, 262_144, 655_360),
        ("yarn", {"factor": 4.0}, 512, 2048),
        ("default", {}, 4096, 4096),
        ("mrope", {"mrope_section": [16, 24, 24]}, 32_768, 32_768),
    ],
)
def test_a_factor_lengthens_by_the_type(
    key: str, kind: str, name: str, more: dict[str, Any], positions: int, expected: int
) -> None:
    assert reach(positions, **{key: {kind: name, **more}}) == expected


@pytest.mark.parametrize(
    ("config", "positions", "expected"),
    [
        # Qwen2.5 and Qwen3, as their model cards say to lengthen them.
        ({"model_type": "qwen3", "rope_scaling": YARN_OF_QWEN}, 40_960, 131_072),
        ({"model_type": "qwen3", "rope_parameters": YARN_OF_QWEN}, 131_072, 131_072),
        # Llama 3.1: the factor times the original length is less than is stated.
        ({"rope_scaling": LLAMA_3}, 131_072, 131_072),
        # Phi-3 and Phi-4-mini.
        (
            {"rope_scaling": LONG, "original_max_position_embeddings": 4096},
            131_072,
            131_072,
        ),
        # gpt-oss, and YaRN-Mistral-7b-128k, which states less.
        (
            {"rope_scaling": {**YARN_OF_4096, "factor": 32}},
            131_072,
            131_072,
        ),
        (
            {"rope_scaling": {**YARN_OF_4096, "factor": 32}},
            32_768,
            131_072,
        ),
        # Gemma 3, as transformers 4 and 5 write it; OLMo 3 lengthens the layers without a window.
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            131_072,
            131_072,
        ),
        (
            {
                "model_type": "olmo3",
                "rope_parameters": {
                    "full_attention": {**YARN_OF_4096, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            4096,
            32_768,
        ),
        # Llama 4 Scout has more positions than any other; a factor that is null is the stated one.
        ({"rope_scaling": None}, 10_485_760, 10_485_760),
        ({"rope_scaling": {**YARN_OF_QWEN, "factor": None}}, 131_072, 131_072),
    ],
)
def test_published_configs_reach_what_they_were_made_for(
    config: dict[str, Any], positions: int, expected: int
) -> None:
    assert reach(positions, **config) == expected


@pytest.mark.parametrize("name", ["rope_linear", "rope_yarn_min"])
def test_the_rule_about_lengths_knows_the_factor(name: str) -> None:
    model = load_model_spec(str(CASES / name))
    assert broken({"seq_len": 2048}, model) is None
    found = broken({"seq_len": 2049}, model)
    assert found is not None
    assert "2048 positions" in found.reason


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "linear"},
        {"type": "linear", "factor": "4"},
        {"type": "dynamic", "factor": 0},
        {"rope_type": "yarn", "factor": True},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "many"},
        {"type": "linear", "factor": 1e300},
        # Phi-3 in its first release.
        {"type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
    ],
)
def test_scaling_from_which_no_length_follows_is_refused_by_its_key(rope: object) -> None:
    with pytest.raises(InputError, match="rope_scaling"):
        reach(4096, rope_scaling=json.loads(json.dumps(rope)))
