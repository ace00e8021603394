"""Owns what is expected of a configuration before it runs: it is not valid, it cannot fit, or what
it will need and how fast it will be.

Knows nothing of Optuna, processes or files. The rules and the memory prediction are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, SweepError
from search_spaces.gpus import GpuSpec
from search_spaces.linears import lora_parameters
from search_spaces.models import ModelSpec
from search_spaces.rules import Violation
from storage.records import (
    DominatedOutOfMemory,
    EpochRecord,
    Invalid,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    TrialRecord,
    Verdict,
)
from sweep.predict.memory.arrays import WholeMemory, predict_nothing
from sweep.predict.memory.prediction import Fit, MemoryPrediction
from sweep.predict.memory.predictor import MemoryPredictor, Residuals
from sweep.predict.on_texts import MemoryOnTexts, ShapesOnTexts, tokens_per_step
from sweep.predict.speed.calibration import Calibration, calibrate
from sweep.predict.speed.log_factors import LogFactors
from sweep.predict.speed.predictor import predict_step
from sweep.sampling.belief import Physics
from sweep.sampling.expecting import Foreseen
from sweep.study.dominance import Footprint, RanOut, base_alone, footprint

PREDICTIONS_KEPT = 4096
"""Predictions of memory that are not made again; one takes some 30 KiB."""
TOO_FEW_TEXTS = "texts-make-no-micro-batch"
"""The rule of a configuration for which the study's texts are too few, or cut too short."""
TRIALS_TO_CALIBRATE = 5
"""Measured trials from which the card is known better than its data sheet."""
TRIALS_CALIBRATED = 256
"""The newest so many say how fast it is now, each of its eleven factors twenty times over."""


class SpeedModel(Protocol):
    """Predicts the speed of a configuration, the better the more trials it has seen."""

    def predict(self, config: TrialConfig) -> float | None:
        """Return tokens/s; None where it cannot say."""
        ...

    def physics(self, configs: Sequence[TrialConfig]) -> Physics | None:
        """Return the model of many configurations' steps; None where it cannot say."""
        ...

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial."""
        ...


@dataclass(frozen=True)
class _Memory:
    """What a configuration needs, how sure that is by now, and whether it fits."""

    predicted: MemoryPrediction
    widened: MemoryPrediction
    fit: Fit


@dataclass(frozen=True)
class Expected:
    """What is known of one configuration before it runs, from the choice to the record.

    Each part is worked out when it is first read, and once: looking for the fastest of a thousand
    configurations asks for the memory of none. It is good until the pre-flight learns of a further
    trial; the next `expect` then gives another.
    """

    config: TrialConfig
    _preflight: Preflight = field(repr=False, compare=False)

    @cached_property
    def is_refused(self) -> bool:
        """Whether there is a `refusal`; quicker, as nobody wants to know what it says."""
        return self._ruled_out is not None or self._fit is Fit.NO

    @cached_property
    def refusal(self) -> Outcome | None:
        """The verdict that spares the device a trial; None where only running it tells.

        What is predicted not to fit is refused by the verdict that `sweep plan` gives as well,
        though a smaller trial ran out of memory too: the prediction says how much it needs. What is
        too close to say is left to the device.
        """
        if isinstance(self._ruled_out, Invalid) or self.memory is None or self._fit is not Fit.NO:
            return self._ruled_out
        budget, percent = self._preflight.budget_bytes, 100 * self.memory.uncertainty
        return PredictedOutOfMemory(
            predicted_bytes=self.memory.needed_bytes(budget),
            detail=f"budget {budget} bytes, peak predicted within {percent:.3g} %",
        )

    @property
    def memory(self) -> MemoryPrediction | None:
        """What it would need, no surer than the study's trials allow; None for no prediction."""
        return None if self._memory is None else self._memory.widened

    @cached_property
    def tokens_per_second(self) -> float | None:
        """Its speed on the card that runs it; None where that is not known."""
        return self._preflight.speed_of(self.config)

    @cached_property
    def record(self) -> PredictionRecord | None:
        """What the trial's record keeps of it; None where memory is not predicted, and of what is
        not valid: nobody is to wait for the tracing of a step that never runs."""
        if isinstance(self._ruled_out, Invalid) or self.memory is None:
            return None
        return PredictionRecord(
            peak_allocated_bytes=self.memory.peak_allocated_bytes,
            peak_reserved_bytes=self.memory.peak_reserved_bytes,
            tokens_per_second=self.tokens_per_second,
        )

    @cached_property
    def epoch(self) -> EpochRecord | None:
        """What an epoch of the study's texts is to it; None without texts."""
        return self._preflight.epoch_of(self.config)

    @cached_property
    def _ruled_out(self) -> Outcome | None:
        """The verdict that takes no prediction."""
        return self._preflight.ruled_out(self.config)

    @cached_property
    def _memory(self) -> _Memory | None:
        return self._preflight.memory_of(self.config)

    @property
    def _fit(self) -> Fit | None:
        return None if self._memory is None else self._memory.fit


