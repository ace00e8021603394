"""Several models in one command: a study for each, on as many GPUs as there are."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from search_spaces.models import load_model_spec
from storage.reading import read_study
from sweep.request import RunRequest
from sweep.terminal import many_models

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
def models(tmp_path: Path) -> list[str]:
    """Two directories with a model each, the second of more layers."""
    demo = load_model_spec("demo").to_json()["config"]
    found = []
    for name, layers in (("small", 2), ("large", 4)):
        (tmp_path / name).mkdir()
        config = {**demo, "num_hidden_layers": layers}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        found.append(str(tmp_path / name))
    (tmp_path / "space.yaml").write_text(SPACE)
    return found


def typed(tmp_path: Path, models: list[str], *more: str) -> list[str]:
    return [str(tmp_path / "space.yaml"), *(f"--model={model}" for model in models), *more]


def sweep_run(tmp_path: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DRIVER, "run", *words],
        env={**os.environ, "SWEEP_HOME": str(tmp_path), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def stored(tmp_path: Path, name: str) -> Any:
    return read_study(name, url=f"sqlite:///{tmp_path}/runs/sweep.db", home=tmp_path / "runs")


def studies(tmp_path: Path, models: list[str]) -> list[RunRequest]:
    """Return a request for each model, named."""
    request = RunRequest(space=str(tmp_path / "space.yaml"))
    named = ((one, one.named()[0]) for one in request.of_models(models))
    return [one.model_copy(update={"study": name}) for one, name in named]


def test_studies_of_several_models_run_and_print_a_document_each(
    tmp_path: Path, models: list[str]
) -> None:
    done = sweep_run(tmp_path, typed(tmp_path, models, "--json", "--trials", "3"))
    assert done.returncode == 0, done.stderr
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert {Path(d["model"]).name for d in documents} == {"small", "large"}
    for document in documents:
        assert document["trials"]["total"] == 3
        assert len(stored(tmp_path, document["study"]).records) == 3
    # Every line says whose it is.
    assert re.search(r"^\S*large\S*: .*trial 0", done.stderr, re.MULTILINE)


def test_without_json_there_is_a_line_for_each_model(tmp_path: Path, models: list[str]) -> None:
    done = sweep_run(tmp_path, typed(tmp_path, models, "--study", "night"))
    assert done.returncode == 0, done.stderr
    _, *rows = done.stdout.splitlines()
    # The largest begins.
    assert [row.split()[0] for row in rows] == ["night-large", "night-small"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--from", "other"], "--from"),
        (["--on", "ssh:user@box"], "elsewhere name one"),
        (["--devices", "2"], "is for the CPU"),
        (["--study", "a b/c"], "study name"),
    ],
)
def test_what_does_not_go_with_several_models_starts_nothing(
    tmp_path: Path, models: list[str], more: list[str], words: str
) -> None:
    done = sweep_run(tmp_path, typed(tmp_path, models, *more))
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("more", "words"), [("no-such-model", "no-such-model"), ("small", "name each model once")]
)
def test_a_wrong_model_among_them_starts_none(
    tmp_path: Path, models: list[str], more: str, words: str
) -> None:
    more = models[0] if more == "small" else more
    done = sweep_run(tmp_path, typed(tmp_path, [*models, more]))
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "runs" / "sweep.db").exists()


def test_one_request_to_stop_reaches_every_driver_and_the_same_command_goes_on(
    tmp_path: Path, models: list[str]
) -> None:
    words = typed(tmp_path, models, "--trials", "3")
    environment = {**os.environ, "SWEEP_HOME": str(tmp_path), "TRIAL_SECONDS": "1"}
    with subprocess.Popen(
        [*DRIVER, "run", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stderr is not None
        next(line for line in driver.stderr if "trial 0" in line)
        driver.send_signal(signal.SIGTERM)
        driver.stderr.read()
        assert driver.wait(timeout=60) == 130
    done = sweep_run(tmp_path, [*words, "--json"])
    assert done.returncode == 0, done.stderr
    for document in map(json.loads, done.stdout.splitlines()):
        records = stored(tmp_path, document["study"]).records
        concluded = [r.config for r in records if not r.is_interrupted]
        assert len(concluded) == len(set(concluded)) == 3


def test_a_study_whose_gpu_fails_is_tried_on_another_and_that_gpu_is_left_out(
    tmp_path: Path, models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "driver.py"
    program.write_text(
        "import json, sys, time\n"
        "request = json.load(open(sys.argv[-1]))\n"
        "if request['devices'] == '0,':\n"
        "    print('Error: the GPU was lost', file=sys.stderr); sys.exit(3)\n"
        "time.sleep(0.3)\n"
        "print(json.dumps({'study': request['study'], 'best': None}))\n"
    )
    command = [sys.executable, str(program)]
    known = studies(tmp_path, models)
    assert many_models.run(known, devices=["0,", "1,"], as_json=True, program=command) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 2
    assert "tried again on another GPU" in said.err
    assert "GPU 0 is left out" in said.err


@pytest.mark.parametrize(
    ("does", "code"),
    [("os.kill(os.getpid(), 9)", 3), ("sys.exit(1)", 1), ("print('{' + ' ' * 200000 + '}')", 0)],
    ids=["killed", "nothing fits", "a long document"],
)
def test_how_a_driver_ended_is_told_whatever_became_of_it(
    tmp_path: Path, models: list[str], does: str, code: int
) -> None:
    program = tmp_path / "driver.py"
    program.write_text(f"import os, sys\n{does}\n")
    ended = many_models.run(
        studies(tmp_path, models),
        devices=[None],
        as_json=True,
        program=[sys.executable, str(program)],
    )
    assert ended == code


def test_as_many_studies_run_at_a_time_as_there_are_cards(
    tmp_path: Path, models: list[str]
) -> None:
    program = tmp_path / "driver.py"
    program.write_text(
        "import json, pathlib, sys, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "place = json.load(open(sys.argv[-1]))['devices'][0]\n"
        "(here / f'began-{place}').touch()\n"
        "deadline = time.monotonic() + 20\n"
        "while not (here / f'began-{1 - int(place)}').exists():\n"
        "    if time.monotonic() > deadline: sys.exit(9)\n"
        "    time.sleep(0.02)\n"
        "print(json.dumps({'best': None}))\n"
    )
    began = time.monotonic()
    code = many_models.run(
        studies(tmp_path, models),
        devices=["0,", "1,"],
        as_json=True,
        program=[sys.executable, str(program)],
    )
    assert code == 0
    assert time.monotonic() - began < 20
