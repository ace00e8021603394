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
    words = refused(capsys, "--cards", "2", "--ray", "auto", code=2)
    assert "--cards and --ray are both given" in words


@pytest.mark.parametrize("address", ["everywhere", "ray://10.0.0.1:10001", ""])
def test_what_is_no_cluster_is_bad_input(capsys: pytest.CaptureFixture[str], address: str) -> None:
    assert "--ray" in refused(capsys, "--ray", address, code=2)


def test_an_address_where_no_ray_answers_begins_no_study(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    words = refused(capsys, "--ray", address, code=3)
    assert f"no Ray cluster answers at {address}: Connection refused" in words
    assert "`ray start --head`" in words
    assert not list(tmp_path.iterdir())
