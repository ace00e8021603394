"""Owns one candidate: a frozen QLoRA configuration that validates itself.

Knows nothing of models, GPUs, Optuna or files. Rules that need a model or a GPU are in `rules`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from search_spaces.errors import InputError, did_you_mean, shown
from search_spaces.knobs import KNOBS, Knobs


class TrialConfig(Knobs):
    """One QLoRA fine-tuning configuration; the defaults are the standard published recipe.

    Raises:
        pydantic.ValidationError: a value is out of range; `parse_config` makes it an `InputError`.
    """

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens in one forward pass."""
        return self.micro_batch_size * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.samples_per_step * self.seq_len

    def checkpointed_layers(self, layers: int) -> frozenset[int]:
        """Return which of so many decoder layers are recomputed: a share of them, evenly spread."""
        count = round(self.checkpoint_fraction * layers)
        return frozenset(index * layers // count for index in range(count))

    def base(self) -> TrialConfig:
        """Return what of this configuration shapes the frozen base; equal ones share one base."""
        shaping = {key: getattr(self, key) for key, knob in KNOBS.items() if knob.shapes_base}
        return TrialConfig(**shaping)

    def key(self) -> str:
        """Return the canonical JSON text; equal for equal configurations."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    def changes_from(self, other: TrialConfig) -> dict[str, Any]:
        """Return the keys whose values differ from ``other``, with this configuration's values."""
        mine, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        return {key: value for key, value in mine.items() if theirs[key] != value}


CONFIG_KEYS = tuple(TrialConfig.model_fields)


def parse_config(values: Mapping[str, Any], *, where: str = "configuration") -> TrialConfig:
    """Build a configuration from plain values; missing keys take the defaults.

    Args:
        values: plain values as JSON or YAML read them.
        where: what the values came from (``configs.jsonl: line 3``), for the message.

    Raises:
        InputError: an unknown key or a value out of range; the message names ``where``, key, value.
    """
    for key in values:
        if key not in CONFIG_KEYS:
            raise InputError(f"{where}: unknown key '{key}'{did_you_mean(str(key), CONFIG_KEYS)}")
    try:
        return TrialConfig.model_validate(dict(values))
    except ValidationError as error:
        raise InputError(f"{where}: {explain_validation(error)}") from error


_MESSAGES = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be one of {expected}",
    "int_type": "must be a whole number",
    "bool_type": "must be true or false",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "date_type": "must be a date like 2026-11-21",
    "date_parsing": "must be a date like 2026-11-21",
    "date_from_datetime_parsing": "must be a date like 2026-11-21",
    "date_from_datetime_inexact": "must be a date like 2026-11-21",
    "string_pattern_mismatch": "must be letters, digits, '.', '_' and '-', at most 64",
    "tuple_type": "must be a list",
    "too_short": "must not be empty",
    "dict_type": "must map keys to values",
    "model_type": "must map keys to values",
    "missing": "is missing",
    "extra_forbidden": "is not a known key",
}


def explain_validation(error: ValidationError) -> str:
    """Return one line for the first fault of a pydantic error: key, rule, and what broke it."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
    kind = first["type"]
    if kind == "value_error":
        return f"{key} {first['msg'].removeprefix('Value error, ')}".strip()
    rule = _MESSAGES[kind].format(**first.get("ctx", {})) if kind in _MESSAGES else first["msg"]
    quoted = "" if kind in ("missing", "extra_forbidden") else f", got {shown(first['input'])}"
    return f"{key} {rule}{quoted}".strip()
