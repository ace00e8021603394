"""What is expected of configurations: the rules, their memory, their speed, and what trials showed.

Plans, samplers, the driver of a study and reports all ask a `Forecaster`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces import rules
from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.errors import InputError, SweepError
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
from qlora_sweep.sweep.predict.dominance import Footprint, RanOut, base_alone, footprint
from qlora_sweep.sweep.predict.memory.prediction import (
    Fit,
    MemoryPrediction,
    WholeMemory,
    predict_nothing,
)
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor, Residuals, TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import OnProgress, tell_nobody
from qlora_sweep.sweep.predict.memory.profiles import Untraceable
from qlora_sweep.sweep.predict.on_texts import (
    MemoryInTrainer,
    MemoryOnTexts,
    ShapesOnTexts,
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
"""Configurations whose memory is not predicted again; one takes some 30 KiB."""
TOO_FEW_TEXTS = "texts-make-no-micro-batch"
"""The rule of a configuration for which the dataset is too small, or cut too short."""
UNPREDICTED = "memory is not predicted: "
"""What a reason begins with why nothing is said of memory."""
UNBUILDABLE = "cannot-be-built"
"""The rule of what only the model's own code forbids: a target module that it does not have."""
TRIALS_TO_CALIBRATE = 5
"""Measured trials from which a GPU is known better than its data sheet."""
TRIALS_CALIBRATED = 256
"""The newest so many say how fast it is now, each of its eleven factors twenty times over."""
TRACED = "structures traced"
"""What is always the first to take its time."""

Array = NDArray[np.float64]
Basis = Literal["predicted", "calibrated", "measured"]
"""Where a number comes from: a GPU's rates and a model's code, those with trials, or a trial."""
Rule = Callable[[TrialConfig], Violation | None]
"""Returns the rule that forbids a configuration, bound to a model and a device."""
Progress = Callable[[str], OnProgress]
"""Returns what is told how much is done of what is named, and of how much."""


def nothing_known(model: ModelSpec, why: InputError) -> str:
    """Return that neither speed nor memory is known: what cannot be walked for the one cannot for
    the other."""
    return f"speed unknown for {model.name}, and memory: {str(why).rpartition(UNPREDICTED)[2]}"


