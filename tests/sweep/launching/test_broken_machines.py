"""`sweep run --on ssh:` on a machine that is broken: exit code 3, and what to do."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from qlora_sweep.sweep.cli import main
from qlora_sweep.sweep.launching import parcel, remote
from qlora_sweep.sweep.request import RunRequest
from qlora_sweep.sweep.terminal.console import note
from tests.sweep.launching import broken_ssh
from tests.sweep.launching.ssh_server import pretending_environment

PROGRAM = """
import os, shutil, sys
def main():
    if "RESULTS" in os.environ:
        shutil.copytree(os.environ["RESULTS"], "runs", dirs_exist_ok=True)
    print("beat", file=sys.stderr)
    print(os.environ.get("PRINTED", "printed"), os.environ.get("HF_TOKEN", ""))
    return int(os.environ.get("CODE", "0"))
"""
SURFACE = Path(__file__).parents[2] / "data" / "surfaces" / "mistral-7b-v0.3_h200.jsonl"
SAID = {
    "fetch a link": "a link",
    "fetch a large file": "copy it by hand",
    "fetch a large database": "copy it by hand",
    "fetch half and go": "The same command fetches the study",
    "fetch half and fail": "free some space there",
    "find nothing": "no Python 3.11 or newer",
    "install a read-only home": "cannot be written to",
    "install no release": "--with python=PATH",
    "start a full disk": "free some space there",
    "start too many files": "ulimit -n",
    "start no processes": "ulimit -u",
    "start a file that is too large": "ulimit -f",
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


@pytest.mark.parametrize("code", ["0", "1"])
def test_a_study_that_is_done_without_results_is_a_fault(
    code: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CODE", code)
    assert run(place) == 3
    assert "no results are in ~/qlora-sweep/study/runs on me@box" in capsys.readouterr().err


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
    out, _ = capsys.readouterr()
    assert out == "the \\x1b[2Janswer\\x07 \n"
    # Who asks for a document gets one, of what was fetched.
    assert run(place, "--json") == 0
    out, _ = capsys.readouterr()
    assert json.loads(out)["study"] == "study"
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


def test_the_login_of_the_hub_goes_along_and_is_never_shown(
    place: Path, results: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    token = "hf_" + "TestOnlyXyz" * 3
    (here / "token").write_text(token)
    space = "gpu: cpu\nmodel: org/some-model\ndimensions: {lora_rank: [4, 8]}\n"
    (here / "space.yaml").write_text(space)
    sent = {"space": str(here / "space.yaml")}
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(here / "token"))
    monkeypatch.setattr(parcel, "load_model_spec", lambda _: SimpleNamespace(source="hub"))
    monkeypatch.setattr(RunRequest, "named", lambda _: ("x", SimpleNamespace(model="m", data=None)))
    assert parcel.hub_variables(RunRequest(**sent)) == {"HF_TOKEN": token}
    print_it = f"the token is {token}"
    note(print_it)
    assert token not in capfd.readouterr().err


@pytest.mark.parametrize(
    "typed",
    [
        "ssh:u:hunter2secret@box",
        "ssh:u:hunter2secret@box:22",
        "ssh://u:hunter2secret@box",
        "ssh:u:hunter2@secret@box",
        "shh:u:hunter2secret@box",
        "ray:u:hunter2secret@box:6379",
        "ssh:u:hunter2secret@",
    ],
)
@pytest.mark.parametrize("more", [[], ["--json"], ["--dry-run"], ["--trials", "none"]])
def test_a_password_that_is_typed_is_refused_and_is_in_nothing_that_is_shown_or_kept(
    typed: str, more: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "cpu-demo", "--on", typed, *more]) == 2
    out, err = capsys.readouterr()
    for part in ("hunter2", "secret"):
        assert part not in out + err
    assert not list(here.rglob("*"))
