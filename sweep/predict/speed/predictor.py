"""How long configurations' optimizer steps take: how fast, held back by what, and how sure.

The step is what the GPU must do (matrix products by shape, adapters, attention, 4-bit expansion,
elementwise traffic, loss, optimizer) at the GPU's rates, against what the host must launch. Every
factor multiplies such a term and cannot be negative; few trials move it little from what the
catalogue says. In logarithms the model is nearly straight and its uncertainty is normal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.estimates import Estimate
from qlora_sweep.search_spaces.gpus import GpuSpec
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.predict.on_dataset import ShapesOnDataset, full_rows, tokens_per_step
from qlora_sweep.sweep.predict.speed.contributed import Contributed
from qlora_sweep.sweep.predict.speed.kernels import DELTA_RULE_DOUBT, MASKED_DOUBT
from qlora_sweep.sweep.predict.speed.layers import layers_of
from qlora_sweep.sweep.predict.speed.steps import (
    TERMS,
    Rows,
    StepPhases,
    Term,
    has_grouped_kernel,
    overlapped,
    refusal,
)
from qlora_sweep.sweep.predict.trainers import factors_of

Factor = Term | Literal["launch", "overhead"]
FACTORS: tuple[Factor, ...] = (*TERMS, "launch", "overhead")
_LAUNCH = FACTORS.index("launch")

Array = NDArray[np.float64]

NINE_IN_TEN = 1.645
"""Standard deviations to either side that hold nine in ten."""
HOSTS_APART = 0.4
"""Logarithm of how many times as slow or as fast as usual a rented host is: 13 to 30 microseconds
an operation, of usually 20."""
EIGHT_BIT_SPREAD = 0.34
"""How far 8-bit products may be from what a GPU's 16-bit ones and its data sheet imply.

Measured over implied: of FP8 1.01 on a B200, 0.99 (in a training) and 0.92 on an H200, 0.96 on an
H100, 0.82 on an RTX 5090, 0.67 on an H100 PCIe with scales by blocks; of INT8 0.70 on an H200 and
0.46 by a Triton kernel on an A100. This is the root mean square of their logarithms; sources are in
`docs/lab/speed.md`. Where trainings in 8 bits were measured, it is as of the other matrix products.
"""
TYPE_SPREAD = 0.073
"""How far steps of a model type of which none was measured may be off as a whole, beside all else.

Types of which steps were are 0.049 apart within a session: 20 means of a type over a session's
steps, of seven sessions with several types. This is the upper end of what nineteen in twenty of
such estimates are below (`pytest tests/sweep/predict/speed/test_other_types.py`).
"""
EXPERTS_SPREAD = 0.29
"""The same of a type with experts, where one kernel multiplies by all of them.

The root mean square of the logarithms of 50 steps of three types on H200s of four hosts, measured
over predicted (`tests/bench/results/experts_h200.jsonl`): micro-batches of 8,192 tokens and more
0.92 to 1.11 times, smaller ones 0.92 to 2.0 times, as they wait for their host, and hosts differ.
"""
LOOPED_SPREAD = 0.56
"""The same where torch multiplies by one after another: nine in ten within 2.5 times, by which a
kernel of Unsloth's is said to be faster on an A100 (https://unsloth.ai/docs/new/faster-moe, read
2026-11-28)."""
TOWER_SPREAD = 0.36
"""The same of a step in which a vision tower sees images, as no such step was measured: as much as
of experts while the host's part of theirs was not counted enough."""
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
Bottleneck = Literal["compute", "bandwidth", "launch"]


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
    covariance: Array | None = field(default=None, repr=False, compare=False)
    """Of the factors' logarithms, as far as the trials leave them open; None where they do not."""


def in_order(calibration: Calibration | None) -> Array:
    """Return factors in the order of `FACTORS`; the catalogue's rates where there are none."""
    if calibration is None:
        return np.ones(len(FACTORS))
    return np.array(list(map(calibration.factors.__getitem__, FACTORS)))


def calibrate(
    observations: Sequence[tuple[TrialConfig, float]],
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    evidence: Contributed | None = None,
) -> Calibration:
    """Fit the factors to measured trials.

    Args:
        observations: configurations that have a prediction, and their measured seconds per step.
        model: the model they were measured with.
        gpu: the GPU they were measured on.
        evidence: what contributions say of that GPU.
    """
    assert observations, "calibrating needs trials"
    configs = list(map(itemgetter(0), observations))
    measured = np.array(list(map(itemgetter(1), observations)))  # (trials,)
    steps = StepPhases.of(configs, model=model, gpu=gpu)
    means, spread = prior_of(gpu, evidence)
    of_type = type_spreads(configs, model=model, gpu=gpu).max()
    spread = spread + _of_all_terms(of_type**2)
    factors = _fitted(steps, measured, means, spread)
    errors = np.abs(steps.seconds(factors) / measured - 1.0)
    by_name = dict(zip(FACTORS, factors.tolist(), strict=True))
    left = _left_open(steps.log_slopes(factors), spread, STEP_NOISE)
    return Calibration(gpu.name, len(observations), by_name, float(np.median(errors)), left)


