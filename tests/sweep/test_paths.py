from __future__ import annotations

from pathlib import Path

import pytest

from search_spaces.errors import InputError
from sweep.paths import (
    default_storage,
    report_path,
    runs_directory,
    storage_url,
    worker_log_path,
)


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


def test_a_variable_stands_in_for_the_option_and_an_empty_one_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SWEEP_HOME", raising=False)
    monkeypatch.setenv("SWEEP_STORAGE", "postgresql://sweep@db/studies")
    assert storage_url(None) == "postgresql://sweep@db/studies"
    assert storage_url("sqlite:///typed.db") == "sqlite:///typed.db"
    monkeypatch.setenv("SWEEP_STORAGE", "")
    assert storage_url(None) == "sqlite:///runs/sweep.db"


def test_a_variable_that_is_no_database_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWEEP_STORAGE", "mysql://me:s3cret@db/x")
    with pytest.raises(InputError, match=r"SWEEP_STORAGE: .*unknown database 'mysql'") as caught:
        storage_url(None)
    assert "s3cret" not in str(caught.value)
