"""How long a driver takes of a study of many trials: to open it, and for each further one.

    python -m tests.bench.long_study [--trials 100,1000,10000] [--samplers random,grid] [--more 20]

The GPU is a formula that answers at once, so that all the time there is is the driver's own. What
was tried is stored in bulk, as the driver would have stored it trial by trial. Needs no device.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import sqlalchemy
from optuna.distributions import distribution_to_json
from optuna.trial import TrialState

from search_spaces.config import TrialConfig
from search_spaces.gpus import find_gpu
from search_spaces.loading import load_space
from search_spaces.models import load_model_spec
from search_spaces.rules import violation
from search_spaces.space import SamplerName, SearchSpace
from storage import codec
from storage.database import close, open_for_writing
from storage.definition import StudyDefinition, Target
from storage.records import Outcome, PredictionRecord, PrunedSlow, TrialRecord
from storage.study import OpenStudy, open_study
from storage.urls import parse_url
from sweep.predict.forecast import Forecaster, SpeedForecast
from sweep.running.replay import ReplayRunner
from sweep.sampling.encoding import Encoding
from sweep.sampling.samplers import make_sampler, quiet_optuna
from sweep.study.driver import Driver
from sweep.study.events import Event, TrialFinished
from sweep.study.tuner import tune
from tests.bench.stamp import stamp
from tests.sweep.simulated_device import BUDGET, Exact, StopsWhen, peak_bytes, train

NAME = "long"
ENVIRONMENT = {
    "gpu": "NVIDIA A10",
    "driver": "580.159.04",
    "python": "3.12.3",
    "versions": dict.fromkeys(("torch", "transformers", "peft", "bitsandbytes"), "1.2.3"),
}
_KINDS = dict.fromkeys(("datetime_start", "datetime_complete"), sqlalchemy.DateTime())
_TRIALS = sqlalchemy.table("trials")
_PARTS = 12
"""Functions of a profile that are named."""


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
    rules = partial(violation, model=model, compute_capability=capability, device="cuda")
    return Forecaster(
        model=model,
        budget_bytes=BUDGET,
        violation=rules,
        predictor=Exact(),
        speed=SpeedForecast(model=model, gpu=gpu),
    )


def records(space: SearchSpace, count: int, *, seed: int = 0) -> Iterator[TrialRecord]:
    """Yield so many trials of different configurations, as a random search leaves them."""
    encoding, forecaster = Encoding(space), a_forecaster(space)
    size = encoding.size
    assert size is not None, "a preset has no continuous dimension"
    order = random.Random(seed).sample(range(size), size)
    number, start = 0, datetime(2026, 11, 21, tzinfo=UTC)
    for index in order:
        if number == count:
            return
        config = encoding.config(encoding.combination(index))
        if not forecaster.is_valid(config):
            continue
        yield TrialRecord(
            number=number,
            config=config,
            outcome=_outcome(config, number),
            started_at=(start + timedelta(seconds=9 * number)).isoformat(timespec="milliseconds"),
            wall_seconds=8.731 + number % 7 / 10,
            device_seconds=8.402 + number % 7 / 10,
            prediction=PredictionRecord(
                peak_allocated_bytes=peak_bytes(config),
                peak_reserved_bytes=int(1.1 * peak_bytes(config)),
                tokens_per_second=4321.123456789,
            ),
        )
        number += 1


def _outcome(config: TrialConfig, number: int) -> Outcome:
    outcome = train(config)
    measured = getattr(outcome, "measurement", None)
    return PrunedSlow(measurement=measured) if measured and number % 3 == 2 else outcome


def store(
    url: str, home: Path, space: SearchSpace, known: Sequence[TrialRecord], *, name: str = NAME
) -> None:
    """Make a study of these trials, all its rows inserted at once."""
    definition = a_definition(space)
    open_study(
        name,
        url=url,
        definition=definition,
        sampler=make_sampler("random", space, seed=0),
        environment=ENVIRONMENT,
        home=home,
    ).close()
    storage = open_for_writing(parse_url(url))
    trial_id = sqlalchemy.func.max(sqlalchemy.column("trial_id"))
    with storage.engine.connect() as connection:
        last = connection.execute(sqlalchemy.select(trial_id).select_from(_TRIALS)).scalar() or 0
    rows = _Rows(storage.get_study_id_from_name(name), definition, last)
    for record in known:
        rows.add(record)
    with storage.engine.begin() as connection:
        for table, values in rows.of.items():
            if values:
                columns = [sqlalchemy.column(key, _KINDS.get(key)) for key in values[0]]
                connection.execute(sqlalchemy.table(table, *columns).insert(), values)
        if connection.dialect.name == "postgresql" and known:
            # The rows brought their own numbers along, of which the sequence knows nothing.
            connection.exec_driver_sql(
                "SELECT setval(pg_get_serial_sequence('trials', 'trial_id'), max(trial_id)) "
                "FROM trials"
            )
    close(storage)


@dataclass
class _Rows:
    """The rows of Optuna's tables that trials come to."""

    study_id: int
    definition: StudyDefinition
    last: int
    """The highest number that the database has given a trial, of whatever study."""
    of: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {
            "trials": [],
            "trial_params": [],
            "trial_values": [],
            "trial_user_attributes": [],
            "trial_system_attributes": [],
            "trial_intermediate_values": [],
        }
    )

    def __post_init__(self) -> None:
        self._encoding = Encoding(self.definition.space)
        self._texts = {
            name: distribution_to_json(distribution)
            for name, distribution in self._encoding.distributions.items()
        }

    def add(self, record: TrialRecord) -> None:
        """Add one trial's."""
        result = codec.to_optuna(
            record, objectives=self.definition.space.objectives, budget_bytes=BUDGET
        )
        trial_id, started = self.last + record.number + 1, datetime(2026, 11, 21)
        self.of["trials"].append(
            {
                "trial_id": trial_id,
                "number": record.number,
                "study_id": self.study_id,
                "state": result.state.name,
                "datetime_start": started,
                "datetime_complete": started,
            }
        )
        self._add_params(trial_id, record)
        values = result.values or ()
        if result.state is TrialState.PRUNED and result.intermediate is not None:
            values = (result.intermediate[1],)
        for objective, value in enumerate(values):
            row = {"objective": objective, "value": value, "value_type": "FINITE"}
            self.of["trial_values"].append({"trial_id": trial_id, **row})
        for key, value in result.attributes.items():
            row = {"key": key, "value_json": json.dumps(value)}
            self.of["trial_user_attributes"].append({"trial_id": trial_id, **row})
        row = {"key": f"constraints:{codec.CONSTRAINT}", "value_json": str(result.violation)}
        self.of["trial_system_attributes"].append({"trial_id": trial_id, **row})
        if result.intermediate is not None:
            step, value = result.intermediate
            row = {"step": step, "intermediate_value": value, "intermediate_value_type": "FINITE"}
            self.of["trial_intermediate_values"].append({"trial_id": trial_id, **row})

    def _add_params(self, trial_id: int, record: TrialRecord) -> None:
        params = self._encoding.params_of(record.config) or {}
        for name, value in params.items():
            self.of["trial_params"].append(
                {
                    "trial_id": trial_id,
                    "param_name": name,
                    "param_value": self._encoding.distributions[name].to_internal_repr(value),
                    "distribution_json": self._texts[name],
                }
            )


