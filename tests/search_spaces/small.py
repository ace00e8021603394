"""Sizes of a decoder so small that a config of it can be built in a moment."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 700,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
