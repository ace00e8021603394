from __future__ import annotations

import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import EnvironmentFault, InputError
from storage.reading import read_study
from storage.records import Verdict
from sweep.cli import main
from sweep.launching import slurm
from sweep.launching.slurm import IDLE_ALLOCATIONS_MAX, Allocation, job_script, submit
from sweep.request import RunRequest
from tests.sweep.launching.pretend_queue import Queue

ROOT = Path(__file__).parents[3]


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return Queue(tmp_path / "queue", monkeypatch)


def a_job(queue: Queue, program: str, *, warning: float = 3) -> Path:
    """Submit a job that runs a shell program in place of a study; return the study's directory."""
    files = queue.directory.parent / "runs" / "study"
    script = job_script(
        "study",
        Allocation(),
        python=sys.executable,
        request='{"it is": "one"}',
        files=files,
    )
    command = shlex.join(["bash", "-c", f"cd '{files}'; {program}"])
    script = script.replace(f" {slurm.WARNING_SECONDS} <<", f" {warning} {command} <<")
    assert submit(script, files / "slurm.sh") == "17"
    return files


RESULT = "echo result >> spool.jsonl"


@pytest.mark.parametrize("code", [0, 1, 2, 4])
def test_what_no_other_allocation_would_change_is_not_requeued(queue: Queue, code: int) -> None:
    a_job(queue, f"{RESULT}; exit {code}")
    assert queue.allocation() == (code, False)


def test_a_job_near_its_limit_stops_its_study_and_is_requeued(queue: Queue) -> None:
    files = a_job(queue, f"trap '{RESULT}; exit 130' TERM; touch up; while :; do sleep 0.1; done")
    up = (files / "up").exists
    assert queue.allocation(number=signal.SIGUSR1, when=up) == (0, True)
    assert (files / "spool.jsonl").read_text() == "result\n"


def test_a_study_that_does_not_stop_is_killed_before_the_queue_does_it(queue: Queue) -> None:
    files = a_job(queue, f"trap 'echo asked >> asked' TERM; {RESULT}; while :; do sleep 0.1; done")
    up = (files / "spool.jsonl").exists
    assert queue.allocation(number=signal.SIGUSR1, when=up) == (0, True)
    assert (files / "asked").read_text() == "asked\n" * 2


def test_a_job_that_is_cancelled_is_not_requeued(queue: Queue) -> None:
    files = a_job(queue, f"trap 'exit 130' TERM; {RESULT}; touch up; while :; do sleep 0.1; done")
    assert queue.allocation(number=signal.SIGTERM, when=(files / "up").exists) == (130, False)


@pytest.mark.parametrize(
    ("warning", "came_to"),
    [(40, (130, False)), (20, (0, True))],
    ids=["a cancellation", "the limit itself"],
)
def test_what_comes_behind_the_warning_is_a_cancellation_until_the_limit(
    queue: Queue, warning: float, came_to: tuple[int, bool]
) -> None:
    twice = "n=0; trap 'n=$((n + 1)); touch told$n; [ $n -lt 2 ] || exit 130' TERM"
    files = a_job(
        queue, f"{twice}; {RESULT}; touch up; while :; do sleep 0.1; done", warning=warning
    )
    up, told = (files / "up").exists, (files / "told1").exists
    assert queue.allocation(number=signal.SIGUSR1, when=up, then=told) == came_to


def test_a_study_that_somebody_else_stopped_is_not_requeued(queue: Queue) -> None:
    a_job(queue, f"{RESULT}; exit 130")
    assert queue.allocation() == (130, False)


def test_allocations_without_a_result_end(queue: Queue) -> None:
    files = a_job(queue, "trap 'exit 130' TERM; touch up; while :; do sleep 0.1; done")
    requeued = []
    for _ in range(IDLE_ALLOCATIONS_MAX):
        (files / "up").unlink(missing_ok=True)
        _, again = queue.allocation(number=signal.SIGUSR1, when=(files / "up").exists)
        requeued.append(again)
    assert requeued == [True] * (IDLE_ALLOCATIONS_MAX - 1) + [False]
    assert "not requeued" in (files / "slurm-17.log").read_text()


def test_a_fault_is_tried_on_another_node_only_behind_a_result(queue: Queue) -> None:
    files = a_job(queue, f"[ -e spool.jsonl ] || {RESULT}; exit 3")
    assert queue.allocation() == (0, True)
    assert queue.allocation() == (3, False)
    assert "Exit code 3 and no new result" in (files / "slurm-17.log").read_text()


