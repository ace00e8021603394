"""Preparing a dataset in the child: read, recognised, rendered, tokenized, written, named.

The directory comes to be under a name of its own and is renamed once it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from transformers import AutoTokenizer

from qlora_sweep.search_spaces.dataset_choice import DatasetKind, DatasetSummary, LengthQuantiles
from qlora_sweep.search_spaces.errors import InputError, words_of
from qlora_sweep.search_spaces.redaction import redact
from qlora_sweep.storage import files
from qlora_sweep.sweep.data import prepared_dataset
from qlora_sweep.sweep.data.collation import INPUT, MASK
from qlora_sweep.sweep.data.encoding import Encoder, Tokens, encoded
from qlora_sweep.sweep.data.epoch import DIFFERENCES
from qlora_sweep.sweep.data.files import Broken, DatasetSource, Place, Read
from qlora_sweep.sweep.data.kinds import all_broken, first_rows, on_completions
from qlora_sweep.sweep.data.marking import marked
from qlora_sweep.sweep.data.prepared_dataset import (
    BROKEN_KEPT,
    BrokenRow,
    PreparationRequest,
    Progress,
    is_whole,
    translated,
)
from qlora_sweep.sweep.data.tokenizers import why_unreadable

_ROWS_AT_ONCE = 1000
_WRITING = "tokens.arrow"
_UNFINISHED = ".unfinished"
_LEFT_SECONDS = 24 * 3600.0
_FEATURES = Features({INPUT: List(Value("int32")), MASK: List(Value("int8"))})


def prepare(question: PreparationRequest, *, on_progress: Progress) -> Path:
    """Return the directory of a prepared dataset, which may have been there.

    Raises:
        InputError: the dataset, an option or the tokenizer are not right.
        EnvironmentFault: something cannot be read.
        OSError: something cannot be written.
    """
    with translated(question.source):
        source = DatasetSource(question.source)
    content = question.content or str(source.data._fingerprint)
    home = Path(question.home)
    note = question.note(content)
    known = prepared_dataset.noted(note)
    if is_whole(known):
        return known
    files.make_directory(home)
    for left in home.glob(f"*{_UNFINISHED}"):
        # Of a preparation that was killed; what is still written to is younger.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".", suffix=_UNFINISHED, dir=home))
    try:
        directory = home / _write(question, source, unfinished, content, on_progress)
        with translated(question.source):
            if (
                question.seen is not None
                and prepared_dataset.seen(question.source) != question.seen
            ):
                # What was read is not what it would be known by.
                raise InputError(
                    f"{question.source}: changed while it was read: run the command again"
                )
        if not is_whole(directory):
            shutil.rmtree(directory, ignore_errors=True)
        try:
            unfinished.rename(directory)
        except OSError:
            # Other versions may have made the same of it, or another process been faster.
            if not is_whole(directory):
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    files.replace(note, directory.name.encode(), is_durable=False)
    return directory


def load_tokenizer(directory: Path, *, name: str) -> Any:
    """Return the tokenizer in a directory; code that it may bring is never run.

    Raises:
        InputError: transformers cannot read it.
    """
    try:
        return AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        # Each tokenizer's code, and the tokenizers library, raise errors of their own.
        why = why_unreadable(directory)
        if why is not None:
            raise InputError(f"tokenizer '{name}': {why}") from error
        raise InputError(
            f"tokenizer '{name}': transformers cannot read it: {words_of(error)}"
        ) from error


class _Counts:
    """What is kept of the rows beside their tokens, as they are written."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.loss_lengths: list[int] = []
        self.differences: list[int] = []
        """Of each pair, the first token in which one differs from the other."""
        self.largest_token = 0
        self._digest = hashlib.sha256()

    def add(self, rows: Iterable[Tokens]) -> None:
        """Take in rows in their order."""
        for row in rows:
            self.lengths.append(len(row.ids))
            self.loss_lengths.append(row.loss_count)
            self.largest_token = max(self.largest_token, int(row.ids.max()))
            self._digest.update(row.ids.tobytes() + row.mask.tobytes())

    def digest(self) -> str:
        """Return a hash of all rows."""
        self._digest.update(np.array(self.lengths, np.int32).tobytes())
        return self._digest.hexdigest()

    def save(self, directory: Path) -> None:
        """Write them beside the tokens."""
        np.save(directory / prepared_dataset.LENGTHS, np.array(self.lengths, np.int32))
        np.save(directory / prepared_dataset.LOSS_LENGTHS, np.array(self.loss_lengths, np.int32))
        if self.differences:
            np.save(directory / DIFFERENCES, np.array(self.differences, np.int32))

    def quantiles(self) -> LengthQuantiles:
        """Return those of the lengths."""
        shares = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "max": 1.0}
        of_rows = np.quantile(self.lengths, list(shares.values()), method="inverted_cdf")
        return LengthQuantiles(**dict(zip(shares, map(int, of_rows), strict=True)))


