"""A training's process is followed to an end whatever it does, and none of it stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.models import load_model_spec
from sweep.finetuning import job as jobs
from sweep.finetuning.job import Patience, follow_job
from sweep.finetuning.wire import Alive, Saved, Stopped, TrainingJob, Unable
from tests.sweep.finetuning import misbehaving_training as wrong

MODULE = "tests.sweep.finetuning.misbehaving_training"
SHORT = Patience(start=20.0, working=1.0, stop=1.0, closed=1.0)


@pytest.fixture(autouse=True)
def findable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def training(output: Path, how: int) -> TrainingJob:
    return TrainingJob(
        config=TrialConfig(),
        model=load_model_spec("demo").to_json(),
        device="cpu",
        output=str(output),
        seed=how,
    )


def followed(output: Path, how: int, **options: Any) -> Any:
    return follow_job(training(output, how), patience=SHORT, module=MODULE, **options)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (wrong.CRASHES, ("SIGABRT", "it was the cable")),
        (wrong.SAYS_NONSENSE, ("'hello'",)),
        (wrong.IS_SILENT, ("no sign of life for 1 s, in a training step",)),
        (wrong.CLAIMS_INFINITY, ("not finite",)),
    ],
)
def test_a_process_that_goes_wrong_is_the_machines_fault_and_its_checkpoint_is_named(
    tmp_path: Path, how: int, said: tuple[str, ...]
) -> None:
    end = followed(tmp_path, how)
    assert isinstance(end, Unable)
    assert end.checkpoint_step == 4
    assert all(words in end.reason for words in said), end.reason
    assert (tmp_path / jobs.LOG).exists()


def test_the_first_interrupt_asks_the_training_to_stop_and_waits_for_its_checkpoint(
    tmp_path: Path,
) -> None:
    def interrupt(event: object) -> None:
        if isinstance(event, Saved):
            raise KeyboardInterrupt

    end = followed(tmp_path, wrong.STOPS_WHEN_ASKED, observe=interrupt)
    assert end == Stopped(step=5, checkpoint_step=5)


def test_the_second_interrupt_ends_a_training_that_does_not_stop(tmp_path: Path) -> None:
    heard: list[object] = []

    def interrupt(event: object) -> None:
        heard.append(event)
        if isinstance(event, Alive | Saved):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        followed(tmp_path, wrong.IS_DEAF, observe=interrupt)
    assert len(heard) == 2
