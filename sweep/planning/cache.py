"""Owns keeping what was found of a space, so that the same question is answered at once.

What is kept holds for one space, model, card, budget and version of the code that predicts; any
other asks anew. A cache that cannot be read or written costs time only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.space import SearchSpace
from sweep.planning.forecast import Forecast, Forecaster
from sweep.planning.survey import ClassKey, Counts, Survey, class_of, survey
from sweep.planning.table import LargestBatch, ShapeTable
from sweep.predict.memory.predictor import Fit
from sweep.predict.memory.profiles import keep, tracing_fingerprint

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
    counts, table = found.counts, found.table
    return {
        "fit": counts.fit,
        "uncertain": counts.uncertain,
        "too_large": counts.too_large,
        "invalid": dict(counts.invalid),
        "unpredicted": dict(counts.unpredicted),
        "candidates": [_kept(one) for some in found.candidates.values() for one in some],
        "table": None if table is None else _kept_table(table),
        "least_bytes": found.least_bytes,
        "step_seconds": found.step_seconds,
        "step_uncertainty": found.step_uncertainty,
        "compiled_share": found.compiled_share,
    }


def _kept(forecast: Forecast) -> list[Any]:
    """Return what a forecast is made of again; whether it fits takes longest to find."""
    return [forecast.config.changes_from(TrialConfig()), forecast.fit.value]


def _kept_table(table: ShapeTable) -> dict[str, Any]:
    return {
        "batches": table.batches,
        "lengths": table.lengths,
        "cells": [
            _kept(table.cells[batch, length]) for batch in table.batches for length in table.lengths
        ],
        "largest": [[length, one.sure, one.possible] for length, one in table.largest.items()],
    }


def _from_json(values: dict[str, Any], space: SearchSpace, forecaster: Forecaster) -> Survey:
    candidates: dict[ClassKey, list[Forecast]] = {}
    for kept in values["candidates"]:
        forecast = _forecast(kept, forecaster)
        candidates.setdefault(class_of(forecast.config, forecaster.model), []).append(forecast)
    return Survey(
        space=space,
        model=forecaster.model,
        total=space.size(),
        counts=Counts(
            values["fit"],
            values["uncertain"],
            values["too_large"],
            values["invalid"],
            values["unpredicted"],
        ),
        candidates=candidates,
        table=None if values["table"] is None else _table(values["table"], forecaster),
        least_bytes=values["least_bytes"],
        step_seconds=values["step_seconds"],
        step_uncertainty=values["step_uncertainty"],
        compiled_share=values["compiled_share"],
    )


def _forecast(kept: list[Any], forecaster: Forecaster) -> Forecast:
    changes, fit = kept
    config = TrialConfig.model_validate(changes)
    forecaster.recall(config, Fit(fit))
    return forecaster.forecast(config)


def _table(values: dict[str, Any], forecaster: Forecaster) -> ShapeTable:
    sizes = itertools.product(values["batches"], values["lengths"])
    cells = [_forecast(kept, forecaster) for kept in values["cells"]]
    return ShapeTable(
        base=None,
        batches=tuple(values["batches"]),
        lengths=tuple(values["lengths"]),
        cells=dict(zip(sizes, cells, strict=True)),
        largest={
            length: LargestBatch(sure, possible) for length, sure, possible in values["largest"]
        },
    )
