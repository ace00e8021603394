"""The files of a dataset, and the rows in them as they are written.

A `DatasetSource` yields rows with their places. A row that cannot be read is a `Broken` with its
reason, and comes with its place as every other does. datasets and pyarrow are imported where they
are needed.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import errno
import glob
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

LINE_BYTES_MAX = 2**26
"""Of JSON lines; what has no line ends is not read as a whole."""
ARRAY_BYTES_MAX = 2**29
"""Of a JSON array, which is read as a whole."""

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_BUILDERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
"""What datasets reads files with, by their ending."""
_README = "README.md"
"""Of a directory: may say, as on the hub, which files are its splits."""
_UNPACKERS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
_PACKED_BEGINNINGS = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz"}
"""How compressed files begin, whatever they are called."""
_READ = (
    ".jsonl, .ndjson, .json, .csv, .tsv (with .gz, .bz2 or .xz behind it, where it is compressed) "
    'or .parquet; of plain texts, write each as a line {"text": ...} of a .jsonl'
)
_NO_HUBS = (".gz", ".bz2", ".xz", ".arrow", ".md", ".pdf", ".tar", ".txt", ".xlsx", ".xml", ".zip")
"""Endings that files have and datasets of the hub do not, of formats that are not read."""
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_SAVED = (("state.json", "dataset_info.json"), ("dataset_dict.json",))
"""What is in a directory that ``save_to_disk`` of datasets left, of one split or of several."""
_TRAIN = "train"
_IMAGES = ("image", "images")
"""Columns by which TRL tells a dataset of images."""


class RowsError(Exception):
    """A dataset cannot be used; the message says why."""


class Broken(Exception):  # noqa: N818 - a value of a row, and raised on the way to it
    """Why a row cannot be trained on."""

    @property
    def reason(self) -> str:
        """That in words."""
        return str(self)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands."""

    file: str
    """As the person would name it."""
    line: int
    """From 1; of a JSON array, Parquet, a saved dataset and the hub the row's number."""


Read = tuple[Place, dict[str, Any] | Broken]


def is_on_hub(name: str) -> bool:
    """Return whether a dataset is the hub's: named like it, and not like a file that is to be here.

    Where there is a directory of the organization's name, what is missing is missing in it.
    """
    path = _path(name)
    is_file = ending(path) is not None or name.lower().endswith(_NO_HUBS)
    is_here = _exists(path) or path.parent.is_dir()
    return _HUB_ID.fullmatch(name) is not None and not is_file and not is_here


def is_saved(name: str) -> bool:
    """Return whether a dataset is a directory that ``save_to_disk`` of datasets left."""
    path = _path(name)
    return any(all((path / file).is_file() for file in files) for files in _SAVED)


def dataset_files(name: str) -> list[tuple[str, Path]]:
    """Return the files of a dataset that is here, each with the name that a person would use.

    Raises:
        RowsError: there is no such file or directory, or nothing in it can be read.
        OSError: it is there and cannot be read.
    """
    path = _path(name)
    if not _exists(path):
        why = ", and no hub id (org/name)"
        if path.parent.name and path.parent.is_dir():
            why = f" in '{path.parent}'"
            if _HUB_ID.fullmatch(name):
                why += "; for the hub's, run this where no directory has that name"
        raise RowsError(f"{name!r}: no such file or directory{why}")
    if not path.is_dir():
        if ending(path) is None:
            raise RowsError(f"{name}: its name must end in {_READ}")
        found = [(name, path)]
    else:
        found = []
        reads_all = is_saved(name)
        for file in sorted(_walked(path)):
            if reads_all or ending(file) is not None:
                found.append((f"{name.rstrip('/')}/{file.relative_to(path)}", file))
    if not found:
        raise RowsError(f"{name}: no file in this directory ends in {_READ}")
    for label, file in found:
        if re.search("[\ud800-\udfff]", label):
            raise RowsError(f"{label!r}: the name is no UTF-8: rename it")
        if not file.is_file():
            kind = "a link to what is not there"
            if _exists(file):
                kind = "a pipe or a device"
            raise RowsError(f"{label}: is {kind}, not a file")
    return found


