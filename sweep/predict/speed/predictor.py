"""How long configurations' optimizer steps take: how fast, held back by what, and how sure.

The step is what the GPU must do (matrix products by shape, adapters, attention, 4-bit expansion,
elementwise traffic, loss, optimizer) at the GPU's rates, against what the host must launch. Every
factor multiplies such a term and cannot be negative; few trials move it little from what the
catalogue says. In logarithms the model is nearly straight and its uncertainty is normal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import Numerics, TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec, SpeedUncertainty
from search_spaces.models import ModelSpec
from sweep.predict.on_texts import ShapesOnTexts, full_rows, tokens_per_step
from sweep.predict.speed.contributed import Contributed, contributed_speed, residual_spread
from sweep.predict.speed.kernels import MASKED_DOUBT
from sweep.predict.speed.steps import TERMS, Rows, StepPhases, Term, overlapped, refusal

Factor = Term | Literal["launch", "overhead"]
FACTORS: tuple[Factor, ...] = (*TERMS, "launch", "overhead")

Array = NDArray[np.float64]

NINE_IN_TEN = 1.645
"""Standard deviations to either side that hold nine in ten."""
CARD_SPREAD = 0.3
"""How far a whole GPU may be from its catalogue entry's rates: clocks, power limit, cooling."""
EIGHT_BIT_SPREAD = 0.34
"""How far 8-bit products may be from what a GPU's 16-bit ones and its data sheet imply.

Measured over implied: of FP8 1.01 on a B200, 0.99 (in a training) and 0.92 on an H200, 0.96 on an
H100, 0.82 on an RTX 5090, 0.67 on an H100 PCIe with scales by blocks; of INT8 0.70 on an H200 and
0.46 by a Triton kernel on an A100. This is the root mean square of their logarithms; sources are in
`docs/speed.md`. Where trainings in 8 bits were measured, it is as of the other matrix products.
"""
EIGHT_BIT_DOUBT = NINE_IN_TEN * EIGHT_BIT_SPREAD
"""How far 8-bit products may be off, relative, where no training in such was measured."""
FACTOR_SPREAD: dict[Factor, float] = {
    "matmul": 0.1,
    "eight_bit": EIGHT_BIT_SPREAD,
    "lora": 0.3,
    "attention": 0.3,
    "dequant": 0.3,
    "elementwise": 0.2,
    "loss": 0.3,
    "optimizer": 0.5,
    "launch": 0.5,
    "overhead": 1.0,
}
"""How far one term may be from its prediction beyond that; what the fit weighs trials against."""
STEP_NOISE = 0.02
"""Relative error of one trial: its median's interval, and what the model leaves out."""
ROUNDS = 30
"""The maximum of host and GPU is made straight again around each solution."""
DAMPING = 0.5
"""Share of the way to each solution: going all of it can swing between host and GPU for ever."""
UNCERTAINTY_AFTER_ONE = SpeedUncertainty(device=0.11, launch=0.45)
"""Nine in ten of a study's other steps are within this much once one trial is known.

From the trials of two studies on an H200. It falls with the root of their number; the host's part
is as much the host's pace from minute to minute, and is known least. Another day's session is off
by more than this.
"""
Bottleneck = Literal["compute", "bandwidth", "launch"]
PARALLEL_DOUBT = 0.15
"""How far a step of several GPUs may be off beside what one of one GPU may: seen was one kind of
GPU."""
SHARDED_DOUBT = 0.4
"""The same where they share the model, and gather every layer twice in each micro-batch: 0.19 at
most where NVLink joins them; never measured through PCIe."""