def test_a_script_sets_what_it_was_given_and_is_its_owners_alone(queue: Queue) -> None:
    files, planted = queue.directory.parent / "runs" / "study", queue.directory / "planted"
    files.mkdir(parents=True)
    planted.write_text("mine")
    for name in ("slurm.sh", "slurm.run.json"):
        (files / name).symlink_to(planted)
    a_job(queue, 'echo "$SWEEP_HOME" > said; cat "$0" >> said')
    assert queue.allocation() == (0, False)
    assert (files / "said").read_text() == f'{files.parents[1]}\n{{"it is": "one"}}\n'
    assert planted.read_text() == "mine"
    for name in ("slurm.sh", "slurm.run.json"):
        assert stat.S_IMODE((files / name).lstat().st_mode) == 0o600
        (files / name).chmod(0o644)
    # Nor does a file that others may read keep its readers.
    a_job(queue, "true")
    assert queue.allocation() == (0, False)
    for name in ("slurm.sh", "slurm.run.json"):
        assert stat.S_IMODE((files / name).lstat().st_mode) == 0o600


def test_an_allocation_is_asked_for_in_the_queues_words() -> None:
    asked = Allocation(
        limit_seconds=100_000,
        gpus="a100:2",
        options=("partition=gpu", "cpus-per-task=8", "--exclusive", "--mem=32G"),
    )
    assert asked.directives() == [
        "--time=1-03:46:00",
        "--gres=gpu:a100:2",
        "--partition=gpu",
        "--cpus-per-task=8",
        "--exclusive",
        "--mem=32G",
    ]
    assert asked.warning_seconds == slurm.WARNING_SECONDS


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"limit_seconds": 60}, "--with time must be at least 2m, got 60 s"),
        ({"options": ("a=1\nrm -rf /",)}, "is an option of sbatch"),
        ({"options": ("account=a\n#SBATCH --x",)}, "is an option of sbatch"),
        ({"options": ("; rm",)}, "is an option of sbatch"),
        ({"options": ('partition=a"b',)}, "is an option of sbatch"),
        ({"options": ("account=a b",)}, "is an option of sbatch"),
        ({"options": ("gres=gpu:2",)}, "ask for GPUs with --with gpus=2"),
        ({"options": ("--gpus-per-node=2",)}, "ask for GPUs with --with gpus=2"),
        ({"options": ("-G 2",)}, "ask for GPUs with --with gpus=2"),
    ],
)
def test_what_would_not_stand_in_a_scripts_head_is_refused(asked: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Allocation(**asked)


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        ("invalid partition specified: nope", InputError),
        ("Unable to contact slurm controller (connect failure)", EnvironmentFault),
    ],
)
def test_what_the_queue_refuses_is_said_in_its_words(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, refused: str, kind: type[Exception]
) -> None:
    monkeypatch.setenv("REFUSED", refused)
    with pytest.raises(kind) as caught:
        submit("", queue.directory / "any")
    assert str(caught.value) == f"sbatch: {refused}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("SWEEP_HOME", str(home))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SWEEP_STORAGE", raising=False)
    return home


