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

from search_spaces.errors import InputError
from search_spaces.models import load_model_spec
from storage.reading import read_study
from sweep.request import RunRequest
from sweep.study.session import Prepared, prepare
from sweep.terminal import many_models
from sweep.terminal.many_models import plan_studies

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


def prepared_for(tmp_path: Path) -> Any:
    def of(model: str, name: str | None) -> Prepared:
        space = str(tmp_path / "space.yaml")
        return prepare(space, overrides={"model": model}, held={}, study=name, card=lambda: None)

    return of


def test_each_model_has_a_study_and_the_largest_begins(tmp_path: Path, models: list[str]) -> None:
    planned = plan_studies(models, study=None, prepare=prepared_for(tmp_path))
    assert [Path(p.model).name for p in planned] == ["large", "small"]
    assert len({p.study for p in planned}) == 2


def test_a_name_that_was_typed_begins_every_studys(tmp_path: Path, models: list[str]) -> None:
    planned = plan_studies(models, study="night", prepare=prepared_for(tmp_path))
    assert {p.study for p in planned} == {"night-small", "night-large"}


def test_a_model_that_is_named_twice_is_bad_input(tmp_path: Path, models: list[str]) -> None:
    with pytest.raises(InputError, match="name each model once"):
        plan_studies([models[0]] * 2, study=None, prepare=prepared_for(tmp_path))


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
    done = sweep_run(tmp_path, typed(tmp_path, models))
    assert done.returncode == 0, done.stderr
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["model", "study", "tokens/s", "memory", "best"]
    assert [row.split()[0] for row in rows] == ["large", "small"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--from", "other"], "--from"),
        (["--on", "ssh:user@box"], "elsewhere name one"),
        (["--devices", "2"], "is for the CPU"),
    ],
)
def test_what_does_not_go_with_several_models_starts_nothing(
    tmp_path: Path, models: list[str], more: list[str], words: str
) -> None:
    done = sweep_run(tmp_path, typed(tmp_path, models, *more))
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_wrong_model_among_them_starts_none(tmp_path: Path, models: list[str]) -> None:
    done = sweep_run(tmp_path, typed(tmp_path, [*models, "no-such-model"]))
    assert done.returncode == 2
    assert "no-such-model" in done.stderr
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


def test_a_study_whose_card_fails_is_tried_on_another_and_that_card_is_left_out(
    tmp_path: Path, models: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "driver.py"
    program.write_text(
        "import json, sys, time\n"
        "request = json.load(open(sys.argv[-1]))\n"
        "study = request['study']\n"
        "if request['devices'] == '0,':\n"
        "    print('Error: the GPU was lost', file=sys.stderr); sys.exit(3)\n"
        "time.sleep(0.3)\n"
        "print(json.dumps({'study': study, 'best': None}))\n"
    )
    code = many_models.run(
        plan_studies(models, study=None, prepare=prepared_for(tmp_path)),
        places=["0,", "1,"],
        request=RunRequest(space="cpu-demo", as_json=True),
        program=[sys.executable, str(program)],
    )
    said = capsys.readouterr()
    assert code == 0
    assert len(said.out.splitlines()) == 2
    assert "tried again on another GPU" in said.err


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
        plan_studies(models, study=None, prepare=prepared_for(tmp_path)),
        places=[None],
        request=RunRequest(space="cpu-demo", as_json=True),
        program=[sys.executable, str(program)],
    )
    assert ended == code


def test_a_name_that_no_study_can_have_begins_none(tmp_path: Path, models: list[str]) -> None:
    with pytest.raises(InputError, match="study name"):
        plan_studies(models, study="a b/c", prepare=prepared_for(tmp_path))


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
        plan_studies(models, study=None, prepare=prepared_for(tmp_path)),
        places=["0,", "1,"],
        request=RunRequest(space="cpu-demo", as_json=True),
        program=[sys.executable, str(program)],
    )
    assert code == 0
    assert time.monotonic() - began < 20