class _BrokenRows:
    """The rows that cannot be trained on: how many, and the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[BrokenRow] = []

    def left_out(self, rows: Iterable[tuple[Place, Tokens | Broken]]) -> Iterator[Tokens]:
        """Yield the other rows."""
        for place, row in rows:
            if isinstance(row, Tokens):
                yield row
                continue
            self.count += 1
            if len(self.first) < BROKEN_KEPT:
                self.first.append(BrokenRow(place.file, place.line, redact(row.reason)))

    def fault(self, source: str) -> InputError:
        """Return the error of a dataset that has no other rows."""
        row = self.first[0]
        place = Place(row.file, row.line)
        return InputError(all_broken(place, Broken(row.reason), self.count, source))

    def save(self, directory: Path) -> None:
        """Write the first of them, a line each."""
        lines = "".join(f"{json.dumps(asdict(row))}\n" for row in self.first)
        (directory / prepared_dataset.BROKEN).write_text(lines, encoding="utf-8")


def _write(
    asked: PreparationRequest,
    source: DatasetSource,
    directory: Path,
    content: str,
    on_progress: Progress,
) -> str:
    """Write all that there is of a prepared dataset, the summary last, as it says that the rest is
    there; return its fingerprint."""
    on_progress(source.unit, source.done, source.total)
    with translated(asked.source):
        first, columns, layout = first_rows(source, asked.source, asked.asked)
        completions_only = on_completions(layout.kind, asked.completions_only)
        tokenizer = load_tokenizer(Path(asked.tokenizer_directory), name=asked.tokenizer)
        tokenizer.name_or_path = asked.tokenizer
        encoder = Encoder(tokenizer, layout, completions_only=completions_only)
    broken = _BrokenRows()
    counts = _Counts()
    rows = broken.left_out(encoded(_translated(chain(first, source), asked.source), encoder))
    path = directory / _WRITING
    with ArrowWriter(features=_FEATURES, path=str(path)) as writer:
        while samples := list(islice(rows, _ROWS_AT_ONCE)):
            members: list[Tokens] = []
            for sample in samples:
                members += sample.members
                if sample.rejected is not None:
                    counts.differences.append(sample.differs_from)
            writer.write_table(_table(members))
            counts.add(members)
            on_progress(source.unit, source.done, source.total)
        if not counts.lengths:
            raise broken.fault(asked.source)
        writer.finalize()
    Dataset.from_file(str(path)).save_to_disk(str(directory / prepared_dataset.TOKENS))
    path.unlink()
    fingerprint = asked.fingerprint(content, counts.digest())
    counts.save(directory)
    broken.save(directory)
    marked_template = None
    if encoder.unmarked_template is not None:
        marked_template = marked(encoder.unmarked_template)
    summary = DatasetSummary(
        source=asked.source,
        kind=cast(DatasetKind, layout.kind),
        **asdict(asked.asked),
        columns_read={name: _text_of(column) for name, column in layout.columns.items()},
        columns=tuple(map(_text_of, columns)),
        fingerprint=fingerprint,
        tokenizer=asked.tokenizer,
        tokenizer_size=len(tokenizer),
        largest_token=counts.largest_token,
        completions_only=completions_only,
        rows=len(counts.differences or counts.lengths),
        broken=broken.count,
        silenced=encoder.silenced,
        tokens=sum(counts.lengths),
        loss_tokens=sum(counts.loss_lengths),
        longest=max(counts.lengths),
        quantiles=counts.quantiles(),
        notes=tuple(map(_text_of, chain(source.notes, layout.notes, encoder.notes))),
        marked_template=marked_template,
    )
    text = summary.model_dump_json(indent=1)
    (directory / prepared_dataset.SUMMARY).write_text(text, encoding="utf-8")
    return fingerprint


def _text_of(name: str) -> str:
    """Return a name, which may hold bytes that are no UTF-8 and half a character, as text."""
    return name.encode(errors="replace").decode()


def _translated(found: Iterable[Read], name: str) -> Iterator[Read]:
    """Yield rows; what is wrong with reading them is said as errors of ours."""
    with translated(name):
        yield from found


def _table(rows: Sequence[Tokens]) -> pa.Table:
    """Return rows as a table that is copied nowhere."""
    lengths = [0]
    lengths += [len(row.ids) for row in rows]
    ends = pa.array(np.cumsum(lengths, dtype=np.int32))
    columns = {
        INPUT: np.concatenate([row.ids for row in rows]),
        MASK: np.concatenate([row.mask for row in rows]),
    }
    return pa.table(
        {name: pa.ListArray.from_arrays(ends, pa.array(all)) for name, all in columns.items()},
        schema=_FEATURES.arrow_schema,
    )