def silent(_: str) -> OnProgress:
    """Tell nobody."""
    return tell_nobody


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
    is_same_card: bool = False
    """Whether its trials ran on the GPU that is asked about."""
    memory_errors: tuple[float, ...] = ()
    """Predicted peak over the measured one, less 1, where a trial has both."""
    records: Sequence[TrialRecord] = ()
    """All of its trials: the worst of their errors widens predictions, as in the study itself."""
    notes: tuple[str, ...] = ()
    """What of the study cannot be used, and why."""

    @property
    def memory_error(self) -> float | None:
        """Median size of the memory prediction's relative error; None where nothing tells."""
        return statistics.median(map(abs, self.memory_errors)) if self.memory_errors else None

    def fits(self, config: TrialConfig, *, budget_bytes: int) -> bool | None:
        """Return whether ``config`` fits, as a trial has shown; None where none has."""
        if self.study is None:
            return None
        known = canonical(config)
        if known in self.trials and self.budget_bytes <= budget_bytes:
            return True
        return False if known in self.ran_out and self.budget_bytes >= budget_bytes else None

    def trial(self, config: TrialConfig) -> TrialRecord | None:
        """Return the trial that measured ``config`` on the GPU that is asked about."""
        return self.trials.get(canonical(config)) if self.is_same_card else None


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
    shapes: ShapesOnTexts | None = None
    calibration: Calibration | None = None
    _measured: deque[TrialRecord] = field(
        init=False, default_factory=lambda: deque(maxlen=TRIALS_CALIBRATED)
    )
    _is_stale: bool = field(init=False, default=False)

    def predict(self, config: TrialConfig) -> float | None:
        """Return tokens/s; None where the architecture or the compute type has no prediction."""
        speed = float(self.times([config]).tokens_per_second[0])
        return None if math.isnan(speed) else speed

    def times(self, configs: Sequence[TrialConfig]) -> StepTimes:
        """Return the steps of many configurations, by the trials that there are."""
        known: dict[str, Any] = {"model": self.model, "gpu": self.gpu, "shapes": self.shapes}
        if self._is_stale:
            self.calibration = calibrated(self._measured, **known)
            self._is_stale = False
        return StepTimes(configs, **known, calibration=self.calibration)

    def physics(self, configs: Sequence[TrialConfig]) -> StepTimes | None:
        """Return the data sheet's model of the configurations' steps."""
        times = self.times(configs)
        return times if times.is_known.any() else None

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial; only those measured to the end say something of the GPU."""
        if record.verdict is Verdict.FITS and record.measurement is not None:
            self._measured.append(record)
            self._is_stale = len(self._measured) >= TRIALS_TO_CALIBRATE


class Timed(Protocol):
    """A configuration whose step was measured: a trial, or the record of one."""

    @property
    def config(self) -> TrialConfig:
        """What ran."""

    @property
    def measurement(self) -> Measurement | None:
        """What was measured of it; None where nothing was."""


def calibrated(
    records: Iterable[Timed],
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    shapes: ShapesOnTexts | None,
) -> Calibration | None:
    """Return what measured trials say of a GPU's speed; None where they say nothing."""
    observations = [
        (record.config, record.measurement.step_seconds)
        for record in records
        if record.measurement is not None and refusal(record.config, model=model, gpu=gpu) is None
    ]
    if shapes is not None:
        # What full sequences would take that a step on texts stands for.
        observations = [(shapes.for_speed(c), s / shapes.of(c).seconds) for c, s in observations]
    return calibrate(observations, model=model, gpu=gpu) if observations else None


