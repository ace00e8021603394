"""The worker's life: whatever it does, the trial gets a typed end and the next one a process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from search_spaces.gpus import GIB
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from storage.definition import Target
from storage.records import RETRYABLE, Crashed, Lost, Measured, Outcome, TimedOut
from sweep.running.supervisor import Deadlines, SupervisedRunner
from sweep.running.wire import TrialRequest
from tests.sweep.running import misbehaving_worker as how

ROOT = Path(__file__).parents[3]
CPU = Target(gpu="cpu", device="cpu", budget_bytes=GIB // 8)
STEPS = StepBudget(warmup_min=1, warmup_max=1, measured_min=2, measured_max=2)
QUICK = Deadlines(start=60, build=1, attach=1, warmup=1, measure=1, detach=1, silences_per_step=1.5)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SupervisedRunner]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with SupervisedRunner(
        load_model_spec("demo"),
        target=CPU,
        log_path=tmp_path / "logs" / "worker.log",
        deadlines=QUICK,
        module="tests.sweep.running.misbehaving_worker",
    ) as runner:
        yield runner


def _process_id(runner: SupervisedRunner) -> int:
    worker = runner._worker
    assert worker is not None
    return worker.process.pid


def test_the_worker_that_was_started_ahead_is_the_one_that_runs(runner: SupervisedRunner) -> None:
    runner.start()
    started = _process_id(runner)
    seen = []

    def watch(_: object) -> bool:
        seen.append(_process_id(runner))
        return False

    runner.run(
        TrialRequest(config=TrialConfig(lora_rank=how.BEAT_AND_ANSWER), steps=STEPS), observe=watch
    )
    assert set(seen) == {started}


def test_a_worker_started_ahead_is_gone_when_nothing_is_run(runner: SupervisedRunner) -> None:
    runner.start()
    process = _process_id(runner)
    runner.close()
    assert _is_gone(process)


def test_a_worker_that_cannot_use_the_device_is_said_by_the_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with SupervisedRunner(
        load_model_spec("demo"),
        target=CPU,
        log_path=tmp_path / "worker.log",
        seed=how.UNUSABLE_SEED,
        module="tests.sweep.running.misbehaving_worker",
    ) as runner:
        runner.start()
        time.sleep(0.5)
        runner.start()
        with pytest.raises(EnvironmentFault, match="no such device"):
            misbehave(runner, how.HANG)


def test_a_worker_that_cannot_be_started_is_said_by_the_first_trial(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    runner = SupervisedRunner(
        load_model_spec("demo"), target=CPU, log_path=tmp_path / "file" / "worker.log"
    )
    runner.start()
    with pytest.raises(EnvironmentFault, match="file"):
        misbehave(runner, how.HANG)


def misbehave(runner: SupervisedRunner, kind: int) -> Outcome:
    return runner.run(TrialRequest(config=TrialConfig(lora_rank=kind), steps=STEPS))


def test_a_hang_is_timed_out_in_its_phase(runner: SupervisedRunner) -> None:
    outcome = misbehave(runner, how.HANG)
    assert isinstance(outcome, TimedOut)
    assert outcome.phase == "attach"


def test_silence_after_signs_of_life_is_timed_out_in_the_last_phase(
    runner: SupervisedRunner,
) -> None:
    outcome = misbehave(runner, how.SILENT_AFTER_BEATS)
    assert isinstance(outcome, TimedOut)
    assert outcome.phase == "measure"


def test_an_exit_from_c_code_is_a_crash_with_its_status_and_last_words(
    runner: SupervisedRunner,
) -> None:
    outcome = misbehave(runner, how.EXIT)
    assert isinstance(outcome, Crashed)
    assert "exit status 1" in outcome.detail
    assert "invalid device function" in outcome.detail


def test_beats_keep_a_slow_trial_alive_past_its_deadline(runner: SupervisedRunner) -> None:
    beats: list[float] = []

    def watch(_: object) -> bool:
        beats.append(time.monotonic())
        return False

    runner.run(
        TrialRequest(config=TrialConfig(lora_rank=how.SLOW_BEATS), steps=STEPS), observe=watch
    )
    assert beats[-1] - beats[0] > 2 * QUICK.measure


def test_cancelling_from_another_thread_interrupts_the_trial_and_every_later_one(
    runner: SupervisedRunner,
) -> None:
    timer = threading.Timer(0.1, runner.cancel)

    def cancel_soon(_: object) -> bool:
        if timer.ident is None:
            timer.start()
        return False

    config = TrialConfig(lora_rank=how.SLOW_BEATS)
    outcome = runner.run(TrialRequest(config=config, steps=STEPS), observe=cancel_soon)
    timer.join()
    assert outcome == Lost(detail="interrupted", is_interrupted=True)
    assert misbehave(runner, how.EXIT) == outcome


def test_a_renewal_replaces_a_worker_that_ran_something_and_no_other(tmp_path: Path) -> None:
    config = TrialConfig(micro_batch_size=1, seq_len=32, lora_rank=4, compute_dtype="fp32")
    with SupervisedRunner(
        load_model_spec("demo"), target=CPU, log_path=tmp_path / "worker.log"
    ) as runner:
        runner.start()
        before = _process_id(runner)
        runner.renew()
        assert _process_id(runner) == before
        assert isinstance(runner.run(TrialRequest(config=config, steps=STEPS)), Measured)
        runner.renew()
        assert _is_gone(before)
        runner.start()
        after = _process_id(runner)
        assert after != before
        runner.renew()
        assert _process_id(runner) == after


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody waits for stays as a zombie."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                time.sleep(0.05)
                continue
        return True
    return False


def test_what_libraries_print_goes_to_the_log_and_not_to_the_pipe(
    runner: SupervisedRunner, tmp_path: Path
) -> None:
    misbehave(runner, how.EXIT)
    assert "hello from a library" in (tmp_path / "logs" / "worker.log").read_text()


def test_a_worker_for_the_cpu_sees_no_card_and_no_other_trainings_settings(
    runner: SupervisedRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    monkeypatch.setenv("SWEEP_STORAGE", "postgresql://me:hunter2@host/db")
    monkeypatch.setenv("HF_TOKEN", "hf_hunter2")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    misbehave(runner, how.TELLTALE)
    log = (tmp_path / "logs" / "worker.log").read_text()
    environment = json.loads(log.split("environment ")[1].splitlines()[0])
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["TORCHINDUCTOR_CACHE_DIR"].endswith("qlora-sweep/compiled")
    assert "hunter2" not in json.dumps(environment)
    assert environment.keys().isdisjoint(
        {"ACCELERATE_MIXED_PRECISION", "LOCAL_RANK", "PYTORCH_CUDA_ALLOC_CONF"}
    )


def test_workers_beside_each_other_see_their_own_cards_and_share_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    card = Target(gpu="a10", device="cuda", budget_bytes=GIB)
    with SupervisedRunner(
        load_model_spec("demo"),
        target=card,
        log_path=tmp_path / "worker-1.log",
        cards=("GPU-2", "GPU-3"),
        neighbours=1,
        deadlines=QUICK,
        module="tests.sweep.running.misbehaving_worker",
    ) as runner:
        misbehave(runner, how.TELLTALE)
    log = (tmp_path / "worker-1.log").read_text()
    environment = json.loads(log.split("environment ")[1].splitlines()[0])
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-2,GPU-3"
    threads = int(environment["TORCHINDUCTOR_COMPILE_THREADS"])
    assert 1 <= threads <= max(1, len(os.sched_getaffinity(0)) // 2)


DRIVER = """
import sys, time
from pathlib import Path
from search_spaces.config import TrialConfig
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from storage.definition import Target
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import TrialRequest

