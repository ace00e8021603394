"""Optuna's dashboard of a study: where it is installed, what it is told; else what is said."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

from search_spaces.errors import EnvironmentFault
from storage.reading import shown_storage
from sweep.cli import main
from sweep.terminal.dashboard import only_to_look_at
from tests.storage.builders import open_it, run_one


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
        ("PUT", "127.0.0.1:8080", "403"),
        ("DELETE", "127.0.0.1:8080", "403"),
        ("GET", "rebound.example:8080", "403"),
        ("GET", "", "403"),
    ],
)
def test_it_answers_this_machine_and_only_what_changes_nothing(
    method: str, host: str, status: str
) -> None:
    assert asked(only_to_look_at(anything), "/", method=method, host=host)[0] == status


def test_the_dashboard_shows_constraints_names_and_short_attributes(tmp_path: Path) -> None:
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
    shown = json.loads(body)
    assert shown["objective_names"] == ["tokens_per_second"]
    (trial,) = shown["trials"]
    assert trial["constraints"] == [-0.5]
    names = {attribute["key"] for attribute in trial["user_attrs"]}
    assert names == {"verdict", "tokens_per_second", "peak_gib"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    with open_it(f"sqlite:///{tmp_path}/runs/sweep.db", tmp_path / "runs") as study:
        run_one(study)
    return tmp_path


def test_without_the_dashboard_the_command_that_installs_it_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna_dashboard", None)
    assert main(["dashboard", "study"]) == EnvironmentFault.exit_code
    assert "pip install 'qlora-sweep[dashboard]'" in capsys.readouterr().err
    assert main(["dashboard", "studie"]) == 2
    assert "did you mean 'study'" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna_dashboard")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["dashboard", "study", "--port", str(port), "--no-browser"]) == 3
    assert f"port {port}: " in capsys.readouterr().err
