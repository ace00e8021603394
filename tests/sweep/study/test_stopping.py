from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_sweep.reports import format as units
from qlora_sweep.reports.answer import stopped_words
from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.gpus import GIB, find_gpu
from qlora_sweep.storage.ranking import rank, rank_study
from qlora_sweep.storage.records import (
    Crashed,
    Lost,
    Measured,
    Outcome,
    OutOfMemory,
    PrunedSlow,
    TimedOut,
    TrialRecord,
    Verdict,
)
from qlora_sweep.storage.study import OpenStudy, open_study
from qlora_sweep.sweep.planning.evidence import with_target_speeds
from qlora_sweep.sweep.predict.forecast import SpeedForecast
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.running.wire import Progress
from qlora_sweep.sweep.sampling.guided import GuidedSampler, Outlook
from qlora_sweep.sweep.sampling.samplers import make_sampler
from qlora_sweep.sweep.study.confirmation import ranking_of
from qlora_sweep.sweep.study.events import StopReason
from qlora_sweep.sweep.study.stopping import (
    ConsecutiveFailures,
    Rival,
    Rivals,
    Stopping,
    is_hopeless,
    price_of,
)
from qlora_sweep.sweep.terminal.summary import best_text, last_screen
from tests.storage.builders import changed, read_it
from tests.sweep.simulated_device import (
    BUDGET,
    MODEL,
    SPACE,
    Exact,
    OneFactor,
    a_definition,
    a_measurement,
    a_record,
    a_space,
    a_study,
    at_speed,
    best_speed,
    peak_bytes,
    tokens_per_second,
    train,
)
from tests.sweep.study.driven import a_forecaster, drive
from tests.sweep.study.test_confirmation import soaking

RECORDS = [
    a_record(TrialConfig(), number=0, is_baseline=True),
    a_record(TrialConfig(lora_rank=8), number=1),
]


class Physical:
    """Forecasts the simulated GPU's speed, but for a factor common to all."""

    def predict(self, config: TrialConfig) -> float:
        return tokens_per_second(config)

    def physics(self, configs: Sequence[TrialConfig]) -> OneFactor:
        return OneFactor(np.log([1.2 * c.tokens_per_step / self.predict(c) for c in configs]))

    def learn(self, record: TrialRecord) -> None:
        pass


class SmallerIsFaster(Physical):
    """Forecasts that a small rank is half as fast again."""

    def predict(self, config: TrialConfig) -> float:
        return tokens_per_second(config) * (0.9 if config.lora_rank == 8 else 0.6)


def run(
    home: Path, answer: Any = train, speed: Physical | None = None, **changes: Any
) -> tuple[StopReason, OpenStudy]:
    """Run a guided study of the simulated GPU to its end."""
    space = a_space(**changes)
    forecaster = a_forecaster(predictor=Exact(), speed=speed or Physical())
    sampler = make_sampler("guided", space, seed=0, forecaster=forecaster, model=MODEL)
    assert isinstance(sampler, GuidedSampler)
    with a_study(home, sampler=sampler, **changes) as study:
        stopping = Stopping(
            space,
            outlook=lambda besides: sampler.outlook(study.study, besides=besides),
            fastest_of=partial(sampler.fastest_of, study.study),
            unmeasured_classes=partial(sampler.unmeasured_classes, study.study),
        )
        return drive(study, answer, forecaster=forecaster, stopping=stopping), study


def test_a_guided_study_ends_when_it_knows_and_says_what_is_left(tmp_path: Path) -> None:
    reason, study = run(tmp_path)
    records = study.records()
    assert reason is StopReason.GAIN_SPENT
    assert len(records) < 30
    found = max(r.measurement.tokens_per_second for r in records if r.measurement)
    assert found > 0.98 * best_speed(a_space())
    snapshot = read_it(f"sqlite:///{tmp_path}/sweep.db", tmp_path)
    assert snapshot.ended["reason"] == "gain_spent"
    assert 0 <= snapshot.ended["most_promising"]["gain"] < 0.02
    assert json.loads(json.dumps(snapshot.ended)) == snapshot.ended
    promising = snapshot.ended["most_promising"]
    assert promising["gain_if_better"] == pytest.approx(promising["gain"] / promising["chance"])
    assert units.share(promising["gain"]) in stopped_words(snapshot)


