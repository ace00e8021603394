"""Owns what is known of a configuration before it runs: it is not valid, or it cannot fit.

Knows nothing of Optuna, processes or files. The rules and the memory prediction are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, SweepError
from search_spaces.models import ModelSpec
from search_spaces.rules import Violation
from storage.records import (
    DominatedOutOfMemory,
    Invalid,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    TrialRecord,
)
from sweep.predict.memory.predictor import Fit, MemoryPrediction, Residuals
from sweep.study.dominance import Footprint, base_alone, dominates, footprint

DEATHS_TOLERATED = 2
"""Predictions in a row that may fail by the machine's fault before no more are asked for."""


class MemoryPredictor(Protocol):
    """Predicts the peak memory of a configuration without running it."""

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        """Return the prediction for ``config``.

        Raises:
            InputError: this one cannot be predicted; another may be.
            EnvironmentFault: the machine is at fault; it may answer when asked again.
        """
        ...


class SpeedPredictor(Protocol):
    """Predicts the speed of a configuration, the better the more trials it has seen."""

    def predict(self, config: TrialConfig) -> float | None:
        """Return tokens/s; None where it cannot say."""
        ...

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial."""
        ...


class Preflight:
    """Checks configurations against the rules, the known out-of-memory trials and a prediction.

    Args:
        model: what is trained.
        budget_bytes: what a trial may allocate.
        violation: the rules, bound to model and device.
        predictor: None where memory cannot be predicted; the device then decides.
        speed: adds the expected speed to what is predicted for the record.
        warn: told once of each reason why something is not predicted; the study goes on without.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        budget_bytes: int,
        violation: Callable[[TrialConfig], Violation | None],
        predictor: MemoryPredictor | None = None,
        speed: SpeedPredictor | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._model = model
        self._budget_bytes = budget_bytes
        self._violation = violation
        self._predictor = predictor
        self._speed = speed
        self._warn = warn
        self._ran_out: list[tuple[int, Footprint]] = []
        self._residuals = Residuals()
        self._predictions: dict[TrialConfig, MemoryPrediction] = {}
        self._fits: dict[tuple[TrialConfig, float], Fit] = {}
        self._warned: set[str] = set()
        self._deaths = 0

    def check(self, config: TrialConfig) -> Outcome | None:
        """Return the verdict that spares the device a trial; None where only running it tells."""
        return self._forbidden(config) or self._dominated(config) or self._predicted(config)

    def refuses(self, config: TrialConfig) -> bool:
        """Whether `check` has a verdict; quicker, as nobody wants to know what it says."""
        if self._forbidden(config) or self._dominated(config):
            return True
        prediction = self._memory(config)
        return prediction is not None and self._fit(config, prediction) is Fit.NO

    def prediction(self, config: TrialConfig) -> PredictionRecord | None:
        """Return what is predicted of ``config``, for its record; None where nothing predicts."""
        memory = self._memory(config)
        if memory is None:
            return None
        return PredictionRecord(
            peak_allocated_bytes=memory.peak_allocated_bytes,
            peak_reserved_bytes=memory.peak_reserved_bytes,
            tokens_per_second=None if self._speed is None else self._speed.predict(config),
        )

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial: one that ran out is remembered, a measured one calibrates."""
        if self._speed is not None:
            self._speed.learn(record)
        match record.outcome:
            case OutOfMemory(stage=stage):
                whole = footprint(record.config, model=self._model)
                least = base_alone(whole) if stage == "load" else whole
                self._ran_out.append((record.number, least))
            case _:
                self._residuals.learn(record)

    def learn_all(self, records: Iterable[TrialRecord]) -> None:
        """Take in the finished trials of a study that goes on."""
        for record in records:
            self.learn(record)

    def _forbidden(self, config: TrialConfig) -> Outcome | None:
        broken = self._violation(config)
        return None if broken is None else Invalid(rule=broken.rule, detail=broken.reason)

    def _dominated(self, config: TrialConfig) -> Outcome | None:
        candidate = footprint(config, model=self._model)
        for number, known in self._ran_out:
            if dominates(candidate, known):
                return DominatedOutOfMemory(by=number)
        return None

    def _predicted(self, config: TrialConfig) -> Outcome | None:
        """Refuse what surely does not fit, by the verdict that `sweep plan` gives as well.

        What is too close to say is left to the device.
        """
        prediction = self._memory(config)
        if prediction is None or self._fit(config, prediction) is not Fit.NO:
            return None
        return PredictedOutOfMemory(
            predicted_bytes=prediction.needed_bytes(self._budget_bytes),
            detail=(
                f"budget {self._budget_bytes} bytes, peak predicted within "
                f"{100 * prediction.uncertainty:.3g} %"
            ),
        )

    def _fit(self, config: TrialConfig, prediction: MemoryPrediction) -> Fit:
        """Return whether it fits; a sampler asks of many configurations, and of some again."""
        key = (config, prediction.uncertainty)
        if key not in self._fits:
            self._fits[key] = prediction.fits(self._budget_bytes)
        return self._fits[key]

    def _memory(self, config: TrialConfig) -> MemoryPrediction | None:
        """Return what is predicted, no surer than the study's trials allow."""
        if config not in self._predictions:
            prediction = self._asked(config)
            if prediction is None:
                return None
            self._predictions[config] = prediction
        return self._residuals.widened(self._predictions[config], config)

    def _asked(self, config: TrialConfig) -> MemoryPrediction | None:
        """Return the predictor's answer, and None where it has none."""
        if self._predictor is None:
            return None
        try:
            prediction = self._predictor.predict(config)
        except EnvironmentFault as error:
            self._deaths += 1
            if self._deaths > DEATHS_TOLERATED:
                self._predictor = None
                self._warn_once(f"memory is not predicted, so the device decides: {error}")
            return None
        except SweepError as error:
            # Another structure may well be predicted.
            self._warn_once(
                f"memory of some configurations is not predicted, so the device decides: {error}"
            )
            return None
        self._deaths = 0
        return prediction

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._warn(message)
