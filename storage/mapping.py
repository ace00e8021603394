"""Owns what a record becomes in Optuna, and back: state, values, constraint, readable attributes.

Pure functions. The values of a trial that does not count are the worst finite ones, because the
Gaussian-process sampler learns from completed trials alone; the constraint says that nothing of it
was measured:

    tokens_per_second     0
    peak_memory           what it needs, at least the budget (GiB)
    cost                  what it is handed as the worst so far
    trainable_parameters  0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

from optuna.trial import FrozenTrial, TrialState

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from search_spaces.space import Objective
from storage.needs import need_of
from storage.records import (
    RETRYABLE,
    Measurement,
    OutOfMemory,
    TrialRecord,
    Verdict,
)

Direction = Literal["maximize", "minimize"]

CONSTRAINT = "fit"
"""Feasible at 0 and below: the share by which the peak is above the budget."""
CONFIG, STARTED_AT, RECORD, COST, VERDICT = "config", "started_at", "record", "cost", "verdict"
"""Keys of a trial's user attributes."""
LEAST_VIOLATION = 0.01
"""Of a trial that ran out of memory by an unknown amount."""
FAULT_VIOLATION = 1.0
"""Of a trial that fails for a reason other than memory: as bad as needing twice the budget."""

_DIRECTIONS: dict[Objective, Direction] = {
    "tokens_per_second": "maximize",
    "peak_memory": "minimize",
    "cost": "minimize",
    "trainable_parameters": "maximize",
}


@dataclass(frozen=True)
class Scale:
    """What a study measures against."""

    objectives: tuple[Objective, ...]
    budget_bytes: int
    worst_cost: float = 1.0
    """Cost of a trial that has none because it did not run: above every cost told so far."""


@dataclass(frozen=True)
class Told:
    """What Optuna is told of one trial."""

    state: TrialState
    values: tuple[float, ...] | None
    violation: float
    attributes: dict[str, Any] = field(default_factory=dict)
    intermediate: tuple[int, float] | None = None
    """Step and tokens per second of a trial that was pruned, for samplers that learn from those."""


def directions(objectives: Sequence[Objective]) -> list[Direction]:
    """Return Optuna's direction of each objective."""
    return [_DIRECTIONS[objective] for objective in objectives]


def to_optuna(record: TrialRecord, *, scale: Scale, cost: float | None = None) -> Told:
    """Return what Optuna is told of ``record``.

    Args:
        record: how the trial ended.
        scale: the study's objectives and budget.
        cost: value of the ``cost`` objective; None for a trial that did not run to one.
    """
    values = _values(record, scale, cost)
    violation = _violation(record, scale.budget_bytes)
    attributes = _attributes(record, scale.budget_bytes, cost)
    if record.verdict in RETRYABLE:
        return Told(TrialState.FAIL, None, violation, attributes)
    if record.verdict is Verdict.PRUNED_SLOW and len(scale.objectives) == 1 and record.measurement:
        # Optuna prunes in single-objective studies only, and keeps the last reported value.
        step = record.measurement.steps_measured
        return Told(TrialState.PRUNED, None, violation, attributes, intermediate=(step, values[0]))
    return Told(TrialState.COMPLETE, values, violation, attributes)


def _violation(record: TrialRecord, budget_bytes: int) -> float:
    if record.measurement is not None:
        return min(record.measurement.peak_allocated_bytes / budget_bytes - 1.0, 0.0)
    need = need_of(record, budget_bytes=budget_bytes)
    if need is None:
        return FAULT_VIOLATION
    return max(need.allocated_bytes / budget_bytes - 1.0, LEAST_VIOLATION)


def _values(record: TrialRecord, scale: Scale, cost: float | None) -> tuple[float, ...]:
    measured = record.measurement
    if measured is None:
        return tuple(_worst(objective, record, scale) for objective in scale.objectives)
    return tuple(_value(objective, measured, cost) for objective in scale.objectives)


def _value(objective: Objective, measured: Measurement, cost: float | None) -> float:
    match objective:
        case "tokens_per_second":
            return measured.tokens_per_second
        case "peak_memory":
            return measured.peak_allocated_bytes / GIB
        case "trainable_parameters":
            return float(measured.trainable_parameters)
        case "cost":
            if cost is None:
                raise ValueError(
                    "a measured trial of a study with the objective 'cost' needs its cost"
                )
            return cost
    assert_never(objective)


def _worst(objective: Objective, record: TrialRecord, scale: Scale) -> float:
    match objective:
        case "tokens_per_second" | "trainable_parameters":
            return 0.0
        case "peak_memory":
            need = need_of(record, budget_bytes=scale.budget_bytes)
            return max(need.allocated_bytes if need else 0, scale.budget_bytes) / GIB
        case "cost":
            return scale.worst_cost
    assert_never(objective)


def _attributes(record: TrialRecord, budget_bytes: int, cost: float | None) -> dict[str, Any]:
    """Return the record, and beside it what a person looks for in Optuna's dashboard."""
    shown: dict[str, Any] = {RECORD: record.to_json(), VERDICT: str(record.verdict)}
    need = need_of(record, budget_bytes=budget_bytes)
    if record.measurement is not None:
        shown["tokens_per_second"] = round(record.measurement.tokens_per_second, 1)
        shown["peak_gib"] = round(record.measurement.peak_allocated_bytes / GIB, 3)
    elif need is not None:
        shown["need_gib"] = round(need.allocated_bytes / GIB, 3)
    if isinstance(record.outcome, OutOfMemory):
        shown["stage"] = record.outcome.stage
    if cost is not None:
        shown[COST] = cost
    return shown


def record_of(trial: FrozenTrial) -> TrialRecord | None:
    """Return the record that a finished trial carries; None where it carries none."""
    values = trial.user_attrs.get(RECORD)
    return (
        TrialRecord.from_json(values) if trial.state.is_finished() and values is not None else None
    )


def config_of(trial: FrozenTrial) -> TrialConfig | None:
    """Return the configuration that a trial began with; None where it never began."""
    values = trial.user_attrs.get(CONFIG)
    return None if values is None else TrialConfig.model_validate(values)
