"""Nothing that is printed, drawn or kept shows a secret, works unseen, or is for others to read."""

from __future__ import annotations

import io
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from reports.page import render, write_report
from search_spaces.errors import EnvironmentFault, InputError, quote, words_of
from storage.reading import read_study
from storage.records import Crashed, TrialRecord
from sweep.cli import guarded, main
from sweep.terminal.console import Guarded, Synchronized, folded, note, say, say_json, table
from sweep.terminal.drawing import Shown, rendered
from tests.reports.synthetic import fits, record, snapshot
from tests.storage.builders import open_it, run_one

SECRET = "Sesame 4/two@three"
URL = f"postgresql://night:{SECRET}@127.0.0.1:1/db"
TOKEN = "hf_abcdefGHIJKLmnop1234"
SAID = f"cannot reach {URL}\nwith {TOKEN}\x1b]0;title\x07\u202e"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    before = os.umask(0)
    yield tmp_path
    os.umask(before)


def assert_clean(text: str) -> None:
    assert "***" in text
    for hidden in ("Sesame", "4/two", "three", "abcdef", "\x1b]", "\x07", "\u202e"):
        assert hidden not in text


def logged(text: str) -> None:
    handler = logging.StreamHandler(Guarded(sys.stderr))
    handler.emit(logging.LogRecord("sqlalchemy", logging.ERROR, "", 0, "%s", (text,), None))


def raised(text: str) -> None:
    def command() -> int:
        raise EnvironmentFault(text)

    assert guarded(command) == 3


def refused(text: str) -> None:
    def command() -> int:
        raise InputError(f"unknown key {quote(text)}")

    assert guarded(command) == 2


def drawn(text: str) -> None:
    say(rendered(Text(text), is_terminal=False))


def drawn_live(text: str) -> None:
    stream = Guarded(sys.stderr)
    Console(file=Synchronized(stream), width=200).print(Shown(Text(text)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "show",
    [say, note, raised, refused, logged, drawn, drawn_live],
    ids=lambda show: show.__name__,
)
def test_nothing_is_printed_with_a_secret_in_it(
    show: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    show(SAID)
    said = capsys.readouterr()
    assert_clean(said.out + said.err)


@pytest.mark.parametrize("width", [None, 20, 40])
def test_a_secret_is_taken_out_before_lines_are_folded(width: int | None) -> None:
    assert_clean(folded(SAID, width))
    assert_clean(table(("study", "words"), [("night", SAID)], width=width))


def test_a_document_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"detail": SAID, "trials": [1, None, SAID], "password": "x"})
    out = capsys.readouterr().out
    assert_clean(out)
    assert json.loads(out)["trials"][:2] == [1, None]
    assert json.loads(out)["password"] == "***"


def test_what_draws_itself_keeps_its_escapes_and_a_progress_bar_its_returns() -> None:
    stream = io.StringIO()
    guard = Guarded(stream)
    guard.write("10 %\r20 %\x1b[31m")
    Synchronized(guard).write("\x1b[31mred")  # type: ignore[arg-type]
    assert stream.getvalue() == "10 %\r20 %\\x1b[31m\x1b[31mred"


def test_an_error_is_told_without_its_secret_however_long_it_is() -> None:
    assert_clean(words_of(ValueError(f"{URL} {TOKEN}")) + "***")
    assert "Sesame" not in quote(f"{'x' * 90} {URL}")


