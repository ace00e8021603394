"""``sweep report``: one study's page, several GPUs beside each other, or recorded trials."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.search_spaces.gpus import gpu_catalogue
from qlora_sweep.search_spaces.models import shipped_models
from qlora_sweep.search_spaces.presets import preset_texts
from qlora_sweep.storage.reading import shown_storage
from qlora_sweep.sweep.study import recorded
from qlora_sweep.sweep.terminal import options
from qlora_sweep.sweep.terminal.dashboard import only_to_look_at
from tests.storage.builders import fits, open_it, run_one
from tests.sweep.typed import Sweep

SURFACE = Path(__file__).parents[2] / "data" / "surfaces" / "mistral-7b-v0.3_h200.jsonl"
RECORDED = "Recorded on an NVIDIA H200, 2026-11-21: nothing is measured now."


def test_a_study_of_recorded_trials_finds_the_best_of_them_and_says_what_it_is(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setattr(recorded, "PAUSE_SECONDS", 0)
    held = ("--rank", "16", "--target-modules", "qv", "--on", f"recorded:{SURFACE}")
    code, out, err = sweep("run", "a10", *held, "--study", "r", "--json")
    assert code == 0
    assert RECORDED in err
    assert "starts the worker" not in err
    document = json.loads(out)
    assert round(document["best"]["measurement"]["tokens_per_second"]) == 17933
    # One recorded run of each says nothing of how sure that is.
    ratio = pytest.approx(2.135, abs=0.001)
    assert document["gain"]["measured"] == {"low": None, "high": None, "ratio": ratio}
    assert "sweep confirm" not in sweep("best", "r").out


def test_a_surface_has_a_report_of_all_its_trials(
    tmp_path: Path, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    path = tmp_path / "runs" / "mistral-7b-v0.3_h200" / "report.html"
    assert sweep("report", SURFACE).out.strip() == str(path)
    page = path.read_text(encoding="utf-8")
    assert "Mistral-7B-v0.3 on an H200: 246 trials" in page
    assert RECORDED in page
    # What ran out needs more than the cap it was recorded under, not more than all of the GPU.
    assert "44.00 GiB" in page


# What a shell completes.

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from qlora_sweep.sweep.cli import main
try:
    main()
finally:
    sys.stderr.write(','.join({'torch', 'optuna', 'numpy', 'rich'} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [("sweep best st", "study"), ("sweep run a10 --target-m", "--target-modules")],
)
def test_names_and_settings_complete_without_a_heavy_import(
    words: str, completed: str, study: str
) -> None:
    asked = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_SWEEP_COMPLETE": "complete_bash",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **asked},
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == ([completed], "")


def test_what_completes_is_what_there_is() -> None:
    assert options.presets() == sorted(preset_texts())
    assert options.gpus() == list(gpu_catalogue())
    assert options.models() == sorted(model.name for model in shipped_models())
    complete = options.completed(options.presets, options.gpus)
    assert complete("a100") == ["a100-40gb", "a100-80gb", "a100-80gb-pcie"]


def test_studies_of_the_named_database_complete_where_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_it(f"sqlite:///{tmp_path}/other.db", tmp_path, name="night").close()
    monkeypatch.setenv("SWEEP_STORAGE", f"sqlite:///{tmp_path}/other.db")
    assert options.studies() == ["night"]
    # A server is not asked at every press of a key.
    monkeypatch.setenv("SWEEP_STORAGE", "postgresql://me:s3cret@127.0.0.1:1/studies")
    assert options.studies() == []
    monkeypatch.delenv("SWEEP_STORAGE")
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path / "home"))
    assert options.studies() == []
    (tmp_path / "home" / "runs").mkdir(parents=True)
    (tmp_path / "home" / "runs" / "sweep.db").write_text("no database")
    assert options.studies() == []
    assert [path.name for path in (tmp_path / "home" / "runs").iterdir()] == ["sweep.db"]


# Optuna's dashboard of a study: where it is installed, what it is told; else what is said.


def asked(application: Any, path: str, *, method: str = "GET", host: str = "127.0.0.1:8080") -> Any:
    """Return the status and the body that an application answers with."""
    environ: dict[str, Any] = {"PATH_INFO": path, "REQUEST_METHOD": method, "HTTP_HOST": host}
    setup_testing_defaults(environ)
    status: list[str] = []
    body = application(environ, lambda line, headers, *_: status.append(line))
    return status[0].split()[0], b"".join(body)


def anything(environ: Any, start: Callable[..., Any]) -> list[bytes]:
    start("200 OK", [])
    return [b"served"]


@pytest.mark.parametrize(
    ("method", "host", "status"),
    [
        ("GET", "127.0.0.1:8080", "200"),
        ("HEAD", "localhost:8080", "200"),
        ("POST", "127.0.0.1:8080", "403"),
        ("GET", "rebound.example:8080", "403"),
        ("GET", "", "403"),
    ],
)
def test_it_answers_this_machine_and_only_what_changes_nothing(
    method: str, host: str, status: str
) -> None:
    assert asked(only_to_look_at(anything), "/", method=method, host=host)[0] == status


def test_the_dashboard_shows_a_studys_trials(tmp_path: Path) -> None:
    optuna_dashboard = pytest.importorskip("optuna_dashboard")
    url = f"sqlite:///{tmp_path}/sweep.db"
    with open_it(url, tmp_path) as study:
        run_one(study, batch=2)
    with shown_storage("study", url=url) as storage:
        application = only_to_look_at(optuna_dashboard.wsgi(storage))
        number = storage.get_study_id_from_name("study")
        status, body = asked(application, f"/api/studies/{number}")
        page, _ = asked(application, f"/dashboard/studies/{number}")
    assert (status, page) == ("200", "200")
    assert json.loads(body)["trials"][0]["constraints"] == [-0.5]


def test_without_the_dashboard_or_a_free_port_what_to_do_is_said(
    study: str, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = sweep("dashboard", "studie")
    assert (refused.code, "did you mean 'study'" in refused.err) == (2, True)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "optuna_dashboard", None)
        refused = sweep("dashboard", study)
    assert refused.code == EnvironmentFault.exit_code
    assert "pip install 'qlora-sweep[dashboard]'" in refused.err
    pytest.importorskip("optuna_dashboard")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = sweep("dashboard", study, "--port", str(port), "--no-browser")
    assert (refused.code, f"port {port}: " in refused.err) == (3, True)


# What commands say of a database in which not everything can be read.


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Studies of which one is whole, one has a trial of an unknown verdict, one no definition."""
    runs = tmp_path_factory.mktemp("made") / "runs"
    for name in ("whole", "odd", "broken"):
        with open_it(f"sqlite:///{runs}/sweep.db", runs, name=name) as study:
            for speed, batch in ((1000.0, 1), (2000.0, 2)):
                run_one(study, fits(speed), batch=batch)
    trial = "SELECT trial_id FROM trials WHERE study_id = 2 AND number = 1"
    unknown = """replace(value_json, '"fits"', '"melted"')"""
    told = f"{unknown} WHERE key = 'record' AND trial_id = ({trial})"
    with closing(sqlite3.connect(runs / "sweep.db")) as connection, connection:
        connection.execute(f"UPDATE trial_user_attributes SET value_json = {told}")
        connection.execute(
            "UPDATE study_user_attributes SET value_json = '7' WHERE key = 'definition' "
            "AND study_id = 3"
        )
    return runs


