"""Owns the predicted memory of many configurations at once: their peaks, and which of them fit.

Answers as `MemoryPrediction` does, which is of one configuration, without the replays that decide
nothing. Pure; knows nothing of how steps come about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from sweep.predict.memory.allocator import paged
from sweep.predict.memory.peaks import Peaks, find_peaks
from sweep.predict.memory.prediction import (
    CAPPED_EXPANDABLE,
    Fit,
    MemoryPrediction,
    most_reserved,
    predicted,
    stated_uncertainty,
)
from sweep.predict.memory.profile_store import OnProgress, tell_nobody
from sweep.predict.memory.replay import Uncapped, replay_uncapped
from sweep.predict.memory.replays import replay_all
from sweep.predict.memory.step import Step

FITS: tuple[Fit, ...] = (Fit.NO, Fit.UNCERTAIN, Fit.YES)
"""What the codes of `PeakMemory.fits` stand for."""
_NO, _UNCERTAIN, _YES = range(3)
UNKNOWN = -1
"""The code of what only a replay tells."""


class WholeMemory(Protocol):
    """What is predicted of many configurations, by row. Real: `PeakMemory`."""

    @property
    def refused(self) -> Mapping[int, InputError]:
        """Why there is no prediction, of the rows that have none."""
        ...

    @property
    def peak_allocated_bytes(self) -> NDArray[np.int64]:
        """What `torch.cuda.max_memory_allocated` would read; -1 where there is no prediction."""
        ...

    @property
    def least_allocated_bytes(self) -> NDArray[np.int64]:
        """No more than that, for nothing: without what blocks hold beyond what was asked for."""
        ...

    @property
    def uncertainty(self) -> NDArray[np.float64]:
        """How far each peak may be off, as predictions state it."""
        ...

    def prediction(self, row: int) -> MemoryPrediction:
        """Return what is predicted of one configuration.

        Raises:
            InputError: there is no prediction.
        """
        ...

    def replay(self, *, on_progress: OnProgress = tell_nobody) -> None:
        """Replay every step whose reserved peak takes that, on all processors.

        Where all of them are going to be looked at; one by one they are replayed when they are.

        Args:
            on_progress: told how many have been replayed, of how many.
        """
        ...

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
        ...

    def quick_fits(
        self, budget_bytes: int, *, uncertainty: NDArray[np.float64] | None = None
    ) -> NDArray[np.int8]:
        """Return the same at once, and `UNKNOWN` where only a replay tells."""
        ...


class PeakMemory:
    """What many configurations need; `TracingPredictor.predict_all` makes it.

    Args:
        configs: what is to be trained; one row of every answer each.
        steps: the step of each, or why it has none.
    """

    def __init__(self, configs: Sequence[TrialConfig], steps: Sequence[Step | InputError]) -> None:
        self._configs = configs
        self.steps = {row: step for row, step in enumerate(steps) if isinstance(step, Step)}
        """The step of each row that has a prediction."""
        self._refused = {
            row: step for row, step in enumerate(steps) if isinstance(step, InputError)
        }
        self._replays: dict[int, Uncapped] = {}
        self._asked = find_peaks(list(self.steps.values()))

    @property
    def refused(self) -> Mapping[int, InputError]:
        """See `WholeMemory`."""
        return self._refused

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

    def prediction(self, row: int) -> MemoryPrediction:
        """See `WholeMemory`."""
        if row in self._refused:
            # A new exception each time, as one that is raised twice keeps the frames of both.
            raise type(self._refused[row])(*self._refused[row].args)
        step, peaks = self.steps[row], self._asked.at(self._index[row])
        uncapped = self._uncapped(row) if step.may_waste else self._replays.get(row)
        return predicted(step, peaks, uncapped)

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

    def fits(
        self, budget_bytes: int, *, uncertainty: NDArray[np.float64] | None = None
    ) -> NDArray[np.int8]:
        """See `WholeMemory`."""
        result = self.quick_fits(budget_bytes, uncertainty=uncertainty)
        unsure = self.uncertainty if uncertainty is None else uncertainty
        for row in np.flatnonzero(result == UNKNOWN).tolist():
            prediction = self.prediction(row).widened(float(unsure[row]))
            result[row] = FITS.index(prediction.fits(budget_bytes))
        return result

    def quick_fits(
        self, budget_bytes: int, *, uncertainty: NDArray[np.float64] | None = None
    ) -> NDArray[np.int8]:
        """See `WholeMemory`."""
        unsure = self.uncertainty if uncertainty is None else uncertainty
        least = self.least_allocated_bytes.astype(float)
        result = np.full(len(self._configs), UNKNOWN, np.int8)
        most = least + self._most_wasted
        result[most * (1 + unsure) * self._most_reserved <= budget_bytes] = _YES
        in_pages = self._expands & (result == UNKNOWN)
        result[in_pages] = self._paged_fits(budget_bytes, unsure)[in_pages]
        result[least * (1 - unsure) > budget_bytes] = _NO
        result[list(self._refused)] = _UNCERTAIN
        return result

    def _paged_fits(self, budget_bytes: int, unsure: NDArray[np.float64]) -> NDArray[np.int8]:
        """Return whether the peaks fit in whole pages, where segments are expandable."""
        slack = np.hypot(unsure, CAPPED_EXPANDABLE)
        reserved = paged(self.least_allocated_bytes)
        with np.errstate(divide="ignore"):
            is_no = (slack < 1) & (reserved > np.floor(budget_bytes / (1 - slack)))
        is_yes = reserved <= np.floor(budget_bytes / (1 + slack))
        return np.select([is_yes, is_no], [_YES, _NO], _UNCERTAIN).astype(np.int8)

    @cached_property
    def _most_wasted(self) -> NDArray[np.float64]:
        wasted = np.zeros(len(self._configs))
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
        result = np.full(len(self._configs), -1, np.int64)
        result[list(self.steps)] = np.minimum(peaks.total_bytes, np.iinfo(np.int64).max)
        return result


class OneByOne:
    """Answers as `PeakMemory` does from predictions that were made one at a time.

    Args:
        predict: as `MemoryPredictor.predict`.
        configs: what is to be trained.
    """

    def __init__(
        self, predict: Callable[[TrialConfig], MemoryPrediction], configs: Sequence[TrialConfig]
    ) -> None:
        self._known: list[MemoryPrediction | InputError] = []
        for config in configs:
            try:
                self._known.append(predict(config))
            except InputError as error:
                self._known.append(error.with_traceback(None))

    @cached_property
    def refused(self) -> Mapping[int, InputError]:
        """See `WholeMemory`."""
        rows = enumerate(self._known)
        return {row: known for row, known in rows if isinstance(known, InputError)}

    @property
    def peak_allocated_bytes(self) -> NDArray[np.int64]:
        """See `WholeMemory`."""
        return np.array([getattr(p, "peak_allocated_bytes", -1) for p in self._known], np.int64)

    @property
    def least_allocated_bytes(self) -> NDArray[np.int64]:
        """See `WholeMemory`."""
        return self.peak_allocated_bytes

    @property
    def uncertainty(self) -> NDArray[np.float64]:
        """See `WholeMemory`."""
        return np.array([getattr(p, "uncertainty", 0.0) for p in self._known], np.float64)

    def prediction(self, row: int) -> MemoryPrediction:
        """See `WholeMemory`."""
        known = self._known[row]
        if isinstance(known, InputError):
            raise type(known)(*known.args)
        return known

    def replay(self, *, on_progress: OnProgress = tell_nobody) -> None:
        """Do nothing: each replays its own step when it is asked."""

    def fits(
        self, budget_bytes: int, *, uncertainty: NDArray[np.float64] | None = None
    ) -> NDArray[np.int8]:
        """See `WholeMemory`."""
        unsure = self.uncertainty if uncertainty is None else uncertainty
        fits = (
            Fit.UNCERTAIN if isinstance(p, InputError) else p.widened(error).fits(budget_bytes)
            for p, error in zip(self._known, unsure.tolist(), strict=True)
        )
        return np.array([FITS.index(fit) for fit in fits], np.int8)

    def quick_fits(
        self, budget_bytes: int, *, uncertainty: NDArray[np.float64] | None = None
    ) -> NDArray[np.int8]:
        """See `WholeMemory`."""
        return self.fits(budget_bytes, uncertainty=uncertainty)


def predict_nothing(configs: Sequence[TrialConfig] = ()) -> WholeMemory:
    """Return predictions that refuse every one of some configurations."""
    return PeakMemory(configs, [InputError("nothing is predicted")] * len(configs))
