"""What steps on the GPU that stands in say of the target, against steps measured on two GPUs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.predict.speed.predictor import StepTimes
from qlora_sweep.sweep.predict.speed.stand_in import TRANSFERS, StandIn, Took
from tests.sweep.predict.speed.stated_speeds import Step, own, published

MODEL = load_model_spec("mistral-7b-v0.3")
SMALL = TrialConfig(micro_batch_size=1, kernels="fused-loss")
LARGE = TrialConfig(micro_batch_size=16, kernels="fused-loss")
CONFIGS = (LARGE, TrialConfig(micro_batch_size=32, kernels="fused-loss"), SMALL)


def of(gpu: str, configs: Sequence[TrialConfig] = CONFIGS) -> StepTimes:
    return StepTimes(configs, model=MODEL, gpu=find_gpu(gpu), evidence=None)


def stand_in() -> StandIn:
    return StandIn(of("h200"), of("a10"))


def measured(*times: float) -> dict[int, Took]:
    """Steps that take so many times what is predicted of an H200."""
    seconds = of("h200").seconds
    return {row: Took(float(seconds[row]) * slow, 0.005) for row, slow in enumerate(times)}


# How far errors transfer


def alike(step: Step) -> object:
    """What two steps have in common that differ in the micro-batch alone."""
    config = step.config
    keys = {"micro_batch_size", "effective_batch_size", "optimizer", "double_quant"}
    keys |= {"expandable_segments", "learning_rate", "quantized_fraction", "checkpoint_fraction"}
    rest = config.model_dump(exclude=keys)
    return step.model.name, str(rest), round(4 * config.checkpoint_fraction)


def apart(one: Step, other: Step) -> float:
    sizes = (step.config.micro_batch_size for step in (one, other))
    return abs(math.log2(next(sizes) / next(sizes)))


def pairs(ones: Sequence[Step], others: Sequence[Step]) -> Iterator[tuple[float, float]]:
    """Yield the errors of steps that two GPUs ran, each step once."""
    left = list(others)
    for one in sorted(ones, key=lambda step: step.config.micro_batch_size):
        near = [step for step in left if alike(step) == alike(one) and apart(one, step) <= 2]
        if near:
            other = min(near, key=lambda step: apart(one, step))
            left.remove(other)
            yield one.measured.log_ratio, other.measured.log_ratio


@pytest.mark.integration
def test_what_transfers_is_what_steps_on_two_gpus_show() -> None:
    groups = defaultdict(list)
    for step in (*published(), *own()):
        if math.isfinite(step.measured.log_ratio):
            groups[step.gpu, step.source].append(step)
    names = sorted(groups)
    products, squares, degrees = 0.0, 0.0, 0
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            found = [] if one[0] == other[0] else list(pairs(groups[one], groups[other]))
            if len(found) < 2:
                continue
            # What a GPU, or a source, is off by as a whole is no part of it.
            errors = np.array(found) - np.mean(found, axis=0)
            products += float(errors[:, 0] @ errors[:, 1])
            squares += float((errors**2).sum()) / 2.0
            degrees += len(found) - 1
    assert degrees >= 12
    assert abs(products / squares - TRANSFERS) < 1.0 / math.sqrt(degrees)


# What is made of it


def test_a_step_that_is_slow_on_both_gpus_alone_is_slower_than_predicted() -> None:
    predicted = stand_in().log_seconds
    corrected = stand_in().corrected(measured(1.3, 1.0))
    moved = corrected - predicted
    assert 0.0 < moved[0] < math.log(1.3)
    assert moved[1] < 0.0
    assert moved[2] == 0.0, "it was not measured"


def test_what_all_steps_have_in_common_says_nothing_of_the_target() -> None:
    for times in ((1.4,), (1.4, 1.4)):
        assert stand_in().corrected(measured(*times)) == pytest.approx(stand_in().log_seconds)
    assert stand_in().own_spread(measured(1.4)) == pytest.approx(of("a10").own_spread)
    surer = stand_in().own_spread(measured(1.4, 1.4))
    assert (surer[:2] < of("a10").own_spread[:2]).all()


def test_a_step_that_waits_for_the_launches_of_the_stand_in_is_not_carried_over_as_slow() -> None:
    assert of("h200").host_shares[2] > 0.8
    slow = measured(1.0, 1.0) | {2: Took(3.0 * float(of("h200").seconds[2]), 0.005)}
    moved = stand_in().corrected(slow) - stand_in().log_seconds
    assert abs(moved[2]) < 0.01
    assert stand_in().expected_shift(0.01)[2] < 0.1 * stand_in().expected_shift(0.01)[0]


def test_a_noisy_measurement_tells_less() -> None:
    sure, unsure = measured(1.3, 1.0), measured(1.3, 1.0)
    unsure[0] = unsure[0]._replace(noise=0.3)
    moved = [stand_in().corrected(each)[0] - stand_in().log_seconds[0] for each in (sure, unsure)]
    assert 0.0 < moved[1] < 0.2 * moved[0]


def test_of_a_gpu_that_the_catalogue_does_not_have_nothing_is_carried_over() -> None:
    unknown = StandIn(None, of("a10"))
    assert unknown.corrected(measured(1.3, 1.0)) == pytest.approx(unknown.log_seconds)
    assert unknown.expected_shift(0.01) == pytest.approx(np.zeros(3))
