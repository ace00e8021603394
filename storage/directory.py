"""What stands in a study's directory beside its database: whose it is, and results not yet told.

``study.json`` says whose the directory is: a database that was emptied, deleted or taken for
another no longer knows the study whose results stand here, and none is started anew beside them.
``spool.jsonl`` has each result, fsynced, before the database is told. ``outcome.json`` has what a
worker measured last, written before it answers: between the two a driver may die.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.errors import InputError, words_of
from qlora_sweep.storage import files
from qlora_sweep.storage.definition import Fingerprint, StudyDefinition
from qlora_sweep.storage.records import Attempt, Lost, Outcome, TrialRecord, Verdict
from qlora_sweep.storage.soundness import Soundness, left_out_words

STUDY = "study.json"
SPOOL = "spool.jsonl"
REPORT = "report.html"
HOST = "host.json"
"""Of the file that says on which machine a study is driven that was fetched from there."""
OUTCOME = "outcome.json"
"""Of the first worker's file."""
OUTCOMES = (OUTCOME, "outcome-[0-9].json", "outcome-[0-9][0-9].json")
"""Of all of them: each worker beside the first has its number in the name."""
OUTCOME_BYTES_MAX = 2**20
"""Far more than an outcome takes."""
LINE_BYTES_MAX = 2**22
"""Far more than a line of the spool takes."""
WORTH_KEEPING = frozenset(
    {Verdict.FITS, Verdict.OOM, Verdict.PRUNED_SLOW, Verdict.DIVERGED, Verdict.INEFFECTIVE}
)
"""What the device found out. The rest failed, or costs nothing to be judged anew."""


class StudyFile(BaseModel):
    """Whose a study's directory is."""

    model_config = ConfigDict(frozen=True)

    identity: str
    name: str
    database: str
    """Where the study was last driven, without a password."""
    definition: StudyDefinition
    """What it is about: a spool is taken over by it where no database is left."""
    environment: Fingerprint


def read_identity(directory: Path) -> StudyFile | None:
    """Return whose a study's directory is; None where nothing says so that can be read."""
    with suppress(OSError, ValueError):
        return StudyFile.model_validate_json(files.read_bytes(directory / STUDY))
    return None


def stranger_words(directory: Path, study: str, identity: str | None, database: str) -> str:
    """Return what is said where a study's directory is that of another study; "" where not.

    Args:
        directory: of the study.
        study: its name.
        identity: of the database's study of that name; None where it has none.
        database: that was asked.
    """
    beside = read_identity(directory)
    if beside is None or beside.identity == identity:
        return ""
    of = "of another study"
    if identity is None:
        of = "of a study that is not there any more"
    spool = directory / SPOOL
    over = ""
    if spool.exists():
        over = f" (--from {shlex.quote(str(spool))} takes its results over)"
    return (
        f"study '{study}' in {database}: the files in {directory} are {of}, driven in "
        f"{beside.database}: put that database back or name it with --storage, take another name "
        f"with --study{over}, or move or remove {directory}"
    )


def note_identity(directory: Path, ours: StudyFile) -> None:
    """Write whose the directory is, unless another process was faster.

    Raises:
        InputError: since anybody looked it has become another study's.
        EnvironmentFault: it cannot be written; a healthy database does not need it.
    """
    path = directory / STUDY
    data = json.dumps(ours.model_dump(mode="json")).encode()
    with files.writing(path):
        files.make_directory(directory)
        # Of two drivers at once one is first, and the other reads whose it is.
        with suppress(FileExistsError):
            files.create(path, data)
        if words := stranger_words(directory, ours.name, ours.identity, ours.database):
            raise InputError(words)
        if read_identity(directory) != ours:
            files.replace(path, data)


class SpoolLine(BaseModel):
    """One line of a spool: a result, and the identity of the study that it is of."""

    study: str
    record: TrialRecord


@dataclass(frozen=True)
class Spooled:
    """What stands in a spool."""

    records: tuple[TrialRecord, ...] = ()
    """Of one study, in the order they were spooled; of one attempt the last."""
    problems: tuple[str, ...] = ()
    """What could not be read, in words that name the file."""


