from __future__ import annotations

from pathlib import Path

import pytest

from sweep.paths import default_storage, report_path, runs_directory, worker_log_path
from sweep.terminal.console import table


def test_a_home_moves_everything_of_every_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    assert default_storage() == f"sqlite:///{tmp_path}/runs/sweep.db"
    assert report_path("night") == tmp_path / "runs" / "night" / "report.html"
    assert worker_log_path("night") == tmp_path / "runs" / "night" / "worker.log"


@pytest.mark.parametrize("home", [None, ""])
def test_without_a_home_runs_are_kept_here(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWEEP_HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("SWEEP_HOME", home)
    assert runs_directory() == Path("runs")
    assert default_storage() == "sqlite:///runs/sweep.db"


def test_a_table_is_aligned_and_has_no_trailing_blanks() -> None:
    text = table(("name", "what"), [("a", "first"), ("longer", "")])
    assert text.splitlines() == ["name    what", "a       first", "longer"]
