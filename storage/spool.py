"""Owns the file that a result reaches first: one fsynced line per trial, read after a crash.

Knows nothing of databases.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from search_spaces.errors import EnvironmentFault
from storage.records import TrialRecord


@dataclass(frozen=True)
class Spooled:
    """One result as it was spooled."""

    record: TrialRecord
    cost: float | None


@dataclass(frozen=True)
class Spool:
    """The spool of one study.

    A study is known by an identifier rather than its name, so that lines of an earlier, deleted
    study of the same name are never taken for results of this one.
    """

    path: Path
    study_id: str

    def append(self, record: TrialRecord, *, cost: float | None) -> None:
        """Write one result and wait until the disk has it.

        Raises:
            EnvironmentFault: the disk is full or the directory is not to be written.
        """
        line = json.dumps({"study": self.study_id, "cost": cost, "record": record.to_json()})
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

    def read(self) -> tuple[Spooled, ...]:
        """Return this study's results in the order they were spooled; a torn line is none."""
        try:
            lines = self.path.read_bytes().splitlines()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise EnvironmentFault(
                f"cannot read the spool {self.path}: {error.strerror}"
            ) from error
        return tuple(spooled for line in lines if (spooled := self._parse(line)) is not None)

    def _parse(self, line: bytes) -> Spooled | None:
        try:
            entry = json.loads(line)
            if entry["study"] != self.study_id:
                return None
            return Spooled(TrialRecord.from_json(entry["record"]), entry["cost"])
        except (ValueError, KeyError, TypeError):
            return None


def _cut_torn_line(file: IO[bytes]) -> None:
    """Cut what a driver that died while writing left, so that the next result has its own line."""
    file.seek(0)
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)
    file.seek(0, os.SEEK_END)
