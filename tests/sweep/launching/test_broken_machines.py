"""`sweep run --on ssh:` on a machine that is broken: exit code 3, and what to do."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest

from qlora_sweep.sweep.cli import main
from qlora_sweep.sweep.launching import remote
from tests.sweep.launching import broken_ssh
from tests.sweep.launching.ssh_server import pretending_environment

PROGRAM = """
import os, shutil, sys
def main():
    if "RESULTS" in os.environ:
        shutil.copytree(os.environ["RESULTS"], "runs", dirs_exist_ok=True)
    print("beat", file=sys.stderr)
    print(os.environ.get("PRINTED", "printed"), os.environ.get("HF_TOKEN", ""))
    return 0
"""
SURFACE = Path(__file__).parents[2] / "data" / "surfaces" / "mistral-7b-v0.3_h200.jsonl"
SAID = {
    "fetch a link": "a link",
    "fetch a large file": "copy it by hand",
    "fetch half and go": "The same command fetches the study",
    "fetch half and fail": "free some space there",
    "find nothing": "no Python 3.11 or newer",
    "install a read-only home": "cannot be written to",
    "install no release": "--with python=PATH",
    "start a full disk": "free some space there",
    "start a wrong clock": "date",
    "look ssh says braces": "{by_hand} {0} {",
    "look a huge stderr": "the end of it",
    "look words alone": "backups {only}",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine: its home, and an environment whose sweep ends at once, with results."""
    place = tmp_path_factory.mktemp("machine")
    (place / "home").mkdir()
    pretending_environment(place / "environment", PROGRAM, sweep=version("qlora-sweep"))
    return place


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a study of recorded trials leaves."""
    home = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWEEP_HOME", str(home))
        patch.delenv("SWEEP_STORAGE", raising=False)
        words = ["--study", "study", "--trials", "3", "--on", f"recorded:{SURFACE}"]
        assert main(["run", "a10", *words]) == 0
    return home / "runs"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    for name in ("SWEEP_STORAGE", "HF_TOKEN", "BROKEN"):
        monkeypatch.delenv(name, raising=False)
    program = [sys.executable, "-I", broken_ssh.__file__, str(place / "home")]
    monkeypatch.setenv("SWEEP_SSH", shlex.join(program))
    shutil.rmtree(place / "home")
    (place / "home").mkdir()
    return tmp_path


def run(place: Path, *words: str) -> int:
    python = place / "environment" / "bin" / "python"
    on = ["--on", "ssh:me@box", "--study", "study", "--with", f"python={python}"]
    return main(["run", "cpu-demo", *on, *words])


@pytest.mark.parametrize("fault", broken_ssh.FAULTS)
def test_a_broken_machine_is_at_fault_and_what_to_do_is_said(
    fault: str,
    place: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("BROKEN", fault)
    if fault.startswith("install"):
        # Nothing is installed yet.
        (place / "home" / ".cache").mkdir()
        assert main(["run", "cpu-demo", "--on", "ssh:me@box"]) == 3
    else:
        assert run(place) == 3
    out, err = capsys.readouterr()
    assert SAID.get(fault, "me@box") in " ".join(err.split())
    assert "mistake in sweep" not in err
    assert "\x1b" not in out + err
    assert not (here / "x").exists()
    assert not list(here.glob("runs/study/*"))


def test_a_login_that_says_nothing_is_not_waited_for_without_end(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BROKEN", "silent")
    monkeypatch.setattr(remote, "_SILENT_SECONDS", 0.5)
    assert run(place) == 3
    assert "nothing within 0.5 s" in capsys.readouterr().err


def test_a_study_that_is_done_without_results_is_a_fault(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(place) == 3
    assert "~/qlora-sweep/study/runs on me@box" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_what_a_study_prints_there_reaches_the_terminal_without_what_works_unseen(
    place: Path,
    results: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RESULTS", str(results))
    monkeypatch.setenv("PRINTED", "the \x1b[2Janswer\x07")
    assert run(place) == 0
    assert capsys.readouterr().out == "the \\x1b[2Janswer\\x07 \n"
    # Who asks for a document gets one, of what was fetched.
    assert run(place, "--json") == 0
    assert json.loads(capsys.readouterr().out)["study"] == "study"
    monkeypatch.setenv("PRINTED", '{"best": "\\u001b[2J \x7f"}')
    assert run(place, "--json") == 0
    assert json.loads(capsys.readouterr().out)["best"] == "\x1b[2J \x7f"


def test_nothing_temporary_is_left(
    place: Path, results: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    left = here / ".sweep-scratch-fetched-of-one-that-was-killed"
    (left / "files").mkdir(parents=True)
    monkeypatch.setenv("RESULTS", str(results))
    assert run(place) == 0
    assert [path.name for path in here.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("typed", "more"),
    [
        ("ssh:u:hunter2secret@box:22", []),
        ("ssh://u:hunter2secret@box", []),
        ("shh:u:hunter2secret@box", []),
        ("ray:u:hunter2secret@box:6379", []),
        ("ssh:u:hunter2secret@box", ["--json"]),
        ("ssh:u:hunter2secret@box", ["--trials", "none"]),
    ],
)
def test_a_password_that_is_typed_is_refused_and_is_in_nothing_that_is_shown_or_kept(
    typed: str, more: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "cpu-demo", "--on", typed, *more]) == 2
    out, err = capsys.readouterr()
    for part in ("hunter2", "secret"):
        assert part not in out + err
    assert not list(here.rglob("*"))
