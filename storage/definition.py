"""What a study is called, what it is about (space, model, target), and what a reader sees of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, PositiveInt

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.dataset_choice import DatasetSummary
from qlora_sweep.search_spaces.errors import InputError, quote
from qlora_sweep.search_spaces.kinds import DEVICES, DeviceName
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.records import TrialRecord, without_repeated

NAME_MAX = 100
_NAME_BYTES_MAX = 200
"""A file system's names end at 255 bytes, and the lock's begins with the database's."""
_OF_DATASET = ("data.eval_fraction", "data.quality_tokens", "seed")
"""What says which examples are trained on, and how."""
_BASELINE = TrialConfig().model_dump(mode="json")
NINE_IN_TEN = 1.645
"""Standard deviations to either side that hold nine in ten."""


def check_name(name: str) -> None:
    """Raise `InputError` where no study can have this name, which is a directory's too."""
    if len(name) > NAME_MAX or not is_file_name(name):
        allowed = f"at most {NAME_MAX} letters, digits, '.', '_' and '-'"
        raise InputError(f"study name must be {allowed}, got {quote(name)}")


def is_file_name(name: str) -> bool:
    """Whether a study's name can be that of a directory: others are some other tool's."""
    is_plain = re.fullmatch(r"[^\W_][\w.-]*", name) is not None
    return is_plain and len(name.encode()) <= _NAME_BYTES_MAX


