"""The rows of a dataset as a model trains on them: read, recognised, rendered, tokenized, held out,
packed and collated.

This file needs none beside it, so that a training script may take it along:

    rows, broken = tokenized("dataset.jsonl", tokenizer)
    train, held_out = split(len(rows), 0.05, seed=0)

A `Source` yields rows as they are written, an `Encoder` makes tokens of them, `encoded` is both at
once, and a `Collator` makes micro-batches. A row that cannot be trained on is a `Broken` with its
reason, and comes with its place as every other does. numpy is imported at once; transformers,
datasets, pyarrow and TRL where they are needed.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import difflib
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

INPUT, MASK, LENGTH, SEQ_LENGTHS = "input_ids", "completion_mask", "length", "seq_lengths"
"""Columns of tokenized rows: tokens, 1 where one carries loss, tokens of an unpacked row, tokens of
each example in a packed one."""
IGNORED = -100
"""The label of a token that carries no loss."""
CHARACTERS_MAX = 8_000_000
"""Of a row, for which a tokenizer takes a gigabyte and more."""
LINE_BYTES_MAX = 2**26
"""Of JSON lines; what has no line ends is not read as a whole."""
ARRAY_BYTES_MAX = 2**29
"""Of a JSON array, which is read as a whole."""

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_ENDINGS = (".jsonl", ".ndjson", ".json", *_SEPARATORS, ".parquet")
_UNPACKERS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda file: gzip.GzipFile(fileobj=file),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
}
_READ = (
    ".jsonl, .ndjson, .json, .csv, .tsv (with .gz, .bz2 or .xz behind it, where it is compressed) "
    'or .parquet; of plain texts, write each as a line {"text": ...} of a .jsonl'
)
_NO_HUBS = (*_UNPACKERS, ".arrow", ".md", ".pdf", ".tar", ".txt", ".xlsx", ".xml", ".zip")
"""Endings that files have and datasets of the hub do not, of formats that are not read."""
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_SAVED = (("state.json", "dataset_info.json"), ("dataset_dict.json",))
"""What is in a directory that ``save_to_disk`` of datasets left, of one split or of several."""
_TRAIN = "train"


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


# Files


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
        is_here = path.parent.name and path.parent.is_dir()
        why = f" in '{path.parent}'" if is_here else ", and no hub id (org/name)"
        if is_here and _HUB_ID.fullmatch(name):
            why += "; for the hub's, run this where no directory has that name"
        raise RowsError(f"{name!r}: no such file or directory{why}")
    if not path.is_dir():
        if ending(path) is None:
            raise RowsError(f"{name}: its name must end in {_READ}")
        found = [(name, path)]
    else:
        files = sorted(f for f in _walked(path) if is_saved(name) or ending(f) is not None)
        found = [(f"{name.rstrip('/')}/{file.relative_to(path)}", file) for file in files]
    if not found:
        raise RowsError(f"{name}: no file in this directory ends in {_READ}")
    for label, file in found:
        if re.search("[\ud800-\udfff]", label):
            raise RowsError(f"{label!r}: the name is no UTF-8: rename it")
        if not file.is_file():
            kind = "a pipe or a device" if _exists(file) else "a link to what is not there"
            raise RowsError(f"{label}: is {kind}, not a file")
    return found


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
        # A name with a null character in it is nobody's.
        return False
    return True


def ending(path: Path) -> str | None:
    """Return what the name of a file that can be read ends in, whatever packed it."""
    name = path.name.lower()
    packing = Path(name).suffix
    end = Path(name.removesuffix(packing)).suffix if packing in _UNPACKERS else packing
    is_known = end in _ENDINGS and not (end == ".parquet" and packing in _UNPACKERS)
    return end if is_known else None


def _walked(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory, without what is hidden."""

    def fail(error: OSError) -> None:
        raise error

    def is_shown(name: str) -> bool:
        return not name.startswith((".", "__"))

    for folder, folders, files in os.walk(directory, onerror=fail):
        # In place: what is left out is not walked either.
        folders[:] = filter(is_shown, folders)
        yield from (Path(folder, file) for file in filter(is_shown, files))


class Source:
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
                self._leave_splits_out()
        self.unit = "MB read" if self.files else "rows read"
        """What `done` and `total` count."""
        sizes = sum(path.stat().st_size for _, path in self.files) // 10**6
        self.total = sizes if self.files else len(self.data)
        self.done = 0
        self._rows = self._of_files() if self.files else self._of_data()

    def __iter__(self) -> Iterator[Read]:
        return self._rows

    def _leave_splits_out(self) -> None:
        """Keep the files of the training split, told as datasets tells it."""
        from datasets.data_files import get_data_patterns, resolve_pattern

        directory = glob.escape(str(_path(self.name)))
        patterns = get_data_patterns(directory)
        others = sorted(map(str, set(patterns) - {_TRAIN}))
        chosen: set[Path] = set()
        for pattern in patterns.get(_TRAIN, ()) if others else ():
            # Of the ways to name a split no directory uses all.
            with suppress(FileNotFoundError):
                chosen |= {Path(found).resolve() for found in resolve_pattern(pattern, directory)}
        kept = [(label, path) for label, path in self.files if path.resolve() in chosen]
        if kept and len(kept) < len(self.files):
            left = f"{len(self.files) - len(kept)} of its {len(self.files)} files are left out"
            self.notes = (f"its split {_TRAIN} is read; {left} ({', '.join(others)})",)
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
    return data[_TRAIN], (f"its split {_TRAIN} is read; left out: {others}",) if others else ()


