"""Owns the tokens/s that a study expects of a configuration, corrected by what it has measured.

Knows nothing of memory, storage or processes.
"""

from __future__ import annotations

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from storage.records import TrialRecord, Verdict
from sweep.predict.speed.calibration import Calibration, calibrate
from sweep.predict.speed.predictor import predict_step

TRIALS_TO_CALIBRATE = 5
"""Measured trials from which the card is known better than its data sheet."""


class SpeedForecast:
    """Predicts speed on one card, the one that really runs."""

    def __init__(self, *, model: ModelSpec, gpu: GpuSpec) -> None:
        self._model = model
        self._gpu = gpu
        self._observations: list[tuple[TrialConfig, float]] = []
        self._calibration: Calibration | None = None

    def predict(self, config: TrialConfig) -> float | None:
        """Return tokens/s; None where the architecture or the compute type has no prediction."""
        try:
            if self._calibration is None and len(self._observations) >= TRIALS_TO_CALIBRATE:
                self._calibration = calibrate(self._observations, model=self._model, gpu=self._gpu)
            return predict_step(
                config, model=self._model, gpu=self._gpu, calibration=self._calibration
            ).tokens_per_second
        except InputError:
            return None

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial; only those measured to the end say something of the card."""
        if record.verdict is Verdict.FITS and record.measurement is not None:
            self._observations.append((record.config, record.measurement.step_seconds))
            self._calibration = None
