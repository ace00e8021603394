"""Owns the answer for one configuration: does it fit the card, how fast is it, and on what ground.

Pure: model, card, budget, predictor and what a study has shown are handed in. Knows nothing of
prices, files or terminals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from search_spaces.rules import Violation, violation
from storage.records import TrialRecord
from sweep.planning.evidence import NO_EVIDENCE, Evidence
from sweep.predict.memory import Fit, MemoryPrediction
from sweep.predict.speed import SpeedPrediction, predict_step

Basis = Literal["predicted", "calibrated", "measured"]
"""Where a number comes from: data sheet and model code, those corrected by trials, or a trial."""


class MemoryPredictor(Protocol):
    """Predicts the peak memory of any configuration of one model."""

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        """Return the prediction.

        Raises:
            InputError: the model's code cannot be walked, or has no such target modules.
            EnvironmentFault: the tracing process does not answer.
        """
        ...


@dataclass(frozen=True)
class Forecast:
    """What is to be expected of one configuration on one card."""

    config: TrialConfig
    broken: Violation | None
    """The rule that forbids it there, if one does."""
    memory: MemoryPrediction | None
    """None only where a rule forbids it and nothing can be predicted either."""
    fit: Fit
    fits: bool
    """The best guess, also where ``fit`` is uncertain."""
    speed: SpeedPrediction | None
    """None where the architecture or the compute type has no prediction, or a rule forbids it."""
    trial: TrialRecord | None = None
    """The trial of a study that measured this configuration on this card."""
    notes: tuple[str, ...] = ()
    """Why something is missing."""

    @property
    def step_seconds(self) -> float | None:
        """Seconds of an optimizer step: measured where it was, else predicted."""
        if self.trial is not None and self.trial.measurement is not None:
            return self.trial.measurement.step_seconds
        return None if self.speed is None else self.speed.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that carry loss per second, at full rows."""
        seconds = self.step_seconds
        return None if seconds is None else self.config.tokens_per_step / seconds

    @property
    def speed_basis(self) -> Basis | None:
        """Where the speed comes from."""
        if self.trial is not None:
            return "measured"
        return None if self.speed is None else self.speed.basis


class Forecaster:
    """Answers for any configuration of one model on one card.

    Args:
        model: what would be trained.
        gpu: the card.
        budget_bytes: what a training may take of it.
        memory: predicts the peak.
        evidence: what a study has shown of this model.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        gpu: GpuSpec,
        budget_bytes: int,
        memory: MemoryPredictor,
        evidence: Evidence = NO_EVIDENCE,
    ) -> None:
        self.model = model
        self.gpu = gpu
        self.budget_bytes = budget_bytes
        self.evidence = evidence
        self._predictor = memory
        self._predicted: dict[TrialConfig, MemoryPrediction] = {}
        self._settled: dict[TrialConfig, Fit] = {}

    def broken(self, config: TrialConfig) -> Violation | None:
        """Return the rule that forbids ``config`` on this model and card, or None."""
        return violation(
            config,
            model=self.model,
            compute_capability=self.gpu.compute_capability,
            device="cuda",
        )

    def memory(self, config: TrialConfig) -> MemoryPrediction:
        """Return the predicted memory. Raises what `MemoryPredictor.predict` raises."""
        if config not in self._predicted:
            self._predicted[config] = self._predictor.predict(config)
        return self._predicted[config]

    def is_hopeless(self, config: TrialConfig) -> bool:
        """Whether the predicted peak alone says that a valid configuration does not fit."""
        if self.evidence.fits(config, budget_bytes=self.budget_bytes):
            return False
        memory = self.memory(config)
        return memory.peak_allocated_bytes > self.budget_bytes * (1.0 + memory.uncertainty)

    def fit(self, config: TrialConfig) -> Fit:
        """Return whether a valid configuration fits; a trial that settled it overrules."""
        if config not in self._settled:
            self._settled[config] = self._fit(config)
        return self._settled[config]

    def _fit(self, config: TrialConfig) -> Fit:
        known = self.evidence.fits(config, budget_bytes=self.budget_bytes)
        if known is not None:
            return Fit.YES if known else Fit.NO
        return self.memory(config).fits(self.budget_bytes)

    def forecast(self, config: TrialConfig) -> Forecast:
        """Return everything that is to be expected of ``config``.

        Raises:
            InputError: memory cannot be predicted.
            EnvironmentFault: the tracing process does not answer.
        """
        broken = self.broken(config)
        if broken is not None:
            return self._forbidden(config, broken)
        memory, fit = self.memory(config), self.fit(config)
        speed, notes = self.speed(config)
        return Forecast(
            config=config,
            broken=None,
            memory=memory,
            fit=fit,
            fits=_is_likely(memory, self.budget_bytes) if fit is Fit.UNCERTAIN else fit is Fit.YES,
            speed=speed,
            trial=self.evidence.trial(config),
            notes=notes,
        )

    def _forbidden(self, config: TrialConfig, broken: Violation) -> Forecast:
        """What a rule forbids does not fit; where its memory can be predicted, that is said."""
        try:
            memory = self.memory(config)
        except InputError:
            memory = None
        return Forecast(config, broken, memory, fit=Fit.NO, fits=False, speed=None)

    def speed(self, config: TrialConfig) -> tuple[SpeedPrediction | None, tuple[str, ...]]:
        """Return the predicted speed, and why there is none."""
        try:
            prediction = predict_step(
                config, model=self.model, gpu=self.gpu, calibration=self.evidence.calibration
            )
        except InputError as error:
            return None, (f"speed and cost are not predicted: {error}",)
        return prediction, ()


def _is_likely(memory: MemoryPrediction, budget_bytes: int) -> bool:
    """Whether a configuration in doubt fits if the prediction is exactly right."""
    return replace(memory, uncertainty=0.0).fits(budget_bytes) is Fit.YES
