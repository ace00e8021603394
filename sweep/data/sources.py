"""Owns reading texts row by row: JSON lines, JSON arrays, CSV, Parquet, a directory of them, the
hub.

Every row comes with where it stands, also one that cannot be read. No more than a row, or a few
thousand of Parquet, is in memory at a time. Knows nothing of what rows mean. pyarrow and datasets
are imported where they are needed alone.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from search_spaces.documents import exists, home_expanded, is_directory, open_file
from search_spaces.errors import EnvironmentFault, InputError, quote, words_of
from search_spaces.hub import is_hub_id
from sweep.data.kinds import Broken
from sweep.data.request import Place

_LINES, _JSON, _CSV, _PARQUET = "lines", "json", "csv", "parquet"
_ENDINGS = {
    ".jsonl": _LINES,
    ".ndjson": _LINES,
    ".json": _JSON,
    ".csv": _CSV,
    ".tsv": _CSV,
    ".parquet": _PARQUET,
}
_COMPRESSIONS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
_KNOWN = ".jsonl, .ndjson, .json, .csv, .tsv or .parquet, and .gz, .bz2 or .xz behind all but these"
_ROWS_AT_ONCE = 1024
"""Of Parquet and the hub."""
_CHUNK_BYTES = 2**20
_TRAIN = "train"


Read = tuple[Place, dict[str, Any] | Broken]


class Source(Protocol):
    """Texts that can be read once, or again. Real: `Files` and `Hub`."""

    name: str
    """As the person named them."""
    unit: str
    """What `done` and `total` count."""
    notes: tuple[str, ...]
    """What a person should know of how they are read."""

    @property
    def total(self) -> int:
        """Size of all of it."""
        ...

    def rows(self) -> Iterator[Read]:
        """Yield each row, with how much has been read in `done`."""
        ...

    @property
    def done(self) -> int:
        """How much the latest iterator has read."""
        ...


def is_on_hub(name: str) -> bool:
    """Return whether texts are on the hub: named like it, and nothing here has that name."""
    return (
        is_hub_id(name) and not exists(home_expanded(name), label=name) and _how(Path(name)) is None
    )


def text_files(name: str) -> list[tuple[str, Path]]:
    """Return the files of texts that are here, each with the name that a person would use.

    Raises:
        InputError: there is no such file or directory, or nothing in it can be read as texts.
        EnvironmentFault: it is there and cannot be read.
    """
    path = home_expanded(name)
    if not exists(path, label=name):
        raise InputError(f"{quote(name)}: no such file or directory, and no hub id (org/name)")
    if not is_directory(path, label=name):
        if _how(path) is None:
            raise InputError(f"{name}: its name must end in {_KNOWN}")
        return [(name, path)]
    try:
        found = sorted(file for file in _walked(path) if _how(file) is not None)
    except OSError as error:
        raise EnvironmentFault(f"{name}: cannot be read: {words_of(error)}") from error
    if not found:
        raise InputError(f"{name}: no file in this directory ends in {_KNOWN}")
    return [(str(Path(name) / file.relative_to(path)), file) for file in found]


def _walked(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory, without what is hidden."""
    for folder, folders, files in os.walk(directory, onerror=_raise):
        # In place: what is left out is not walked either.
        folders[:] = filter(_is_shown, folders)
        yield from (Path(folder, file) for file in files if _is_shown(file))


def _raise(error: OSError) -> None:
    raise error


def _is_shown(name: str) -> bool:
    return not name.startswith((".", "__"))


def _how(path: Path) -> str | None:
    """Return how a file is read, by its name; None for no texts."""
    name = path.name.lower()
    for ending in _COMPRESSIONS:
        if name.endswith(ending):
            how = _ENDINGS.get(Path(name.removesuffix(ending)).suffix)
            return None if how == _PARQUET else how
    return _ENDINGS.get(Path(name).suffix)


