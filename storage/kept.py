"""Owns the results that only a spool has: which they are, how it is said, and taking them over.

A result is told where its trial in the database was begun as the very attempt that it is of, with
the same configuration. Whatever else became of the trial meanwhile (closed by somebody, taken for
lost by another driver, deleted, renumbered in a restored copy), the result stays in the spool.
Pure but for reading a spool.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from search_spaces.config import canonical
from storage.definition import RunningTrial
from storage.records import Lost, TrialRecord, Verdict
from storage.spool import Spool

if TYPE_CHECKING:
    # Whoever only looks at a study needs no Optuna, which takes long to import.
    from optuna.trial import FrozenTrial

WORTH_KEEPING = frozenset(
    {Verdict.FITS, Verdict.OOM, Verdict.PRUNED_SLOW, Verdict.DIVERGED, Verdict.INEFFECTIVE}
)
"""What the device found out. The rest came to nothing, or is judged anew for nothing."""
_SHOWN = 12
"""So many trials are named in a warning."""


def how_begun(frozen: FrozenTrial) -> RunningTrial:
    """Return how a trial was begun."""
    from storage import mapping

    errand = mapping.errand_of(frozen)
    return RunningTrial(
        frozen.number,
        mapping.config_of(frozen),
        frozen.user_attrs.get(mapping.STARTED_AT),
        errand.purpose,
        errand.confirms,
        errand.series,
        frozen.user_attrs.get(mapping.ATTEMPT),
    )


def has_result(stored: FrozenTrial, record: TrialRecord) -> bool:
    """Whether a trial that ended did so by this very result."""
    from storage import mapping

    try:
        there = mapping.record_of(stored)
    except ValidationError:
        return False
    if there is None or there.attempt_id != record.attempt_id:
        return False
    return there.verdict is record.verdict


@dataclass(frozen=True)
class Unsettled:
    """What of a spool is not in the database."""

    waiting: tuple[TrialRecord, ...] = ()
    """Their trials are open, and were begun as what they are results of: a resume tells them."""
    kept: tuple[TrialRecord, ...] = ()
    """Their trials ended otherwise, or are gone."""
    problems: tuple[str, ...] = ()
    """What cannot be read, in words."""


def is_of(record: TrialRecord, trial: RunningTrial) -> bool:
    """Whether a result is of the very attempt that a trial was begun as."""
    return (
        record.number == trial.number
        and record.attempt_id == trial.attempt_id
        and record.config == trial.config
    )


def unsettled(
    spool: Spool,
    *,
    records: Iterable[TrialRecord],
    begun: Iterable[RunningTrial],
    is_driven: bool = False,
) -> Unsettled:
    """Return what of a spool is not in the database.

    Args:
        spool: of the study, read after the database was.
        records: of every finished trial of the study, confirmations as well.
        begun: the trials that are open.
        is_driven: whether somebody else may have begun and spooled a trial between the two reads.
    """
    known = tuple(records)
    contents = spool.look(known=_settled_attempts(known))
    open_trials = {trial.number: trial for trial in begun}
    waiting = tuple(
        r for r in contents.records if (t := open_trials.get(r.number)) is not None and is_of(r, t)
    )
    rest = [r for r in contents.records if r not in waiting]
    if is_driven:
        newest = max((*(r.number for r in known), *open_trials), default=-1)
        rest = [r for r in rest if r.number <= newest and r.number not in open_trials]
    kept = kept_among(rest, known)
    return Unsettled(waiting, kept, contents.problems)


def kept_among(
    spooled: Iterable[TrialRecord], known: Sequence[TrialRecord]
) -> tuple[TrialRecord, ...]:
    """Return which spooled results a study lacks, and nothing else has told it meanwhile.

    Args:
        spooled: read from a spool of the study.
        known: every record that the database has of it.
    """
    attempts = _settled_attempts(known)
    candidates = [r for r in spooled if r.verdict in WORTH_KEEPING and r.attempt_id not in attempts]
    if not candidates:
        return ()
    concluded = {
        canonical(r.config) for r in known if r.purpose == "search" and r.verdict in WORTH_KEEPING
    }
    return tuple(
        r for r in candidates if r.purpose != "search" or canonical(r.config) not in concluded
    )


def _settled_attempts(known: Iterable[TrialRecord]) -> frozenset[str]:
    """Return the attempts whose results the database has: that one was lost is no result."""
    return frozenset(
        r.attempt_id for r in known if r.attempt_id is not None and not isinstance(r.outcome, Lost)
    )


def has_settled(record: TrialRecord, known: Iterable[TrialRecord]) -> bool:
    """Whether the database has a result of this attempt."""
    return record.attempt_id in _settled_attempts(known)


def unsettled_words(
    found: Unsettled, *, study: str, path: Path, is_driven: bool
) -> tuple[str, ...]:
    """Return what a person should know of a study's spool, a sentence for each thing.

    Args:
        found: in it.
        study: name of the study.
        path: of the spool.
        is_driven: whether somebody is at it: what waits is then being told.
    """
    lines = list(found.problems)
    if found.waiting and not is_driven:
        lines.append(
            f"{_results_of(found.waiting)} in {path} and not yet in the database; "
            "resume the study to tell them"
        )
    if found.kept:
        lines.append(kept_words(found.kept, study=study, path=path))
    return tuple(lines)


def kept_words(kept: Sequence[TrialRecord], *, study: str, path: Path) -> str:
    """Return that results are in the spool alone, and the command that takes them over."""
    return (
        f"{_results_of(kept)} kept in {path} alone: in the database those trials ended otherwise "
        f"or are gone; take them over with `sweep run SPACE --study {shlex.quote(study)} --from "
        f"{shlex.quote(str(path))}`"
    )


def _results_of(records: Sequence[TrialRecord]) -> str:
    named = [f"{r.number} ({r.verdict})" for r in sorted(records, key=lambda r: r.number)]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    noun = "results of trials" if len(named) > 1 else "the result of trial"
    return f"{noun} {', '.join(named[:_SHOWN])}{more} {'are' if len(named) > 1 else 'is'}"
