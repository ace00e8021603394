"""`sweep run --on slurm`: the script that is handed to a stand-in for sbatch, and really run."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.storage.reading import read_study
from qlora_sweep.storage.records import Verdict
from qlora_sweep.storage.study import open_study
from qlora_sweep.sweep.cli import main
from qlora_sweep.sweep.launching.slurm import (
    IDLE_ALLOCATIONS_MAX,
    WARNING_SECONDS,
    Allocation,
    job_script,
    submit,
)
from qlora_sweep.sweep.request import RunRequest
from tests.storage.builders import a_definition
from tests.sweep.launching.rentals import a_program

ROOT = Path(__file__).parents[3]
PROGRAMS = {
    "sbatch": """for last; do :; done
if [ -n "$REFUSED" ]; then echo "sbatch: error: $REFUSED" >&2; exit 1; fi
cp "$last" "$QUEUE/script"; echo "17;cluster" """,
    "scontrol": '[ "$1 $2" = "requeue 17" ] && touch "$QUEUE/requeued"',
}
RESULT = "echo result >> spool.jsonl"
LOOP = "touch up; while :; do sleep 0.1; done"


class Queue:
    """Runs allocation after allocation of one job, as SLURM would."""

    def __init__(self, home: Path) -> None:
        self.script, self.files = home / "script", home / "runs" / "study"
        self._requeued = home / "requeued"

    def submit(
        self, program: str, *, warning: float = 3, request: RunRequest | None = None
    ) -> None:
        """Submit a job that runs a shell program in place of a study."""
        script = job_script(
            "study",
            Allocation(),
            python=sys.executable,
            request='{"it is": 1}' if request is None else request.model_dump_json(),
            files=self.files,
        )
        command = shlex.join(["bash", "-c", f"cd '{self.files}'; {program}"])
        script = script.replace(f" {WARNING_SECONDS} <<", f" {warning} {command} <<")
        assert submit(script, self.files / "slurm.sh") == "17"

    def allocation(self, *signals: tuple[int, Any], limit: float = 120.0) -> tuple[int, bool]:
        """Run the script once; return its exit code and whether it asked to be requeued.

        Args:
            signals: each that the batch shell, and nothing else of the job, is sent once a file is
                there, or a condition holds.
            limit: seconds after which all of the job is killed, as with its node.
        """
        self._requeued.unlink(missing_ok=True)
        with (self.files / "slurm-17.log").open("ab") as output:
            job = subprocess.Popen(
                ["bash", str(self.script)],
                stdout=output,
                stderr=output,
                env={**os.environ, "SLURM_JOB_ID": "17"},
                start_new_session=True,
            )
        code, children = -1, Path(f"/proc/{job.pid}/task/{job.pid}/children")
        with contextlib.suppress(subprocess.TimeoutExpired):
            for number, when in signals:
                until = when if callable(when) else (self.files / when).exists
                while not until() and job.poll() is None:
                    time.sleep(0.02)
                job.send_signal(number)
            code = job.wait(limit)
        for process in [*map(int, children.read_text().split()), job.pid] if code < 0 else ():
            os.killpg(process, signal.SIGKILL)
        job.wait()
        (self.files / "up").unlink(missing_ok=True)
        return code, self._requeued.exists()

    @property
    def log(self) -> str:
        return (self.files / "slurm-17.log").read_text()


@contextlib.contextmanager
def driven_elsewhere(study: str, *, home: Path) -> Iterator[None]:
    """Let another driver have a study."""
    opened = open_study(
        study,
        url=f"sqlite:///{home}/sweep.db",
        definition=a_definition(),
        sampler=optuna.samplers.RandomSampler(),
        environment={},
        home=home,
    )
    with opened:
        yield


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        a_program(tmp_path / "bin" / name, text)
    variables = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "QUEUE": str(tmp_path),
        "REFUSED": "",
        "PYTHONPATH": str(ROOT),
        "SWEEP_HOME": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SWEEP_STORAGE", raising=False)
    monkeypatch.chdir(tmp_path)
    return Queue(tmp_path)


WARNED, CANCELLED = (signal.SIGUSR1, "up"), (signal.SIGTERM, "up")
TWICE = "n=0; trap 'n=$((n + 1)); touch told$n; [ $n -lt 2 ] || exit 130' TERM"


@pytest.mark.parametrize(
    ("program", "warning", "signals", "came_to"),
    [
        ("exit 0", 3, (), (0, False)),
        ("exit 2", 3, (), (2, False)),
        # Near its limit, whether the study stops or has to be killed.
        (f"trap '{RESULT}; exit 130' TERM; {LOOP}", 3, (WARNED,), (0, True)),
        (f"trap 'echo asked >> spool.jsonl' TERM; {LOOP}", 3, (WARNED,), (0, True)),
        # Cancelled: the job, the study alone, and behind the warning, but not at the limit.
        (f"trap 'exit 130' TERM; {RESULT}; {LOOP}", 3, (CANCELLED,), (130, False)),
        (f"{RESULT}; exit 130", 3, (), (130, False)),
        (f"{TWICE}; {RESULT}; {LOOP}", 40, (WARNED, (signal.SIGTERM, "told1")), (130, False)),
        (f"{TWICE}; {RESULT}; {LOOP}", 20, (WARNED, (signal.SIGTERM, "told1")), (0, True)),
        # A fault is tried on another node only behind a result.
        (f"{RESULT}; exit 3", 3, (), (0, True)),
        ("exit 3", 3, (), (3, False)),
    ],
)
def test_a_job_is_requeued_where_another_allocation_is_of_use(
    queue: Queue, program: str, warning: float, signals: Any, came_to: tuple[int, bool]
) -> None:
    queue.submit(program, warning=warning)
    assert queue.allocation(*signals) == came_to


def test_allocations_without_a_result_end(queue: Queue) -> None:
    queue.submit(f"trap 'exit 130' TERM; {LOOP}")
    requeued = [queue.allocation(WARNED)[1] for _ in range(IDLE_ALLOCATIONS_MAX)]
    assert requeued == [True] * (IDLE_ALLOCATIONS_MAX - 1) + [False]
    assert "not requeued" in queue.log


def test_a_second_job_of_a_study_that_is_driven_is_not_requeued(queue: Queue) -> None:
    home = queue.files.parent
    with driven_elsewhere("study", home=home):
        # The spool grows meanwhile, by the results of the other.
        queue.submit(f"{RESULT}; exit 3", request=RunRequest(space="cpu-demo", study="study"))
        assert queue.allocation() == (3, False)
    assert "is driven by" in queue.log
    assert queue.allocation() == (0, True)


def test_a_script_and_its_request_are_their_owners_alone_and_no_link_is_followed(
    queue: Queue, tmp_path: Path
) -> None:
    planted, names = tmp_path / "planted", ("slurm.sh", "slurm.run.json")
    queue.files.mkdir(parents=True)
    planted.write_text("mine")
    for name in names:
        (queue.files / name).symlink_to(planted)
    for _ in range(2):
        queue.submit('echo "$SWEEP_HOME" > said; cat "$0" >> said')
        assert queue.allocation() == (0, False)
        for name in names:
            assert stat.S_IMODE((queue.files / name).lstat().st_mode) == 0o600
            # Nor does a file that others may read keep its readers.
            (queue.files / name).chmod(0o644)
    assert (queue.files / "said").read_text() == f'{tmp_path}\n{{"it is": 1}}\n'
    assert planted.read_text() == "mine"


def test_an_allocation_is_asked_for_in_the_queues_words() -> None:
    options = ("partition=gpu", "--exclusive", "--mem=32G")
    asked = Allocation(limit_seconds=100_000, gpus="a100:2", options=options)
    first = ["--time=1-03:46:00", "--gres=gpu:a100:2"]
    assert asked.directives() == [*first, "--partition=gpu", "--exclusive", "--mem=32G"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"limit_seconds": 60}, "at least 2m, got 60 s"),
        ({"options": ("a=1\nrm -rf /",)}, "is an option of sbatch"),
        ({"options": ('partition=a"b',)}, "is an option of sbatch"),
        ({"options": ("gres=gpu:2",)}, "--with gpus=2"),
        ({"options": ("-G 2",)}, "--with gpus=2"),
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
        submit("", queue.files / "any")
    assert str(caught.value) == f"sbatch: {refused}"


BAD: list[Any] = [
    (["cpu-demo", "--with", "time=soon"], "--with time: a duration is written like"),
    (["cpu-demo", "--devices", "abc"], "--devices abc: name all, how many"),
    (["a10", "--devices", "4", "--with", "gpus=2"], "ask for as many"),
    (["cpu-demo", "--devices", "1"], "is for the CPU, which is one"),
    (["cpu-demo", "--from", "nosuch"], "no studies yet"),
    (["cpu-demo", "--data", "org/texts", "--set", "data.tokenizer=nosuch"], "tokenizer 'nosuch'"),
    (["cpu-demo", "--with", "env=/nowhere"], "--with env=/nowhere"),
    (["cpu-demo", "--storage", "postgresql://u:secret@host/db"], "SWEEP_STORAGE"),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=lambda value: " ".join(value)[:40])
def test_bad_input_is_refused_at_once_and_nothing_is_submitted(
    queue: Queue, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--on", "slurm", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "secret" not in err
    assert not queue.script.exists()
    assert not queue.files.parent.exists()


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, RunRequest]:
    """Return the script of a job, and the request in it."""
    assert main(["run", "--on", "slurm", "--dry-run", *words]) == 0
    text = capsys.readouterr().out
    (request,) = re.findall(r"<<'REQUEST'\n(.*)\nREQUEST\n", text)
    return text, RunRequest.model_validate_json(request)


def test_without_a_queue_the_script_can_still_be_written(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(queue.files))
    assert main(["run", "cpu-demo", "--on", "slurm"]) == 3
    assert "there is no sbatch here" in capsys.readouterr().err
    assert not queue.files.parent.exists()
    _, request = dry_run(capsys, "cpu-demo", "--rank", "8")
    assert request.storage == f"sqlite:///{queue.files.parent}/sweep.db"
    assert (request.study, request.fixed_settings) == ("cpu-demo-90cac3", {"lora_rank": 8})
    # A password of the environment does not stand in the script.
    monkeypatch.setenv("SWEEP_STORAGE", "postgresql://u:hunter2@host/db")
    text, request = dry_run(capsys, "cpu-demo")
    assert request.storage is None
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("words", "gres", "devices"),
    [
        (["a10"], "1", None),
        (["a10", "--with", "gpus=a100:2"], "a100:2", "all"),
        (["a10", "--with", "gpus=2", "--devices", "1"], "2", "1"),
        (["a10", "--set", "data_parallel=2"], "2", "all"),
        (["cpu-demo"], None, None),
        (["cpu-demo", "--with", "gpus=2"], "2", None),
    ],
)
@pytest.mark.usefixtures("queue")
def test_a_study_runs_on_all_gpus_that_the_queue_was_asked_for(
    words: list[str], gres: str | None, devices: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text, request = dry_run(capsys, *words)
    assert re.findall(r"--gres=gpu:(.*)", text) == ([] if gres is None else [gres])
    assert request.devices == devices


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not here")
@pytest.mark.usefixtures("queue")
def test_a_script_has_no_fault_that_shellcheck_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "job.sh"
    words = ["--with", "time=4h", "--with", "exclusive", "--rank", "8"]
    script.write_text(dry_run(capsys, "a10", *words)[0])
    command = ["shellcheck", "--severity=style", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.integration
def test_a_study_goes_through_several_allocations_with_nothing_lost_or_doubled(
    queue: Queue, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["cpu-demo", "--study", "study", "--trials", "6", "--sampler", "random", "--no-confirm"]
    assert main(["run", *words, "--on", "slurm", "--with", "time=10m"]) == 0
    assert "Submitted study study as job 17." in capsys.readouterr().out
    # The device is simulated; the command, the study and what stops them are not.
    program = f"{sys.executable} -P {ROOT}/tests/sweep/launching/replayed_sweep.py run"
    queue.script.write_text(queue.script.read_text().replace(" <<", f" {program} <<"))
    spool = queue.files / "spool.jsonl"

    def has(results: int) -> bool:
        return spool.exists() and spool.read_text().count("\n") >= results

    assert queue.allocation((signal.SIGUSR1, lambda: has(2))) == (0, True), queue.log
    # The node is lost: a queue that hears nothing of it any more starts the job anew.
    assert queue.allocation((signal.SIGCONT, lambda: has(4)), limit=0) == (-1, False), queue.log
    assert queue.allocation() == (0, False), queue.log
    home = queue.files.parent
    study = read_study("study", url=f"sqlite:///{home}/sweep.db", home=home)
    assert (study.running, study.holder) == ((), None)
    concluded = [record for record in study.records if record.verdict is not Verdict.LOST]
    assert len(concluded) == len({record.config for record in concluded}) == 6
    assert len(study.records) - len(concluded) <= 1, "what ran as the node was lost, and no more"
