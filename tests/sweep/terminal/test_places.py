"""Where a run's trials run, as it was typed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sweep.cli import main


def refused(capsys: pytest.CaptureFixture[str], *options: str, code: int) -> str:
    assert main(["run", "cpu-demo", *options]) == code
    out, error = capsys.readouterr()
    assert out == ""
    return " ".join(error.split())


def test_cards_and_a_cluster_are_not_both_to_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    words = refused(capsys, "--devices", "2", "--on", "ray:auto", code=2)
    assert "--devices and --on ray:auto" in words


@pytest.mark.parametrize("address", ["everywhere", "ray://10.0.0.1:10001", ""])
def test_what_is_no_cluster_is_bad_input(capsys: pytest.CaptureFixture[str], address: str) -> None:
    assert "--on" in refused(capsys, "--on", f"ray:{address}", code=2)


def test_an_address_where_no_ray_answers_begins_no_study(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    words = refused(capsys, "--on", f"ray:{address}", code=3)
    assert f"no Ray cluster answers at {address}: Connection refused" in words
    assert "`ray start --head`" in words
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "nonsense"], "unknown place"),
        (["--on", "slrum"], "did you mean 'slurm'"),
        (["--on", "ssh"], "--on must be ssh:USER@HOST[:PORT], got 'ssh'"),
        (["--on", "slurm:x"], "--on must be slurm, got 'slurm:x'"),
        (["--on", "local", "--with", "time=4h"], "local has no such setting; it has none"),
        (["--on", "modal", "--with", "cloud=aws"], "it has volume, price, prices"),
        (["--on", "skypilot", "--with", "spot"], "write it as spot=VALUE"),
        (["--on", "slurm", "--with", "mem=1", "--with", "mem=2"], "given twice"),
    ],
)
def test_a_place_that_is_none_is_bad_input(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refused(capsys, *words, code=2)


def test_a_dry_run_says_what_would_run_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    for place in ("local", "ray:auto", "ssh:me@no.such.host.invalid"):
        assert main(["run", "cpu-demo", "--rank", "8", "--on", place, "--dry-run"]) == 0
        assert "Would start or resume study cpu-demo-90cac3 on" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
