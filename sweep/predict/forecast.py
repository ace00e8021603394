"""What is expected of configurations: the rules, their memory, their speed, and what trials showed.

Plans, samplers, the driver of a study and reports all ask a `Forecaster`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.dataset_choice import TOO_FEW_EXAMPLES
from qlora_sweep.search_spaces.errors import InputError, SweepError
from qlora_sweep.search_spaces.estimates import Estimate
from qlora_sweep.search_spaces.gpus import GpuSpec
from qlora_sweep.search_spaces.learning_rates import LearningRate, learning_rate_of
from qlora_sweep.search_spaces.linears import lora_parameters
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.rules import Violation
from qlora_sweep.storage.records import (
    DominatedOutOfMemory,
    EpochRecord,
    Invalid,
    Measurement,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    TrialRecord,
    Verdict,
)
from qlora_sweep.sweep.predict.contributions import contributed_speed
from qlora_sweep.sweep.predict.dominance import Footprint, RanOut, base_alone, footprint
from qlora_sweep.sweep.predict.memory.prediction import (
    Fit,
    MemoryPrediction,
    WholeMemory,
    predict_nothing,
)
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor, Residuals, TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import OnProgress, ignore_progress
from qlora_sweep.sweep.predict.memory.profiles import Untraceable
from qlora_sweep.sweep.predict.on_dataset import (
    MemoryInTrainer,
    MemoryOnDataset,
    ShapesOnDataset,
    tokens_per_step,
)
from qlora_sweep.sweep.predict.speed.predictor import (
    FACTORS,
    Calibration,
    SpeedPrediction,
    StepTimes,
    calibrate,
    within,
)
from qlora_sweep.sweep.predict.speed.stand_in import StandIn
from qlora_sweep.sweep.predict.speed.steps import refusal

PREDICTIONS_KEPT = 4096
"""Configurations of which what is expected is kept; one takes some 30 KiB."""
UNPREDICTED = "memory is not predicted: "
"""How a reason begins that says why no memory is predicted."""
UNBUILDABLE = "cannot-be-built"
"""The rule where the model's own code forbids a configuration: it lacks a target module."""
TRIALS_TO_CALIBRATE = 5
"""Measured trials from which a GPU is known better than its data sheet."""
TRIALS_CALIBRATED = 256
"""The newest so many are fitted: about twenty for each of the eleven factors."""
TRACED = "structures traced"
"""What progress is reported of first."""

Array = NDArray[np.float64]
Basis = Literal["predicted", "calibrated", "measured"]
"""Where a number comes from: a GPU's rates and a model's code, those with trials, or a trial."""
Rule = Callable[[TrialConfig], Violation | None]
"""Returns the rule that forbids a configuration, bound to a model and a device."""
Progress = Callable[[str], OnProgress]
"""Returns what reports progress of the work that is named."""


def nothing_known(model: ModelSpec, why: InputError) -> str:
    """Return a sentence that neither speed nor memory is known, and why."""
    return f"speed unknown for {model.name}, and memory: {str(why).rpartition(UNPREDICTED)[2]}"


def silent(_: str) -> OnProgress:
    """Report no progress."""
    return ignore_progress


@dataclass(frozen=True)
class Evidence:
    """What a stored study has shown of a model, as far as it holds for one GPU."""

    study: str | None = None
    """Name of the study; None where nothing was asked."""
    budget_bytes: int = 0
    """Budget that its trials ran under."""
    calibration: Calibration | None = None
    """Of the speed; None where its trials ran on another GPU."""
    trials: Mapping[TrialConfig, TrialRecord] = field(default_factory=dict)
    """Trials measured to the end, on any GPU, by canonical configuration."""
    ran_out: frozenset[TrialConfig] = frozenset()
    """Configurations that really ran out of memory."""
    is_same_gpu: bool = False
    """Whether its trials ran on the GPU that is asked about."""
    memory_errors: tuple[float, ...] = ()
    """Predicted peak over the measured one, less 1, where a trial has both."""
    records: Sequence[TrialRecord] = ()
    """All of its trials: the worst of their errors widens predictions, as in the study itself."""
    notes: tuple[str, ...] = ()
    """What of the study cannot be used, and why."""

    @property
    def memory_error(self) -> float | None:
        """Median size of the memory prediction's relative error; None without such trials."""
        if not self.memory_errors:
            return None
        return statistics.median(map(abs, self.memory_errors))

    def fits(self, config: TrialConfig, *, budget_bytes: int) -> bool | None:
        """Return whether ``config`` fits, as a trial has shown; None where none has."""
        if self.study is None:
            return None
        asked = canonical(config)
        if asked in self.trials and self.budget_bytes <= budget_bytes:
            return True
        if asked in self.ran_out and self.budget_bytes >= budget_bytes:
            return False
        return None

    def trial(self, config: TrialConfig) -> TrialRecord | None:
        """Return the trial that measured ``config`` on the GPU that is asked about."""
        if not self.is_same_gpu:
            return None
        return self.trials.get(canonical(config))


