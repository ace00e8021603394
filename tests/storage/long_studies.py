"""Studies of many trials, stored in bulk as a driver would have left them trial by trial."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy
from optuna.distributions import distribution_to_json

from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.loading import load_space
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.rules import violation
from qlora_sweep.search_spaces.space import SamplerName, SearchSpace
from qlora_sweep.storage import codec
from qlora_sweep.storage.database import close, open_for_writing
from qlora_sweep.storage.definition import StudyDefinition, Target
from qlora_sweep.storage.records import PredictionRecord, PrunedSlow, TrialRecord
from qlora_sweep.storage.study import OpenStudy, open_study
from qlora_sweep.storage.urls import parse_url
from qlora_sweep.sweep.predict.forecast import Forecaster, SpeedForecast
from qlora_sweep.sweep.sampling.encoding import Encoding
from qlora_sweep.sweep.sampling.samplers import make_sampler
from tests.sweep.simulated_device import BUDGET, Exact, peak_bytes, train

NAME = "long"
DRAWN_FOR_EACH = 20
"""Combinations, of which rules forbid most."""
_BEGAN = datetime(2026, 11, 21, tzinfo=UTC)
_KINDS = dict.fromkeys(("datetime_start", "datetime_complete"), sqlalchemy.DateTime())


def a_space(sampler: SamplerName = "random", **changes: Any) -> SearchSpace:
    """Return the preset of the A10, with room for many trials and nothing after them."""
    values = load_space("a10").model_dump() | {
        "sampler": sampler,
        "trials": 1_000_000,
        "stop_below_gain": 0.0,
        "confirm": None,
    }
    return SearchSpace.model_validate(values | changes)


def a_definition(space: SearchSpace) -> StudyDefinition:
    """Return the definition of a study of it."""
    model = load_model_spec(space.model)
    return StudyDefinition(
        space=space,
        model=model.to_json(),
        model_fingerprint=model.fingerprint,
        target=Target(gpu="a10", device="cuda", budget_bytes=BUDGET),
    )


def a_forecaster(space: SearchSpace) -> Forecaster:
    """Return what a study has on an A10, its memory predicted by the GPU's own formula."""
    model, gpu = load_model_spec(space.model), find_gpu("a10")
    capability = gpu.compute_capability
    return Forecaster(
        model=model,
        budget_bytes=BUDGET,
        violation=partial(violation, model=model, compute_capability=capability, device="cuda"),
        predictor=Exact(),
        speed=SpeedForecast(model=model, gpu=gpu),
    )


def records(space: SearchSpace, count: int, *, seed: int = 0) -> Iterator[TrialRecord]:
    """Yield so many trials of different configurations, as a random search leaves them."""
    encoding, forecaster = Encoding(space), a_forecaster(space)
    assert encoding.size is not None, "a preset has no continuous dimension"
    order = random.Random(seed).sample(range(encoding.size), DRAWN_FOR_EACH * count)
    configs = (encoding.config(encoding.combination(index)) for index in order)
    valid = (config for config in configs if forecaster.is_valid(config))
    for number, config in zip(range(count), valid, strict=False):
        outcome = train(config)
        measured = getattr(outcome, "measurement", None)
        started = _BEGAN + timedelta(seconds=9 * number)
        yield TrialRecord(
            number=number,
            config=config,
            outcome=PrunedSlow(measurement=measured) if measured and number % 3 == 2 else outcome,
            started_at=started.isoformat(timespec="milliseconds"),
            wall_seconds=8.731 + number % 7 / 10,
            device_seconds=8.402 + number % 7 / 10,
            prediction=PredictionRecord(
                peak_allocated_bytes=peak_bytes(config),
                peak_reserved_bytes=int(1.1 * peak_bytes(config)),
                tokens_per_second=4321.123456789,
            ),
        )


def opened(url: str, home: Path, space: SearchSpace, *, name: str = NAME) -> OpenStudy:
    """Open a study of a space, made where it is missing."""
    return open_study(
        name,
        url=url,
        definition=a_definition(space),
        sampler=make_sampler(space.sampler, space, seed=0, forecaster=a_forecaster(space)),
        environment={"gpu": "NVIDIA A10", "versions": {"torch": "1.2.3"}},
        home=home,
    )


def store(
    url: str, home: Path, space: SearchSpace, known: Sequence[TrialRecord], *, name: str = NAME
) -> None:
    """Make a study of these trials, without a driver and in one transaction."""
    opened(url, home, space, name=name).close()
    encoding, storage = Encoding(space), open_for_writing(parse_url(url))
    spelled = {name: distribution_to_json(d) for name, d in encoding.distributions.items()}
    study_id = storage.get_study_id_from_name(name)
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with storage.engine.begin() as connection:
        trials = sqlalchemy.table("trials", sqlalchemy.column("trial_id"))
        last = connection.execute(sqlalchemy.select(sqlalchemy.func.max(trials.c.trial_id)))
        begun = last.scalar() or 0
        for record in known:
            told = codec.to_optuna(record, objectives=space.objectives, budget_bytes=BUDGET)
            trial, began = {"trial_id": begun + record.number + 1}, _BEGAN.replace(tzinfo=None)
            state = {"state": told.state.name, "datetime_start": began, "datetime_complete": began}
            rows["trials"].append(trial | {"number": record.number, "study_id": study_id} | state)
            for key, value in (encoding.params_of(record.config) or {}).items():
                number = encoding.distributions[key].to_internal_repr(value)
                param = {"param_name": key, "param_value": number}
                rows["trial_params"].append(trial | param | {"distribution_json": spelled[key]})
            step, last_value = told.intermediate or (None, None)
            for at, value in enumerate(told.values or filter(None, [last_value])):
                held = {"objective": at, "value": value, "value_type": "FINITE"}
                rows["trial_values"].append(trial | held)
            for key, value in told.attributes.items():
                held = {"key": key, "value_json": json.dumps(value)}
                rows["trial_user_attributes"].append(trial | held)
            held = {"key": f"constraints:{codec.CONSTRAINT}", "value_json": str(told.violation)}
            rows["trial_system_attributes"].append(trial | held)
            if step is not None:
                held = {"step": step, "intermediate_value": last_value}
                kind = {"intermediate_value_type": "FINITE"}
                rows["trial_intermediate_values"].append(trial | held | kind)
        for table, values in rows.items():
            columns = [sqlalchemy.column(key, _KINDS.get(key)) for key in values[0]]
            connection.execute(sqlalchemy.table(table, *columns).insert(), values)
        if connection.dialect.name == "postgresql":
            # The rows brought their own numbers along, of which the sequence knows nothing.
            sequence = "pg_get_serial_sequence('trials', 'trial_id')"
            connection.exec_driver_sql(f"SELECT setval({sequence}, max(trial_id)) FROM trials")
    close(storage)
