from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reports import units
from reports.sentences import stopped_words
from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, InputError
from storage.ranking import rank
from storage.reading import read_study
from storage.records import Crashed, Measured, Outcome, OutOfMemory, TrialRecord, Verdict
from storage.study import OpenStudy
from sweep.predict.forecast import Forecaster
from sweep.running.replay import ReplayRunner
from sweep.sampling.guided import GuidedSampler, Outlook
from sweep.sampling.samplers import make_sampler
from sweep.study.driver import Driver
from sweep.study.events import StopReason
from sweep.study.stopping import Stopping, price_of
from sweep.study.tuner import tune
from tests.reports import synthetic
from tests.sweep.simulated_device import (
    BUDGET,
    MODEL,
    SPACE,
    Exact,
    OneFactor,
    a_measurement,
    a_record,
    a_space,
    a_study,
    best_speed,
    tokens_per_second,
    train,
)

RECORDS = [
    a_record(TrialConfig(), number=0, is_baseline=True),
    a_record(TrialConfig(lora_rank=8), number=1),
]


class Physical:
    """Forecasts the simulated GPU's speed, but for a factor common to all."""

    def predict(self, config: TrialConfig) -> float:
        return tokens_per_second(config)

    def physics(self, configs: Sequence[TrialConfig]) -> OneFactor:
        return OneFactor(np.log([1.2 * c.tokens_per_step / tokens_per_second(c) for c in configs]))

    def learn(self, record: TrialRecord) -> None:
        pass


class SmallerIsFaster(Physical):
    """Forecasts that a small rank is half as fast again."""

    def predict(self, config: TrialConfig) -> float:
        return tokens_per_second(config) * (1.5 if config.lora_rank == 8 else 1.0)

    def physics(self, configs: Sequence[TrialConfig]) -> OneFactor:
        return OneFactor(np.log([1.2 * c.tokens_per_step / self.predict(c) for c in configs]))


def a_forecaster(speed: Physical | None = None) -> Forecaster:
    return Forecaster(
        model=MODEL,
        budget_bytes=BUDGET,
        violation=lambda _: None,
        predictor=Exact(),
        speed=speed or Physical(),
    )


def run(
    home: Path, answer: Any = train, speed: Physical | None = None, **changes: Any
) -> tuple[StopReason, OpenStudy]:
    """Run a guided study of the simulated GPU to its end."""
    space, forecaster = a_space(**changes), a_forecaster(speed)
    sampler = make_sampler("guided", space, seed=0, forecaster=forecaster)
    assert isinstance(sampler, GuidedSampler)
    with a_study(home, sampler=sampler, **changes) as study:
        stopping = Stopping(
            space,
            outlook=lambda besides: sampler.outlook(study.study, besides=besides),
            fastest_of=partial(sampler.fastest_of, study.study),
        )
        runner = ReplayRunner(otherwise=answer)
        return tune(Driver(study, runner=runner, forecaster=forecaster, stopping=stopping)), study


def test_a_guided_study_ends_when_it_knows_and_says_what_it_could_not_rule_out(
    tmp_path: Path,
) -> None:
    reason, study = run(tmp_path)
    records = study.records()
    assert reason is StopReason.GAIN_SPENT
    assert len(records) < 30
    found = max(r.measurement.tokens_per_second for r in records if r.measurement)
    assert found > 0.98 * best_speed(a_space())
    snapshot = read_study("study", url=f"sqlite:///{tmp_path}/sweep.db", home=tmp_path)
    assert snapshot.ended is not None
    assert snapshot.ended["reason"] == "gain_spent"
    assert 0 <= snapshot.ended["most_promising"]["gain"] < 0.01
    assert json.loads(json.dumps(snapshot.ended)) == snapshot.ended
    promising = snapshot.ended["most_promising"]
    assert promising["gain_if_better"] == pytest.approx(promising["gain"] / promising["chance"])
    expected = f"is expected to be more than {units.share(promising['gain'])} faster."
    assert stopped_words(snapshot) == f"Stopped: no untested configuration {expected}"


def test_a_trial_is_chosen_by_what_its_stop_rule_worked_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weigh, solved = GuidedSampler._weigh, []

    def counting(*arguments: Any) -> Any:
        solved.append(arguments)
        return weigh(*arguments)

    monkeypatch.setattr(GuidedSampler, "_weigh", counting)
    reason, study = run(tmp_path)
    assert reason is StopReason.GAIN_SPENT
    assert len(solved) <= len(study.records()) + 1


TWO_RANKS: dict[str, Any] = {
    "dimensions": SPACE["dimensions"] | {"lora_rank": {"choices": [8, 16]}},
    "fixed": {"target_modules": "attention"},
}


def two_ranks(config: TrialConfig) -> Outcome:
    outcome = train(config)
    if not isinstance(outcome, Measured) or config.lora_rank != 8:
        return outcome
    speed = 1.5 * tokens_per_second(config)
    step = config.tokens_per_step / speed
    ends = (0.995 * step, 1.005 * step)
    changes = {"tokens_per_second": speed, "step_seconds": step, "step_seconds_ci95": ends}
    return Measured(measurement=a_measurement(config, **changes))


def of_rank(study: OpenStudy, rank: int) -> list[TrialRecord]:
    return [r for r in study.records() if r.config.lora_rank == rank and not r.is_baseline]


