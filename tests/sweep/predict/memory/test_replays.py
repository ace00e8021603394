"""Replays of many steps: each comes to what it comes to alone, wherever it is replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweep.predict.memory import replay
from sweep.predict.memory.predictor import TracingPredictor
from sweep.predict.memory.replay import Step, replay_all, replay_uncapped
from tests.sweep.predict.memory.imagined_profile import MODEL, ImaginedTracer
from tests.sweep.predict.mixed_space import mixed_configs


@pytest.fixture
def steps(tmp_path: Path) -> list[Step]:
    predictor = TracingPredictor(MODEL, cache_dir=tmp_path, tracer=ImaginedTracer())
    return list(predictor.predict_all(mixed_configs(60)).steps.values())


@pytest.mark.parametrize("worth_processes", [1, 10_000])
def test_each_of_many_steps_comes_to_what_it_comes_to_alone(
    steps: list[Step], worth_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "WORTH_PROCESSES", worth_processes)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    told: list[tuple[int, int]] = []
    found = replay_all(steps, on_progress=lambda done, of: told.append((done, of)))
    assert found == [replay_uncapped(step) for step in steps]
    assert told[0] == (0, len(steps))
    assert told[-1] == (len(steps), len(steps))


def test_equal_steps_are_replayed_once(steps: list[Step]) -> None:
    told: list[tuple[int, int]] = []
    found = replay_all([*steps, *steps], on_progress=lambda done, of: told.append((done, of)))
    assert told[-1] == (len(steps), len(steps))
    assert found[: len(steps)] == found[len(steps) :]
