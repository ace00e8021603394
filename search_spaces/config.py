"""Owns one candidate: a frozen QLoRA configuration that validates itself.

Knows nothing of models, GPUs, Optuna or files. Rules that need a model or a GPU are in `rules`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from search_spaces.documents import Document
from search_spaces.knobs import CAPACITY_KEYS, KNOBS, Knobs
from search_spaces.validation import validate


class TrialConfig(Knobs):
    """One QLoRA fine-tuning configuration; the defaults are the standard published recipe.

    Raises:
        pydantic.ValidationError: a value is out of range; `parse_config` makes it an `InputError`.
    """

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens in one forward pass of one GPU."""
        return self.micro_batch_size * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, of all GPUs together."""
        return self.samples_per_step * self.seq_len

    def checkpointed_count(self, layers: int) -> int:
        """Return how many of so many decoder layers are recomputed."""
        return round(self.checkpoint_fraction * layers)

    def checkpointed_layers(self, layers: int) -> frozenset[int]:
        """Return which of so many decoder layers are recomputed: a share of them, evenly spread."""
        return _spread(self.checkpointed_count(layers), layers)

    def quantized_count(self, layers: int) -> int:
        """Return how many of so many decoder layers are held in 4 bits."""
        return round(self.quantized_fraction * layers) if self.is_quantized else 0

    def quantized_layers(self, layers: int) -> frozenset[int]:
        """Return which of so many decoder layers are held in 4 bits, evenly spread."""
        return _spread(self.quantized_count(layers), layers)

    def base(self) -> TrialConfig:
        """Return what of this configuration shapes the frozen base; equal ones share one base."""
        resolved = canonical(self)
        shaping = {key: getattr(resolved, key) for key, knob in KNOBS.items() if knob.shapes_base}
        return TrialConfig(**shaping)

    def capacity(self) -> dict[str, Any]:
        """Return what decides how much its adapters can learn, in plain JSON values."""
        return self.model_dump(mode="json", include=set(CAPACITY_KEYS))

    def key(self) -> str:
        """Return the canonical JSON text; equal for equal configurations."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    def changes_from(self, other: TrialConfig) -> dict[str, Any]:
        """Return the keys whose values differ from ``other``, with this configuration's values."""
        changed = {key for key in CONFIG_KEYS if getattr(self, key) != getattr(other, key)}
        return self.model_dump(mode="json", include=changed) if changed else {}


CONFIGS_KEPT = 2**15
"""Configurations whose canonical form is kept: a page of thousands of trials asks dozens of times
of each."""


def _spread(count: int, layers: int) -> frozenset[int]:
    """Return so many of the layers, evenly spread, the first among them."""
    return frozenset(index * layers // count for index in range(count))


CONFIG_KEYS = tuple(TrialConfig.model_fields)


def parse_config(values: Mapping[str, Any], *, where: str = "configuration") -> TrialConfig:
    """Build a configuration from plain values; missing keys take the defaults.

    Args:
        values: plain values as JSON or YAML read them.
        where: what the values came from (``configs.jsonl: line 3``), for the message.

    Raises:
        InputError: an unknown key or a value out of range; the message names ``where``, key, value.
    """
    return validate(TrialConfig, dict(values), Document(where))


@lru_cache(maxsize=CONFIGS_KEPT)
def canonical(config: TrialConfig) -> TrialConfig:
    """Return the configuration that trains the same way, with every default written out.

    Two configurations with the same canonical form are one run: alpha left out is twice the rank,
    for one.
    """
    return config.model_copy(update={key: value(config) for key, value in _RESOLVED.items()})


_RESOLVED = {key: knob.resolved for key, knob in KNOBS.items() if knob.resolved is not None}
