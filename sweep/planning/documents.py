"""Owns plans as JSON documents. Keys may be added here, and are never renamed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from search_spaces.linears import CapacityClass
from sweep.planning.forecast import Forecast
from sweep.planning.plan import CardComparison, CardPlan
from sweep.planning.recommendation import STANDARD
from sweep.planning.survey import Survey
from sweep.planning.table import ShapeTable
from sweep.predict.cost import Bill, BreakEven
from sweep.predict.memory.peaks import PARTS
from sweep.predict.memory.predictor import Fit


def forecast_document(forecast: Forecast, *, bills: Sequence[Bill]) -> dict[str, Any]:
    """Return one configuration's answer; what is not known is null.

    ``fits`` is the best guess and ``fits_certainty`` says whether it is more than that. Where
    memory cannot be predicted it is null, and ``notes`` say why. ``cost`` is the cheapest bill.
    ``invalid`` is the rule that forbids the configuration.
    """
    memory, speed, broken = forecast.memory, forecast.speed, forecast.broken
    return {
        "config": forecast.config.model_dump(mode="json"),
        "fits": forecast.fits,
        "fits_certainty": _certainty(forecast),
        "peak_allocated_bytes": None if memory is None else memory.peak_allocated_bytes,
        "peak_reserved_bytes": None if memory is None else memory.peak_reserved_bytes,
        "breakdown": None if memory is None else {part: memory.breakdown[part] for part in PARTS},
        "peak_moment": None if memory is None else memory.moment,
        "quantized_share": None if memory is None else memory.quantized_share,
        "step_seconds": forecast.step_seconds,
        "tokens_per_second": forecast.tokens_per_second,
        "tokens_per_second_range": _range(forecast),
        "bottleneck": None if speed is None else speed.bottleneck,
        "flops_utilization": None if speed is None else speed.flops_utilization,
        "basis": _basis(forecast),
        "measured": _measured(forecast),
        "cost": bills[0].to_json() if bills else None,
        "invalid": None if broken is None else {"rule": broken.rule, "reason": broken.reason},
        "notes": list(forecast.notes),
    }


def _certainty(forecast: Forecast) -> str:
    return "uncertain" if forecast.fit is Fit.UNCERTAIN else "sure"


def _range(forecast: Forecast) -> list[float | None] | None:
    """Return the least and the most that the speed may be; null where there is no most."""
    ends = forecast.tokens_per_second_range
    return None if ends is None else [end if math.isfinite(end) else None for end in ends]


def _basis(forecast: Forecast) -> dict[str, Any]:
    """Return how sure the numbers are: memory's relative error, where speed comes from."""
    return {
        "memory": None if forecast.memory is None else "predicted",
        "memory_uncertainty": None if forecast.memory is None else forecast.memory.uncertainty,
        "reserved_uncertainty": (
            None if forecast.memory is None else forecast.memory.reserved_uncertainty
        ),
        "speed": forecast.speed_basis,
        "speed_uncertainty": forecast.speed_uncertainty,
        "speed_trials": 0 if forecast.speed is None else forecast.speed.trials,
    }


def _measured(forecast: Forecast) -> dict[str, Any] | None:
    trial = forecast.trial
    if trial is None or trial.measurement is None:
        return None
    return {
        "trial": trial.number,
        "peak_allocated_bytes": trial.measurement.peak_allocated_bytes,
        "peak_reserved_bytes": trial.measurement.peak_reserved_bytes,
        "step_seconds": trial.measurement.step_seconds,
        "tokens_per_second": trial.measurement.tokens_per_second,
    }


def card_document(plan: CardPlan) -> dict[str, Any]:
    """Return the plan of one card.

    Where one configuration was asked about, its answer's keys are the document's own; where a space
    was, the one to take is under ``recommended``.
    """
    shown = None if plan.shown is None else forecast_document(plan.shown, bills=plan.bills)
    answer = {"recommended": shown} if plan.survey is not None else (shown or {})
    return {
        **answer,
        "gpu": {
            "name": plan.gpu.name,
            "memory_bytes": plan.gpu.memory_bytes,
            "budget_bytes": plan.budget_bytes,
        },
        "model": plan.model.name,
        "space_kind": plan.asked.kind,
        "held": dict(plan.asked.held),
        "table": None if plan.table is None else _table(plan.table),
        **({} if plan.survey is None else _survey(plan.survey)),
        "bills": [bill.to_json() for bill in plan.bills],
        "study": _evidence(plan),
        "notes": list(plan.notes),
    }