@dataclass(eq=False)
class Forecasts:
    """What is expected of many configurations, a row each.

    Every column is worked out when it is first read. It holds until the forecaster learns of a
    further trial.
    """

    forecaster: Forecaster
    configs: Sequence[TrialConfig]
    progress: Progress = silent
    """Told of what takes its time."""
    fits: list[Fit | None] | None = None
    """Of each row, as far as it is known."""

    def __post_init__(self) -> None:
        self.budget_bytes = self.forecaster.budget_bytes
        self.is_cut_up = self.forecaster.is_cut_up

    def __len__(self) -> int:
        return len(self.configs)

    def __getitem__(self, row: int) -> Forecast:
        return Forecast(self.configs[row], self, row)

    def __iter__(self) -> Iterator[Forecast]:
        return map(self.__getitem__, range(len(self)))

    @cached_property
    def _memory(self) -> WholeMemory:
        return self.forecaster.whole_memory(self.configs, on_progress=self.progress(TRACED))

    def replay(self, progress: Progress) -> Iterator[int]:
        """Replay all steps, on all processors, where each is going to be looked at; yield the rows,
        each as soon as it is."""
        near = [row for row, fit in enumerate(self.quick_fits()) if fit is None]
        return self._memory.replay(near, on_progress=progress("steps replayed"))

    @property
    def refused(self) -> Mapping[int, InputError]:
        """Why no memory is predicted, of the rows of which none is."""
        return self._memory.refused

    @cached_property
    def peak_bytes(self) -> Array | None:
        """Predicted allocated peaks, not a number where one is not predicted; None for none."""
        peaks = self._memory.peak_allocated_bytes.astype(float)
        return None if (peaks < 0).all() else np.where(peaks < 0, np.nan, peaks)

    @property
    def least_bytes(self) -> NDArray[np.int64]:
        """No more than the peaks, without replaying a step."""
        return self._memory.least_allocated_bytes

    @property
    def uncertainty(self) -> Array:
        """How far each peak may be off, relative, as predictions state it."""
        return self._memory.uncertainty

    @cached_property
    def errors(self) -> Array:
        """The same, no surer than the trials allow."""
        return self.forecaster.residuals.widest(self.uncertainty, self.configs)

    def fit(self, row: int) -> Fit:
        """Return whether a row fits, whatever the rules say; a trial that has shown it overrules.

        Uncertain too where nothing is predicted.
        """
        shown = self.forecaster.evidence.fits(self.configs[row], budget_bytes=self.budget_bytes)
        if shown is not None:
            return Fit.YES if shown else Fit.NO
        fits = self.quick_fits()
        fit = fits[row]
        if fit is None:
            memory = self.memory(row)
            fit = Fit.UNCERTAIN if memory is None else memory.fits(self.budget_bytes)
            fits[row] = fit
        return fit

    def quick_fits(self) -> list[Fit | None]:
        """Return whether each row fits, whatever the rules say; None where only a replay tells."""
        if self.fits is None:
            self.fits = self._memory.quick_fits(self.budget_bytes, uncertainty=self.errors)
        return self.fits

    def memory(self, row: int) -> MemoryPrediction | None:
        """Return what a row needs, no surer than the trials allow; None for no prediction."""
        if row in self.refused:
            return None
        return self._memory.prediction(row).widened(float(self.errors[row]))

    @cached_property
    def tokens_per_step(self) -> Array | None:
        """Those that carry loss, as a mean of the texts; None for full rows, all of whose do."""
        shapes = self.forecaster.shapes
        return None if shapes is None else tokens_per_step(self.configs, shapes)

    @cached_property
    def tokens_per_second(self) -> Array:
        """Measured where a trial was, else predicted; 0 where nothing is known."""
        speeds = np.nan_to_num(self.times.tokens_per_second)
        if self.forecaster.evidence.is_same_card:
            tokens = tokens_per_step(self.configs, self.forecaster.shapes)
            for row, config in enumerate(self.configs):
                trial = self.forecaster.evidence.trial(config)
                if trial is not None and trial.measurement is not None:
                    speeds[row] = tokens[row] / trial.measurement.step_seconds
        return speeds

    @cached_property
    def times(self) -> StepTimes:
        """The steps on the GPU of a plan."""
        speed = self.forecaster.speed
        assert isinstance(speed, SpeedForecast), "a plan is of a GPU"
        return speed.times(self.configs)

    @cached_property
    def physics(self) -> StepTimes | None:
        """The data sheet's model of the steps; None where there is none."""
        speed = self.forecaster.speed
        return None if speed is None else speed.physics(self.configs)

    @cached_property
    def target(self) -> StandIn | None:
        """The steps on the target, where another GPU stands in for it, beside that GPU's; else
        None."""
        speed, host = self.forecaster.target_speed, self.forecaster.speed
        steps = None if speed is None else speed.physics(self.configs)
        if steps is None:
            return None
        if not isinstance(host, SpeedForecast):
            return StandIn(None, steps)
        known: dict[str, Any] = {"model": host.model, "gpu": host.gpu, "shapes": host.shapes}
        return StandIn(StepTimes(self.configs, **known), steps)

    @cached_property
    def trainable_parameters(self) -> Array | None:
        """Sizes of the adapters; None where the model's layers are not known."""
        counts = [lora_parameters(config, self.forecaster.model) for config in self.configs]
        return None if None in counts else np.array(counts, dtype=float)


