"""Owns what a study is about (space, model, target) and what a reader sees of it. No Optuna."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from search_spaces.config import TrialConfig
from search_spaces.space import Objective, SearchSpace
from storage.records import Measurement, TrialRecord


class Target(BaseModel):
    """The card a study is for, and the device that stands in for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: str
    """Catalogue name, or the product's name where the catalogue has none; ``cpu`` for the CPU."""
    device: Literal["cuda", "cpu"]
    budget_bytes: int
    """Bytes the trial may reserve on the device, enforced for real."""
    emulated_on: str | None = None
    """Product name of the bigger card that stands in; None where the target itself runs."""


class StudyDefinition(BaseModel):
    """Everything that must stay the same for a study to go on where it was."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    space: SearchSpace
    model: dict[str, Any]
    """`ModelSpec.to_json`."""
    model_fingerprint: str
    target: Target


@dataclass(frozen=True)
class RunningTrial:
    """A trial that is running, or was when its driver ended."""

    number: int
    config: TrialConfig | None
    started_at: str | None


@dataclass(frozen=True)
class StudySnapshot:
    """A study as it stands in storage: all that reports, `status` and `best` read."""

    name: str
    definition: StudyDefinition
    environment: dict[str, Any]
    """Fingerprint of the newest run: GPU, driver, versions, commit."""
    records: tuple[TrialRecord, ...]
    """Finished trials by number."""
    running: tuple[RunningTrial, ...] = ()
    wall_seconds: float = 0.0
    """Driver time over all runs of the study."""
    holder: str | None = None
    """Who drives it now (``host:pid``); None where nobody does."""
    warnings: tuple[str, ...] = field(default=())
    """Anything a reader should know, such as a library version that changed between runs."""
    costs: Mapping[int, float] = field(default_factory=dict)
    """Dollars per million tokens by trial, as told while it ran; empty where cost is no objective.
    """


@dataclass(frozen=True)
class StudySummary:
    """One line of a list of studies."""

    name: str
    gpu: str
    model: str
    trials: int
    """Finished trials."""
    objectives: tuple[Objective, ...]
    """What its trials are ranked by."""
    best_number: int | None
    """The best trial of the space that fits, by those; None where nothing fits yet."""
    best: Measurement | None
    """What was measured of it."""
    wall_seconds: float
    holder: str | None
    """Who drives it now (``host:pid``)."""

    @property
    def best_tokens_per_second(self) -> float | None:
        """Speed of the best trial; None where nothing fits yet."""
        return None if self.best is None else self.best.tokens_per_second
