"""What is known of the loss that base and compute dtype cost, and of what nothing is."""

from __future__ import annotations

from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.quality import KnownQuality, quality_in_words

NF4 = TrialConfig()


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "dpo"},
        {"quantized_fraction": 0.5},
        {"compute_dtype": "fp32"},
        {"quantization": "fp4"},
    ],
    ids=str,
)
def test_nothing_is_known_of_what_was_not_measured(settings: dict[str, Any]) -> None:
    config = NF4.changed(**settings)
    assert KnownQuality.of(config).nats_per_token_over_16_bit is None
    assert quality_in_words([config]) == ""


def test_an_8_bit_base_with_its_own_compute_costs_less_than_nf4_and_nf4_in_8_bits_more() -> None:
    def nats(**settings: Any) -> float:
        known = KnownQuality.of(NF4.changed(**settings)).nats_per_token_over_16_bit
        assert known is not None
        return known

    own = [nats(quantization=kind, compute_dtype=kind) for kind in ("fp8", "int8")]
    assert 0 == nats(quantization="none") < min(own)
    assert max(own) < nats() < min(nats(compute_dtype="fp8"), nats(compute_dtype="int8"))


def test_each_kind_is_said_once() -> None:
    words = quality_in_words([NF4, NF4.changed(lora_rank=64), NF4.changed(compute_dtype="int8")])
    assert words.count("+") == 2