@dataclass(frozen=True)
class Driven:
    """What some further trials of a study took; seconds are the processor's."""

    opening: float
    """From nothing to the study as it was left."""
    learning: float
    """From there to the first trial's end: what the loop and the sampler read and learn first."""
    each: tuple[float, ...]
    """From the end of one trial to the end of the next."""
    profile: pstats.Stats | None = None


def drive(
    url: str, home: Path, sampler: SamplerName, *, name: str = NAME, more: int, profiled: bool
) -> Driven:
    """Resume a study for some further trials, on a GPU that answers at once."""
    quiet_optuna()
    ends: list[float] = []
    opening = cProfile.Profile()
    if profiled:
        opening.enable()
    started = time.process_time()
    space = a_space(sampler)
    study = _opened(url, home, space, name)
    opened = time.process_time()
    if profiled:
        opening.disable()
        pstats.Stats(opening).sort_stats("cumulative").print_stats(40)
    forecaster = a_forecaster(space)
    profile = cProfile.Profile() if profiled else None

    def listen(event: Event) -> None:
        if isinstance(event, TrialFinished):
            ends.append(time.process_time())
            if len(ends) == 1 and profile is not None:
                profile.enable()

    with study:
        tune(
            Driver(
                study,
                runner=ReplayRunner(otherwise=train),
                forecaster=forecaster,
                on_event=listen,
                interruption=StopsWhen(lambda: len(ends) > more),
            )
        )
    if profile is not None:
        profile.disable()
    steps = tuple(after - before for before, after in pairwise(ends))
    stats = None if profile is None else pstats.Stats(profile)
    return Driven(opened - started, ends[0] - opened, steps, stats)


def _opened(url: str, home: Path, space: SearchSpace, name: str) -> OpenStudy:
    return open_study(
        name,
        url=url,
        definition=a_definition(space),
        sampler=make_sampler(space.sampler, space, seed=0, forecaster=a_forecaster(space)),
        environment=ENVIRONMENT,
        home=home,
    )


def main() -> None:
    """Print a line for each length and sampler, and where the time of a trial goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", default="100,1000,10000")
    parser.add_argument("--samplers", default="random,grid,tpe,guided")
    parser.add_argument("--more", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    print(json.dumps(stamp()))
    print(f"{'trials':>7} {'MiB':>6} {'sampler':>8} {'open s':>7} {'first s':>8}", end="")
    print(f" {'median s':>9} {'most s':>7} {'peak MiB':>9}")
    for count in map(int, asked.trials.split(",")):
        for sampler in asked.samplers.split(","):
            with tempfile.TemporaryDirectory() as directory:
                home = Path(directory)
                url = f"sqlite:///{home}/sweep.db"
                store(url, home, a_space(), list(records(a_space(), count)))
                size = (home / "sweep.db").stat().st_size / 1024**2
                driven = drive(url, home, sampler, more=asked.more, profiled=asked.profile)
            _show(count, size, sampler, driven)


def _show(count: int, size: float, sampler: str, driven: Driven) -> None:
    each = sorted(driven.each)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{count:>7} {size:>6.1f} {sampler:>8} {driven.opening:>7.3f} {driven.learning:>8.3f}",
        end="",
    )
    print(f" {each[len(each) // 2]:>9.4f} {each[-1]:>7.4f} {peak:>9.0f}", flush=True)
    if driven.profile is not None:
        driven.profile.stream = sys.stdout  # type: ignore[attr-defined]
        driven.profile.sort_stats("cumulative").print_stats(_PARTS * 7)


if __name__ == "__main__":
    main()
