"""`sweep data`: how long a dataset's examples are, and what a sequence length does to them.

Other commands that take a dataset have it prepared here too, with progress and notes on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, get_args

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.dataset_choice import DatasetKind, DatasetSummary
from qlora_sweep.search_spaces.errors import InputError, did_you_mean
from qlora_sweep.search_spaces.kinds import Method
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
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
from qlora_sweep.sweep.data.prepared_dataset import (
    BROKEN_KEPT,
    DatasetRequest,
    PreparedDataset,
    prepare_dataset,
)
from qlora_sweep.sweep.data.study_epochs import StudyEpochs
from qlora_sweep.sweep.predict.forecast import Progress
from qlora_sweep.sweep.terminal import options
from qlora_sweep.sweep.terminal.console import folded, note_folded, say_result, width_of, working
from qlora_sweep.sweep.terminal.drawing import table

_KINDS: Mapping[DatasetKind, str] = {
    "text": "one text each",
    "instruction": "instructions, in Alpaca's prompt",
    "prompt-completion": "prompts and completions",
    "messages": "chats, by the tokenizer's chat template",
    "preference": "pairs of a chosen and a rejected completion",
    "conversations": "ShareGPT's chats, by the tokenizer's chat template",
}
_BAR = 40
"""Characters of the longest bar of a histogram."""


def prepared(request: DatasetRequest, *, progress: Progress | None = None) -> PreparedDataset:
    """Return a dataset as tokens, with progress and what is to be known of it on stderr.

    Raises what `prepare_dataset` raises.
    """
    shown = nullcontext(progress) if progress else working("reading the dataset")
    with shown as part:
        dataset = prepare_dataset(request, on_progress=lambda what, done, of: part(what)(done, of))
    for words in dataset.notes(request.model):
        note_folded(f"warning: {words}", indent=2)
    return dataset


def data(
    source: str,
    *,
    model: str | None,
    method: str | None,
    settings: Sequence[str] | None,
    as_json: bool,
) -> None:
    """Print what a dataset holds, how long its examples are, and which lengths to search."""
    methods = get_args(Method)
    if method is not None and method not in methods:
        raise InputError(f"--method {method}: unknown method{did_you_mean(method, methods)}")
    configuration, of_space = options.settings(
        {}, settings, only=["micro_batch_size"], also=options.DATA_SETTINGS
    )
    batch = configuration.get("micro_batch_size", MICRO_BATCH_SIZE)
    spec = None
    limit = None
    if model is not None:
        spec = load_model_spec(model)
        limit = spec.max_positions
    dataset = prepared(DatasetRequest(source, spec, **options.dataset(None, of_space)))
    if method is not None:
        refuse_other_kind(method, dataset)
    lengths = dataset.lengths()
    with working("looking at lengths") as part:
        wastes = _wastes(dataset, limit, micro_batch_size=batch, tell=part("lengths"))
    truncation_at = StudyEpochs.of_all(dataset).truncation
    worthwhile = worthwhile_lengths(lengths, max_positions=limit, truncation_at=truncation_at)
    document = _document(dataset, spec)
    document["micro_batch_size"] = batch
    document["lengths"] = [
        {**asdict(waste), "is_worth_searching": waste.seq_len in worthwhile} for waste in wastes
    ]
    document["worthwhile_lengths"] = list(worthwhile)
    width = width_of(sys.stdout)
    noun = "examples"
    if dataset.summary.are_pairs:
        noun = "rows"
    parts = [
        folded(_opening(dataset.summary), width, indent=2),
        _drawn(histogram(lengths), noun, width=width),
        _lengths_table(wastes, worthwhile, noun, width=width),
        folded(_explanation(dataset.summary, batch, worthwhile), width, indent=2),
    ]
    say_result(document, "\n\n".join(parts), as_json=as_json)


def _lengths_table(
    wastes: Sequence[Waste], worthwhile: Collection[int], noun: str, *, width: int | None
) -> str:
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
    rows: list[Sequence[str]] = []
    for waste in wastes:
        rows.append(
            (
                f"{waste.seq_len:,}",
                units.share(waste.rows_cut),
                units.share(waste.tokens_cut),
                units.share(waste.supervised_tokens_cut),
                units.share(waste.padding_waste),
                units.share(waste.grouped_waste),
                units.share(waste.packed_waste) if waste.packed_waste is not None else "–",
                "worth searching" if waste.seq_len in worthwhile else "",
            )
        )
    return table(header, rows, width=width)


def _explanation(summary: DatasetSummary, batch: int, worthwhile: Iterable[int]) -> str:
    words = "padded, grouped, packed"
    samples = f"examples, of {batch} of similar length, and with packed sequences"
    if summary.are_pairs:
        words = "padded, grouped"
        samples = f"pairs and of {batch} of similar length"
    return (
        f"{words}: share of padding in computed tokens, with micro-batches of {batch} random "
        f"{samples}.\n"
        f"Worth searching: seq_len: [{', '.join(map(str, worthwhile))}]"
    )


def _wastes(
    dataset: PreparedDataset, limit: int | None, *, micro_batch_size: int, tell: Any
) -> list[Waste]:
    """Return what each candidate length does; those that leave nothing to learn are left out."""
    lengths = dataset.lengths()
    loss_lengths = dataset.loss_lengths()
    exact = partial(cut_exactly, dataset.directory, lengths, loss_lengths)
    method: Method = "dpo" if dataset.summary.are_pairs else "sft"
    candidates = candidate_lengths(lengths, max_positions=limit)
    wastes: list[Waste] = []
    for done, seq_len in enumerate(candidates):
        tell(done, len(candidates))
        waste = waste_at(
            seq_len,
            lengths,
            loss_lengths,
            micro_batch_size=micro_batch_size,
            cut_at=exact,
            method=method,
        )
        if waste is not None:
            wastes.append(waste)
    return wastes


def _document(dataset: PreparedDataset, model: ModelSpec | None) -> dict[str, Any]:
    """Return what ``sweep data --json`` says of the dataset itself."""
    summary = dataset.summary
    same = {"source", "rows", "kind", "format", "tokens", "loss_tokens", "completions_only"}
    same |= {"quantiles", "tokenizer", "tokenizer_size", "fingerprint"}
    return {
        **summary.model_dump(include=same),
        "broken": [asdict(row) for row in dataset.broken()],
        "broken_rows": summary.broken,
        "broken_listed_max": BROKEN_KEPT,
        "histogram": [asdict(bin) for bin in histogram(dataset.lengths())],
        "model": model and model.name,
        "max_positions": model and model.max_positions,
        "notes": list(dataset.notes(model)),
    }


def _opening(summary: DatasetSummary) -> str:
    recognised = "recognised by its columns"
    if summary.text_column is not None:
        recognised = f"column '{summary.text_column}'"
    elif summary.prompt_column is not None:
        recognised = "columns as named"
    elif summary.format != "auto":
        recognised = "as data.format says"
    examples = units.plural(summary.rows, "example")
    if summary.broken:
        examples += f", and {summary.broken:,} broken"
    supervised = "all but an example's first"
    if summary.completions_only:
        supervised = "completions only"
    if summary.completions_only == on_completions(summary.kind):
        supervised += ", as in TRL"
    share = units.share(summary.loss_tokens / summary.tokens)
    found = summary.quantiles
    each = "example"
    if summary.are_pairs:
        each = "row"
    return (
        f"{summary.source}: {examples}: {_KINDS[summary.kind]} ({summary.kind}, {recognised})\n"
        f"{summary.tokens:,} tokens of tokenizer '{summary.tokenizer}', {share} of them supervised "
        f"({supervised})\n"
        f"Tokens per {each}: median {found.p50:,}, 90 % up to {found.p90:,}, 95 % up to "
        f"{found.p95:,}, 99 % up to {found.p99:,}, longest {found.max:,}"
    )


def _drawn(bins: Sequence[Bin], noun: str, *, width: int | None) -> str:
    """Return a histogram, a line for each range, of at least one character if it has examples."""
    most = max(bin.rows for bin in bins)
    names: list[str] = []
    counts: list[str] = []
    for bin in bins:
        names.append(f"{bin.at_least:,}–{bin.at_most:,}")
        counts.append(f"{bin.rows:,}")
    left = max(map(len, names))
    right = max(len(noun), max(map(len, counts)))
    room = _BAR
    if width is not None:
        room = max(5, min(_BAR, width - left - right - 4))
    lines = [f"{'tokens':>{left}}  {noun:>{right}}"]
    for bin, name, count in zip(bins, names, counts, strict=True):
        length = round(room * bin.rows / most)
        if bin.rows:
            length = max(length, 1)
        lines.append(f"{name:>{left}}  {count:>{right}}  {'█' * length}".rstrip())
    return "\n".join(lines)
