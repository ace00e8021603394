"""Owns plans as JSON documents. Keys may be added here, and are never renamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sweep.planning.forecast import Forecast
from sweep.planning.plan import CardPlan
from sweep.planning.survey import Survey
from sweep.planning.table import ShapeTable
from sweep.predict.cost import Bill, BreakEven, Comparison
from sweep.predict.memory import Fit

PARTS = ("weights", "adapters", "gradients", "optimizer", "activations", "loss")
"""What a peak is made of, in the order it is shown."""


def forecast_document(forecast: Forecast, *, bills: Sequence[Bill]) -> dict[str, Any]:
    """Return one configuration's answer; what is not known is null.

    ``fits`` is the best guess and ``fits_certainty`` says whether it is more than that.
    ``cost`` is the cheapest bill. ``invalid`` is the rule that forbids the configuration.
    """
    memory, speed, broken = forecast.memory, forecast.speed, forecast.broken
    return {
        "config": forecast.config.model_dump(mode="json"),
        "fits": forecast.fits,
        "fits_certainty": "uncertain" if forecast.fit is Fit.UNCERTAIN else "sure",
        "peak_allocated_bytes": None if memory is None else memory.peak_allocated_bytes,
        "peak_reserved_bytes": None if memory is None else memory.peak_reserved_bytes,
        "breakdown": None if memory is None else {part: memory.breakdown[part] for part in PARTS},
        "peak_moment": None if memory is None else memory.moment,
        "step_seconds": forecast.step_seconds,
        "tokens_per_second": forecast.tokens_per_second,
        "bottleneck": None if speed is None else speed.bottleneck,
        "flops_utilization": None if speed is None else speed.flops_utilization,
        "basis": _basis(forecast),
        "measured": _measured(forecast),
        "cost": bills[0].to_json() if bills else None,
        "invalid": None if broken is None else {"rule": broken.rule, "reason": broken.reason},
        "notes": list(forecast.notes),
    }


def _basis(forecast: Forecast) -> dict[str, Any]:
    """Return how sure the numbers are: memory's relative error, where speed comes from."""
    return {
        "memory": None if forecast.memory is None else "predicted",
        "memory_uncertainty": None if forecast.memory is None else forecast.memory.uncertainty,
        "speed": forecast.speed_basis,
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
    was, the fastest configuration is under ``recommended``.
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
        "table": None if plan.table is None else _table(plan.table),
        **({} if plan.survey is None else _survey(plan.survey)),
        "bills": [bill.to_json() for bill in plan.bills],
        "study": _evidence(plan),
        "notes": list(plan.notes),
    }


def _table(table: ShapeTable) -> dict[str, Any]:
    return {
        "micro_batch_sizes": list(table.batches),
        "seq_lens": list(table.lengths),
        "cells": [
            {
                "micro_batch_size": batch,
                "seq_len": length,
                "fits": cell.fits,
                "fits_certainty": "uncertain" if cell.fit is Fit.UNCERTAIN else "sure",
                "peak_allocated_bytes": None
                if cell.memory is None
                else cell.memory.peak_allocated_bytes,
                "tokens_per_second": cell.tokens_per_second,
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
        },
        "least_bytes": survey.least_bytes,
        "fastest_by_class": [
            {
                "lora_rank": rank,
                "target_modules": list(targets) if isinstance(targets, tuple) else targets,
                "seq_len": length,
                "config": forecast.config.model_dump(mode="json"),
                "fits_certainty": "uncertain" if forecast.fit is Fit.UNCERTAIN else "sure",
                "tokens_per_second": forecast.tokens_per_second,
            }
            for (rank, targets, length), forecast in survey.fastest_by_class.items()
        ],
        "trials": survey.trials,
        "study_seconds": None if seconds is None else list(seconds),
    }


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


def comparison_document(plans: Sequence[CardPlan], comparison: Comparison | None) -> dict[str, Any]:
    """Return the plans of several cards, and the same work's bills on each."""
    return {
        "plans": [card_document(plan) for plan in plans],
        "comparison": None if comparison is None else _comparison(comparison),
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "cheapest": comparison.cheapest.to_json(),
        "soonest": comparison.soonest.to_json(),
        "bills": [bill.to_json() for bill in comparison.bills],
        "break_evens": [_break_even(point) for point in comparison.break_evens],
    }


def _break_even(point: BreakEven) -> dict[str, Any]:
    return {
        "samples": point.samples,
        "steps": point.steps,
        "cheaper_below": point.cheaper_below.label,
        "cheaper_above": point.cheaper_above.label,
    }
