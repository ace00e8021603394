"""What is in a file of texts, row by row: JSON lines, JSON arrays, CSV and Parquet.

Every row comes with the line on which it begins, also one that cannot be read. No more than a row,
or a thousand of Parquet, is in memory at a time. The readers of datasets refuse a whole block where
one line of it is wrong, and name none. pyarrow is imported where it is needed alone.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from search_spaces.documents import open_file
from search_spaces.errors import EnvironmentFault, InputError, quote, words_of
from sweep.data.files import CSV, JSON, PARQUET, how_read
from sweep.data.kinds import Broken
from sweep.data.request import Place

Numbered = tuple[int, dict[str, Any] | Broken]
"""A line from 1, and its row."""
Read = tuple[Place, dict[str, Any] | Broken]
_UNPACKERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
_ROWS_AT_ONCE = 1024
"""Of Parquet."""
_CHUNK_BYTES = 2**20
_LINE_MAX, _CELL_MAX = 2**26, 2**24
"""Bytes of a line and characters of a cell, which may be a book; what has no end is no longer."""
_ESCAPE = 16
"""Characters at the end of a chunk that may be the beginning of something else."""
_DELIMITERS = (",", ";", "\t", "|")


def file_rows(path: Path, label: str) -> Iterator[tuple[Place, dict[str, Any] | Broken, int]]:
    """Yield each row of a file, and how many bytes of it were read up to there.

    Raises:
        InputError: it is not what its name says, from its first row on.
        EnvironmentFault: it cannot be read.
    """
    try:
        with open_file(path, label=label) as file:
            raw = cast(io.BufferedReader, file)
            if how_read(path) == PARQUET:
                size = path.stat().st_size
                for line, values, share in parquet_rows(raw, label):
                    yield Place(label, line), values, int(share * size)
                return
            unpack = _UNPACKERS.get(path.suffix.lower())
            text = raw if unpack is None else io.BufferedReader(unpack(raw))
            for line, values in _text_rows(text, path, label):
                yield Place(label, line), values, raw.tell()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"{label}: no such file") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InputError(f"{label}: cannot be unpacked: {words_of(error)}") from error
    except OSError as error:
        raise EnvironmentFault(f"{label}: cannot be read: {words_of(error)}") from error


def _text_rows(file: io.BufferedReader, path: Path, label: str) -> Iterator[Numbered]:
    how = how_read(path)
    if file.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{label}: is UTF-16: save it as UTF-8")
    if how == CSV:
        return csv_rows(file, label, delimiter="\t" if ".tsv" in path.name.lower() else ",")
    return array_rows(file) if how == JSON and is_array(file) else line_rows(file)


def line_rows(file: io.BufferedReader) -> Iterator[Numbered]:
    """Yield the objects of JSON lines; a blank line is no row."""
    number = 0
    while line := file.readline(_LINE_MAX):
        number += 1
        if len(line) == _LINE_MAX and not line.endswith(b"\n"):
            _skip_line(file)
            yield number, Broken(f"a line of more than {_LINE_MAX:,} bytes")
            continue
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, _parsed(line)


def _skip_line(file: io.BufferedReader) -> None:
    """Go to where the next line begins."""
    while (rest := file.readline(_CHUNK_BYTES)) and not rest.endswith(b"\n"):
        pass


def _parsed(line: bytes) -> dict[str, Any] | Broken:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return Broken(f"not UTF-8: byte {error.start + 1} of the line is wrong")
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        return Broken(f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Broken(f"not JSON: {words_of(error)}")
    return values if isinstance(values, dict) else Broken(f"no JSON object, but {quote(values)}")


def is_array(file: io.BufferedReader) -> bool:
    """Return whether the first thing in a file opens a JSON array."""
    return file.peek(256).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


class _Array:
    """A JSON array that is decoded item by item, a chunk of text at a time."""

    def __init__(self, chunks: io.TextIOWrapper) -> None:
        self._chunks = chunks
        self.text, self.at, self.line = "", 0, 1

    def more(self) -> bool:
        """Read on; return whether there was anything."""
        chunk = self._chunks.read(max(_CHUNK_BYTES, len(self.text) - self.at))
        self.text, self.at = self.text[self.at :] + chunk, 0
        return bool(chunk)

    def skip(self, characters: str) -> str:
        """Go to the next character that is none of these, and return it; empty at the end."""
        while True:
            start = self.at
            while self.at < len(self.text) and self.text[self.at] in characters:
                self.at += 1
            self.line += self.text.count("\n", start, self.at)
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def item(self) -> Any:
        """Return the item that begins here. Raises ValueError where it is not JSON."""
        decoder = json.JSONDecoder()
        while True:
            try:
                value, end = decoder.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if not self._may_be_cut(error) or not self.more():
                    raise
                continue
            self.line += self.text.count("\n", self.at, end)
            self.at = end
            return value

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Return whether an item may be JSON once more of it is read."""
        is_at_end = error.pos >= len(self.text) - _ESCAPE or error.msg.startswith("Unterminated")
        return is_at_end and len(self.text) - self.at < _LINE_MAX


