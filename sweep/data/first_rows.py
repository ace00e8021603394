"""The first rows of a dataset: their columns, and what kind of rows they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from search_spaces.errors import InputError
from search_spaces.texts import TextsKind
from sweep.data.files import text_files
from sweep.data.formats import Read, file_rows
from sweep.data.kinds import Broken, recognised
from sweep.data.request import BrokenRow, Question

if TYPE_CHECKING:
    from sweep.data.texts import TextsRequest

_ROWS_LOOKED_AT = 100
"""Whose columns tell what kind the rows are."""
_ROWS_MAX = 10_000
"""Of which one has to be readable."""


def first_rows(
    rows: Iterator[Read], asked: Question | TextsRequest
) -> tuple[list[Read], tuple[str, ...], TextsKind]:
    """Return as many rows as tell their kind, their columns, and that kind.

    Args:
        rows: of the dataset, which go on behind those that are returned.
        asked: what is to be read, and how.

    Raises:
        InputError: there are none, none of them can be read, or they are of no known kind.
    """
    source = asked.source
    seen: list[Read] = []
    columns: dict[str, None] = {}
    readable = 0
    for place, values in rows:
        seen.append((place, values))
        if isinstance(values, dict):
            readable += 1
            columns |= dict.fromkeys(map(str, values))
        if (columns and readable >= _ROWS_LOOKED_AT) or len(seen) == _ROWS_MAX:
            break
    if not seen:
        raise InputError(f"{source}: no rows in it")
    if not columns:
        place, values = seen[0]
        reason = values.reason if isinstance(values, Broken) else "an empty object"
        broken = BrokenRow(place.file, place.line, reason)
        raise InputError(all_broken(broken, len(seen), source, first=len(seen) == _ROWS_MAX))
    kind = recognised(
        tuple(columns), format=asked.format, text_column=asked.text_column, source=source
    )
    if kind == "text" and asked.completions_only:
        raise InputError(
            f"{source}: rows of one text have no completions of their own: leave "
            "data.completions_only out, or name another data.format"
        )
    return seen, tuple(columns), kind


def look_at(asked: TextsRequest) -> None:
    """Refuse a dataset in one file here whose first rows show that nothing can be trained on it.

    Takes milliseconds; whoever prepares it imports for seconds first. Raises as `first_rows`.
    """
    files = text_files(asked.source)
    if len(files) == 1:
        ((label, path),) = files
        first_rows(((place, row) for place, row, _ in file_rows(path, label)), asked)


def all_broken(row: BrokenRow, count: int, source: str, *, first: bool = False) -> str:
    """Return why there is nothing to train on, with a row that shows it.

    Args:
        row: the first that is broken.
        count: of rows that are broken.
        source: the dataset.
        first: whether no more than these were looked at.
    """
    which = f"{'the first' if first else 'all'} {count:,} rows are broken, the first"
    which = which if count > 1 else "its one row is broken"
    return f"{source}: {which}: {row.file}: line {row.line}: {row.reason}"