def _fitted(steps: StepPhases, measured: Array, means: Array, spread: Array) -> Array:
    """Return the non-negative factors nearest to trials and prior, each error over its spread."""
    factors = np.exp(means)
    # Only a fit needs it, and it takes longer to import than a plan takes to make.
    from scipy.optimize import nnls

    # What weighs factors against the catalogue's rates, a row for each direction.
    prior = np.linalg.cholesky(np.linalg.inv(spread * np.outer(factors, factors))).T
    targets = np.full(len(measured), 1.0 / STEP_NOISE)
    wanted = np.concatenate([targets, prior @ factors])
    for _ in range(ROUNDS):
        trials = steps.slopes(factors) / (measured[:, None] * STEP_NOISE)
        nearest, _ = nnls(np.vstack([trials, prior]), wanted)
        factors = factors + DAMPING * (nearest - factors)
    return factors


def _left_open(slopes: Array, spread: Array, noise: float) -> Array:
    """Return the covariance that normal numbers have after weighted sums of them were measured."""
    across = spread @ slopes.T
    seen = slopes @ across + noise**2 * np.eye(len(slopes))
    return np.asarray(spread - across @ np.linalg.solve(seen, across.T))


def prior_of(gpu: GpuSpec, evidence: Contributed | None) -> tuple[Array, Array]:
    """Return mean and covariance of the factors' logarithms before anything was measured here."""
    if evidence is None:
        return np.zeros(len(FACTORS)), factor_covariance(gpu)
    return evidence.mean, evidence.spread


def _spread_by(slopes: Array, covariance: Array) -> Array:
    """Return the variance that factors of a covariance give each step's log seconds."""
    return np.asarray(np.einsum("nf,fg,ng->n", slopes, covariance, slopes))


def factor_covariance(gpu: GpuSpec) -> Array:
    """Return how far the factors' logarithms may be from the catalogue's rates, together: a
    covariance in the order of `FACTORS`."""
    known = {**FACTOR_SPREAD, "launch": gpu.speed.host}
    if gpu.measured_8bit:
        known["eight_bit"] = known["matmul"]
    spreads = np.array(list(map(known.__getitem__, FACTORS)))
    return np.diag(spreads**2) + _of_gpu(gpu)


def _of_gpu(gpu: GpuSpec) -> Array:
    """Return the part of that covariance that a whole GPU, and a session on it, have in common."""
    return _of_all_terms(gpu.speed.gpu**2 + gpu.speed.source**2)


def _of_all_terms(variance: float) -> Array:
    """Return the covariance that all of the GPU's terms have by what they are off by together."""
    on_gpu = np.isin(FACTORS, TERMS).astype(float)  # (factors,)
    return np.asarray(variance * np.outer(on_gpu, on_gpu))


def has_linear_attention(model: ModelSpec) -> bool:
    """Whether some of a model's layers run by kernels of linear attention."""
    kinds = layers_of(model)
    return not isinstance(kinds, InputError) and any(kind.recurrent for kind in kinds)


def type_spreads(configs: Sequence[TrialConfig], *, model: ModelSpec, gpu: GpuSpec) -> Array:
    """Return the standard deviation of what log seconds of steps may be off by, because no step of
    the model's type was measured, or none with images; 0 where some were."""
    sees = np.array([config.image_size is not None for config in configs])
    of_type = _spreads_of_type(configs, model=model, gpu=gpu)
    return np.where(sees, np.maximum(of_type, TOWER_SPREAD), of_type)


def _spreads_of_type(configs: Sequence[TrialConfig], *, model: ModelSpec, gpu: GpuSpec) -> Array:
    kinds = layers_of(model)
    if isinstance(kinds, InputError) or kinds[0].walked is None:
        return np.zeros(len(configs))
    products = itertools.chain.from_iterable(kind.products for kind in kinds)
    if not any(product.is_routed for product in products):
        return np.full(len(configs), TYPE_SPREAD)
    is_grouped = [has_grouped_kernel(config, gpu) for config in configs]
    return np.where(is_grouped, EXPERTS_SPREAD, LOOPED_SPREAD)


