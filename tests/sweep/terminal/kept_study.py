"""A study whose trials are told as they are, kept where commands find it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qlora_sweep.storage.definition import StudyDefinition
from qlora_sweep.storage.records import TrialRecord
from qlora_sweep.storage.study import open_study
from qlora_sweep.sweep.sampling.samplers import make_sampler

DAY = "2026-11-21"


def keep_study(
    home: Path,
    definition: StudyDefinition,
    records: Iterable[TrialRecord],
    *,
    name: str = "mine",
    environment: dict[str, Any] | None = None,
) -> None:
    with open_study(
        name,
        url=f"sqlite:///{home}/runs/sweep.db",
        definition=definition,
        sampler=make_sampler("random", definition.space, seed=0),
        environment=environment or {},
        home=home / "runs",
    ) as study:
        for record in records:
            trial = study.ask({}, params=None)
            begun = study.begin(trial, record.config, f"{DAY}T12:34:56+00:00")
            told = {"number": trial.number, "attempt_id": begun.id, "started_at": begun.started_at}
            study.tell(trial, record.model_copy(update=told))
