"""`plan`, `tune` and `best` from Python are what the commands of these names print."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError, NothingFits
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.storage.records import Outcome, OutOfMemory
from qlora_sweep.sweep.api import Study, best, plan, tune
from qlora_sweep.sweep.processes import STOP_SIGNALS
from tests.sweep import simulated_drive
from tests.sweep.signals import handled_by
from tests.sweep.simulated_drive import fits
from tests.sweep.typed import Sweep

Simulate = Callable[[Callable[[TrialConfig], Outcome]], None]


def runs_out(config: TrialConfig) -> Outcome:
    return OutOfMemory(stage="forward", peak_allocated_bytes=1, requested_bytes=GIB)


@pytest.fixture
def simulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """Have the trials of a study be what a function says; all else that `tune` does is real."""
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    return partial(simulated_drive.simulate, monkeypatch)


def of_demo(**options: Any) -> Study:
    asked = {"study": "mine", "trials": 3, "sampler": "random", "confirm": False}
    return tune("cpu-demo", **(asked | options))


def test_a_study_and_its_winner_are_what_the_command_prints(
    simulate: Simulate, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(fits)
    study = of_demo(lora_rank=8)
    assert capsys.readouterr() == ("", "")
    document = json.loads(sweep("best", "mine", "--json").out)
    assert study.document() == document
    assert (study.name, study.trials["total"], study.confirmed) == ("mine", 3, False)
    for winner in (best(study), best("mine")):
        assert winner.number == document["best"]["number"]
        assert winner.config.model_dump(mode="json") == document["best"]["config"]
        shown = document["best"]["measurement"]
        assert winner.measurement.tokens_per_second == shown["tokens_per_second"]


def test_a_confirmed_study_has_its_gain_and_shows_progress_where_it_is_asked_for(
    simulate: Simulate, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(fits)
    study = of_demo(confirm=True, trials=8, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "mine" in err
    assert study.confirmed
    assert study.gain.model_dump(mode="json") == study.document()["gain"]
    assert best(study).gain == study.gain


def test_a_study_in_which_nothing_fits_has_no_winner(simulate: Simulate) -> None:
    simulate(runs_out)
    study = of_demo()
    assert study.best is None
    with pytest.raises(NothingFits):
        best(study)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"lora_rnak": 8}, "lora_rnak"),
        ({"on": "slurm"}, "slurm"),
        ({"numerics": "8-bit"}, "numerics"),
        ({"data": MappingProxyType({"texts": "none.jsonl"})}, "none.jsonl"),
    ],
)
def test_what_is_not_right_is_an_input_error(
    arguments: dict[str, Any], complaint: str, simulate: Simulate
) -> None:
    simulate(fits)
    with pytest.raises(InputError, match=complaint):
        of_demo(**arguments)


@pytest.fixture
def handlers() -> Iterator[dict[signal.Signals, Any]]:
    """Handlers as Python has them."""
    with handled_by(signal.default_int_handler) as handlers:
        yield handlers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_raised_once_all_is_stored_and_the_same_call_resumes(
    number: signal.Signals, simulate: Simulate, handlers: dict[signal.Signals, Any]
) -> None:
    def interrupted(config: TrialConfig) -> Outcome:
        signal.raise_signal(number)
        return fits(config)

    simulate(interrupted)
    with pytest.raises(KeyboardInterrupt, match="study 'mine' was stopped"):
        of_demo()
    assert {number: signal.getsignal(number) for number in STOP_SIGNALS} == handlers
    simulate(fits)
    assert of_demo().trials["fits"] == 3


def test_a_study_in_another_thread_leaves_signals_alone(
    simulate: Simulate, handlers: dict[signal.Signals, Any]
) -> None:
    seen: list[Any] = []
    done: list[Study] = []

    def watched(config: TrialConfig) -> Outcome:
        seen.append({number: signal.getsignal(number) for number in STOP_SIGNALS})
        return fits(config)

    simulate(watched)
    thread = threading.Thread(target=lambda: done.append(of_demo()))
    thread.start()
    thread.join()
    assert done[0].trials["total"] == 3
    assert seen == [handlers] * 3


def test_a_plan_is_what_the_command_prints(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = plan("a10", model="demo", exact=True, micro_batch_size=8)
    other = plan("a10", gpu="l4", model="demo", exact=True)
    assert capsys.readouterr() == ("", "")
    typed = ("a10", "--model", "demo", "--exact", "--micro-batch-size", "8", "--json")
    document = json.loads(sweep("plan", *typed).out)
    assert planned.document() == document
    assert planned.config == TrialConfig(micro_batch_size=8)
    assert planned.fits is True
    assert planned.peak_allocated_bytes == document["peak_allocated_bytes"]
    assert (planned.gpu.name, other.gpu.name) == ("a10", "l4")


IMPORT = """
import signal, sys, qlora_sweep
print(sorted({'torch', 'optuna', 'transformers', 'pydantic'} & sys.modules.keys()))
print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
print({'plan', 'tune', 'best'} <= {*dir(qlora_sweep)}, hasattr(qlora_sweep, 'json'))
from qlora_sweep import *
print(sorted({'torch', 'optuna', 'transformers'} & sys.modules.keys()))
from qlora_sweep.sweep import api
print(set(api.__all__) == set(qlora_sweep.__all__), api.plan is plan)
"""


def test_the_import_offers_its_names_and_touches_nothing() -> None:
    done = subprocess.run((sys.executable, "-c", IMPORT), capture_output=True, text=True)
    expected = ["[]", "True", "True False", "[]", "True True"]
    assert done.stdout.splitlines() == expected, done.stderr
