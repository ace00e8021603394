"""A sound trial in which one value after another is none that a trial comes to."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import (
    Faithfulness,
    Measured,
    PredictionRecord,
    TrialRecord,
)
from tests.storage.builders import SOAKED, STARTED_AT, a_measurement, a_quality, an_epoch

SPEED = 1000.0
"""Of the sound trial, tokens per second."""
ABSENT = object()
VALUES: dict[str, Any] = {
    "nan": math.nan,
    "inf": math.inf,
    "negative": -1,
    "zero": 0,
    "1e17": 1e17,
    "2**70": 2**70,
    "text": "many",
    "absent": ABSENT,
}
Path = tuple[str, ...]


def sound(number: int, batch: int) -> TrialRecord:
    """Return a trial with every part that a record may have."""
    config = TrialConfig(micro_batch_size=batch)
    step = config.tokens_per_step / SPEED
    errors = dict.fromkeys(Faithfulness.model_fields, 0.01)
    measured = a_measurement(
        SPEED,
        step_seconds=step,
        step_seconds_ci95=(step, step),
        peak_reserved_bytes=2**34,
        peak_device_bytes=2**34,
        flops_utilization=0.4,
        joules_per_token=0.1,
        training_seconds=2.0,
        soak=SOAKED,
        quality=a_quality(eval_rows=10, eval_loss_ci95=(1.9, 2.1)),
        faithfulness=Faithfulness(**errors),
    )
    return TrialRecord(
        number=number,
        config=config,
        outcome=Measured(measurement=measured),
        prediction=PredictionRecord(peak_allocated_bytes=2**33, peak_reserved_bytes=2**33),
        attempt_id=f"attempt-{number}",
        started_at=STARTED_AT,
        wall_seconds=5.0,
        device_seconds=4.0,
        epoch=an_epoch(),
    )


def _paths(values: Any, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    if isinstance(values, dict):
        for key, inner in values.items():
            if key != "config":
                yield from _paths(inner, (*path, key))


def mutants(record: TrialRecord) -> dict[str, dict[str, Any]]:
    """Return the record's JSON with one field, each in turn, of each wrong value; by its name."""
    values = record.model_dump(mode="json")
    found: dict[str, dict[str, Any]] = {}
    for path in _paths(values):
        for name, wrong in VALUES.items():
            mutant = copy.deepcopy(values)
            parent = mutant
            for key in path[:-1]:
                parent = parent[key]
            if wrong is ABSENT:
                del parent[path[-1]]
            else:
                parent[path[-1]] = wrong
            found[f"{'.'.join(path)} {name}"] = mutant
    for path in (("nobody_knows",), ("outcome", "measurement", "nobody_knows")):
        mutant = copy.deepcopy(values)
        parent = mutant
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = 1
        found[f"{'.'.join(path)} unknown"] = mutant
    # Two that agree with each other, and with nothing else.
    mutant = copy.deepcopy(values)
    measured = mutant["outcome"]["measurement"]
    measured["tokens_per_second"] *= 1e14
    measured["step_seconds"] /= 1e14
    measured["step_seconds_ci95"] = None
    found["outcome.measurement consistent and impossible"] = mutant
    return found
