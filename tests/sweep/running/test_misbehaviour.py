"""Whatever a worker does, its trial ends in time, with the true cause, and leaves nobody behind."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import CardLost, EnvironmentFault
from search_spaces.gpus import GIB
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from storage.definition import Target
from storage.records import INTERRUPTED, Attempt, Crashed, Diverged, Lost, Outcome, TimedOut
from sweep.processes import End
from sweep.running.child import WorkerProcess
from sweep.running.runner import Observer, keep_going
from sweep.running.supervisor import Deadlines, SupervisedRunner
from sweep.running.wire import Progress, TrialRequest
from tests.sweep.running import misbehaving_worker as how

CPU = Target(gpu="cpu", device="cpu", budget_bytes=GIB // 8)
STEPS = StepBudget(warmup_min=1, warmup_max=1, measured_min=2, measured_max=2, seconds_max=0.1)
QUICK = Deadlines(
    start=30,
    build=0.5,
    attach=0.5,
    warmup=0.5,
    measure=0.5,
    detach=0.5,
    silences_per_step=2,
    closed=0.5,
    end=10,
)
ATTEMPT = Attempt(id="a1", study="s1", number=0, started_at="2025-01-01T00:00:00+00:00")
ANSWERED = Diverged(step=7, detail="as asked")
IN_TIME = 9.0
"""Far more than the longest limit here and a worker's start."""

Start = Callable[..., SupervisedRunner]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[SupervisedRunner] = []

    def start(**options: object) -> SupervisedRunner:
        defaults: dict[str, object] = {
            "target": CPU,
            "log_path": tmp_path / "worker.log",
            "deadlines": QUICK,
            "module": "tests.sweep.running.misbehaving_worker",
        }
        runner = SupervisedRunner(load_model_spec("demo"), **{**defaults, **options})  # type: ignore[arg-type]
        started.append(runner)
        return runner

    yield start
    for runner in started:
        runner.close()


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def ran(
    runner: SupervisedRunner,
    rank: int,
    *,
    attempt: Attempt | None = None,
    steps: StepBudget = STEPS,
    observe: Observer = keep_going,
) -> Outcome:
    began, config = time.monotonic(), TrialConfig(lora_rank=rank)
    outcome = runner.run(TrialRequest(config=config, steps=steps, attempt=attempt), observe=observe)
    assert time.monotonic() - began < IN_TIME
    return outcome


def grandchildren(log: Path) -> list[int]:
    words = log.read_text(encoding="utf-8").split("grandchild ")[1:]
    return [int(word.split()[0]) for word in words]


def is_running(number: int) -> bool:
    try:
        status = Path(f"/proc/{number}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def are_gone(numbers: list[int]) -> bool:
    deadline = time.monotonic() + 5
    while any(map(is_running, numbers)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("rank", "phase", "words"),
    [
        (how.HANG, "attach", "no sign of life for 0.5 s; the worker was ended"),
        (how.STOPPED, "attach", "no sign of life for 0.5 s, as somebody stopped the worker's"),
        (how.TRICKLE_WITHOUT_LINES, "attach", "no sign of life for 0.5 s"),
        (how.SILENT_AFTER_BEATS, "measure", "no sign of life for 0.5 s"),
        (how.FLOOD_OF_BEATS, "measure", "no step further for 1 s"),
        (how.BACK_AND_FORTH, "", "no step further for 1 s"),
        (how.ENDLESS_STEPS, "measure", "the trial as a whole took longer than"),
    ],
)
def test_what_does_not_come_to_an_end_is_timed_out_by_the_limit_that_it_passed(
    start: Start, rank: int, phase: str, words: str
) -> None:
    # Of this one each second is waited for.
    measure = 0.25 if rank == how.ENDLESS_STEPS else QUICK.measure
    outcome = ran(start(deadlines=replace(QUICK, measure=measure)), rank)
    assert isinstance(outcome, TimedOut), outcome
    assert words in outcome.detail
    assert outcome.phase == phase or not phase


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (how.GARBAGE, "'this is not an event': no JSON"),
        (how.FLOOD_WITHOUT_LINES, "more than 262,144 bytes without a line end"),
        (how.NAN, "finite"),
        (how.NAN_IN_WORDS, "finite"),
        (how.INFINITY, "finite"),
        (how.HUGE_NUMBER, "step: Input should be less than"),
        (how.ENDLESS_NUMBER, "it said"),
        (how.NESTED, "nested too deeply"),
        (how.NESTED_IN_A_MESSAGE, "it said"),
        (how.NOT_UTF8, "utf-8"),
        (how.NULS, "no JSON"),
        (how.READY_AGAIN, "it said 'ready' when nobody expected that"),
        (how.UNUSABLE_LATE, "it fell off the bus"),
        (how.ANOTHER_CONFIGURATION, "it said 'finished' when nobody expected that"),
        (how.CLOSED_PIPE, "it closed its pipe, and lived on"),
    ],
)
def test_what_no_worker_says_ends_it_and_is_the_cause_that_is_told(
    start: Start, rank: int, words: str
) -> None:
    outcome = ran(start(deadlines=replace(QUICK, attach=7)), rank)
    assert isinstance(outcome, Crashed), outcome
    assert outcome.cause == "protocol"
    assert outcome.detail.startswith("the worker was ended, as")
    assert words in outcome.detail
    assert "SIGKILL" not in outcome.detail
    assert "\0" not in outcome.detail