@dataclass(frozen=True)
class Forecast:
    """What is expected of one configuration: a row of `Forecasts`.

    Each part is worked out when it is first read: looking for the fastest of a thousand asks for
    the memory of none.
    """

    config: TrialConfig
    _all: Forecasts = field(repr=False, compare=False)
    _row: int = field(repr=False, compare=False, default=0)

    @cached_property
    def memory(self) -> MemoryPrediction | None:
        """What it needs, no surer than the trials allow; None where nothing can be predicted."""
        return self._all.memory(self._row)

    @property
    def peak_allocated_bytes(self) -> int | None:
        """Of that."""
        return None if self.memory is None else self.memory.peak_allocated_bytes

    @property
    def memory_uncertainty(self) -> float:
        """How far its peak may be off, relative; not at all where a trial has measured it, or
        nothing is predicted."""
        is_unsure = self.trial is None and self._row not in self._all.refused
        return float(self._all.errors[self._row]) if is_unsure else 0.0

    @property
    def learning_rate(self) -> LearningRate:
        """That it would train with, which its speed and memory do not depend on."""
        return learning_rate_of(self.config, self.forecaster.model.config)

    @cached_property
    def _rule(self) -> Violation | None:
        return self.forecaster.broken(self.config)

    @cached_property
    def broken(self) -> Violation | None:
        """The rule that forbids it, or that the model cannot be built so."""
        if self._rule is not None:
            return self._rule
        error = self._all.refused.get(self._row)
        if error is None or isinstance(error, Untraceable):
            return None
        return Violation(UNBUILDABLE, str(error))

    @cached_property
    def fit(self) -> Fit:
        """Whether it fits; uncertain too where nothing can be predicted."""
        return Fit.NO if self.broken is not None else self._all.fit(self._row)

    @cached_property
    def fits(self) -> bool | None:
        """The best guess, also where `fit` is uncertain; None where there is nothing to go by."""
        if self.fit is not Fit.UNCERTAIN:
            return self.fit is Fit.YES
        return None if self.memory is None else self.memory.is_likely(self._all.budget_bytes)

    @cached_property
    def trial(self) -> TrialRecord | None:
        """The trial of a stored study that measured it on this GPU."""
        trial = self.forecaster.evidence.trial(self.config)
        return None if trial is None or self._rule else trial

    @property
    def measured(self) -> Measurement | None:
        """What that trial measured."""
        return None if self.trial is None else self.trial.measurement

    @cached_property
    def _step(self) -> SpeedPrediction | InputError | None:
        return None if self.broken else self._all.times.prediction(self._row)

    @property
    def speed(self) -> SpeedPrediction | None:
        """None where the architecture or the compute type has no prediction, or a rule forbids
        it."""
        return None if isinstance(self._step, InputError) else self._step

    @cached_property
    def log_slopes(self) -> Array:
        """By how much its log seconds rise with each log factor, before any trial."""
        row = slice(self._row, self._row + 1)
        return np.asarray(self._all.times.slopes(np.zeros(len(FACTORS)), row)[0])

    @property
    def own_spread(self) -> float:
        """Standard deviation of what its log seconds are off by alone, whatever others are."""
        return float(self._all.times.own_spread[self._row])

    @property
    def notes(self) -> tuple[str, ...]:
        """Why something is missing."""
        if self.broken is not None:
            return ()
        refused = self._all.refused.get(self._row)
        if refused is None:
            return () if self.speed_unknown is None else (self.speed_unknown,)
        reason = str(refused).rpartition(UNPREDICTED)[2]
        if self.speed_unknown is None:
            return (f"{UNPREDICTED}{reason}",)
        return (nothing_known(self.forecaster.model, refused),)

    @property
    def speed_unknown(self) -> str | None:
        """Why its speed is not known, neither predicted nor measured; None where it is, or a rule
        forbids it."""
        if not isinstance(self._step, InputError) or self.measured is not None:
            return None
        return f"speed unknown for {self.forecaster.model.name}: {self._step}"

    @property
    def step_seconds(self) -> float | None:
        """Seconds of an optimizer step: measured where it was, else predicted."""
        known = self.measured or self.speed
        return None if known is None else known.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that carry loss per second: of texts, or of full rows."""
        if self.step_seconds is None:
            return None
        (tokens,) = tokens_per_step([self.config], self.forecaster.shapes).tolist()
        return float(tokens / self.step_seconds)

    @property
    def step_seconds_range(self) -> tuple[float, float] | None:
        """Between what the step is expected: of a measured one its own interval, of a predicted
        one nine in ten. A step measured too few times is no surer than its prediction."""
        if self.measured is not None and self.measured.step_seconds_ci95 is not None:
            return self.measured.step_seconds_ci95
        if self.step_seconds is None or self.speed is None:
            return None
        return within(self.step_seconds, self.speed.log_spread)

    @property
    def tokens_per_second_range(self) -> tuple[float, float] | None:
        """The same of the speed."""
        speed, seconds, ends = self.tokens_per_second, self.step_seconds, self.step_seconds_range
        if speed is None or seconds is None or ends is None:
            return None
        return speed * seconds / ends[1], speed * seconds / ends[0]

    @property
    def speed_basis(self) -> Basis | None:
        """Where the speed comes from."""
        if self.measured is not None:
            return "measured"
        return None if self.speed is None else self.speed.basis

    @property
    def forecaster(self) -> Forecaster:
        """What was asked."""
        return self._all.forecaster

    @property
    def epoch(self) -> EpochRecord | None:
        """One pass over the texts; None without texts."""
        return self.forecaster.epoch_of(self.config)

    @cached_property
    def _ruled_out(self) -> Outcome | None:
        return self.forecaster.ruled_out(self.config)

    @cached_property
    def is_refused(self) -> bool:
        """Whether there is a `refusal`; quicker, as nobody wants to know what it says."""
        return self._ruled_out is not None or self._all.fit(self._row) is Fit.NO

    @cached_property
    def refusal(self) -> Outcome | None:
        """The verdict that spares the GPU a trial; None where only running it tells.

        What is predicted not to fit is refused by the verdict that `sweep plan` gives as well,
        though a smaller trial ran out of memory too: the prediction says how much it needs. What is
        too close to say is left to the GPU.
        """
        if isinstance(self._ruled_out, Invalid) or self.memory is None:
            return self._ruled_out
        if self._all.fit(self._row) is not Fit.NO:
            return self._ruled_out
        budget, percent = self._all.budget_bytes, 100 * self.memory.uncertainty
        return PredictedOutOfMemory(
            predicted_bytes=self.memory.needed_bytes(budget),
            detail=f"budget {budget} bytes, peak predicted within {percent:.3g} %",
        )

    @cached_property
    def record(self) -> PredictionRecord | None:
        """What a trial's record keeps of it; None where memory is not predicted, and of what is
        not valid: nobody is to wait for the tracing of a step that never runs."""
        if isinstance(self._ruled_out, Invalid) or self.memory is None:
            return None
        speed = self.forecaster.speed
        return PredictionRecord(
            peak_allocated_bytes=self.memory.peak_allocated_bytes,
            peak_reserved_bytes=self.memory.peak_reserved_bytes,
            tokens_per_second=None if speed is None else speed.predict(self.config),
        )


class Forecaster:
    """Predicts for any configuration of one model on one GPU, and learns from trials.

    Args:
        model: what is trained.
        budget_bytes: what a training may take.
        gpu: that runs, whose rules and rates hold where neither ``violation`` nor ``speed`` is
            given; None for a CPU, and for a GPU that the catalogue does not have.
        violation: the rules, bound to model and device.
        predictor: None where memory cannot be predicted; the device then decides.
        speed: None where speed cannot be predicted.
        target_speed: of the target, where another GPU stands in for it.
        shapes: of the texts that are trained on; None where rows are full.
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
        gpu: GpuSpec | None = None,
        violation: Rule | None = None,
        predictor: MemoryPredictor | None = None,
        speed: SpeedModel | None = None,
        target_speed: SpeedModel | None = None,
        shapes: ShapesOnTexts | None = None,
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
        self._gpu = gpu
        if gpu is not None:
            self.speed = speed or SpeedForecast(
                model=model, gpu=gpu, shapes=shapes, calibration=evidence.calibration
            )
            violation = violation or partial(
                rules.violation,
                model=model,
                compute_capability=gpu.compute_capability,
                device="cuda",
                has_texts=shapes is not None,
            )
        assert violation is not None, "rules are of a GPU, or given"
        self._violation = violation
        self.tracing = predictor if isinstance(predictor, TracingPredictor) else None
        if predictor is not None:
            in_trainer = MemoryInTrainer(predictor)
            predictor = in_trainer if shapes is None else MemoryOnTexts(predictor, shapes)
        self._predictor = predictor
        self.target_speed = target_speed
        self._warn = warn
        self._warned: set[str] = set()
        self._ran_out = RanOut()
        self._expected: dict[TrialConfig, Forecast] = {}
        self._memory_of_one = lru_cache(PREDICTIONS_KEPT)(
            lambda one: self._predict_all([one], tell_nobody)
        )

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
            progress: told of what takes its time.
            fits: of each, where that is known from before.
        """
        return Forecasts(self, configs, progress, None if fits is None else [*fits])

    def expect(self, config: TrialConfig) -> Forecast:
        """Return what is expected of one; the same value until a further trial is learned."""
        if config not in self._expected:
            self._expected[config] = self.forecast([config])[0]
        return self._expected[config]

    def whole_memory(
        self, configs: Sequence[TrialConfig], *, on_progress: OnProgress = tell_nobody
    ) -> WholeMemory:
        """Return what is predicted of the configurations' memory.

        That of one alone is kept, as it stays what it is whatever trials show.

        Raises:
            EnvironmentFault: the tracing process has never answered, and nobody is warned of it.
        """
        try:
            if len(configs) == 1 and on_progress is tell_nobody:
                whole = self._memory_of_one(configs[0])
            else:
                whole = self._predict_all(configs, on_progress)
        except SweepError as error:
            self._tell(error)
            return predict_nothing(configs)
        if self._warn is not None and self._predictor is not None:
            for refused in whole.refused.values():
                self._tell(refused)
        return whole

    def _predict_all(self, configs: Sequence[TrialConfig], on_progress: OnProgress) -> WholeMemory:
        if self._predictor is None:
            return predict_nothing(configs)
        return self._predictor.predict_all(configs, on_progress=on_progress)

    def _tell(self, error: SweepError) -> None:
        """Warn of an error once; raise it where nobody is to be warned."""
        if self._warn is None:
            raise error
        message = f"memory of some configurations is not predicted, so the device decides: {error}"
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)

    def broken(self, config: TrialConfig) -> Violation | None:
        """Return the rule that forbids ``config`` on this model, GPU and texts, or None."""
        broken = self._violation(config)
        if broken is not None or self.shapes is None:
            return broken
        refusal = self.shapes.epochs.refusal(config)
        return None if refusal is None else Violation(TOO_FEW_TEXTS, refusal)

    def is_valid(self, config: TrialConfig) -> bool:
        """Return whether no rule forbids ``config``, and the texts make a batch of it."""
        return self.broken(config) is None

    def ruled_out(self, config: TrialConfig) -> Outcome | None:
        """Return the verdict of the rules, or of a smaller trial that ran out of memory."""
        broken = self.broken(config)
        if broken is not None:
            return Invalid(rule=broken.rule, detail=broken.reason)
        by = self._ran_out.by(self._footprint(config))
        return None if by is None else DominatedOutOfMemory(by=by)

    def _footprint(self, config: TrialConfig) -> Footprint:
        return footprint(config, model=self.model, has_texts=self.shapes is not None)

    def epoch_of(self, config: TrialConfig) -> EpochRecord | None:
        """Return what an epoch of the texts is to ``config``; None without texts."""
        return None if self.shapes is None else self.shapes.epochs.record(config)

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial: one that ran out is remembered, a measured one calibrates."""
        self._expected.clear()
        if self.speed is not None:
            self.speed.learn(record)
        if isinstance(record.outcome, OutOfMemory):
            whole = self._footprint(record.config)
            least = base_alone(whole) if record.outcome.stage == "load" else whole
            self._ran_out.add(record.number, least)
        else:
            self.residuals.learn(record)

    def learn_all(self, records: Iterable[TrialRecord]) -> None:
        """Take in the finished trials of a study that goes on."""
        for record in records:
            self.learn(record)