def _rows_of(path: Path, label: str) -> Iterator[tuple[int, dict[str, Any] | Broken, float]]:
    """Yield the line, the fields of each row of a file, and the share of it that is read."""
    end, size = ending(path), max(1, path.stat().st_size)
    if end == ".parquet":
        yield from _parquet_rows(path, label)
        return
    with path.open("rb") as raw:
        unpack = _UNPACKERS.get(path.suffix.lower())
        file = raw if unpack is None else io.BufferedReader(unpack(raw))
        try:
            head = file.peek(256)
            if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise RowsError(f"{label}: is UTF-16: save it as UTF-8")
            if end in _SEPARATORS:
                rows = _csv_rows(file, label, _SEPARATORS[end])
            elif end == ".json" and head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
                rows = _array_rows(file, label)
            else:
                rows = _line_rows(file)
            for line, fields in rows:
                yield line, fields, raw.tell() / size
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise RowsError(f"{label}: cannot be unpacked: {error}") from error
        except OSError as error:
            if error.errno is None:
                raise RowsError(f"{label}: cannot be unpacked: {error}") from error
            raise


def _line_rows(file: Any) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    """Yield the objects of JSON lines; a blank line is no row."""
    for number, line in enumerate(iter(partial(file.readline, LINE_BYTES_MAX), b""), start=1):
        if len(line) == LINE_BYTES_MAX and not line.endswith(b"\n"):
            while (rest := file.readline(2**20)) and not rest.endswith(b"\n"):
                pass
            yield number, Broken(f"a line of more than {LINE_BYTES_MAX:,} bytes")
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            try:
                yield number, _object(json.loads(line.decode()))
            except UnicodeDecodeError as error:
                yield number, Broken(f"not UTF-8: byte {error.start + 1} of the line is wrong")
            except json.JSONDecodeError as error:
                yield number, Broken(f"not JSON: {error.msg} at column {error.colno}")
            except (ValueError, RecursionError) as error:
                yield number, Broken(f"not JSON: {error}")


def _object(value: Any) -> dict[str, Any] | Broken:
    return value if isinstance(value, dict) else Broken(f"no JSON object, but {_quoted(value)}")


def _quoted(value: Any) -> str:
    written = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return written if len(written) <= 120 else f"{written[:120]}..."


def _array_rows(file: Any, label: str) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    """Yield the objects of a JSON array by their number."""
    data = file.read(ARRAY_BYTES_MAX + 1)
    if len(data) > ARRAY_BYTES_MAX:
        most = f"{ARRAY_BYTES_MAX // 2**20} MiB"
        raise RowsError(f"{label}: a JSON array of more than {most}: write it as JSON lines")
    try:
        items = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RowsError(f"{label}: not JSON: {error}") from error
    yield from enumerate(map(_object, items), start=1)


def _csv_rows(
    file: Any, label: str, separator: str
) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    """Yield the rows of CSV, each with the line on which it begins; the first names columns."""
    csv.field_size_limit(2**24)
    first = file.peek(2**20).splitlines()[:1]
    unquoted = re.sub(b'"[^"]*"', b"", first[0]).decode(errors="replace") if first else ""
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
                is_open = str(error) == "unexpected end of data"
                why = "a quote is never closed, so that nothing behind it is read"
                yield line, Broken(f"not CSV: {why if is_open else error}")
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
        count, number = max(table.metadata.num_rows, 1), 0
        for batch in table.iter_batches(batch_size=1024):
            for fields in _of_arrow(batch):
                number += 1
                yield number, fields, number / count
    except (pyarrow.ArrowException, OSError) as error:
        # What is broken in a file is an error of the system's kind to pyarrow, without its number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise RowsError(f"{label}: not Parquet that can be read: {error}") from error


def _of_arrow(batch: Any) -> Iterator[dict[str, Any] | Broken]:
    """Yield the rows of a batch of Arrow; where texts are no UTF-8, row by row."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError:
                yield Broken("not UTF-8")


# Kinds of rows

PREFERENCE = "preference"
KINDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    PREFERENCE: ("chosen", "rejected"),
    "text": ("text",),
}
"""Columns of each kind, the most telling kind first."""
ROLES = ("system", "developer", "user", "assistant", "tool")
ROLES_OF_OTHERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""As ShareGPT names them."""
_ALPACA = (
    "Below is an instruction that describes a task{also}. "
    "Write a response that appropriately completes the request."
)
"""How the prompt begins that the Alpaca data were published with, where no system is given."""
_ALPACA_ALSO = ", paired with an input that provides further context"


def on_completions(kind: str, asked: bool | None = None) -> bool:
    """Return whether loss is on completions alone. Where nobody says, as TRL has it: where a row is
    a prompt and its completion, which Alpaca's fields are too.

    Raises:
        RowsError: rows are texts, and have none.
    """
    if kind == PREFERENCE:
        if asked is False:
            why = "pairs carry loss on their completions alone"
            raise RowsError(f"{why}: leave data.completions_only out")
        return True
    if kind == "text" and asked:
        raise RowsError(
            "rows of one text have no completions of their own: leave data.completions_only out, "
            "or name another data.format"
        )
    return kind in ("prompt-completion", "instruction") if asked is None else asked


def first_rows(
    rows: Iterable[Read], name: str, *, format: str = "auto", text_column: str | None = None
) -> tuple[list[Read], tuple[str, ...], str]:
    """Return as many rows as tell their kind, their columns, and that kind.

    Args:
        rows: of the dataset, which go on behind those that are returned.
        name: of the dataset.
        format: the kind that was asked for; ``auto`` recognises it by the columns.
        text_column: the column that was named as the one with the texts.

    Raises:
        RowsError: there are none, none of them can be read, or they are of no known kind.
    """
    seen: list[Read] = []
    columns: dict[str, None] = {}
    readable = 0
    for place, fields in rows:
        seen.append((place, fields))
        if isinstance(fields, dict):
            readable += 1
            columns |= dict.fromkeys(map(str, fields))
        if (columns and readable >= 100) or len(seen) == 10_000:
            break
    if not seen:
        raise RowsError(f"{name}: no rows in it")
    if not columns:
        place, fields = seen[0]
        why = fields if isinstance(fields, Broken) else Broken("an empty object")
        raise RowsError(all_broken(place, why, len(seen), name))
    return seen, tuple(columns), recognised(name, tuple(columns), format, text_column)


