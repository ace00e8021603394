"""Preparing texts in the child: read, recognised, rendered, tokenized, written, named.

The directory comes to be under a name of its own and is renamed once it is whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from numpy.typing import NDArray

from search_spaces.errors import InputError, quote
from search_spaces.texts import LengthQuantiles, TextsFormat, TextsKind, TextsSummary
from storage import files
from sweep.data import request as own
from sweep.data.files import text_files
from sweep.data.first_rows import all_broken, first_rows
from sweep.data.formats import Read
from sweep.data.kinds import Broken, Row, parsed
from sweep.data.rendering import Rendered, renderer
from sweep.data.request import BrokenRow, Place, Progress, Question
from sweep.data.sources import Files, Hub, source_of
from sweep.data.tokenizing import Tokenizing, Tokens, load_tokenizer

_CHARACTERS_AT_ONCE = 2_000_000
"""In a batch; the library's own objects take a hundred times the bytes until they are copied."""
_CHARACTERS_MAX = 8_000_000
"""Of a row, for which the library takes a gigabyte and more; no model reads a tenth of them."""
_ROWS_AT_ONCE = 1000
_BATCHES_AHEAD = 2
_WRITING = "tokens.arrow"
_LOCK = "lock"
_UNFINISHED = ".unfinished"

Lengths = NDArray[np.int32]


def prepare(question: Question, *, on_progress: Progress) -> Path:
    """Return the directory of prepared texts, which may have been there.

    Raises:
        InputError: the texts, an option or the tokenizer are not right.
        EnvironmentFault: something cannot be read.
        OSError: something cannot be written.
    """
    source = source_of(question.source)
    content = _content_of(source) if question.content is None else question.content
    directory = Path(question.home) / question.fingerprint(content)
    if own.is_whole(directory):
        return directory
    files.make_directory(directory.parent)
    _remove_unfinished(directory.parent)
    with _unfinished(directory) as unfinished:
        _Preparation(question, source, unfinished, on_progress).run(directory.name)
        _require_unchanged(question)
        _put(unfinished, directory)
    return directory


def _content_of(source: Files | Hub) -> str:
    assert isinstance(source, Hub)
    return source.fingerprint


def _require_unchanged(question: Question) -> None:
    """Refuse texts that were written to since their content was looked at: what was read is not
    what it would be known by."""
    if question.seen is not None and own.seen(text_files(question.source)) != question.seen:
        raise InputError(f"{question.source}: changed while it was read: run the command again")


@contextlib.contextmanager
def _unfinished(directory: Path) -> Iterator[Path]:
    """Make a directory of a passing name, locked as long as it is written to."""
    made = directory.with_name(f".{directory.name}.{os.urandom(4).hex()}{_UNFINISHED}")
    files.make_directory(made)
    try:
        with (made / _LOCK).open("wb") as lock:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_unfinished(home: Path) -> None:
    """Remove what preparations left that were killed; what is still written to is locked."""
    for left in home.glob(f".*{_UNFINISHED}"):
        with contextlib.suppress(OSError), (left / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)


def _put(unfinished: Path, directory: Path) -> None:
    """Give a whole directory its name, unless another process was faster with the same."""
    (unfinished / _LOCK).unlink()
    if directory.exists() and not own.is_whole(directory):
        shutil.rmtree(directory)
    try:
        unfinished.rename(directory)
    except OSError:
        if not own.is_whole(directory):
            raise


