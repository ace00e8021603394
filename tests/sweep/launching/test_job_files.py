"""A study's jobs for rented machines go with the study, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweep.launching.job_files import job_directory, remove_jobs

WHEEL = "qlora_sweep-0.1.0-py3-none-any.whl"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    directory = job_directory(tmp_path / "mine")
    directory.mkdir(parents=True)
    for name in ("modal_app.py", "skypilot.yaml", "request.run.json", WHEEL):
        (directory / name).touch()
    return tmp_path / "mine"


def test_jobs_and_their_wheel_go_with_their_directory(study: Path) -> None:
    assert len(remove_jobs(study)) == 4
    assert not study.exists()
    assert remove_jobs(study) == ()


def test_what_somebody_laid_beside_a_job_stays(study: Path) -> None:
    (job_directory(study) / "notes.txt").touch()
    remove_jobs(study)
    assert [path.name for path in job_directory(study).iterdir()] == ["notes.txt"]


def test_a_link_in_the_place_of_jobs_is_not_followed(study: Path, tmp_path: Path) -> None:
    job_directory(study).rename(tmp_path / "elsewhere")
    job_directory(study).symlink_to(tmp_path / "elsewhere")
    assert remove_jobs(study) == ()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 4
