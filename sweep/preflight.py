"""Owns what is known of a configuration before it runs: it is not valid, or it cannot fit.

Knows nothing of Optuna, processes or files. The rules and the memory prediction are handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from search_spaces.config import TrialConfig
from search_spaces.errors import SweepError
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
from sweep.dominance import Footprint, base_alone, dominates, footprint

START_MARGIN = 0.05
"""Margin of the memory prediction until enough trials have been measured to know better."""
START_MARGIN_COMPILED = 0.3
"""The same for compiled layers, which were seen to take a quarter less than eager ones."""
SAFETY_MARGIN = 0.01
"""Kept on top of the worst over-prediction seen."""
RESIDUALS_TRUSTED = 5
"""Measured trials after which the margin may shrink below where it started."""


class MemoryPrediction(Protocol):
    """What a predictor says of one configuration."""

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes that live tensors would hold at once."""
        ...

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes that the caching allocator would hold without a cap."""
        ...


class MemoryPredictor(Protocol):
    """Predicts the peak memory of a configuration without running it."""

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        """Return the prediction for ``config``."""
        ...


class SpeedPredictor(Protocol):
    """Predicts the speed of a configuration, the better the more trials it has seen."""

    def predict(self, config: TrialConfig) -> float | None:
        """Return tokens/s; None where it cannot say."""
        ...

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial."""
        ...


@dataclass
class Calibration:
    """How far the prediction may be above the truth, from the trials where both are known."""

    start_margin: float = START_MARGIN
    over_predictions: list[float] = field(default_factory=list)
    """``1 - measured / predicted`` for each trial that was measured."""

    def learn(self, *, predicted_bytes: int, measured_bytes: int) -> None:
        """Count one trial."""
        self.over_predictions.append(1.0 - measured_bytes / predicted_bytes)

    @property
    def margin(self) -> float:
        """Share of the prediction that may be missing in truth.

        It follows the worst over-prediction so far: each of those could have hidden a fit.
        """
        worst = max(self.over_predictions, default=0.0)
        seen = max(worst, 0.0) + SAFETY_MARGIN
        if len(self.over_predictions) >= RESIDUALS_TRUSTED:
            return seen
        return max(seen, self.start_margin)


class Preflight:
    """Checks configurations against the rules, the known out-of-memory trials and a prediction.

    Args:
        model: what is trained.
        budget_bytes: what a trial may allocate.
        violation: the rules, bound to model and device.
        predictor: None where memory cannot be predicted; the device then decides.
        speed: adds the expected speed to what is predicted for the record.
        warn: told when the prediction turns out not to work; the study goes on without it.
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
        # Compiled layers keep other tensors than eager ones: the errors say little of each other.
        self._calibrations = {False: Calibration(), True: Calibration(START_MARGIN_COMPILED)}

    def check(self, config: TrialConfig) -> Outcome | None:
        """Return the verdict that spares the device a trial; None where only running it tells."""
        return self._forbidden(config) or self._dominated(config) or self._predicted(config)

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
            case _ if record.prediction is not None and record.measurement is not None:
                self._calibrations[record.config.compile].learn(
                    predicted_bytes=record.prediction.peak_allocated_bytes,
                    measured_bytes=record.measurement.peak_allocated_bytes,
                )
            case _:
                pass

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
        """Refuse what is predicted to allocate more than the budget, margin taken off.

        Reserved memory does not decide: under a cap the allocator gives its cached blocks back
        before it fails.
        """
        prediction = self._memory(config)
        if prediction is None:
            return None
        margin = self._calibrations[config.compile].margin
        if prediction.peak_allocated_bytes * (1.0 - margin) <= self._budget_bytes:
            return None
        return PredictedOutOfMemory(
            predicted_bytes=prediction.peak_allocated_bytes,
            detail=f"budget {self._budget_bytes} bytes, margin allowed {margin:.1%}",
        )

    def _memory(self, config: TrialConfig) -> MemoryPrediction | None:
        if self._predictor is None:
            return None
        try:
            return self._predictor.predict(config)
        except SweepError as error:
            self._predictor = None
            self._warn(f"memory is not predicted, so the device decides what fits: {error}")
            return None