class Files:
    """Texts in files, one after another in the order of their names."""

    unit = "MB read"

    def __init__(self, name: str) -> None:
        self.name = name
        files = text_files(name)
        self._files, self.notes = _of_training(files, name)
        self._before = self._within = 0

    @property
    def total(self) -> int:
        """Megabytes of all files, as they lie on the disk."""
        return sum(path.stat().st_size for _, path in self._files) // 10**6

    @property
    def done(self) -> int:
        """Megabytes that have been read."""
        return (self._before + self._within) // 10**6

    def rows(self) -> Iterator[Read]:
        """Yield each row of each file.

        Raises:
            InputError: a file is not what its name says, from its first row on.
            EnvironmentFault: it cannot be read.
        """
        self._before = self._within = 0
        for label, path in self._files:
            try:
                with open_file(path, label=label) as raw:
                    yield from self._rows_of(raw, path, label)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise InputError(f"{label}: no such file") from error
            except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
                raise InputError(f"{label}: cannot be unpacked: {words_of(error)}") from error
            except OSError as error:
                raise EnvironmentFault(f"{label}: cannot be read: {words_of(error)}") from error
            self._before, self._within = self._before + path.stat().st_size, 0

    def _rows_of(self, raw: IO[bytes], path: Path, label: str) -> Iterator[Read]:
        how = _how(path)
        if how == _PARQUET:
            for line, values, share in _parquet_rows(raw, label):
                self._within = int(share * path.stat().st_size)
                yield Place(label, line), values
            return
        unpack = _COMPRESSIONS.get(path.suffix.lower())
        file = raw if unpack is None else unpack(raw)
        if how == _JSON:
            file = io.BufferedReader(file)
            how = _JSON if _is_array(file) else _LINES
        if how == _CSV:
            is_tabbed = ".tsv" in path.name.lower()
            rows = _csv_rows(file, label, delimiter="\t" if is_tabbed else ",")
        else:
            rows = _array_rows(file) if how == _JSON else _line_rows(file)
        for line, values in rows:
            self._within = raw.tell()
            yield Place(label, line), values


def _of_training(
    files: list[tuple[str, Path]], name: str
) -> tuple[list[tuple[str, Path]], tuple[str, ...]]:
    """Return the files of the training split, where a directory's names tell splits apart.

    They are told as datasets does it, so that no row of a test is trained on.
    """
    directory = home_expanded(name)
    if len(files) == 1 or not directory.is_dir():
        return files, ()
    from datasets.data_files import get_data_patterns, resolve_pattern

    patterns = get_data_patterns(str(directory))
    others = sorted(set(patterns) - {_TRAIN})
    if _TRAIN not in patterns or not others:
        return files, ()
    chosen = {
        Path(found).resolve()
        for pattern in patterns[_TRAIN]
        for found in resolve_pattern(pattern, str(directory))
    }
    kept = [(label, path) for label, path in files if path.resolve() in chosen]
    if not kept or len(kept) == len(files):
        return files, ()
    left = f"{len(files) - len(kept)} of its {len(files)} files are left out"
    return kept, (f"{name}: the split {_TRAIN} is read; {left}, as {', '.join(others)}",)


