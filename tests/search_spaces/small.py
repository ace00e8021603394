"""A decoder so small that a config of it can be built in a moment, and the rules asked of it."""

from __future__ import annotations

import datetime
from typing import Any

from qlora_sweep.search_spaces.config import parse_config
from qlora_sweep.search_spaces.models import ModelSpec, checked_config
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.search_spaces.rules import Violation, violation

SMALL: dict[str, Any] = {
    "vocab_size": 700,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small_model(model_type: str = "llama", **config: Any) -> ModelSpec:
    values = {"model_type": model_type, **SMALL, **config}
    return ModelSpec(f"small-{model_type}", "directory", checked_config(values, label="small"))


def make_offer(**terms: Any) -> Offer:
    """Return a price for an A10, but for ``terms``."""
    values = {
        "gpu": "a10",
        "provider": "Someone",
        "usd_per_hour": 3.6,
        "date": datetime.date(2026, 11, 21),
        "source": "a test",
    }
    return Offer.model_validate(values | terms)


def broken(
    values: dict[str, Any],
    model: ModelSpec,
    gpu: tuple[int, int] | None = (8, 0),
    **more: Any,
) -> Violation | None:
    """The first rule that such a configuration breaks there; on a CPU where there is no GPU."""
    options = {"device": "cpu" if gpu is None else "cuda", **more}
    return violation(parse_config(values), model=model, compute_capability=gpu, **options)
