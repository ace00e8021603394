"""What commands say of a database in which not everything can be read."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from storage.definition import UnreadableStudy
from storage.reading import list_studies
from sweep import cli
from sweep.terminal.summary import studies_text
from tests.storage.builders import fits, open_it, run_one


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Studies of which one is whole, one has a trial of an unknown verdict, one no definition."""
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    runs = tmp_path / "runs"
    url = f"sqlite:///{runs}/sweep.db"
    for name in ("whole", "odd", "broken"):
        with open_it(url, runs, name=name) as study:
            for speed, batch in ((1000.0, 1), (2000.0, 2)):
                run_one(study, fits(speed), batch=batch)
    with closing(sqlite3.connect(runs / "sweep.db")) as connection, connection:
        attribute = "SELECT trial_id FROM trials WHERE study_id = 2 AND number = 1"
        connection.execute(
            "UPDATE trial_user_attributes SET value_json = replace(value_json, '\"fits\"', "
            f"'\"melted\"') WHERE key = 'record' AND trial_id = ({attribute})"
        )
        connection.execute(
            "UPDATE study_user_attributes SET value_json = '7' WHERE key = 'definition' "
            "AND study_id = 3"
        )
    return runs


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(list(arguments))
    said = capsys.readouterr()
    return status, said.out, said.err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out)


@pytest.mark.usefixtures("runs")
def test_status_lists_what_can_be_read_and_says_what_cannot(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = run(capsys, "status")
    assert status == 0
    assert "Study 'broken' cannot be read: definition" in out
    assert "Study 'odd' cannot be read: trial 1: " in out
    assert "2,000 tokens/s" in next(line for line in out.splitlines() if line.startswith("whole"))
    whole, odd, broken = document(capsys, "status")["studies"]
    assert (whole["trials"], whole["best"]["number"], whole["unreadable"]) == (2, 1, None)
    for line in (odd, broken):
        assert (line["best"], line["trials"]) == (None, 2)
        assert line["unreadable"]
    assert whole.keys() == broken.keys()


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("command", ["best", "status", "report", "export", "confirm"])
def test_a_study_that_cannot_be_read_is_one_message(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--format", "json"] if command == "export" else []
    for study, words in (("broken", "definition"), ("odd", "trial 1: ")):
        status, _, err = run(capsys, command, study, *options)
        assert status == 2
        assert f"study '{study}' cannot be read: {words}" in " ".join(err.split())
        assert "Traceback" not in err


def test_a_name_that_leads_elsewhere_is_shown_harmless_and_written_nowhere(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(runs / "sweep.db")) as connection, connection:
        connection.execute("UPDATE studies SET study_name = '../x' WHERE study_name = 'whole'")
        connection.execute(
            "UPDATE studies SET study_name = ? WHERE study_name = 'broken'", ["\x1b[31mred"]
        )
    status, out, _ = run(capsys, "status")
    assert (status, "\x1b" in out) == (0, False)
    status, _, err = run(capsys, "report", "../x")
    assert (status, "add -o FILE" in err) == (2, True)
    assert not (runs.parent / "x").exists()
    assert run(capsys, "best", "../x")[0] == 0


def test_a_table_of_studies_none_of_which_can_be_read_is_one(runs: Path) -> None:
    studies = list_studies(f"sqlite:///{runs}/sweep.db", runs)
    broken = [study for study in studies if isinstance(study, UnreadableStudy)]
    assert "cannot be read" in studies_text(broken, width=80)
