"""Whatever ends a real worker on a real GPU is a typed end, and the next trial measures what it
measured before, to the byte.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.records import (
    NEIGHBOUR,
    Crashed,
    Measured,
    OutOfMemory,
    Phase,
)
from qlora_sweep.sweep.nvml import visible_gpus
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import Progress, TrialRequest
from tests.gpu import faulty_worker as faulty
from tests.gpu.rig import QUICK, SMALL, small_config
from tests.gpu.test_memory_limits import BUDGET_BYTES, REFERENCE, TOO_LARGE
from tests.sweep.test_processes import ends_soon
from tests.sweep.training.tiny import measured

pytestmark = [pytest.mark.gpu, pytest.mark.faults]
ROOT = Path(__file__).parents[2]
LONG = StepBudget(warmup_min=2, warmup_max=2, measured_min=6, measured_max=6)
REPEATS = 50
TRIALS = 200
PHASES: tuple[Phase, ...] = ("build", "attach", "warmup", "measure", "detach")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedRunner]:
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        with _runner(tmp_path_factory.mktemp("worker"), BUDGET_BYTES) as child:
            yield child


@pytest.fixture(scope="module")
def reference_peak(runner: SupervisedRunner) -> int:
    return _reference_peak(runner)


def _runner(directory: Path, budget_bytes: int) -> SupervisedRunner:
    return SupervisedRunner(
        SMALL,
        target=Target(gpu="small", device="cuda", budget_bytes=budget_bytes),
        log_path=directory / "worker.log",
        module="tests.gpu.faulty_worker",
    )


def _reference_peak(runner: SupervisedRunner) -> int:
    return measured(runner.run(TrialRequest(config=REFERENCE, steps=QUICK))).peak_allocated_bytes


def _process_id(runner: SupervisedRunner) -> int:
    assert runner._worker is not None
    return runner._worker.process.pid


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_killed_in_any_phase_is_a_crash_there_and_harms_nothing_after_it(
    runner: SupervisedRunner, reference_peak: int, phase: Phase
) -> None:
    if phase == "build":
        # A worker that has the base already builds nothing.
        runner.close()
    killed: list[int] = []

    def kill(progress: Progress) -> bool:
        if progress.phase == phase and not killed:
            killed.append(_process_id(runner))
            os.kill(killed[0], signal.SIGKILL)
        return False

    outcome = runner.run(TrialRequest(config=REFERENCE, steps=LONG), observe=kill)
    assert killed
    assert isinstance(outcome, Crashed), outcome
    # A beat is written before what follows it is done: the phase may have moved on by one.
    assert PHASES.index(outcome.phase) - PHASES.index(phase) in (0, 1)
    assert "SIGKILL" in outcome.detail
    assert ends_soon(killed[0])
    assert _reference_peak(runner) == reference_peak


def test_a_worker_killed_while_it_starts_is_a_crash_and_the_next_one_runs(
    runner: SupervisedRunner, reference_peak: int
) -> None:
    runner.close()
    runner.start()
    killer = threading.Timer(1.0, os.kill, (_process_id(runner), signal.SIGKILL))
    killer.start()
    outcome = runner.run(TrialRequest(config=REFERENCE, steps=QUICK))
    killer.join()
    assert isinstance(outcome, Crashed), outcome
    assert outcome.phase == "start"
    assert "SIGKILL" in outcome.detail
    assert _reference_peak(runner) == reference_peak


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (faulty.EXIT_FROM_C, "exit status 1"),
        (faulty.ABORT, "SIGABRT"),
        (faulty.POISONED_CONTEXT, "device-side assert"),
        (faulty.SEGFAULT, "SIGSEGV"),
    ],
)
def test_what_ends_a_worker_from_below_python_is_named_and_the_next_one_measures_the_same(
    runner: SupervisedRunner, reference_peak: int, fault: float, words: str
) -> None:
    assert _reference_peak(runner) == reference_peak
    process_id = _process_id(runner)
    outcome = runner.run(
        TrialRequest(config=REFERENCE.model_copy(update={"lora_alpha": fault}), steps=LONG)
    )
    assert isinstance(outcome, Crashed), outcome
    assert outcome.phase == "measure"
    assert words in outcome.detail
    assert ends_soon(process_id)
    assert _reference_peak(runner) == reference_peak


@pytest.mark.parametrize("stage", TOO_LARGE)
def test_fifty_times_out_of_memory_in_a_row_leave_the_reference_to_the_byte(
    runner: SupervisedRunner, reference_peak: int, stage: str
) -> None:
    assert _reference_peak(runner) == reference_peak
    process_id = _process_id(runner)
    too_large = small_config(**TOO_LARGE[stage])
    for _ in range(REPEATS):
        outcome = runner.run(TrialRequest(config=too_large, steps=QUICK))
        assert isinstance(outcome, OutOfMemory), outcome
        assert outcome.stage == stage
    assert _process_id(runner) == process_id
    assert _reference_peak(runner) == reference_peak


def _others() -> list[TrialConfig]:
    lean = {"upcast_fp32": False, "kernels": "liger"}
    return [
        small_config(micro_batch_size=1, seq_len=256, lora_rank=64, target_modules="all-linear"),
        small_config(micro_batch_size=2, seq_len=512, checkpoint_fraction=0.0, **lean),
        small_config(micro_batch_size=4, seq_len=256, optimizer="adamw_torch_fused"),
        small_config(**TOO_LARGE["forward"]),
    ]


def test_two_hundred_trials_in_one_worker_do_not_drift(
    runner: SupervisedRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.close()
    first = measured(runner.run(TrialRequest(config=REFERENCE, steps=LONG)))
    process_id, outside = _process_id(runner), _outside_bytes(runner)
    references, others = [first], _others()
    peaks: dict[int, set[int]] = {}
    for number in range(TRIALS - 1):
        # Every fifth is the reference; the others take turns, one of them out of memory.
        which = number % 5
        if which == 4:
            references.append(measured(runner.run(TrialRequest(config=REFERENCE, steps=LONG))))
            continue
        outcome = runner.run(TrialRequest(config=others[which], steps=QUICK))
        if isinstance(outcome, Measured):
            peaks.setdefault(which, set()).add(outcome.measurement.peak_allocated_bytes)
    assert _process_id(runner) == process_id
    assert {m.peak_allocated_bytes for m in references} == {first.peak_allocated_bytes}
    assert all(len(seen) == 1 for seen in peaks.values()), peaks
    assert len(peaks) == len(others) - 1
    early, late = references[1:11], references[-10:]
    ratio = statistics.median(m.step_seconds for m in late) / statistics.median(
        m.step_seconds for m in early
    )
    grown = _outside_bytes(runner) - outside
    with capsys.disabled():
        said = {"trials": TRIALS, "step_ratio": ratio, "outside_allocator_bytes": grown}
        sys.stdout.write(f"\n{json.dumps(said)}\n")
    assert ratio == pytest.approx(1.0, abs=0.25)
    assert grown < 64 * 2**20


def _outside_bytes(runner: SupervisedRunner) -> int:
    """Return what the GPU holds for a worker between trials: its base and its context."""
    process_id = _process_id(runner)
    with visible_gpus(most=1) as (gpu,):
        assert gpu is not None
        memory = gpu.memory()
        mine = [p.used_bytes for p in gpu.processes() if p.pid == process_id]
    if mine and mine[0]:
        return mine[0]
    assert memory is not None
    return memory.used


@contextmanager
def _neighbour(bytes_left: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.neighbour", str(bytes_left)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()


def test_a_neighbour_that_takes_memory_in_the_middle_is_named_and_leaves_the_reference_to_the_byte(
    tmp_path: Path,
) -> None:
    """It takes all but what the worker holds already: the worker's next block is refused."""
    budget_bytes = 8 * 2**30
    growing = small_config(micro_batch_size=16, seq_len=1024, checkpoint_fraction=0.0)
    steps = StepBudget(warmup_min=2, warmup_max=2, measured_min=400, measured_max=400)
    with _runner(tmp_path, budget_bytes) as runner:
        before = _reference_peak(runner)
        with _neighbour(2**28) as neighbour:
            assert neighbour.stdout is not None
            assert neighbour.stdout.readline().startswith("taken")
            robbed = runner.run(TrialRequest(config=growing, steps=QUICK))
        assert isinstance(robbed, OutOfMemory), robbed
        assert NEIGHBOUR in robbed.flags
        assert _reference_peak(runner) == before

        arrived: list[threading.Thread] = []

        def arrive(progress: Progress) -> bool:
            if progress.phase == "measure" and progress.step == 5 and not arrived:
                arrived.append(threading.Thread(target=_visit))
                arrived[0].start()
            return False

        def _visit() -> None:
            with _neighbour(2**30) as visitor:
                assert visitor.stdout is not None
                assert visitor.stdout.readline().startswith("taken")
                time.sleep(1.0)

        outcome = runner.run(TrialRequest(config=REFERENCE, steps=steps), observe=arrive)
        for thread in arrived:
            thread.join()
        assert arrived
        assert NEIGHBOUR in measured(outcome).flags
        assert _reference_peak(runner) == before