def telling_files(name: str) -> list[Path]:
    """Return the files by which a dataset is known: those with rows, and of a directory the README
    that may say which of them are read.

    Raises:
        RowsError: there is no such file or directory, or nothing in it can be read.
        OSError: it is there and cannot be read.
    """
    files = [path for _, path in dataset_files(name)]
    readme = _path(name) / _README
    if readme.is_file():
        files.append(readme)
    return files


def _path(name: str) -> Path:
    with suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EIO):
            raise
        return False
    except ValueError:
        # No file has a name with a null character.
        return False
    return True


def ending(path: Path) -> str | None:
    """Return what the name of a file that can be read ends in, whatever packed it."""
    name = path.name.lower()
    end = Path(name).suffix
    is_packed = end in _UNPACKERS
    if is_packed:
        end = Path(name.removesuffix(end)).suffix
    if end not in _BUILDERS or (is_packed and end == ".parquet"):
        return None
    return end


def _walked(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory, without what is hidden."""

    def fail(error: OSError) -> None:
        raise error

    def is_shown(name: str) -> bool:
        return not name.startswith((".", "__"))

    for folder, folders, files in os.walk(directory, onerror=fail):
        # In place: what is left out is not walked either.
        folders[:] = filter(is_shown, folders)
        for file in filter(is_shown, files):
            yield Path(folder, file)


class DatasetSource:
    """A dataset by its name: a file, a directory of files, one that ``save_to_disk`` left, or the
    split ``train`` of the hub's; where a directory's names tell splits apart, its ``train`` too.

    It yields the place and the fields of one row after another, once.

    Raises:
        RowsError: it is not what its name says; when it is made or, of a file, where that shows.
        OSError: it cannot be read; ConnectionError where the hub cannot be reached.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.notes: tuple[str, ...] = ()
        """What a person should know of how it is read."""
        self.files: list[tuple[str, Path]] = []
        self.data: Any = None
        """As datasets has it; None of files."""
        if is_on_hub(name):
            self.data = _of_hub(name)
        elif is_saved(name):
            self.data, self.notes = _of_disk(_path(name))
        else:
            self.files = dataset_files(name)
            if len(self.files) > 1:
                self._leave_files_out()
        self.unit = "rows read"
        """What `done` and `total` count."""
        self.done = 0
        if self.files:
            self.unit = "MB read"
            self.total = sum(path.stat().st_size for _, path in self.files) // 10**6
            self._rows = self._of_files()
        else:
            self.total = len(self.data)
            self._rows = self._of_data()

    def __iter__(self) -> Iterator[Read]:
        for place, fields in self._rows:
            if isinstance(fields, dict):
                _refuse_images(place, fields)
            yield place, fields

    def _leave_files_out(self) -> None:
        """Keep the files that datasets reads: of the training split, and of one format."""
        from datasets.data_files import get_data_patterns, resolve_pattern
        from datasets.load import infer_module_for_data_files_list

        place, named = _splits_of_readme(self.name)
        directory = glob.escape(str(place))
        patterns = named
        if patterns is None:
            patterns = get_data_patterns(directory)
        others = sorted(map(str, set(patterns) - {_TRAIN}))
        chosen: set[Path] = set()
        for pattern in patterns.get(_TRAIN, ()):
            if "://" in pattern:
                continue
            # Of the ways to name a split no directory uses all.
            with suppress(FileNotFoundError):
                chosen.update(map(Path.resolve, map(Path, resolve_pattern(pattern, directory))))
        kept = [(label, path) for label, path in self.files if path.resolve() in chosen]
        if named is not None and not kept:
            where = f"{self.name}: its {_README} names no file of a split {_TRAIN}"
            raise RowsError(f"{where} that is here and can be read: name a file")
        if not kept:
            return
        builder, _ = infer_module_for_data_files_list([str(path) for _, path in kept])
        if builder in _BUILDERS.values():
            kept = [(label, path) for label, path in kept if _builder_of(path) == builder]
        if len(kept) < len(self.files):
            left = f"{len(self.files) - len(kept)} of its {len(self.files)} files are left out"
            why = ", ".join(others) or "as datasets leaves them out"
            self.notes = (f"its split {_TRAIN} is read; {left} ({why})",)
            self.files = kept

    def _of_files(self) -> Iterator[Read]:
        before = 0
        for label, path in self.files:
            size = path.stat().st_size
            for line, fields, share in _rows_of(path, label):
                self.done = (before + int(share * size)) // 10**6
                yield Place(label, line), fields
            before += size
            self.done = before // 10**6

    def _of_data(self) -> Iterator[Read]:
        # As Arrow has them: what pictures and sounds there are beside is not decoded.
        for table in self.data.with_format("arrow").iter(batch_size=1024):
            for fields in _of_arrow(table):
                self.done += 1
                yield Place(self.name, self.done), fields


def _builder_of(path: Path) -> str | None:
    end = ending(path)
    if end is None:
        return None
    return _BUILDERS[end]


def _splits_of_readme(name: str) -> tuple[Path, dict[str, list[str]] | None]:
    """Return the directory in which a directory's README says that the files are, and the patterns
    of files by split that it names; None where it does not."""
    from datasets.data_files import sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCardData, metadata_load

    directory = _path(name)
    readme = directory / _README
    if not readme.is_file():
        return directory, None
    try:
        card = DatasetCardData(**(metadata_load(readme) or {}))
        configs = MetadataConfigs.from_dataset_card_data(card)
        default = configs.get_default_config_name()
        config: Mapping[str, Any] = {}
        if default is not None:
            config = configs[default]
        named = config.get("data_files")
        if named is not None:
            named = sanitize_patterns(named)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())[:200]
        raise RowsError(f"{name}/{_README}: its metadata cannot be read: {why}") from error
    if configs and default is None:
        several = f"several configurations ({', '.join(configs)})"
        raise RowsError(f"{name}: its {_README} has {several}: name a file")
    directory /= str(config.get("data_dir") or "")
    if not directory.is_dir():
        raise RowsError(f"{name}: its {_README} names a directory that is not here: {directory}")
    return directory, named


