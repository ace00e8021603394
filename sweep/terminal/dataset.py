"""`sweep data`: how long a dataset's examples are, and what a sequence length does to them.

Other commands that take a dataset have it prepared here too, with progress and notes on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, get_args

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.errors import InputError, did_you_mean
from qlora_sweep.search_spaces.kinds import Method
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.texts import TextsKind, TextsSummary
from qlora_sweep.sweep.data.choice import refuse_other_kind
from qlora_sweep.sweep.data.epoch import cut_exactly
from qlora_sweep.sweep.data.kinds import on_completions
from qlora_sweep.sweep.data.lengths import (
    MICRO_BATCH_SIZE,
    Bin,
    Waste,
    candidate_lengths,
    histogram,
    waste_at,
    worthwhile_lengths,
)
from qlora_sweep.sweep.data.study_epochs import StudyEpochs
from qlora_sweep.sweep.data.texts import BROKEN_KEPT, PreparedTexts, TextsRequest, prepare_texts
from qlora_sweep.sweep.predict.forecast import Progress
from qlora_sweep.sweep.terminal import options
from qlora_sweep.sweep.terminal.console import folded, note_folded, say_result, width_of, working
from qlora_sweep.sweep.terminal.drawing import table

_KINDS: Mapping[TextsKind, str] = {
    "text": "one text each",
    "instruction": "instructions, in Alpaca's prompt",
    "prompt-completion": "prompts and completions",
    "messages": "chats, by the tokenizer's chat template",
    "preference": "pairs of a chosen and a rejected completion",
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
    for words in texts.notes(request.model):
        note_folded(f"warning: {words}", indent=2)
    return texts


def data(
    source: str,
    *,
    model: str | None,
    method: str | None,
    settings: Sequence[str] | None,
    as_json: bool,
) -> None:
    """Print what a dataset holds, how long its examples are, and which lengths to search."""
    if method is not None and method not in get_args(Method):
        raise InputError(
            f"--method {method}: unknown method{did_you_mean(method, get_args(Method))}"
        )
    how = options.settings({}, settings, only=["micro_batch_size"], also=options.DATA_SETTINGS)
    batch = how[0].get("micro_batch_size", MICRO_BATCH_SIZE)
    spec = None if model is None else load_model_spec(model)
    texts = prepared(TextsRequest(source, spec, **options.dataset(None, how[1])))
    if method is not None:
        refuse_other_kind(method, texts)
    limit, lengths = None if spec is None else spec.max_positions, texts.lengths()
    with working("looking at lengths") as part:
        wastes = _wastes(texts, limit, micro_batch_size=batch, tell=part("lengths"))
    truncation_at = StudyEpochs.of_all(texts).truncation
    worthwhile = worthwhile_lengths(lengths, max_positions=limit, truncation_at=truncation_at)
    document = _document(texts, spec) | {
        "micro_batch_size": batch,
        "lengths": [
            asdict(waste) | {"is_worth_searching": waste.seq_len in worthwhile} for waste in wastes
        ],
        "worthwhile_lengths": list(worthwhile),
    }
    width, is_on_pairs = width_of(sys.stdout), texts.summary.are_pairs
    shares, samples, also = "padded, grouped, packed", "examples,", ", and with packed sequences"
    if is_on_pairs:
        shares, samples, also = "padded, grouped", "pairs and", ""
    explanation = (
        f"{shares}: share of padding in computed tokens, with micro-batches of {batch} random "
        f"{samples} of {batch} of similar length{also}.\n"
        f"Worth searching: seq_len: [{', '.join(map(str, worthwhile))}]"
    )
    noun = "rows" if is_on_pairs else "examples"
    header = (
        "seq_len",
        f"{noun} cut",
        "tokens cut",
        "supervised cut",
        "padded",
        "grouped",
        "packed",
        "",
    )
    rows = [
        (
            f"{waste.seq_len:,}",
            units.share(waste.rows_cut),
            units.share(waste.tokens_cut),
            units.share(waste.supervised_tokens_cut),
            units.share(waste.padding_waste),
            units.share(waste.grouped_waste),
            "–" if waste.packed_waste is None else units.share(waste.packed_waste),
            "worth searching" if waste.seq_len in worthwhile else "",
        )
        for waste in wastes
    ]
    parts = [
        folded(_opening(texts.summary), width, indent=2),
        _drawn(histogram(lengths), noun, width=width),
        table(header, rows, width=width),
        folded(explanation, width, indent=2),
    ]
    say_result(document, "\n\n".join(parts), as_json=as_json)


def _wastes(
    texts: PreparedTexts, limit: int | None, *, micro_batch_size: int, tell: Any
) -> list[Waste]:
    """Return what each candidate length does; those that leave nothing to learn are left out."""
    lengths, loss_lengths = texts.lengths(), texts.loss_lengths()
    exact = partial(cut_exactly, texts.directory, lengths, loss_lengths)
    method: Method = "dpo" if texts.summary.are_pairs else "sft"
    wasted = partial(waste_at, micro_batch_size=micro_batch_size, cut_at=exact, method=method)
    candidates, found = candidate_lengths(lengths, max_positions=limit), list[Waste | None]()
    for done, seq_len in enumerate(candidates):
        tell(done, len(candidates))
        found.append(wasted(seq_len, lengths, loss_lengths))
    return [*filter(None, found)]


def _document(texts: PreparedTexts, model: ModelSpec | None) -> dict[str, Any]:
    """Return what ``sweep data --json`` says of the dataset itself."""
    summary = texts.summary
    same = {"source", "rows", "kind", "format", "tokens", "loss_tokens", "completions_only"}
    same |= {"quantiles", "tokenizer", "tokenizer_size", "fingerprint"}
    return {
        **summary.model_dump(include=same),
        "broken": [asdict(row) for row in texts.broken()],
        "broken_rows": summary.broken,
        "broken_listed_max": BROKEN_KEPT,
        "histogram": [asdict(bin) for bin in histogram(texts.lengths())],
        "model": None if model is None else model.name,
        "max_positions": None if model is None else model.max_positions,
        "notes": list(texts.notes(model)),
    }


def _opening(summary: TextsSummary) -> str:
    told = "as data.format says" if summary.format != "auto" else "recognised by its columns"
    if summary.text_column is not None:
        told = f"column '{summary.text_column}'"
    elif summary.prompt_column is not None:
        told = "columns as named"
    found, each = summary.quantiles, "row" if summary.are_pairs else "example"
    broken = f", and {summary.broken:,} broken" if summary.broken else ""
    loss = units.share(summary.loss_tokens / summary.tokens)
    which = "completions only" if summary.completions_only else "all but an example's first"
    if summary.completions_only == on_completions(summary.kind):
        which += ", as in TRL"
    return (
        f"{summary.source}: {units.plural(summary.rows, 'example')}{broken}: "
        f"{_KINDS[summary.kind]} ({summary.kind}, {told})\n"
        f"{summary.tokens:,} tokens of tokenizer '{summary.tokenizer}', {loss} of them supervised "
        f"({which})\n"
        f"Tokens per {each}: median {found.p50:,}, 90 % up to {found.p90:,}, 95 % up to "
        f"{found.p95:,}, 99 % up to {found.p99:,}, longest {found.max:,}"
    )


def _drawn(bins: Sequence[Bin], noun: str, *, width: int | None) -> str:
    """Return a histogram, a line for each range, of at least one character if it has examples."""
    most = max(bin.rows for bin in bins)
    names = [f"{bin.at_least:,}–{bin.at_most:,}" for bin in bins]
    counts = [f"{bin.rows:,}" for bin in bins]
    left, right = max(map(len, names)), max(len(noun), *map(len, counts))
    room = _BAR if width is None else max(5, min(_BAR, width - left - right - 4))
    lines = [f"{'tokens':>{left}}  {noun:>{right}}"]
    for bin, name, count in zip(bins, names, counts, strict=True):
        bar = "█" * max(round(room * bin.rows / most), 1 if bin.rows else 0)
        lines.append(f"{name:>{left}}  {count:>{right}}  {bar}".rstrip())
    return "\n".join(lines)