@dataclass(frozen=True)
class Calibration:
    """Factors by which a GPU's terms differ from the prediction."""

    gpu: str
    """GPU that the trials ran on."""
    trials: int
    """Trials that it was fitted to."""
    factors: dict[Factor, float]
    relative_error: float
    """Median relative error over those trials; an optimistic view of new ones."""
    numerics: frozenset[Numerics] = frozenset()
    """Classes of numerics among them."""

    def uncertainty(self, card: SpeedUncertainty) -> SpeedUncertainty:
        """Return how far steps of the same study may be off: never more than ``card`` says."""
        share = 1.0 / math.sqrt(self.trials)
        return SpeedUncertainty(
            device=min(card.device, max(STEP_NOISE, UNCERTAINTY_AFTER_ONE.device * share)),
            launch=min(card.launch, max(STEP_NOISE, UNCERTAINTY_AFTER_ONE.launch * share)),
        )


def in_order(calibration: Calibration | None) -> Array:
    """Return factors in the order of `FACTORS`; the catalogue's rates where there are none."""
    if calibration is None:
        return np.ones(len(FACTORS))
    return np.array([calibration.factors[factor] for factor in FACTORS])


def calibrate(
    observations: Sequence[tuple[TrialConfig, float]], *, model: ModelSpec, gpu: GpuSpec
) -> Calibration:
    """Fit the factors to measured trials.

    Args:
        observations: configurations that have a prediction, and their measured seconds per step.
        model: the model they were measured with.
        gpu: the GPU they were measured on.
    """
    assert observations, "calibrating needs trials"
    configs = [config for config, _ in observations]
    measured = np.array([seconds for _, seconds in observations])
    steps = StepPhases.of(configs, model=model, gpu=gpu)
    factors = _fitted(steps, measured, contributed_speed(gpu.name))
    errors = np.abs(steps.seconds(factors) / measured - 1.0)
    by_name = dict(zip(FACTORS, factors.tolist(), strict=True))
    classes = frozenset(config.numerics for config in configs)
    return Calibration(gpu.name, len(observations), by_name, float(np.median(errors)), classes)


def _fitted(steps: StepPhases, measured: Array, evidence: Contributed | None) -> Array:
    """Return the non-negative factors nearest to trials and prior, each error over its spread."""
    factors, covariance = np.ones(len(FACTORS)), factor_covariance()
    if evidence is not None:
        factors = np.exp(evidence.mean)
        covariance = evidence.spread * np.outer(factors, factors)
    # Only a fit needs it, and it takes longer to import than a plan takes to make.
    from scipy.optimize import nnls

    # What weighs factors against the catalogue's rates, a row for each direction.
    prior = np.linalg.cholesky(np.linalg.inv(covariance)).T
    targets = np.full(len(measured), 1.0 / STEP_NOISE)
    wanted = np.concatenate([targets, prior @ factors])
    for _ in range(ROUNDS):
        trials = steps.slopes(factors) / (measured[:, None] * STEP_NOISE)
        nearest, _ = nnls(np.vstack([trials, prior]), wanted)
        factors = factors + DAMPING * (nearest - factors)
    return factors


def factor_covariance(spread: Mapping[Factor, float] = FACTOR_SPREAD) -> Array:
    """Return how far the factors may be from the catalogue's rates, together: a covariance in the
    order of `FACTORS`."""
    on_card = np.array([float(factor in TERMS) for factor in FACTORS])
    spreads = np.array([spread[factor] for factor in FACTORS])
    return np.asarray(np.diag(spreads**2) + CARD_SPREAD**2 * np.outer(on_card, on_card))


def ratio_spread(
    config: TrialConfig, other: TrialConfig, *, model: ModelSpec, gpu: GpuSpec
) -> float:
    """Return how far two configurations' speed ratio may be off: a logarithm's standard deviation.

    What a GPU is off by as a whole is in both, and cancels. Errors are those of `StepTimes.spread`.
    """
    steps = StepTimes([config, other], model=model, gpu=gpu)
    own, others = steps.slopes(np.zeros(len(FACTORS)), slice(None))
    return float(np.sqrt((own - others) @ steps.spread @ (own - others)))


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
    log_spread: float
    """Standard deviation of the logarithm of `step_seconds`."""
    trials: int = 0
    """Measured trials that it was calibrated by."""
    contributed: tuple[int, int] = (0, 0)
    """Files of others that it goes by as well, and their trials."""

    @property
    def step_seconds_range(self) -> tuple[float, float]:
        """Between what nine in ten of such steps take."""
        return within(self.step_seconds, self.log_spread)

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """Between what nine in ten of such speeds are."""
        return within(self.tokens_per_second, self.log_spread)


