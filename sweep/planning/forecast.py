"""Owns the answer for one configuration: does it fit the card, how fast is it, and on what ground.

Pure: model, card, budget, predictor and what a study has shown are handed in. Knows nothing of
prices, files or terminals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from search_spaces.rules import Violation, violation
from storage.records import TrialRecord
from sweep.planning.evidence import NO_EVIDENCE, Evidence
from sweep.predict.memory.arrays import FITS, UNKNOWN, WholeMemory, predict_nothing
from sweep.predict.memory.prediction import Fit, MemoryPrediction
from sweep.predict.memory.predictor import MemoryPredictor
from sweep.predict.memory.profile_store import OnProgress, tell_nobody
from sweep.predict.memory.profiles import Untraceable
from sweep.predict.on_texts import MemoryOnTexts, ShapesOnTexts
from sweep.predict.speed.predictor import SpeedPrediction, predict_steps

TOO_FEW_TEXTS = "texts-make-no-micro-batch"
"""The rule of a configuration for which texts are too few, or cut too short."""
UNBUILDABLE = "cannot-be-built"
"""The rule of what only the model's own code forbids: a target module that it does not have."""

TRACED = "structures traced"
"""What is always the first to take its time."""
Progress = Callable[[str], OnProgress]
"""Returns what is told how much is done of what is named, and of how much."""


def silent(_: str) -> OnProgress:
    """Tell nobody."""
    return tell_nobody


Basis = Literal["predicted", "calibrated", "measured"]
"""Where a number comes from: a GPU's rates and a model's code, those with trials, or a trial."""