def _table(table: ShapeTable) -> dict[str, Any]:
    """Return what fits by size.

    ``scope`` is ``space`` where each cell has the fastest structure of the space, which is its
    ``config``, and ``structure`` where all of them have that of the configuration asked about.
    """
    return {
        "scope": "space" if table.base is None else "structure",
        "micro_batch_sizes": list(table.batches),
        "seq_lens": list(table.lengths),
        "cells": [
            {
                "micro_batch_size": batch,
                "seq_len": length,
                "fits": cell.fits,
                "fits_certainty": _certainty(cell),
                "peak_allocated_bytes": None
                if cell.memory is None
                else cell.memory.peak_allocated_bytes,
                "tokens_per_second": cell.tokens_per_second,
                "config": cell.config.model_dump(mode="json"),
            }
            for (batch, length), cell in table.cells.items()
        ],
        "largest_micro_batch": {
            str(length): {"sure": largest.sure, "possible": largest.possible}
            for length, largest in table.largest.items()
        },
    }


def _survey(survey: Survey) -> dict[str, Any]:
    counts, seconds = survey.counts, survey.study_seconds()
    return {
        "space": survey.space.name,
        "configurations": {
            "total": survey.total,
            "looked_at": counts.looked_at,
            "is_sampled": survey.is_sampled,
            "fit": counts.fit,
            "uncertain": counts.uncertain,
            "cannot_fit": counts.too_large,
            "invalid": sum(counts.invalid.values()),
            "invalid_by_rule": dict(counts.invalid),
            "unpredicted": sum(counts.unpredicted.values()),
            "unpredicted_by_reason": dict(counts.unpredicted),
        },
        "least_bytes": survey.least_bytes,
        "capacity_class": _capacity(survey),
        "alternative": None if survey.alternative is None else _brief(survey.alternative),
        "fastest_by_class": [
            {**forecast.config.capacity(), "seq_len": forecast.config.seq_len, **_brief(forecast)}
            for forecast in survey.fastest_by_class.values()
        ],
        "trials": survey.trials,
        "study_seconds": None if seconds is None else list(seconds),
    }


def _brief(forecast: Forecast) -> dict[str, Any]:
    return {
        "config": forecast.config.model_dump(mode="json"),
        "fits_certainty": _certainty(forecast),
        "tokens_per_second": forecast.tokens_per_second,
        "tokens_per_second_range": _range(forecast),
        "peak_allocated_bytes": (
            None if forecast.memory is None else forecast.memory.peak_allocated_bytes
        ),
    }


def _capacity(survey: Survey) -> dict[str, Any] | None:
    """Return the class that is recommended from, and whether it is the standard recipe's."""
    if survey.recommended is None:
        return None
    standard = CapacityClass.of(STANDARD, survey.model)
    return {**survey.recommended.config.capacity(), "is_standard": survey.capacity == standard}


def _evidence(plan: CardPlan) -> dict[str, Any] | None:
    evidence = plan.evidence
    if evidence.study is None:
        return None
    return {
        "name": evidence.study,
        "trials": len(evidence.trials),
        "is_same_card": evidence.is_same_card,
        "memory_error": evidence.memory_error,
        "speed_error": evidence.calibration and evidence.calibration.relative_error,
    }


def comparison_document(
    plans: Sequence[CardPlan], comparison: CardComparison | None
) -> dict[str, Any]:
    """Return the plans of several cards, and the same training's bills on each."""
    return {
        "plans": [card_document(plan) for plan in plans],
        "comparison": None if comparison is None else _comparison(comparison),
    }


def _comparison(comparison: CardComparison) -> dict[str, Any]:
    costs, work = comparison.bills, comparison.workload
    return {
        "effective_batch_size": comparison.effective_batch_size,
        "seq_len": comparison.seq_len,
        "steps": work.steps,
        "samples": work.samples,
        "tokens": work.tokens,
        "configurations": {gpu: _brief(forecast) for gpu, forecast in comparison.chosen.items()},
        "cheapest": costs.cheapest.to_json(),
        "soonest": costs.soonest.to_json(),
        "bills": [bill.to_json() for bill in costs.bills],
        "break_evens": [_break_even(point) for point in costs.break_evens],
    }


def _break_even(point: BreakEven) -> dict[str, Any]:
    return {
        "samples": point.samples,
        "steps": point.steps,
        "cheaper_below": point.cheaper_below.label,
        "cheaper_above": point.cheaper_above.label,
    }
