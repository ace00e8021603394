"""Owns which differences between two definitions of a study matter, and how they read. Pure."""

from __future__ import annotations

import json
from typing import Any

from storage.definition import StudyDefinition

_ABSENT = "(absent)"


def differences(stored: StudyDefinition, given: StudyDefinition) -> tuple[str, ...]:
    """Return one ``key: old -> new`` per difference that makes old and new trials incomparable.

    What steers the search or names things may change freely: trials, time budget, sampler, seed,
    step budgets, names and descriptions. The card and the model count as resolved: by target and
    fingerprint, not by spelling.
    """
    old, new = _compared(stored), _compared(given)
    differing = [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
    ]
    # A baseline inherits what is fixed: one change there is one line.
    inherited = {f"baseline.{key.removeprefix('fixed.')}" for key in differing}
    lines = [
        f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        for key in differing
        if key not in inherited
    ]
    if stored.model_fingerprint != given.model_fingerprint:
        lines.append(f"model: {_model(stored)} -> {_model(given)}")
    return tuple(lines)


def _model(definition: StudyDefinition) -> str:
    return f"{definition.model.get('name')} (config {definition.model_fingerprint})"


def _compared(definition: StudyDefinition) -> dict[str, Any]:
    space = definition.space.model_dump(mode="json")
    flat = {key: space[key] for key in ("weights", "objectives")}
    nested = {key: space[key] for key in ("dimensions", "fixed")}
    # Only what the baseline resolves to counts, not which of its defaults were spelled out.
    nested["baseline"] = definition.space.baseline_config().model_dump(mode="json")
    nested["target"] = definition.target.model_dump(mode="json")
    return flat | {
        f"{outer}.{key}": value for outer, inner in nested.items() for key, value in inner.items()
    }


def _shown(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else _ABSENT
