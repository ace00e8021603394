"""Commands as a person sees them: on a terminal of the system's own."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.reading import read_study
from qlora_sweep.sweep.request import RunRequest
from qlora_sweep.sweep.terminal import many_models
from tests.sweep.terminal.screen import Screen
from tests.sweep.typed import Sweep

SIMULATED = [sys.executable, "-m", "tests.sweep.terminal.driver_of_many"]
"""The command itself, whose device answers after half a second."""


def take_terminal() -> None:
    os.setsid()
    # Whoever runs this test may ignore it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def start(*words: str, width: int, home: Path, term: str) -> tuple[subprocess.Popen[Any], int]:
    """Start a command whose three streams are a terminal; return it and the terminal's other end.

    Paths are left whole on screens, so they are short ones.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    others = ("COLUMNS", "LINES", "NO_COLOR")
    kept = {name: value for name, value in os.environ.items() if name not in others}
    kept |= {"SWEEP_HOME": ".", "PYTHONPATH": str(Path(__file__).parents[3]), "TERM": term}
    process = subprocess.Popen(
        [*SIMULATED, *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=home,
        env={**kept, "CUDA_VISIBLE_DEVICES": "", "TRIAL_SECONDS": "0.5"},
        preexec_fn=take_terminal,
    )
    os.close(slave)
    return process, master


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        # Linux says so where whoever wrote is gone.
        return b""


def shown(*words: str, width: int, home: Path) -> Screen:
    """Return what a terminal shows of a command at its end; it refuses lines that are too long."""
    process, master = start(*words, width=width, home=home, term="xterm-256color")
    screen, decode = Screen(width), codecs.getincrementaldecoder("utf-8")("replace").decode
    while text := read(master):
        screen.write(decode(text))
    os.close(master)
    assert process.wait(timeout=60) == 0, screen.seen
    return screen


@pytest.mark.slow
def test_a_study_is_drawn_and_leaves_its_trials_and_its_answer(tmp_path: Path) -> None:
    command = ("run", "cpu-demo", "--trials", "2", "--sampler", "random", "--no-confirm")
    screen = shown(*command, width=80, home=tmp_path)
    drawn = [picture for picture in screen.pictures if "now  " in picture]
    assert any("trial 0, starting the worker" in picture for picture in drawn)
    assert all(picture.count("best  ") == 1 for picture in drawn)
    assert "now  " not in screen.seen
    assert screen.seen.count("trial 0 (1 of 2): ") == screen.seen.count("trial 1 (2 of 2): ") == 1
    assert "Next:" in screen.seen


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_study_whose_terminal_is_closed_is_interrupted(tmp_path: Path, term: str) -> None:
    command = ("run", "cpu-demo", "--sampler", "random", "--no-confirm")
    process, master = start(*command, width=80, home=tmp_path, term=term)
    said = b""
    while b"trial 0" not in said and (more := read(master)):
        said += more
    os.close(master)
    assert process.wait(timeout=60) == 130, said
    # A dumb terminal gets lines and no escapes.
    assert (b"\x1b" in said) is (term == "xterm")
    assert (tmp_path / "runs" / "cpu-demo" / "report.html").exists()


# Several models in one command: a study for each, on as many GPUs as there are.

SPACE = """
name: small
gpu: cpu
budget_gib: 4
model: demo
trials: 2
sampler: random
confirm: null
dimensions:
  micro_batch_size: {choices: [1, 2, 4]}
fixed: {seq_len: 32}
"""
DRIVER = [sys.executable, "-P", "-m", "tests.sweep.terminal.driver_of_many"]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two directories with a model each, the second of more layers."""
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    demo = load_model_spec("demo").to_json()["config"]
    for name, layers in (("small", 2), ("large", 4)):
        (tmp_path / name).mkdir()
        config = json.dumps({**demo, "num_hidden_layers": layers})
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "space.yaml").write_text(SPACE)
    return [str(tmp_path / "small"), str(tmp_path / "large")]


def typed(models: list[str], *more: str) -> list[str]:
    return ["run", "space.yaml", *(f"--model={model}" for model in models), *more]


def studies(models: list[str]) -> list[RunRequest]:
    """Return a request for each model, named."""
    request = RunRequest(space="space.yaml")
    named = ((one, one.named()[0]) for one in request.of_models(models))
    return [one.model_copy(update={"study": name}) for one, name in named]


def run(models: list[str], program: str, *, devices: list[str | None], **options: Any) -> int:
    """Run a study for each model by a program of a few lines."""
    Path("driver.py").write_text(f"import json, os, pathlib, sys, time\n{program}\n")
    command = [sys.executable, "driver.py"]
    return many_models.run(
        studies(models), devices=devices, as_json=True, program=command, **options
    )


@pytest.mark.slow
def test_one_request_to_stop_reaches_every_driver_and_the_same_command_goes_on(
    tmp_path: Path, models: list[str]
) -> None:
    words = typed(models, "--trials", "3", "--study", "night")
    with subprocess.Popen(
        [*DRIVER, *words],
        env={**os.environ, "TRIAL_SECONDS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stderr is not None
        # Every line says whose it is, and the largest begins.
        first = next(line for line in driver.stderr if "trial 0" in line)
        assert re.match(r"\S*large\S*: ", first)
        driver.send_signal(signal.SIGTERM)
        driver.stderr.read()
        assert driver.wait(timeout=60) == 130
    done = subprocess.run(
        [*DRIVER, *words, "--json"], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert {document["study"] for document in documents} == {"night-large", "night-small"}
    url, home = f"sqlite:///{tmp_path}/runs/sweep.db", tmp_path / "runs"
    for document in documents:
        assert Path(document["model"]).name == document["study"].removeprefix("night-")
        records = read_study(document["study"], url=url, home=home).records
        concluded = [r.config for r in records if not r.is_interrupted]
        assert len(concluded) == len(set(concluded)) == 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--from", "other"], "--from"),
        (["--on", "ssh:user@box"], "elsewhere name one"),
        (["--devices", "2"], "is for the CPU"),
        (["--study", "a b/c"], "study name"),
        (["--model=no-such-model"], "no-such-model"),
        (["--model=small"], "name each model once"),
    ],
)
def test_what_does_not_go_with_several_models_starts_nothing(
    tmp_path: Path, models: list[str], more: list[str], words: str, sweep: Sweep
) -> None:
    more = [word.replace("=small", f"={models[0]}") for word in more]
    refused = sweep(*typed(models, *more))
    assert refused.code == 2
    assert words in refused.err
    assert not (tmp_path / "runs" / "sweep.db").exists()


@pytest.mark.parametrize(("places", "shares"), [(1, [0.5, 1.0]), (2, [1.0, 1.0])])
def test_the_studies_of_several_models_share_one_time_budget(
    models: list[str], capsys: pytest.CaptureFixture[str], places: int, shares: list[float]
) -> None:
    program = (
        "request = json.load(open(sys.argv[-1]))\n"
        "print(json.dumps({'seconds': request['overrides']['time_budget_seconds']}))"
    )
    end_seconds = time.monotonic() + 10_000.0
    assert run(models, program, devices=[None] * places, end_seconds=end_seconds) == 0
    told = [json.loads(line)["seconds"] for line in capsys.readouterr().out.splitlines()]
    assert sorted(told) == pytest.approx([10_000.0 * share for share in shares], rel=0.05)


def test_a_study_whose_gpu_fails_is_tried_on_another_and_that_gpu_is_left_out(
    models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "request = json.load(open(sys.argv[-1]))\n"
        "if request['devices'] == '0,': sys.exit(3)\n"
        "time.sleep(0.3)\n"
        "print(json.dumps({'study': request['study'], 'best': None}))"
    )
    assert run(models, program, devices=["0,", "1,"]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2
    assert "tried again on another GPU" in said.err
    assert "GPU 0 is left out" in said.err


TOGETHER = """
place = int(json.load(open(sys.argv[-1]))['devices'][0])
pathlib.Path(f'began-{place}').touch()
deadline = time.monotonic() + 20
while not pathlib.Path(f'began-{1 - place}').exists():
    if time.monotonic() > deadline: sys.exit(9)
    time.sleep(0.02)
print(json.dumps({'best': None}))
"""


@pytest.mark.parametrize(
    ("program", "devices", "code"),
    [
        ("os.kill(os.getpid(), 9)", [None], 3),
        ("sys.exit(1)", [None], 1),
        ("print('{' + ' ' * 200000 + '}')", [None], 0),
        # As many run at a time as there are GPUs.
        (TOGETHER, ["0,", "1,"], 0),
    ],
    ids=["killed", "nothing fits", "a long document", "together"],
)
def test_how_a_driver_ended_is_told_whatever_became_of_it(
    models: list[str], program: str, devices: list[str | None], code: int
) -> None:
    assert run(models, program, devices=devices) == code
