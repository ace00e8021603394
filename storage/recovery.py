"""Owns what a study goes on from after a crash: spooled results, configurations to try again.

Knows nothing of databases.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from storage.records import RETRYABLE, TrialRecord, Verdict

MAX_ATTEMPTS = 3
"""The first try and two more."""


@dataclass(frozen=True)
class Spool:
    """The file that a result reaches first: one fsynced line per trial, read after a crash.

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
        named = {"study": self.study_id, "attempt": record.attempt_id, "number": record.number}
        line = json.dumps({**named, "record": record.to_json()})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                _cut_torn_line(file)
                file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write the result to {self.path}: {error.strerror}"
            ) from error

    def read(self) -> tuple[TrialRecord, ...]:
        """Return this study's results in the order they were spooled; a torn line is none."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise EnvironmentFault(
                f"cannot read the spool {self.path}: {error.strerror}"
            ) from error
        return tuple(record for line in lines if (record := self._parse(line)) is not None)

    def _parse(self, line: bytes) -> TrialRecord | None:
        try:
            entry = json.loads(line)
            is_ours = entry["study"] == self.study_id
            return TrialRecord.from_json(entry["record"]) if is_ours else None
        except (ValueError, KeyError, TypeError):
            return None


def _cut_torn_line(file: IO[bytes]) -> None:
    """Cut what a driver that died while writing left, so that the next result has its own line."""
    file.seek(0)
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)


def attempts(records: Iterable[TrialRecord], config: TrialConfig, *, since: int = 0) -> int:
    """Return how often ``config`` was tried and came to nothing that says something about it.

    What somebody interrupted is no attempt, however often that happens.

    Args:
        records: of one study.
        config: what was tried.
        since: number of the first trial that counts. A crash before it may have had a cause that
            is gone by now; a trial that its driver did not outlive counts for ever, or a
            configuration that brings the machine down would be the first thing every time.
    """
    return sum(
        record.verdict in RETRYABLE
        and not record.is_interrupted
        and record.config == config
        and (record.number >= since or _took_its_driver_along(record))
        for record in records
    )


def _took_its_driver_along(record: TrialRecord) -> bool:
    """Whether nobody was left to say how long a trial had run."""
    return record.verdict is Verdict.LOST and record.device_seconds == 0.0


def to_retry(records: Iterable[TrialRecord], *, since: int = 0) -> tuple[TrialConfig, ...]:
    """Return what was lost, crashed or timed out fewer than three times and never concluded.

    In the order in which they were first tried.

    Args:
        records: of one study.
        since: number of the first trial of this run: an earlier run's failures are tried anew.
    """
    known = tuple(records)
    concluded = {record.config.key() for record in known if record.verdict not in RETRYABLE}
    open_configs = {
        record.config.key(): record.config
        for record in known
        if record.config.key() not in concluded
    }
    return tuple(
        config
        for config in open_configs.values()
        if attempts(known, config, since=since) < MAX_ATTEMPTS
    )


def next_number(records: Iterable[TrialRecord]) -> int:
    """Return the least number that the next trial can have: where a run of the driver begins."""
    return max((record.number + 1 for record in records), default=0)
