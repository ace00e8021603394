"""The command as it is typed: what is printed where, exit codes, and what is odd of the machine."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.storage.records import OutOfMemory
from qlora_sweep.sweep.cli import guarded
from qlora_sweep.sweep.paths import report_path, storage_url
from qlora_sweep.sweep.request import default_study_name
from qlora_sweep.sweep.terminal.console import ReaderGoneError
from tests.sweep.simulated_device import a_space
from tests.sweep.typed import Sweep

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("home")
COMMAND = f"{sys.executable} -c 'from qlora_sweep.sweep.cli import main; raise SystemExit(main())'"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line in bash, in which SWEEP stands for the command in a process of its own."""
    return subprocess.run(
        ["bash", "-c", line.replace("SWEEP", COMMAND)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["run", "--help"], {"torch", "optuna", "plotly", "numpy", "rich", "yaml"}),
        (["best", "study"], {"torch", "transformers", "peft", "bitsandbytes"}),
    ],
)
@pytest.mark.usefixtures("study")
def test_a_command_imports_nothing_large(words: list[str], heavy: set[str]) -> None:
    program = (
        f"import sys; from qlora_sweep.sweep.cli import main; code = main({words});"
        f"{'import qlora_sweep.sweep.study.session;' if words[0] == 'best' else ''}"
        f"heavy = {heavy} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)


OFFERS = "offers:\n- {provider: Me, date: 2026-11-21, source: me, usd_per_hour: {a10: 0.036}}\n"


def test_a_price_of_the_users_own_is_shown_and_one_that_is_not_right_hides_the_cost_alone(
    study: str, home: Path, sweep: Sweep
) -> None:
    (home / "runs" / "prices.yaml").write_text(OFFERS)
    assert "a10 Me at $0.04 an hour" in sweep("best", study).out
    (home / "runs" / "prices.yaml").write_text("offers: 7\n")
    code, out, err = sweep("best", study, "--json")
    assert (code, json.loads(out)["cost"]) == (0, None)
    assert "prices.yaml" in err


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["status", "study", "--watch"], "4 in "),
        ([], "Start or resume a study."),
        (["--version"], "sweep "),
    ],
)
@pytest.mark.usefixtures("study")
def test_results_go_to_stdout(words: list[str], shown: str, sweep: Sweep) -> None:
    code, out, _ = sweep(*words)
    assert code == 0
    assert shown in out


@pytest.mark.parametrize("command", ["gpus", "models", "presets"])
def test_a_list_as_json_is_one_document_with_what_the_table_says(
    command: str, sweep: Sweep
) -> None:
    names = [line.split()[0] for line in sweep(command).out.splitlines()[1:]]
    code, out, err = sweep(command, "--json")
    assert (code, err) == (0, "")
    assert [entry["name"] for entry in json.loads(out)[command]] == names


def test_the_report_is_written_where_it_is_expected_or_asked_for(
    study: str, home: Path, sweep: Sweep
) -> None:
    assert sweep("report", study).code == 0
    assert report_path(study) == home / "runs" / study / "report.html"
    assert report_path(study).read_text().startswith("<!")
    assert str(home / "page.html") in sweep("report", study, "-o", home / "page.html").out
    assert (home / "page.html").exists()
    assert sweep("report", study, "-o", "-").out.startswith("<!")
    assert not Path("-").exists()


def test_a_study_is_removed_once_somebody_said_so(
    study: str, home: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    job = home / "runs" / study / "launch" / "modal_app.py"
    job.parent.mkdir()
    job.touch()
    refused = sweep("rm", study)
    assert refused.code == 2
    assert "--yes" in refused.err
    for answer, is_there in (("\n", True), ("y\n", False)):
        terminal = io.StringIO(answer)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        code, out, err = sweep("rm", study)
        assert code == 0
        assert (home / "runs" / study).exists() is is_there
        assert (home / "runs" / f"sweep.db.{study}.lock").exists() is is_there
    assert "4 trials" in err
    assert str(job) in out
    assert sweep("rm", study, "--yes").code == 2


def test_a_study_in_which_nothing_fits_ends_with_1(home: Path, sweep: Sweep) -> None:
    from tests.storage.builders import open_it, run_one

    with open_it(f"sqlite:///{home}/runs/sweep.db", home / "runs") as study:
        run_one(study, OutOfMemory(stage="forward"))
    assert [sweep("best", "study", *more).code for more in ((), ("--json",))] == [1, 1]
    unverified = sweep("verify", "study", "--json")
    assert (unverified.code, json.loads(unverified.out)["ok"]) == (1, False)


def test_what_the_machine_lacks_ends_with_3_and_advice_before_anything_is_written(
    home: Path, sweep: Sweep
) -> None:
    refused = sweep("run", "a10")
    assert refused.code == 3
    assert "sweep doctor" in refused.err
    assert list(home.iterdir()) == []
    (home / "runs").write_text("a file where a directory should be")
    assert sweep("run", "cpu-demo").code == 3


def test_a_cluster_that_does_not_answer_ends_with_3_and_advice(home: Path, sweep: Sweep) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    refused = sweep("run", "cpu-demo", "--on", f"ray:{address}")
    assert refused.code == 3
    assert address in refused.err
    assert "ray start --head" in " ".join(refused.err.split())
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("place", ["local", "ray:auto", "ssh:me@no.such.host.invalid"])
def test_a_dry_run_says_what_would_run_and_starts_nothing(
    place: str, home: Path, sweep: Sweep
) -> None:
    code, out, _ = sweep("run", "cpu-demo", "--rank", "8", "--on", place, "--dry-run")
    assert (code, list(home.iterdir())) == (0, [])
    assert "Would start or resume study cpu-demo-90cac3 on" in out


def raising(error: BaseException) -> Any:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("not so"), 2, "not so"),
        (EnvironmentFault("no disk"), 3, "no disk"),
        (KeyboardInterrupt(), 130, "Interrupted"),
        (ReaderGoneError(), 0, ""),
        (OSError(24, "Too many open files"), 3, "Too many open files"),
        (PermissionError(13, "Permission denied", "/runs"), 3, "/runs"),
        (MemoryError(), 3, "memory"),
    ],
)
def test_every_error_has_its_exit_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(raising(error)) == code
    out, err = capsys.readouterr()
    assert (out, said in err, bool(err)) == ("", True, bool(said))
    assert not {"mistake", "Errno"} & set(err.split())


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("set -o pipefail; SWEEP gpus | true", 0, ""),
        ("SWEEP gpus >/dev/full", 3, "stdout: No space left on device"),
        ("SWEEP presets <&- >&- 2>&-", 3, ""),
        ("SWEEP plan a10 --from-file - <&-", 2, "stdin"),
        ("PYTHONIOENCODING=ascii SWEEP status", 0, ""),
    ],
)
def test_a_stream_that_is_gone_or_takes_nothing_is_no_mistake_of_ours(
    line: str, code: int, said: str, study: str
) -> None:
    done = shell(line)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert bool(said) or done.stderr.replace("No NVIDIA GPU here.\n", "") == ""
    assert "status" not in line or "study  a10  seven-billion" in done.stdout