NO_EVIDENCE = Evidence()


class SpeedModel(Protocol):
    """Predicts the speed of a configuration, the better the more trials it has seen."""

    def predict(self, config: TrialConfig) -> float | None:
        """Return tokens/s; None where it cannot say."""

    def physics(self, configs: Sequence[TrialConfig]) -> StepTimes | None:
        """Return the model of many configurations' steps; None where it cannot say."""

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial."""


@dataclass(eq=False)
class SpeedForecast:
    """Predicts speed on one GPU by its data sheet and by the trials that it ran."""

    model: ModelSpec
    gpu: GpuSpec
    shapes: ShapesOnDataset | None = None
    calibration: Calibration | None = None
    unknown: str | None = None
    """Why no step has a prediction; None where steps have one."""
    _measured: deque[TrialRecord] = field(
        init=False, default_factory=lambda: deque(maxlen=TRIALS_CALIBRATED)
    )
    _is_stale: bool = field(init=False, default=False)

    def predict(self, config: TrialConfig) -> float | None:
        """Return tokens/s; None where the architecture or the compute type has no prediction."""
        speed = float(self.times([config]).tokens_per_second[0])
        if math.isnan(speed):
            return None
        return speed

    def times(self, configs: Sequence[TrialConfig]) -> StepTimes:
        """Return the steps of many configurations, calibrated by the trials so far."""
        if self._is_stale:
            self.calibration = calibrated(
                self._measured, model=self.model, gpu=self.gpu, shapes=self.shapes
            )
            self._is_stale = False
        return self._times(configs, self.calibration)

    def uncalibrated_times(self, configs: Sequence[TrialConfig]) -> StepTimes:
        """Return the steps of many configurations, by the data sheet alone."""
        return self._times(configs, None)

    def _times(self, configs: Sequence[TrialConfig], calibration: Calibration | None) -> StepTimes:
        return StepTimes(
            configs,
            model=self.model,
            gpu=self.gpu,
            shapes=self.shapes,
            calibration=calibration,
            evidence=contributed_speed(self.gpu.name),
            unknown=self.unknown,
        )

    def physics(self, configs: Sequence[TrialConfig]) -> StepTimes | None:
        """Return the model of the configurations' steps; None where no step has a prediction."""
        times = self.times(configs)
        if not times.is_known.any():
            return None
        return times

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial; only those measured to the end say something of the GPU."""
        if self.unknown is not None:
            return
        if record.verdict is Verdict.FITS and record.measurement is not None:
            self._measured.append(record)
            self._is_stale = len(self._measured) >= TRIALS_TO_CALIBRATE


class Timed(Protocol):
    """A configuration whose step was measured: a trial, or the record of one."""

    @property
    def config(self) -> TrialConfig:
        """The configuration that ran."""

    @property
    def measurement(self) -> Measurement | None:
        """Its measurement; None where nothing was measured."""


def calibrated(
    records: Iterable[Timed],
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    shapes: ShapesOnDataset | None,
) -> Calibration | None:
    """Return the calibration of a GPU by measured trials; None where no trial can be used."""
    observations: list[tuple[TrialConfig, float]] = []
    for record in records:
        measured = record.measurement
        config = record.config
        if measured is None or refusal(config, model=model, gpu=gpu) is not None:
            continue
        seconds = measured.step_seconds
        if shapes is not None:
            # Full sequences stand for a step on a dataset: what those would take.
            seconds /= shapes.of(config).seconds
            config = shapes.for_speed(config)
        observations.append((config, seconds))
    if not observations:
        return None
    evidence = contributed_speed(gpu.name)
    return calibrate(observations, model=model, gpu=gpu, evidence=evidence)


@dataclass(eq=False)
class Forecasts:
    """What is expected of many configurations, as columns with a row for each.

    Every column is worked out when it is first read. It holds until the forecaster learns of a
    further trial.
    """

    forecaster: Forecaster
    configs: Sequence[TrialConfig]
    progress: Progress = silent
    """Reports the progress of what takes long."""
    known_fits: Sequence[Fit] | None = None
    """Of each row, where they are known already."""

    def __post_init__(self) -> None:
        self.budget_bytes = self.forecaster.budget_bytes
        self.is_cut_up = self.forecaster.is_cut_up
        self.trials_learned = self.forecaster.trials_learned
        """By how many trials it was made: it is outdated once there are more."""
        self._rows: dict[int, Forecast] = {}

    def __len__(self) -> int:
        return len(self.configs)

    def __getitem__(self, row: int) -> Forecast:
        if row not in self._rows:
            self._rows[row] = Forecast(self.configs[row], self, row)
        return self._rows[row]

    def renewed(self) -> Forecasts:
        """Return the same by all trials so far; what is predicted of memory stays."""
        renewed = Forecasts(self.forecaster, self.configs)
        if "whole_memory" in self.__dict__:
            renewed.whole_memory = self.whole_memory
        return renewed

    def __iter__(self) -> Iterator[Forecast]:
        return map(self.__getitem__, range(len(self)))

    @cached_property
    def whole_memory(self) -> WholeMemory:
        """The memory of all rows, as predictions state it."""
        return self.forecaster.whole_memory(self.configs, on_progress=self.progress(TRACED))

    def replay(self, progress: Progress) -> Iterator[int]:
        """Replay all steps, on all processors, where each is going to be looked at; yield the rows,
        each as soon as it is done."""
        near = [row for row, fit in enumerate(self.fits) if fit is None]
        return self.whole_memory.replay(near, on_progress=progress("steps replayed"))

    @property
    def unpredicted(self) -> Mapping[int, InputError]:
        """Why no memory is predicted, by row, of the rows without a prediction."""
        return self.whole_memory.unpredicted

    @cached_property
    def peak_bytes(self) -> Array | None:
        """Predicted allocated peaks, NaN where one is not predicted; None where none is."""
        peaks = self.whole_memory.peak_allocated_bytes.astype(float)  # (rows,)
        is_predicted = peaks >= 0
        if not is_predicted.any():
            return None
        return np.where(is_predicted, peaks, np.nan)

    @property
    def least_bytes(self) -> NDArray[np.int64]:
        """Lower bounds of the peaks, for which no step is replayed."""
        return self.whole_memory.least_allocated_bytes

    @property
    def uncertainty(self) -> Array:
        """How far each peak may be off, relative, as predictions state it."""
        return self.whole_memory.uncertainty

    @cached_property
    def errors(self) -> Array:
        """The same, widened by the errors of the trials so far."""
        return self.forecaster.residuals.widest(self.uncertainty, self.configs)

    @cached_property
    def fits(self) -> list[Fit | None]:
        """Whether each row fits, whatever the rules say; None where only a replay tells."""
        if self.known_fits is not None:
            return list(self.known_fits)
        return self.whole_memory.quick_fits(self.budget_bytes, uncertainty=self.errors)

    def fit(self, row: int) -> Fit:
        """Return whether a row fits, whatever the rules say; a trial that has shown it overrules.

        Uncertain too where nothing is predicted.
        """
        shown = self.forecaster.evidence.fits(self.configs[row], budget_bytes=self.budget_bytes)
        if shown is True:
            return Fit.YES
        if shown is False:
            return Fit.NO
        fit = self.fits[row]
        if fit is None:
            memory = self.memory(row)
            fit = Fit.UNCERTAIN
            if memory is not None:
                fit = memory.fits(self.budget_bytes)
            self.fits[row] = fit
        return fit

    def memory(self, row: int) -> MemoryPrediction | None:
        """Return what a row needs, as unsure as the trials show; None without a prediction."""
        if row in self.unpredicted:
            return None
        return self.whole_memory.prediction(row).widened(float(self.errors[row]))

    @cached_property
    def tokens_per_step(self) -> Array:
        """Supervised tokens of each step; on a dataset the mean of an epoch."""
        return tokens_per_step(self.configs, self.forecaster.shapes)

    @cached_property
    def tokens_per_second(self) -> Array:
        """Measured where a trial was, else predicted; 0 where nothing is known."""
        speeds = np.nan_to_num(self.times.tokens_per_second)  # (rows,)
        if not self.forecaster.evidence.is_same_gpu:
            return speeds
        for row, config in enumerate(self.configs):
            trial = self.forecaster.evidence.trial(config)
            if trial is not None and trial.measurement is not None:
                speeds[row] = self.tokens_per_step[row] / trial.measurement.step_seconds
        return speeds

    @cached_property
    def times(self) -> StepTimes:
        """The steps on the GPU of a plan."""
        speed = self.forecaster.speed
        assert isinstance(speed, SpeedForecast), "a plan is of a GPU"
        return speed.times(self.configs)

    @cached_property
    def physics(self) -> StepTimes | None:
        """The physical model of the steps; None where there is none."""
        if self.forecaster.speed is None:
            return None
        return self.forecaster.speed.physics(self.configs)

    @cached_property
    def target(self) -> StandIn | None:
        """The steps on the target and on the GPU that stands in for it; None where none does."""
        if self.forecaster.target_speed is None:
            return None
        steps = self.forecaster.target_speed.physics(self.configs)
        if steps is None:
            return None
        host = None
        if isinstance(self.forecaster.speed, SpeedForecast):
            host = self.forecaster.speed.uncalibrated_times(self.configs)
        return StandIn(host, steps)

    @cached_property
    def trainable_parameters(self) -> Array | None:
        """Sizes of the adapters; None where the model's layers are not known."""
        counts = [lora_parameters(config, self.forecaster.model) for config in self.configs]
        if None in counts:
            return None
        return np.array(counts, dtype=float)


