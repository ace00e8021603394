"""Owns what a study is about (space, model, target) and what a reader sees of it. No Optuna.

Two definitions differ where trials of the one cannot be compared with trials of the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from search_spaces.config import TrialConfig
from search_spaces.costs import usd_per_training_second
from search_spaces.prices import Offer
from search_spaces.space import Objective, SearchSpace
from search_spaces.texts import TextsSummary
from storage.records import Measurement, Purpose, TrialRecord, without_repeated

_ABSENT = ("(absent)", "(absent)")
_OF_TEXTS = {"data.eval_fraction", "data.quality_tokens", "seed"}
"""What says which examples are trained on, and how."""
_RECIPE = TrialConfig().model_dump(mode="json")


class Target(BaseModel):
    """The GPU a study is for, and the device that stands in for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: str
    """Catalogue name, or the product's name where the catalogue has none; ``cpu`` for the CPU."""
    device: Literal["cuda", "cpu"]
    budget_bytes: PositiveInt
    """Bytes the trial may reserve on the device, enforced for real."""
    emulated_on: str | None = None
    """Product name of the bigger GPU that stands in; None where the target itself runs."""
    recorded: str | None = None
    """What its trials were recorded on, and when; None where they are measured now."""


class StudyDefinition(BaseModel):
    """Everything that must stay the same for a study to go on where it was."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    space: SearchSpace
    model: dict[str, Any]
    """`ModelSpec.to_json`."""
    model_fingerprint: str
    target: Target
    texts: TextsSummary | None = None
    """What was found in the texts that its trials train on; None where their rows are random."""


def differences(stored: StudyDefinition, given: StudyDefinition) -> tuple[str, ...]:
    """Return one ``key: old -> new`` per difference that makes old and new trials incomparable.

    What steers the search or names things may change freely: trials, time budget, sampler, seed,
    step budgets, names and descriptions. The GPU and the model count as resolved: by target and
    fingerprint, not by spelling. So do texts; with them the seed counts too, as it says which of
    their rows are held out.
    """
    old, new = _compared(stored), _compared(given)
    differing = [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key, _ABSENT)[0] != new.get(key, _ABSENT)[0]
    ]
    # A baseline inherits what is fixed: one change there is one line. Of other texts all else is.
    implied = {f"baseline.{key.removeprefix('fixed.')}" for key in differing}
    implied |= _OF_TEXTS if "texts" in differing else set()
    return tuple(
        f"{key}: {old.get(key, _ABSENT)[1]} -> {new.get(key, _ABSENT)[1]}"
        for key in differing
        if key not in implied
    )


def step_differences(stored: StudyDefinition, given: StudyDefinition) -> tuple[str, ...]:
    """Return one ``key: old -> new`` per difference in how long a trial trains."""
    old, new = (of.space.steps.model_dump() for of in (stored, given))
    return tuple(f"{key}: {old[key]} -> {new[key]}" for key in old if old[key] != new[key])


def _compared(definition: StudyDefinition) -> dict[str, tuple[object, str]]:
    """Return what counts of a definition, by key, each with how it is shown."""
    dumped, texts = definition.space.model_dump(mode="json"), definition.texts
    # What is neither searched nor fixed is the recipe's: a setting that a later version writes out
    # changes nothing.
    rest = {key: value for key, value in _RECIPE.items() if key not in definition.space.dimensions}
    nested = {
        "dimensions": dumped["dimensions"],
        "fixed": rest | dumped["fixed"],
        # Only what the baseline resolves to counts, not which of its defaults were spelled out.
        "baseline": definition.space.baseline_config().model_dump(mode="json"),
        "target": definition.target.model_dump(mode="json"),
    }
    plain = {key: dumped[key] for key in ("weights", "objectives", "numerics", "leave_out")}
    plain |= {f"{outer}.{key}": of for outer, inner in nested.items() for key, of in inner.items()}
    if texts is not None:
        chosen = dumped["data"] or {}
        plain |= {key: chosen.get(key.removeprefix("data.")) for key in _OF_TEXTS}
        plain["seed"] = definition.space.seed
    shown: dict[str, tuple[object, str]] = {
        k: (value, json.dumps(value)) for k, value in plain.items()
    }
    fingerprint = definition.model_fingerprint
    shown["model"] = fingerprint, f"{definition.model.get('name')} (config {fingerprint})"
    shown["texts"] = (
        (None, "none")
        if texts is None
        else (texts.fingerprint, f"{texts.source} (fingerprint {texts.fingerprint})")
    )
    return shown


@dataclass(frozen=True)
class RunningTrial:
    """A trial that is running, or was when its driver ended."""

    number: int
    config: TrialConfig | None
    started_at: str | None
    purpose: Purpose = "search"
    confirms: int | None = None
    """Number of the trial that it measures again."""
    series: int = 0
    """Which confirmation of the study it belongs to; 0 for a trial of the search."""
    attempt_id: str | None = None
    """Of this one try; None where it was asked for and never begun."""


@dataclass(frozen=True)
class Unreadable:
    """A trial that is in the database and of which this version can make nothing."""

    number: int | None
    """None where not even that can be read."""
    reason: str
    was_told_elsewhere: bool = False
    """Whether it was ended by something other than sweep, so that nothing of ours is in it: its
    configuration is as good as not tried."""

    def __str__(self) -> str:
        name = "a trial without a number" if self.number is None else f"trial {self.number}"
        return f"{name} cannot be read and is left out: {self.reason}"


@dataclass(frozen=True)
class UnreadableStudy:
    """A study whose definition cannot be read, so that nothing can be said of its trials."""

    name: str
    reason: str
    trials: int
    """Trials of whatever state."""


@dataclass(frozen=True)
class TargetSpeed:
    """How fast a configuration trains on the GPU that a study is for."""

    tokens_per_second: float
    """Tokens that carry loss."""
    low: float | None
    """Of the 95 % interval of what was measured, or of the range that a prediction states."""
    high: float | None
    basis: Literal["measured", "predicted"]
    """Predicted where another GPU stood in for the target: its speed is its own."""


@dataclass(frozen=True)
class MemoryForecast:
    """What a configuration is predicted to need under the study's budget."""

    peak_allocated_bytes: int
    parts: Mapping[str, int]
    """Bytes by what they are for; they add up to the peak."""
    fits: Literal["yes", "no", "uncertain"]


