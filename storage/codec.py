"""What a record becomes in Optuna's database, and back: attributes, state, values, constraint.

Where nothing of a trial was measured its constraint says so. Its values are then the worst finite
ones, because the Gaussian-process sampler learns from completed trials alone:

    tokens_per_second     0
    peak_memory           what it needs, at least the budget (GiB)
    trainable_parameters  0
    eval_loss             `WORST_LOSS`: of a uniform guess among 100,000 tokens it is 11.5

A run that confirms a winner is told as failed and without parameters: samplers read neither, so
that measuring again never disturbs the search. Its record says what really became of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, assert_never

from optuna.trial import FrozenTrial, TrialState
from pydantic import BaseModel, Field, ValidationError

from qlora_sweep.search_spaces.documents import explain
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import Objective
from qlora_sweep.storage.database import DAMAGED
from qlora_sweep.storage.definition import Fingerprint, StudyDefinition, UnreadableStudy
from qlora_sweep.storage.ranking import LESS_IS_BETTER, objective_value
from qlora_sweep.storage.records import RETRYABLE, OutOfMemory, TrialRecord, Verdict, need_of
from qlora_sweep.storage.soundness import Soundness, sound_records

FORMAT_WRITTEN = 1
"""How this version stores a study. It goes up with whatever an earlier version would overlook or
undo: one that knows a lower number alone refuses the study."""
RECORD = "record"
VERDICT = "verdict"
"""Of a trial's user attributes. The record is there from its beginning, as that of a trial that
was lost, the verdict with its end; the others are for people who look into the database."""

CONSTRAINT = "fit"
"""Feasible at 0 and below: the share by which the peak is above the budget."""
LEAST_VIOLATION = 0.01
"""Of a trial that ran out of memory by an unknown amount."""
FAULT_VIOLATION = 1.0
"""Of a trial that fails for a reason other than memory: as bad as needing twice the budget."""
WORST_LOSS = 12.0
"""Held-out loss of a trial that has none, in nats a token."""


class DamagedTrialError(ValueError):
    """What is stored of a trial cannot be read, or is another trial's."""


class Run(BaseModel):
    """One run of a study's driver."""

    started_at: str
    environment: Fingerprint


class StudyAttributes(BaseModel):
    """A study's user attributes, each under its name."""

    definition: StudyDefinition
    identity: str
    """Of the study, which another one of the same name has not."""
    driver: str
    """What tells the process that drives it from those that drove it before."""
    mark: str = ""
    """Of the newest transaction: an older copy of the database has that of an earlier one."""
    format: Annotated[int, Field(ge=0, le=FORMAT_WRITTEN, strict=True)]
    runs: list[Run]
    wall_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The driver's time over all runs."""
    gpu_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The same times the GPUs that each run had: what is paid."""
    quality_tokens: int | None = None
    """On how many tokens a trial trains for its held-out loss; None before that is chosen."""
    ended: dict[str, Any] | None = None
    """Why the search ended last."""


@dataclass(frozen=True)
class StoredStudy:
    """What is stored of a study."""

    attributes: StudyAttributes
    records: tuple[TrialRecord, ...]
    """Of trials that ended, those that measured winners again included; by number."""
    running: tuple[TrialRecord, ...]
    """Of trials that were begun and have not ended, as lost."""
    left_out: Mapping[int, str] = field(default_factory=dict)
    """What is wrong with trials whose results are not sound, by number: they count as never run."""


def read_stored(
    name: str, attributes: Mapping[str, Any], trials: Sequence[FrozenTrial]
) -> StoredStudy | UnreadableStudy:
    """Return what is stored of a study, or why it cannot be read.

    A trial that cannot be read, or that holds what nothing measures, is left out. A study that a
    newer version wrote says so by its format.
    """
    written = attributes.get("format")
    if isinstance(written, int) and written > FORMAT_WRITTEN:
        words = f"a newer sweep wrote it (format {written}, this one knows {FORMAT_WRITTEN})"
        return UnreadableStudy(name, f"{words}: `pip install -U qlora-sweep`", len(trials))
    try:
        known = StudyAttributes.model_validate(attributes)
        ModelSpec.from_json(known.definition.model)
        known.definition.space.baseline_config()
        finished = list[TrialRecord]()
        running = list[TrialRecord]()
        left_out = dict[int, str]()
        for trial in trials:
            try:
                record = _record(trial)
            except DamagedTrialError as error:
                left_out[trial.number] = str(error)
                continue
            if record is None:
                continue
            if VERDICT not in trial.user_attrs:
                if trial.state is TrialState.RUNNING:
                    running.append(record)
            elif trial.state.is_finished():
                finished.append(record)
        records, unsound = sound_records(finished, Soundness.of(known.definition))
        left_out |= unsound
    except ValidationError as error:
        return UnreadableStudy(name, explain(error), len(trials))
    except (InputError, LookupError, TypeError, ValueError) as error:
        return UnreadableStudy(name, str(error), len(trials))
    return StoredStudy(known, tuple(records), tuple(running), left_out)


def record_of(trial: FrozenTrial) -> TrialRecord | None:
    """Return the record of a trial that was told; None of every other, and of one that cannot be
    read."""
    is_told = trial.state.is_finished() and VERDICT in trial.user_attrs
    if not is_told:
        return None
    return _readable(trial)


def begun_of(trial: FrozenTrial) -> TrialRecord | None:
    """Return the record, as lost, of a trial that was begun and not told; None of one that never
    ran, or that cannot be read."""
    if VERDICT in trial.user_attrs:
        return None
    return _readable(trial)


def _readable(trial: FrozenTrial) -> TrialRecord | None:
    with suppress(DamagedTrialError):
        return _record(trial)
    return None


def _record(trial: FrozenTrial) -> TrialRecord | None:
    """Return what is stored of a trial; None of one that never ran. Raises `DamagedTrialError`."""
    if DAMAGED in trial.user_attrs:
        raise DamagedTrialError(trial.user_attrs[DAMAGED])
    values = trial.user_attrs.get(RECORD)
    if values is None:
        return None
    try:
        record = TrialRecord.model_validate(values)
    except ValidationError as error:
        raise DamagedTrialError(explain(error)) from None
    if record.number != trial.number:
        raise DamagedTrialError(f"what is stored is of trial {record.number}")
    return record


@dataclass(frozen=True)
class OptunaResult:
    """What Optuna is told of one trial."""

    state: TrialState
    values: tuple[float, ...] | None
    violation: float
    attributes: dict[str, Any]
    intermediate: tuple[int, float] | None = None
    """Step and tokens per second of a trial that was pruned, for samplers that learn from those."""


def directions(objectives: Sequence[Objective]) -> list[Literal["maximize", "minimize"]]:
    """Return Optuna's direction of each objective."""
    return ["minimize" if o in LESS_IS_BETTER else "maximize" for o in objectives]


