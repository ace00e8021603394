from __future__ import annotations

from pathlib import Path

import pytest

from search_spaces.errors import EnvironmentFault, InputError
from storage.reading import count_trials, list_studies, read_study
from storage.transfer import remove_study
from tests.storage.builders import open_it, run_one


def test_a_study_goes_with_its_files_and_others_stay(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sweep.db"
    for name in ("mine", "other"):
        with open_it(url, tmp_path, name=name) as study:
            run_one(study)
    (tmp_path / "mine" / "report.html").write_text("<!doctype html>")
    (tmp_path / "mine" / "slurm-17.log").touch()
    assert count_trials("mine", url=url) == 1
    removed = remove_study("mine", url=url, home=tmp_path)
    assert {path.name for path in removed.files} == {
        "spool.jsonl",
        "report.html",
        "slurm-17.log",
        "study.json",
    }
    assert removed.left == ()
    assert not (tmp_path / "mine").exists()
    assert [s.name for s in list_studies(url, tmp_path)] == ["other"]
    with pytest.raises(InputError, match="no study 'mine'"):
        count_trials("mine", url=url)
    with open_it(url, tmp_path, name="mine") as study:
        assert study.records() == ()


def test_what_is_not_the_studys_is_left_and_named(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sweep.db"
    with open_it(url, tmp_path, name="mine") as study:
        run_one(study)
    notes = tmp_path / "mine" / "notes.txt"
    notes.write_text("mine")
    assert remove_study("mine", url=url, home=tmp_path).left == (notes,)
    assert notes.exists()


def test_a_study_that_somebody_drives_is_not_removed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sweep.db"
    with open_it(url, tmp_path, name="mine") as study:
        run_one(study)
        with pytest.raises(EnvironmentFault, match="is driven by"):
            remove_study("mine", url=url, home=tmp_path)
    assert len(read_study("mine", url=url, home=tmp_path).records) == 1


def test_what_a_killed_process_had_not_finished_goes_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/sweep.db"
    with open_it(url, tmp_path) as study:
        run_one(study)
    for name in (".0123456789abcdef.sweep.tmp", ".mine.tmp"):
        (tmp_path / "study" / name).write_text("half")
    removed = remove_study("study", url=url, home=tmp_path)
    assert removed.left == (tmp_path / "study" / ".mine.tmp",)
