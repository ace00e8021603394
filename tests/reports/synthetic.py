"""Builds studies that never ran: records by hand, and a whole plausible study from a seed.

The plausible study follows the linear memory and saturating speed of a 7B model on one large GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.dimensions import Choices
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudyDefinition, StudySnapshot, Target
from qlora_sweep.storage.records import (
    Crashed,
    Diverged,
    DominatedOutOfMemory,
    Ineffective,
    Invalid,
    Lost,
    Measured,
    Measurement,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    PrunedSlow,
    SoakReport,
    TimedOut,
    TrialRecord,
)
from tests.storage.builders import a_measurement, a_quality, an_epoch, changed
from tests.sweep.prepared_dataset import a_summary

SURFACES = Path(__file__).parents[1] / "data" / "surfaces"
BUDGET_BYTES = int(21.5 * GIB)
BASELINE = TrialConfig(micro_batch_size=8)
START = datetime(2025, 3, 1, 9, 30, tzinfo=UTC)
HOSTILE = "</script><img src=x onerror=alert(1)>{{ 7*7 }}'\"&%{x}\u2028"
DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "micro_batch_size": (1, 2, 4, 6, 8, 10, 12, 16, 24, 32),
    "seq_len": (512, 1024, 2048),
    "checkpoint_fraction": (0.0, 0.5, 1.0),
    "kernels": ("hf", "liger"),
    "upcast_fp32": (False, True),
}


def definition(*, space: Mapping[str, Any] | None = None, **target: Any) -> StudyDefinition:
    """Return a study's definition: Mistral 7B on an A10 that an H200 stands in for.

    Args:
        space: keys of the search space that differ.
        target: keys of the target that differ.
    """
    values: dict[str, Any] = {"gpu": "a10", "device": "cuda", "budget_bytes": BUDGET_BYTES}
    values |= {"emulated_on": "NVIDIA H200"} | target
    return StudyDefinition(
        space=SearchSpace.model_validate(
            {
                "name": "a10",
                "gpu": "a10",
                "dimensions": DIMENSIONS,
                "fixed": {"lora_rank": 16, "target_modules": "attention"},
                "baseline": {"micro_batch_size": 8},
            }
            | dict(space or {})
        ),
        model={"name": "mistral-7b-v0.3", "source": "shipped", "config": {}, "path": None},
        model_fingerprint="0123456789abcdef",
        target=Target(**values),
    )


def snapshot(records: Iterable[TrialRecord] = (), **values: Any) -> StudySnapshot:
    """Return a study that holds ``records``."""
    defaults: dict[str, Any] = {
        "name": "a10-mistral",
        "definition": definition(),
        "environment": {
            "device": "cuda",
            "gpu": "NVIDIA H200",
            "driver": "570.86.15",
            "python": "3.11.9",
            "cores": 16,
            "versions": {"torch": "2.13.0", "transformers": "5.17.0", "bitsandbytes": "0.50.2"},
            "commit": "4f2c1d9",
        },
        "wall_seconds": 290.0,
    }
    return StudySnapshot(records=tuple(records), **(defaults | values))


def measurement(tokens_per_second: float = 10_000.0, **values: Any) -> Measurement:
    """Return a measurement of 8 x 512 at the given speed."""
    defaults: dict[str, Any] = {
        "steps_measured": 12,
        "steps_warmup": 3,
        "peak_reserved_bytes": 12 * GIB,
        "peak_device_bytes": 13 * GIB,
        "trainable_parameters": 13_631_488,
        "flops_utilization": 0.41,
        "final_loss": 10.4,
        "setup_seconds": 0.8,
        "measured_seconds": 12 * 4096 / tokens_per_second,
    }
    return a_measurement(tokens_per_second, **({"spread": 0.01} | defaults | values))


def record(
    number: int, outcome: Outcome, config: TrialConfig = BASELINE, **values: Any
) -> TrialRecord:
    """Return a trial that started ten seconds after the one before it and took eight."""
    defaults: dict[str, Any] = {
        "started_at": (START + timedelta(seconds=10 * number)).isoformat(),
        "wall_seconds": 8.0,
        "device_seconds": 7.5,
    }
    return TrialRecord(number=number, config=config, outcome=outcome, **(defaults | values))


def fits(
    number: int, tokens_per_second: float, config: TrialConfig = BASELINE, **measured: Any
) -> TrialRecord:
    """Return a trial that fitted and was measured."""
    outcome = Measured(measurement=measurement(tokens_per_second, **measured))
    return record(number, outcome, config, is_baseline=number == 0)


def predicted(gib: float, tokens_per_second: float | None = None) -> PredictionRecord:
    """Return a prediction of a need, and of a speed where one is given."""
    need = int(gib * GIB)
    return PredictionRecord(
        peak_allocated_bytes=need, peak_reserved_bytes=need, tokens_per_second=tokens_per_second
    )


def one_of_each() -> tuple[TrialRecord, ...]:
    """Return a study's worth of trials that ended in every way there is."""
    outcomes: tuple[Outcome, ...] = (
        Measured(measurement=measurement(8_000.0)),
        PrunedSlow(measurement=measurement(3_000.0)),
        OutOfMemory(stage="backward", requested_bytes=GIB, peak_allocated_bytes=21 * GIB),
        PredictedOutOfMemory(predicted_bytes=25 * GIB),
        DominatedOutOfMemory(by=2),
        Diverged(step=4),
        Invalid(rule="bf16 needs Ampere", detail="the GPU is a T4"),
        Ineffective(setting="compile", detail="no graph was compiled"),
        TimedOut(phase="measure"),
        Crashed(phase="build", detail="exit status 1"),
        Lost(),
    )
    configs = [changed(BASELINE, micro_batch_size=8 + n) for n in range(len(outcomes))]
    return tuple(
        record(n, outcome, config, is_baseline=n == 0)
        for n, (outcome, config) in enumerate(zip(outcomes, configs, strict=True))
    )