TWO_RANKS: dict[str, Any] = {
    "dimensions": SPACE["dimensions"] | {"lora_rank": [8, 16]},
    "fixed": {"target_modules": "attention"},
}


def two_ranks(config: TrialConfig) -> Outcome:
    """Answer as a GPU on which rank 8 is half as fast again."""
    outcome = train(config)
    if not isinstance(outcome, Measured):
        return outcome
    share = 0.9 if config.lora_rank == 8 else 0.6
    return at_speed(config, share * tokens_per_second(config))


def of_rank(study: OpenStudy, rank: int) -> list[TrialRecord]:
    return [r for r in study.records() if r.config.lora_rank == rank and not r.is_baseline]


def test_the_class_that_is_asked_for_is_searched_and_of_others_the_fastest_is_predicted(
    tmp_path: Path,
) -> None:
    reason, study = run(tmp_path, two_ranks, SmallerIsFaster(), **TWO_RANKS)
    assert reason is StopReason.GAIN_SPENT
    assert not of_rank(study, 8)
    found = read_it(f"sqlite:///{tmp_path}/sweep.db", tmp_path)
    winner = rank_study(found).winner
    assert winner.config.lora_rank == 16
    assert tokens_per_second(winner.config) > 0.98 * best_speed(a_space())
    (other,) = found.ended["unmeasured_classes"]
    assert other["config"]["lora_rank"] == 8
    # It is right but for the factor that all have in common, which trials have shown.
    speed = 0.9 * tokens_per_second(TrialConfig.model_validate(other["config"]))
    assert other["tokens_per_second"] == pytest.approx(speed, rel=0.05)
    assert other["peak_allocated_bytes"] <= BUDGET


def test_where_the_class_that_is_asked_for_does_not_fit_the_nearest_is_searched(
    tmp_path: Path,
) -> None:
    few = SPACE["dimensions"] | {
        "micro_batch_size": [4],
        "checkpoint_fraction": [1.0],
        "seq_len": [512],
        "lora_rank": [8, 16],
    }

    def never(config: TrialConfig) -> Outcome:
        is_lost = config.lora_rank == 16
        return OutOfMemory(stage="forward") if is_lost else two_ranks(config)

    _, study = run(tmp_path, never, SmallerIsFaster(), dimensions=few, fixed=TWO_RANKS["fixed"])
    ranks = [record.config.lora_rank for record in study.records() if not record.is_baseline]
    assert ranks[0] == 16
    assert ranks[-1] == 8


def test_trials_that_are_to_be_used_up_go_to_other_classes_once_that_one_is_settled(
    tmp_path: Path,
) -> None:
    _, study = run(tmp_path, two_ranks, SmallerIsFaster(), **TWO_RANKS, stop_below_gain=0)
    assert of_rank(study, 16)[0].number < of_rank(study, 8)[0].number


def test_nothing_more_is_owed_where_speed_is_not_asked_for(tmp_path: Path) -> None:
    _, study = run(tmp_path, two_ranks, SmallerIsFaster(), **TWO_RANKS, objectives=["peak_memory"])
    assert not of_rank(study, 16)


def test_a_space_of_one_point_is_tried_once(tmp_path: Path) -> None:
    one = {"dimensions": {"micro_batch_size": [4]}, "fixed": {}}
    reason, study = run(tmp_path, **one)
    assert reason is StopReason.EXHAUSTED
    # What is foreseen to be the fastest goes before the baseline.
    assert [r.config.micro_batch_size for r in study.records()] == [4, 8]


def test_the_baseline_of_a_guided_search_is_measured_beside_the_winner_alone(
    tmp_path: Path,
) -> None:
    _, study = run(tmp_path, confirm={"soak_seconds": 0})
    assert not any(record.is_baseline for record in study.records())
    assert sum(record.is_baseline for record in study.confirmations()) >= 2
    found = read_it(f"sqlite:///{tmp_path}/sweep.db", tmp_path)
    document, ranking = view_of(found).document(), rank_study(found)
    assert document["gain"]["over"]["baseline"]
    best, over = ranking.winner.config, ranking.baseline.config
    expected = tokens_per_second(best) / tokens_per_second(over)
    assert document["gain"]["ratio"] == pytest.approx(expected, rel=0.01)
    # Interrupted before it was measured, no gain is made up.
    cut = replace(found, confirmations=())
    assert view_of(cut).document()["gain"] is None
    assert "the baseline was not measured" in last_screen(cut)


