"""Nine in ten ratios of two measured steps of one GPU and source are within the stated interval."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest

from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.sweep.predict.speed.predictor import FACTORS, NINE_IN_TEN, StepTimes, ratio_spread
from tests.sweep.predict.speed import stated_speeds

pytestmark = pytest.mark.integration


def test_ratios_of_published_steps_are_within_their_interval() -> None:
    groups = defaultdict(list)
    for step in stated_speeds.steps():
        if step.is_published:
            groups[step.gpu, step.source].append(step)
    inside = []
    for (name, _), steps in groups.items():
        gpu, known = find_gpu(name), []
        for step in steps:
            times = StepTimes([step.config], model=step.model, gpu=gpu)
            slopes = times.slopes(np.zeros(len(FACTORS)), slice(None))[0]
            off = math.log(step.seconds / float(times.seconds[0]))
            known.append((off, slopes, float(times.own_spread[0])))
        for one, other in itertools.combinations(known, 2):
            spread = math.hypot(ratio_spread(one[1], other[1], gpu=gpu), one[2], other[2])
            inside.append(abs(one[0] - other[0]) <= NINE_IN_TEN * spread)
    assert len(inside) > 500
    assert 0.85 <= sum(inside) / len(inside) <= 0.97
