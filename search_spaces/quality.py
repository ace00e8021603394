"""What is known of how much base and compute dtype cost in what a training learns.

Held-out losses of one small model, measured; nothing is derived for other models.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.kinds import QUANTIZATIONS, Numerics, Quantization

SOURCE = "SmolLM2-135M, 122 steps, three seeds: docs/lab/eight_bits.md"


class KnownQuality(BaseModel):
    """What is known of one base with one class of numerics."""

    model_config = ConfigDict(frozen=True)

    quantization: Quantization
    numerics: Numerics
    nats_per_token_over_16_bit: float | None
    """Held-out loss over that of a 16-bit base with 16-bit compute; None where nothing was
    measured."""
    source: str = SOURCE

    @classmethod
    def of(cls, config: TrialConfig) -> KnownQuality:
        """Return what is known of a configuration."""
        is_as_measured = (
            config.method == "sft"
            and config.compute_kind.bits <= 16
            and (config.quantized_fraction == 1.0 or not config.is_quantized)
        )
        nats = None
        if is_as_measured:
            nats = config.base_kind.nats_over_16_bits.get(config.numerics)
        return cls(
            quantization=config.quantization,
            numerics=config.numerics,
            nats_per_token_over_16_bit=nats,
        )

    @property
    def words(self) -> str:
        """Return base, compute and loss: ``nf4 with int8 compute +0.050``."""
        base: str = self.quantization
        if QUANTIZATIONS[self.quantization].bits == 16:
            base = "a 16-bit base"
        kind = f"{base} with {self.numerics} compute"
        nats = self.nats_per_token_over_16_bit
        if nats is None:
            return f"{kind} not measured"
        return f"{kind} +{nats:.3f}"


def quality_in_words(configs: Iterable[TrialConfig]) -> str:
    """Return what is known of some configurations, each kind once; nothing where that is
    nothing."""
    kinds = dict.fromkeys(map(KnownQuality.of, configs))
    losses = ", ".join(k.words for k in kinds if k.nats_per_token_over_16_bit is not None)
    if not losses:
        return ""
    return f"nats a token lost on SmolLM2-135M: {losses} (docs/lab/eight_bits.md)"
