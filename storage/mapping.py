"""Owns what a record becomes in Optuna, and back: state, values, constraint, readable attributes.

Pure functions. Where nothing of a trial was measured its constraint says so. Its values are then
the worst finite ones, because the Gaussian-process sampler learns from completed trials alone:

    tokens_per_second     0
    peak_memory           what it needs, at least the budget (GiB)
    trainable_parameters  0
    eval_loss             `WORST_LOSS`: of a uniform guess among 100,000 tokens it is 11.5

A run that confirms a winner is told as failed and without parameters: samplers read neither, so
that measuring again never disturbs the search. Its record says what really became of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, Trial, TrialState

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from search_spaces.space import Objective
from storage.definition import RunningTrial
from storage.keys import ATTEMPT as ATTEMPT
from storage.keys import CONFIG as CONFIG
from storage.keys import NEVER_RAN as NEVER_RAN
from storage.keys import PURPOSE as PURPOSE
from storage.keys import RECORD as RECORD
from storage.keys import STARTED_AT as STARTED_AT
from storage.keys import VERDICT as VERDICT
from storage.ranking import LESS_IS_BETTER, objective_value
from storage.records import (
    RETRYABLE,
    Errand,
    OutOfMemory,
    TrialRecord,
    Verdict,
    need_of,
)

Direction = Literal["maximize", "minimize"]

CONSTRAINT = "fit"
"""Feasible at 0 and below: the share by which the peak is above the budget."""
LEAST_VIOLATION = 0.01
"""Of a trial that ran out of memory by an unknown amount."""
FAULT_VIOLATION = 1.0
"""Of a trial that fails for a reason other than memory: as bad as needing twice the budget."""

WORST_LOSS = 12.0
"""Held-out loss of a trial that has none, in nats a token."""


@dataclass(frozen=True)
class OptunaResult:
    """What Optuna is told of one trial."""

    state: TrialState
    values: tuple[float, ...] | None
    violation: float
    attributes: dict[str, Any] = field(default_factory=dict)
    intermediate: tuple[int, float] | None = None
    """Step and tokens per second of a trial that was pruned, for samplers that learn from those."""


def directions(objectives: Sequence[Objective]) -> list[Direction]:
    """Return Optuna's direction of each objective."""
    return ["minimize" if o in LESS_IS_BETTER else "maximize" for o in objectives]


def to_optuna(
    record: TrialRecord, *, objectives: Sequence[Objective], budget_bytes: int
) -> OptunaResult:
    """Return what Optuna is told of ``record`` in a study of those objectives and that budget."""
    measured = record.measurement
    values = tuple(_value(objective, record, budget_bytes) for objective in objectives)
    state, intermediate = TrialState.COMPLETE, None
    if record.verdict in RETRYABLE or record.purpose != "search":
        state = TrialState.FAIL
    elif record.verdict is Verdict.PRUNED_SLOW and len(objectives) == 1 and measured is not None:
        # Optuna prunes in single-objective studies only, and keeps the last reported value.
        state, intermediate = TrialState.PRUNED, (measured.steps_measured, values[0])
    return OptunaResult(
        state,
        values if state is TrialState.COMPLETE else None,
        _violation(record, budget_bytes),
        _attributes(record, budget_bytes),
        intermediate,
    )


def _violation(record: TrialRecord, budget_bytes: int) -> float:
    if record.measurement is not None:
        return min(record.measurement.peak_allocated_bytes / budget_bytes - 1.0, 0.0)
    need = need_of(record, budget_bytes=budget_bytes)
    if need is None:
        return FAULT_VIOLATION
    return max(need.allocated_bytes / budget_bytes - 1.0, LEAST_VIOLATION)


def _value(objective: Objective, record: TrialRecord, budget_bytes: int) -> float:
    """Return what Optuna is told of an objective: the worst where nothing was measured."""
    measured, need = record.measurement, need_of(record, budget_bytes=budget_bytes)
    if objective == "peak_memory":
        needed = max(need.allocated_bytes if need else 0, budget_bytes)
        return (needed if measured is None else measured.peak_allocated_bytes) / GIB
    if measured is None:
        return WORST_LOSS if objective == "eval_loss" else 0.0
    value = objective_value(objective, measured)
    return float(value) if math.isfinite(value) else WORST_LOSS


def _attributes(record: TrialRecord, budget_bytes: int) -> dict[str, Any]:
    """Return the record, and beside it what a person looks for in Optuna's dashboard."""
    shown: dict[str, Any] = {RECORD: record.to_json(), VERDICT: str(record.verdict)}
    if record.purpose != "search":
        shown["confirms"] = record.confirms
    if record.carried is not None:
        shown["carried_from"] = f"{record.carried.study} #{record.carried.number}"
    need = need_of(record, budget_bytes=budget_bytes)
    if record.measurement is not None:
        shown["tokens_per_second"] = round(record.measurement.tokens_per_second, 1)
        shown["peak_gib"] = round(record.measurement.peak_allocated_bytes / GIB, 3)
    elif need is not None:
        shown["need_gib"] = round(need.allocated_bytes / GIB, 3)
    if isinstance(record.outcome, OutOfMemory):
        shown["stage"] = record.outcome.stage
    return shown


def suggest(trial: Trial, name: str, distribution: BaseDistribution) -> None:
    """Give a trial a parameter: what its sampler chose, or what it was queued with."""
    match distribution:
        case CategoricalDistribution(choices=choices):
            trial.suggest_categorical(name, choices)
        case IntDistribution(low=low, high=high, step=step, log=log):
            trial.suggest_int(name, low, high, step=step, log=log)
        case FloatDistribution(low=low, high=high, step=step, log=log):
            trial.suggest_float(name, low, high, step=step, log=log)
        case _:
            raise ValueError(f"a space has no dimension like {distribution}")


def record_of(trial: FrozenTrial) -> TrialRecord | None:
    """Return the record that a finished trial carries; None where it carries none.

    Raises:
        ValidationError: it is another version's.
    """
    if not trial.state.is_finished() or RECORD not in trial.user_attrs:
        return None
    return TrialRecord.model_validate(trial.user_attrs[RECORD])


def never_ran(trial: FrozenTrial) -> bool:
    """Whether a trial was closed before it ran, as somebody asked to stop: it says nothing."""
    return NEVER_RAN in trial.user_attrs


def config_of(trial: FrozenTrial) -> TrialConfig | None:
    """Return the configuration that a trial began with; None where it never began."""
    values = trial.user_attrs.get(CONFIG)
    return None if values is None else TrialConfig.model_validate(values)


def how_begun(trial: FrozenTrial) -> RunningTrial:
    """Return how a trial was begun. Raises as `record_of`."""
    errand = Errand.model_validate(trial.user_attrs.get(PURPOSE) or {})
    return RunningTrial(
        trial.number,
        config_of(trial),
        trial.user_attrs.get(STARTED_AT),
        errand.purpose,
        errand.confirms,
        errand.series,
        trial.user_attrs.get(ATTEMPT),
    )