def within(value: float, log_spread: float) -> tuple[float, float]:
    """Return the ends of what nine in ten are between, of a log-normal number around ``value``."""
    factor = math.exp(NINE_IN_TEN * log_spread)
    return value / factor, value * factor


class StepTimes:
    """The optimizer steps of configurations on a GPU.

    Args:
        configs: what is to be trained; one row of every answer each.
        model: the model's config; nothing is loaded.
        gpu: what runs it.
        shapes: of the texts that are trained on; None where rows are full.
        calibration: factors fitted to trials on that GPU; None takes the catalogue's rates.
        evidence: what contributions say of the GPU, beside the catalogue's rates; by default what
            this machine keeps or the catalogue ships.

    Seconds and what follows from them are not a number where the architecture is not known or the
    GPU has no rate for the compute type. By the logarithms of factors (`log_seconds`, `slopes`) all
    is of full rows, and such a configuration is taken for the median of the others.
    """

    def __init__(
        self,
        configs: Sequence[TrialConfig],
        *,
        model: ModelSpec,
        gpu: GpuSpec,
        shapes: ShapesOnTexts | None = None,
        calibration: Calibration | None = None,
        evidence: Contributed | Literal["kept"] | None = "kept",
    ) -> None:
        self._model, self._gpu, self._calibration = model, gpu, calibration
        self.evidence = contributed_speed(gpu.name) if evidence == "kept" else evidence
        # What is predicted is full rows; a step on texts takes some part of their seconds.
        self._full = full_rows(configs, shapes)
        self.phases = StepPhases.of(self._full, model=model, gpu=gpu)
        self._means = np.zeros(len(FACTORS)) if self.evidence is None else self.evidence.mean
        self._factors = np.exp(self._means) if calibration is None else in_order(calibration)
        self._full_seconds = self.phases.seconds(self._factors)
        self.is_known = ~np.isnan(self._full_seconds)
        parts = (1.0 if shapes is None else shapes.of(config).seconds for config in configs)
        self._part: Array = np.fromiter(parts, float, len(configs))
        self.seconds = self._full_seconds * self._part
        """Of each step, accumulation included."""
        self.tokens_per_second = tokens_per_step(configs, shapes) / self.seconds
        """How many tokens that carry loss each trains."""

    @cached_property
    def log_spread(self) -> Array:
        """Standard deviation of the logarithm of each step's seconds.

        The GPU's own, between what it is for time that the GPU takes and for time that the host's
        launches take; smaller after trials on the GPU, for further steps of the same study.
        Of packed rows attention's share is unsure beside that, so are 8-bit products where no
        training in such was measured, and a step of several GPUs.
        """
        known, seen = self._gpu.speed_uncertainty, {"16-bit", *self._gpu.measured_8bit}
        if self._calibration is not None:
            known, seen = self._calibration.uncertainty(known), seen | self._calibration.numerics
        shares = self.phases.slopes(self._factors) * self._factors / self._full_seconds[:, None]
        launches, attention, eight_bit = (
            shares[:, FACTORS.index(factor)] for factor in ("launch", "attention", "eight_bit")
        )
        stated = launches * known.launch + (1.0 - launches) * known.device
        masks = np.array([_attention_doubt(config) for config in self._full], np.float64)
        unseen = [0.0 if config.numerics in seen else EIGHT_BIT_DOUBT for config in self._full]
        parallel = np.array([_parallel_doubt(config) for config in self._full], np.float64)
        # What a GPU is off by as a whole has nothing to do with what its 8-bit products are.
        off = np.hypot(stated, eight_bit * np.array(unseen))
        if self.evidence is not None and self._calibration is None:
            explained = np.einsum("nf,fg,ng->n", shares, self.evidence.spread, shares)
            contributed = np.sqrt(explained + residual_spread(shares) ** 2)
            off = np.minimum(off, np.tanh(NINE_IN_TEN * contributed))
        relative = off + attention * masks + parallel
        # As wide, from end to end, as 1 - this to 1 + this is.
        return np.asarray(np.arctanh(np.minimum(relative, 0.9)) / NINE_IN_TEN)

    @cached_property
    def terms(self) -> Array:
        """Seconds by configuration and factor; of launches what the GPU waits for them."""
        *of_gpu, launch, overhead = self._factors
        by_term = self.phases.device * of_gpu
        device = by_term.sum(axis=2)
        waits = (overlapped(device, self.phases.launch * launch) - device).sum(axis=1)
        columns = [by_term.sum(axis=1), waits, self.phases.fixed * overhead]
        return np.column_stack(columns) * self._part[:, None]

    def prediction(self, row: int) -> SpeedPrediction | InputError:
        """Return all that is predicted of one step, or why nothing is."""
        if not self.is_known[row]:
            return InputError(str(refusal(self._full[row], model=self._model, gpu=self._gpu)))
        *of_gpu, launch, _ = self._factors
        parts = self.phases.compute[row], self.phases.memory[row]
        compute, memory = ((part * of_gpu).sum() for part in parts)
        bottleneck: Bottleneck = "bandwidth" if memory > compute else "compute"
        if self.phases.launch[row].sum() * launch > compute + memory:
            bottleneck = "launch"
        flops = self.phases.model_flops[row] / self._full_seconds[row]
        return SpeedPrediction(
            step_seconds=float(self.seconds[row]),
            tokens_per_second=float(self.tokens_per_second[row]),
            bottleneck=bottleneck,
            flops_utilization=float(flops / self.phases.peak_flops[row]),
            terms=dict(zip(FACTORS, self.terms[row].tolist(), strict=True)),
            basis="predicted" if self._calibration is None else "calibrated",
            log_spread=float(self.log_spread[row]),
            trials=0 if self._calibration is None else self._calibration.trials,
            contributed=(self.evidence.files, self.evidence.trials) if self.evidence else (0, 0),
        )

    @cached_property
    def _all_known(self) -> StepPhases:
        seconds = self.phases.seconds(np.ones(len(FACTORS)))
        known = np.flatnonzero(self.is_known)
        median = known[np.argsort(seconds[known])[len(known) // 2]]
        return self.phases.of_rows(np.where(self.is_known, np.arange(len(seconds)), median))

    @cached_property
    def spread(self) -> Array:
        """Covariance of the factors' logarithms before anything was measured here."""
        if self.evidence is not None:
            return self.evidence.spread
        eight_bit = FACTOR_SPREAD["matmul" if self._gpu.measured_8bit else "eight_bit"]
        return factor_covariance({**FACTOR_SPREAD, "eight_bit": eight_bit})

    @cached_property
    def launch_shares(self) -> Array:
        """Share of each step that goes with the host's launches, by the catalogue's rates."""
        unchanged = np.zeros(len(FACTORS))
        return self.slopes(unchanged, slice(None))[:, FACTORS.index("launch")]

    def log_seconds(self, log_factors: Array, rows: Rows) -> Array:
        """Return the logarithm of some configurations' seconds."""
        factors = np.exp(log_factors + self._means)
        return np.log(self._all_known.of_rows(rows).seconds(factors))

    def slopes(self, log_factors: Array, rows: Rows) -> Array:
        """Return by how much some configurations' log seconds rise with each log factor."""
        phases, factors = self._all_known.of_rows(rows), np.exp(log_factors + self._means)
        return np.asarray(phases.slopes(factors) * factors / phases.seconds(factors)[:, None])


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