class _Preparation:
    """One walk through texts."""

    def __init__(
        self, question: Question, source: Files | Hub, directory: Path, on_progress: Progress
    ) -> None:
        self._question, self._source, self._directory = question, source, directory
        self._on_progress = on_progress
        self._broken: list[BrokenRow] = []
        self._broken_count = 0

    def run(self, fingerprint: str) -> None:
        """Write all that there is of prepared texts into the directory."""
        self._tell()
        asked, rows = self._question, self._source.rows()
        first, columns, kind = first_rows(rows, asked)
        name = asked.tokenizer
        tokenizer = load_tokenizer(Path(self._question.tokenizer_directory), name=name)
        render = renderer(
            tokenizer,
            name=name,
            is_chat=kind in ("messages", "conversations"),
            completions_only=asked.completions_only,
        )
        rendered = self._rendered(chain(first, rows), kind, render)
        lengths, loss_lengths, largest = self._write(rendered, Tokenizing(tokenizer))
        summary = TextsSummary(
            source=asked.source,
            kind=kind,
            format=cast(TextsFormat, asked.format),
            text_column=asked.text_column,
            # A name may hold bytes that are no UTF-8, and half a character.
            columns=tuple(name.encode(errors="replace").decode() for name in columns),
            fingerprint=fingerprint,
            tokenizer=name,
            tokenizer_size=len(tokenizer),
            largest_token=largest,
            completions_only=asked.completions_only,
            rows=len(lengths),
            broken=self._broken_count,
            tokens=int(lengths.sum(dtype=np.int64)),
            loss_tokens=int(loss_lengths.sum(dtype=np.int64)),
            longest=int(lengths.max()),
            quantiles=quantiles_of(lengths),
            notes=self._source.notes,
        )
        self._save(summary, lengths, loss_lengths)

    def _tell(self) -> None:
        self._on_progress(self._source.unit, self._source.done, self._source.total)

    def _rendered(
        self, rows: Iterable[Read], kind: TextsKind, render: Callable[[Row], Rendered | Broken]
    ) -> Iterator[tuple[Place, Rendered]]:
        """Yield the rows that a tokenizer can read."""
        for place, values in rows:
            result = self._of_row(values, kind, render)
            if isinstance(result, Broken):
                self._note(place, result)
            else:
                yield place, result

    def _of_row(
        self,
        values: dict[str, Any] | Broken,
        kind: TextsKind,
        render: Callable[[Row], Rendered | Broken],
    ) -> Rendered | Broken:
        if isinstance(values, Broken):
            return values
        row = parsed(values, kind, text_column=self._question.text_column)
        return row if isinstance(row, Broken) else _readable(render(row))

    def _note(self, place: Place, broken: Broken) -> None:
        self._broken_count += 1
        if len(self._broken) < own.BROKEN_KEPT:
            self._broken.append(BrokenRow(place.file, place.line, broken.reason))

    def _write(
        self, rendered: Iterator[tuple[Place, Rendered]], tokenizing: Tokenizing
    ) -> tuple[Lengths, Lengths, int]:
        """Write the tokens; return each row's, those that carry loss, and the largest id."""
        lengths: list[Lengths] = []
        loss_lengths: list[Lengths] = []
        largest = 0
        path = self._directory / _WRITING
        with ArrowWriter(features=self._features(), path=str(path)) as writer:
            for places, batch in _tokenized(rendered, tokenizing):
                kept = [
                    tokens
                    for place, tokens in zip(places, batch, strict=True)
                    if self._is_kept(place, tokens)
                ]
                if kept:
                    writer.write_table(self._table(kept))
                    lengths.append(np.array([len(row.ids) for row in kept], np.int32))
                    loss_lengths.append(np.array([row.loss_count for row in kept], np.int32))
                    largest = max(largest, *(int(row.ids.max()) for row in kept))
                self._tell()
            if not lengths:
                raise InputError(
                    all_broken(self._broken[0], self._broken_count, self._question.source)
                )
            writer.finalize()
        Dataset.from_file(str(path)).save_to_disk(str(self._directory / own.TOKENS))
        path.unlink()
        return np.concatenate(lengths), np.concatenate(loss_lengths), largest

    def _is_kept(self, place: Place, tokens: Tokens) -> bool:
        """Return whether there is anything to learn in a row; else it is broken."""
        if len(tokens.ids) and tokens.loss_count:
            return True
        is_empty = not len(tokens.ids)
        self._note(place, Broken("gives no token" if is_empty else "no token of it carries loss"))
        return False

    def _features(self) -> Features:
        """Return the columns of the tokens' table."""
        columns = {"input_ids": List(Value("int32"))}
        if self._question.completions_only:
            columns["completion_mask"] = List(Value("int8"))
        return Features(columns)

    def _table(self, rows: list[Tokens]) -> pa.Table:
        """Return rows as a table that is copied nowhere."""
        ends = np.cumsum([0, *(len(row.ids) for row in rows)], dtype=np.int32)
        columns = {"input_ids": pa.array(np.concatenate([row.ids for row in rows]))}
        if self._question.completions_only:
            columns["completion_mask"] = pa.array(np.concatenate([row.mask for row in rows]))
        return pa.table(
            {name: pa.ListArray.from_arrays(pa.array(ends), it) for name, it in columns.items()},
            schema=self._features().arrow_schema,
        )

    def _save(self, summary: TextsSummary, lengths: Lengths, loss_lengths: Lengths) -> None:
        """Write all but the tokens; the summary last, as it says that the rest is there."""
        np.save(self._directory / own.LENGTHS, lengths)
        np.save(self._directory / own.LOSS_LENGTHS, loss_lengths)
        broken = sorted(self._broken, key=lambda row: (row.file, row.line))
        lines = "".join(f"{json.dumps(asdict(row))}\n" for row in broken)
        (self._directory / own.BROKEN).write_text(lines, encoding="utf-8")
        text = summary.model_dump_json(indent=1)
        (self._directory / own.SUMMARY).write_text(text, encoding="utf-8")