@pytest.fixture
def runs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    return Path(shutil.copytree(made, tmp_path / "runs"))


def test_status_lists_what_can_be_read_and_says_what_cannot(runs: Path, sweep: Sweep) -> None:
    code, out, _ = sweep("status")
    assert code == 0
    assert "Study 'broken' cannot be read: definition" in out
    assert "Study 'odd'" not in out, "it is read but for one trial"
    assert "2,000 tokens/s" in next(line for line in out.splitlines() if line.startswith("whole"))
    whole, odd, broken = json.loads(sweep("status", "--json").out)["studies"]
    assert (whole["trials"], whole["best"]["number"], whole["unreadable"]) == (2, 1, None)
    assert (odd["best"]["number"], odd["unreadable"]) == (0, None)
    assert (broken["best"], broken["trials"]) == (None, 2)
    assert broken["unreadable"]
    assert whole.keys() == broken.keys()


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("command", ["best", "status", "report", "export", "confirm"])
def test_a_study_that_cannot_be_read_is_one_message(command: str, sweep: Sweep) -> None:
    refused = sweep(command, "broken")
    assert refused.code == 2
    assert "'broken' cannot be read: definition" in " ".join(refused.err.split())


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("command", ["best", "report"])
def test_a_trial_that_cannot_be_read_is_left_out_and_named(command: str, sweep: Sweep) -> None:
    read = sweep(command, "odd")
    assert read.code == 0
    assert "trial 1: " in " ".join(read.err.split())


def test_a_name_that_leads_elsewhere_is_shown_harmless_and_written_nowhere(
    runs: Path, sweep: Sweep
) -> None:
    with closing(sqlite3.connect(runs / "sweep.db")) as connection, connection:
        for before, after in (("whole", "../x"), ("broken", "\x1b[31mred")):
            connection.execute(
                "UPDATE studies SET study_name = ? WHERE study_name = ?", [after, before]
            )
    code, out, _ = sweep("status")
    assert (code, "\x1b" in out) == (0, False)
    refused = sweep("report", "../x")
    assert (refused.code, "add -o FILE" in refused.err) == (2, True)
    assert not (runs.parent / "x").exists()
    assert sweep("best", "../x").code == 0