@dataclass(frozen=True)
class Forecast:
    """What is expected of one configuration: a row of `Forecasts`.

    Each part is worked out when it is first read: looking for the fastest of a thousand asks for
    the memory of none.
    """

    config: TrialConfig
    _all: Forecasts = field(repr=False, compare=False)
    _row: int = field(repr=False, compare=False, default=0)

    @property
    def forecaster(self) -> Forecaster:
        """The forecaster that was asked."""
        return self._all.forecaster

    @property
    def epoch(self) -> EpochRecord | None:
        """One pass over the dataset; None without one."""
        return self.forecaster.epoch_of(self.config)

    @property
    def learning_rate(self) -> LearningRate:
        """The learning rate it would train with; speed and memory do not depend on it."""
        return learning_rate_of(self.config, self.forecaster.model.config)

    # The rules

    @cached_property
    def _rule_violation(self) -> Violation | None:
        return self.forecaster.violation(self.config)

    @cached_property
    def violation(self) -> Violation | None:
        """The rule that forbids it, or why the model cannot be built so."""
        if self._rule_violation is not None:
            return self._rule_violation
        error = self._all.unpredicted.get(self._row)
        if error is None or isinstance(error, Untraceable):
            return None
        return Violation(UNBUILDABLE, str(error))

    # Memory

    @cached_property
    def memory(self) -> MemoryPrediction | None:
        """What it needs, as unsure as the trials show; None where nothing can be predicted."""
        return self._all.memory(self._row)

    @property
    def peak_allocated_bytes(self) -> int | None:
        """Predicted allocated peak."""
        if self.memory is None:
            return None
        return self.memory.peak_allocated_bytes

    @property
    def memory_uncertainty(self) -> float:
        """How far its peak may be off, relative; 0 where a trial has measured it, or nothing is
        predicted."""
        if self.trial is not None or self._row in self._all.unpredicted:
            return 0.0
        return float(self._all.errors[self._row])

    @cached_property
    def fit(self) -> Fit:
        """Whether it fits; uncertain too where nothing can be predicted."""
        if self.violation is not None:
            return Fit.NO
        return self._all.fit(self._row)

    @cached_property
    def fits(self) -> bool | None:
        """The best guess, also where `fit` is uncertain; None where there is nothing to go by."""
        if self.fit is not Fit.UNCERTAIN:
            return self.fit is Fit.YES
        if self.memory is None:
            return None
        return self.memory.is_likely(self._all.budget_bytes)

    # Speed

    @cached_property
    def trial(self) -> TrialRecord | None:
        """The trial of a stored study that measured it on this GPU."""
        trial = self.forecaster.evidence.trial(self.config)
        if trial is None or self._rule_violation is not None:
            return None
        return trial

    @property
    def measured(self) -> Measurement | None:
        """What that trial measured."""
        if self.trial is None:
            return None
        return self.trial.measurement

    @cached_property
    def _step(self) -> SpeedPrediction | InputError | None:
        if self.violation is not None:
            return None
        return self._all.times.prediction(self._row)

    @property
    def speed(self) -> SpeedPrediction | None:
        """None where the architecture or the compute type has no prediction, or a rule forbids
        it."""
        if isinstance(self._step, InputError):
            return None
        return self._step

    @property
    def speed_unknown(self) -> str | None:
        """Why its speed is neither predicted nor measured; None where it is, or a rule forbids
        it."""
        if not isinstance(self._step, InputError) or self.measured is not None:
            return None
        return f"speed unknown for {self.forecaster.model.name}: {self._step}"

    @cached_property
    def log_slopes(self) -> Array:
        """By how much its log seconds rise with each log factor, before any trial."""
        row = slice(self._row, self._row + 1)
        return np.asarray(self._all.times.slopes(np.zeros(len(FACTORS)), row)[0])  # (factors,)

    @property
    def own_spread(self) -> float:
        """Standard deviation of the error of its log seconds that is its own, shared with no other
        configuration."""
        return float(self._all.times.own_spread[self._row])

    @property
    def step_seconds(self) -> float | None:
        """Seconds of an optimizer step: measured where it was, else predicted."""
        if self.measured is not None:
            return self.measured.step_seconds
        if self.speed is not None:
            return self.speed.step_seconds
        return None

    @property
    def step_estimate(self) -> Estimate | None:
        """The same with an interval: of a measured step its own 95 %, of a predicted one nine in
        ten. A step measured too few times is no surer than its prediction. None where either is
        not known."""
        seconds = self.step_seconds
        if seconds is None:
            return None
        if self.measured is not None and self.measured.step_seconds_ci95 is not None:
            return Estimate(seconds, *self.measured.step_seconds_ci95)
        if self.speed is None:
            return None
        return within(seconds, self.speed.log_spread)

    @property
    def tokens_per_second(self) -> float | None:
        """Supervised tokens per second."""
        if self.step_seconds is None:
            return None
        (tokens,) = tokens_per_step([self.config], self.forecaster.shapes).tolist()
        return float(tokens / self.step_seconds)

    @property
    def speed_estimate(self) -> Estimate | None:
        """The same with an interval; None where either is not known."""
        speed = self.tokens_per_second
        step = self.step_estimate
        if speed is None or step is None:
            return None
        return Estimate(speed, speed * step.value / step.high, speed * step.value / step.low)

    @property
    def speed_basis(self) -> Basis | None:
        """Where the speed comes from."""
        if self.measured is not None:
            return "measured"
        if self.speed is None:
            return None
        return self.speed.basis

    @property
    def notes(self) -> tuple[str, ...]:
        """Why something is missing."""
        if self.violation is not None:
            return ()
        error = self._all.unpredicted.get(self._row)
        if error is not None and self.speed_unknown is not None:
            return (nothing_known(self.forecaster.model, error),)
        if error is not None:
            return (f"{UNPREDICTED}{str(error).rpartition(UNPREDICTED)[2]}",)
        if self.speed_unknown is not None:
            return (self.speed_unknown,)
        return ()

    # The verdict before a trial

    @cached_property
    def _verdict_unpredicted(self) -> Outcome | None:
        return self.forecaster.verdict_unpredicted(self.config)

    @cached_property
    def is_refused(self) -> bool:
        """Whether there is a `refusal`; quicker, as how much it needs is not worked out."""
        return self._verdict_unpredicted is not None or self._all.fit(self._row) is Fit.NO

    @cached_property
    def refusal(self) -> Outcome | None:
        """The verdict that spares the GPU a trial; None where only running it tells.

        A configuration that is predicted not to fit has the verdict that `sweep plan` gives, even
        where a smaller trial ran out of memory: the prediction says how much it needs. What is too
        close to say is left to the GPU.
        """
        if isinstance(self._verdict_unpredicted, Invalid) or self.memory is None:
            return self._verdict_unpredicted
        if self._all.fit(self._row) is not Fit.NO:
            return self._verdict_unpredicted
        budget = self._all.budget_bytes
        percent = 100 * self.memory.uncertainty
        return PredictedOutOfMemory(
            predicted_bytes=self.memory.needed_bytes(budget),
            detail=f"budget {budget} bytes, peak predicted within {percent:.3g} %",
        )

    @cached_property
    def record(self) -> PredictionRecord | None:
        """What a trial's record keeps of it; None where memory is not predicted, and where a rule
        forbids it, as tracing a step takes seconds."""
        if isinstance(self._verdict_unpredicted, Invalid) or self.memory is None:
            return None
        speed = None
        if self.forecaster.speed is not None:
            speed = self.forecaster.speed.predict(self.config)
        return PredictionRecord(
            peak_allocated_bytes=self.memory.peak_allocated_bytes,
            peak_reserved_bytes=self.memory.peak_reserved_bytes,
            tokens_per_second=speed,
        )


