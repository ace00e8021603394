"""How long configurations' optimizer steps take: how fast, held back by what, and how sure.

The step is what the GPU must do (matrix products by shape, adapters, attention, 4-bit expansion,
elementwise traffic, loss, optimizer) at the GPU's rates, against what the host must launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from sweep.predict.speed.calibration import (
    EIGHT_BIT_DOUBT,
    FACTORS,
    Array,
    Calibration,
    Factor,
    in_order,
)
from sweep.predict.speed.kernels import MASKED_DOUBT
from sweep.predict.speed.phases import StepPhases, overlapped, refusal

Bottleneck = Literal["compute", "bandwidth", "launch"]
PARALLEL_DOUBT = 0.15
"""How far a step of several GPUs may be off beside what one of one GPU may: seen was one kind of
GPU."""
SHARDED_DOUBT = 0.4
"""The same where they share the model, and gather every layer twice in each micro-batch: 0.19 at
most where NVLink joins them; never measured through PCIe."""


@dataclass(frozen=True)
class SpeedPrediction:
    """How long an optimizer step will take, accumulation included."""

    step_seconds: float
    tokens_per_second: float
    """At full rows; every token carries loss. Of all GPUs together."""
    bottleneck: Bottleneck
    """What most of the step waits for: matrix units, memory, or the host's launches."""
    flops_utilization: float
    """The model's FLOP/s over the GPU's dense peak; what is recomputed does not count."""
    terms: dict[str, float]
    """Seconds by what they go into, ``launch`` being the GPU's wait; they add up to the step."""
    basis: Literal["predicted", "calibrated"]
    uncertainty: float
    """Relative: nine in ten of such steps take `step_seconds` times 1 - this to 1 + this.

    The GPU's own, between what it is for time that the GPU takes and for time that the host's
    launches take; smaller after trials on the GPU, for further steps of the same study.
    """
    trials: int = 0
    """Measured trials that it was calibrated by."""


class StepTimes:
    """The optimizer steps of configurations on a GPU, under whatever calibration is asked about.

    Args:
        configs: what is to be trained; one row of every answer each.
        model: the model's config; nothing is loaded.
        gpu: what runs it.

    Every answer is not a number where the architecture is not known or the GPU has no rate for the
    compute type. A calibration has factors fitted to trials on that GPU; None takes the catalogue's
    rates.
    """

    def __init__(self, configs: Sequence[TrialConfig], *, model: ModelSpec, gpu: GpuSpec) -> None:
        self.configs = configs
        self.phases = StepPhases.of(configs, model=model, gpu=gpu)
        self._gpu = gpu

    def seconds(self, calibration: Calibration | None) -> Array:
        """Return the seconds of each step, accumulation included."""
        return self.phases.seconds(in_order(calibration))

    def slopes(self, calibration: Calibration | None) -> Array:
        """Return seconds per unit of each of `FACTORS`, by configuration and factor."""
        return self.phases.slopes(in_order(calibration))

    def launch_shares(self, calibration: Calibration | None) -> Array:
        """Return the share of each step that goes with the host's launches, not with the GPU.

        By that many per cent the step is longer where a launch costs one per cent more.
        """
        return self._shares("launch", calibration)

    def uncertainty(self, calibration: Calibration | None) -> Array:
        """Return how far each step may be off, relative: nine in ten take its seconds times 1 -
        this to 1 + this.

        The GPU's own, between what it is for time that the GPU takes and for time that the host's
        launches take; smaller after trials on the GPU, for further steps of the same study.
        Of packed rows attention's share is unsure beside that, so are 8-bit products where no
        training in such was measured, and a step of several GPUs.
        """
        known, seen = self._gpu.speed_uncertainty, {"16-bit", *self._gpu.measured_8bit}
        if calibration is not None:
            known, seen = calibration.uncertainty(known), seen | calibration.numerics
        launches = self._shares("launch", calibration)
        stated = launches * known.launch + (1.0 - launches) * known.device
        masks = np.array([_attention_doubt(config) for config in self.configs], np.float64)
        attention = self._shares("attention", calibration) * masks
        unseen = [0.0 if config.numerics in seen else EIGHT_BIT_DOUBT for config in self.configs]
        eight_bit = self._shares("eight_bit", calibration) * np.array(unseen)
        parallel = np.array([_parallel_doubt(config) for config in self.configs], np.float64)
        # What a GPU is off by as a whole has nothing to do with what its 8-bit products are.
        return np.asarray(np.hypot(stated, eight_bit) + attention + parallel)

    def _shares(self, factor: Factor, calibration: Calibration | None) -> Array:
        """Return the share of each step that goes with a factor."""
        factors, column = in_order(calibration), FACTORS.index(factor)
        part = self.phases.slopes(factors)[:, column] * factors[column]
        return np.asarray(part / self.phases.seconds(factors))

    def terms(self, calibration: Calibration | None) -> Array:
        """Return seconds by configuration and factor; of launches what the GPU waits for them."""
        *of_gpu, launch, overhead = in_order(calibration)
        by_term = self.phases.device * of_gpu
        device = by_term.sum(axis=2)
        waits = (overlapped(device, self.phases.launch * launch) - device).sum(axis=1)
        return np.column_stack([by_term.sum(axis=1), waits, self.phases.fixed * overhead])

    def bottlenecks(self, calibration: Calibration | None) -> list[Bottleneck]:
        """Return what most of each step waits for."""
        *of_gpu, launch, _ = in_order(calibration)
        parts = (self.phases.compute, self.phases.memory)
        compute, memory = ((part * of_gpu).sum(axis=(1, 2)) for part in parts)
        waits = self.phases.launch.sum(axis=1) * launch > compute + memory
        names: tuple[Bottleneck, ...] = ("compute", "bandwidth", "launch")
        return [names[code] for code in np.where(waits, 2, memory > compute).tolist()]


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
        gpu: what runs it.
        calibration: factors fitted to trials on that GPU; None takes the catalogue's rates.

    Raises:
        InputError: the architecture is not known, or the GPU has no rate for the compute type.
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
    rows = zip(
        configs,
        seconds.tolist(),
        (times.phases.model_flops / seconds / times.phases.peak_flops).tolist(),
        times.uncertainty(calibration).tolist(),
        times.terms(calibration).tolist(),
        times.bottlenecks(calibration),
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


def _attention_doubt(config: TrialConfig) -> float:
    """Return how far attention's time may be off because rows are packed, relative."""
    if config.packing != "packed" or config.attention == "eager":
        return 0.0
    # Flash attention is told where examples begin; what that saves was never measured.
    return MASKED_DOUBT if config.attention == "sdpa" else 1.0


def _parallel_doubt(config: TrialConfig) -> float:
    """Return how far a step may be off because several GPUs take it."""
    if config.is_sharded:
        return SHARDED_DOUBT
    return PARALLEL_DOUBT if config.data_parallel > 1 else 0.0