def _refuse_images(place: Place, fields: Mapping[str, Any]) -> None:
    """Refuse a row with images, as TRL does for a model of texts; a column without any is read."""
    for column in _IMAGES:
        if not is_nothing(fields.get(column)):
            why = f"column {column!r} holds images, which nothing here trains on"
            cure = "leave the column out to train on the texts alone"
            raise RowsError(f"{place.file}: line {place.line}: {why}: {cure}")


def is_nothing(value: Any) -> bool:
    """Return whether a value says nothing: null, blank, or without an item."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    return value is None or (isinstance(value, list | dict) and not value)


def _of_hub(name: str) -> Any:
    """Return a dataset's training rows, mapped from the disk."""
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    # Where the hub does not answer, datasets asks for half a minute before it looks into its cache.
    # What it answers, datasets puts into words.
    try:
        with suppress(HfHubHTTPError):
            huggingface_hub.HfApi().dataset_info(name, timeout=5)
    except Exception:  # noqa: BLE001 - the network's errors are each library's own
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, split=_TRAIN)
    except datasets.exceptions.DatasetNotFoundError as error:
        where = "neither a file or directory here nor a data set that the hub shows you"
        raise RowsError(f"{name!r}: {where}") from error
    except (ValueError, TypeError) as error:
        raise RowsError(f"{name}: {error}") from error
    except Exception as error:
        # The hub's client, its HTTP library and datasets each raise errors of their own.
        why = f"cannot be fetched: {error}"
        if isinstance(error, ConnectionError):
            why = (
                "neither a file or directory here nor a data set in the cache, and the hub cannot "
                "be reached: name a file, or fetch it where there is a network"
            )
        raise ConnectionError(f"{name}: {why}") from error