def all_broken(place: Place, broken: Broken, count: int, name: str) -> str:
    """Return why there is nothing to train on, with the first row that shows it."""
    which = f"all {count:,} rows are broken, the first" if count > 1 else "its one row is broken"
    return f"{name}: {which}: {place.file}: line {place.line}: {broken.reason}"


def recognised(
    name: str, columns: Sequence[str], format: str = "auto", text_column: str | None = None
) -> str:
    """Return the kind of rows that have such columns. Raises what `first_rows` raises."""
    if text_column is not None and format not in ("auto", "text"):
        typed = f"data.text_column {text_column} and data.format {format}"
        raise RowsError(f"{typed} are both given: keep one")
    shown = ", ".join(columns[:12]) + (f" and {len(columns) - 12} more" if columns[12:] else "")
    needed = KINDS.get(format, ()) if text_column is None else (text_column,)
    for column in set(needed) - set(columns):
        why = f", which data.format {format} needs" if text_column is None else ""
        near = difflib.get_close_matches(column, columns, n=1)
        meant = f"did you mean {near[0]!r}?" if near else f"known are {shown}"
        raise RowsError(f"{name}: no column {column!r}{why}; {meant}")
    if needed:
        return format if text_column is None else "text"
    for kind, names in KINDS.items():
        if set(names) <= set(columns):
            return kind
    known = "none of " + ", ".join(" with ".join(names) for names in KINDS.values())
    if len(missing := {*KINDS[PREFERENCE]} - {*columns}) == 1:
        known = f"no {missing.pop()!r}, which pairs need"
    raise RowsError(
        f"{name}: its columns are {shown}, and {known}: name the one with the texts with "
        "--set data.text_column=NAME"
    )


@dataclass(frozen=True, slots=True)
class Example:
    """What a row holds: a prompt and its completion, as texts or as turns that a chat template
    takes. A text has the prompt "", a chat []."""

    prompt: str | list[dict[str, Any]]
    completion: str | list[dict[str, Any]]
    tools: list[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """For the template, ``chat_template_kwargs`` of the row."""


def example_of(fields: Mapping[str, Any], kind: str, *, text_column: str | None = None) -> Example:
    """Return what a row of a kind holds. Raises Broken where it cannot be trained on."""
    if kind == "text":
        return Example("", _text(fields, text_column or "text"))
    if kind == "instruction":
        return _instruction(fields)
    if kind == "prompt-completion":
        are_turns = all(isinstance(_decoded(fields.get(name)), list) for name in KINDS[kind])
        if not are_turns:
            return Example(_text(fields, "prompt"), _text(fields, "completion"))
        prompt, completion = _turns(fields, "prompt"), _turns(fields, "completion")
    else:
        prompt, completion = [], _turns(fields, kind)
        if system := _optional_text(fields, "system"):
            turn = {"role": "system", "content": system}
            if completion[0]["role"] != "system":
                completion.insert(0, turn)
            elif completion[0] != turn:
                raise Broken(f"system is a column and another turn of {kind}")
    if not any(turn["role"] == "assistant" for turn in completion):
        name = kind if kind in fields else "completion"
        raise Broken(f"{name}: no turn of the assistant")
    return Example(prompt, completion, *_for_template(fields))


def _for_template(fields: Mapping[str, Any]) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return what a row has for its chat template: tools, and options."""
    tools, options = (_decoded(fields.get(name)) for name in ("tools", "chat_template_kwargs"))
    if not isinstance(tools, list | None):
        raise Broken(f"tools must be a list, got {_quoted(tools)}")
    if not isinstance(options, dict | None):
        raise Broken(f"chat_template_kwargs must map keys to values, got {_quoted(options)}")
    return tools or None, options or {}


def pair_of(fields: Mapping[str, Any]) -> tuple[Example, Example]:
    """Return what a row of a pair holds: its chosen and its rejected example, of one prompt, which
    is what both begin with where it is not given, as in TRL. Raises Broken.
    """
    are_turns = any(isinstance(_decoded(fields.get(name)), list) for name in KINDS[PREFERENCE])
    read: Callable[..., Any] = _turns if are_turns else _text
    chosen, rejected = (read(fields, name) for name in KINDS[PREFERENCE])
    prompt: Any = _decoded(fields.get("prompt"))
    if are_turns and isinstance(prompt, str):
        asked = (turn["content"] for turn in chosen if turn["role"] == "user")
        if next(asked, None) != prompt:
            raise Broken("prompt is text, and chosen are turns that do not begin with it")
        prompt = None
    if prompt is None:
        shared = _common(chosen, rejected)
        end = min(shared, len(chosen) - 1, len(rejected) - 1)
        if end == shared and not are_turns and chosen[:end].endswith(" "):
            end -= 1
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    else:
        prompt = read(fields, "prompt")
    if chosen == rejected:
        raise Broken("chosen and rejected are the same")
    if are_turns and not prompt:
        raise Broken("chosen and rejected have no turn in common, and there is no prompt")
    told = _for_template(fields)
    return Example(prompt, chosen, *told), Example(prompt, rejected, *told)


def _text(fields: Mapping[str, Any], column: str) -> str:
    value = fields.get(column)
    if value is None:
        raise Broken(f"{column} is {'null' if column in fields else 'missing'}")
    if not isinstance(value, str):
        raise Broken(f"{column} must be text, got {_quoted(value)}")
    if not value.strip():
        raise Broken(f"{column} is empty")
    return value


def _optional_text(fields: Mapping[str, Any], column: str) -> str:
    """Return a text, or "" where there is none or but blanks."""
    value = fields.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    return _text(fields, column)


def _instruction(fields: Mapping[str, Any]) -> Example:
    """Return Alpaca's fields as its prompt; what comes before, in ``history``, in the same form."""
    instruction, output = _text(fields, "instruction"), _text(fields, "output")
    context, system = _optional_text(fields, "input"), _optional_text(fields, "system")
    history = _decoded(fields.get("history")) or []
    is_paired = isinstance(history, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(one, str) for one in pair)
        for pair in history
    )
    if not is_paired:
        raise Broken(f"history must be a list of pairs of texts, got {_quoted(history)}")
    opening = system or _ALPACA.format(also=_ALPACA_ALSO if context else "")
    before = "".join(f"### Instruction:\n{a}\n\n### Response:\n{b}\n\n" for a, b in history)
    given = f"### Input:\n{context}\n\n" if context else ""
    asked = f"### Instruction:\n{instruction}\n\n{given}### Response:\n"
    return Example(f"{opening}\n\n{before}{asked}", output)


