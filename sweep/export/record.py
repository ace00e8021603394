"""Owns the record of a recipe: what was measured of what, as programs read it.

Every export has it, in one line of its head or as the document itself, so that whoever finds the
file can hold a run of it against what was measured.
"""

from __future__ import annotations

import json
from typing import Any

from sweep.export.recipe import Recipe

_BEGINNING = "# record: "
_ENVIRONMENT = ("device", "gpu", "driver", "cuda_driver", "python", "commit", "versions")


def document(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain JSON values."""
    return {
        "study": recipe.study,
        "number": recipe.number,
        "model": {"name": recipe.model.name, "weights": recipe.weights},
        "gpu": {
            "name": recipe.target.gpu,
            "budget_bytes": recipe.target.budget_bytes,
            "emulated_on": recipe.target.emulated_on,
        },
        "config": recipe.config.model_dump(mode="json"),
        "measurement": recipe.measurement.model_dump(mode="json", exclude={"soak"}),
        "confirmed": recipe.is_confirmed,
        "versions": recipe.environment.get("versions"),
        "texts": _texts(recipe),
        "environment": {key: recipe.environment.get(key) for key in _ENVIRONMENT},
    }


def _texts(recipe: Recipe) -> dict[str, Any] | None:
    """Return what the texts were that it was measured on; None for full rows of random tokens."""
    texts = getattr(recipe, "texts", None)
    return None if texts is None else texts.summary.model_dump(mode="json")


def record_line(recipe: Recipe) -> str:
    """Return the record as a comment of one line, for YAML and Python alike."""
    # ASCII alone, so that nothing in it can end the line.
    return _BEGINNING + json.dumps(document(recipe))


def recorded(text: str) -> str | None:
    """Return the JSON of the record that an export has in its head; None where it has none."""
    lines = (line for line in text.splitlines() if line.startswith(_BEGINNING))
    return next((line.removeprefix(_BEGINNING) for line in lines), None)