class Preflight:
    """Expects by the rules, by the trials known to have run out of memory, and by predictions.

    It is handed to the sampler and to the loop, which read the same `Expected` of a configuration.

    Args:
        model: what is trained.
        budget_bytes: what a trial may allocate.
        violation: the rules, bound to model and device.
        predictor: None where memory cannot be predicted; the device then decides.
        speed: None where speed cannot be predicted.
        target_speed: of the target, where another GPU stands in for it.
        shapes: of the study's texts; None where rows are random.
        is_cut_up: whether the allocator may fail below the budget, as free memory is in pieces.
        warn: told once of each reason why something is not predicted; the study goes on without.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        budget_bytes: int,
        violation: Callable[[TrialConfig], Violation | None],
        predictor: MemoryPredictor | None = None,
        speed: SpeedModel | None = None,
        target_speed: SpeedModel | None = None,
        shapes: ShapesOnTexts | None = None,
        is_cut_up: bool = True,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._model = model
        self._violation = violation
        self._predictor = (
            predictor if predictor is None or shapes is None else MemoryOnTexts(predictor, shapes)
        )
        self._speed = speed
        self._target_speed = target_speed
        self._shapes = shapes
        self._epochs = None if shapes is None else shapes.epochs
        self._is_cut_up = is_cut_up
        self._warn = warn
        self._ran_out = RanOut()
        self._residuals = Residuals()
        self._expected: dict[TrialConfig, Expected] = {}
        self._memory: dict[TrialConfig, _Memory] = {}
        """What a configuration needs stays what it is, whatever a study learns; only how sure that
        is can change."""
        self._warned: set[str] = set()

    @property
    def predicts_speed(self) -> bool:
        """Whether any speed is known."""
        return self._speed is not None

    def is_valid(self, config: TrialConfig) -> bool:
        """Return whether no rule forbids ``config``, and the study's texts make a batch of it."""
        return self._broken(config) is None

    def _broken(self, config: TrialConfig) -> Violation | None:
        broken = self._violation(config)
        if broken is not None or self._epochs is None:
            return broken
        refusal = self._epochs.refusal(config)
        return None if refusal is None else Violation(TOO_FEW_TEXTS, refusal)

    def epoch_of(self, config: TrialConfig) -> EpochRecord | None:
        """Return what an epoch of the study's texts is to ``config``; None without texts."""
        return None if self._epochs is None else self._epochs.record(config)

    def foresee(self, configs: Sequence[TrialConfig]) -> Foreseen:
        """Return what is predicted of many configurations, whatever the trials have shown."""
        whole = self._whole(configs)
        peaks = np.where(
            whole.peak_allocated_bytes < 0, np.nan, whole.peak_allocated_bytes.astype(float)
        )
        return Foreseen(
            physics=None if self._speed is None else self._speed.physics(configs),
            target=None if self._target_speed is None else self._target_speed.physics(configs),
            peak_bytes=None if np.isnan(peaks).all() else peaks,
            uncertainty=whole.uncertainty,
            budget_bytes=self.budget_bytes,
            is_cut_up=self._is_cut_up,
            trainable_parameters=_trainable(configs, self._model),
            tokens_per_step=None
            if self._shapes is None
            else tokens_per_step(configs, self._shapes),
        )

    def prepare(
        self, configs: Iterable[TrialConfig], *, on_progress: Callable[[int, int], None]
    ) -> None:
        """Do ahead what predicting the memory of these configurations takes.

        Args:
            configs: those that are not valid are left out.
            on_progress: told how much of it is done, of how much; of nothing where it is there.
        """
        if self._predictor is None:
            return
        valid = (config for config in configs if self._broken(config) is None)
        try:
            self._predictor.prepare(valid, on_progress=on_progress)
        except SweepError as error:
            self._say_unpredicted(error)

    def expect(self, config: TrialConfig) -> Expected:
        """Return what is known of ``config``; the same value until a further trial is learned."""
        if config not in self._expected:
            self._expected[config] = Expected(config, self)
        return self._expected[config]

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial: one that ran out is remembered, a measured one calibrates."""
        self._expected.clear()
        if self._speed is not None:
            self._speed.learn(record)
        match record.outcome:
            case OutOfMemory(stage=stage):
                whole = self._footprint(record.config)
                least = base_alone(whole) if stage == "load" else whole
                self._ran_out.learn(record.number, least)
            case _:
                self._residuals.learn(record)

    def learn_all(self, records: Iterable[TrialRecord]) -> None:
        """Take in the finished trials of a study that goes on."""
        for record in records:
            self.learn(record)

    def ruled_out(self, config: TrialConfig) -> Outcome | None:
        """Return the verdict of the rules, or of a smaller trial that ran out of memory."""
        broken = self._broken(config)
        if broken is not None:
            return Invalid(rule=broken.rule, detail=broken.reason)
        number = self._ran_out.below(self._footprint(config))
        return None if number is None else DominatedOutOfMemory(by=number)

    def _footprint(self, config: TrialConfig) -> Footprint:
        return footprint(config, model=self._model, has_texts=self._epochs is not None)

    def speed_of(self, config: TrialConfig) -> float | None:
        """Return the expected tokens/s."""
        return None if self._speed is None else self._speed.predict(config)

    def memory_of(self, config: TrialConfig) -> _Memory | None:
        """Return the prediction, no surer than the study's trials allow, and whether it fits."""
        known = self._memory.get(config)
        predicted = self._asked(config) if known is None else known.predicted
        if predicted is None:
            return None
        # Widened from what was predicted, and not again from what was widened before: the same
        # trials say the same of every configuration, whenever it was first asked about.
        widened = self._residuals.widened(predicted, config)
        if known is None or known.widened.uncertainty != widened.uncertainty:
            known = _Memory(predicted, widened, widened.fits(self.budget_bytes))
            self._memory[config] = known
        if len(self._memory) > PREDICTIONS_KEPT:
            del self._memory[next(iter(self._memory))]
        return known

    def _whole(self, configs: Sequence[TrialConfig]) -> WholeMemory:
        """Return what is predicted of the configurations, nothing of those that cannot be."""
        if self._predictor is None:
            return predict_nothing(configs)
        try:
            whole = self._predictor.predict_all(configs)
        except SweepError as error:
            self._say_unpredicted(error)
            return predict_nothing(configs)
        for refused in whole.refused.values():
            self._say_unpredicted(refused)
        return whole

    def _asked(self, config: TrialConfig) -> MemoryPrediction | None:
        """Return the predictor's answer, and None where it has none."""
        if self._predictor is None:
            return None
        try:
            return self._predictor.predict(config)
        except SweepError as error:
            # Another structure may well be predicted, so the next is asked for all the same.
            self._say_unpredicted(error)
            return None

    def _say_unpredicted(self, error: SweepError) -> None:
        message = f"memory of some configurations is not predicted, so the device decides: {error}"
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)