def _fingerprint(environment: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(environment.get("versions", {}), dict):
        raise ValueError("versions must map libraries to versions")
    return environment


Fingerprint = Annotated[dict[str, Any], AfterValidator(_fingerprint)]
"""What a run ran on: GPU, driver, versions, commit."""


class Target(BaseModel):
    """The GPU a study is for, and the device that stands in for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpu: str
    """Catalogue name, or the product's name where the catalogue has none; ``cpu`` for the CPU."""
    device: DeviceName
    budget_bytes: PositiveInt
    """Bytes the trial may reserve on the device, enforced for real."""
    emulated_on: str | None = None
    """Product name of the bigger GPU that stands in; None where the target itself runs."""
    recorded: str | None = None
    """What its trials were recorded on, and when; None where they are measured now."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether trials run on a GPU."""
        return DEVICES[self.device].is_gpu


class StudyDefinition(BaseModel):
    """Everything that must stay the same for a study to go on where it was."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    space: SearchSpace
    model: dict[str, Any]
    """`ModelSpec.to_json`."""
    model_fingerprint: str
    target: Target
    texts: DatasetSummary | None = None
    """What was found in the texts that its trials train on; None where their rows are random."""


def differences(stored: StudyDefinition, given: StudyDefinition) -> tuple[str, ...]:
    """Return one ``key: old -> new`` per difference that makes old and new trials incomparable.

    What steers the search or names things may change freely: trials, time budget, sampler, seed,
    step budgets, names and descriptions. The GPU and the model count as resolved: by target and
    fingerprint, not by spelling. So do texts; with them the seed counts too, as it says which of
    their rows are held out.
    """
    old = _compared(stored)
    new = _compared(given)
    absent = (None, "(absent)")
    lines = {}
    for key in sorted(old.keys() | new.keys()):
        old_value, old_words = old.get(key, absent)
        new_value, new_words = new.get(key, absent)
        if old_value != new_value:
            lines[key] = f"{key}: {old_words} -> {new_words}"
    # A baseline inherits what is fixed: one change there is one line. Of other texts all else is.
    implied = {f"baseline.{key.removeprefix('fixed.')}" for key in lines}
    if "dataset" in lines:
        implied.update(_OF_DATASET)
    return tuple(line for key, line in lines.items() if key not in implied)


def step_differences(stored: StudyDefinition, given: StudyDefinition) -> tuple[str, ...]:
    """Return one ``key: old -> new`` per difference in how long a trial trains."""
    new = given.space.steps.model_dump()
    lines = []
    for key, old in stored.space.steps.model_dump().items():
        if old != new[key]:
            lines.append(f"{key}: {old} -> {new[key]}")
    return tuple(lines)


def _compared(definition: StudyDefinition) -> dict[str, tuple[object, str]]:
    """Return what counts of a definition, by key, each with how it is shown."""
    space = definition.space
    dataset = definition.texts
    dumped = space.model_dump(mode="json")
    values = {key: dumped[key] for key in ("weights", "objectives", "numerics", "leave_out")}
    # What is neither searched nor fixed is the recipe's, and a baseline is what it resolves to:
    # writing a default out changes nothing.
    fixed = _BASELINE | dumped["fixed"]
    for key in space.dimensions:
        if key not in dumped["fixed"]:
            fixed.pop(key, None)
    nested = {
        "dimensions": dumped["dimensions"],
        "fixed": fixed,
        "baseline": space.baseline_config().model_dump(mode="json"),
        "target": definition.target.model_dump(mode="json"),
    }
    for outer, inner in nested.items():
        for key, value in inner.items():
            values[f"{outer}.{key}"] = value
    if dataset is not None:
        chosen = dumped["data"] or {}
        values["data.eval_fraction"] = chosen.get("eval_fraction")
        values["data.quality_tokens"] = chosen.get("quality_tokens")
        values["seed"] = space.seed
    compared: dict[str, tuple[object, str]] = {}
    for key, value in values.items():
        compared[key] = (value, json.dumps(value))
    model = definition.model_fingerprint
    compared["model"] = (model, f"{definition.model.get('name')} (config {model})")
    compared["dataset"] = (None, "none")
    if dataset is not None:
        shown = f"{dataset.source} (fingerprint {dataset.fingerprint})"
        compared["dataset"] = (dataset.fingerprint, shown)
    return compared


@dataclass(frozen=True)
class UnreadableStudy:
    """A study of which nothing can be said, as what is stored of it cannot be read."""

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
    """Of the 95 % interval of what was measured, or of a prediction what nine in ten are within."""
    high: float | None
    basis: Literal["measured", "predicted"]
    """Predicted where another GPU stood in for the target, and corrected by what that measured."""
    log_spread: float | None = None
    """Standard deviation of a predicted speed's logarithm; None where it was measured."""
    own_spread: float = 0.0
    """What of that is the configuration's own; a ratio of two has both."""
    common: tuple[float, ...] = ()
    """How far each of what all predictions of the study have in common moves it: in a ratio of two
    the difference counts."""

    def ratio(self, over: TargetSpeed) -> tuple[float, float | None, float | None]:
        """Return how many times as fast this is as another, and the ends of what nine in ten such
        ratios of predictions are between; None for ends that are not known."""
        value = self.tokens_per_second / over.tokens_per_second
        if self.log_spread is None or over.log_spread is None:
            return value, None, None
        shared = math.dist(self.common, over.common)
        of_both = math.hypot(shared, self.own_spread, over.own_spread)
        apart = min(of_both, math.hypot(self.log_spread, over.log_spread))
        factor = math.exp(NINE_IN_TEN * apart)
        return value, value / factor, value * factor


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
    running: tuple[TrialRecord, ...] = ()
    """Trials that were begun and have not ended, as lost."""
    wall_seconds: float = 0.0
    """Driver time over all runs of the study."""
    holder: str | None = None
    """Who drives it now (``host:pid``), here or elsewhere; None where no process does."""
    driven_since: str | None = None
    """When that began, UTC in ISO 8601; None where the database does not tell."""
    warnings: tuple[str, ...] = ()
    """Anything a reader should know, such as a library version that changed between runs."""
    left_out: tuple[str, ...] = ()
    """Of those, which trials are left out as they are not sound."""
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

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """The finished trials of the search without attempts that were repeated, by number."""
        return without_repeated(self.records)