def to_optuna(
    record: TrialRecord, *, objectives: Sequence[Objective], budget_bytes: int
) -> OptunaResult:
    """Return what Optuna is told of ``record`` in a study of those objectives and that budget."""
    measured = record.measurement
    need = need_of(record, budget_bytes=budget_bytes)
    values = tuple(_value(objective, record, budget_bytes) for objective in objectives)
    attributes: dict[str, Any] = {
        RECORD: record.model_dump(mode="json"),
        VERDICT: str(record.verdict),
    }
    if record.carried is not None:
        attributes["carried_from"] = f"{record.carried.study} #{record.carried.number}"
    if measured is not None:
        attributes["tokens_per_second"] = round(measured.tokens_per_second, 1)
        attributes["peak_gib"] = round(measured.peak_allocated_bytes / GIB, 3)
        violation = min(measured.peak_allocated_bytes / budget_bytes - 1.0, 0.0)
    elif need is not None:
        attributes["need_gib"] = round(need.allocated_bytes / GIB, 3)
        violation = max(need.allocated_bytes / budget_bytes - 1.0, LEAST_VIOLATION)
    else:
        violation = FAULT_VIOLATION
    if isinstance(record.outcome, OutOfMemory):
        attributes["stage"] = record.outcome.stage
    state = TrialState.COMPLETE
    intermediate = None
    if record.verdict in RETRYABLE or record.purpose != "search":
        state = TrialState.FAIL
    elif record.verdict is Verdict.PRUNED_SLOW and len(objectives) == 1 and measured is not None:
        # Optuna prunes in single-objective studies only, and keeps the last reported value.
        state = TrialState.PRUNED
        intermediate = (measured.steps_measured, values[0])
    if state is not TrialState.COMPLETE:
        return OptunaResult(state, None, violation, attributes, intermediate)
    return OptunaResult(state, values, violation, attributes)


def _value(objective: Objective, record: TrialRecord, budget_bytes: int) -> float:
    """Return what Optuna is told of an objective: the worst where nothing was measured."""
    measured = record.measurement
    if measured is not None:
        value = objective_value(objective, measured)
        if objective == "peak_memory":
            value /= GIB
        if not math.isfinite(value):
            return WORST_LOSS
        return float(value)
    match objective:
        case "tokens_per_second" | "trainable_parameters":
            return 0.0
        case "peak_memory":
            need = need_of(record, budget_bytes=budget_bytes)
            if need is None:
                return budget_bytes / GIB
            return max(need.allocated_bytes, budget_bytes) / GIB
        case "eval_loss":
            return WORST_LOSS
        case _:
            assert_never(objective)