@dataclass(frozen=True)
class Spool:
    """The results of one study, a line each; a name's earlier study may have left lines, too."""

    path: Path
    study_id: str
    soundness: Soundness | None = None
    """Of the study, for reading; None checks no result against it."""

    def append(self, record: TrialRecord) -> None:
        """Write one result and wait until the disk has it.

        Raises:
            EnvironmentFault: the disk is full or the directory is not to be written.
        """
        entry = SpoolLine(study=self.study_id, record=record)
        line = json.dumps(entry.model_dump(mode="json")).encode() + b"\n"
        with files.writing(self.path, "the result to "), files.open_append(self.path) as file:
            # A driver that lost its lease may still be writing here.
            fcntl.flock(file, fcntl.LOCK_EX)
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - LINE_BYTES_MAX))
            last = file.read().rpartition(b"\n")[2]
            try:
                # Whole but for its end, as `read` takes it.
                SpoolLine.model_validate_json(last)
                line = b"\n" + line
            except ValidationError:
                # What a driver that died while writing left is cut.
                end -= len(last)
                os.ftruncate(file.fileno(), end)
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[os.write(file.fileno(), rest) :]
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), end)
                raise

    def read(self, *, known: Collection[str | None] = ()) -> Spooled:
        """Return what stands in it. Never raises.

        Args:
            known: attempts whose results are known elsewhere: they are left out.
        """
        lines, problems = spooled_lines(self.path)
        records: dict[str | None, TrialRecord] = {}
        left_out = dict[int, str]()
        for line in lines:
            if line.study == self.study_id and line.record.attempt_id not in known:
                fault = self.soundness and self.soundness.fault_of_record(line.record)
                if fault:
                    left_out[line.record.number] = fault
                    continue
                # Popped first, so that the last of an attempt stands in its own place.
                records.pop(line.record.attempt_id, None)
                records[line.record.attempt_id] = line.record
        words = left_out_words(left_out, of=f"the spool {self.path}")
        return Spooled(tuple(records.values()), problems + words)


def spooled_lines(path: Path) -> tuple[list[SpoolLine], tuple[str, ...]]:
    """Return the lines of a spool, of any study, and in words what cannot be read. Never raises.

    A last line that is torn is left out: somebody is writing it, or died meanwhile.
    """
    known = list[SpoolLine]()
    unreadable = 0
    try:
        with files.open_reading(path) as file:
            while line := file.readline(LINE_BYTES_MAX):
                try:
                    known.append(SpoolLine.model_validate_json(line))
                except ValidationError:
                    unreadable += line.endswith(b"\n") and bool(line.strip())
    except FileNotFoundError:
        return [], ()
    except OSError as error:
        return [], (f"the spool {path} cannot be read: {error.strerror or words_of(error)}",)
    if not unreadable:
        return known, ()
    lines = f"{unreadable} lines"
    if unreadable == 1:
        lines = "1 line"
    return known, (f"{lines} of the spool {path} cannot be read",)


def settled_attempts(known: Iterable[TrialRecord]) -> frozenset[str | None]:
    """Return the attempts whose results the database has: that one was lost is no result."""
    return frozenset(r.attempt_id for r in known if not isinstance(r.outcome, Lost))


def kept_among(
    spooled: Iterable[TrialRecord], known: Sequence[TrialRecord]
) -> tuple[TrialRecord, ...]:
    """Return which spooled results a study lacks, and nothing else has told it meanwhile.

    Args:
        spooled: read from a spool of the study, less what is still open there.
        known: every record that the database has of it.
    """
    attempts = settled_attempts(known)
    concluded = set()
    for record in known:
        if record.purpose == "search" and record.verdict in WORTH_KEEPING:
            concluded.add(canonical(record.config))
    kept = []
    for record in spooled:
        if record.verdict not in WORTH_KEEPING or record.attempt_id in attempts:
            continue
        if record.purpose != "search" or canonical(record.config) not in concluded:
            kept.append(record)
    return tuple(kept)