def test_a_search_that_money_may_end_measures_the_baseline_itself(tmp_path: Path) -> None:
    _, study = run(tmp_path, trials=2, confirm={"soak_seconds": 0}, max_dollars=1.0)
    assert any(record.is_baseline for record in study.records())


@pytest.mark.parametrize("confirm", [False, {"seconds": 5}])
def test_where_nothing_can_fit_a_verdict_says_so_and_the_search_ends(
    tmp_path: Path, confirm: Any
) -> None:
    huge = {
        "confirm": confirm,
        "dimensions": {"micro_batch_size": [200, 400, 800]},
        "fixed": {"seq_len": 4096},
        "baseline": {"micro_batch_size": 300},
    }
    reason, study = run(tmp_path, **huge)
    first, baseline = study.records()
    assert reason is StopReason.GAIN_SPENT
    assert first.verdict is Verdict.PREDICTED_OOM
    assert first.config.micro_batch_size == 200
    assert baseline.is_baseline


def test_a_gpu_on_which_everything_runs_out_ends_a_search(tmp_path: Path) -> None:
    reason, study = run(tmp_path, lambda _: OutOfMemory(stage="load"))
    assert reason is StopReason.GAIN_SPENT
    assert len(study.records()) < 10


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


def test_a_limit_in_dollars_needs_a_price(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    assert price_of(a_space(), gpu="no-such-card") is None
    assert price_of(a_space(max_dollars=1), gpu="a10") is not None
    with pytest.raises(InputError, match="no price is known for 'no-such-card'"):
        price_of(a_space(max_dollars=1), gpu="no-such-card")


# Trials that fail by the machine's doing

CRASH = Crashed(phase="build", detail="no kernel image")
TIMEOUT = TimedOut(phase="warmup", detail="no sign of life")
STOPPED = Lost(is_interrupted=True)


def counted(*outcomes: Outcome) -> ConsecutiveFailures:
    failures = ConsecutiveFailures()
    for outcome in outcomes:
        failures.count(outcome)
    return failures


def lacking(cause: Any) -> list[Outcome]:
    phases: tuple[Any, ...] = ("build", "attach", "warmup", "measure", "detach")
    return [Crashed(phase=phase, cause=cause, detail="so it was") for phase in phases]


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([CRASH] * 5, "no kernel image"),
        ([TIMEOUT] * 5, "no sign of life"),
        ([*[CRASH] * 4, STOPPED, CRASH], "model cannot be built"),
        # What the host lacks it lacks in whichever phase, and what to do is said.
        (lacking("host_out_of_memory"), "free -h"),
        (lacking("too_few_descriptors"), "ulimit -n"),
    ],
)
def test_failing_alike_is_the_machines_fault(outcomes: list[Outcome], said: str) -> None:
    failures = counted(*outcomes[:-1])
    with pytest.raises(EnvironmentFault, match=said):
        failures.count(outcomes[-1])


@pytest.mark.parametrize(
    "between", [OutOfMemory(stage="forward"), TIMEOUT, Crashed(phase="measure")]
)
def test_anything_else_in_between_begins_the_count_anew(between: Outcome) -> None:
    assert counted(*[CRASH] * 4, between, *[CRASH] * 4)
    assert not counted(*[STOPPED] * 5)


CONFIG = TrialConfig()
OTHER = TrialConfig(micro_batch_size=8)
RIVAL = Rival(config=CONFIG, tokens_per_second=1000.0, peak_allocated_bytes=10 * GIB)
WARMING_UP = Progress(phase="warmup", step=6, tokens_per_second_high=1.0)
SPREAD = {
    "micro_batch_size": [4, 8],
    "lora_rank": [16, 64],
    "kernels": ["hf", "liger"],
}


def measuring(high: float | None, gib: float | None = None) -> Progress:
    allocated = None if gib is None else int(gib * GIB)
    return Progress(phase="measure", step=6, tokens_per_second_high=high, allocated_bytes=allocated)


