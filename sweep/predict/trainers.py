"""What steps of other trainers are predicted from: a configuration that stands for them, and where
their kernels are their own, measured factors over it.

The factors are of Unsloth 2026.10.9 with Mistral-7B-v0.3, rank 16 on q,k,v,o, 512 tokens a row, on
an H200 (`tests/data/unsloth_h200.jsonl`); `tests/sweep/predict/test_trainers.py` derives them from
the rows again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.trainers import trainer_of

_COMPILED: Mapping[str, Any] = {"kernels": "fused-loss", "compile": True}
_LAYERS_OF_LIGER: Mapping[str, Any] = {"kernels": "liger"}


@dataclass(frozen=True)
class Factors:
    """What a trainer's own kernels make of a step of ours that stands for it."""

    stand_in: Mapping[str, Any]
    """Settings of that step, in place of the configuration's."""
    activations: float
    """Bytes of activations and loss, over that step's."""
    seconds: float
    """Of its step, over that step's, in one hour on one machine."""
    log_spread: float
    """Standard deviation of the logarithm of the seconds: the rows' largest difference from their
    mean, widened by 3 / rows, taken for what nine in ten stay within."""


UNSLOTH: Mapping[tuple[str, bool], Factors] = {
    ("nf4", False): Factors(_COMPILED, activations=1.126, seconds=1.002, log_spread=0.022),
    ("none", False): Factors(_COMPILED, activations=1.048, seconds=1.163, log_spread=0.206),
    ("nf4", True): Factors(_LAYERS_OF_LIGER, activations=0.528, seconds=0.999, log_spread=0.121),
}
"""By the base, and whether all layers are recomputed: two rows each."""


def factors_of(config: TrialConfig) -> Factors | None:
    """Return the factors of a trainer with kernels of its own; None of others, and where nothing
    is measured."""
    if config.trainer != "unsloth":
        return None
    return UNSLOTH.get((config.quantization, config.checkpoint_fraction == 1))


def for_memory(config: TrialConfig) -> TrialConfig:
    """Return the configuration of full rows, in our own step, that needs as much memory as those
    that the trainer makes, but for its factors: packed where a mask comes with any of them."""
    factors = factors_of(config)
    if factors is not None:
        return config.changed(**factors.stand_in, trainer="sweep")
    how_often = trainer_of(config).masks_full_rows
    # A row alone is as wide as it is long.
    is_masked = how_often == "always" or (how_often == "sometimes" and config.micro_batch_size > 1)
    if config.is_on_completions or not is_masked:
        return config
    return config.changed(packing="packed")


def for_speed(config: TrialConfig) -> TrialConfig:
    """Return the same of the time that a step takes: masked where a mask comes with all rows."""
    if config.trainer == "sweep":
        return config
    factors = factors_of(config)
    if factors is not None:
        return config.changed(**factors.stand_in, trainer="sweep")
    if trainer_of(config).masks_full_rows == "always":
        return config.changed(packing="packed")
    return config