def spool_words(
    spool: Spool, *, study: str, known: Sequence[TrialRecord], running: Iterable[TrialRecord]
) -> tuple[str, ...]:
    """Return what a person should know of the spool of a study that is not driven.

    Args:
        spool: read after the database was.
        study: name of the study.
        known: every record that the database has of it.
        running: trials that have not ended.
    """
    spooled = spool.read(known=settled_attempts(known))
    lines = list(spooled.problems)
    open_attempts = {trial.attempt_id for trial in running}
    waiting = []
    rest = []
    for record in spooled.records:
        if record.attempt_id in open_attempts:
            waiting.append(record)
        else:
            rest.append(record)
    if waiting:
        lines.append(f"{_results_of(waiting)} in {spool.path} alone; resume the study to tell them")
    kept = kept_among(rest, known)
    if kept:
        lines.append(kept_words(kept, study=study, path=spool.path))
    return tuple(lines)


def kept_words(kept: Sequence[TrialRecord], *, study: str, path: Path) -> str:
    """Return that results are in the spool alone, and the command that takes them over."""
    options = shlex.join(["--study", study, "--from", str(path)])
    return (
        f"{_results_of(kept)} kept in {path} alone: in the database those trials ended otherwise "
        f"or are gone; take them over with `sweep run SPACE {options}`"
    )


def _results_of(records: Sequence[TrialRecord]) -> str:
    named = ", ".join(f"{r.number} ({r.verdict})" for r in sorted(records, key=lambda r: r.number))
    if len(records) == 1:
        return f"the result of trial {named} is"
    return f"results of trials {named} are"


class Left(BaseModel):
    """What a worker left: the outcome of the attempt that it ran last."""

    model_config = ConfigDict(frozen=True)

    attempt: Attempt
    config: TrialConfig
    outcome: Outcome


@dataclass(frozen=True)
class OutcomeFile:
    """The file of one worker, which runs one attempt after another: it holds the last one's.

    The one before was told by the time the next begins, or spooled by the driver that found it.
    """

    path: Path

    def write(self, attempt: Attempt, config: TrialConfig, outcome: Outcome) -> None:
        """Put the outcome in the place of the last one, and wait until the disk has it.

        Raises:
            EnvironmentFault: it cannot be written; the last one is then still there.
        """
        left = Left(attempt=attempt, config=config, outcome=outcome)
        with files.writing(self.path, "the outcome to "):
            files.replace(self.path, json.dumps(left.model_dump(mode="json")).encode())

    def take(self, attempt: str, config: TrialConfig) -> Outcome | None:
        """Return the outcome of this very attempt; None where it, or its configuration, is another.

        It stays where it is until the next one: the process that took it may die before it is told.
        """
        left = self.read()
        if left is None or (left.attempt.id, left.config) != (attempt, config):
            return None
        return left.outcome

    def read(self) -> Left | None:
        """Return what was left last; None where nothing, or something else, has that name."""
        with suppress(OSError), files.open_reading(self.path) as file:
            return _parsed(file.read(OUTCOME_BYTES_MAX + 1))
        return None


def left_outcomes(directory: Path, *, study: str) -> Iterator[Left]:
    """Yield what the workers of a study left in its directory.

    Args:
        directory: of the study.
        study: its identity.
    """
    for pattern in OUTCOMES:
        for path in sorted(directory.glob(pattern)):
            left = OutcomeFile(path).read()
            if left is not None and left.attempt.study == study:
                yield left


def beside_log(log: Path) -> OutcomeFile:
    """Return the file of the worker that prints into ``worker.log``, ``worker-1.log``, ..."""
    return OutcomeFile(log.absolute().with_name(log.stem.replace("worker", "outcome") + ".json"))


def keep_outcomes(directory: Path, found: Iterable[bytes]) -> None:
    """Put files that workers of a study left on other machines where `left_outcomes` finds them.

    Args:
        directory: of the study.
        found: the files' contents; those of another study are left out.

    Raises:
        EnvironmentFault: one cannot be written.
    """
    ours = read_identity(directory)
    if ours is None:
        return
    number = 0
    for data in found:
        left = _parsed(data)
        if left is None or left.attempt.study != ours.identity:
            continue
        path = directory / f"outcome-{number}.json"
        with files.writing(path, "the outcome to "):
            files.replace(path, data)
        number += 1


def _parsed(data: bytes) -> Left | None:
    if len(data) > OUTCOME_BYTES_MAX:
        return None
    with suppress(ValueError):
        return Left.model_validate_json(data)
    return None
