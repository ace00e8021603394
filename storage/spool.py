"""Owns the file that a result reaches first: one fsynced line per trial, read after a crash.

Nothing in it is ever dropped, and nothing that stands in it can stop a study: what cannot be read
is said. Knows nothing of databases.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from search_spaces.errors import EnvironmentFault, words_of
from storage.files import open_append, open_reading, read_end
from storage.records import TrialRecord

NAME = "spool.jsonl"
"""Of the file, in the study's directory."""
LINE_BYTES_MAX = 4 * 1024 * 1024
"""Far more than a result takes."""
BYTES_READ_MAX = 256 * 1024 * 1024
"""Of the end of the file: a hundred thousand results."""

_HEAD = re.compile(rb'\{"study": "[^"\\]*", "attempt": "([^"\\]+)", ')
"""How a line begins, so that one whose result is known elsewhere need not be read to its end."""


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
        """Write one result and wait until the disk has it. Takes the same time however long it is.

        Raises:
            EnvironmentFault: the disk is full or the directory is not to be written.
        """
        named = {"study": self.study_id, "attempt": record.attempt_id, "number": record.number}
        line = json.dumps({**named, "record": record.to_json()}).encode() + b"\n"
        try:
            with open_append(self.path) as file:
                _append_whole(file, line)
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write the result to {self.path}: {error.strerror or words_of(error)}"
            ) from error

    def read(self) -> tuple[TrialRecord, ...]:
        """Return this study's results in the order they were spooled; a torn line is none."""
        return self.look().records

    def look(self, *, known: Container[str] = frozenset()) -> Contents:
        """Return what stands in it. Never raises.

        Args:
            known: identities of attempts whose results are known elsewhere: they are left out.
        """
        records: dict[str | None, TrialRecord] = {}
        unreadable, first_reason, problems = 0, "", list[str]()
        try:
            for line in _lines(self.path, problems):
                head = _HEAD.match(line)
                if head is not None and head[1].decode(errors="replace") in known:
                    continue
                try:
                    _, record = _parse(line, self.study_id)
                except _UnreadableError as reason:
                    unreadable, first_reason = unreadable + 1, first_reason or str(reason)
                    continue
                if record is not None and record.attempt_id not in known:
                    # Popped first, so that the last of an attempt stands in its own place.
                    records.pop(record.attempt_id, None)
                    records[record.attempt_id] = record
        except FileNotFoundError:
            return Contents()
        except OSError as error:
            problems.append(f"the spool {self.path} cannot be read: {_reason(error)}")
        if unreadable:
            lines = "1 line" if unreadable == 1 else f"{unreadable} lines"
            problems.append(f"{lines} of the spool {self.path} cannot be read ({first_reason})")
        return Contents(tuple(records.values()), tuple(problems))


def newest_study(path: Path) -> str | None:
    """Return the identity of the study that a spool's last readable line is of. Never raises."""
    try:
        tail = read_end(path, count=LINE_BYTES_MAX)
    except OSError:
        return None
    for line in reversed(tail.splitlines()):
        with contextlib.suppress(_UnreadableError):
            return _parse(line, "")[0]
    return None


class _UnreadableError(Exception):
    """A line that is no result, with the reason in a few words."""


def _parse(line: bytes, study_id: str) -> tuple[str, TrialRecord | None]:
    """Return which study a line is of, and its result where that is ours.

    Raises:
        _UnreadableError: it is none.
    """
    if len(line) > LINE_BYTES_MAX:
        raise _UnreadableError(f"longer than {LINE_BYTES_MAX:,} bytes")
    try:
        entry: Any = json.loads(line)
        study = entry["study"]
        if not isinstance(study, str):
            raise TypeError
        if study != study_id:
            return study, None
        return study, TrialRecord.from_json(entry["record"])
    except ValidationError:
        raise _UnreadableError("perhaps of a later version of sweep") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _UnreadableError("no result") from None


def _lines(path: Path, problems: list[str]) -> Iterator[bytes]:
    """Yield the whole lines of the file, one beyond the limit cut to little more than that.

    The last one is left out where it has no end: somebody is writing it, or died while he did.
    """
    with open_reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > BYTES_READ_MAX:
            problems.append(
                f"the spool {path} is longer than {BYTES_READ_MAX:,} bytes: only its end is read"
            )
            file.seek(size - BYTES_READ_MAX)
            file.readline()
        while line := file.readline(LINE_BYTES_MAX + 1):
            if line.endswith(b"\n"):
                if line.strip():
                    yield line
            elif len(line) > LINE_BYTES_MAX:
                while (rest := file.readline(LINE_BYTES_MAX)) and not rest.endswith(b"\n"):
                    pass
                yield line
            elif _is_whole(line):
                yield line


def _is_whole(line: bytes) -> bool:
    """Whether a last line without an end was written to its end all the same."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _reason(error: OSError) -> str:
    return error.strerror or words_of(error)


def _append_whole(file: IO[bytes], line: bytes) -> None:
    """Write a line of its own after what is there, all of it or nothing."""
    end = os.fstat(file.fileno()).st_size
    kept, separator = _end_of_lines(file, end)
    os.ftruncate(file.fileno(), kept)
    try:
        rest = memoryview(separator + line)
        while rest:
            rest = rest[os.write(file.fileno(), rest) :]
        os.fsync(file.fileno())
    except OSError:
        os.ftruncate(file.fileno(), kept)
        raise


def _end_of_lines(file: IO[bytes], end: int) -> tuple[int, bytes]:
    """Return how much of the file to keep, and what to write before the next line.

    What a driver that died while writing left is cut. A last line that only lacks its end is kept,
    and so is what is longer than any line: whatever that is, it was not torn.
    """
    start = max(0, end - LINE_BYTES_MAX)
    last = _pread(file, max(start, end - 1), end)
    if last in (b"", b"\n"):
        return end, b""
    tail = _pread(file, start, end)
    newline = tail.rfind(b"\n")
    if newline < 0 and start > 0:
        return end, b"\n"
    torn = tail[newline + 1 :]
    return (end, b"\n") if _is_whole(torn) else (end - len(torn), b"")


def _pread(file: IO[bytes], start: int, end: int) -> bytes:
    pieces = []
    while start < end and (piece := os.pread(file.fileno(), end - start, start)):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)
