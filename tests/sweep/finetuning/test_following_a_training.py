"""A training's process is followed to an end whatever it does, and none of it stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.records import INTERRUPTED, Crashed, TimedOut
from qlora_sweep.sweep.finetuning.protocol import Saved, TrainingJob, TrainingProgress
from qlora_sweep.sweep.finetuning.training import follow
from qlora_sweep.sweep.running.supervisor import Deadlines
from tests.sweep.finetuning import misbehaving_training as wrong

SHORT = Deadlines(start=20.0, build=1.0, closed=1.0)


@pytest.fixture(autouse=True)
def findable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


def followed(output: Path, how: int, **options: Any) -> Any:
    job = TrainingJob(
        config=TrialConfig(),
        model=load_model_spec("demo").to_json(),
        device="cpu",
        output=str(output),
        seed=how,
    )
    return follow(job, deadlines=SHORT, module=wrong.__name__, **options)


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        (wrong.CRASHES, Crashed, ("SIGABRT", "it was the cable")),
        (wrong.IS_SILENT, TimedOut, ("no sign of life for 1 s",)),
        (wrong.CLAIMS_INFINITY, Crashed, ("finite number",)),
    ],
)
def test_a_process_that_goes_wrong_is_an_end_that_says_how(
    tmp_path: Path, how: int, kind: type[Any], said: tuple[str, ...]
) -> None:
    end = followed(tmp_path, how)
    assert isinstance(end, kind), end
    assert end.phase == "measure"
    assert all(words in end.detail for words in said), end.detail
    assert (tmp_path / "training.log").exists()


def test_the_first_interrupt_asks_the_training_to_stop_and_waits_for_its_checkpoint(
    tmp_path: Path,
) -> None:
    def interrupt(event: object) -> None:
        if isinstance(event, Saved) and event.step == 4:
            raise KeyboardInterrupt

    assert followed(tmp_path, wrong.STOPS_WHEN_ASKED, observe=interrupt) == INTERRUPTED


def test_the_second_interrupt_ends_a_training_that_does_not_stop(tmp_path: Path) -> None:
    heard: list[object] = []

    def interrupt(event: object) -> None:
        heard.append(event)
        assert isinstance(event, TrainingProgress | Saved)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        followed(tmp_path, wrong.IS_DEAF, observe=interrupt)
    assert len(heard) == 2