class SpeedForecast:
    """Predicts speed on one card, the one that really runs, by its data sheet and by the trials."""

    def __init__(
        self, *, model: ModelSpec, gpu: GpuSpec, shapes: ShapesOnTexts | None = None
    ) -> None:
        self._model = model
        self._gpu = gpu
        self._shapes = shapes
        self._observations: list[tuple[TrialConfig, float]] = []
        self._calibration: Calibration | None = None

    def predict(self, config: TrialConfig) -> float | None:
        """Return tokens/s; None where the architecture or the compute type has no prediction."""
        try:
            if self._calibration is None and len(self._observations) >= TRIALS_TO_CALIBRATE:
                newest = self._observations[-TRIALS_CALIBRATED:]
                self._calibration = calibrate(newest, model=self._model, gpu=self._gpu)
            if self._shapes is None:
                return predict_step(
                    config, model=self._model, gpu=self._gpu, calibration=self._calibration
                ).tokens_per_second
            (known,) = self._shapes.predict_steps(
                [config], model=self._model, gpu=self._gpu, calibration=self._calibration
            )
            return None if isinstance(known, InputError) else known.tokens_per_second
        except InputError:
            return None

    def physics(self, configs: Sequence[TrialConfig]) -> Physics | None:
        """Return the data sheet's model of the configurations' steps."""
        shapes = self._shapes
        if shapes is not None:
            configs = [shapes.for_speed(config) for config in configs]
        try:
            return LogFactors(configs, model=self._model, gpu=self._gpu)
        except ValueError:
            return None

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial; only those measured to the end say something of the card."""
        if record.verdict is Verdict.FITS and record.measurement is not None:
            config, seconds = record.config, record.measurement.step_seconds
            if self._shapes is not None:
                seconds = self._shapes.full_seconds(config, seconds)
                config = self._shapes.for_speed(config)
            self._observations.append((config, seconds))
            self._calibration = None


def _trainable(configs: Sequence[TrialConfig], model: ModelSpec) -> NDArray[np.float64] | None:
    """Return the sizes of the adapters; None where the model's layers are not known."""
    counts = [lora_parameters(config, model) for config in configs]
    return None if None in counts else np.array(counts, dtype=float)
