"""Settings by what their values are, so that a new one is tried where all are."""

from __future__ import annotations

from typing import Any, get_args

from qlora_sweep.search_spaces.config import TrialConfig

BOOLEANS = tuple(key for key, field in TrialConfig.model_fields.items() if field.annotation is bool)


def words_of(key: str) -> tuple[Any, ...]:
    """Return every value of a setting that is a word or a truth value; none of another."""
    if key in BOOLEANS:
        return (True, False)
    values = get_args(TrialConfig.model_fields[key].annotation)
    return tuple(value for value in values if isinstance(value, str))
