"""The trials that `sweep plan --calibrate` prints, on GPUs whose factors are drawn."""

from __future__ import annotations

import itertools
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.loading import load_space, parse_space
from qlora_sweep.storage.contributions import read_contribution
from qlora_sweep.sweep.planning.calibrating import TRIALS, Lessons, lessons
from qlora_sweep.sweep.planning.survey import survey
from qlora_sweep.sweep.predict.contributions import fitted, sessions_of
from qlora_sweep.sweep.predict.speed.contributed import SESSION
from qlora_sweep.sweep.predict.speed.predictor import FACTORS, NINE_IN_TEN, StepTimes
from qlora_sweep.sweep.terminal.drawing import rendered
from qlora_sweep.sweep.terminal.plan_screen import calibrating
from tests.sweep.imagined_study import MISTRAL
from tests.sweep.planning.imagined import a_forecaster, an_offer
from tests.sweep.predict.contributed import a_text

DRAWS = 150


@pytest.fixture(scope="module")
def found() -> Lessons:
    return lessons(survey(load_space("a10"), a_forecaster()), offers=[an_offer()])


def test_what_is_typed_measures_these_trials_and_no_others(found: Lessons) -> None:
    echo, run, *_ = found.commands
    # Whole, however narrow the screen is.
    assert f"$ {echo}" in rendered(calibrating([found]), is_terminal=False).splitlines()
    _, text, _, name = shlex.split(echo)
    assert run.endswith(name)
    space = parse_space(text, label=name)
    values = (space.values_of(key) for key in space.dimensions)
    rows = (dict(zip(space.dimensions, row, strict=True)) for row in itertools.product(*values))
    held = [space.config(row) for row in rows if not space.leaves_out(row)]
    wanted = [lesson.forecast.config for lesson in found.lessons]
    assert len(held) == TRIALS
    assert {canonical(config) for config in held} == {canonical(config) for config in wanted}


def test_they_take_minutes_and_are_priced(found: Lessons) -> None:
    assert 60 < found.seconds < 240
    assert found.usd == pytest.approx(3.6 * found.seconds / 3600)
    # The classes of numerics, between which the answer chooses, are among what is learnt.
    assert len({lesson.forecast.config.numerics for lesson in found.lessons}) > 1


class Drawn:
    """GPUs whose factors are drawn from what is known of an A10."""

    def __init__(self, trials: list[TrialConfig], answers: list[TrialConfig]) -> None:
        self.trials = trials
        self._gpu = a_forecaster().gpu
        configs = [*trials, *answers]
        self._times = StepTimes(configs, model=MISTRAL, gpu=self._gpu, evidence=None)
        self._noise = self._times.own_spread
        self._answers = answers

    def interval(self, draw: np.random.Generator, path: Path) -> tuple[float, bool]:
        """Return the spread of the answers' speeds after the trials, and whether that of the first
        was true."""
        zeros, rows = np.zeros(len(FACTORS)), slice(None)
        factors = draw.multivariate_normal(zeros, self._times.spread)

        def measured() -> Any:
            session = draw.multivariate_normal(zeros, SESSION)
            return self._times.log_seconds(factors + session, rows) + draw.normal(0, self._noise)

        seconds = np.exp(measured()[: len(self.trials)]).tolist()
        pairs = zip(self.trials, seconds, strict=True)
        rest = {"peak_allocated_bytes": GIB, "peak_reserved_bytes": GIB, "device_seconds": 1.0}
        of_trials = [
            {"config": c.model_dump(mode="json"), "step_seconds": s, **rest} for c, s in pairs
        ]
        path.write_text(a_text("a10", MISTRAL.name, of_trials, versions={"torch": "2.11.0"}))
        evidence, _ = fitted(sessions_of([read_contribution(path)]))
        after = StepTimes(self._answers, model=MISTRAL, gpu=self._gpu, evidence=evidence)
        off = measured()[len(self.trials)] - math.log(after.seconds[0])
        is_inside = abs(off) <= NINE_IN_TEN * float(after.log_spread[0])
        return float(np.sqrt((after.log_spread**2).sum())), is_inside


def test_after_them_the_interval_is_as_narrow_as_printed_and_holds_nine_in_ten(
    found: Lessons, tmp_path: Path
) -> None:
    draw, answer = np.random.default_rng(0), found.answer.config
    drawn = Drawn([lesson.forecast.config for lesson in found.lessons], [answer])
    outcomes = [drawn.interval(draw, tmp_path / "a10.jsonl") for _ in range(DRAWS)]
    spreads, is_inside = zip(*outcomes, strict=True)
    before, after = found.log_spreads
    assert after < 0.75 * before
    assert np.mean(spreads) == pytest.approx(after, rel=0.15)
    # What 0.9 of so many comes to by chance, and no less than 0.85 and no more than 0.95 of many.
    assert 0.82 <= np.mean(is_inside) <= 0.97