@pytest.mark.parametrize(
    ("rank", "cause", "words"),
    [
        (how.EXIT, "exit", "exit status 1; it printed last:"),
        (how.SEGFAULT, "signal", "signal SIGSEGV"),
        (how.UNNAMED_SIGNAL, "signal", "signal 42"),
        (how.NO_HOST_MEMORY, "host_out_of_memory", "SIGABRT, as the host's memory ran out"),
        (how.CRASH_WITH_THE_PIPE_HELD, "signal", "signal SIGSEGV"),
        (how.CRASH_WITH_THE_PIPE_FLOODED, "signal", "signal SIGSEGV"),
        (how.HALF_AN_ANSWER, "signal", "signal SIGSEGV"),
    ],
)
def test_an_end_of_its_own_is_told_as_it_was_and_at_once(
    start: Start, rank: int, cause: str, words: str
) -> None:
    patient = Deadlines(start=30)
    outcome = ran(start(deadlines=patient), rank)
    assert isinstance(outcome, Crashed), outcome
    assert outcome.cause == cause
    assert words in outcome.detail


def test_a_kill_from_outside_is_told_as_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweep.processes.oom_kills", lambda: 3)
    outcome = ran(start(), how.KILLED)
    assert isinstance(outcome, Crashed)
    assert outcome.cause == "signal"
    assert "signal SIGKILL from outside" in outcome.detail


