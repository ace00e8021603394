"""Which steps of a training are a measure of its speed."""

from __future__ import annotations

import torch

from sweep.finetuning.course import WARMUP_STEPS, Course, Steps
from sweep.training.adapters import Compilation
from sweep.training.device import open_device

COMPILED = (0, WARMUP_STEPS + 2)
"""Steps in which a width comes that there was not before."""


def test_a_step_in_which_something_is_compiled_is_no_measure_of_speed() -> None:
    compilation, steps = Compilation(), Steps()
    course = Course(open_device("cpu"), steps, checks_gradients=True, compilation=compilation)
    course.begin_stretch()
    for index in range(WARMUP_STEPS + 5):
        course.add_batches(torch.tensor(10), computed=12)
        if index in COMPILED:
            compilation.seconds += 3.0
        course.add_loss(torch.tensor(1.0))
        course.end_step(learning_rate=1e-4)
    course.settle()
    assert [index for index, is_warm in enumerate(steps.is_warm) if is_warm] == [
        WARMUP_STEPS,
        WARMUP_STEPS + 1,
        WARMUP_STEPS + 3,
        WARMUP_STEPS + 4,
    ]
    assert steps.measured == 4
