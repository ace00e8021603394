"""What is odd about the machine or the terminal: a message and an exit code, never a mistake."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from storage.records import Invalid
from sweep.cli import main
from sweep.predict.memory.profile_store import TracingChildren
from sweep.predict.memory.profiles import Structure
from sweep.request import default_study_name
from sweep.terminal.summary import why_invalid
from tests.reports.synthetic import fits, record, snapshot
from tests.sweep.shared_tracing import trace
from tests.sweep.simulated_device import MODEL, a_space

ROOT = Path(__file__).parents[2]
SWEEP = f"{sys.executable} -c 'from sweep.cli import main; raise SystemExit(main())'"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )


def test_a_message_writes_out_what_would_work_unseen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "a10\x1b[31m\u202e"]) == 2
    said = capsys.readouterr().err
    assert r"'a10\x1b[31m\u202e' is no preset" in said
    assert said.rstrip("\n").isprintable()


def test_a_message_is_folded_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sweep.terminal.console.width_of", lambda stream: 60)
    assert main(["run", "zzzzzzzz"]) == 2
    first, *further = capsys.readouterr().err.splitlines()
    assert first.startswith("error: unknown preset 'zzzzzzzz'; known are")
    assert further
    assert all(len(line) <= 60 and line.startswith("  ") for line in further)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("sweep ")
    assert main(["--help"]) == 0
    assert "--version" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("plan a10 --from-file - <&-", 2, "stdin: no configuration in it"),
        ("presets <&-", 0, ""),
        ("presets <&- >&- 2>&-", 0, ""),
        ("presets", 0, ""),
    ],
)
def test_a_closed_stdin_is_an_empty_one(line: str, code: int, said: str) -> None:
    done = shell(f"{SWEEP} {line}")
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "mistake" not in done.stderr


@pytest.mark.slow
def test_too_few_file_descriptors_are_said_to_be_too_few(home: Path) -> None:
    done = shell(f"ulimit -n 12; {SWEEP} run cpu-demo --trials 1")
    assert done.returncode in (0, 3), done.stderr
    if done.returncode:
        assert re.search("(?i)too many open files|too few file descriptors", done.stderr)
        assert "ulimit -n" in done.stderr
    assert "mistake" not in done.stderr


@pytest.mark.parametrize("arguments", [["plan", "a10"], ["doctor"], ["status"], ["best", "x"]])
def test_a_home_that_may_not_be_searched_is_the_machines_fault(
    home: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stat = Path.stat

    def refuse(path: Path, **options: Any) -> os.stat_result:
        if path.is_relative_to(home / "locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setenv("SWEEP_HOME", str(home / "locked"))
    monkeypatch.setattr(Path, "stat", refuse)
    if arguments == ["doctor"]:
        monkeypatch.setattr("sweep.terminal.doctor.probe_libraries", dict)
        monkeypatch.setattr("sweep.terminal.doctor.check", lambda machine: (str(machine.runs),))
        monkeypatch.setattr("sweep.terminal.commands.check", lambda machine: ())
        monkeypatch.setattr("sweep.terminal.commands.findings_text", lambda findings, **_: "")
        assert main(arguments) == 0
        return
    assert main(arguments) == 3
    err = capsys.readouterr().err
    assert "Permission denied" in err
    assert "mistake" not in err


@pytest.mark.parametrize(
    ("name", "study"),
    [
        ("größe", "größe"),
        ("日本", "日本"),
        ("gro\u0308ße", "größe"),
        ("_mine", "mine"),
        ("a b", "a-b"),
    ],
)
def test_a_studys_name_keeps_the_letters_of_its_spaces(name: str, study: str) -> None:
    space = a_space().model_copy(update={"name": name})
    assert default_study_name(space, {}) == study


@pytest.mark.parametrize("name", ["हिन्दी", "語" * 90, "---"])
def test_a_name_that_no_study_can_have_asks_for_another(name: str) -> None:
    space = a_space().model_copy(update={"name": name})
    with pytest.raises(InputError, match="choose a name with --study"):
        default_study_name(space, {})


def test_a_study_whose_whole_space_names_a_module_that_is_not_there_is_bad_input(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = home / "mine.yaml"
    space.write_text(
        "gpu: cpu\nmodel: demo\nbudget_gib: 0.1\ndimensions:\n  micro_batch_size: [1, 2]\n"
        "fixed:\n  target_modules: [q_pj]\n"
    )
    assert main(["run", str(space)]) == 2
    err = capsys.readouterr().err
    assert "no linear module 'q_pj'; did you mean 'q_proj'?" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "a10", "--target-modules", "q_pj,v_proj"],
        ["plan", "a10", "--target-modules", "q_pj,v_proj", "--gpu", "t4", "--gpu", "h200"],
    ],
)
def test_a_plan_of_a_module_that_is_not_there_is_bad_input(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "no linear module 'q_pj'" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_twice_while_a_plan_is_traced_ends_it(home: Path) -> None:
    # A suite that was started in the background has SIGINT ignored, and hands that on.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{listen}; from sweep.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program]
    with subprocess.Popen([*command, "plan", "a10"], cwd=ROOT, start_new_session=True) as process:
        time.sleep(3)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) in (130, -signal.SIGINT)


def test_a_study_is_invalid_where_nothing_of_its_space_was_valid() -> None:
    space = snapshot().definition.space
    inside = space.config({key: (one.values() or ())[0] for key, one in space.dimensions.items()})
    outside = TrialConfig(lora_rank=3, micro_batch_size=3, seq_len=3)
    invalid = Invalid(rule="targets", detail="no such module")
    baseline, fitting = fits(0, 8_000.0, outside), fits(2, 8_000.0, inside)
    refused = record(1, invalid, inside)
    assert why_invalid(snapshot([baseline, refused])) == invalid
    assert why_invalid(snapshot([baseline])) is None
    assert why_invalid(snapshot()) is None
    assert why_invalid(snapshot([refused, fitting])) is None


def test_ctrl_c_in_the_terminal_does_not_reach_the_tracing_child() -> None:
    program = (
        "import json, os, sys; sys.stdin.readline()\n"
        "print(json.dumps({'profile': {'session': os.getsid(0), 'pid': os.getpid()}}), flush=True)"
    )
    child = TracingChildren(1, outlive=True, command=(sys.executable, "-c", program))
    answer = trace(child, MODEL, Structure.of(TrialConfig(), is_checkpointed=True))
    assert answer["session"] == answer["pid"] != os.getsid(0)
    child.close()