def _of_disk(directory: Path) -> tuple[Any, tuple[str, ...]]:
    """Return what ``save_to_disk`` left, of several splits ``train``, and what is left out."""
    import datasets

    try:
        data = datasets.load_from_disk(str(directory))
    except Exception as error:
        # A file that is missing, broken or of a later version: each is another library's error.
        raise RowsError(f"{directory}: datasets cannot load it from disk: {error}") from error
    if not isinstance(data, datasets.DatasetDict):
        return data, ()
    if _TRAIN not in data:
        raise RowsError(f"{directory}: no split {_TRAIN}, but {', '.join(data)}: name one of them")
    others = ", ".join(sorted(set(data) - {_TRAIN}))
    if not others:
        return data[_TRAIN], ()
    return data[_TRAIN], (f"its split {_TRAIN} is read; left out: {others}",)


def _rows_of(path: Path, label: str) -> Iterator[tuple[int, dict[str, Any] | Broken, float]]:
    """Yield the line, the fields of each row of a file, and the share of it that is read."""
    end = ending(path)
    size = max(1, path.stat().st_size)
    if end == ".parquet":
        yield from _parquet_rows(path, label)
        return
    with path.open("rb") as raw:
        packing = path.suffix.lower()
        for beginning, packed_as in _PACKED_BEGINNINGS.items():
            if raw.peek(8).startswith(beginning):
                packing = packed_as
        file = raw
        if packing in _UNPACKERS:
            file = io.BufferedReader(_UNPACKERS[packing](raw))
        try:
            head = file.peek(256)
            if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise RowsError(f"{label}: is UTF-16: save it as UTF-8")
            if end in _SEPARATORS:
                rows = _csv_rows(file, label, _SEPARATORS[end])
            elif _is_array(head, end or ""):
                rows = _array_rows(file, label)
            else:
                rows = _line_rows(file, label)
            for line, fields in rows:
                yield line, fields, raw.tell() / size
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise RowsError(f"{label}: cannot be unpacked: {error}") from error
        except OSError as error:
            if error.errno is None:
                raise RowsError(f"{label}: cannot be unpacked: {error}") from error
            raise


