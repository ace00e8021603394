"""Owns the prediction of a configuration's step time: how fast, held back by what, and how sure.

The step is what the card must do (matrix products by shape, adapters, attention, 4-bit expansion,
elementwise traffic, loss, optimizer) at the card's rates, against what the host must launch. Pure;
knows nothing of torch, storage or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from search_spaces.config import TrialConfig
from search_spaces.gpus import GpuSpec, SpeedUncertainty
from search_spaces.models import ModelSpec
from sweep.predict.speed.calibration import FACTORS, Calibration, Factor, launch_share
from sweep.predict.speed.phases import StepPhases, overlapped, step_phases
from sweep.predict.speed.work import TERMS, Term

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
    step = step_phases(config, model=model, gpu=gpu)
    factors: dict[Factor, float] = dict.fromkeys(FACTORS, 1.0)
    if calibration is not None:
        factors = calibration.factors
    terms = _terms(step, factors)
    seconds = sum(terms.values())
    return SpeedPrediction(
        step_seconds=seconds,
        tokens_per_second=config.tokens_per_step / seconds,
        bottleneck=_bottleneck(step, factors),
        flops_utilization=step.model_flops / seconds / step.peak_flops,
        terms=terms,
        basis="predicted" if calibration is None else "calibrated",
        uncertainty=_uncertainty(step, factors, gpu.speed_uncertainty, calibration),
        trials=0 if calibration is None else calibration.trials,
    )


def _terms(step: StepPhases, factors: dict[Factor, float]) -> dict[str, float]:
    terms: dict[str, float] = dict.fromkeys(TERMS, 0.0)
    terms["launch"] = 0.0
    for phase in step.phases:
        by_term = {term: phase.device(term) * factors[term] for term in TERMS}
        device = sum(by_term.values())
        for term, seconds in by_term.items():
            terms[term] += seconds
        terms["launch"] += overlapped(device, phase.launch * factors["launch"]) - device
    terms["overhead"] = step.overhead * factors["overhead"]
    return terms


def _uncertainty(
    step: StepPhases,
    factors: dict[Factor, float],
    card: SpeedUncertainty,
    calibration: Calibration | None,
) -> float:
    known = card if calibration is None else calibration.uncertainty(card)
    launches = launch_share(step, factors)
    return launches * known.launch + (1.0 - launches) * known.device


def _bottleneck(step: StepPhases, factors: dict[Factor, float]) -> Bottleneck:
    waits: dict[Bottleneck, float] = {
        "compute": _total([phase.compute for phase in step.phases], factors),
        "bandwidth": _total([phase.memory for phase in step.phases], factors),
    }
    launch = sum(phase.launch for phase in step.phases) * factors["launch"]
    if launch > sum(waits.values()):
        return "launch"
    return max(waits, key=lambda name: waits[name])


def _total(stretches: list[dict[Term, float]], factors: dict[Factor, float]) -> float:
    return sum(stretch[term] * factors[term] for stretch in stretches for term in TERMS)