def _decoded(value: Any) -> Any:
    """Return what a cell of CSV or Parquet holds that has JSON for a text; else the value."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def _turns(fields: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """Return a row's turns with role and content, whoever named them."""
    value = _decoded(fields.get(column))
    if value is None:
        raise Broken(f"{column} is {'null' if column in fields else 'missing'}")
    if not isinstance(value, list):
        raise Broken(f"{column} must be a list of turns, got {_quoted(value)}")
    if not value:
        raise Broken(f"{column} is empty")
    try:
        return [_turn(number, given) for number, given in enumerate(value, start=1)]
    except Broken as broken:
        raise Broken(f"{column}: {broken.reason}") from None


def _turn(number: int, given: Any) -> dict[str, Any]:
    where = f"turn {number}"
    if not isinstance(given, Mapping):
        raise Broken(f"{where}: must map role and content, got {_quoted(given)}")
    # Parquet gives each turn all keys that any turn has.
    turn = {key: value for key, value in given.items() if value is not None}
    for own, others in (("role", "from"), ("content", "value")):
        if own not in turn and others in turn:
            turn[own] = turn.pop(others)
    role, content = turn.get("role"), turn.get("content")
    if role is None:
        raise Broken(f"{where}: role is missing")
    turn["role"] = role = ROLES_OF_OTHERS.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        known = f"known are {', '.join((*ROLES, *ROLES_OF_OTHERS))}"
        if role in ("function_call", "tool_call"):
            known = "write the call as tool_calls of a turn of the assistant"
        raise Broken(f"{where}: unknown role {_quoted(role)}; {known}")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise Broken(f"{where}: content has parts that are no text")
        turn["content"] = content = "".join(map(str, texts))
    calls = turn.get("tool_calls")
    if content is None and not calls:
        raise Broken(f"{where}: content is missing")
    if not isinstance(content, str | None):
        raise Broken(f"{where}: content must be text, got {_quoted(content)}")
    may_be_empty = calls or role in ("system", "developer", "tool")
    if not may_be_empty and not str(content).strip():
        raise Broken(f"{where}: content is empty")
    if turn.get("weight", 1) not in (0, 1):
        raise Broken(f"{where}: weight must be 0 or 1, got {_quoted(turn['weight'])}")
    return turn


# Text and tokens

_MARKS = re.compile(r"\{\%-?\s*generation\s*-?%\}")
_UNTOLD = "the chat template renders the assistant's turns so that they cannot be told apart"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as text, and where its loss is: everywhere, behind a prompt, or in some spans."""

    text: str
    prompt: str | None = None
    """The tokens that the whole text has in common with it carry no loss."""
    spans: list[tuple[int, int]] | None = None
    """Of the characters that alone carry loss, in order."""
    is_templated: bool = False
    """Whether it went through a chat template, which brings the special tokens."""
    rejected: Rendered | None = None
    """Of a pair, what was rejected."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A row's tokens."""

    ids: NDArray[np.int32]
    mask: NDArray[np.int8]
    """1 where a token carries loss."""
    rejected: Tokens | None = None
    """Of a pair, what was rejected."""

    @property
    def members(self) -> tuple[Tokens, ...]:
        """The row, and of a pair both."""
        return (self,) if self.rejected is None else (self, self.rejected)

    @property
    def differs_from(self) -> int:
        """Of a pair, the first token in which one differs from the other."""
        assert self.rejected is not None
        return _common(self.ids, self.rejected.ids)

    @property
    def loss_count(self) -> int:
        """Tokens that carry loss: never the first, which nothing comes before to predict it."""
        return int(self.mask[1:].sum())


