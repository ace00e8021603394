from __future__ import annotations

from typing import Any

import pytest

from search_spaces.config import TrialConfig
from storage.confirmations import Confirmations
from storage.definition import StudyDefinition, Target
from storage.records import (
    Measured,
)
from sweep.running.wire import Progress
from sweep.study.events import (
    ConfirmationStarted,
    GainForeseen,
    LaneLost,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from sweep.terminal.board import Board, fixed_words, search_words
from sweep.terminal.drawing import rendered
from sweep.terminal.live import now_lines, panel, time_line
from tests.storage.builders import confirmed
from tests.sweep.simulated_device import BUDGET, MODEL, a_measurement, a_record, a_space

CONFIG = TrialConfig()


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def a_board(
    *, clock: Clock | None = None, records: Any = (), confirmations: Any = (), **changes: Any
) -> Board:
    definition = StudyDefinition(
        space=a_space(**changes),
        model=MODEL.to_json(),
        model_fingerprint="f00d",
        target=Target(gpu="a10", device="cuda", budget_bytes=BUDGET),
    )
    return Board("night", definition, (*records, *confirmations), clock=clock or Clock())


def drawn(board: Board) -> str:
    return rendered(panel(board), is_terminal=False)


def finished(number: int, batch: int = 4, **changes: Any) -> TrialFinished:
    config = TrialConfig(micro_batch_size=batch)
    return TrialFinished(record=a_record(config, number=number, **changes))


def test_the_best_so_far_is_by_what_was_asked_for_and_of_the_space() -> None:
    board = a_board(objectives=["peak_memory"], fixed={"lora_rank": 64})
    outside = a_record(TrialConfig(lora_rank=1, micro_batch_size=1), is_baseline=True)
    board.take(TrialFinished(record=outside))
    assert board.ranking.winner is None
    for number, batch in ((1, 2), (2, 1), (3, 4)):
        config = TrialConfig(lora_rank=64, micro_batch_size=batch)
        board.take(TrialFinished(record=a_record(config, number=number)))
    assert board.ranking.winner is not None
    assert board.ranking.winner.number == 2


def test_a_gain_is_shown_as_soon_as_its_interval_says_that_there_is_one() -> None:
    def board(spread: float) -> Board:
        baseline = finished(0, batch=4, is_baseline=True).record
        config = TrialConfig(micro_batch_size=8)
        outcome = Measured(measurement=a_measurement(config, spread=spread))
        faster = finished(1, batch=8, outcome=outcome).record
        return a_board(records=[baseline, faster])

    assert "x the baseline" in drawn(board(0.01))
    assert "x the baseline" not in drawn(board(0.9))


def test_runs_that_measure_again_are_no_trials_and_change_the_best() -> None:
    board = a_board(trials=9)
    fast, small = finished(1, batch=8), finished(2, batch=4)
    for event in (small, fast, ConfirmationStarted(series=1, numbers=(1, 2))):
        board.take(event)
    assert board.ranking.winner is not None
    assert board.ranking.winner.number == 1
    again = (*confirmed(fast.record), *confirmed(small.record))
    for number, run in enumerate(again, start=3):
        faster = run.confirms == 2
        changes = {"tokens_per_second": 1e6, "step_seconds": 1e-3, "step_seconds_ci95": None}
        measured = a_measurement(run.config, **(changes if faster else {}))
        outcome = Measured(measurement=measured)
        changed = run.model_copy(update={"number": number, "outcome": outcome})
        board.take(TrialFinished(record=changed))
    assert board.trials_done == 2
    assert "to measure the winner again" not in time_line(board)
    assert board.ranking.winner.number == 2


def lasting(number: int, seconds: float = 10.0) -> TrialFinished:
    record = finished(number).record.model_copy(update={"wall_seconds": seconds})
    return TrialFinished(record=record)


def test_what_is_left_follows_the_pace_of_the_newest_trials() -> None:
    board = a_board(trials=30, sampler="random")
    assert (board.search_seconds, board.confirm_seconds) == (None, None)
    board.take(lasting(0, seconds=500.0))
    for number in range(1, 11):
        board.take(lasting(number))
    assert board.search_seconds == pytest.approx((30 - 11) * 10.0)
    assert "about 3 min left" in time_line(board)


def test_a_trial_that_takes_longer_than_others_did_is_not_said_to_end_soon() -> None:
    clock = Clock()
    board = a_board(clock=clock, trials=4, sampler="random")
    for number, seconds in enumerate((10.0, 10.0, 40.0)):
        board.take(lasting(number, seconds=seconds))
    board.take(TrialStarted(number=3, config=CONFIG, is_baseline=False, attempt=1))
    said = []
    for clock.seconds in (0.0, 5.0, 11.0, 35.0, 41.0, 240.0):
        said.append(time_line(board).partition(", ")[2])
    assert (
        said
        == ["about 20 s left", "about 15 s left", "about 30 s left", "about 5 s left"] + [""] * 2
    )


def test_a_trial_that_outlasts_the_time_budget_is_not_said_to_end_soon() -> None:
    clock = Clock()
    board = a_board(clock=clock, trials=40, sampler="random", time_budget_seconds=60)
    board.take(lasting(0, seconds=30.0))
    board.take(TrialStarted(number=1, config=CONFIG, is_baseline=False, attempt=1))
    clock.seconds = 20.0
    assert "about 40 s left" in time_line(board)
    clock.seconds = 240.0
    assert " left" not in time_line(board)


def test_a_confirmation_that_takes_longer_than_expected_is_not_said_to_end_soon() -> None:
    clock = Clock()
    board = a_board(clock=clock, trials=9, confirm={"seconds": 20, "soak_seconds": 10})
    board.take(lasting(1))
    board.take(ConfirmationStarted(series=1, numbers=(1,)))
    board.take(TrialStarted(number=2, config=CONFIG, is_baseline=False, attempt=1))
    for clock.seconds in (10.0, 20.0):
        board.take(TrialProgress(number=2, progress=Progress(phase="measure")))
        assert f"about {30.0 - clock.seconds:.0f} s left" in time_line(board)
    clock.seconds = 240.0
    board.take(TrialProgress(number=2, progress=Progress(phase="detach")))
    assert " left" not in time_line(board)


def test_a_search_that_ends_when_it_knows_says_at_most_and_how_near_that_is() -> None:
    board = a_board(trials=40)
    board.take(lasting(0))
    assert "at most some 6 min more: the search ends once less than 1 % is" in time_line(board)
    board.take(GainForeseen(gain=0.031, open=9))
    assert "3.1 % expected of the next trial, the search ends below 1 %" in time_line(board)
    assert " left" not in time_line(board)
    board.take(GainForeseen(gain=float("inf"), open=9))
    assert "inf" not in time_line(board)


def test_what_a_confirmation_takes_is_known_before_and_during_it() -> None:
    clock = Clock()
    budget = {"seconds": 20, "soak_seconds": 10}
    board = a_board(clock=clock, trials=9, confirm=budget)
    board.take(TrialStarted(number=1, config=CONFIG, is_baseline=False, attempt=1))
    first = lasting(1).record
    board.take(TrialFinished(record=first))
    assert board.confirm_seconds == 20.0 + 10.0
    # Eight trials of 10 s are to come.
    assert "some 2 min more, 30 s of it to measure the winner again" in time_line(board)
    board.take(ConfirmationStarted(series=1, numbers=(1,)))
    assert "about 30 s left" in time_line(board)
    *runs, soak = confirmed(first)
    for run in runs:
        board.take(TrialFinished(record=run))
    spent = Confirmations(tuple(runs)).repeat_seconds(series=1)
    assert spent > 0
    assert board.confirm_seconds == pytest.approx(20.0 - spent + 10.0)
    board.take(TrialFinished(record=soak))
    assert board.confirm_seconds == pytest.approx(20.0 - spent)


def test_what_is_left_of_a_confirmation_counts_the_runs_that_are_needed_past_its_budget() -> None:
    board = a_board(trials=9, confirm={"seconds": 2, "soak_seconds": 10})
    first = lasting(1).record
    board.take(TrialFinished(record=first))
    measured = first.measurement
    assert measured is not None
    each = measured.setup_seconds + measured.measured_seconds
    assert 2 * each > 2.0
    assert board.confirm_seconds == pytest.approx(2 * each + 10.0)
    board.take(ConfirmationStarted(series=1, numbers=(1,)))
    board.take(TrialFinished(record=confirmed(first)[0]))
    assert board.confirm_seconds == pytest.approx(each + 10.0)


def test_what_a_lost_card_left_in_the_middle_does_not_run_beside_what_is_measured_again() -> None:
    board = a_board(confirm={"seconds": 20})
    board.take(ConfirmationStarted(series=1, numbers=(1,)))
    board.take(TrialStarted(number=9, config=CONFIG, is_baseline=False, attempt=1))
    board.take(LaneLost(name="GPU 0", reason="it fell off the bus", left=1))
    board.take(ConfirmationStarted(series=2, numbers=(1,)))
    board.take(TrialStarted(number=10, config=CONFIG, is_baseline=False, attempt=1))
    assert list(board.running) == [10]


def test_a_trial_is_described_by_what_is_searched_and_the_rest_is_said_once() -> None:
    space = a_space(
        fixed={"lora_rank": 8, "compile": True},
        baseline={"lora_rank": 16, "micro_batch_size": 8, "compile": False},
    )
    config = space.config(
        {
            "micro_batch_size": 10,
            "seq_len": 512,
            "checkpoint_fraction": 0.0,
            "upcast_fp32": True,
            "kernels": "hf",
            "optimizer": "adamw_8bit",
        }
    )
    assert search_words(config, space=space) == "10 x 512, no checkpointing"
    baseline = space.baseline_config()
    assert search_words(baseline, space=space) == "the baseline, 8 x 512, rank 16 on q,k,v,o"
    assert fixed_words(space) == "rank 8, compiled layers"
    assert fixed_words(a_space()) == ""


def test_how_long_something_is_done_begins_anew_with_each_phase() -> None:
    clock = Clock()
    board = a_board(clock=clock)
    board.take(TrialStarted(number=1, config=CONFIG, is_baseline=False, attempt=1))
    clock.seconds = 7.0
    assert ", 7 s: " in now_lines(board)[0]
    board.take(TrialProgress(number=1, progress=Progress(phase="measure")))
    clock.seconds = 9.0
    board.take(TrialProgress(number=1, progress=Progress(phase="measure", step=3)))
    assert ", measuring step 3, 2 s: " in now_lines(board)[0]