class Forecaster:
    """Predicts for any configuration of one model on one GPU, and learns from trials.

    `building.build_forecaster` makes it for a target.

    Args:
        model: the model that is trained.
        budget_bytes: what a training may take.
        violation: the rules, bound to model and device.
        gpu: the GPU of a plan; None for a CPU, and for a GPU that the catalogue does not have.
        predictor: of full sequences' memory; None where memory cannot be predicted and the device
            decides.
        speed: None where speed cannot be predicted.
        target_speed: of the target, where another GPU stands in for it.
        shapes: of the dataset that is trained on; None where sequences are full.
        evidence: what a stored study has shown.
        is_cut_up: whether the allocator may fail below the budget, as free memory is in pieces.
        warn: told once of each reason why memory is not predicted, which is then left to the
            device; without it, faults of the environment are raised.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        budget_bytes: int,
        violation: Rule,
        gpu: GpuSpec | None = None,
        predictor: MemoryPredictor | None = None,
        speed: SpeedModel | None = None,
        target_speed: SpeedModel | None = None,
        shapes: ShapesOnDataset | None = None,
        evidence: Evidence = NO_EVIDENCE,
        is_cut_up: bool = True,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.model = model
        self.budget_bytes = budget_bytes
        self.shapes = shapes
        self.evidence = evidence
        self.is_cut_up = is_cut_up
        self.residuals = Residuals(evidence.records)
        self.speed = speed
        self.target_speed = target_speed
        self.trials_learned = 0
        """How many trials it has learned from."""
        self.tracing: TracingPredictor | None = None
        if isinstance(predictor, TracingPredictor):
            self.tracing = predictor
        if predictor is not None:
            if shapes is None:
                predictor = MemoryInTrainer(predictor)
            else:
                predictor = MemoryOnDataset(predictor, shapes)
        self._predictor = predictor
        self._gpu = gpu
        self._rule = violation
        self._warn = warn
        self._warned: set[str] = set()
        self._ran_out = RanOut()
        self._of_one: dict[TrialConfig, Forecasts] = {}
        """What is expected of single configurations, those that were asked for last at the end."""

    @property
    def gpu(self) -> GpuSpec:
        """The GPU that is asked about."""
        assert self._gpu is not None, "a plan is of a GPU"
        return self._gpu

    @property
    def predicts_speed(self) -> bool:
        """Whether speeds are predicted by a GPU's data sheet."""
        return isinstance(self.target_speed or self.speed, SpeedForecast)

    def forecast(
        self,
        configs: Sequence[TrialConfig],
        *,
        progress: Progress = silent,
        fits: Sequence[Fit] | None = None,
    ) -> Forecasts:
        """Return what is expected of many configurations.

        Args:
            configs: a row each.
            progress: reports the progress of what takes long.
            fits: of each, where that is known from before.
        """
        if len(configs) == 1 and progress is silent and fits is None:
            return self._forecast_of_one(configs[0])
        return Forecasts(self, configs, progress, fits)

    def expect(self, config: TrialConfig) -> Forecast:
        """Return what is expected of one."""
        return self._forecast_of_one(config)[0]

    def _forecast_of_one(self, config: TrialConfig) -> Forecasts:
        """Return what is expected of one; the same until a further trial is learned.

        Trials change only how far its memory may be off: that is predicted once.
        """
        forecasts = self._of_one.pop(config, None)
        if forecasts is None:
            forecasts = Forecasts(self, [config])
        elif forecasts.trials_learned != self.trials_learned:
            forecasts = forecasts.renewed()
        self._of_one[config] = forecasts
        if len(self._of_one) > PREDICTIONS_KEPT:
            del self._of_one[next(iter(self._of_one))]
        return forecasts

    def whole_memory(
        self, configs: Sequence[TrialConfig], *, on_progress: OnProgress = ignore_progress
    ) -> WholeMemory:
        """Return what is predicted of the configurations' memory.

        Raises:
            EnvironmentFault: the tracing process has never answered, and there is no ``warn``.
        """
        if self._predictor is None:
            return predict_nothing(configs)
        try:
            whole = self._predictor.predict_all(configs, on_progress=on_progress)
        except SweepError as error:
            if self._warn is None:
                raise
            self._warn_once(error)
            return predict_nothing(configs)
        for reason in whole.unpredicted.values():
            self._warn_once(reason)
        return whole

    def _warn_once(self, error: SweepError) -> None:
        message = f"memory of some configurations is not predicted, so the device decides: {error}"
        if self._warn is not None and message not in self._warned:
            self._warned.add(message)
            self._warn(message)

    def violation(self, config: TrialConfig) -> Violation | None:
        """Return the rule that forbids ``config`` on this model, GPU and dataset, or None."""
        violation = self._rule(config)
        if violation is not None or self.shapes is None:
            return violation
        reason = self.shapes.epochs.refusal(config)
        if reason is None:
            return None
        return Violation(TOO_FEW_EXAMPLES, reason)

    def is_valid(self, config: TrialConfig) -> bool:
        """Return whether no rule forbids ``config``, and the dataset makes a batch of it."""
        return self.violation(config) is None

    def verdict_unpredicted(self, config: TrialConfig) -> Outcome | None:
        """Return the verdict that needs no prediction: of the rules, or of a smaller trial that ran
        out of memory."""
        violation = self.violation(config)
        if violation is not None:
            return Invalid(rule=violation.rule, detail=violation.reason)
        smaller = self._ran_out.by(self._footprint(config))
        if smaller is None:
            return None
        return DominatedOutOfMemory(by=smaller)

    def _footprint(self, config: TrialConfig) -> Footprint:
        return footprint(config, model=self.model, has_dataset=self.shapes is not None)

    def epoch_of(self, config: TrialConfig) -> EpochRecord | None:
        """Return what an epoch of the dataset is to ``config``; None without a dataset."""
        if self.shapes is None:
            return None
        return self.shapes.epochs.record(config)

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial: one that ran out is remembered, a measured one calibrates."""
        self.trials_learned += 1
        if self.speed is not None:
            self.speed.learn(record)
        if isinstance(record.outcome, OutOfMemory):
            least = self._footprint(record.config)
            if record.outcome.stage == "load":
                least = base_alone(least)
            self._ran_out.add(record.number, least)
        else:
            self.residuals.learn(record)

    def learn_all(self, records: Iterable[TrialRecord]) -> None:
        """Take in the finished trials of a study that resumes."""
        for record in records:
            self.learn(record)