def hostile_study() -> StudySnapshot:
    """Return a study in which every text that people choose tries to break out of the page."""
    modules = TrialConfig(micro_batch_size=8, target_modules=(HOSTILE, "q_proj"))
    about = definition(gpu=HOSTILE, emulated_on=HOSTILE)
    # The name is set past its validation, which a damaged database does not respect either.
    dimensions = about.space.dimensions | {
        "target_modules": Choices(choices=("attention", (HOSTILE, "q_proj")))
    }
    space = changed(about.space, name=HOSTILE, dimensions=dimensions, fixed={"lora_rank": 16})
    model = {**about.model, "name": HOSTILE}
    return snapshot(
        [
            fits(0, 8_000.0),
            fits(1, 9_000.0, modules, flags=(HOSTILE,)),
            record(2, Crashed(phase="build", detail=HOSTILE)),
            record(3, Invalid(rule=HOSTILE, detail=HOSTILE), modules),
        ],
        name=HOSTILE,
        definition=changed(about, space=space, model=model),
        environment={"gpu": HOSTILE, HOSTILE: {HOSTILE: [HOSTILE]}},
        warnings=(HOSTILE,),
    )


def plausible_study(seed: int = 0, *, trials: int = 40) -> StudySnapshot:
    """Return a whole study of a 7B model under 21.5 GiB, baseline first; equal for equal seeds."""
    rng = random.Random(seed)
    records: list[TrialRecord] = []
    clock = START
    for number in range(trials):
        config = BASELINE if number == 0 else _untried(rng, records)
        outcome = _outcome(rng, config, records)
        launched = not isinstance(outcome, PredictedOutOfMemory | DominatedOutOfMemory | Invalid)
        wall = rng.uniform(4.0, 9.0) if launched else 0.02
        records.append(
            TrialRecord(
                number=number,
                config=config,
                outcome=outcome,
                is_baseline=number == 0,
                started_at=clock.isoformat(),
                wall_seconds=wall,
                device_seconds=0.95 * wall if launched else 0.0,
                prediction=PredictionRecord(
                    peak_allocated_bytes=int(_need_bytes(config) * rng.uniform(0.995, 1.02)),
                    peak_reserved_bytes=int(_need_bytes(config) * 1.08),
                    tokens_per_second=_speed(config) * rng.uniform(0.9, 1.1),
                ),
            )
        )
        clock += timedelta(seconds=wall + 0.05)
    return snapshot(records, wall_seconds=(clock - START).total_seconds())


def _untried(rng: random.Random, records: list[TrialRecord]) -> TrialConfig:
    """Return a candidate that no trial has had yet, or after twenty draws any."""
    tried = {r.config for r in records}
    drawn = (_candidate(rng, records) for _ in range(20))
    return next((config for config in drawn if config not in tried), _candidate(rng, records))


def _candidate(rng: random.Random, records: list[TrialRecord]) -> TrialConfig:
    """Draw at random at first, then more and more around the best so far, as a sampler would."""
    drawn = {name: rng.choice(values) for name, values in DIMENSIONS.items()}
    fitting = [r for r in records if isinstance(r.outcome, Measured) and r.measurement]
    if len(records) < 10 or not fitting:
        return TrialConfig(**drawn)
    best = max(fitting, key=lambda r: r.measurement.tokens_per_second if r.measurement else 0.0)
    kept = {name: getattr(best.config, name) for name in DIMENSIONS}
    return TrialConfig(**(kept | {name: drawn[name] for name in rng.sample(list(DIMENSIONS), 2)}))


def _structure(config: TrialConfig) -> tuple[float, float, float]:
    """Return resident GiB, KiB per token, and tokens/s that large micro-batches approach."""
    none, full = (3268, 420) if config.kernels == "liger" else (8217, 897)
    fast, slow = (18_400, 14_200) if config.kernels == "liger" else (11_200, 9_100)
    share = config.checkpoint_fraction
    lift = 1.0 if config.upcast_fp32 else 0.92
    resident = 4.8 if config.upcast_fp32 else 4.0
    return (
        resident,
        (none + share * (full - none)) * lift,
        (fast + share * (slow - fast)) / lift**0.3,
    )