@pytest.mark.parametrize(
    ("progress", "objectives", "rank", "expected"),
    [
        (measuring(500.0), [], 16, True),
        # A tie is shown, and before there is an interval nothing is known.
        (measuring(985.0), [], 16, False),
        (measuring(1500.0), [], 16, False),
        (measuring(None), [], 16, False),
        (WARMING_UP, [], 16, False),
        # A rival has to win in every objective.
        (measuring(500.0, 11), ["peak_memory"], 16, True),
        (measuring(500.0, 9), ["peak_memory"], 16, False),
        (measuring(500.0), ["peak_memory"], 16, False),
        (measuring(500.0), ["trainable_parameters"], 16, True),
        (measuring(500.0), ["trainable_parameters"], 64, False),
        # A slow one may learn more: only what is less than half as fast goes untrained.
        (measuring(450.0), ["eval_loss"], 64, True),
        (measuring(550.0), ["eval_loss"], 64, False),
    ],
)
def test_a_trial_is_hopeless_once_its_best_case_is_behind(
    progress: Progress, objectives: list[Any], rank: int, expected: bool
) -> None:
    config = TrialConfig(lora_rank=rank)
    both = ("tokens_per_second", *objectives)
    assert is_hopeless(progress, config=config, rivals=[RIVAL], objectives=both) is expected
    assert not is_hopeless(progress, config=config, rivals=[], objectives=both)
    # Where speed is not asked for none is stopped.
    assert not is_hopeless(progress, config=config, rivals=[RIVAL], objectives=objectives)


def test_rivals_are_the_trials_that_ran_to_the_end_within_the_budget() -> None:
    measurement = a_measurement(CONFIG)
    fits = a_record(CONFIG, Measured(measurement=measurement))
    slow = a_record(OTHER, PrunedSlow(measurement=measurement), number=1)
    lost = a_record(OTHER, OutOfMemory(stage="forward"), number=2)
    (rival,) = Rivals(a_definition(), [fits, slow, lost]).of(TrialConfig())
    # What it reached for sure: a rival that was lucky stops nobody.
    assert rival.tokens_per_second == measurement.speed_interval[0]
    outside = a_record(TrialConfig(lora_rank=4), is_baseline=True)
    unsure = a_record(CONFIG, Measured(measurement=a_measurement(CONFIG, step_seconds_ci95=None)))
    assert Rivals(a_definition(), [outside, unsure]).of(TrialConfig()) == ()


@pytest.mark.parametrize(("emulated_on", "count"), [("NVIDIA H200", 0), (None, 1)])
def test_another_class_stops_on_the_target_alone(emulated_on: str | None, count: int) -> None:
    fast = TrialConfig(kernels="fused-loss")
    rivals = Rivals(a_definition(emulated_on=emulated_on), [a_record(fast)])
    assert len(rivals.of(changed(fast, compute_dtype="int8"))) == count
    assert len(rivals.of(fast)) == 1


def test_a_trial_that_later_ran_out_or_was_slower_when_measured_again_stops_no_more() -> None:
    fast, slow = (a_record(CONFIG, at_speed(CONFIG, speed)) for speed in (3_000.0, 1_000.0))
    rivals = Rivals(a_definition(dimensions=SPREAD, fixed={}), [fast])

    def is_stopped() -> bool:
        return is_hopeless(measuring(2_000.0), config=CONFIG, rivals=rivals.of(CONFIG))

    assert is_stopped()
    rivals.learn([changed(slow, number=1)])
    assert not is_stopped()
    rivals.learn([changed(fast, number=2)])
    rivals.learn([a_record(CONFIG, OutOfMemory(stage="forward"), number=3)])
    assert not is_stopped()


# Where another GPU stands in for the target, INT8 that is slow there still wins for the target

BOTH: dict[str, Any] = {
    "dimensions": {
        "micro_batch_size": [1, 2, 4, 8, 10],
        "compute_dtype": ["bf16", "int8"],
        "checkpoint_fraction": [0.0, 0.5, 1.0],
    },
    "fixed": {"lora_rank": 16, "target_modules": "attention", "kernels": "fused-loss"},
    "confirm": {"seconds": 5},
}


A10 = SpeedForecast(model=MODEL, gpu=find_gpu("a10"))


