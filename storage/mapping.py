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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

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
from storage.keys import ATTEMPT as ATTEMPT
from storage.keys import CONFIG as CONFIG
from storage.keys import PURPOSE as PURPOSE
from storage.keys import RECORD as RECORD
from storage.keys import STARTED_AT as STARTED_AT
from storage.keys import VERDICT as VERDICT
from storage.records import (
    RETRYABLE,
    Errand,
    Measurement,
    OutOfMemory,
    TrialRecord,
    Verdict,
    need_of,
)
from storage.sampler_view import OnDemand

Direction = Literal["maximize", "minimize"]

CONSTRAINT = "fit"
"""Feasible at 0 and below: the share by which the peak is above the budget."""
LEAST_VIOLATION = 0.01
"""Of a trial that ran out of memory by an unknown amount."""
FAULT_VIOLATION = 1.0
"""Of a trial that fails for a reason other than memory: as bad as needing twice the budget."""

WORST_LOSS = 12.0
"""Held-out loss of a trial that has none, in nats a token."""

_DIRECTIONS: dict[Objective, Direction] = {
    "tokens_per_second": "maximize",
    "peak_memory": "minimize",
    "trainable_parameters": "maximize",
    "eval_loss": "minimize",
}


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
    return [_DIRECTIONS[objective] for objective in objectives]


def to_optuna(
    record: TrialRecord, *, objectives: Sequence[Objective], budget_bytes: int
) -> OptunaResult:
    """Return what Optuna is told of ``record`` in a study of those objectives and that budget."""
    measured = record.measurement
    values = tuple(
        _worst(objective, record, budget_bytes) if measured is None else _value(objective, measured)
        for objective in objectives
    )
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


def _value(objective: Objective, measured: Measurement) -> float:
    match objective:
        case "tokens_per_second":
            return measured.tokens_per_second
        case "peak_memory":
            return measured.peak_allocated_bytes / GIB
        case "trainable_parameters":
            return float(measured.trainable_parameters)
        case "eval_loss":
            return WORST_LOSS if measured.quality is None else measured.quality.eval_loss
    assert_never(objective)


def _worst(objective: Objective, record: TrialRecord, budget_bytes: int) -> float:
    match objective:
        case "tokens_per_second" | "trainable_parameters":
            return 0.0
        case "peak_memory":
            need = need_of(record, budget_bytes=budget_bytes)
            return max(need.allocated_bytes if need else 0, budget_bytes) / GIB
        case "eval_loss":
            return WORST_LOSS
    assert_never(objective)


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


def known_record(trial: FrozenTrial) -> TrialRecord | None:
    """Return the record of a finished trial where the driver has read it already."""
    attributes: Mapping[str, Any] = trial.user_attrs
    return attributes.record if isinstance(attributes, OnDemand) else None


def record_of(trial: FrozenTrial) -> TrialRecord | None:
    """Return the record that a finished trial carries; None where it carries none."""
    known = known_record(trial)
    if known is not None:
        return known
    values = trial.user_attrs.get(RECORD)
    return (
        TrialRecord.from_json(values) if trial.state.is_finished() and values is not None else None
    )


def never_ran(trial: FrozenTrial) -> bool:
    """Whether a trial was closed before it ran, as somebody asked to stop: it says nothing."""
    if trial.state is not TrialState.FAIL or isinstance(trial.user_attrs, OnDemand):
        return False
    return RECORD not in trial.user_attrs


def errand_of(trial: FrozenTrial) -> Errand:
    """Return why a trial that began was run."""
    return Errand.model_validate(trial.user_attrs.get(PURPOSE) or {})


def config_of(trial: FrozenTrial) -> TrialConfig | None:
    """Return the configuration that a trial began with; None where it never began."""
    values = trial.user_attrs.get(CONFIG)
    return None if values is None else TrialConfig.model_validate(values)
