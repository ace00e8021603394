"""Optuna's dashboard of a study: where it is installed, what it is told; else what is said."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import pytest

from search_spaces.errors import EnvironmentFault
from storage.reading import shown_storage
from sweep.terminal.dashboard import only_to_look_at
from tests.storage.builders import open_it, run_one
from tests.sweep.conftest import Said


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


def test_without_the_dashboard_or_a_free_port_what_to_do_is_said(
    study: str, sweep: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
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
