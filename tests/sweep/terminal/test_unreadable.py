"""What commands say of a database in which not everything can be read."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from storage.definition import UnreadableStudy
from storage.reading import list_studies
from sweep.terminal.summary import studies_text
from tests.storage.builders import fits, open_it, run_one
from tests.sweep.conftest import Said

Sweep = Callable[..., Said]


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
    assert "Study 'odd' cannot be read: trial 1: " in out
    assert "2,000 tokens/s" in next(line for line in out.splitlines() if line.startswith("whole"))
    whole, odd, broken = json.loads(sweep("status", "--json").out)["studies"]
    assert (whole["trials"], whole["best"]["number"], whole["unreadable"]) == (2, 1, None)
    for line in (odd, broken):
        assert (line["best"], line["trials"]) == (None, 2)
        assert line["unreadable"]
    assert whole.keys() == broken.keys()
    # Where none can be read, the table is one all the same.
    studies = list_studies(f"sqlite:///{runs}/sweep.db", runs)
    unreadable = [study for study in studies if isinstance(study, UnreadableStudy)]
    assert "cannot be read" in studies_text(unreadable, width=80)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("command", ["best", "status", "report", "export", "confirm"])
@pytest.mark.parametrize(("study", "words"), [("broken", "definition"), ("odd", "trial 1: ")])
def test_a_study_that_cannot_be_read_is_one_message(
    command: str, study: str, words: str, sweep: Sweep
) -> None:
    options = ["--format", "json"] if command == "export" else []
    refused = sweep(command, study, *options)
    assert refused.code == 2
    assert f"study '{study}' cannot be read: {words}" in " ".join(refused.err.split())
    assert "Traceback" not in refused.err


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
