"""Where another GPU stands in for the target, INT8 that is slow there still wins for the target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reports.view import view_of
from search_spaces.config import TrialConfig
from search_spaces.gpus import find_gpu
from storage.definition import StudyDefinition, Target
from storage.ranking import rank, rank_study
from storage.reading import read_study
from storage.records import Measured, Outcome, OutOfMemory, Verdict
from storage.study import open_study
from sweep.planning.evidence import with_target_speeds
from sweep.predict.forecast import Forecaster, SpeedForecast
from sweep.running.replay import ReplayRunner
from sweep.sampling.guided import GuidedSampler
from sweep.sampling.samplers import make_sampler
from sweep.study.driver import Driver
from sweep.study.stopping import Rivals, Stopping
from sweep.study.tuner import tune
from sweep.terminal.summary import best_text, last_screen
from tests.sweep.simulated_device import (
    BUDGET,
    MODEL,
    Exact,
    a_measurement,
    a_record,
    a_space,
    tokens_per_second,
    train,
)

BOTH: dict[str, Any] = {
    "dimensions": {
        "micro_batch_size": {"choices": [1, 2, 4, 8, 10]},
        "compute_dtype": {"choices": ["bf16", "int8"]},
        "checkpoint_fraction": {"choices": [0.0, 0.5, 1.0]},
    },
    "fixed": {"lora_rank": 16, "target_modules": "attention", "kernels": "fused-loss"},
    "confirm": {"seconds": 5},
}
ALL_THREE = {
    "micro_batch_size": {"choices": [4, 8]},
    "compute_dtype": {"choices": ["bf16", "fp8", "int8"]},
}


def at(factor: float) -> Callable[[TrialConfig], Outcome]:
    """Return a GPU on which INT8 is so many times as fast as bf16."""

    def answer(config: TrialConfig) -> Outcome:
        outcome = train(config)
        if config.numerics == "16-bit" or not isinstance(outcome, Measured):
            return outcome
        speed = factor * tokens_per_second(config)
        step = config.tokens_per_step / speed
        changes = {"step_seconds": step, "step_seconds_ci95": (0.995 * step, 1.005 * step)}
        return Measured(measurement=a_measurement(config, tokens_per_second=speed, **changes))

    return answer


def study_of(home: Path, *, emulated_on: str | None, **changes: Any) -> Any:
    """Drive a guided study for an A10 to its end, and return it as every reader sees it."""
    space = a_space(**(BOTH | changes))
    target = Target(gpu="a10", device="cuda", budget_bytes=BUDGET, emulated_on=emulated_on)
    host = find_gpu("a10" if emulated_on is None else "h200")
    forecaster = Forecaster(
        model=MODEL,
        budget_bytes=BUDGET,
        violation=lambda _: None,
        predictor=Exact(),
        speed=SpeedForecast(model=MODEL, gpu=host),
        target_speed=None
        if emulated_on is None
        else SpeedForecast(model=MODEL, gpu=find_gpu("a10")),
    )
    sampler = make_sampler("guided", space, seed=0, forecaster=forecaster)
    assert isinstance(sampler, GuidedSampler)
    url = f"sqlite:///{home}/sweep.db"
    with open_study(
        "study",
        url=url,
        definition=StudyDefinition(
            space=space,
            model=MODEL.to_json(),
            model_fingerprint=MODEL.fingerprint,
            target=target,
        ),
        sampler=sampler,
        environment={},
        home=home,
    ) as study:
        stopping = Stopping(
            space,
            outlook=lambda besides: sampler.outlook(study.study, besides=besides),
            fastest_of=partial(sampler.fastest_of, study.study),
        )
        runner = ReplayRunner(otherwise=at(0.8))
        tune(Driver(study, runner=runner, forecaster=forecaster, stopping=stopping))
    return with_target_speeds(read_study("study", url=url, home=home))


def test_int8_that_is_slow_on_the_stand_in_is_tried_wins_and_is_confirmed(tmp_path: Path) -> None:
    found = study_of(tmp_path, emulated_on="NVIDIA H200")
    ranking = rank_study(found)
    winner, other = ranking.winner, ranking.fastest_with_16_bits
    assert winner is not None
    assert winner.config.numerics == "int8"
    assert winner.config.micro_batch_size > 1
    # Its class was not left at the baseline, and nothing of INT8 was stopped for being slower.
    assert other is not None
    assert not other.is_baseline
    assert other.measurement.tokens_per_second > winner.measurement.tokens_per_second
    int8 = [r for r in found.records if r.config.numerics == "int8"]
    assert any(r.verdict is Verdict.FITS for r in int8)
    assert ranking.is_confirmed
    assert {r.config for r in found.confirmations if r.purpose == "soak"} == {winner.config}

    document = view_of(found).document()
    assert document["numerics_choice"] == "predicted"
    assert {row["numerics"] for row in document["fastest_by_class"]} == {"16-bit", "int8"}
    for text in (last_screen(found), best_text(found)):
        assert "int8 compute" in text
        assert f"The fastest with 16-bit compute is trial {other.number}: " in text
        assert "is predicted; only a run on an A10 can measure it." in text


def test_on_the_target_itself_what_is_measured_decides(tmp_path: Path) -> None:
    found = study_of(tmp_path, emulated_on=None)
    ranking = rank_study(found)
    assert ranking.winner is not None
    assert ranking.winner.config.numerics == "16-bit"
    assert view_of(found).document()["numerics_choice"] == "measured"
    assert "bf16 compute" in last_screen(found)
    assert "is predicted;" not in last_screen(found)


def test_numerics_16_bit_keeps_int8_out_of_a_study(tmp_path: Path) -> None:
    found = study_of(tmp_path, emulated_on="NVIDIA H200", numerics="16-bit")
    assert {r.config.numerics for r in found.records} == {"16-bit"}
    assert "The fastest with 16-bit" not in last_screen(found)


def test_each_class_is_tried_twice_at_most_whatever_became_of_the_others() -> None:
    space = a_space(dimensions=ALL_THREE)
    target = Target(gpu="l4", device="cuda", budget_bytes=BUDGET, emulated_on="NVIDIA H200")
    definition = StudyDefinition(
        space=space, model=MODEL.to_json(), model_fingerprint=MODEL.fingerprint, target=target
    )
    wide, fp8, int8 = (TrialConfig(compute_dtype=each) for each in ("bf16", "fp8", "int8"))
    lost = OutOfMemory(stage="forward")
    records = [
        a_record(wide),
        a_record(fp8, lost, number=1),
        a_record(fp8.model_copy(update={"micro_batch_size": 8}), lost, number=2),
    ]

    def owed(*left: TrialConfig) -> TrialConfig | None:
        found = Stopping(
            space,
            fastest_of=lambda wanted, measured: next(
                filter(wanted, () if measured else left), None
            ),
        )
        return found.still_owed(rank(records, definition))

    assert owed(fp8, int8) == int8
    assert owed(fp8) is None
    records.pop()
    # The first class has nothing left that fits.
    assert owed(int8) == int8


@pytest.mark.parametrize(("emulated_on", "count"), [("NVIDIA H200", 0), (None, 1)])
def test_a_trial_is_stopped_by_another_class_on_the_target_alone(
    emulated_on: str | None, count: int
) -> None:
    space = a_space(**BOTH)
    target = Target(gpu="a10", device="cuda", budget_bytes=BUDGET, emulated_on=emulated_on)
    definition = StudyDefinition(
        space=space, model=MODEL.to_json(), model_fingerprint=MODEL.fingerprint, target=target
    )
    fast = TrialConfig(kernels="fused-loss")
    rivals = Rivals(definition, [a_record(fast)])
    assert len(rivals.of(fast.model_copy(update={"compute_dtype": "int8"}))) == count
    assert len(rivals.of(fast)) == 1