def test_a_mistake_leaves_a_private_log_without_secrets(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise AssertionError(SAID)

    assert guarded(command) == 4
    assert_clean(capsys.readouterr().err)
    (log,) = (home / "runs" / "crashes").iterdir()
    assert_clean(log.read_text())
    assert mode(log) == 0o600
    assert mode(log.parent) == mode(log.parent.parent) == 0o700


def test_where_no_log_can_be_kept_at_home_a_private_one_is_elsewhere(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "runs").write_text("a file")
    (home / "shared").mkdir(mode=0o777)
    monkeypatch.setattr("tempfile.tempdir", str(home / "shared"))

    def command() -> int:
        raise AssertionError("a mistake")

    assert guarded(command) == 4
    (log,) = (home / "shared").iterdir()
    assert str(log) in capsys.readouterr().err
    assert mode(log) == 0o600
    assert mode(log.parent) == 0o777


def test_a_database_that_is_away_is_told_without_its_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for url in (URL, URL.replace("postgresql", "mssql"), URL.replace("/db", "")):
        assert main(["status", "--storage", url]) in (2, 3)
        said = capsys.readouterr()
        assert_clean(said.err)
        assert said.out == ""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_everything_that_a_study_leaves_is_its_owners_alone(home: Path) -> None:
    runs = home / "runs"
    url = f"sqlite:///{runs}/sweep.db"
    with open_it(url, runs) as study:
        run_one(study)
        run_one(study, Crashed(phase="build", detail=SAID))
        journals = {path.name: mode(path) for path in runs.iterdir() if path.is_file()}
    write_report(read_study("study", url=url, home=runs), runs / "study" / "report.html")
    left = [runs, *runs.rglob("*")]
    assert {"sweep.db", "report.html", "spool.jsonl"} <= {path.name for path in left}
    assert {path.name: mode(path) for path in left if path.is_dir()} == {
        "runs": 0o700,
        "study": 0o700,
    }
    assert {mode(path) for path in left if path.is_file()} == set(journals.values()) == {0o600}
    for path in left:
        if path.is_file():
            assert b"Sesame" not in path.read_bytes(), path
            assert b"abcdefGHIJ" not in path.read_bytes(), path


PLANTED = pytest.mark.parametrize("name", ["report.html", "spool.jsonl", "../sweep.db.study.lock"])


def use_with_planted(name: str, runs: Path, plant: Callable[[Path], None]) -> list[str]:
    """Drive a study, in whose directory something was put, and return the faults."""
    url, said = f"sqlite:///{runs}/sweep.db", []
    directory = runs / "study"
    directory.mkdir(parents=True, mode=0o700)
    if name.endswith(".lock"):
        plant(directory / name)
    try:
        with open_it(url, runs) as study:
            if not name.endswith(".lock"):
                (directory / name).unlink(missing_ok=True)
                plant(directory / name)
            run_one(study)
        assert len(read_study("study", url=url, home=runs).records) == 1
        write_report(snapshot([fits(0, 100.0)]), directory / "report.html")
    except EnvironmentFault as fault:
        said.append(str(fault))
    return said


@PLANTED
@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_no_planted_link_is_written_through(
    name: str, plant: Callable[[Path, Path], None], home: Path
) -> None:
    victim = home / "victim"
    victim.write_text("theirs")
    said = use_with_planted(name, home / "runs", lambda path: plant(victim, path))
    assert victim.read_text() == "theirs"
    # Without its lock a study is not driven; for the report and the spool there is a way around.
    assert all("link" in fault for fault in said)
    assert bool(said) == name.endswith(".lock")


@pytest.mark.timeout(60)
@PLANTED
def test_no_planted_pipe_is_waited_for(name: str, home: Path) -> None:
    said = use_with_planted(name, home / "runs", os.mkfifo)
    assert all("is no file" in fault for fault in said)
    assert bool(said) == (name != "spool.jsonl")


def test_what_libraries_print_in_a_command_is_clean(home: Path) -> None:
    script = (
        "import sys, logging, warnings\n"
        "from sweep.cli import main\n"
        "main(['--version'])\n"
        "logging.getLogger('lib').error(sys.argv[1])\n"
        "warnings.warn(sys.argv[1])\n"
        "raise RuntimeError(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, SAID], capture_output=True, text=True, check=False
    )
    assert done.stderr.count("cannot reach postgresql://night:***@127.0.0.1") == 3
    assert_clean(done.stderr)


def test_what_is_stored_of_a_trial_has_no_secret() -> None:
    stored = record(1, Crashed(phase="build", detail=SAID))
    assert "Sesame" not in str(stored.model_dump(mode="json"))
    assert TrialRecord.model_validate(stored.model_dump(mode="json")) == stored


def test_a_report_has_no_secret() -> None:
    outcome = Crashed.model_construct(phase="build", detail=SAID)
    page = render(
        snapshot(
            [fits(0, 100.0), record(1, outcome)],
            warnings=(f"{URL} was away",),
        )
    )
    for hidden in ("Sesame", "4/two", "abcdefGHIJ", "\u202e"):
        assert hidden not in page
