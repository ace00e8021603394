"""Owns what `sweep data` says of a person's texts: lengths, and what a sequence length does to
them, as JSON or for a terminal.

Other commands that take texts have them prepared here too, with progress and notes on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

from reports import units
from search_spaces.errors import InputError
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.texts import TextsKind, TextsSummary
from sweep.data.cutting import cut_exactly
from sweep.data.lengths import (
    MICRO_BATCH_SIZE,
    Bin,
    Waste,
    candidate_lengths,
    histogram,
    waste_at,
    worthwhile_lengths,
)
from sweep.data.request import BROKEN_KEPT
from sweep.data.texts import PreparedTexts, TextsRequest, prepare_texts
from sweep.predict.forecast import Progress
from sweep.terminal.console import folded, note, say, say_json, table, width_of
from sweep.terminal.working import working

DONE = 0
_KINDS: dict[TextsKind, str] = {
    "text": "one text a row",
    "instruction": "instructions, in the words of Alpaca's prompt",
    "prompt-completion": "prompts and what completes them",
    "messages": "chats, by the tokenizer's chat template",
    "conversations": "ShareGPT's chats, by the tokenizer's chat template",
}
_BAR = 40
"""Characters of the longest bar of a histogram."""


def prepared(request: TextsRequest, *, progress: Progress | None = None) -> PreparedTexts:
    """Return a dataset as tokens, with progress and what is to be known of it on stderr.

    Raises what `prepare_texts` raises.
    """
    with working("reading the dataset") if progress is None else nullcontext(progress) as part:
        texts = prepare_texts(request, on_progress=lambda what, done, of: part(what)(done, of))
    tell_notes(texts, request.model)
    return texts


def tell_notes(texts: PreparedTexts, model: ModelSpec | None) -> None:
    """Print on stderr what a person should know of texts: which rows are broken, say."""
    for words in texts.notes(model):
        note(folded(f"warning: {words}", width_of(sys.stderr), indent=2))


def data(
    source: str,
    *,
    model: str | None,
    text_column: str | None,
    format: str | None,
    completions_only: bool | None,
    tokenizer: str | None,
    batch_size: int | None,
    as_json: bool,
) -> int:
    """Print what texts hold, how long their rows are, and which lengths are worth searching."""
    rows_at_once = MICRO_BATCH_SIZE if batch_size is None else batch_size
    if rows_at_once < 1:
        raise InputError(f"--batch-size must be at least 1, got {rows_at_once}")
    spec = None if model is None else load_model_spec(model)
    texts = prepared(
        TextsRequest(
            source,
            spec,
            text_column=text_column,
            format=format or "auto",
            completions_only=bool(completions_only),
            tokenizer=tokenizer,
        )
    )
    with working("looking at lengths") as part:
        wastes = _wastes(texts, spec, micro_batch_size=rows_at_once, tell=part("lengths"))
    limit = None if spec is None else spec.max_positions
    worthwhile = worthwhile_lengths(texts.lengths(), max_positions=limit)
    if as_json:
        say_json(_document(texts, wastes, worthwhile, spec, micro_batch_size=rows_at_once))
    else:
        say(_text(texts, wastes, worthwhile, micro_batch_size=rows_at_once))
    return DONE


def _wastes(
    texts: PreparedTexts, model: ModelSpec | None, *, micro_batch_size: int, tell: Any
) -> list[Waste]:
    """Return what each candidate length does; those that leave nothing to learn are left out."""
    lengths, loss_lengths = texts.lengths(), texts.loss_lengths()
    limit = None if model is None else model.max_positions
    exact = partial(cut_exactly, texts.directory, lengths, loss_lengths)
    candidates = candidate_lengths(lengths, max_positions=limit)
    found = []
    for done, seq_len in enumerate(candidates):
        tell(done, len(candidates))
        waste = waste_at(
            seq_len,
            lengths,
            loss_lengths,
            micro_batch_size=micro_batch_size,
            cut_at=exact if texts.summary.completions_only else None,
        )
        found.append(waste)
    return [waste for waste in found if waste is not None]


def _document(
    texts: PreparedTexts,
    wastes: Sequence[Waste],
    worthwhile: Sequence[int],
    model: ModelSpec | None,
    *,
    micro_batch_size: int,
) -> dict[str, Any]:
    summary = texts.summary
    return {
        "source": summary.source,
        "rows": summary.rows,
        "kind": summary.kind,
        "format": summary.format,
        "broken": [asdict(row) for row in texts.broken()],
        "broken_rows": summary.broken,
        "broken_listed_max": BROKEN_KEPT,
        "tokens": summary.tokens,
        "loss_tokens": summary.loss_tokens,
        "completions_only": summary.completions_only,
        "quantiles": summary.quantiles.model_dump(),
        "histogram": [asdict(bin) for bin in histogram(texts.lengths())],
        "micro_batch_size": micro_batch_size,
        "lengths": [
            asdict(waste) | {"is_worth_searching": waste.seq_len in worthwhile} for waste in wastes
        ],
        "worthwhile_lengths": list(worthwhile),
        "tokenizer": summary.tokenizer,
        "tokenizer_size": summary.tokenizer_size,
        "model": None if model is None else model.name,
        "max_positions": None if model is None else model.max_positions,
        "fingerprint": summary.fingerprint,
        "notes": list(texts.notes(model)),
    }


def _text(
    texts: PreparedTexts,
    wastes: Sequence[Waste],
    worthwhile: Sequence[int],
    *,
    micro_batch_size: int,
) -> str:
    width = width_of(sys.stdout)
    parts = [
        folded(_opening(texts.summary), width, indent=2),
        _drawn(histogram(texts.lengths()), width=width),
        _waste_table(wastes, worthwhile, width=width),
        folded(_explanation(worthwhile, micro_batch_size), width, indent=2),
    ]
    return "\n\n".join(parts)


def _opening(summary: TextsSummary) -> str:
    told = "as --data-format says" if summary.format != "auto" else "recognised by its columns"
    if summary.text_column is not None:
        told = f"column '{summary.text_column}'"
    found = summary.quantiles
    broken = f", and {summary.broken:,} broken" if summary.broken else ""
    loss = summary.loss_tokens / summary.tokens
    which = "completions only" if summary.completions_only else "all but the first of a row"
    return (
        f"{summary.source}: {units.plural(summary.rows, 'row')}{broken}: "
        f"{_KINDS[summary.kind]} ({summary.kind}, {told})\n"
        f"{summary.tokens:,} tokens of tokenizer '{summary.tokenizer}', {units.share(loss)} of "
        f"them carry loss ({which})\n"
        f"Tokens of a row: median {found.p50:,}, 90 % up to {found.p90:,}, 95 % up to "
        f"{found.p95:,}, 99 % up to {found.p99:,}, longest {found.max:,}"
    )


def _drawn(bins: Sequence[Bin], *, width: int | None) -> str:
    """Return a histogram, a line for each range."""
    most = max(bin.rows for bin in bins)
    block = "█" if _shows(sys.stdout.encoding, "█") else "#"
    names = [f"{bin.at_least:,}–{bin.at_most:,}" for bin in bins]
    counts = [f"{bin.rows:,}" for bin in bins]
    left, right = max(map(len, names)), max(map(len, counts))
    room = _BAR if width is None else max(5, min(_BAR, width - left - right - 4))
    lines = [
        f"{name:>{left}}  {count:>{right}}  {block * _length(bin.rows, most, room)}".rstrip()
        for bin, name, count in zip(bins, names, counts, strict=True)
    ]
    return "\n".join([f"{'tokens':>{left}}  {'rows':>{right}}", *lines])


def _length(rows: int, most: int, room: int) -> int:
    """Return a bar's characters: at least one where there are rows."""
    return max(round(room * rows / most), 1 if rows else 0)


def _shows(encoding: str | None, text: str) -> bool:
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _waste_table(wastes: Sequence[Waste], worthwhile: Sequence[int], *, width: int | None) -> str:
    header = ("seq_len", "rows cut", "tokens cut", "padded", "grouped", "packed", "")
    rows = [
        (
            f"{waste.seq_len:,}",
            units.share(waste.rows_cut),
            units.share(waste.tokens_cut),
            units.share(waste.padding_waste),
            units.share(waste.grouped_waste),
            units.share(waste.packed_waste),
            "worth searching" if waste.seq_len in worthwhile else "",
        )
        for waste in wastes
    ]
    return table(header, rows, width=width)


def _explanation(worthwhile: Sequence[int], micro_batch_size: int) -> str:
    lengths = ", ".join(map(str, worthwhile))
    return (
        "padded, grouped, packed: share of computed tokens that are pads, in micro-batches of "
        f"{micro_batch_size} rows drawn at random, drawn by like length, and of packed rows.\n"
        f"Worth searching: seq_len: [{lengths}]"
    )
