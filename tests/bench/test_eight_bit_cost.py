"""What the page and the program say of 8-bit compute is what the trainings came to."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.kinds import Quantization
from qlora_sweep.search_spaces.quality import KnownQuality
from tests.bench import eight_bit_cost
from tests.bench.eight_bit_cost import Difference, Results


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


def test_differences_are_of_the_seeds_that_both_have() -> None:
    found = Difference.between({1: 1.5, 2: 1.7, 3: 1.6}, {3: 1.3, 1: 1.1})
    assert found.values == pytest.approx((0.4, 0.3))
    # Two values: a half-width of 12.706 standard errors.
    assert found.half_width == pytest.approx(12.706 * 0.05, rel=1e-4)
    assert Difference((0.1,)).half_width is None


def row(base: str, compute: str, seed: int, loss: float, **more: Any) -> dict[str, Any]:
    return {
        "name": "quality",
        "base": base,
        "compute": compute,
        "learning_rate": 5e-4,
        "seed": seed,
        "eval_loss": loss,
        **more,
    }


def test_other_names_rates_and_settings_do_not_count() -> None:
    rows = [
        row("none", "bf16", 1, 1.0),
        row("int8", "int8", 1, 1.25),
        row("int8", "int8", 2, 9.0),
        row("int8", "int8", 1, 8.0) | {"learning_rate": 1e-3},
        row("int8", "int8", 1, 7.0) | {"name": "power", "power": 0.2},
    ]
    results = Results({}, rows)
    assert results.over(("int8", "int8"), ("none", "bf16"), 5e-4).values == (0.25,)
    assert results.losses(("int8", "int8"), 5e-4, name="power", power=0.2) == {1: 7.0}
    assert not results.losses(("int8", "int8"), 5e-4, name="power", power=0.3)
    assert math.isclose(results.over(("int8", "int8"), ("none", "bf16"), 5e-4).mean, 0.25)
