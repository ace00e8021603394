"""Owns what the peak memory of a study's trials is made of, as far as that is known at once.

It is predicted, and only from structures that were traced on this machine before: a report does not
wait for a trace. Knows nothing of terminals or of how a study is driven.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.errors import SweepError
from search_spaces.gpus import match_product
from search_spaces.models import ModelSpec
from storage.definition import StudySnapshot
from sweep.predict.memory.predictor import MemoryPredictor, TracingPredictor
from sweep.predict.memory.profile_store import Traced
from sweep.predict.memory.profiles import Structure, Untraceable


def with_memory_parts(snapshot: StudySnapshot, *, cache_dir: Path) -> StudySnapshot:
    """Return a study with the parts of its trials' peaks, each worked out when it is first read.

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
    configs = {record.number: record.config for record in snapshot.records}
    return replace(snapshot, memory_parts=KeptParts(configs, predictor=predictor))


class KeptParts(Mapping[int, Mapping[str, int]]):
    """Bytes of each part of a trial's peak, by number; of trials whose structure is kept alone."""

    def __init__(self, configs: Mapping[int, TrialConfig], *, predictor: MemoryPredictor) -> None:
        self._configs = configs
        self._predictor = predictor
        self._known: dict[int, Mapping[str, int] | None] = {}

    def __getitem__(self, number: int) -> Mapping[str, int]:
        if number not in self._known:
            self._known[number] = self._predicted(self._configs[number])
        parts = self._known[number]
        if parts is None:
            raise KeyError(number)
        return parts

    def _predicted(self, config: TrialConfig) -> Mapping[str, int] | None:
        try:
            return self._predictor.predict(config).breakdown
        except SweepError:
            return None

    def __iter__(self) -> Iterator[int]:
        return (number for number in self._configs if self.get(number) is not None)

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