class Encoder:
    """Makes tokens of rows, as TRL's SFT trainer does.

    Chats go through the tokenizer's template, and have their special tokens from it. Other rows
    begin as the tokenizer begins them, and end with the end-of-sequence token. With loss on
    completions alone, that is on what TRL's completion mask and assistant mask have: a completion
    from where the tokens of its prompt end, of a chat the assistant's turns, without those of
    ``weight`` 0.

    Args:
        tokenizer: of transformers.
        kind: of the rows, one of `KINDS`.
        completions_only: whether loss is on completions and the assistant's turns alone.
        text_column: where each row is a text, its column.

    Raises:
        RowsError: rows are chats, and the tokenizer has no template for them.
    """

    def __init__(
        self, tokenizer: Any, kind: str, *, completions_only: bool, text_column: str | None = None
    ) -> None:
        self._tokenizer, self._kind, self._column = tokenizer, kind, text_column
        self._completions_only = completions_only
        self._is_marking = completions_only and kind in ("messages", "conversations")
        self._templates: dict[bool, str] = {}
        self._end: int | None = tokenizer.eos_token_id
        self._special = dict(tokenizer.special_tokens_map)
        self._fast = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        if kind in ("messages", "conversations"):
            self._template(has_tools=False)

    @property
    def unmarked_template(self) -> str | None:
        """The template of chats whose turns are told apart by comparing, as neither it nor TRL
        marks them; None where turns are marked, or all of a row carries loss."""
        if not self._is_marking:
            return None
        template = self._template(has_tools=False)
        return None if _MARKS.search(template) else template

    def rendered(self, fields: Mapping[str, Any]) -> Rendered:
        """Return a row as text. Raises Broken."""
        if self._kind == PREFERENCE:
            chosen, rejected = map(self._rendered, pair_of(fields))
            return replace(chosen, rejected=rejected)
        return self._rendered(example_of(fields, self._kind, text_column=self._column))

    def _rendered(self, example: Example) -> Rendered:
        if isinstance(example.completion, str):
            assert isinstance(example.prompt, str)
            prompt = example.prompt if self._completions_only else None
            rendered = Rendered(example.prompt + example.completion, prompt)
        else:
            rendered = self._of_chat(example)
        text = rendered.text
        if len(text) > CHARACTERS_MAX:
            most = f"at most {CHARACTERS_MAX:,}"
            raise Broken(f"{len(text):,} characters, of {most}: split it into rows")
        try:
            text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise Broken(f"holds {half!r}, half of a surrogate pair, which is no text") from None
        return rendered

    def tokens(self, rows: Sequence[Rendered]) -> list[Tokens]:
        """Return the tokens of each row."""
        if self._kind == PREFERENCE:
            chosen = self._all_tokens(rows)
            rejected = self._all_tokens([row.rejected for row in rows if row.rejected])
            return [_paired(*pair) for pair in zip(chosen, rejected, strict=True)]
        return self._all_tokens(rows)

    def _all_tokens(self, rows: Sequence[Rendered]) -> list[Tokens]:
        found: dict[int, Tokens] = {}
        for is_templated in (True, False):
            chosen = {i: row for i, row in enumerate(rows) if row.is_templated == is_templated}
            made = self._tokens(list(chosen.values()), adds=not is_templated)
            found |= zip(chosen, made, strict=True)
        return [found[index] for index in range(len(rows))]

    # Chats

    def _of_chat(self, example: Example) -> Rendered:
        assert isinstance(example.prompt, list)
        assert isinstance(example.completion, list)
        prompt, turns = example.prompt, [*example.prompt, *example.completion]
        silent = {index for index, turn in enumerate(turns) if turn.pop("weight", 1) == 0}
        if silent and (prompt or not self._completions_only):
            why = "is heeded in chats with data.completions_only=true alone"
            raise Broken(f"turn {min(silent) + 1}: weight 0 {why}")

        def render(turns: Sequence[Any], **options: Any) -> Any:
            from transformers.utils.chat_template_utils import render_jinja_template

            texts, marked = render_jinja_template(
                conversations=[turns],
                tools=example.tools,
                chat_template=template,
                **options,
                **{**self._special, **example.options},
            )
            return (texts[0], marked[0]) if "return_assistant_tokens_mask" in options else texts[0]

        template = self._template(has_tools=example.tools is not None)
        try:
            spans = before = None
            are_told = self._completions_only and not prompt
            if are_told and _MARKS.search(template):
                text, spans = render(turns, return_assistant_tokens_mask=True)
            else:
                text = render(turns)
            _check_said(turns, text)
            if are_told and spans is None:
                spans = _spans_by_comparing(turns, text, render)
            elif self._kind == PREFERENCE:
                before = render(prompt, add_generation_prompt=True)
            elif self._completions_only and prompt:
                before = _prompt(turns, len(prompt), text, render)
        except Broken:
            raise
        except Exception as error:
            # Code of somebody's, written for rows of theirs.
            from jinja2 import TemplateError

            verb = "refuses it" if isinstance(error, TemplateError) else "fails"
            raise Broken(f"the chat template {verb}: {error}") from error
        if not self._completions_only:
            return Rendered(text, is_templated=True)
        if spans is not None:
            spans = _without_silent(spans, turns, silent)
        return Rendered(text, before, spans, is_templated=True)

    def _template(self, *, has_tools: bool) -> str:
        """Return the chat template, of chats with loss on the assistant's turns alone one that
        marks these: the tokenizer's own, or TRL's for it."""
        if has_tools not in self._templates:
            try:
                own = self._tokenizer.get_chat_template(tools=[{}] if has_tools else None)
            except ValueError as error:
                name = self._tokenizer.name_or_path
                raise RowsError(
                    f"the tokenizer of '{name}' has no chat template, which these texts need: name "
                    "one that has with --set data.tokenizer=NAME (an instruct model's, say)"
                ) from error
            if self._is_marking and not _MARKS.search(own):
                from trl.chat_template_utils import get_training_chat_template

                # It has none for this template, or this one fails on what it tries.
                with suppress(Exception):
                    own = get_training_chat_template(self._tokenizer) or own
            self._templates[has_tools] = own
        return self._templates[has_tools]

    # Tokens

    def _tokens(self, rows: Sequence[Rendered], *, adds: bool) -> list[Tokens]:
        prompts = iter(self._ids([row.prompt for row in rows if row.prompt is not None], adds))
        texts = [row.text for row in rows]
        if self._fast is None or all(row.spans is None for row in rows):
            whole = self._ids(texts, adds)
            masks = [
                np.ones(len(ids), np.int8) if row.spans is None else self._slow_mask(row, ids, adds)
                for row, ids in zip(rows, whole, strict=True)
            ]
        else:
            encodings = self._fast.encode_batch(texts, add_special_tokens=adds)
            whole = [np.asarray(encoding.ids, np.int32) for encoding in encodings]
            masks = [_mask_of(*pair) for pair in zip(rows, encodings, strict=True)]
        found = []
        for row, ids, mask in zip(rows, whole, masks, strict=True):
            if row.prompt is not None:
                mask[: _common(next(prompts), ids)] = 0
            if adds and self._end is not None and (not len(ids) or ids[-1] != self._end):
                ids, mask = np.append(ids, np.int32(self._end)), np.append(mask, np.int8(1))
            found.append(Tokens(ids, mask))
        return found

    def _ids(self, texts: Sequence[str], adds: bool) -> list[NDArray[np.int32]]:
        if self._fast is not None:
            encoded = self._fast.encode_batch_fast(list(texts), add_special_tokens=adds)
            return [np.asarray(encoding.ids, np.int32) for encoding in encoded]
        slow = [self._tokenizer(one, add_special_tokens=adds, verbose=False) for one in texts]
        return [np.asarray(one["input_ids"], np.int32) for one in slow]

    def _slow_mask(self, row: Rendered, ids: NDArray[np.int32], adds: bool) -> NDArray[np.int8]:
        """Return the mask of a row by a tokenizer that is Python, and knows no characters."""
        mask = np.zeros(len(ids), np.int8)
        for begin, end in row.spans or ():
            first, last = self._ids([row.text[:begin], row.text[:end]], adds)
            mask[_common(first, ids) : len(ids) if end == len(row.text) else _common(last, ids)] = 1
        return mask


