"""Owns what configurations of a study would need, as far as that is known at once.

Only structures that were traced on this machine before are predicted: a report does not wait for a
trace. Knows nothing of terminals or of how a study is driven.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.errors import SweepError
from search_spaces.gpus import match_product
from search_spaces.models import ModelSpec
from storage.definition import MemoryForecast, StudySnapshot
from sweep.predict.memory.prediction import Fit
from sweep.predict.memory.predictor import MemoryPredictor, TracingPredictor
from sweep.predict.memory.profiles import Structure, Untraceable
from sweep.predict.memory.tracing_children import Traced

_FITS: Mapping[Fit, Any] = {Fit.YES: "yes", Fit.NO: "no", Fit.UNCERTAIN: "uncertain"}


def with_memory_forecasts(snapshot: StudySnapshot, *, cache_dir: Path) -> StudySnapshot:
    """Return a study with what its configurations would need, each worked out when it is asked for.

    Args:
        snapshot: of a study on a card; on the CPU memory is not predicted, and nothing is added.
        cache_dir: where structures that were traced are kept.
    """
    target = snapshot.definition.target
    if target.device != "cuda":
        return snapshot
    ran_on = match_product(target.emulated_on or target.gpu)
    predictor = TracingPredictor(
        ModelSpec.from_json(snapshot.definition.model),
        cache_dir=cache_dir,
        compute_capability=None if ran_on is None else ran_on.compute_capability,
        tracer=_Nobody(),
    )
    tried = [record.config for record in snapshot.records]
    known = KeptForecasts(tried, predictor=predictor, budget_bytes=target.budget_bytes)
    return replace(snapshot, memory_forecasts=known)


class KeptForecasts(Mapping[TrialConfig, MemoryForecast]):
    """What configurations would need; of those whose structure is kept alone.

    Any configuration may be asked for; those that were tried are listed.
    """

    def __init__(
        self, tried: Sequence[TrialConfig], *, predictor: MemoryPredictor, budget_bytes: int
    ) -> None:
        self._tried = dict.fromkeys(tried)
        self._predictor = predictor
        self._budget_bytes = budget_bytes
        self._known: dict[TrialConfig, MemoryForecast | None] = {}

    def __getitem__(self, config: TrialConfig) -> MemoryForecast:
        if config not in self._known:
            self._known[config] = self._predicted(config)
        forecast = self._known[config]
        if forecast is None:
            raise KeyError(config)
        return forecast

    def _predicted(self, config: TrialConfig) -> MemoryForecast | None:
        try:
            beyond = None if config in self._tried else self._far_beyond(config)
            predicted = self._predictor.predict(config) if beyond is None else None
        except SweepError:
            return None
        if predicted is None:
            return beyond
        fits = _FITS[predicted.fits(self._budget_bytes)]
        return MemoryForecast(predicted.peak_allocated_bytes, predicted.breakdown, fits)

    def _far_beyond(self, config: TrialConfig) -> MemoryForecast | None:
        """Return what needs too much even if nothing is wasted, which is quickly seen; else None.

        Replaying the allocator takes most of a prediction, and would only add to it.
        """
        whole = self._predictor.predict_all([config])
        if whole.refused:
            return None
        least, unsure = int(whole.least_allocated_bytes[0]), float(whole.uncertainty[0])
        is_beyond = least * (1 - unsure) > self._budget_bytes
        return MemoryForecast(least, {}, "no") if is_beyond else None

    def __iter__(self) -> Iterator[TrialConfig]:
        return (config for config in self._tried if self.get(config) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Nobody:
    """A tracer that traces nothing: what is not kept is not known."""

    def trace(self, model: ModelSpec, structure: Structure) -> dict[str, Any]:
        raise Untraceable(f"model '{model.name}': the structure {structure} was not traced before")

    def trace_all(
        self, model: ModelSpec, structures: Iterable[Structure]
    ) -> Generator[tuple[Structure, Traced]]:
        for structure in structures:
            yield structure, Untraceable(f"model '{model.name}': nothing is traced here")
