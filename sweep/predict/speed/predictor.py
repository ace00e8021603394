"""Owns the prediction of a configuration's step time: how fast, held back by what, and how sure.

The step is what the card must do (matrix products by shape, adapters, attention, 4-bit expansion,
elementwise traffic, loss, optimizer) at the card's rates, against what the host must launch. Pure;
knows nothing of torch, storage or files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from sweep.predict.speed.arrays import StepTimes
from sweep.predict.speed.calibration import FACTORS, Calibration, in_order
from sweep.predict.speed.phases import StepPhases, overlapped, refusal

Bottleneck = Literal["compute", "bandwidth", "launch"]


@dataclass(frozen=True)
class SpeedPrediction:
    """How long an optimizer step will take, accumulation included."""

    step_seconds: float
    tokens_per_second: float
    """At full rows; every token carries loss. Of all cards together."""
    bottleneck: Bottleneck
    """What most of the step waits for: matrix units, memory, or the host's launches."""
    flops_utilization: float
    """The model's FLOP/s over the card's dense peak; what is recomputed does not count."""
    terms: dict[str, float]
    """Seconds by what they go into, ``launch`` being the card's wait; they add up to the step."""
    basis: Literal["predicted", "calibrated"]
    uncertainty: float
    """Relative: nine in ten of such steps take `step_seconds` times 1 - this to 1 + this.

    The card's own, between what it is for time that the card takes and for time that the host's
    launches take; smaller after trials on the card, for further steps of the same study.
    """
    trials: int = 0
    """Measured trials that it was calibrated by."""


def predict_step(
    config: TrialConfig,
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    calibration: Calibration | None = None,
) -> SpeedPrediction:
    """Return the predicted step of ``config``.

    Args:
        config: what is to be trained.
        model: the model's config; nothing is loaded.
        gpu: the card that runs it.
        calibration: factors fitted to trials on that card; None takes the catalogue's rates.

    Raises:
        InputError: the architecture is not known, or the card has no rate for the compute type.
    """
    (prediction,) = predict_steps([config], model=model, gpu=gpu, calibration=calibration)
    if isinstance(prediction, InputError):
        raise prediction
    return prediction


def predict_steps(
    configs: Sequence[TrialConfig],
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    calibration: Calibration | None = None,
) -> list[SpeedPrediction | InputError]:
    """Return the predicted step of each configuration, or why it has none.

    Arguments are those of `predict_step`.
    """
    times = StepTimes(configs, model=model, gpu=gpu)
    seconds = times.seconds(calibration)
    factors = in_order(None if calibration is None else calibration.factors)
    rows = zip(
        configs,
        seconds.tolist(),
        (times.phases.model_flops / seconds / times.phases.peak_flops).tolist(),
        times.uncertainty(calibration).tolist(),
        _terms(times.phases, factors).tolist(),
        _bottlenecks(times.phases, factors),
        strict=True,
    )
    return [
        InputError(str(refusal(config, model=model, gpu=gpu)))
        if math.isnan(step_seconds)
        else SpeedPrediction(
            step_seconds=step_seconds,
            tokens_per_second=config.tokens_per_step / step_seconds,
            bottleneck=bottleneck,
            flops_utilization=utilization,
            terms=dict(zip(FACTORS, terms, strict=True)),
            basis="predicted" if calibration is None else "calibrated",
            uncertainty=uncertainty,
            trials=0 if calibration is None else calibration.trials,
        )
        for config, step_seconds, utilization, uncertainty, terms, bottleneck in rows
    ]


def _terms(steps: StepPhases, factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return seconds by configuration and factor; of launches what the card waits for them."""
    *of_card, launch, overhead = factors
    by_term = steps.device * of_card
    device = by_term.sum(axis=2)
    waits = (overlapped(device, steps.launch * launch) - device).sum(axis=1)
    fixed = steps.fixed * overhead
    return np.column_stack([by_term.sum(axis=1), waits, fixed])


def _bottlenecks(steps: StepPhases, factors: NDArray[np.float64]) -> list[Bottleneck]:
    *of_card, launch, _ = factors
    compute, memory = ((part * of_card).sum(axis=(1, 2)) for part in (steps.compute, steps.memory))
    waits = steps.launch.sum(axis=1) * launch > compute + memory
    names: tuple[Bottleneck, ...] = ("compute", "bandwidth", "launch")
    codes = np.where(waits, 2, memory > compute)
    return [names[code] for code in codes.tolist()]
