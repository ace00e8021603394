"""Where another GPU stands in for the target, INT8 that is slow there still wins for the target."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from reports.view import view_of
from search_spaces.config import TrialConfig
from search_spaces.gpus import find_gpu
from storage.ranking import rank, rank_study
from storage.reading import read_study
from storage.records import Measured, Outcome, OutOfMemory, Verdict
from storage.study import open_study
from sweep.planning.evidence import with_target_speeds
from sweep.predict.forecast import SpeedForecast
from sweep.sampling.samplers import make_sampler
from sweep.study.stopping import Stopping
from sweep.terminal.summary import best_text, last_screen
from tests.sweep.simulated_device import (
    MODEL,
    Exact,
    a_definition,
    a_record,
    at_speed,
    tokens_per_second,
    train,
)
from tests.sweep.study.driven import a_forecaster, drive

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


def slower_in_int8(config: TrialConfig) -> Outcome:
    """Answer as a GPU on which INT8 is 0.8 times as fast as bf16."""
    outcome = train(config)
    if config.numerics == "16-bit" or not isinstance(outcome, Measured):
        return outcome
    return at_speed(config, 0.8 * tokens_per_second(config))


def study_of(home: Path, *, emulated_on: str | None, **changes: Any) -> Any:
    """Drive a guided study for an A10 to its end, and return it as every reader sees it."""
    definition = a_definition(emulated_on=emulated_on, **(BOTH | changes))
    a10, h200 = (SpeedForecast(model=MODEL, gpu=find_gpu(name)) for name in ("a10", "h200"))
    is_a10 = emulated_on is None
    forecaster = a_forecaster(
        predictor=Exact(), speed=a10 if is_a10 else h200, target_speed=None if is_a10 else a10
    )
    sampler = make_sampler("guided", definition.space, seed=0, forecaster=forecaster)
    about = {"definition": definition, "environment": {}, "home": home}
    url = f"sqlite:///{home}/sweep.db"
    with open_study("study", url=url, sampler=sampler, **about) as study:
        stopping = Stopping(
            definition.space,
            outlook=lambda besides: sampler.outlook(study.study, besides=besides),
            fastest_of=partial(sampler.fastest_of, study.study),
        )
        drive(study, slower_in_int8, forecaster=forecaster, stopping=stopping)
    return with_target_speeds(read_study("study", url=url, home=home))


def test_int8_that_is_slow_on_the_stand_in_is_tried_wins_and_is_confirmed(tmp_path: Path) -> None:
    found = study_of(tmp_path, emulated_on="NVIDIA H200")
    ranking = rank_study(found)
    winner, other = ranking.winner, ranking.fastest_with_16_bits
    assert winner.config.numerics == "int8"
    assert winner.config.micro_batch_size > 1
    # Its class was not left at the baseline, and nothing of INT8 was stopped for being slower.
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
    assert ranking.winner.config.numerics == "16-bit"
    assert view_of(found).document()["numerics_choice"] == "measured"
    assert "bf16 compute" in last_screen(found)
    assert "is predicted;" not in last_screen(found)


def test_each_class_is_tried_twice_at_most_whatever_became_of_the_others() -> None:
    definition = a_definition(gpu="l4", emulated_on="NVIDIA H200", dimensions=ALL_THREE)
    wide, fp8, int8 = (TrialConfig(compute_dtype=each) for each in ("bf16", "fp8", "int8"))
    lost = OutOfMemory(stage="forward")
    records = [
        a_record(wide),
        a_record(fp8, lost, number=1),
        a_record(fp8.model_copy(update={"micro_batch_size": 8}), lost, number=2),
    ]

    def owed(*left: TrialConfig) -> TrialConfig | None:
        found = Stopping(
            definition.space,
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