def test_a_message_writes_out_what_would_work_unseen(sweep: Sweep) -> None:
    refused = sweep("plan", "a10\x1b[31m\u202e")
    assert refused.code == 2
    assert r"a10\x1b[31m\u202e" in refused.err
    assert refused.err.rstrip("\n").isprintable()


def test_a_home_that_may_not_be_searched_is_the_machines_fault(
    home: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    def refuse(path: Path, **options: Any) -> os.stat_result:
        if path.is_relative_to(home / "locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setenv("SWEEP_HOME", str(home / "locked"))
    monkeypatch.setattr(Path, "stat", refuse)
    refused = sweep("plan", "a10")
    assert refused.code == 3
    assert "Permission denied" in refused.err


def test_a_home_that_is_a_file_is_bad_input(
    home: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "notes").touch()
    monkeypatch.setenv("SWEEP_HOME", str(home / "notes"))
    refused = sweep("status")
    assert refused.code == 2
    assert str(home / "notes") in refused.err


@pytest.mark.parametrize(
    ("name", "known"),
    [("größe", "größe"), ("gro\u0308ße", "größe"), ("_mine", "mine"), ("a b", "a-b")],
)
def test_a_studys_name_keeps_the_letters_of_its_spaces(name: str, known: str) -> None:
    assert default_study_name(a_space().model_copy(update={"name": name}), {}) == known
    with pytest.raises(InputError, match="choose a name with --study"):
        default_study_name(a_space().model_copy(update={"name": "語" * 90}), {})


ONE_MODULE = """\
gpu: cpu
model: demo
budget_gib: 0.1
dimensions: {micro_batch_size: [1, 2]}
fixed: {target_modules: [q_pj]}
"""


@pytest.mark.parametrize(
    "words",
    [
        ["run", "mine.yaml"],
        ["plan", "a10", "--target-modules", "q_pj,v_proj", "--gpu", "t4", "--gpu", "h200"],
    ],
)
def test_a_module_that_is_not_there_is_bad_input(
    words: list[str], home: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    (home / "mine.yaml").write_text(ONE_MODULE)
    refused = sweep(*words)
    assert refused.code == 2
    assert "no linear module 'q_pj'; did you mean 'q_proj'?" in refused.err


@pytest.mark.integration
def test_ctrl_c_twice_while_a_plan_is_traced_ends_it() -> None:
    # A suite that was started in the background has SIGINT ignored, and hands that on.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{listen}; from qlora_sweep.sweep.cli import main; raise SystemExit(main())"
    not_shipped = "--target-modules=q_proj,v_proj"
    command = [sys.executable, "-c", program, "plan", "a10", not_shipped]
    with subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "structures traced" in line)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) in (130, -signal.SIGINT)


def test_where_studies_are_kept_may_stand_in_the_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert storage_url(None) == f"sqlite:///{home}/runs/sweep.db"
    for unset in ("SWEEP_HOME", "SWEEP_STORAGE"):
        monkeypatch.setenv(unset, "")
    assert storage_url(None) == "sqlite:///runs/sweep.db"
    monkeypatch.setenv("SWEEP_STORAGE", "postgresql://sweep@db/studies")
    assert storage_url(None) == "postgresql://sweep@db/studies"
    assert storage_url("sqlite:///typed.db") == "sqlite:///typed.db"
    monkeypatch.setenv("SWEEP_STORAGE", "mysql://me:s3cret@db/x")
    with pytest.raises(InputError, match=r"SWEEP_STORAGE: .*unknown database 'mysql'") as caught:
        storage_url(None)
    assert "s3cret" not in str(caught.value)