def slower_in_int8(config: TrialConfig) -> Outcome:
    """Answer as a GPU on which INT8 is 0.8 times as fast as bf16."""
    outcome = train(config)
    if config.numerics == "16-bit" or not isinstance(outcome, Measured):
        return outcome
    return at_speed(config, 0.8 * tokens_per_second(config))


def study_of(home: Path) -> Any:
    """Drive a guided study for an A10 on an H200 to its end; return it as every reader sees it."""
    definition = a_definition(emulated_on="NVIDIA H200", **BOTH)
    h200 = SpeedForecast(model=MODEL, gpu=find_gpu("h200"))
    forecaster = a_forecaster(predictor=Exact(), speed=h200, target_speed=A10)
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
    return with_target_speeds(read_it(url, home))


def test_int8_that_may_be_faster_on_the_target_is_tried_and_said_second(tmp_path: Path) -> None:
    found = study_of(tmp_path)
    ranking = rank_study(found)
    winner, other = ranking.winner, ranking.other_numerics
    assert winner.config.numerics == "16-bit"
    assert other.config.numerics == "int8"
    # Nothing of INT8 was stopped for being slower here; on the target it may be faster.
    assert other.measurement.tokens_per_second < winner.measurement.tokens_per_second
    ratio = ranking.ratio(other, winner)
    assert ratio.low < 1.0 < ratio.value < ratio.high
    assert ranking.is_confirmed
    assert {r.config for r in found.confirmations if r.purpose == "soak"} == {winner.config}
    # What is measured here says next to nothing of the order there: few trials are enough.
    assert len(found.records) <= 5
    searched = [record.config.numerics for record in found.records]
    assert searched.count("int8") == 1
    # Among them is what is predicted to be the fastest there with 16 bits.
    space = found.definition.space
    plain = [c for c in map(space.config, space.combinations()) if c.numerics == "16-bit"]
    fitting = [c for c in plain if 1.01 * peak_bytes(c) <= BUDGET]
    assert max(fitting, key=A10.predict) in [record.config for record in found.records]
    assert {record.config.numerics for record in found.confirmations} == {"16-bit"}

    document = view_of(found).document()
    assert document["numerics_choice"] == "predicted"
    assert {row["numerics"] for row in document["fastest_by_class"]} == {"16-bit", "int8"}
    for text in (last_screen(found), best_text(found)):
        assert f"trial {other.number} is {ratio.value:.2f} times" in text
        assert "on an A10 can measure which is faster." in text


def test_a_class_that_may_be_faster_on_the_target_is_tried_twice_at_most() -> None:
    numerics = {"compute_dtype": ["bf16", "fp8", "int8"]}
    definition = a_definition(gpu="l4", emulated_on="NVIDIA H200", dimensions=numerics)
    wide, fp8, int8 = (TrialConfig(compute_dtype=each) for each in ("bf16", "fp8", "int8"))

    def owed(lost: int) -> TrialConfig | None:
        failed = [a_record(fp8, OutOfMemory(stage="forward"), number=n) for n in range(1, 1 + lost)]
        found = Stopping(
            definition.space,
            fastest_of=lambda wanted, _: next(filter(wanted, (fp8, int8)), None),
        )
        return found.still_owed(rank([a_record(wide), *failed], definition))

    assert (owed(1), owed(2)) == (fp8, int8)


def test_a_search_goes_on_where_its_winner_is_lost_in_its_soak(tmp_path: Path) -> None:
    """A longer run of what takes more than three fifths of the budget takes all of it."""

    def soak(config: TrialConfig) -> Outcome:
        if peak_bytes(config) > 0.6 * BUDGET:
            return OutOfMemory(stage="forward")
        return soaking(config)

    reason, study = run(
        tmp_path,
        ReplayRunner(otherwise=train, soaking=soak),
        dimensions={"micro_batch_size": [2, 4, 8, 10, 12, 16, 20, 24, 32, 40, 48]},
        fixed={"kernels": "liger", "target_modules": "attention", "upcast_fp32": False},
        confirm={"seconds": 60.0, "repeats": 4, "soak_seconds": 15.0},
    )
    ranking = ranking_of(study)
    lost = [config.micro_batch_size for config in ranking.confirmations.fallen]
    assert reason is StopReason.GAIN_SPENT
    assert lost == [48]
    assert ranking.winner is not None
    assert ranking.winner.config.micro_batch_size in (32, 40)
    assert ranking.is_confirmed
