"""Where a run's trials run, as it was typed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sweep.cli import main


def test_an_address_where_no_ray_answers_begins_no_study(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert main(["run", "cpu-demo", "--on", f"ray:{address}"]) == 3
    words = " ".join(capsys.readouterr().err.split())
    assert f"no Ray cluster answers at {address}: Connection refused" in words
    assert "`ray start --head`" in words
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_would_run_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    for place in ("local", "ray:auto", "ssh:me@no.such.host.invalid"):
        assert main(["run", "cpu-demo", "--rank", "8", "--on", place, "--dry-run"]) == 0
        assert "Would start or resume study cpu-demo-90cac3 on" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
