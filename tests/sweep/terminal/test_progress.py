from __future__ import annotations

from typing import Any

import pytest

from search_spaces.config import TrialConfig
from storage.definition import StudyDefinition, Target
from storage.records import (
    Measured,
    TrialRecord,
)
from sweep.running.runner import Progress
from sweep.study.events import (
    ConfirmationStarted,
    StopReason,
    StudyFinished,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from sweep.terminal.live import Board
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
    return Board(
        name="night",
        definition=definition,
        records=list(records),
        confirmations=list(confirmations),
        clock=clock or Clock(),
    )


def finished(number: int, batch: int = 4, **changes: Any) -> TrialFinished:
    config = TrialConfig(micro_batch_size=batch)
    return TrialFinished(record=a_record(config, number=number, **changes))


def test_the_board_follows_a_trial_from_start_to_end() -> None:
    board = a_board()
    board.take(TrialStarted(number=3, config=CONFIG, is_baseline=False, attempt=1))
    board.take(TrialProgress(number=3, progress=Progress(phase="measure", step=2)))
    assert board.current is not None
    assert board.current.number == 3
    assert board.progress == Progress(phase="measure", step=2)
    board.take(finished(3))
    assert board.current is None
    assert board.trials_done == 1


def test_the_best_so_far_includes_earlier_runs() -> None:
    earlier: TrialRecord = finished(0, batch=8).record
    board = a_board(records=[earlier])
    board.take(finished(1, batch=2))
    assert board.best == earlier


def test_the_best_so_far_is_by_what_was_asked_for_and_of_the_space() -> None:
    board = a_board(objectives=["peak_memory"], fixed={"lora_rank": 64})
    outside = a_record(TrialConfig(lora_rank=1, micro_batch_size=1), is_baseline=True)
    board.take(TrialFinished(record=outside))
    assert board.best is None
    for number, batch in ((1, 2), (2, 1), (3, 4)):
        config = TrialConfig(lora_rank=64, micro_batch_size=batch)
        board.take(TrialFinished(record=a_record(config, number=number)))
    assert board.best is not None
    assert board.best.number == 2


def test_a_noisy_speed_is_shown_without_a_gain() -> None:
    noisy = Measured(measurement=a_measurement(CONFIG, spread=0.3, flags=("noisy",)))
    steady = finished(0, batch=8, is_baseline=True).record
    assert a_board(records=[steady], confirmations=confirmed(steady)).gain is not None
    busy = finished(0, batch=8, is_baseline=True, outcome=noisy).record
    assert a_board(records=[busy], confirmations=confirmed(busy)).gain is None


def test_a_winner_that_is_not_confirmed_is_shown_without_a_gain() -> None:
    assert a_board(records=[finished(0, batch=8, is_baseline=True).record]).gain is None


def test_runs_that_measure_again_are_no_trials_and_change_the_best() -> None:
    board = a_board(trials=9)
    fast, small = finished(1, batch=8), finished(2, batch=4)
    for event in (small, fast, ConfirmationStarted(series=1, numbers=(1, 2))):
        board.take(event)
    assert board.best is not None
    assert board.best.number == 1
    for run in (*confirmed(fast.record), *confirmed(small.record)):
        faster = run.confirms == 2
        changes = {"tokens_per_second": 1e6, "step_seconds": 1e-3, "step_seconds_ci95": None}
        measured = a_measurement(run.config, **(changes if faster else {}))
        board.take(
            TrialFinished(record=run.model_copy(update={"outcome": Measured(measurement=measured)}))
        )
    assert board.trials_done == 2
    assert board.remaining_seconds is None
    assert board.best.number == 2


def test_what_is_left_follows_the_pace_of_this_run() -> None:
    clock = Clock()
    board = a_board(clock=clock, trials=10, records=[finished(n).record for n in range(4)])
    assert board.remaining_seconds is None
    clock.seconds = 20.0
    board.take(finished(4))
    board.take(finished(5))
    assert board.remaining_seconds == pytest.approx(4 * 10.0)


def test_a_time_budget_bounds_what_is_left() -> None:
    clock = Clock()
    board = a_board(clock=clock, trials=1000, time_budget_seconds=60)
    assert board.remaining_seconds == 60.0
    clock.seconds = 50.0
    board.take(finished(0))
    assert board.remaining_seconds == 10.0


def test_after_the_study_nothing_runs() -> None:
    board = a_board()
    board.take(TrialStarted(number=3, config=CONFIG, is_baseline=False, attempt=1))
    board.take(StudyFinished(reason=StopReason.INTERRUPTED))
    assert board.current is None
