"""Memory of checkpoints that are stored in 4 bits but for some of their modules."""

from __future__ import annotations

from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.rules import own_settings

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 5000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}
LEFT = ["lm_head", "model.layers.5.mlp", "model.layers.7.", "model.layers.13.mlp"]


def test_memory_is_predicted_of_what_is_stored(predictor: Any) -> None:
    """Layers that are stored otherwise are not taken for others, though few are traced."""
    weights = []
    for left in (["lm_head"], LEFT):
        said = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": left}
        spec = ModelSpec("stored", "directory", {**SIZES, "quantization_config": said})
        own = {key: value for key, (value, _) in own_settings(spec).items()}
        config = TrialConfig(**own, upcast_fp32=False, micro_batch_size=2, seq_len=64)
        predicted = predictor(spec).predict(config)
        assert predicted.quantized_share == 1.0
        weights.append(predicted.breakdown["weights"])
    mlp = 3 * 256 * 704
    attention = 2 * 256 * 256 + 2 * 256 * 128
    # Two bytes in place of a half, and of four for the constant of each 64.
    expected = (3 * mlp + attention) * (2 - 0.5 - 4 / 64)
    assert weights[1] - weights[0] == pytest.approx(expected, rel=0.02)