def test_where_smaller_adapters_win_the_fastest_of_the_baselines_class_is_measured_too(
    tmp_path: Path,
) -> None:
    reason, study = run(tmp_path, two_ranks, SmallerIsFaster(), **TWO_RANKS)
    assert reason is StopReason.GAIN_SPENT
    assert of_rank(study, 8)
    (owed,) = of_rank(study, 16)
    assert owed.number == max(r.number for r in study.records())
    assert owed.verdict is Verdict.FITS
    assert tokens_per_second(owed.config) > 0.99 * best_speed(a_space())


def test_of_the_baselines_class_two_are_tried_where_the_first_does_not_fit(tmp_path: Path) -> None:
    def never(config: TrialConfig) -> Outcome:
        is_lost = config.lora_rank == 16 and config != a_space(**TWO_RANKS).baseline_config()
        return OutOfMemory(stage="forward") if is_lost else two_ranks(config)

    reason, study = run(tmp_path, never, SmallerIsFaster(), **TWO_RANKS)
    assert reason is StopReason.GAIN_SPENT
    assert [r.verdict for r in of_rank(study, 16)] == [Verdict.OOM] * 2


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"dimensions": {"lora_rank": {"choices": [8]}}, "fixed": {}}, id="not-there"),
        pytest.param({"objectives": ["peak_memory"]}, id="not-about-speed"),
    ],
)
def test_nothing_more_is_owed(tmp_path: Path, changes: dict[str, Any]) -> None:
    _, study = run(tmp_path, two_ranks, SmallerIsFaster(), **(TWO_RANKS | changes))
    assert not of_rank(study, 16)


def test_a_search_that_measured_the_baselines_class_owes_nothing() -> None:
    space = a_space(**TWO_RANKS)
    small, own = TrialConfig(lora_rank=8), TrialConfig(kernels="liger")
    definition = synthetic.definition().model_copy(
        update={"space": space, "model": MODEL.to_json()}
    )
    stopping = Stopping(
        space, fastest_of=lambda wanted, measured: own if wanted(own) and not measured else None
    )

    def owed(*records: TrialRecord) -> TrialConfig | None:
        return stopping.still_owed(rank(records, definition))

    won = a_record(small, two_ranks(small), number=1)
    assert owed(RECORDS[0], won) == own
    assert owed(RECORDS[0], won, a_record(own, number=2)) is None
    assert owed(a_record(own, number=2)) is None
    assert owed() is None


def test_without_a_threshold_a_guided_study_goes_on_to_its_last_trial(tmp_path: Path) -> None:
    reason, study = run(tmp_path, stop_below_gain=0, trials=14)
    assert reason is StopReason.TRIALS_SPENT
    assert len(study.records()) == 14


def test_a_space_of_one_point_is_tried_once(tmp_path: Path) -> None:
    one = {"dimensions": {"micro_batch_size": {"choices": [4]}}, "fixed": {}}
    reason, study = run(tmp_path, **one)
    assert reason is StopReason.EXHAUSTED
    # What is foreseen to be the fastest goes before the baseline.
    assert [r.config.micro_batch_size for r in study.records()] == [4, 8]


def test_where_nothing_can_fit_a_verdict_says_so_and_the_search_ends(tmp_path: Path) -> None:
    huge = {
        "dimensions": {"micro_batch_size": {"choices": [200, 400, 800]}},
        "fixed": {"seq_len": 4096},
        "baseline": {"micro_batch_size": 300},
    }
    reason, study = run(tmp_path, **huge)
    first, baseline = study.records()
    assert reason is StopReason.GAIN_SPENT
    assert first.verdict is Verdict.PREDICTED_OOM
    assert first.config.micro_batch_size == 200
    assert baseline.is_baseline


def test_a_card_on_which_everything_runs_out_ends_a_search(tmp_path: Path) -> None:
    reason, study = run(tmp_path, lambda _: OutOfMemory(stage="load"))
    assert reason is StopReason.GAIN_SPENT
    assert len(study.records()) < 10


def test_a_card_on_which_everything_crashes_ends_a_search(tmp_path: Path) -> None:
    def crash(_: TrialConfig) -> Outcome:
        return Crashed(phase="attach", detail="segfault")

    with pytest.raises(EnvironmentFault):
        run(tmp_path, crash)


def stops(*gains: float, **changes: Any) -> StopReason | None:
    """Why a search ends by what is to be gained, now and before the last trial."""
    answers = {None: Outlook(gains[0]), 1: Outlook(gains[1])}
    stopping = Stopping(a_space(**changes), outlook=answers.__getitem__)
    return stopping.out_of_trials(2, is_exhausted=lambda: False, records=RECORDS)


@pytest.mark.parametrize(
    ("now", "before", "threshold", "reason"),
    [
        (0.005, 0.005, 0.01, StopReason.GAIN_SPENT),
        (0.005, 0.5, 0.01, None),
        (0.5, 0.005, 0.01, None),
        (0.005, 0.005, 0.001, None),
        (0.005, 0.005, 0, None),
        (0.0, 0.0, 0, None),
    ],
)
def test_a_search_ends_where_two_looks_in_a_row_promise_too_little(
    now: float, before: float, threshold: float, reason: StopReason | None
) -> None:
    assert stops(now, before, stop_below_gain=threshold) is reason


def test_a_sampler_that_expects_nothing_never_ends_a_search_by_gain() -> None:
    stopping = Stopping(a_space())
    assert stopping.out_of_trials(2, is_exhausted=lambda: False, records=RECORDS) is None


def test_a_limit_in_dollars_needs_a_price(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    assert price_of(a_space(), gpu="no-such-card") is None
    assert price_of(a_space(max_dollars=1), gpu="a10") is not None
    with pytest.raises(InputError, match="no price is known for 'no-such-card'"):
        price_of(a_space(max_dollars=1), gpu="no-such-card")
