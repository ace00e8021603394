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
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from qlora_sweep.reports.page import render, write_page
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, quote, words_of
from qlora_sweep.storage.records import Crashed, TrialRecord
from qlora_sweep.sweep.cli import guarded
from qlora_sweep.sweep.terminal.console import Guarded, Synchronized, folded, say, say_json
from qlora_sweep.sweep.terminal.drawing import Shown, table
from tests.reports.synthetic import fits, record, snapshot
from tests.storage.builders import open_it, read_it, run_one
from tests.sweep.typed import Sweep

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


def ends_with(error: BaseException) -> int:
    def command() -> int:
        raise error

    return guarded(command)


def logged(text: str) -> None:
    handler = logging.StreamHandler(Guarded(sys.stderr))
    handler.emit(logging.LogRecord("sqlalchemy", logging.ERROR, "", 0, "%s", (text,), None))


def drawn_live(text: str) -> None:
    stream: Any = Synchronized(Guarded(sys.stderr))
    Console(file=stream, width=200).print(Shown(Text(text)))


WAYS: dict[str, Callable[[str], object]] = {
    "said": say,
    "raised": lambda text: ends_with(EnvironmentFault(text)),
    "refused": lambda text: ends_with(InputError(f"unknown key {quote(text)}")),
    "logged": logged,
    "drawn live": drawn_live,
    "folded": lambda text: say(folded(text, 20)),
    "in a table": lambda text: say(table(("study", "words"), [("night", text)], width=40)),
    "in a document": lambda text: say_json({"detail": text, "trials": [1, None, text]}),
    "of an error": lambda text: say(f"{words_of(ValueError(text))} ***"),
    "quoted after much": lambda text: say(f"{quote(f'{chr(120) * 90} {text}')} ***"),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_printed_with_a_secret_in_it(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    WAYS[way](SAID)
    said = capsys.readouterr()
    assert_clean(said.out + said.err)


def test_a_document_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"detail": SAID, "trials": [1, None, SAID], "password": "x"})
    document = json.loads(capsys.readouterr().out)
    assert document["trials"][:2] == [1, None]
    assert document["password"] == "***"


def test_what_draws_itself_keeps_its_escapes_and_a_progress_bar_its_returns() -> None:
    stream = io.StringIO()
    guard: Any = Guarded(stream)
    guard.write("10 %\r20 %\x1b[31m")
    Synchronized(guard).write("\x1b[31mred")
    assert stream.getvalue() == "10 %\r20 %\\x1b[31m\x1b[31mred"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_mistake_leaves_a_private_log_without_secrets_at_home_or_elsewhere(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends_with(AssertionError(SAID)) == 4
    assert_clean(capsys.readouterr().err)
    (log,) = (home / "runs" / "crashes").iterdir()
    assert_clean(log.read_text())
    assert [mode(path) for path in (log, log.parent, log.parent.parent)] == [0o600, 0o700, 0o700]
    monkeypatch.setenv("SWEEP_HOME", str(log))
    (home / "shared").mkdir(mode=0o777)
    monkeypatch.setattr("tempfile.tempdir", str(home / "shared"))
    assert ends_with(AssertionError("a mistake")) == 4
    (log,) = (home / "shared").iterdir()
    assert str(log) in capsys.readouterr().err
    assert (mode(log), mode(log.parent)) == (0o600, 0o777)


@pytest.mark.parametrize("url", [URL, URL.replace("postgresql", "mssql")])
def test_a_database_that_is_away_is_told_without_its_password(url: str, sweep: Sweep) -> None:
    code, out, err = sweep("status", "--storage", url)
    assert (code in (2, 3), out) == (True, "")
    assert_clean(err)


def test_everything_that_a_study_leaves_is_its_owners_alone(home: Path) -> None:
    runs = home / "runs"
    url = f"sqlite:///{runs}/sweep.db"
    with open_it(url, runs) as study:
        run_one(study, Crashed(phase="build", detail=SAID))
        journals = {path.name: mode(path) for path in runs.iterdir() if path.is_file()}
    write_page(render(read_it(url, runs)), runs / "study" / "report.html")
    left = [runs, *runs.rglob("*")]
    files = [path for path in left if path.is_file()]
    assert {"sweep.db", "report.html", "spool.jsonl"} <= {path.name for path in files}
    assert {mode(path) for path in left if path.is_dir()} == {0o700}
    assert {mode(path) for path in files} == set(journals.values()) == {0o600}
    for path in files:
        assert not any(word in path.read_bytes() for word in (b"Sesame", b"abcdefGHIJ")), path


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
        assert len(read_it(url, runs).records) == 1
        write_page(render(snapshot([fits(0, 100.0)])), directory / "report.html")
    except EnvironmentFault as fault:
        said.append(str(fault))
    return said


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["report.html", "spool.jsonl", "../sweep.db.study.lock"])
@pytest.mark.parametrize("plant", [os.link, os.mkfifo])
def test_no_planted_link_is_written_through_and_no_pipe_waited_for(
    name: str, plant: Callable[..., None], home: Path
) -> None:
    victim = home / "victim"
    victim.write_text("theirs")
    is_pipe = plant is os.mkfifo
    planted = [] if is_pipe else [victim]
    said = use_with_planted(name, home / "runs", lambda path: plant(*planted, path))
    assert victim.read_text() == "theirs"
    assert all(("is no file" if is_pipe else "link") in fault for fault in said)
    # Without its lock a study is not driven; for the report and the spool there is a way around.
    is_fatal = name != "spool.jsonl" if is_pipe else name.endswith(".lock")
    assert bool(said) == is_fatal


def test_what_libraries_print_in_a_command_is_clean() -> None:
    script = (
        "import sys, logging, warnings\n"
        "from qlora_sweep.sweep.cli import main\n"
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


def test_what_is_stored_and_reported_of_a_trial_has_no_secret() -> None:
    stored = record(1, Crashed(phase="build", detail=SAID))
    assert TrialRecord.model_validate(stored.model_dump(mode="json")) == stored
    unclean = record(1, Crashed.model_construct(phase="build", detail=SAID))
    page = render(snapshot([fits(0, 100.0), unclean], warnings=(f"{URL} was away",)))
    for hidden in ("Sesame", "4/two", "abcdefGHIJ", "\u202e"):
        assert hidden not in page
        assert hidden not in str(stored.model_dump(mode="json"))
