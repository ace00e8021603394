from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import EnvironmentFault, InputError
from sweep.cli import guarded, main
from sweep.predict.forecast import Forecaster
from sweep.running.replay import ReplayRunner
from sweep.study.driver import Driver
from sweep.study.tuner import tune
from sweep.terminal.console import ReaderGoneError
from tests.sweep.simulated_device import BUDGET, MODEL, a_study, train

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, on a machine that shows no GPU."""
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished study called ``study``."""
    runs = tmp_path_factory.mktemp("finished") / "runs"
    forecaster = Forecaster(model=MODEL, budget_bytes=BUDGET, violation=lambda _: None)
    with a_study(runs, trials=12) as study:
        tune(Driver(study, runner=ReplayRunner(otherwise=train), forecaster=forecaster))
    return runs


@pytest.fixture
def study(runs: Path, home: Path) -> str:
    """A finished study called ``study``, of this test alone."""
    shutil.copytree(runs, home / "runs")
    return "study"


def sweep(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a person does, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "from sweep.cli import main; raise SystemExit(main())", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


def test_help_answers_without_a_heavy_import() -> None:
    program = (
        "import sys; from sweep.cli import main; code = main(['run', '--help']);"
        "heavy = {'torch', 'optuna', 'plotly', 'numpy', 'rich', 'yaml'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)


def test_the_parent_process_never_imports_torch(study: str) -> None:
    program = (
        "import sys, sweep.study.session; from sweep.cli import main;"
        "code = main(['best', 'study']);"
        "heavy = {'torch', 'transformers', 'peft', 'bitsandbytes'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)


def test_the_best_as_json_is_one_document_and_nothing_else(
    study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["best", study, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert document["study"] == study
    assert document["gpu"] == {"name": "a10", "budget_bytes": BUDGET, "emulated_on": None}
    assert document["trials"]["total"] == 12
    assert document["best"]["measurement"]["tokens_per_second"] > 0
    assert {"model", "objective", "seconds", "tied", "fastest_by_class"} <= document.keys()


@pytest.mark.parametrize("command", [["best"], ["status"], ["report", "-o", "-"]])
def test_what_tokens_cost_is_shown_at_the_users_own_price(
    study: str, home: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (home / "runs" / "prices.yaml").write_text(
        "offers:\n- {provider: Me, date: 2026-11-21, source: me, usd_per_hour: {a10: 0.036}}\n"
    )
    assert main([command[0], study, *command[1:]]) == 0
    out = capsys.readouterr().out
    assert "per million tokens" in out
    assert "a10 Me at $0.04 an hour, as of 2026-11-21" in out


def test_a_price_list_that_is_not_right_hides_the_cost_and_nothing_else(
    study: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "runs" / "prices.yaml").write_text("offers: 7\n")
    assert main(["best", study, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["cost"] is None
    assert "no cost is shown: " in err
    assert "prices.yaml" in err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["best", "study"], "The fastest configuration measured"),
        (["status", "study"], "12 in "),
        (["status", "study", "--watch"], "12 in "),
        (["status"], "study  a10  seven-billion"),
        (["presets"], "cpu-demo"),
        (["gpus"], "NVIDIA A10"),
        (["models"], "mistral-7b-v0.3"),
        (["--help"], "Start or resume a study."),
        ([], "Start or resume a study."),
    ],
)
def test_results_go_to_stdout(
    study: str, arguments: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    assert shown in capsys.readouterr().out


def test_the_report_is_written_where_it_is_expected_or_asked_for(
    study: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", study]) == 0
    assert (home / "runs" / study / "report.html").read_text().startswith("<!")
    asked = home / "page.html"
    assert main(["report", study, "-o", str(asked)]) == 0
    assert asked.exists()
    assert str(asked) in capsys.readouterr().out
    assert main(["report", study, "-o", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!")
    assert not Path("-").exists()


def test_a_study_is_removed_once_somebody_said_so(
    study: str, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    job = home / "runs" / study / "launch" / "modal_app.py"
    job.parent.mkdir()
    job.touch()
    assert main(["rm", study]) == 2
    assert "say --yes" in capsys.readouterr().err
    for answer, is_there in (("\n", True), ("y\n", False)):
        terminal = io.StringIO(answer)
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        assert main(["rm", study]) == 0
        assert (home / "runs" / study).exists() is is_there
    out, err = capsys.readouterr()
    assert "Remove study 'study' with 12 trials and its files? [y/N]" in err
    assert "Removed study study: 12 trials" in out
    assert "spool.jsonl" in out
    assert f"Removed {job}" in out
    assert "Left " not in out
    assert main(["rm", study, "--yes"]) == 2
    assert "no study 'study'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["gpus", "models", "presets"])
def test_a_list_as_json_is_one_document_with_what_the_table_says(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert main([command, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [entry["name"] for entry in json.loads(out)[command]] == names


def test_the_status_as_json_is_of_all_studies_or_of_one(
    study: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["studies"]
    assert main(["status", study, "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert line["study"] == one["study"] == study
    assert line["trials"] == one["trials"]["total"] == 12
    assert line["best"]["number"] == one["best"]["number"]
    assert line["driven_by"] is one["driven_by"] is None
    assert one["running"] == []


def test_a_study_in_which_nothing_fits_ends_with_1(home: Path) -> None:
    forecaster = Forecaster(model=MODEL, budget_bytes=1, violation=lambda _: None)
    baseline = {"micro_batch_size": 32, "checkpoint_fraction": 0.0}
    with a_study(home / "runs", trials=1, baseline=baseline) as study:
        tune(Driver(study, runner=ReplayRunner(otherwise=train), forecaster=forecaster))
    assert main(["best", "study"]) == 1
    assert main(["best", "study", "--json"]) == 1


def test_a_gpu_preset_without_a_gpu_ends_with_3_and_advice(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "a10"]) == 3
    assert "sweep doctor" in capsys.readouterr().err
    assert list(home.iterdir()) == []


def test_a_home_that_cannot_be_written_ends_with_3(home: Path) -> None:
    (home / "runs").write_text("a file where a directory should be")
    assert main(["run", "cpu-demo"]) == 3


def raising(error: BaseException) -> Any:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("not so"), 2, "error: not so\n"),
        (EnvironmentFault("no disk"), 3, "error: no disk\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
        (ReaderGoneError(), 0, ""),
        (OSError(24, "Too many open files"), 3, "Too many open files: raise the limit"),
        (OSError(28, "No space left on device", "/x"), 3, "/x: No space left on device: free some"),
        (PermissionError(13, "Permission denied", "/runs"), 3, "/runs: Permission denied"),
        (MemoryError(), 3, "memory is used up"),
    ],
)
def test_every_error_has_its_exit_code(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(raising(error)) == code
    out, err = capsys.readouterr()
    assert (out, said in err, bool(err)) == ("", True, bool(said))
    assert not {"mistake", "Errno"} & set(err.split())


def test_a_mistake_of_ours_leaves_a_traceback_in_a_file_and_no_password_anywhere(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RuntimeError("cannot reach postgresql://me:hunter2@db/sweep")
    assert guarded(raising(error)) == 4
    err = capsys.readouterr().err
    (log,) = (home / "runs" / "crashes").iterdir()
    assert str(log) in err
    assert "RuntimeError" in log.read_text()
    assert "Traceback" not in err
    assert "Traceback" in log.read_text()
    assert "hunter2" not in err + log.read_text()


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -c 'from sweep.cli import main; raise SystemExit(main())' gpus"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | true"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_still_shows_the_results(
    study: str, home: Path, encoding: str
) -> None:
    done = sweep("status", SWEEP_HOME=str(home), PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert "study  a10  seven-billion" in done.stdout


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">/dev/full", 3, "error: cannot write to stdout: No space left on device\n"),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
    ],
)
def test_a_stream_that_takes_nothing_is_no_mistake_of_ours(
    redirection: str, code: int, said: str
) -> None:
    command = f"{sys.executable} -c 'from sweep.cli import main; raise SystemExit(main())' gpus"
    done = subprocess.run(
        ["bash", "-c", f"{command} {redirection}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.replace("No NVIDIA GPU here.\n", "") == said


def test_the_doctor_checks_this_machine(home: Path) -> None:
    done = sweep("doctor", SWEEP_HOME=str(home))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    torch" in done.stdout
    assert "cpu-demo" in done.stdout
