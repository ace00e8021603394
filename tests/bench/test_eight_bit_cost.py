"""What the page and the program say of 8-bit compute is what the trainings came to."""

from __future__ import annotations

from typing import get_args

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.kinds import Quantization
from qlora_sweep.search_spaces.quality import KnownQuality
from tests.bench import eight_bit_cost
from tests.bench.eight_bit_cost import Results


def test_the_page_has_what_the_trainings_came_to() -> None:
    text = eight_bit_cost.PAGE.read_text(encoding="utf-8")
    assert text == eight_bit_cost.page(text, eight_bit_cost.made(Results.read()))


def test_what_is_stated_is_measured_and_of_nothing_else() -> None:
    measured = eight_bit_cost.stated(Results.read())
    in_16_bits = [(quantization, "bf16") for quantization in get_args(Quantization)]
    in_8_bits = [("fp8", "fp8"), ("int8", "int8"), ("nf4", "fp8"), ("nf4", "int8")]
    for kind in in_16_bits + in_8_bits + [("fp4", "fp8"), ("fp4", "int8")]:
        config = TrialConfig(quantization=kind[0], compute_dtype=kind[1])
        known = KnownQuality.of(config).nats_per_token_over_16_bit
        assert known == measured.get(kind), kind
