"""How many positions a config's rotary embeddings reach, of configs as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import (
    load_model_spec,
)
from tests.search_spaces.small import broken, small_model
from tests.tables import cases, column

CASES = Path(__file__).parents[1] / "data" / "configs"


def reach(positions: int, **config: Any) -> int | None:
    return small_model(**{"max_position_embeddings": positions, **config}).max_positions


@pytest.mark.parametrize(
    ("key", "kind"), [("rope_scaling", "type"), ("rope_parameters", "rope_type")]
)
@pytest.mark.parametrize(
    ("name", "more", "positions", "expected"),
    cases(
        """
        linear | {factor: 4.0} | 4096 | 16384
        dynamic | {factor: 2.5} | 262144 | 655360
        yarn | {factor: 4.0} | 512 | 2048
        default | {} | 4096 | 4096
        mrope | {mrope_section: [16, 24, 24]} | 32768 | 32768
        """
    ),
)
def test_a_factor_lengthens_by_the_type(
    key: str, kind: str, name: str, more: dict[str, Any], positions: int, expected: int
) -> None:
    assert reach(positions, **{key: {kind: name, **more}}) == expected


PUBLISHED = """
# Qwen2.5 and Qwen3, as their model cards say to lengthen them.
- [40960, 131072, {model_type: qwen3, rope_scaling: &qwen
    {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}}]
- [131072, 131072, {model_type: qwen3, rope_parameters: *qwen}]
# Llama 3.1: the factor times the original length is less than is stated.
- [131072, 131072, {rope_scaling: {rope_type: llama3, factor: 8.0, low_freq_factor: 1.0,
    high_freq_factor: 4.0, original_max_position_embeddings: 8192}}]
# Phi-3 and Phi-4-mini.
- [131072, 131072, {original_max_position_embeddings: 4096, rope_scaling:
    {type: longrope, long_factor: [1, 1, 1, 1, 1, 1, 1, 1],
    short_factor: [1, 1, 1, 1, 1, 1, 1, 1]}}]
# gpt-oss, and YaRN-Mistral-7b-128k, which states less.
- [131072, 131072, {rope_scaling: &yarn
    {rope_type: yarn, original_max_position_embeddings: 4096, factor: 32}}]
- [32768, 131072, {rope_scaling: *yarn}]
# Gemma 3, as transformers 4 and 5 write it; OLMo 3 lengthens the layers without a window.
- [131072, 131072, {model_type: gemma3_text, rope_parameters: {
    full_attention: {rope_type: linear, factor: 8.0}, sliding_attention: {rope_type: default}}}]
- [4096, 131072, {model_type: olmo3, rope_parameters: {
    full_attention: *yarn, sliding_attention: {rope_type: default}}}]
# Llama 4 Scout has more positions than any other; a factor that is null is the stated one.
- [10485760, 10485760, {rope_scaling: null}]
- [131072, 131072, {rope_scaling:
    {rope_type: yarn, factor: null, original_max_position_embeddings: 32768}}]
"""


@pytest.mark.parametrize(("positions", "expected", "config"), yaml.safe_load(PUBLISHED))
def test_published_configs_reach_what_they_were_made_for(
    positions: int, expected: int, config: dict[str, Any]
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
    column(
        """
        {type: linear}
        {type: linear, factor: "4"}
        {type: dynamic, factor: 0}
        {rope_type: yarn, factor: true}
        {rope_type: yarn, factor: 4.0, original_max_position_embeddings: many}
        {type: linear, factor: 1.0e+300}
        # Phi-3 in its first release.
        {type: su, short_factor: [1, 1, 1, 1, 1, 1, 1, 1], long_factor: [1, 1, 1, 1, 1, 1, 1, 1]}
        """
    ),
)
def test_scaling_from_which_no_length_follows_is_refused_by_its_key(rope: object) -> None:
    with pytest.raises(InputError, match="rope_scaling"):
        reach(4096, rope_scaling=json.loads(json.dumps(rope)))
