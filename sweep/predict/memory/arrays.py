"""Owns the predicted memory of many configurations at once: their peaks, and which of them fit.

Pure but for the profiles, which its predictor gets. Answers as `MemoryPrediction` does, which is of
one configuration, with the replays that do not decide anything left out. Knows nothing of Optuna.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from sweep.predict.memory.peaks import Peaks, find_peaks
from sweep.predict.memory.predictor import Fit, MemoryPrediction, TracingPredictor, predicted
from sweep.predict.memory.replay import wasted_bytes
from sweep.predict.memory.step import Step

FITS: tuple[Fit, ...] = (Fit.NO, Fit.UNCERTAIN, Fit.YES)
"""What the codes of `PeakMemory.fits` stand for."""


class PeakMemory:
    """What many configurations need, by the model's own code.

    Args:
        configs: what is to be trained; one row of every answer each.
        predictor: gets the profiles of their structures, traced where they are not kept.

    Raises:
        EnvironmentFault: the tracing process has never answered.
    """

    def __init__(self, configs: Sequence[TrialConfig], *, predictor: TracingPredictor) -> None:
        steps = predictor.steps(configs)
        self._count = len(configs)
        self._steps = {row: step for row, step in enumerate(steps) if isinstance(step, Step)}
        self.refused: Mapping[int, InputError] = {
            row: step for row, step in enumerate(steps) if isinstance(step, InputError)
        }
        """Why there is no prediction, by row."""
        self._rows = np.fromiter(self._steps, np.intp)
        self._asked = find_peaks(list(self._steps.values()))

    @cached_property
    def peak_allocated_bytes(self) -> NDArray[np.int64]:
        """What `torch.cuda.max_memory_allocated` would read; -1 where there is no prediction."""
        result = np.full(self._count, -1, np.int64)
        result[self._rows] = np.minimum(self._peaks.total_bytes, np.iinfo(np.int64).max)
        return result

    def predictions(self) -> list[MemoryPrediction | InputError]:
        """Return every configuration's prediction, or why it has none."""
        result: dict[int, MemoryPrediction | InputError] = {**self.refused}
        for index, (row, step) in enumerate(self._steps.items()):
            result[row] = predicted(step, self._peaks, row=index)
        return [result[row] for row in range(self._count)]

    def fits(self, budget_bytes: int) -> NDArray[np.int8]:
        """Return whether each runs where no more than the budget may be reserved: `FITS`.

        Uncertain where there is no prediction.
        """
        result = np.full(self._count, FITS.index(Fit.UNCERTAIN), np.int8)
        for index, (row, step) in enumerate(self._steps.items()):
            fit = predicted(step, self._peaks, row=index).fits(budget_bytes)
            result[row] = FITS.index(fit)
        return result

    @cached_property
    def _peaks(self) -> Peaks:
        wasted = [wasted_bytes(step) if step.may_waste else 0 for step in self._steps.values()]
        return self._asked.wasting(np.array(wasted, self._asked.there.dtype))
