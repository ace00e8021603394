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
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from transformers import AutoTokenizer

from qlora_sweep.search_spaces.errors import InputError, words_of
from qlora_sweep.search_spaces.redaction import redact
from qlora_sweep.search_spaces.texts import LengthQuantiles, TextsKind, TextsSummary
from qlora_sweep.storage import files
from qlora_sweep.sweep.data import texts
from qlora_sweep.sweep.data.collation import INPUT, MASK
from qlora_sweep.sweep.data.encoding import Encoder, Tokens, encoded
from qlora_sweep.sweep.data.epoch import DIFFERENCES
from qlora_sweep.sweep.data.files import Broken, Place, Read, Source
from qlora_sweep.sweep.data.kinds import all_broken, first_rows, on_completions
from qlora_sweep.sweep.data.marking import marked
from qlora_sweep.sweep.data.texts import (
    BROKEN_KEPT,
    BrokenRow,
    Progress,
    Question,
    is_whole,
    translated,
)
from qlora_sweep.sweep.data.tokenizers import why_unreadable

_ROWS_AT_ONCE = 1000
_WRITING = "tokens.arrow"
_UNFINISHED = ".unfinished"
_LEFT_SECONDS = 24 * 3600.0
_FEATURES = Features({INPUT: List(Value("int32")), MASK: List(Value("int8"))})


def prepare(question: Question, *, on_progress: Progress) -> Path:
    """Return the directory of a prepared dataset, which may have been there.

    Raises:
        InputError: the dataset, an option or the tokenizer are not right.
        EnvironmentFault: something cannot be read.
        OSError: something cannot be written.
    """
    with translated(question.source):
        source = Source(question.source)
    content = question.content or str(source.data._fingerprint)
    home = Path(question.home)
    note = question.note(content)
    noted = texts.noted(note)
    if is_whole(noted):
        return noted
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
            if question.seen is not None and texts.seen(question.source) != question.seen:
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


def _write(
    asked: Question, source: Source, directory: Path, content: str, on_progress: Progress
) -> str:
    """Write all that there is of a prepared dataset, the summary last, as it says that the rest is
    there; return its fingerprint."""
    on_progress(source.unit, source.done, source.total)
    with translated(asked.source):
        first, columns, layout = first_rows(source, asked.source, asked.asked)
        only = on_completions(layout.kind, asked.completions_only)
        tokenizer = load_tokenizer(Path(asked.tokenizer_directory), name=asked.tokenizer)
        tokenizer.name_or_path = asked.tokenizer
        encoder = Encoder(tokenizer, layout, completions_only=only)
    lengths: list[int] = []
    loss_lengths: list[int] = []
    differences: list[int] = []
    broken: list[BrokenRow] = []
    broken_count = 0
    largest = 0
    digest = hashlib.sha256()

    def good() -> Iterator[Tokens]:
        """Yield the rows that can be trained on, and note the others."""
        nonlocal broken_count
        for place, row in encoded(_translated(chain(first, source), asked.source), encoder):
            if isinstance(row, Tokens):
                yield row
                continue
            broken_count += 1
            if len(broken) < BROKEN_KEPT:
                broken.append(BrokenRow(place.file, place.line, redact(row.reason)))

    path = directory / _WRITING
    with ArrowWriter(features=_FEATURES, path=str(path)) as writer:
        samples = good()
        while batch := list(islice(samples, _ROWS_AT_ONCE)):
            kept: list[Tokens] = []
            for sample in batch:
                kept += sample.members
                if sample.rejected is not None:
                    differences.append(sample.differs_from)
            writer.write_table(_table(kept))
            for row in kept:
                lengths.append(len(row.ids))
                loss_lengths.append(row.loss_count)
                largest = max(largest, int(row.ids.max()))
                digest.update(row.ids.tobytes() + row.mask.tobytes())
            on_progress(source.unit, source.done, source.total)
        if not lengths:
            place = Place(broken[0].file, broken[0].line)
            why = Broken(broken[0].reason)
            raise InputError(all_broken(place, why, broken_count, asked.source))
        writer.finalize()
    Dataset.from_file(str(path)).save_to_disk(str(directory / texts.TOKENS))
    path.unlink()
    counts = np.array(lengths, np.int32)
    digest.update(counts.tobytes())
    fingerprint = asked.fingerprint(content, digest.hexdigest())
    np.save(directory / texts.LENGTHS, counts)
    np.save(directory / texts.LOSS_LENGTHS, np.array(loss_lengths, np.int32))
    if differences:
        np.save(directory / DIFFERENCES, np.array(differences, np.int32))
    lines = "".join(f"{json.dumps(asdict(row))}\n" for row in broken)
    (directory / texts.BROKEN).write_text(lines, encoding="utf-8")
    marked_template = encoder.unmarked_template
    if marked_template is not None:
        marked_template = marked(marked_template)
    shares = (0.50, 0.90, 0.95, 0.99, 1.0)
    p50, p90, p95, p99, longest = np.quantile(counts, shares, method="inverted_cdf").tolist()
    summary = TextsSummary(
        source=asked.source,
        kind=cast(TextsKind, layout.kind),
        **asdict(asked.asked),
        columns_read={name: _text_of(column) for name, column in layout.columns.items()},
        columns=tuple(map(_text_of, columns)),
        fingerprint=fingerprint,
        tokenizer=asked.tokenizer,
        tokenizer_size=len(tokenizer),
        largest_token=largest,
        completions_only=only,
        rows=len(differences or lengths),
        broken=broken_count,
        silenced=encoder.silenced,
        tokens=int(counts.sum(dtype=np.int64)),
        loss_tokens=sum(loss_lengths),
        longest=longest,
        quantiles=LengthQuantiles(p50=p50, p90=p90, p95=p95, p99=p99, max=longest),
        notes=tuple(map(_text_of, source.notes + layout.notes + encoder.notes)),
        marked_template=marked_template,
    )
    text = summary.model_dump_json(indent=1)
    (directory / texts.SUMMARY).write_text(text, encoding="utf-8")
    return fingerprint


def _text_of(name: str) -> str:
    """Return a name, which may hold bytes that are no UTF-8 and half a character, as text."""
    return name.encode(errors="replace").decode()


def _translated(found: Iterable[Read], name: str) -> Iterator[Read]:
    """Yield rows; what is wrong with reading them is said as errors of ours."""
    with translated(name):
        yield from found


def _table(kept: list[Tokens]) -> pa.Table:
    """Return rows as a table that is copied nowhere."""
    ids = [row.ids for row in kept]
    masks = [row.mask for row in kept]
    offsets = pa.array(np.cumsum([0] + list(map(len, ids)), dtype=np.int32))
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values)))
        for values in (ids, masks)
    ]
    return pa.table(columns, schema=_FEATURES.arrow_schema)