@dataclass(frozen=True)
class Forecast:
    """What is to be expected of one configuration on one card."""

    config: TrialConfig
    broken: Violation | None
    """The rule that forbids it there, if one does."""
    memory: MemoryPrediction | None
    """None where nothing can be predicted."""
    fit: Fit
    """Uncertain too where nothing can be predicted."""
    fits: bool | None
    """The best guess, also where ``fit`` is uncertain; None where there is nothing to go by."""
    speed: SpeedPrediction | None
    """None where the architecture or the compute type has no prediction, or a rule forbids it."""
    trial: TrialRecord | None = None
    """The trial of a study that measured this configuration on this card."""
    tokens_per_step: float | None = None
    """That carry loss, as a mean of texts; None for full rows, all of whose tokens do."""
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
        """Tokens that carry loss per second: of texts, or of full rows."""
        seconds = self.step_seconds
        if seconds is None:
            return None
        return (self.tokens_per_step or self.config.tokens_per_step) / seconds

    @property
    def speed_uncertainty(self) -> float | None:
        """Relative: the truth is expected within this much of the step's seconds."""
        if self.trial is not None and self.trial.measurement is not None:
            measured = self.trial.measurement
            ends = measured.step_seconds_ci95
            return None if ends is None else max(abs(e / measured.step_seconds - 1.0) for e in ends)
        return None if self.speed is None else self.speed.uncertainty

    @property
    def step_uncertainty(self) -> float:
        """The same for sums of money and time: a step measured too few times for an interval of its
        own is no surer than its prediction.
        """
        if self.speed_uncertainty is not None:
            return self.speed_uncertainty
        return 0.0 if self.speed is None else self.speed.uncertainty

    @property
    def tokens_per_second_range(self) -> tuple[float, float] | None:
        """The least and the most that the speed's uncertainty leaves possible."""
        speed, error = self.tokens_per_second, self.speed_uncertainty
        if speed is None or error is None:
            return None
        return speed / (1.0 + error), speed / (1.0 - error) if error < 1.0 else math.inf

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
        shapes: of the texts that would be trained on; None for full rows.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        gpu: GpuSpec,
        budget_bytes: int,
        memory: MemoryPredictor,
        evidence: Evidence = NO_EVIDENCE,
        shapes: ShapesOnTexts | None = None,
    ) -> None:
        self.shapes = shapes
        self.model = model
        self.gpu = gpu
        self.budget_bytes = budget_bytes
        self.evidence = evidence
        self._predictor = memory if shapes is None else MemoryOnTexts(memory, shapes)
        self._predicted: dict[TrialConfig, MemoryPrediction] = {}
        self._fits: dict[TrialConfig, Fit] = {}
        self._speeds: dict[TrialConfig, SpeedPrediction | InputError] = {}
        self._whole: WholeMemory = predict_nothing()
        self._unsure: NDArray[np.float64] = self._whole.uncertainty
        self._rows: dict[TrialConfig, int] = {}

    def foresee(
        self,
        configs: Sequence[TrialConfig],
        *,
        progress: Progress = silent,
        one_by_one: bool = False,
    ) -> None:
        """Work out together what is going to be asked of many configurations.

        Args:
            configs: of a whole space, or a file; what was foreseen before is forgotten.
            progress: told of what takes its time.
            one_by_one: whether a forecast of each is going to be asked for.

        Raises:
            EnvironmentFault: the tracing process has never answered.
        """
        self._predictor.prepare(configs, on_progress=progress(TRACED))
        whole = self._whole = self._predictor.predict_all(configs)
        if one_by_one:
            whole.replay(on_progress=progress("steps replayed"))
        self._rows = {config: row for row, config in enumerate(configs)}
        unsure = self._unsure = self.evidence.residuals.widest(whole.uncertainty, configs)
        codes = whole.quick_fits(self.budget_bytes, uncertainty=unsure).tolist()
        predicted = self._steps(configs)
        for row, config in enumerate(configs):
            if codes[row] != UNKNOWN and row not in whole.refused and self._shown(config) is None:
                self._fits[config] = FITS[codes[row]]
            self._speeds[config] = predicted[row]

    def prepare(self, configs: Sequence[TrialConfig], *, progress: Progress = silent) -> None:
        """Do once, and together, what asking of a few configurations takes first.

        Raises:
            EnvironmentFault: the tracing process has never answered.
        """
        self._predictor.prepare(configs, on_progress=progress(TRACED))

    def broken(self, config: TrialConfig) -> Violation | None:
        """Return the rule that forbids ``config`` on this model, card and texts, or None."""
        broken = violation(
            config,
            model=self.model,
            compute_capability=self.gpu.compute_capability,
            device="cuda",
            has_texts=self.shapes is not None,
        )
        if broken is not None or self.shapes is None:
            return broken
        refusal = self.shapes.epochs.refusal(config)
        return None if refusal is None else Violation(TOO_FEW_TEXTS, refusal)

    def _steps(self, configs: Sequence[TrialConfig]) -> list[SpeedPrediction | InputError]:
        predict = predict_steps if self.shapes is None else self.shapes.predict_steps
        return predict(
            configs, model=self.model, gpu=self.gpu, calibration=self.evidence.calibration
        )

    def tokens_per_step(self, config: TrialConfig) -> float | None:
        """Return the tokens of a step that carry loss; None where rows are full."""
        return None if self.shapes is None else self.shapes.loss_tokens_per_step(config)

    def memory(self, config: TrialConfig) -> MemoryPrediction:
        """Return the predicted memory, no surer than the study's trials allow.

        Raises what `MemoryPredictor.predict` raises.
        """
        if config not in self._predicted:
            row = self._rows.get(config)
            if row is None:
                predicted = self._predictor.predict(config)
            else:
                predicted = self._whole.prediction(row)
            self._predicted[config] = self.evidence.residuals.widened(predicted, config)
        return self._predicted[config]

    def memory_uncertainty(self, config: TrialConfig) -> float:
        """Return how far the peak of what was foreseen may be off."""
        return float(self._unsure[self._rows[config]])

    def least_bytes(self, config: TrialConfig) -> int:
        """Return no more than the peak of what was foreseen, without replaying its step."""
        return int(self._whole.least_allocated_bytes[self._rows[config]])

    def refusal(self, config: TrialConfig) -> InputError | None:
        """Return why memory is not predicted of what was foreseen; None where it is."""
        return self._whole.refused.get(self._rows[config])

    def is_hopeless(self, config: TrialConfig) -> bool:
        """Whether the predicted peak alone says that a valid configuration does not fit."""
        if config in self._fits:
            return self._fits[config] is Fit.NO
        if self._shown(config):
            return False
        return self.memory(config).exceeds(self.budget_bytes)

    def fit(self, config: TrialConfig) -> Fit:
        """Return whether a valid configuration fits; a trial that has shown it overrules."""
        if config not in self._fits:
            self._fits[config] = self._fit(config)
        return self._fits[config]

    def remember(self, config: TrialConfig, fit: Fit) -> None:
        """Take over whether a configuration fits from a cache, which saves predicting it again."""
        self._fits.setdefault(config, fit)

    def _fit(self, config: TrialConfig) -> Fit:
        known = self._shown(config)
        if known is not None:
            return Fit.YES if known else Fit.NO
        return self.memory(config).fits(self.budget_bytes)

    def _shown(self, config: TrialConfig) -> bool | None:
        """Return whether a trial has shown that it fits; None where none has."""
        return self.evidence.fits(config, budget_bytes=self.budget_bytes)

    def forecast(self, config: TrialConfig) -> Forecast:
        """Return everything that is to be expected of ``config``.

        What cannot be predicted is said in its notes, so that one configuration among many does not
        silence the others.

        Raises:
            EnvironmentFault: the tracing process does not answer.
        """
        broken, memory = self.broken(config), None
        why: tuple[str, ...] = ()
        try:
            memory = self.memory(config)
        except Untraceable as error:
            why = (f"memory is not predicted: {error}",)
        except InputError as error:
            broken = broken or Violation(UNBUILDABLE, str(error))
        tokens = self.tokens_per_step(config)
        if broken is not None:
            # It does not fit; its memory is given where it can be predicted.
            return Forecast(config, broken, memory, Fit.NO, False, None, tokens_per_step=tokens)
        fits = self._shown(config)
        if memory is not None:
            fit = self.fit(config)
            fits = memory.is_likely(self.budget_bytes) if fit is Fit.UNCERTAIN else fit is Fit.YES
        else:
            # Without a prediction only a trial tells.
            fit = Fit.UNCERTAIN if fits is None else Fit.YES if fits else Fit.NO
        speed, notes = self.speed(config)
        trial = self.evidence.trial(config)
        return Forecast(config, None, memory, fit, fits, speed, trial, tokens, (*why, *notes))

    def tokens_per_second(self, config: TrialConfig) -> float | None:
        """Return the speed that `forecast` tells of a valid configuration, without its memory."""
        trial = self.evidence.trial(config)
        if trial is not None and trial.measurement is not None:
            tokens = self.tokens_per_step(config) or config.tokens_per_step
            return tokens / trial.measurement.step_seconds
        speed, _ = self.speed(config)
        return None if speed is None else speed.tokens_per_second

    def speed(self, config: TrialConfig) -> tuple[SpeedPrediction | None, tuple[str, ...]]:
        """Return the predicted speed, and why there is none."""
        if config not in self._speeds:
            (self._speeds[config],) = self._steps([config])
        known = self._speeds[config]
        if isinstance(known, InputError):
            return None, (f"speed and cost are not predicted: {known}",)
        return known, ()