def _need_bytes(config: TrialConfig) -> int:
    resident, kib_per_token, _ = _structure(config)
    return int(resident * GIB + kib_per_token * 1024 * config.tokens_per_micro_batch)


def _speed(config: TrialConfig) -> float:
    tokens = config.tokens_per_micro_batch
    return _structure(config)[2] * tokens / (tokens + 350)


def _outcome(rng: random.Random, config: TrialConfig, records: list[TrialRecord]) -> Outcome:
    need = _need_bytes(config)
    for earlier in records:
        if isinstance(earlier.outcome, OutOfMemory) and _dominates(config, earlier.config):
            return DominatedOutOfMemory(by=earlier.number)
    if need > 1.2 * BUDGET_BYTES:
        return PredictedOutOfMemory(predicted_bytes=need)
    if need > 0.985 * BUDGET_BYTES:
        peak = min(need, BUDGET_BYTES) - rng.randrange(GIB)
        return OutOfMemory(
            stage=rng.choice(("forward", "backward")),
            requested_bytes=rng.randrange(GIB // 4, 2 * GIB),
            peak_allocated_bytes=peak,
        )
    return _ran(rng, config, records)


def _ran(rng: random.Random, config: TrialConfig, records: list[TrialRecord]) -> Outcome:
    luck = rng.random()
    if records and luck < 0.06:
        return Crashed(phase="measure", detail="the worker ended with exit status 1")
    if records and luck < 0.09:
        return TimedOut(phase="warmup", detail="no step for 60 s")
    need, step = (
        _need_bytes(config),
        config.tokens_per_step / _speed(config) * rng.uniform(0.98, 1.02),
    )
    wide = rng.uniform(0.002, 0.012)
    rate = config.tokens_per_step / step
    measured = measurement(
        rate,
        step_seconds=step,
        samples_per_second=config.samples_per_step / step,
        step_seconds_ci95=(step * (1 - wide), step * (1 + wide)),
        peak_allocated_bytes=need,
        peak_reserved_bytes=min(BUDGET_BYTES, int(need * rng.uniform(1.03, 1.25))),
        flops_utilization=rate / 27_000,
        flags=("emulated", "noisy") if wide > 0.011 else ("emulated",),
    )
    best = max((r.measurement.tokens_per_second for r in records if r.measurement), default=0.0)
    return (
        PrunedSlow(measurement=measured) if rate < 0.45 * best else Measured(measurement=measured)
    )


def _dominates(config: TrialConfig, other: TrialConfig) -> bool:
    larger = config.micro_batch_size >= other.micro_batch_size and config.seq_len >= other.seq_len
    return larger and set(config.changes_from(other)) <= {"micro_batch_size", "seq_len"}


SOAKED = SoakReport(
    steps=53,
    seconds=15.2,
    evaluation_loss=10.4,
    evaluation_seconds=0.4,
    checkpoint_bytes=80_000_000,
    checkpoint_seconds=0.3,
)


SHORT = TrialConfig(micro_batch_size=8, seq_len=512)


LONG = TrialConfig(micro_batch_size=8, seq_len=2048)


TARGET = {"emulated_on": None}


def of_dataset(*records: TrialRecord, **space: Any) -> StudySnapshot:
    values = {
        "data": "mine.jsonl",
        "dimensions": {
            "lora_rank": [8, 16, 64],
            "seq_len": [512, 2048],
        },
        "fixed": {"micro_batch_size": 8},
    }
    about = definition(space=values | space, **TARGET)
    known = changed(about, texts=a_summary(source="mine.jsonl"))
    return snapshot(records, definition=known)


def trained(number: int, speed: float, config: TrialConfig, **epoch: Any) -> TrialRecord:
    return changed(fits(number, speed, config), epoch=an_epoch(**epoch))


def learned(
    number: int,
    rank: int,
    loss: float,
    half: float | None = None,
    speed: float = 9_000.0,
    rows: int = 0,
) -> TrialRecord:
    measured: dict[str, Any] = {"eval_tokens": 4_000, "eval_rows": rows}
    if half is not None:
        measured |= {"seeds": (0, 1, 2), "eval_loss_ci95": (loss - half, loss + half)}
    quality = a_quality(loss, train_tokens=600_000, steps=100, **measured)
    config = changed(SHORT, lora_rank=rank)
    record = fits(number, speed, config, quality=quality)
    return changed(record, epoch=an_epoch(), is_baseline=number == 0)


def about_loss(*records: TrialRecord) -> StudySnapshot:
    return of_dataset(*records, objectives=["tokens_per_second", "eval_loss"], weights="pretrained")