TEXTS = "org/texts"
"""Of the hub, where nobody looks before the job runs."""
BAD: list[Any] = [
    (["cpu-dmo"], "did you mean 'cpu-demo'"),
    (["cpu-demo", "--partitoin", "x"], "--partitoin"),
    (["cpu-demo", "--trials", "0"], "trials must be at least 1"),
    (["cpu-demo", "--with", "time=soon"], "--with time: a duration is written like"),
    (["cpu-demo", "--data", "nope.jsonl"], "nope.jsonl"),
    (["cpu-demo", "--devices", "abc"], "--devices abc: name all, how many"),
    (["a10", "--devices", "0,2"], "name how many"),
    (["a10", "--devices", "4", "--with", "gpus=2"], "ask for as many"),
    (["cpu-demo", "--with", "partition="], "write it as partition=VALUE"),
    (["cpu-demo", "--with", "=x"], "write it as KEY=VALUE"),
    (["cpu-demo", "--devices", "0"], "--devices 0: a study needs a GPU"),
    (["cpu-demo", "--devices", "1"], "is for the CPU, which is one"),
    (["cpu-demo", "--from", "nosuch"], "no studies yet"),
    (["cpu-demo", "--from", "nosuch.jsonl"], "nosuch.jsonl"),
    (["cpu-demo", "--data", TEXTS, "--set", "data.tokenizer=nosuch"], "tokenizer 'nosuch'"),
    (["cpu-demo", "--model", "demmo"], "did you mean 'demo'"),
    (["cpu-demo", "--study", "../x"], "study name must be"),
    (["cpu-demo", "--with", "env=/nowhere"], "--with env=/nowhere"),
    (["cpu-demo", "--storage", "postgresql://u:secret@host/db"], "SWEEP_STORAGE"),
    ([], "SPACE"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=lambda value: " ".join(value)[:40])
def test_bad_input_is_refused_at_once_and_nothing_is_submitted(
    queue: Queue, home: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--on", "slurm", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "secret" not in err
    assert not queue.script.exists()
    assert list(home.iterdir()) == []


def test_without_a_queue_the_script_can_still_be_written(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(home))
    assert main(["run", "cpu-demo", "--on", "slurm"]) == 3
    assert "there is no sbatch here" in capsys.readouterr().err
    assert list(home.iterdir()) == []
    text, request = dry_run(capsys, "cpu-demo", "--rank", "8")
    assert request.storage == f"sqlite:///{home}/runs/sweep.db"
    assert (request.study, request.held) == ("cpu-demo-90cac3", {"lora_rank": 8})
    assert "--gres" not in text
    text, request = dry_run(capsys, "a10")
    assert "#SBATCH --gres=gpu:1\n" in text
    assert request.devices is None


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, RunRequest]:
    """Return the script of a job, and the request in it."""
    assert main(["run", "--on", "slurm", "--dry-run", *words]) == 0
    text = capsys.readouterr().out
    (request,) = re.findall(r"<<'REQUEST'\n(.*)\nREQUEST\n", text)
    return text, RunRequest.model_validate_json(request)


@pytest.mark.parametrize(
    ("words", "gres", "devices"),
    [
        (["--with", "gpus=4"], "4", "all"),
        (["--with", "gpus=a100:2"], "a100:2", "all"),
        (["--with", "gpus=2", "--devices", "1"], "2", "1"),
        (["--devices", "2"], "2", "2"),
        (["--set", "data_parallel=2"], "2", "all"),
    ],
)
def test_a_study_runs_on_all_gpus_that_the_queue_was_asked_for(
    home: Path, words: list[str], gres: str, devices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, request = dry_run(capsys, "a10", *words)
    assert f"--gres=gpu:{gres}\n" in text
    assert request.devices == devices


def test_a_study_on_the_cpu_names_no_gpu(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(capsys, "cpu-demo", "--with", "gpus=2")[1].devices is None


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not here")
def test_a_script_has_no_fault_that_shellcheck_knows(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = home / "job.sh"
    words = ["--with", "time=4h", "--with", "exclusive", "--rank", "8"]
    script.write_text(dry_run(capsys, "a10", *words)[0])
    done = subprocess.run(
        ["shellcheck", "--severity=style", str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_a_password_of_the_environment_does_not_stand_in_the_script(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWEEP_STORAGE", "postgresql://u:hunter2@host/db")
    text, request = dry_run(capsys, "cpu-demo")
    assert request.storage is None
    assert "hunter2" not in text


@pytest.mark.slow
def test_a_study_goes_through_several_allocations_with_nothing_lost_or_doubled(
    queue: Queue, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    words = ["cpu-demo", "--trials", "6", "--sampler", "random", "--no-confirm"]
    assert main(["run", *words, "--on", "slurm", "--with", "time=10m"]) == 0
    assert "Submitted study cpu-demo as job 17." in capsys.readouterr().out
    # The device is simulated; the command, the study and what stops them are not.
    program = f"{sys.executable} -P {ROOT}/tests/sweep/launching/replayed_sweep.py run"
    queue.script.write_text(queue.script.read_text().replace(" <<", f" {program} <<"))
    spool = home / "runs" / "cpu-demo" / "spool.jsonl"

    def has(results: int) -> bool:
        return spool.exists() and spool.read_text().count("\n") >= results

    warned = queue.allocation(number=signal.SIGUSR1, when=lambda: has(2))
    assert warned == (0, True), spool.with_name("slurm-17.log").read_text()
    # The node is lost: a queue that hears nothing of it any more starts the job anew.
    killed = queue.allocation(number=signal.SIGUSR2, when=lambda: has(4), limit=0.1)
    assert killed[1] is False
    assert queue.allocation(limit=120) == (0, False), spool.with_name("slurm-17.log").read_text()
    url = f"sqlite:///{home}/runs/sweep.db"
    study = read_study("cpu-demo", url=url, home=home / "runs")
    assert (study.running, study.holder) == ((), None)
    concluded = [record for record in study.records if record.verdict is not Verdict.LOST]
    assert len(concluded) == len({record.config for record in concluded}) == 6
    assert len(study.records) - len(concluded) <= 1, "what ran as the node was lost, and no more"