def _paired(chosen: Tokens, rejected: Tokens) -> Tokens:
    """Return a pair whose completions begin at the same token: the first that either has."""
    begin = min(int(one.mask.argmax()) for one in (chosen, rejected))
    for one in (chosen, rejected):
        one.mask[begin:] = 1
    return replace(chosen, rejected=rejected)


def _mask_of(row: Rendered, encoding: Any) -> NDArray[np.int8]:
    """Return 1 for the tokens of a row's spans; one that lies across an edge belongs to it."""

    def token_at(character: int) -> int:
        # Some characters belong to no token, such as blanks that a tokenizer trims.
        for at in range(character, min(len(row.text), character + 64)):
            token = encoding.char_to_token(at)
            if token is not None:
                return int(token)
        return len(encoding)

    if row.spans is None:
        return np.ones(len(encoding), np.int8)
    mask = np.zeros(len(encoding), np.int8)
    for begin, end in row.spans:
        last = encoding.char_to_token(end - 1)
        mask[token_at(begin) : token_at(end) if last is None else last + 1] = 1
    return mask


def _common(left: Any, right: Any) -> int:
    """Return how much two texts, the tokens or the turns of two, have in common from their
    beginning."""
    shorter = min(len(left), len(right))
    if isinstance(left, str | list):
        left, right = np.array([*left]), np.array([*right])
    others = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(others[0]) if len(others) else shorter


def _said(turn: Mapping[str, Any]) -> str:
    return str(turn.get("content") or "").strip()


def _answer(turn: Mapping[str, Any]) -> str:
    """Return what a turn says behind its thoughts."""
    return _said(turn).rpartition("</think>")[2].strip()


def _place(turn: Mapping[str, Any], text: str, first: int) -> tuple[int, int]:
    """Return where a turn's words begin and end, without thoughts that the template leaves out; -1
    and ``first`` where they are not there."""
    found = ((text.find(words, first), words) for words in (_said(turn), _answer(turn)) if words)
    # A later turn may say the same with its thoughts.
    places = [(begin, begin + len(words)) for begin, words in found if begin >= 0]
    return min(places, default=(-1, first))


def _check_said(turns: Sequence[Mapping[str, Any]], text: str) -> None:
    """Refuse a template that leaves out what is said; thoughts before an answer it may."""
    for number, turn in enumerate(turns, start=1):
        is_said = turn["role"] in ("user", "assistant") and not turn.get("tool_calls")
        if is_said and _answer(turn)[-32:] not in text:
            raise Broken(f"the chat template leaves out what turn {number} says")


def _prompt(
    turns: Sequence[Any], count: int, text: str, render: Callable[..., Any], *, clips: bool = False
) -> str:
    """Return what a turn's prompt is: the turns before it, with what prompts for it.

    Where a template prompts for a turn otherwise than it renders one, what both have in common is
    the prompt's; ``clips`` cuts it there.
    """
    prompted: str = render(turns[:count], add_generation_prompt=True) if count else ""
    if count and text.startswith(prompted):
        return prompted
    if count and text.startswith(render(turns[:count])):
        return prompted[: _common(prompted, text)] if clips else prompted
    # Some templates tell the turns before otherwise once this one follows. Its own words are looked
    # for, one turn after another, as an answer may repeat what was asked.
    begin, end = -1, 0
    for turn in turns[: count + 1]:
        begin, end = _place(turn, text, end)
    if begin < 0:
        raise Broken(_UNTOLD)
    return text[:begin]


def _spans_by_comparing(
    turns: Sequence[Any], text: str, render: Callable[..., Any]
) -> list[tuple[int, int]]:
    """Return the assistant's turns by what a template without marks makes of the turns up to each,
    with what it closes them by."""
    spans = []
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        begin = len(_prompt(turns, index, text, render, clips=True))
        through = text if index + 1 == len(turns) else render(turns[: index + 1])
        end = len(through)
        if not text.startswith(through):
            # Some leave an earlier turn's thoughts out: then its own words are looked for.
            found, end = _place(turn, text, begin)
            if found < 0:
                raise Broken(_UNTOLD)
            words = text[found:end]
            closing = through[through.rfind(words) + len(words) :]
            end += _common(closing, text[end:])
        spans.append((begin, end))
    return spans


def _without_silent(
    spans: list[tuple[int, int]], turns: Sequence[Any], silent: set[int]
) -> list[tuple[int, int]]:
    """Return the spans that hold something, without those of turns of weight 0."""
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if silent & set(answers):
        if len(spans) != len(answers):
            raise Broken(f"{_UNTOLD}, so that none can have weight 0")
        pairs = zip(spans, answers, strict=True)
        spans = [span for span, index in pairs if index not in silent]
        if not spans:
            raise Broken("every turn of the assistant has weight 0")
    spans = [(int(begin), int(end)) for begin, end in spans if begin < end]
    if not spans:
        raise Broken(_UNTOLD)
    return spans


def encoded(rows: Iterable[Read], encoder: Encoder) -> Iterator[tuple[Place, Tokens | Broken]]:
    """Yield each row as tokens that carry loss, or why it is left out.

    Some thousand rows are read and rendered ahead: tokenizers let go of Python's lock, so one
    thread is enough to have both going.
    """
    ahead: deque[Future[list[tuple[Place, Tokens | Broken]]]] = deque()
    with ThreadPoolExecutor(max_workers=1) as thread:
        for batch in _batches(rows, encoder):
            ahead.append(thread.submit(_tokens_of, batch, encoder))
            if len(ahead) > 2:
                yield from ahead.popleft().result()
        for left in ahead:
            yield from left.result()