def _readable(rendered: Rendered | Broken) -> Rendered | Broken:
    """Return text that tokenizers can read: JSON can write half a character."""
    if isinstance(rendered, Broken):
        return rendered
    if (count := len(rendered.text)) > _CHARACTERS_MAX:
        return Broken(f"{count:,} characters, of at most {_CHARACTERS_MAX:,}: split it into rows")
    if rendered.text.isascii():
        return rendered
    try:
        rendered.text.encode()
    except UnicodeEncodeError as error:
        half = rendered.text[error.start]
        return Broken(f"holds {quote(half)}, half of a surrogate pair, which is no text")
    return rendered


def _tokenized(
    rendered: Iterator[tuple[Place, Rendered]], tokenizing: Tokenizing
) -> Iterator[tuple[list[Place], list[Tokens]]]:
    """Yield batches of rows as tokens, while the next are read and rendered.

    Tokenizers let go of Python's lock, so one thread is enough to have both going.
    """
    ahead: deque[tuple[list[Place], Future[list[Tokens]]]] = deque()
    with ThreadPoolExecutor(max_workers=1) as thread:
        for batch in _batches(rendered):
            places, texts = [place for place, _ in batch], [text for _, text in batch]
            ahead.append((places, thread.submit(tokenizing, texts)))
            if len(ahead) > _BATCHES_AHEAD:
                done, future = ahead.popleft()
                yield done, future.result()
        for places, future in ahead:
            yield places, future.result()


def _batches(
    rendered: Iterator[tuple[Place, Rendered]],
) -> Iterator[list[tuple[Place, Rendered]]]:
    batch: list[tuple[Place, Rendered]] = []
    characters = 0
    for row in rendered:
        batch.append(row)
        characters += len(row[1].text)
        if len(batch) >= _ROWS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def quantiles_of(lengths: Lengths) -> LengthQuantiles:
    """Return the shortest lengths that so many in a hundred rows do not pass."""
    shares = (0.50, 0.90, 0.95, 0.99, 1.0)
    found = np.quantile(lengths, shares, method="inverted_cdf")
    names = ("p50", "p90", "p95", "p99", "max")
    return LengthQuantiles(**{n: int(v) for n, v in zip(names, found, strict=True)})