def _line_rows(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    """Yield the objects of JSON lines; a blank line is no row."""
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            yield number, _parsed(line)


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


def _is_array(file: io.BufferedReader) -> bool:
    """Return whether the first thing in a file opens a JSON array of objects."""
    start = file.peek(256)[:256].removeprefix(b"\xef\xbb\xbf").split()
    joined = b"".join(start)
    return joined.startswith(b"[") and not joined.startswith(b"[[")


class _Array:
    """A JSON array that is decoded item by item, a chunk of text at a time."""

    def __init__(self, file: IO[bytes]) -> None:
        self._chunks = io.TextIOWrapper(
            io.BufferedReader(file) if not isinstance(file, io.BufferedReader) else file,  # type: ignore[type-var]
            encoding="utf-8-sig",
            errors="surrogateescape",
            newline="",
        )
        self.text, self.at, self.line = "", 0, 1
        self.has_ended = False

    def more(self) -> bool:
        """Read on; return whether there was anything."""
        chunk = self._chunks.read(max(_CHUNK_BYTES, len(self.text) - self.at))
        self.text, self.at = self.text[self.at :] + chunk, 0
        self.has_ended = not chunk
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
            except json.JSONDecodeError:
                if not self.more():
                    raise
                continue
            self.line += self.text.count("\n", self.at, end)
            self.at = end
            return value


def _array_rows(file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    """Yield the objects of a JSON array, each with the line on which it begins.

    Behind an item that is not JSON nobody can tell where the next begins.
    """
    array = _Array(file)
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
            yield line, Broken(f"not JSON, so what follows is not read either: {words_of(error)}")
            return
        if not isinstance(value, dict):
            yield line, Broken(f"no JSON object, but {quote(value)}")
        elif _is_escaped(json.dumps(value, ensure_ascii=False)):
            yield line, Broken("not UTF-8")
        else:
            yield line, value


def _is_escaped(text: str) -> bool:
    """Return whether a text holds what stands for bytes that are no UTF-8."""
    return re.search("[\udc80-\udcff]", text) is not None


def _csv_rows(
    file: IO[bytes], label: str, *, delimiter: str
) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    """Yield the rows of CSV, each with the line on which it begins; the first names columns."""
    # A cell may be a book.
    csv.field_size_limit(2**31 - 1)
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[type-var]
    text = io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    header = next(reader, None)
    if header is None:
        return
    if len(set(header)) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise InputError(f"{label}: line 1: column {quote(twice)} is there twice")
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, Broken(f"not CSV: {error}")
            continue
        if cells:
            yield line, _row_of(cells, header)


def _row_of(cells: list[str], header: list[str]) -> dict[str, Any] | Broken:
    if len(cells) != len(header):
        return Broken(f"{len(cells)} cells, where the first line names {len(header)} columns")
    if any(map(_is_escaped, cells)):
        return Broken("not UTF-8")
    return dict(zip(header, cells, strict=True))


def _parquet_rows(
    file: IO[bytes], label: str
) -> Iterator[tuple[int, dict[str, Any] | Broken, float]]:
    """Yield the rows of Parquet with their numbers from 1, and the share of rows up to there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        count, number = max(table.metadata.num_rows, 1), 0
        for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE):
            for values in _values_of(batch):
                number += 1
                yield number, values, number / count
    except (pa.ArrowException, pa.ArrowInvalid) as error:
        raise InputError(f"{label}: not Parquet that can be read: {words_of(error)}") from error


def _values_of(batch: Any) -> Iterator[dict[str, Any] | Broken]:
    """Yield the rows of a batch of Arrow; where texts are no UTF-8, row by row."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield Broken("not UTF-8")


class Hub:
    """Texts on the hub, or in its cache here: the split ``train`` of its default configuration."""

    unit = "rows read"

    def __init__(self, name: str) -> None:
        self.name = name
        self._data = _loaded(name)
        self.done = 0
        self.notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """What datasets knows the content by."""
        return str(self._data._fingerprint)

    @property
    def total(self) -> int:
        """Rows of all of it."""
        return len(self._data)

    def rows(self) -> Iterator[Read]:
        """Yield each row."""
        self.done = 0
        for values in self._data:
            self.done += 1
            yield Place(self.name, self.done), values


def _loaded(name: str) -> Any:
    """Return a data set's training rows, mapped from the disk.

    Raises:
        InputError: the hub has no such data set, or none with such a split.
        EnvironmentFault: the hub cannot be reached and its cache does not hold it.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        return load_dataset(name, split=_TRAIN)
    except DatasetNotFoundError as error:
        raise InputError(
            f"{quote(name)}: neither a file or directory here nor a data set that the hub shows you"
        ) from error
    except (ValueError, TypeError) as error:
        raise InputError(f"{name}: {words_of(error)}") from error
    except Exception as error:
        # The hub's client, its HTTP library and datasets each raise errors of their own.
        raise EnvironmentFault(
            f"{name}: neither a file or directory here nor in the cache, and the hub cannot be "
            f"reached ({words_of(error)}): name a file, or fetch it where there is a network"
        ) from error


def source_of(name: str) -> Files | Hub:
    """Return the texts of a name: a file or directory that is here, else a data set of the hub."""
    return Hub(name) if is_on_hub(name) else Files(name)
