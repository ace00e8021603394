"""The file that a result reaches first: one fsynced line a trial, read after a crash.

A result is told where its trial in the database is open and was begun as the very attempt that it
is of. Whatever else became of the trial meanwhile (closed by somebody, taken for lost by another
driver, gone in a restored copy), the result stays here. What cannot be read is said.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from search_spaces.config import canonical
from search_spaces.errors import EnvironmentFault, words_of
from storage.files import open_append, open_reading
from storage.records import Lost, TrialRecord, Verdict

NAME = "spool.jsonl"
"""Of the file, in the study's directory."""
LINE_BYTES_MAX = 4 * 1024 * 1024
"""Far more than a result takes."""
WORTH_KEEPING = frozenset(
    {Verdict.FITS, Verdict.OOM, Verdict.PRUNED_SLOW, Verdict.DIVERGED, Verdict.INEFFECTIVE}
)
"""What the device found out. The rest came to nothing, or is judged anew for nothing."""
_SHOWN = 12
"""So many trials are named in a warning."""


class _Line(BaseModel):
    """Of any study: one line of the file."""

    study: str
    record: TrialRecord


@dataclass(frozen=True)
class Contents:
    """What stands in a spool."""

    records: tuple[TrialRecord, ...] = ()
    """Of the study, in the order they were spooled; of one attempt the last."""
    problems: tuple[str, ...] = ()
    """What could not be read, in words that name the file."""


@dataclass(frozen=True)
class Spool:
    """The spool of one study.

    A study is known by an identifier rather than its name, so that lines of an earlier, deleted
    study of the same name are never taken for results of this one.
    """

    path: Path
    study_id: str

    def append(self, record: TrialRecord) -> None:
        """Write one result and wait until the disk has it.

        Raises:
            EnvironmentFault: the disk is full or the directory is not to be written.
        """
        values = _Line(study=self.study_id, record=record).model_dump(mode="json")
        line = json.dumps(values).encode() + b"\n"
        try:
            with open_append(self.path) as file:
                # A driver that lost its lease may still be writing here.
                fcntl.flock(file, fcntl.LOCK_EX)
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - LINE_BYTES_MAX))
                *_, last = file.read().rpartition(b"\n")
                # What a driver that died while writing left is cut; whatever else is there is kept.
                is_torn = len(last) < LINE_BYTES_MAX and not _is_line(last)
                if is_torn and last:
                    end -= len(last)
                    os.ftruncate(file.fileno(), end)
                rest = memoryview(line if is_torn or not last else b"\n" + line)
                try:
                    while rest:
                        rest = rest[os.write(file.fileno(), rest) :]
                    os.fsync(file.fileno())
                except OSError:
                    os.ftruncate(file.fileno(), end)
                    raise
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write the result to {self.path}: {error.strerror or words_of(error)}"
            ) from error

    def read(self) -> tuple[TrialRecord, ...]:
        """Return this study's results in the order they were spooled."""
        return self.look().records

    def look(self, *, known: Collection[str] = ()) -> Contents:
        """Return what stands in it. Never raises.

        Args:
            known: identities of attempts whose results are known elsewhere: they are left out.
        """
        records: dict[str | None, TrialRecord] = {}
        try:
            lines, problems = _lines(self.path)
        except FileNotFoundError:
            return Contents()
        except OSError as error:
            words = error.strerror or words_of(error)
            return Contents(problems=(f"the spool {self.path} cannot be read: {words}",))
        for line in lines:
            if line.study == self.study_id and line.record.attempt_id not in known:
                # Popped first, so that the last of an attempt stands in its own place.
                records.pop(line.record.attempt_id, None)
                records[line.record.attempt_id] = line.record
        return Contents(tuple(records.values()), problems)


def newest_study(path: Path) -> str | None:
    """Return the identity of the study that a spool's last readable line is of. Never raises."""
    try:
        lines, _ = _lines(path)
    except OSError:
        return None
    return lines[-1].study if lines else None


def _lines(path: Path) -> tuple[list[_Line], tuple[str, ...]]:
    """Return the lines of a spool, of any study, and in words how many cannot be read.

    The last one is left out where it is none: somebody is writing it, or died while he did.
    """
    known, unreadable, why = list[_Line](), 0, "no result"
    with open_reading(path) as file:
        while line := file.readline(LINE_BYTES_MAX):
            try:
                known.append(_Line.model_validate_json(line))
            except ValidationError as error:
                if line.endswith(b"\n") and line.strip():
                    unreadable += 1
                    if error.errors()[0]["type"] != "json_invalid":
                        why = "perhaps of a later version of sweep"
    lines = "1 line" if unreadable == 1 else f"{unreadable} lines"
    problem = f"{lines} of the spool {path} cannot be read ({why})"
    return known, ((problem,) if unreadable else ())


def _is_line(text: bytes) -> bool:
    with suppress(ValidationError):
        return bool(_Line.model_validate_json(text))
    return False


def settled_attempts(known: Iterable[TrialRecord]) -> frozenset[str]:
    """Return the attempts whose results the database has: that one was lost is no result."""
    return frozenset(
        r.attempt_id for r in known if r.attempt_id is not None and not isinstance(r.outcome, Lost)
    )


def kept_among(
    spooled: Iterable[TrialRecord], known: Sequence[TrialRecord]
) -> tuple[TrialRecord, ...]:
    """Return which spooled results a study lacks, and nothing else has told it meanwhile.

    Args:
        spooled: read from a spool of the study, less what is still open there.
        known: every record that the database has of it.
    """
    attempts = settled_attempts(known)
    concluded = {
        canonical(r.config) for r in known if r.purpose == "search" and r.verdict in WORTH_KEEPING
    }
    return tuple(
        r
        for r in spooled
        if r.verdict in WORTH_KEEPING
        and r.attempt_id not in attempts
        and (r.purpose != "search" or canonical(r.config) not in concluded)
    )


def spool_words(
    spool: Spool,
    *,
    study: str,
    known: Sequence[TrialRecord],
    open_attempts: Collection[str | None],
    is_driven: bool,
) -> tuple[str, ...]:
    """Return what a person should know of a study's spool, a sentence for each thing.

    Args:
        spool: read after the database was.
        study: name of the study.
        known: every record that the database has of it.
        open_attempts: of trials that have not ended.
        is_driven: whether somebody is at it, who tells what waits, and may have begun and spooled a
            trial between the two reads.
    """
    contents = spool.look(known=settled_attempts(known))
    lines = list(contents.problems)
    waiting = [r for r in contents.records if r.attempt_id in open_attempts]
    rest = [r for r in contents.records if r.attempt_id not in open_attempts]
    if is_driven:
        newest = max((r.number for r in known), default=-1)
        rest = [r for r in rest if r.number <= newest]
    elif waiting:
        lines.append(
            f"{_results_of(waiting)} in {spool.path} and not yet in the database; "
            "resume the study to tell them"
        )
    if kept := kept_among(rest, known):
        lines.append(kept_words(kept, study=study, path=spool.path))
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