def _batches(
    rows: Iterable[Read], encoder: Encoder
) -> Iterator[list[tuple[Place, Rendered | Broken]]]:
    """Yield rows as texts, a thousand or two million characters at a time."""
    batch: list[tuple[Place, Rendered | Broken]] = []
    characters = 0
    for place, fields in rows:
        try:
            row = fields if isinstance(fields, Broken) else encoder.rendered(fields)
        except Broken as broken:
            row = broken
        characters += len(row.text) if isinstance(row, Rendered) else 0
        batch.append((place, row))
        if len(batch) >= 1000 or characters >= 2_000_000:
            yield batch
            batch, characters = [], 0
    yield batch


def _tokens_of(
    batch: list[tuple[Place, Rendered | Broken]], encoder: Encoder
) -> list[tuple[Place, Tokens | Broken]]:
    tokens = iter(encoder.tokens([row for _, row in batch if isinstance(row, Rendered)]))
    made = ((place, row if isinstance(row, Broken) else next(tokens)) for place, row in batch)
    return [(place, row if isinstance(row, Broken) else _unless_empty(row)) for place, row in made]


def _unless_empty(row: Tokens) -> Tokens | Broken:
    """Return a row, or why there is nothing to learn from its tokens."""
    if not all(one.loss_count for one in row.members):
        return Broken("no token of it carries loss")
    if row.rejected is not None and np.array_equal(row.ids, row.rejected.ids):
        return Broken("chosen and rejected are the same tokens")
    return row


def tokenized(
    name: str,
    tokenizer: Any,
    kind: str = "auto",
    *,
    completions_only: bool | None = None,
    text_column: str | None = None,
) -> tuple[Any, list[tuple[Place, Broken]]]:
    """Return a dataset's rows as tokens, with the columns `INPUT` and `MASK`, and its broken rows;
    a pair as two rows, where ``preference`` is asked for.

    Raises:
        RowsError: the dataset cannot be read, or no row of it can be trained on.
    """
    from datasets import Dataset

    source = Source(name)
    asked = kind
    first, _, kind = first_rows(source, name, format=asked, text_column=text_column)
    if kind == PREFERENCE != asked:
        raise RowsError(f"{name}: its rows are pairs of completions, and this trains on texts")
    only = on_completions(kind, completions_only)
    encoder = Encoder(tokenizer, kind, completions_only=only, text_column=text_column)
    kept: list[Tokens] = []
    broken: list[tuple[Place, Broken]] = []
    for place, row in encoded(chain(first, source), encoder):
        if isinstance(row, Tokens):
            kept.extend(row.members)
        else:
            broken.append((place, row))
    if not kept:
        raise RowsError(all_broken(*broken[0], len(broken), name))
    columns = {INPUT: [row.ids for row in kept], MASK: [row.mask for row in kept]}
    return Dataset.from_dict(columns), broken


# Rows of a training