def array_rows(file: io.BufferedReader) -> Iterator[Numbered]:
    """Yield the objects of a JSON array, each with the line on which it begins.

    Behind an item that is not JSON nobody can tell where the next begins.
    """
    with _text_of(file) as text:
        array = _Array(text)
        array.skip(" \t\r\n")
        array.at += 1
        while (begun := array.skip(" \t\r\n,")) != "]":
            line = array.line
            if not begun:
                yield line, Broken("not JSON: the array has no end")
                return
            try:
                value = array.item()
            except (ValueError, RecursionError) as error:
                # Its line and column would be of the chunk.
                words = error.msg if isinstance(error, json.JSONDecodeError) else words_of(error)
                yield line, Broken(f"not JSON, so what follows is not read either: {words}")
                return
            yield line, _item(value)
        array.at += 1
        if array.skip(" \t\r\n"):
            yield array.line, Broken("not JSON: what follows the array is not read")


def _item(value: Any) -> dict[str, Any] | Broken:
    if not isinstance(value, dict):
        return Broken(f"no JSON object, but {quote(value)}")
    is_text = not _is_escaped(json.dumps(value, ensure_ascii=False))
    return value if is_text else Broken("not UTF-8")


def _text_of(file: io.BufferedReader) -> io.TextIOWrapper:
    """Return what reads a file as text, in which bytes that are none are marked."""
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")


def _is_escaped(text: str) -> bool:
    """Return whether a text holds what stands for bytes that are no UTF-8."""
    return re.search("[\udc80-\udcff]", text) is not None


def csv_rows(file: io.BufferedReader, label: str, *, delimiter: str) -> Iterator[Numbered]:
    """Yield the rows of CSV, each with the line on which it begins; the first names columns.

    Args:
        file: whose cells are quoted by ``"``.
        label: what a person calls it.
        delimiter: of cells, unless the first line has others alone.
    """
    csv.field_size_limit(_CELL_MAX)
    delimiter = _delimiter(file, delimiter)
    with _text_of(file) as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        header = next(reader, [])
        twice = [name for name in header if header.count(name) > 1]
        if twice:
            raise InputError(f"{label}: line 1: column {quote(twice[0])} is there twice")
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield line, Broken(_of_csv(error))
                continue
            if cells:
                yield line, _row_of(cells, header)


def _delimiter(file: io.BufferedReader, expected: str) -> str:
    """Return what stands between the names of columns: in many countries it is no comma."""
    first = file.peek(_CHUNK_BYTES).splitlines()[:1]
    unquoted = re.sub(b'"[^"]*"', b"", first[0]).decode(errors="replace") if first else ""
    found = {mark: unquoted.count(mark) for mark in (expected, *_DELIMITERS)}
    return expected if found[expected] else max(found, key=lambda mark: found[mark])


def _of_csv(error: csv.Error) -> str:
    if str(error) == "unexpected end of data":
        return "not CSV: a quote is never closed, so that nothing behind it is read"
    return f"not CSV: {error}"


def _row_of(cells: list[str], header: list[str]) -> dict[str, Any] | Broken:
    if len(cells) != len(header):
        return Broken(f"{len(cells)} cells, where the first line names {len(header)} columns")
    if any(map(_is_escaped, cells)):
        return Broken("not UTF-8")
    return dict(zip(header, cells, strict=True))


def parquet_rows(
    file: IO[bytes], label: str
) -> Iterator[tuple[int, dict[str, Any] | Broken, float]]:
    """Yield the rows of Parquet with their numbers from 1, and the share of rows up to there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Without a buffer whole columns of a row group are read, and a file may be one group.
        table = pq.ParquetFile(file, pre_buffer=False, buffer_size=_CHUNK_BYTES)
        count, number = max(table.metadata.num_rows, 1), 0
        for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE):
            for values in values_of(batch):
                number += 1
                yield number, values, number / count
    except (pa.ArrowException, OSError) as error:
        # What is broken in a file is an error of the system's kind to pyarrow, without its number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(f"{label}: not Parquet that can be read: {words_of(error)}") from error


def values_of(batch: Any) -> Iterator[dict[str, Any] | Broken]:
    """Yield the rows of a batch of Arrow; where texts are no UTF-8, row by row."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield Broken("not UTF-8")