class _Lines:
    """The lines of a file, each with its number from 1; what was looked at may be put back."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._number = 0
        self._back: deque[tuple[int, bytes]] = deque()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return self

    def __next__(self) -> tuple[int, bytes]:
        if self._back:
            return self._back.popleft()
        line: bytes = self._file.readline(LINE_BYTES_MAX)
        if not line:
            raise StopIteration
        self._number += 1
        if _is_cut(line):
            while (rest := self._file.readline(2**20)) and not rest.endswith(b"\n"):
                pass
        if self._number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        return self._number, line

    def put_back(self, *lines: tuple[int, bytes]) -> None:
        """Let lines come again, in their order."""
        self._back.extendleft(reversed(lines))


def _is_cut(line: bytes) -> bool:
    return len(line) == LINE_BYTES_MAX and not line.endswith(b"\n")


def _line_rows(file: Any, label: str) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    """Yield the objects of JSON lines, each with the line on which it begins; a blank line is none.

    As in datasets, an object may take several lines, and a line may hold several objects.
    """
    lines = _Lines(file)
    for number, line in lines:
        if _is_cut(line):
            yield number, Broken(f"a line of more than {LINE_BYTES_MAX:,} bytes")
        elif line.strip():
            try:
                value = json.loads(line.decode())
            except UnicodeDecodeError as error:
                yield number, Broken(f"not UTF-8: byte {error.start + 1} of the line is wrong")
            except json.JSONDecodeError as error:
                yield from _spread_rows(lines, number, line, error, label)
            except (ValueError, RecursionError) as error:
                yield number, Broken(f"not JSON: {error}")
            else:
                yield number, _object(value)


def _spread_rows(
    lines: _Lines, number: int, line: bytes, error: json.JSONDecodeError, label: str
) -> list[tuple[int, dict[str, Any] | Broken]]:
    """Return the objects from a line that is not one to the next line that ends with one, or why
    there are none.

    Args:
        lines: those behind it; those that are in no object of these are put back.
        number: of the line.
        line: which holds several objects, the beginning of one, or no JSON.
        error: of that line alone.
        label: the file's, for messages.
    """
    text = line.decode()
    taken: list[tuple[int, bytes]] = []
    while True:
        found, lines_used, fault = _objects_in(text, number)
        if found:
            lines.put_back(*taken[lines_used - 1 :])
            return found
        if fault is None or text[fault.pos :].strip():
            break
        more = list(islice(lines, 1 + len(taken)))
        taken += more
        further = [following for _, following in more]
        try:
            text += b"".join(further).decode()
        except UnicodeDecodeError:
            break
        if not more or any(map(_is_cut, further)):
            break
        if len(text) > ARRAY_BYTES_MAX:
            most = f"{ARRAY_BYTES_MAX // 2**20} MiB"
            why = f"a JSON object of more than {most}: write its rows as JSON lines"
            raise RowsError(f"{label}: line {number}: {why}")
    place = f"column {error.colno}"
    lines.put_back(*taken)
    if taken:
        # The rest of an object over several lines is no row.
        for following in lines:
            if following[1].strip() and following[1][:1] not in b" \t}]":
                lines.put_back(following)
                break
            if fault is not None:
                error = fault
                place = f"line {number + fault.lineno - 1}, column {fault.colno}"
    fault_words = error.msg.removesuffix(" at")
    return [(number, Broken(f"not JSON: {fault_words} at {place}"))]


def _objects_in(
    text: str, number: int
) -> tuple[list[tuple[int, dict[str, Any] | Broken]], int, json.JSONDecodeError | None]:
    """Return the objects of a text up to the first line that ends with one, how many lines they
    take, and why there are none."""
    decoder = json.JSONDecoder()
    found: list[tuple[int, dict[str, Any] | Broken]] = []
    position = 0
    while True:
        while position < len(text) and text[position].isspace():
            position += 1
        begins = number + text.count("\n", 0, position)
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            return [], 0, error
        except (ValueError, RecursionError):
            return [], 0, None
        found.append((begins, _object(value)))
        line_end = text.find("\n", position)
        if line_end < 0:
            line_end = len(text)
        if not text[position:line_end].strip():
            return found, text.count("\n", 0, position) + 1, None


def _object(value: Any) -> dict[str, Any] | Broken:
    if isinstance(value, dict):
        return value
    return Broken(f"no JSON object, but {quoted(value)}")


def quoted(value: Any) -> str:
    """Return the beginning of a value, for messages."""
    if isinstance(value, str):
        written = repr(value)
    else:
        written = json.dumps(value, default=str)
    if len(written) <= 120:
        return written
    return f"{written[:120]}..."


def _is_array(head: bytes, end: str) -> bool:
    """Return whether a file that begins so is a JSON array; of JSON lines one may be an array."""
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not text.startswith(b"["):
        return False
    first, _, rest = text.partition(b"\n")
    if end == ".json" or not rest.strip():
        return True
    try:
        json.loads(first)
    except ValueError:
        return True
    return False


def _array_rows(file: Any, label: str) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    """Yield the objects of a JSON array by their number; of texts alone, as datasets does, each as
    ``text``."""
    data = file.read(ARRAY_BYTES_MAX + 1)
    if len(data) > ARRAY_BYTES_MAX:
        most = f"{ARRAY_BYTES_MAX // 2**20} MiB"
        raise RowsError(f"{label}: a JSON array of more than {most}: write it as JSON lines")
    try:
        items = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RowsError(f"{label}: not JSON: {error}") from error
    if all(isinstance(item, str) for item in items):
        items = [{"text": item} for item in items]
    yield from enumerate(map(_object, items), start=1)


def _csv_rows(
    file: Any, label: str, separator: str
) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    """Yield the rows of CSV, each with the line on which it begins; the first names columns."""
    csv.field_size_limit(2**24)
    first = file.peek(2**20).splitlines()[:1]
    unquoted = ""
    if first:
        unquoted = re.sub(b'"[^"]*"', b"", first[0]).decode(errors="replace")
    if separator not in unquoted:
        # In many countries it is no comma.
        separator = max((separator, ",", ";", "\t", "|"), key=unquoted.count)
    with io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text:
        reader = csv.reader(text, delimiter=separator, strict=True)
        try:
            header = next(reader, [])
        except csv.Error as error:
            raise RowsError(f"{label}: line 1: not CSV: {error}") from error
        twice = [name for name in header if header.count(name) > 1]
        if twice:
            raise RowsError(f"{label}: line 1: column {twice[0]!r} is there twice")
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
                "".join(cells).encode()
            except StopIteration:
                return
            except UnicodeEncodeError:
                yield line, Broken("not UTF-8")
            except csv.Error as error:
                why = str(error)
                if why == "unexpected end of data":
                    why = "a quote is never closed, so that nothing behind it is read"
                yield line, Broken(f"not CSV: {why}")
            else:
                if cells and len(cells) != len(header):
                    columns = f"the first line names {len(header)} columns"
                    yield line, Broken(f"{len(cells)} cells, where {columns}")
                elif cells:
                    yield line, dict(zip(header, cells, strict=True))


def _parquet_rows(path: Path, label: str) -> Iterator[tuple[int, dict[str, Any] | Broken, float]]:
    import pyarrow
    import pyarrow.parquet

    try:
        # Without a buffer whole columns of a row group are read, and a file may be one group.
        table = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
        count = max(table.metadata.num_rows, 1)
        number = 0
        for batch in table.iter_batches(batch_size=1024):
            for fields in _of_arrow(batch):
                number += 1
                yield number, fields, number / count
    except (pyarrow.ArrowException, OSError) as error:
        # pyarrow reports a broken file by an OSError that has no number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise RowsError(f"{label}: not Parquet that can be read: {error}") from error


def _of_arrow(batch: Any) -> Iterator[dict[str, Any] | Broken]:
    """Yield the rows of a batch of Arrow as JSON lines would have them; where texts are no UTF-8,
    row by row."""
    restore = {field.name: _restoring(field.type) for field in batch.schema}
    try:
        found: list[Any] = batch.to_pylist()
    except UnicodeDecodeError:
        found = []
        for index in range(batch.num_rows):
            try:
                found += batch.slice(index, 1).to_pylist()
            except UnicodeDecodeError:
                found.append(Broken("not UTF-8"))
    for row in found:
        if isinstance(row, dict):
            for name, restored in restore.items():
                if restored is not None and row[name] is not None:
                    row[name] = restored(row[name])
        yield row


def _restoring(type: Any) -> Callable[[Any], Any] | None:
    """Return what makes a value of Arrow what was written; None where it is that.

    A struct has every key that any row has, so that a null which was written cannot be told from
    one that Arrow added: both are left out. What datasets keeps as JSON has the written ones alone.
    """
    import pyarrow.types as kinds

    if getattr(type, "extension_name", None) == "arrow.json":
        return json.loads
    if kinds.is_map(type):
        of_value = _restoring(type.item_type)
        return lambda pairs: {key: _applied(of_value, value) for key, value in pairs}
    if kinds.is_struct(type):
        of_fields = {field.name: _restoring(field.type) for field in type}

        def restored(value: Mapping[str, Any]) -> dict[str, Any]:
            fields = {}
            for key, of_field in value.items():
                if of_field is not None:
                    fields[key] = _applied(of_fields[key], of_field)
            return fields

        return restored
    if kinds.is_list(type) or kinds.is_large_list(type) or kinds.is_fixed_size_list(type):
        of_item = _restoring(type.value_type)
        if of_item is not None:
            return lambda items: [_applied(of_item, item) for item in items]
    return None


def _applied(restore: Callable[[Any], Any] | None, value: Any) -> Any:
    if restore is None or value is None:
        return value
    return restore(value)