def watch(progress):
    print(runner._worker.process.pid, flush=True)
    return False

runner = SupervisedRunner(
    load_model_spec("demo"),
    target=Target(gpu="cpu", device="cpu", budget_bytes=2**28),
    log_path=Path(sys.argv[1]),
)
steps = StepBudget(measured_max=10000, seconds_max=600)
runner.run(TrialRequest(config=TrialConfig(), steps=steps), observe=watch)
"""


def test_a_real_worker_dies_with_its_parent(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "worker.log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    worker = int(driver.stdout.readline())
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    driver.stdout.close()
    assert _is_gone(worker)


def test_a_module_of_the_users_directory_does_not_shadow_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "storage.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "sweep.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    with SupervisedRunner(
        load_model_spec("demo"), target=CPU, log_path=tmp_path / "worker.log"
    ) as runner:
        config = TrialConfig(micro_batch_size=1, seq_len=16)
        assert isinstance(runner.run(TrialRequest(config=config, steps=STEPS)), Measured)


def test_a_budget_below_the_model_is_out_of_memory_while_loading_or_training(
    tmp_path: Path,
) -> None:
    target = Target(gpu="cpu", device="cpu", budget_bytes=2**16)
    with SupervisedRunner(
        load_model_spec("demo"), target=target, log_path=tmp_path / "worker.log"
    ) as runner:
        outcome = runner.run(
            TrialRequest(config=TrialConfig(micro_batch_size=1, seq_len=16), steps=STEPS)
        )
    assert outcome.verdict == "oom"


@pytest.mark.parametrize(
    ("change", "said"),
    [({"model_type": "unheard-of"}, "unheard-of"), ({"hidden_act": "snap"}, "snap")],
    ids=["no such architecture", "no such activation"],
)
def test_a_model_that_cannot_be_built_crashed_while_building_and_may_be_tried_again(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    demo = load_model_spec("demo")
    broken = dataclasses.replace(demo, config={**demo.config, **change})
    with SupervisedRunner(broken, target=CPU, log_path=tmp_path / "worker.log") as runner:
        outcome = runner.run(
            TrialRequest(config=TrialConfig(micro_batch_size=1, seq_len=16), steps=STEPS)
        )
    assert isinstance(outcome, Crashed), outcome
    assert outcome.phase == "build"
    assert outcome.verdict in RETRYABLE
    assert said in outcome.detail