def test_a_kill_by_the_kernel_for_want_of_memory_has_its_own_cause(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([3, 4])
    monkeypatch.setattr("sweep.processes.oom_kills", lambda: next(kills))
    outcome = ran(start(), how.KILLED)
    assert isinstance(outcome, Crashed)
    assert outcome.cause == "host_out_of_memory"
    assert "the host's memory ran out" in outcome.detail


def test_a_worker_that_reads_no_more_is_found_out_though_it_speaks(start: Start) -> None:
    def stop(_: object) -> bool:
        return True

    began = time.monotonic()
    outcome = start(deadlines=Deadlines(start=30, closed=0.5)).run(
        TrialRequest(config=TrialConfig(lora_rank=how.CLOSED_EARS), steps=STEPS), observe=stop
    )
    assert time.monotonic() - began < IN_TIME
    assert isinstance(outcome, Crashed), outcome
    assert outcome.cause == "protocol"
    assert "closed its pipe" in outcome.detail


def test_an_answer_is_heard_though_the_worker_died_of_it_and_another_holds_its_pipe(
    start: Start,
) -> None:
    assert ran(start(), how.ANSWER_AND_DIE) == ANSWERED


def test_an_answer_too_many_is_no_later_trials_fault(start: Start) -> None:
    runner = start()
    assert ran(runner, how.ANSWER_TWICE) == ANSWERED
    time.sleep(0.1)
    assert ran(runner, how.FINE) == ANSWERED


def test_an_answer_to_an_earlier_trial_is_none_to_this_one(start: Start) -> None:
    runner = start()
    assert ran(runner, how.ANSWER_AGAIN_LATER) == ANSWERED
    outcome = ran(runner, how.FINE)
    assert isinstance(outcome, Crashed)
    assert "it said 'finished' when nobody expected that" in outcome.detail


def test_a_worker_that_dies_between_two_trials_is_replaced_and_no_trial_pays(start: Start) -> None:
    runner = start()
    assert ran(runner, how.DIE_IDLE) == ANSWERED
    time.sleep(0.1)
    assert ran(runner, how.FINE) == ANSWERED


def test_what_an_outcome_says_in_words_can_be_stored_and_shown(start: Start) -> None:
    outcome = ran(start(), how.NUL_IN_WORDS)
    assert isinstance(outcome, Diverged)
    assert outcome.detail.isprintable()
    assert "hunter2" not in outcome.detail
    assert len(outcome.detail) <= 1000


@pytest.mark.parametrize("rank", [how.LEAVE_AND_DIE, how.LEAVE_AND_HANG])
def test_what_was_left_on_disk_before_the_end_is_the_result(start: Start, rank: int) -> None:
    assert ran(start(), rank, attempt=ATTEMPT) == ANSWERED


@pytest.mark.parametrize("rank", [how.LEAVE_ANOTHER_AND_DIE, how.ANSWER_LEAVE_AND_DIE_NEXT])
def test_what_is_on_disk_of_another_run_or_configuration_is_not(start: Start, rank: int) -> None:
    runner = start()
    outcome = ran(runner, rank, attempt=ATTEMPT)
    if rank == how.ANSWER_LEAVE_AND_DIE_NEXT:
        # The same attempt, run again: another process had disturbed it, say.
        assert outcome == ANSWERED
        outcome = ran(runner, rank, attempt=ATTEMPT)
    assert isinstance(outcome, Crashed), outcome


def test_fifty_grandchildren_do_not_outlive_a_segfault(start: Start, tmp_path: Path) -> None:
    assert isinstance(ran(start(deadlines=Deadlines()), how.FIFTY_GRANDCHILDREN), Crashed)
    numbers = grandchildren(tmp_path / "worker.log")
    assert len(numbers) == 50
    assert are_gone(numbers)


def test_a_grandchild_does_not_outlive_a_hang(start: Start, tmp_path: Path) -> None:
    assert isinstance(ran(start(), how.GRANDCHILD), TimedOut)
    numbers = grandchildren(tmp_path / "worker.log")
    assert len(numbers) == 1
    assert are_gone(numbers)


@pytest.mark.parametrize(
    ("seed", "verdict", "words"),
    [
        (how.STOPPED_SEED, "timed_out", "no sign of life for 1 s"),
        (how.CHATTY_SEED, "crashed", "said 'progress' when nobody expected that"),
        (how.DEAF_SEED, "timed_out", "no sign of life for 1 s"),
    ],
)
def test_a_worker_that_goes_wrong_as_it_starts_ends_as_any(
    start: Start, seed: int, verdict: str, words: str
) -> None:
    # Larger than a pipe: what is not read must not make anybody wait.
    runner = start(seed=seed, deadlines=replace(QUICK, start=1))
    runner._settings = runner._settings.model_copy(update={"model": {"name": "x" * 300_000}})
    began = time.monotonic()
    runner.start()
    assert time.monotonic() - began < 5
    outcome = ran(runner, how.FINE)
    assert outcome.verdict == verdict
    assert getattr(outcome, "phase", "") == "start"
    assert words in getattr(outcome, "detail", "")


class Unkillable(WorkerProcess):
    """A worker that the kernel holds, as far as anybody can see."""

    def close(self, *, patience: float = 0.0, kill_seconds: float = 0.0) -> tuple[End, str]:
        _, words = super().close(patience=patience, kill_seconds=kill_seconds)
        return End(None, was_killed=True), words


def test_a_worker_that_nothing_ends_is_the_cards_loss_and_is_said_once_and_for_all(
    start: Start,
) -> None:
    runner = start(process=Unkillable)
    with pytest.raises(CardLost, match="did not end within 10 s of SIGKILL"):
        ran(runner, how.HANG)
    with pytest.raises(CardLost, match="What was measured is stored"):
        ran(runner, how.FINE)
    runner.close()
    runner.cancel()
    assert isinstance(ran(runner, how.FINE), Lost)


def test_a_crash_on_a_card_with_a_fault_of_its_own_is_the_cards(start: Start) -> None:
    runner = start(fault=lambda: "2 uncorrectable memory errors (ECC)")
    assert ran(runner, how.FINE) == ANSWERED
    with pytest.raises(CardLost, match="2 uncorrectable memory errors"):
        ran(runner, how.SEGFAULT)


def cancelling(runner: SupervisedRunner) -> Observer:
    return lambda _: bool(runner.cancel())  # type: ignore[func-returns-value]


@pytest.mark.parametrize("rank", [how.CLEAN_UP_AND_ANSWER, how.LEAVE_AND_BEAT])
def test_a_result_that_is_on_its_way_when_somebody_asks_to_stop_is_kept(
    start: Start, rank: int
) -> None:
    runner = start()
    assert ran(runner, rank, attempt=ATTEMPT, observe=cancelling(runner)) == ANSWERED
    assert ran(runner, how.FINE) == INTERRUPTED


def test_what_is_not_on_its_way_soon_is_not_waited_for(start: Start) -> None:
    runner = start(deadlines=replace(QUICK, detach=600.0, quality=600.0))
    outcome = ran(runner, how.CLEAN_UP_AND_TRAIN_ON, observe=cancelling(runner))
    assert outcome == INTERRUPTED


def test_what_was_measured_before_the_card_was_lost_is_kept(start: Start) -> None:
    runner = start(process=Unkillable)
    assert ran(runner, how.LEAVE_AND_HANG, attempt=ATTEMPT) == ANSWERED
    with pytest.raises(CardLost):
        ran(runner, how.FINE)


def test_no_other_worker_is_started_on_a_card_that_was_lost_between_two_trials(
    start: Start,
) -> None:
    runner = start(process=Unkillable)
    assert ran(runner, how.DIE_IDLE) == ANSWERED
    time.sleep(0.1)
    with pytest.raises(CardLost):
        ran(runner, how.FINE)
    assert runner._worker is None


def test_whoever_is_interrupted_while_a_worker_is_ended_leaves_none(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> End:
        raise KeyboardInterrupt

    runner = start()
    runner.start()
    assert runner._worker is not None
    process = runner._worker.process
    with monkeypatch.context() as pressed:
        pressed.setattr("sweep.processes.Child.end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.close()
    assert are_gone([process.pid])
    process.wait()


@pytest.mark.parametrize("free", range(6))
def test_too_few_descriptors_are_named_with_what_to_do_and_none_is_kept(
    start: Start, free: int
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    runner = start()
    before = len(os.listdir("/proc/self/fd"))
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, limits[1]))
    try:
        with pytest.raises(EnvironmentFault, match=r"too few file descriptors.*ulimit -n"):
            ran(runner, how.FINE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_descriptor_is_kept_of_a_worker_that_was_ended(start: Start) -> None:
    runner = start()
    before = len(os.listdir("/proc/self/fd"))
    for rank in (how.FINE, how.SEGFAULT, how.HANG):
        ran(runner, rank)
    runner.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_endless_print_fills_no_disk_and_its_end_is_told_in_few_words(
    start: Start, tmp_path: Path
) -> None:
    outcome = ran(start(deadlines=Deadlines()), how.PRINT_WITHOUT_END)
    assert isinstance(outcome, Crashed)
    assert outcome.detail.endswith(r"\x1b[31mthe last words")
    assert len(outcome.detail) < 1000
    assert (tmp_path / "worker.log").stat().st_size < 40 * 10**6
    assert (tmp_path / "worker.log.1").stat().st_size <= 10 * 2**20


def test_a_driver_that_was_away_in_a_silence_listens_anew(start: Start) -> None:
    runner, away_from = start(deadlines=replace(QUICK, measure=1)), [float("inf")]

    def clock() -> float:
        now = time.monotonic()
        return now + 3600 if now > away_from[0] else now

    def watch(_: object) -> bool:
        away_from[0] = time.monotonic() + 0.5
        return False

    runner._clock.clock = clock
    config = TrialConfig(lora_rank=how.PAUSE_AND_ANSWER)
    assert runner.run(TrialRequest(config=config, steps=StepBudget()), observe=watch) == ANSWERED


def test_what_came_while_the_driver_was_busy_is_read_before_time_is_up(start: Start) -> None:
    def dawdle(progress: Progress) -> bool:
        # Longer than the silence that is allowed, with the worker's next word already there.
        time.sleep(0.7 if progress.step < 2 else 0)
        return False

    runner = start()
    config = TrialConfig(lora_rank=how.BEAT_AND_ANSWER)
    assert runner.run(TrialRequest(config=config, steps=StepBudget()), observe=dawdle) == ANSWERED


def test_a_jump_of_the_wall_clock_is_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter([1e9, -1e9] * 1000)
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    assert ran(start(), how.FINE) == ANSWERED


def test_whoever_watches_and_fails_leaves_no_trial_to_the_next(start: Start) -> None:
    runner = start()

    def fail(_: object) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        runner.run(
            TrialRequest(config=TrialConfig(lora_rank=how.SLOW_BEATS), steps=STEPS), observe=fail
        )
    assert ran(runner, how.FINE) == ANSWERED


@pytest.mark.parametrize(("kills", "verdict"), [([4, 4], "ineffective"), ([4, 5], "crashed")])
def test_a_compiler_that_the_kernel_killed_is_no_knob_without_effect(
    start: Start, monkeypatch: pytest.MonkeyPatch, kills: list[int], verdict: str
) -> None:
    counts = iter(kills)
    monkeypatch.setattr("sweep.running.supervisor.oom_kills", lambda: next(counts))
    outcome = ran(start(), how.NO_COMPILER)
    assert outcome.verdict == verdict
    if isinstance(outcome, Crashed):
        assert outcome.cause == "host_out_of_memory"
        assert "pool broke" in outcome.detail
