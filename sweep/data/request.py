"""What is asked of the texts' child, and by what the answer is known again.

Light to import, as the parent does.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from search_spaces.documents import open_file

LAYOUT = 1
"""Of the directory of prepared texts; a directory of another is prepared again."""
SUMMARY, BROKEN, TOKENS = "texts.json", "broken.jsonl", "tokens"
LENGTHS, LOSS_LENGTHS = "lengths.npy", "loss_lengths.npy"
BROKEN_KEPT = 10_000
"""Broken rows that are named; further ones are counted."""

Progress = Callable[[str, int, int], None]
"""Hears what is done, how much of it, and of how much."""


@dataclass(frozen=True)
class Place:
    """Where a row stands."""

    file: str
    """As the person would name it."""
    line: int
    """From 1; of Parquet and the hub the row's number."""


@dataclass(frozen=True)
class BrokenRow:
    """A row that cannot be trained on."""

    file: str
    line: int
    reason: str


@dataclass(frozen=True)
class Question:
    """What texts the child is to prepare, in plain values."""

    source: str
    format: str
    text_column: str | None
    completions_only: bool
    tokenizer: str
    """As it was named."""
    tokenizer_directory: str
    tokenizer_digest: str
    home: str
    """Directory that the prepared texts are put into, by fingerprint."""
    content: str | None
    """Digest of the content; None where only the child can tell."""
    seen: list[list[int]] | None = None
    """What `seen` said before the content was looked at; None where nobody asked."""

    def fingerprint(self, content: str) -> str:
        """Return what tells these tokens from any others, as a name of a directory.

        Args:
            content: digest of the texts' content.
        """
        options = [self.format, self.text_column, self.completions_only]
        told = [LAYOUT, content, options, self.tokenizer_digest]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def is_whole(directory: Path) -> bool:
    """Return whether all that there is of prepared texts is in a directory."""
    names = (SUMMARY, BROKEN, TOKENS, LENGTHS, LOSS_LENGTHS)
    return all((directory / name).exists() for name in names)


def seen(files: Iterable[tuple[str, Path]]) -> list[list[int]]:
    """Return size and time of each file, by which it is known that somebody wrote to one."""
    found = [path.stat() for _, path in files]
    return [[each.st_size, each.st_mtime_ns] for each in found]


def content_of(files: Iterable[tuple[str, Path]], *, on_progress: Progress) -> str:
    """Return a digest of files and the order they are read in, blind to where they lie.

    Args:
        files: each with what of its name says how it is read.
        on_progress: hears how much has been looked at.

    Raises:
        InputError: one is no file.
        OSError: one cannot be read.
    """
    found = list(files)
    total, done = sum(path.stat().st_size for _, path in found) // 10**6, 0
    hashed = hashlib.sha256()
    for name, path in found:
        on_progress("MB looked at", done // 10**6, total)
        with open_file(path, label=str(path)) as file:
            hashed.update(f"{name}\0".encode(errors="surrogateescape"))
            hashed.update(hashlib.file_digest(cast(io.BufferedReader, file), "sha256").digest())
            done += file.tell()
    return hashed.hexdigest()
