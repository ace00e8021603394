"""What Optuna's storage holds of a study, validated: the one read, of drivers and of readers.

What another version wrote, or something other than sweep, is said of the study and of the trial
that it is of, and costs no other anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from optuna.trial import FrozenTrial, TrialState
from pydantic import BaseModel, Field, ValidationError

from search_spaces.documents import explain
from search_spaces.errors import InputError, quote
from search_spaces.models import ModelSpec
from storage import mapping
from storage.definition import RunningTrial, StudyDefinition, Unreadable, UnreadableStudy
from storage.keys import FORMAT_WRITTEN
from storage.records import TrialRecord

NAMED_MAX = 5
"""Trials that cannot be read of which each has a line of its own."""


class _Run(BaseModel):
    environment: dict[str, Any]


class StudyAttributes(BaseModel):
    """A study's own attributes."""

    definition: StudyDefinition
    identity: str = ""
    runs: list[_Run] = []
    wall_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    ended: dict[str, Any] | None = None
    format: Annotated[int, Field(ge=0, strict=True)] = FORMAT_WRITTEN

    @property
    def is_newer(self) -> bool:
        """Whether a later version wrote it in a way that this one would overlook or undo."""
        return self.format > FORMAT_WRITTEN

    @property
    def newer_words(self) -> str:
        """What is said of a study of a format that is not known here."""
        return f"a newer sweep wrote it (format {self.format}, this one writes {FORMAT_WRITTEN})"


@dataclass(frozen=True)
class StoredTrials:
    """What is stored of a study's trials, each part by number."""

    records: tuple[TrialRecord, ...] = ()
    """Of trials that ended, those that measured winners again included."""
    running: tuple[RunningTrial, ...] = ()
    """Of trials that were begun and have not ended; no configuration where that was not stored."""
    unreadable: tuple[Unreadable, ...] = ()


def read_attributes(
    name: str, attributes: Mapping[str, Any], *, trials: int
) -> StudyAttributes | UnreadableStudy:
    """Return what is stored of a study itself."""
    try:
        found = StudyAttributes.model_validate(attributes)
        ModelSpec.from_json(found.definition.model)
        found.definition.space.baseline_config()
    except ValidationError as error:
        return UnreadableStudy(name, explain(error), trials)
    except (InputError, LookupError, TypeError, ValueError) as error:
        return UnreadableStudy(name, str(error), trials)
    return found


def read_trials(trials: Iterable[FrozenTrial]) -> StoredTrials:
    """Return what is stored of a study's trials."""
    records, running, unreadable = list[TrialRecord](), list[RunningTrial](), list[Unreadable]()
    for trial in trials:
        try:
            record = mapping.record_of(trial)
            if record is not None:
                records.append(record)
            elif trial.state is TrialState.RUNNING:
                running.append(mapping.how_begun(trial))
            elif trial.state in (TrialState.COMPLETE, TrialState.PRUNED):
                # What was begun and never ran is told as failed; nothing else has no record.
                unreadable.append(Unreadable(trial.number, "it has no record", True))
        except ValidationError as error:
            unreadable.append(Unreadable(trial.number, _reason(error)))
    return StoredTrials(tuple(records), tuple(running), tuple(unreadable))


def _reason(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if first["type"] == "union_tag_invalid":
        return f"it has a verdict that is not known here: {quote(first['ctx']['tag'])}"
    return f"in its record {explain(error)}"


def refuse_unreadable_trials(name: str, trials: StoredTrials) -> None:
    """Raise where a trial cannot be read: it could be run again, or taken for what it is not.

    One that somebody else ended in the database is no reason: what it came to is not in there.

    Raises:
        InputError: says which, and what to do.
    """
    unknown = [trial for trial in trials.unreadable if not trial.was_told_elsewhere]
    if unknown:
        lines = "".join(f"\n  {words}" for words in unreadable_in_words(unknown))
        raise InputError(
            f"study {quote(name)} cannot be gone on with, as what ran in it is not known for sure:"
            f"{lines}\nWhat can be read is carried over to a new study: `sweep run SPACE --from "
            f"{name} --study NEW`"
        )


def unreadable_words(study: UnreadableStudy) -> str:
    """Return why a study cannot be read, and what to do."""
    return (
        f"study {quote(study.name)} cannot be read: {study.reason}; it may be of another version "
        "of sweep: read it with that one, or choose another --study"
    )


def unreadable_in_words(trials: Sequence[Unreadable]) -> tuple[str, ...]:
    """Return what is said of trials that cannot be read: of a few each by itself."""
    named = tuple(map(str, trials[:NAMED_MAX]))
    further = len(trials) - len(named)
    return named if not further else (*named, f"{further:,} further trials cannot be read either")
