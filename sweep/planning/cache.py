"""Owns the cache of surveys, so that the same question of a space is answered at once.

An entry holds for one space, model, card, budget and version of the code that predicts; any other
is surveyed anew. A cache that cannot be read or written costs time only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.space import SearchSpace
from sweep.planning.forecast import Forecast, Forecaster, Progress, silent
from sweep.planning.survey import ClassKey, Counts, Survey, class_of, survey
from sweep.planning.table import LargestBatch, ShapeTable
from sweep.predict.memory.predictor import Fit
from sweep.predict.memory.profile_store import source_digest, tracing_fingerprint, write_cache

SURVEYED_BY = ("search_spaces", "sweep/data", "sweep/predict", "sweep/planning")
"""Directories whose code decides what a survey holds."""


def cached_survey(
    space: SearchSpace, forecaster: Forecaster, *, directory: Path, progress: Progress = silent
) -> Survey:
    """Return the survey of a space, from ``directory`` where it was made before.

    A study's evidence changes with every trial, and surveys with it: those are not cached. Raises
    as `survey` does.
    """
    if forecaster.evidence.study is not None:
        return survey(space, forecaster, progress=progress)
    path = directory / f"{_digest(space, forecaster)}.json"
    try:
        return _from_json(json.loads(path.read_text(encoding="utf-8")), space, forecaster)
    except (OSError, ValueError, KeyError, TypeError):
        made = survey(space, forecaster, progress=progress)
    write_cache(path, _to_json(made))
    return made


def _digest(space: SearchSpace, forecaster: Forecaster) -> str:
    parts = [
        None if forecaster.shapes is None else forecaster.shapes.epochs.digest,
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
    return source_digest(*SURVEYED_BY)


def _to_json(survey: Survey) -> dict[str, Any]:
    counts, table = survey.counts, survey.table
    return {
        "fit": counts.fit,
        "uncertain": counts.uncertain,
        "too_large": counts.too_large,
        "invalid": dict(counts.invalid),
        "unpredicted": dict(counts.unpredicted),
        "candidates": [
            _forecast_json(forecast)
            for candidates in survey.candidates.values()
            for forecast in candidates
        ],
        "table": None if table is None else _table_json(table),
        "least_bytes": survey.least_bytes,
        "step_seconds": survey.step_seconds,
        "step_uncertainty": survey.step_uncertainty,
        "compiled_share": survey.compiled_share,
    }


def _forecast_json(forecast: Forecast) -> list[Any]:
    """Return what a forecast is made of again; whether it fits takes longest to find."""
    return [forecast.config.changes_from(TrialConfig()), forecast.fit.value]


def _table_json(table: ShapeTable) -> dict[str, Any]:
    return {
        "batches": table.batches,
        "lengths": table.lengths,
        "cells": [
            _forecast_json(table.cells[batch, length])
            for batch in table.batches
            for length in table.lengths
        ],
        "largest": [
            [length, batch.sure, batch.possible] for length, batch in table.largest.items()
        ],
    }


def _from_json(values: dict[str, Any], space: SearchSpace, forecaster: Forecaster) -> Survey:
    candidates: dict[ClassKey, list[Forecast]] = {}
    for entry in values["candidates"]:
        forecast = _forecast(entry, forecaster)
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


def _forecast(entry: list[Any], forecaster: Forecaster) -> Forecast:
    changes, fit = entry
    config = TrialConfig.model_validate(changes)
    forecaster.remember(config, Fit(fit))
    return forecaster.forecast(config)


def _table(values: dict[str, Any], forecaster: Forecaster) -> ShapeTable:
    sizes = itertools.product(values["batches"], values["lengths"])
    cells = [_forecast(entry, forecaster) for entry in values["cells"]]
    return ShapeTable(
        base=None,
        batches=tuple(values["batches"]),
        lengths=tuple(values["lengths"]),
        cells=dict(zip(sizes, cells, strict=True)),
        largest={
            length: LargestBatch(sure, possible) for length, sure, possible in values["largest"]
        },
    )