def split(
    rows: int, eval_fraction: float, seed: int, rows_per_sample: int = 1
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows that are trained on and those that are held out, each in rising order; pairs
    stay together.

    The same rows, share and seed give the same split on every machine. Of two rows and more at
    least one is trained on, and at least one is held out unless ``eval_fraction`` is 0.
    """
    if rows_per_sample > 1:
        trained, held_out = split(rows // rows_per_sample, eval_fraction, seed)
        return rows_of_samples(trained, rows_per_sample), rows_of_samples(held_out, rows_per_sample)
    held = round(rows * eval_fraction)
    if eval_fraction > 0.0 and rows > 1:
        held = min(max(held, 1), rows - 1)
    held = min(held, max(rows - 1, 0))
    # PCG64's stream is fixed by NumPy's policy; `permutation` has not changed with it so far.
    order = np.random.Generator(np.random.PCG64(seed)).permutation(rows)
    return np.sort(order[held:]), np.sort(order[:held])


def rows_of_samples(samples: NDArray[Any], rows_per_sample: int) -> NDArray[Any]:
    """Return the rows of samples: of a pair the chosen one, then the rejected one."""
    return (samples[:, None] * rows_per_sample + np.arange(rows_per_sample)).ravel()


def training_rows(data: Any, lengths: ArrayLike, kept: Any, settings: Any) -> Any:
    """Return rows of a dataset of tokens as `Collator` takes them: packed, or each with its
    ``length`` as it is cut, by which transformers' sampler groups.

    Args:
        data: with the columns `INPUT` and `MASK`.
        lengths: tokens of each of its rows.
        kept: numbers of the rows to train on, each with a token that carries loss once it is cut.
        settings: a configuration: seq_len, micro_batch_size, packing, attention, compile.
    """
    if settings.packing == "packed":
        from trl import pack_dataset

        return pack_dataset(
            data.select(kept), settings.seq_len, strategy="bfd", map_kwargs={"batch_size": 1000}
        ).with_format("numpy")
    cut = np.minimum(lengths, settings.seq_len)
    return data.add_column(LENGTH, cut).select(kept).with_format("numpy")


@dataclass(frozen=True)
class Truncation:
    """What a sequence length cuts off examples. A pair is one example, and both its rows count."""

    seq_len: int
    examples: int
    examples_cut: int
    """Those that are longer."""
    examples_left_out: int
    """Of these, the ones that nothing trains on: no supervised token of them is left, or a pair's
    rows do not differ any more."""
    tokens: int
    tokens_cut: int
    """Beyond the length, or of examples that are left out."""
    supervised_tokens: int
    supervised_tokens_cut: int

    @classmethod
    def of(
        cls,
        seq_len: int,
        *,
        lengths: ArrayLike,
        supervised: ArrayLike,
        left: ArrayLike,
        rows_per_sample: int = 1,
    ) -> Truncation:
        """Return what is cut off rows.

        Args:
            seq_len: to which they are cut.
            lengths: tokens of each row.
            supervised: those of them that are supervised.
            left: supervised tokens of each row once it is cut, 0 where nothing trains on it.
            rows_per_sample: 2 where each two rows are a pair.
        """
        shape = (-1, rows_per_sample)
        whole = np.asarray(lengths, dtype=np.int64).reshape(shape)
        carrying = np.asarray(supervised, dtype=np.int64).reshape(shape)
        carrying_left = np.asarray(left, dtype=np.int64).reshape(shape)
        is_used = (carrying_left > 0).all(1)
        is_longer = (whole > seq_len).any(1)
        used_tokens = np.minimum(whole, seq_len)[is_used].sum()
        return cls(
            seq_len=seq_len,
            examples=len(whole),
            examples_cut=int(np.count_nonzero(is_longer | ~is_used)),
            examples_left_out=int(np.count_nonzero(~is_used)),
            tokens=int(whole.sum()),
            tokens_cut=int(whole.sum() - used_tokens),
            supervised_tokens=int(carrying.sum()),
            supervised_tokens_cut=int(carrying.sum() - carrying_left[is_used].sum()),
        )

    def __add__(self, other: Truncation) -> Truncation:
        """Return what the length cuts off both sets of examples."""
        counts = vars(other)
        both = {name: count + counts[name] for name, count in vars(self).items()}
        return Truncation(**{**both, "seq_len": self.seq_len})

    @property
    def examples_share(self) -> float:
        """Share of the examples that are cut, 0 to 1."""
        return self.examples_cut / max(1, self.examples)

    @property
    def supervised_share(self) -> float:
        """Share of their supervised tokens that are cut, 0 to 1."""
        return self.supervised_tokens_cut / max(1, self.supervised_tokens)

    def words(self, noun: str = "example") -> str:
        """Return it as a sentence."""
        length = f"Length {self.seq_len:,}"
        of = f"of the {self.examples:,} {noun}s"
        if not self.examples_cut:
            return f"{length} cuts none {of}"
        examples = f"{self.examples_cut:,} {of} ({percent(self.examples_share)})"
        tokens = f"{percent(self.supervised_share)} of their supervised tokens"
        said = f"{length} cuts {examples} and {tokens}"
        if self.examples_left_out:
            said += f"; {self.examples_left_out:,} {noun}s keep no supervised token"
        return said


def percent(share: float) -> str:
    """Return a share of 0 to 1 in percent, with three digits: ``51.4 %``, ``0.0123 %``."""
    return f"{100 * share:.3g} %"


def by_member(samples: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the rows of samples as a micro-batch has them: of pairs all that were chosen first."""
    return list(chain.from_iterable(zip(*samples, strict=True)))


def is_flattened(settings: Any) -> bool:
    """Whether packed rows go through as one long row: how flash attention is told of examples, and
    what TRL does whatever the attention."""
    is_joined = getattr(settings, "trainer", "sweep") == "trl"
    is_joined = is_joined or settings.attention == "flash_attention_2"
    return settings.packing == "packed" and is_joined


def padded_widths(longest: ArrayLike, settings: Any) -> NDArray[np.int64]:
    """Return the tokens to which the rows of micro-batches are padded.

    Under ``compile`` to a multiple of a quarter of all: four static shapes at most.

    Args:
        longest: tokens of each one's longest row, cut; flattened, the tokens of all its rows.
        settings: of the training.
    """
    lengths = np.asarray(longest, dtype=np.int64)
    most = settings.seq_len * (settings.micro_batch_size if is_flattened(settings) else 1)
    if settings.packing == "packed" and not is_flattened(settings):
        return np.full_like(lengths, most)
    if not settings.compile:
        return lengths
    quarter = -(-most // 4)
    return np.minimum(most, -(-lengths // quarter) * quarter)


@dataclass(frozen=True)
class Collator:
    """Makes a micro-batch of rows that have `INPUT` and perhaps `MASK`, packed ones `SEQ_LENGTHS`
    too.

    Rows are cut and padded on the right, and no attention mask is passed, but for trainers that
    pass one: no token of a causal model sees the pads behind it, pads carry no loss, and flash and
    sdpa keep their fast kernels.
    Packed rows have ``position_ids`` that start again with each example, by which transformers
    keeps them apart. Padding, positions and the boundaries for flash attention are TRL's
    collator's. Under ``compile`` a micro-batch of texts has all its rows, of pads where there are
    too few.

    Returns int64 ``input_ids`` and ``labels`` of shape (rows, width).
    """

    settings: Any
    """A configuration: seq_len, micro_batch_size, packing, attention, compile, is_on_pairs,
    trainer, masks_padding."""
    pad_token_id: int = 0
    """Any token of the model."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the micro-batch."""
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        settings, is_flat = self.settings, is_flattened(self.settings)
        examples = [self._example(row) for row in rows]
        if settings.compile and not is_flat and not getattr(settings, "is_on_pairs", False):
            # The last micro-batch of an epoch would be compiled for its own number of rows.
            pads: dict[str, Any] = {INPUT: [self.pad_token_id], "labels": [IGNORED]}
            pads |= {SEQ_LENGTHS: [1]} if SEQ_LENGTHS in examples[0] else {}
            examples += [pads] * (settings.micro_batch_size - len(examples))
        lengths = [len(example[INPUT]) for example in examples]
        collate = DataCollatorForLanguageModeling(
            pad_token_id=self.pad_token_id,
            padding_free=is_flat,
            return_position_ids=settings.packing == "packed",
            pad_to_multiple_of=int(
                padded_widths(sum(lengths) if is_flat else max(lengths), settings)
            ),
        )
        batch: dict[str, Any] = collate(examples)
        if settings.packing == "packed" or not getattr(settings, "masks_padding", False):
            batch.pop("attention_mask", None)
        if "position_ids" in batch:
            # What begins an example is predicted from nothing, least of all from the one before.
            batch["labels"][batch["position_ids"] == 0] = IGNORED
        return batch

    def _example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row as TRL's collator takes it."""
        tokens = np.asarray(row[INPUT][: self.settings.seq_len], dtype=np.int64)
        labels = tokens.copy()
        if MASK in row:
            labels[np.asarray(row[MASK][: self.settings.seq_len]) == 0] = IGNORED
        labels[0] = IGNORED
        lengths = {SEQ_LENGTHS: list(map(int, row[SEQ_LENGTHS]))} if SEQ_LENGTHS in row else {}
        return {INPUT: tokens, "labels": labels, **lengths}
