"""Owns the prediction of a configuration's step time: how fast, held back by what, and how sure.

The step is what the card must do (matrix products by shape, adapters, attention, 4-bit expansion,
elementwise traffic, loss, optimizer) at the card's rates, against what the host must launch. Pure;
knows nothing of torch, storage or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from sweep.predict.speed.arrays import StepTimes
from sweep.predict.speed.calibration import Calibration, in_order
from sweep.predict.speed.phases import OVERHEAD_SECONDS, StepPhases, overlapped, refusal
from sweep.predict.speed.work import TERMS

Bottleneck = Literal["compute", "bandwidth", "launch"]


@dataclass(frozen=True)
class SpeedPrediction:
    """How long an optimizer step will take, accumulation included."""

    step_seconds: float
    tokens_per_second: float
    """At full rows; every token carries loss."""
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
    reason = refusal(config, model=model, gpu=gpu)
    if reason is not None:
        raise InputError(reason)
    times = StepTimes([config], model=model, gpu=gpu)
    factors = in_order(None if calibration is None else calibration.factors)
    seconds, step = float(times.seconds(calibration)[0]), times.phases
    return SpeedPrediction(
        step_seconds=seconds,
        tokens_per_second=config.tokens_per_step / seconds,
        bottleneck=_bottleneck(step, factors),
        flops_utilization=float(step.model_flops[0] / seconds / step.peak_flops[0]),
        terms=_terms(step, factors),
        basis="predicted" if calibration is None else "calibrated",
        uncertainty=float(times.uncertainty(calibration)[0]),
        trials=0 if calibration is None else calibration.trials,
    )


def _terms(step: StepPhases, factors: NDArray[np.float64]) -> dict[str, float]:
    *of_card, launch, overhead = factors
    by_term = step.device[0] * of_card
    device = by_term.sum(axis=1)
    waits = overlapped(device, step.launch[0] * launch) - device
    return {
        **dict(zip(TERMS, by_term.sum(axis=0).tolist(), strict=True)),
        "launch": float(waits.sum()),
        "overhead": OVERHEAD_SECONDS * float(overhead),
    }


def _bottleneck(step: StepPhases, factors: NDArray[np.float64]) -> Bottleneck:
    *of_card, launch, _ = factors
    waits: dict[Bottleneck, float] = {
        "compute": float((step.compute[0] * of_card).sum()),
        "bandwidth": float((step.memory[0] * of_card).sum()),
    }
    if step.launch[0].sum() * launch > sum(waits.values()):
        return "launch"
    return max(waits, key=lambda name: waits[name])
