"""The predicted memory of many configurations at once: their peaks, and which of them fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from sweep.predict.memory.peaks import Peaks, find_peaks
from sweep.predict.memory.prediction import (
    Fit,
    MemoryPrediction,
    most_reserved,
    stated_uncertainty,
)
from sweep.predict.memory.profile_store import OnProgress, tell_nobody
from sweep.predict.memory.replay import Uncapped, replay_all, replay_uncapped
from sweep.predict.memory.step import Step

FITS: tuple[Fit, ...] = (Fit.NO, Fit.UNCERTAIN, Fit.YES)
"""What the codes of `WholeMemory.fits` stand for."""
_NO, _UNCERTAIN, _YES = range(3)
UNKNOWN = -1
"""The code of what only a replay tells."""


class WholeMemory:
    """What is predicted of many configurations, by row; here from predictions made one by one.

    Args:
        predict: as `MemoryPredictor.predict`.
        configs: what is to be trained; one row of every answer each.

    Attributes:
        refused: why there is no prediction, of the rows that have none.
    """

    def __init__(
        self, predict: Callable[[TrialConfig], MemoryPrediction], configs: Sequence[TrialConfig]
    ) -> None:
        self.refused: dict[int, InputError] = {}
        self._count = len(configs)
        self._known: dict[int, MemoryPrediction] = {}
        for row, config in enumerate(configs):
            try:
                self._known[row] = predict(config)
            except InputError as error:
                self.refused[row] = error.with_traceback(None)

    @cached_property
    def peak_allocated_bytes(self) -> NDArray[np.int64]:
        """What `torch.cuda.max_memory_allocated` would read; -1 where there is no prediction."""
        peaks = {row: known.peak_allocated_bytes for row, known in self._known.items()}
        return np.array([peaks.get(row, -1) for row in range(self._count)], np.int64)

    @property
    def least_allocated_bytes(self) -> NDArray[np.int64]:
        """No more than that, for nothing: without what blocks hold beyond what was asked for."""
        return self.peak_allocated_bytes

    @cached_property
    def uncertainty(self) -> NDArray[np.float64]:
        """How far each peak may be off, as predictions state it."""
        stated = {row: known.uncertainty for row, known in self._known.items()}
        return np.array([stated.get(row, 0.0) for row in range(self._count)], np.float64)

    def prediction(self, row: int) -> MemoryPrediction:
        """Return what is predicted of one configuration.

        Raises:
            InputError: there is no prediction.
        """
        if row in self.refused:
            # A new exception each time, as one that is raised twice keeps the frames of both.
            raise type(self.refused[row])(*self.refused[row].args)
        return self._predicted(row)

    def _predicted(self, row: int) -> MemoryPrediction:
        return self._known[row]

    def replay(self, *, on_progress: OnProgress = tell_nobody) -> None:
        """Replay every step whose reserved peak takes that, on all processors.

        Where all of them are going to be looked at; one by one they are replayed when they are.

        Args:
            on_progress: told how many have been replayed, of how many.
        """

    def fits(
        self, budget_bytes: int, *, uncertainty: NDArray[np.float64] | None = None
    ) -> NDArray[np.int8]:
        """Return whether each runs where no more than the budget may be reserved: `FITS`.

        Uncertain where there is no prediction. A few milliseconds for each that lies near the
        budget, where segments are not expandable.

        Args:
            budget_bytes: what a training may take.
            uncertainty: how far each peak may be off where trials have shown more than is stated.
        """
        unsure = self.uncertainty if uncertainty is None else uncertainty
        result = self.quick_fits(budget_bytes, uncertainty=uncertainty)
        self._decide(np.flatnonzero(result == UNKNOWN), result, budget_bytes, unsure)
        return result

    def quick_fits(
        self, budget_bytes: int, *, uncertainty: NDArray[np.float64] | None = None
    ) -> NDArray[np.int8]:
        """Return the same at once, and `UNKNOWN` where only a replay tells."""
        unsure = self.uncertainty if uncertainty is None else uncertainty
        result = np.full(self._count, _UNCERTAIN, np.int8)
        self._decide(np.array(list(self._known), int), result, budget_bytes, unsure)
        return result

    def _decide(
        self,
        rows: NDArray[np.intp],
        result: NDArray[np.int8],
        budget_bytes: int,
        unsure: NDArray[np.float64],
    ) -> None:
        """Note whether the predictions of some rows fit."""
        for row in rows.tolist():
            widened = self._predicted(row).widened(float(unsure[row]))
            result[row] = FITS.index(widened.fits(budget_bytes))


class PeakMemory(WholeMemory):
    """The same worked out together, without the replays that decide nothing;
    `TracingPredictor.predict_all` makes it.

    Args:
        configs: what is to be trained; one row of every answer each.
        steps: the step of each, or why it has none.
    """

    def __init__(self, configs: Sequence[TrialConfig], steps: Sequence[Step | InputError]) -> None:
        self._configs = configs
        self._count = len(configs)
        self.steps = {row: step for row, step in enumerate(steps) if isinstance(step, Step)}
        """The step of each row that has a prediction."""
        self.refused = {row: why for row, why in enumerate(steps) if isinstance(why, InputError)}
        self._replays: dict[int, Uncapped] = {}
        self._asked = find_peaks(list(self.steps.values()))

    @cached_property
    def peak_allocated_bytes(self) -> NDArray[np.int64]:
        """See `WholeMemory`; some milliseconds for each whose blocks may hold too much."""
        wasted = [
            self._uncapped(row).wasted_bytes if step.may_waste else 0
            for row, step in self.steps.items()
        ]
        return self._spread(self._asked.wasting(np.array(wasted, self._asked.there.dtype)))

    @cached_property
    def least_allocated_bytes(self) -> NDArray[np.int64]:
        """See `WholeMemory`."""
        return self._spread(self._asked)

    @cached_property
    def uncertainty(self) -> NDArray[np.float64]:
        """See `WholeMemory`."""
        unseen = {row for row, step in self.steps.items() if step.is_unseen}
        stated = (
            stated_uncertainty(config, is_unseen=row in unseen)
            for row, config in enumerate(self._configs)
        )
        return np.array([one.allocated for one in stated], float)

    def _predicted(self, row: int) -> MemoryPrediction:
        step, peaks = self.steps[row], self._asked.at(self._index[row])
        uncapped = self._replays.get(row)
        if step.may_waste:
            uncapped = self._uncapped(row)
            peaks = peaks.wasting(np.array([uncapped.wasted_bytes]))
        stated = stated_uncertainty(step.config, is_unseen=step.is_unseen)
        return MemoryPrediction(
            peak_allocated_bytes=int(peaks.total_bytes[0]),
            breakdown=peaks.breakdown(0),
            moment=peaks.moment(0),
            uncertainty=stated.allocated,
            reserved_uncertainty=stated.reserved,
            step=step,
            uncapped=uncapped,
            most_reserved=most_reserved(step.config),
        )

    def replay(self, *, on_progress: OnProgress = tell_nobody) -> None:
        """See `WholeMemory`."""
        rows = [r for r, step in self.steps.items() if not step.config.expandable_segments]
        missing = [row for row in rows if row not in self._replays]
        steps = [self.steps[row] for row in missing]
        self._replays.update(zip(missing, replay_all(steps, on_progress=on_progress), strict=True))

    def _uncapped(self, row: int) -> Uncapped:
        if row not in self._replays:
            self._replays[row] = replay_uncapped(self.steps[row])
        return self._replays[row]

    def quick_fits(
        self, budget_bytes: int, *, uncertainty: NDArray[np.float64] | None = None
    ) -> NDArray[np.int8]:
        """See `WholeMemory`."""
        unsure = self.uncertainty if uncertainty is None else uncertainty
        least = self.least_allocated_bytes.astype(float)
        most = (least + self._most_wasted) * (1 + unsure) * self._most_reserved
        result = np.full(self._count, UNKNOWN, np.int8)
        result[most <= budget_bytes] = _YES
        result[least * (1 - unsure) > budget_bytes] = _NO
        result[list(self.refused)] = _UNCERTAIN
        # Whole pages take no replay.
        self._decide(
            np.flatnonzero(self._expands & (result == UNKNOWN)), result, budget_bytes, unsure
        )
        return result

    @cached_property
    def _most_wasted(self) -> NDArray[np.float64]:
        wasted = np.zeros(self._count)
        known: dict[Any, int] = {}
        for row, step in self.steps.items():
            if step.may_waste:
                key = *map(id, step.profiles.values()), step.flags
                if key not in known:
                    known[key] = step.most_wasted_bytes
                wasted[row] = known[key]
        return wasted

    @cached_property
    def _most_reserved(self) -> NDArray[np.float64]:
        return np.array([most_reserved(config) for config in self._configs], float)

    @cached_property
    def _expands(self) -> NDArray[np.bool_]:
        return np.array([config.expandable_segments for config in self._configs], np.bool_)

    @cached_property
    def _index(self) -> Mapping[int, int]:
        return {row: index for index, row in enumerate(self.steps)}

    def _spread(self, peaks: Peaks) -> NDArray[np.int64]:
        """Return the totals of those that have a prediction, in an array over all rows."""
        result = np.full(self._count, -1, np.int64)
        result[list(self.steps)] = np.minimum(peaks.total_bytes, np.iinfo(np.int64).max)
        return result


def predict_nothing(configs: Sequence[TrialConfig] = ()) -> WholeMemory:
    """Return predictions that refuse every one of some configurations."""
    return PeakMemory(configs, [InputError("nothing is predicted")] * len(configs))
