"""Small values that storage tests are built from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudyDefinition, StudySnapshot, Target
from qlora_sweep.storage.reading import read_study
from qlora_sweep.storage.records import (
    SEARCH,
    Attempt,
    EpochRecord,
    Measured,
    Measurement,
    Outcome,
    PrunedSlow,
    QualityReport,
    RunKind,
    SoakReport,
    TrialRecord,
)
from qlora_sweep.storage.study import OpenStudy, open_study

BATCHES = (1, 2, 4, 8)
BUDGET = 20 * GIB
DISTRIBUTIONS: dict[str, BaseDistribution] = {"micro_batch_size": CategoricalDistribution(BATCHES)}
STARTED_AT = "2025-01-01T00:00:00+00:00"
SOAKED = SoakReport(
    steps=50,
    seconds=15.0,
    evaluation_loss=2.0,
    evaluation_seconds=0.5,
    checkpoint_bytes=1000,
    checkpoint_seconds=0.1,
)
ENVIRONMENT = {"gpu": "NVIDIA A10", "driver": "1.0", "versions": {"torch": "2.13"}}


def a_space(**changes: Any) -> SearchSpace:
    values = {"name": "small", "dimensions": {"micro_batch_size": list(BATCHES)}}
    return SearchSpace.model_validate(values | changes)


def a_definition(*, fingerprint: str = "f00d", gpu: str = "a10", **changes: Any) -> StudyDefinition:
    return StudyDefinition(
        space=a_space(**changes),
        model={"name": "mistral-7b-v0.3", "source": "shipped", "config": {}, "path": None},
        model_fingerprint=fingerprint,
        target=Target(gpu=gpu, device="cuda", budget_bytes=BUDGET),
    )


def a_measurement(
    speed: float = 1000.0, *, peak: int = 10 * GIB, spread: float = 0.0, **changes: Any
) -> Measurement:
    step = 4096 / speed
    values: dict[str, Any] = {
        "tokens_per_second": speed,
        "samples_per_second": speed / 512,
        "step_seconds": step,
        "step_seconds_ci95": (step * (1 - spread), step * (1 + spread)),
        "steps_measured": 6,
        "steps_warmup": 2,
        "peak_allocated_bytes": peak,
        "trainable_parameters": 1000,
        "final_loss": 2.0,
        "setup_seconds": 1.0,
        "measured_seconds": 3.0,
    }
    return Measurement.model_validate(values | changes)


def a_quality(eval_loss: float = 2.0, **changes: Any) -> QualityReport:
    values = {
        "eval_loss": eval_loss,
        "eval_tokens": 1000,
        "eval_seq_len": 512,
        "train_tokens": 5000,
        "train_loss": eval_loss - 0.1,
        "steps": 5,
        "seconds": 60.0,
        "seed": 0,
    }
    return QualityReport.model_validate(values | changes)


def an_epoch(**changes: Any) -> EpochRecord:
    values = {
        "rows": 9_400,
        "rows_cut": 900,
        "rows_left_out": 100,
        "tokens": 3_000_000,
        "tokens_cut": 0.032,
        "tokens_left_out": 0.011,
        "padded_tokens": 4_000_000,
        "loss_tokens": 2_880_000,
        "steps": 1200,
    }
    return EpochRecord.model_validate(values | changes)


def fits(speed: float = 1000.0, **changes: Any) -> Measured:
    return Measured(measurement=a_measurement(speed, **changes))


def a_record(
    number: int = 0, outcome: Outcome | None = None, *, batch: int = 4, **changes: Any
) -> TrialRecord:
    config = TrialConfig(micro_batch_size=batch)
    known = outcome or fits()
    record = TrialRecord.model_validate({"number": number, "config": config, "outcome": known})
    record = TrialRecord.model_validate(record.model_dump() | changes)
    return changed(record, outcome=agreeing(record.outcome, record.config))


def agreeing(outcome: Outcome, config: TrialConfig) -> Outcome:
    """Return an outcome whose steps take as long as its speed says of a configuration."""
    if not isinstance(outcome, Measured | PrunedSlow):
        return outcome
    measured = outcome.measurement
    tokens = measured.loss_tokens_per_step or config.tokens_per_step
    times = tokens / measured.tokens_per_second / measured.step_seconds
    changes: dict[str, Any] = {"step_seconds": measured.step_seconds * times}
    if measured.step_seconds_ci95 is not None:
        low, high = measured.step_seconds_ci95
        changes["step_seconds_ci95"] = low * times, high * times
    return changed(outcome, measurement=measured.model_copy(update=changes))


def confirmed(*records: TrialRecord, soak: bool = True) -> tuple[TrialRecord, ...]:
    """Return two runs in turns of each fitting trial, just as fast as before, and its soak."""
    runs = [
        changed(record, purpose=purpose, series=1, confirms=record.number, is_baseline=False)
        for purpose in ("confirm", "confirm", *(("soak",) if soak else ()))
        for record in records
        if record.verdict == "fits"
    ]
    return tuple(changed(run, number=1000 + number) for number, run in enumerate(runs))


def open_it(url: str, home: Path, *, name: str = "study", **changes: Any) -> OpenStudy:
    values: dict[str, Any] = {
        "definition": a_definition(),
        "sampler": optuna.samplers.RandomSampler(seed=0),
        "environment": ENVIRONMENT,
    }
    return open_study(name, url=url, home=home, **(values | changes))


def run_one(
    study: OpenStudy, outcome: Outcome | None = None, *, batch: int | None = None, **changes: Any
) -> TrialRecord:
    """Ask, begin and tell one trial."""
    trial = study.ask(DISTRIBUTIONS, params=None if batch is None else {"micro_batch_size": batch})
    record = a_record(trial.number, outcome, batch=trial.params["micro_batch_size"], **changes)
    return study.tell(trial, begun(study, trial, record))


def changed(record: Any, /, **values: Any) -> Any:
    """Return a copy of a record of which some values differ, without validation."""
    return replaced(record, **values)


def read_it(url: str, home: Path) -> StudySnapshot:
    """Read the study that `open_it` opens."""
    return read_study("study", url=url, home=home)


def an_attempt(study: OpenStudy, record: TrialRecord) -> Attempt:
    """Return what a result of a study is a result of."""
    return Attempt(
        id=record.attempt_id,
        study=study.known.identity,
        number=record.number,
        started_at=record.started_at,
    )


def begun(
    study: OpenStudy, trial: optuna.Trial, record: TrialRecord, *, run_kind: RunKind = SEARCH
) -> TrialRecord:
    """Begin a trial and return its result-to-be, with the identity that it was begun under."""
    attempt = study.begin(trial, record.config, STARTED_AT, run_kind=run_kind).id
    return changed(record, attempt_id=attempt, started_at=STARTED_AT)


def let_go_of_the_lease(study: OpenStudy) -> None:
    """Free a study as the system does for a driver that was killed, or cut off from its server."""
    study._closing.pop_all().close()
    # What it tries afterwards may open connections anew.
    study._closing.callback(study._storage.engine.dispose)