@dataclass(frozen=True, eq=False)
class StudySnapshot:
    """A study as it stands in storage: all that reports, `status` and `best` read.

    Equal to itself alone, so that what is worked out of it can be kept beside it.
    """

    name: str
    definition: StudyDefinition
    environment: dict[str, Any]
    """Fingerprint of the newest run: GPU, driver, versions, commit."""
    records: tuple[TrialRecord, ...]
    """Finished trials of the search, by number."""
    confirmations: tuple[TrialRecord, ...] = ()
    """What measured its winners again, by number; none of it is a trial of the search."""
    running: tuple[RunningTrial, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    """Trials that are neither ranked nor counted: nothing is known of them."""
    wall_seconds: float = 0.0
    """Driver time over all runs of the study."""
    holder: str | None = None
    """Who drives it now (``host:pid``), here or elsewhere; None where nobody does."""
    driven_since: str | None = None
    """When that began, UTC in ISO 8601; None where the database does not tell."""
    warnings: tuple[str, ...] = ()
    """Anything a reader should know, such as a library version that changed between runs."""
    ended: dict[str, Any] | None = None
    """Why the search ended last, and what it was not able to rule out; None where it has not."""
    offer: Offer | None = None
    """At what the target GPU can be rented; None where no price is known."""
    identity: str = ""
    """Of the study, which another one of the same name has not."""
    target_speeds: Mapping[int, TargetSpeed] = field(default_factory=dict)
    """What is predicted of the target GPU where another stood in, by trial number."""
    memory_forecasts: Mapping[TrialConfig, MemoryForecast] = field(default_factory=dict)
    """What a configuration is predicted to need, tried or not, where that is at hand."""
    job_tokens: float | None = None
    """Tokens of the training that a report is asked to price; None where nobody said."""

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """The finished trials of the search without attempts that were repeated, by number."""
        return without_repeated(self.records)

    def target_speed(self, record: TrialRecord) -> TargetSpeed | None:
        """Return how fast a measured trial is on the target GPU: as measured where that ran it.

        Where another GPU stood in it is what is predicted; None where nothing was measured, or
        nothing can be predicted.
        """
        measured = record.measurement
        if measured is None:
            return None
        if self.definition.target.emulated_on is not None:
            return self.target_speeds.get(record.number)
        low, high = measured.speed_interval or (None, None)
        return TargetSpeed(measured.tokens_per_second, low, high, "measured")

    def usd_per_million_tokens(self, record: TrialRecord) -> float | None:
        """Return what tokens cost at a trial's speed on the target GPU; None without a price."""
        speed = self.target_speed(record)
        return None if speed is None else self._usd(speed.tokens_per_second, record.config)

    def usd_interval(self, record: TrialRecord) -> tuple[float, float] | None:
        """Return the least and the most that a million tokens cost, by that speed's interval."""
        speed = self.target_speed(record)
        if speed is None or speed.low is None or speed.high is None:
            return None
        ends = (self._usd(end, record.config) for end in (speed.high, speed.low))
        least, most = ends
        return None if least is None or most is None else (least, most)

    def _usd(self, tokens_per_second: float, config: TrialConfig) -> float | None:
        if self.offer is None:
            return None
        second = usd_per_training_second(self.offer, config.data_parallel)
        return second / tokens_per_second * 1e6


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
    """What was measured of it, on whatever GPU ran it."""
    wall_seconds: float
    holder: str | None
    """Who drives it now (``host:pid``), here or elsewhere."""
    is_confirmed: bool = False
    """Whether the best was measured again."""
    speed: TargetSpeed | None = None
    """Of the best on the target GPU; None where that is not known."""
    unreadable: int = 0
    """Trials of which nothing is known, as they cannot be read."""
    driven_since: str | None = None
    """When its driver took it, UTC in ISO 8601."""
    running: tuple[int, ...] = ()
    """Numbers of the trials that were begun and have not ended."""