def ratio_spread(
    slopes: Array, others: Array, *, gpu: GpuSpec, evidence: Contributed | None = None
) -> float:
    """Return how far two steps' ratio may be off by what they share: a logarithm's standard
    deviation. What is each step's own (`StepTimes.own_spread`) comes on top.

    What a GPU is off by as a whole is in both, and cancels. Errors are those of `StepTimes.spread`.

    Args:
        slopes: by how much the log seconds of one rise with each log factor.
        others: those of the other.
        gpu: of both.
        evidence: what contributions say of it.
    """
    _, spread = prior_of(gpu, evidence)
    apart = slopes - others  # (factors,)
    return float(np.sqrt(apart @ spread @ apart))


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
    def step_estimate(self) -> Estimate:
        """The step's seconds, between what nine in ten of such steps take."""
        return within(self.step_seconds, self.log_spread)

    @property
    def speed_estimate(self) -> Estimate:
        """Tokens per second, between what nine in ten of such speeds are."""
        return within(self.tokens_per_second, self.log_spread)


def within(value: float, log_spread: float) -> Estimate:
    """Return a log-normal number around ``value``, with what nine in ten are between."""
    factor = math.exp(NINE_IN_TEN * log_spread)
    return Estimate(value, value / factor, value * factor)


class StepTimes:
    """The optimizer steps of configurations on a GPU.

    Args:
        configs: what is to be trained; one row of every answer each.
        model: the model's config; nothing is loaded.
        gpu: what runs it.
        shapes: of the texts that are trained on; None where rows are full.
        calibration: factors fitted to trials on that GPU; None takes the catalogue's rates.
        evidence: what contributions say of the GPU, beside the catalogue's rates.
        unknown: why no step has a prediction, although the layers are known; None where they have.

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
        shapes: ShapesOnDataset | None = None,
        calibration: Calibration | None = None,
        evidence: Contributed | None = None,
        unknown: str | None = None,
    ) -> None:
        self._unknown = unknown
        self._model = model
        self._gpu = gpu
        self._calibration = calibration
        self.evidence = evidence
        # What is predicted is full rows; a step on texts takes some part of their seconds.
        self._full = full_rows(configs, shapes)
        self.phases = StepPhases.of(self._full, model=model, gpu=gpu)
        if unknown is not None:
            self.phases = self.phases.unknown()
        self._means = np.zeros(len(FACTORS))
        if self.evidence is not None:
            self._means = self.evidence.mean
        self._factors = np.exp(self._means)
        if calibration is not None:
            self._factors = in_order(calibration)
        self._full_seconds = self.phases.seconds(self._factors)  # (configurations,)
        self.is_known = ~np.isnan(self._full_seconds)
        self._part = np.ones(len(configs))  # (configurations,)
        self._trainer_spread = np.zeros(len(configs))  # (configurations,)
        for row, config in enumerate(configs):
            if shapes is not None:
                self._part[row] = shapes.of(config).seconds
            factors = factors_of(config)
            if factors is not None:
                self._part[row] *= factors.seconds
                self._trainer_spread[row] = factors.log_spread
        self.seconds = self._full_seconds * self._part
        """Of each step, accumulation included."""
        self.tokens_per_second = tokens_per_step(configs, shapes) / self.seconds
        """How many tokens that carry loss each trains."""

    @cached_property
    def log_spread(self) -> Array:
        """Standard deviation of the logarithm of each step's seconds.

        It is of the GPU, of the session and of the step itself as far as the step waits for the
        GPU, and of the host as far as it waits for that; after trials of what they leave open.
        Of packed rows attention's share is unsure beside that, so are 8-bit products where no
        training in such was measured, and a step of several GPUs.
        """
        # Arrays are (configurations,), but for the slopes: (configurations, factors).
        slopes = self.phases.log_slopes(self._factors)
        is_shared = np.array([config.data_parallel > 1 for config in self._full])
        if self._calibration is not None and self._calibration.covariance is not None:
            within_it = _spread_by(slopes, self._calibration.covariance) + self.own_spread**2
        else:
            within_it = _spread_by(slopes, _of_gpu(self._gpu)) + self.own_spread**2
            if not self._gpu.measured_8bit:
                eight_bit = slopes[:, FACTORS.index("eight_bit")]
                within_it = within_it + (eight_bit * EIGHT_BIT_SPREAD) ** 2
            if self.evidence is not None:
                contributed = _spread_by(slopes, self.evidence.spread) + self.own_spread**2
                within_it = np.minimum(within_it, contributed)
        if self._calibration is None:
            within_it = within_it + self.type_spread**2
        beside = self._attention_spread**2 + (self._gpu.speed.shared * is_shared) ** 2
        return np.asarray(np.sqrt(within_it + beside + self._trainer_spread**2))

    @cached_property
    def _attention_spread(self) -> Array:
        """How far each step may be off because rows are packed, or because its linear attention was
        never timed, one standard deviation. (configurations,)"""
        slopes = self.phases.log_slopes(self._factors)
        doubts = np.array(list(map(_attention_doubt, self._full)), float)
        if has_linear_attention(self._model):
            doubts = np.maximum(doubts, DELTA_RULE_DOUBT)
        return np.asarray(slopes[:, FACTORS.index("attention")] * doubts / NINE_IN_TEN)

    @cached_property
    def own_spread(self) -> Array:
        """Standard deviation of what in that is each step's own; a ratio of two has both."""
        known = self._gpu.speed
        host = self.host_shares
        if self._calibration is not None and self._calibration.covariance is not None:
            return np.full(len(host), STEP_NOISE)
        pairs = np.array([known.pairs * config.is_on_pairs for config in self._full])
        by_itself = np.hypot((1.0 - host) * known.step, host * known.host)
        return np.asarray(np.hypot(by_itself, pairs))

    @property
    def waiting_spread(self) -> Array:
        """Standard deviation of each step's own error as far as it waits for the GPU."""
        return np.asarray((1.0 - self.host_shares) * self._gpu.speed.step)

    @cached_property
    def common_spreads(self) -> Array:
        """How far each of what steps have in common moves each configuration's log seconds, one
        standard deviation each. (configurations, directions)

        The length of the difference of two rows is how far the ratio of their steps may be off by
        what they share; what is each step's own (`own_spread`) comes on top. Beside the factors'
        that is attention over packed rows, and how several GPUs wait for each other.
        """
        slopes = self.phases.log_slopes(self._factors)
        _, spread = prior_of(self._gpu, self.evidence)
        of_factors = slopes @ np.linalg.cholesky(spread)
        columns = [of_factors, self._attention_spread[:, None]]
        ways = [(config.data_parallel, config.sharding) for config in self._full]
        for way in sorted(set(ways)):
            if way[0] > 1:
                is_way = np.array([own == way for own in ways])
                columns.append(self._gpu.speed.shared * is_way[:, None])
        return np.hstack(columns)

    @cached_property
    def type_spread(self) -> Array:
        """Standard deviation of what each step may be off by because no step of the model's type
        was measured; 0 where some were."""
        return type_spreads(self._full, model=self._model, gpu=self._gpu)

    @cached_property
    def host_shares(self) -> Array:
        """By how much the log seconds of each step rise with the host's, between a fast host and a
        slow one: what hardly waits for a usual host may wait for a slow one."""
        slow = np.array(self._factors)
        fast = np.array(self._factors)
        slow[_LAUNCH] *= math.exp(HOSTS_APART)
        fast[_LAUNCH] *= math.exp(-HOSTS_APART)
        ratio = self.phases.seconds(slow) / self.phases.seconds(fast)
        return np.asarray(np.log(ratio) / (2.0 * HOSTS_APART))

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
        if self._unknown is not None:
            return InputError(self._unknown)
        if not self.is_known[row]:
            return InputError(str(refusal(self._full[row], model=self._model, gpu=self._gpu)))
        *of_gpu, launch, _ = self._factors
        compute = (self.phases.compute[row] * of_gpu).sum()
        memory = (self.phases.memory[row] * of_gpu).sum()
        bottleneck: Bottleneck = "compute"
        if self.phases.launch[row].sum() * launch > compute + memory:
            bottleneck = "launch"
        elif memory > compute:
            bottleneck = "bandwidth"
        basis: Literal["predicted", "calibrated"] = "predicted"
        trials = 0
        if self._calibration is not None:
            basis = "calibrated"
            trials = self._calibration.trials
        contributed = (0, 0)
        if self.evidence is not None:
            contributed = (self.evidence.files, self.evidence.trials)
        flops = self.phases.model_flops[row] / self._full_seconds[row]
        return SpeedPrediction(
            step_seconds=float(self.seconds[row]),
            tokens_per_second=float(self.tokens_per_second[row]),
            bottleneck=bottleneck,
            flops_utilization=float(flops / self.phases.peak_flops[row]),
            terms=dict(zip(FACTORS, self.terms[row].tolist(), strict=True)),
            basis=basis,
            log_spread=float(self.log_spread[row]),
            trials=trials,
            contributed=contributed,
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
        known = factor_covariance(self._gpu)
        if self.evidence is not None:
            known = self.evidence.spread
        return known + _of_all_terms(self.type_spread.max(initial=0.0) ** 2)

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
        return self._all_known.of_rows(rows).log_slopes(np.exp(log_factors + self._means))


def _attention_doubt(config: TrialConfig) -> float:
    """Return how far attention's time may be off because rows are packed, relative."""
    if config.packing != "packed" or config.attention == "eager":
        return 0.0
    # Flash attention is told where examples begin; what that saves was never measured.
    if config.attention == "sdpa":
        return MASKED_DOUBT
    return 1.0
