"""Owns how far memory predictions were off in trials where both are known, and widening by it.

Knows nothing of studies or storage; finished trials are handed in.
"""

from __future__ import annotations

from collections.abc import Iterable

from search_spaces.config import TrialConfig
from storage.records import TrialRecord
from sweep.predict.memory.predictor import MemoryPrediction

SAFETY = 0.01
"""Kept on top of the worst error seen, where that is worse than what the prediction states."""


class Residuals:
    """The worst error of a study's trials.

    It only ever widens what a prediction states: that is derived from more rows than a study has
    trials. Compiled layers keep other tensors than eager ones, so each says nothing of the other.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self._worst = {False: 0.0, True: 0.0}
        for record in records:
            self.learn(record)

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial; one that was not both predicted and measured says nothing."""
        if record.prediction is None or record.measurement is None:
            return
        predicted = record.prediction.peak_allocated_bytes
        error = abs(record.measurement.peak_allocated_bytes / predicted - 1.0)
        is_compiled = record.config.compile
        self._worst[is_compiled] = max(self._worst[is_compiled], error)

    def widened(self, prediction: MemoryPrediction, config: TrialConfig) -> MemoryPrediction:
        """Return the prediction of ``config``, no surer than the trials so far allow."""
        worst = self._worst[config.compile]
        if worst <= prediction.uncertainty:
            return prediction
        return prediction.widened(worst + SAFETY)
