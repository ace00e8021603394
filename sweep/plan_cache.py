"""Owns keeping what was found of a space, so that the same question is answered at once.

What is kept holds for one space, model, card, budget and version of the code that predicts; any
other asks anew. A cache that cannot be read or written costs time only.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.space import SearchSpace
from sweep.planning.forecast import Forecaster
from sweep.planning.survey import Counts, Survey, class_of, survey
from sweep.predict.profiles import keep, tracing_fingerprint

_PACKAGES = ("search_spaces", "sweep.predict", "sweep.planning")
"""Whose code decides what is found."""


def kept_survey(space: SearchSpace, forecaster: Forecaster, *, directory: Path) -> Survey:
    """Return the survey of a space, from ``directory`` where it was made before.

    A study's trials change what is found with every trial: with evidence nothing is kept.
    Raises as `survey` does.
    """
    if forecaster.evidence.study is not None:
        return survey(space, forecaster)
    path = directory / f"{_digest(space, forecaster)}.json"
    try:
        return _from_json(json.loads(path.read_text(encoding="utf-8")), space, forecaster)
    except (OSError, ValueError, KeyError, TypeError):
        found = survey(space, forecaster)
    keep(path, _to_json(found))
    return found


def _digest(space: SearchSpace, forecaster: Forecaster) -> str:
    parts = [
        space.model_dump(mode="json"),
        forecaster.model.fingerprint,
        forecaster.gpu.model_dump(mode="json"),
        forecaster.budget_bytes,
        tracing_fingerprint(),
        _code_fingerprint(),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _code_fingerprint() -> str:
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for file in sorted(files(package).iterdir(), key=lambda file: file.name):
            if file.name.endswith(".py"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _to_json(found: Survey) -> dict[str, Any]:
    counts = found.counts
    return {
        "fit": counts.fit,
        "uncertain": counts.uncertain,
        "too_large": counts.too_large,
        "invalid": dict(counts.invalid),
        "fastest": [
            forecast.config.model_dump(mode="json") for forecast in found.fastest_by_class.values()
        ],
        "least_bytes": found.least_bytes,
        "mean_step_seconds": found.mean_step_seconds,
        "compiled_share": found.compiled_share,
    }


def _from_json(values: dict[str, Any], space: SearchSpace, forecaster: Forecaster) -> Survey:
    fastest = map(TrialConfig.model_validate, values["fastest"])
    return Survey(
        space=space,
        total=space.size(),
        counts=Counts(values["fit"], values["uncertain"], values["too_large"], values["invalid"]),
        fastest_by_class={class_of(config): forecaster.forecast(config) for config in fastest},
        least_bytes=values["least_bytes"],
        mean_step_seconds=values["mean_step_seconds"],
        compiled_share=values["compiled_share"],
    )
