"""The page's sections of words and tables alone: what next, the dataset, all trials, versions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qlora_sweep.reports import answer, words
from qlora_sweep.reports import format as units
from qlora_sweep.reports.advice import how_to_go_faster
from qlora_sweep.reports.confirmed_rows import confirmed_rows
from qlora_sweep.reports.document import TrialTable
from qlora_sweep.reports.figures import Section
from qlora_sweep.reports.view import StudyView
from qlora_sweep.storage.ranking import RankedTrial


def next_steps_of(view: StudyView) -> Section | None:
    """Return what is to be done with a winner; None without one, as the decision says it then."""
    if view.winner is None:
        return None
    return Section(
        commands=answer.commands(view),
        configuration=json.dumps(view.winner.config.model_dump(mode="json"), indent=2),
        advice=how_to_go_faster(view),
        confirmations=list(confirmed_rows(view)),
    )


def texts_of(view: StudyView) -> Section | None:
    """Return what the report says of a study's dataset; None of a study without."""
    dataset = view.definition.texts
    if dataset is None:
        return None
    counted = "loss on every token"
    if dataset.completions_only:
        counted = "loss on completions alone"
    noun = "rows"
    if dataset.are_pairs:
        noun = "pairs"
    rows = f"{dataset.rows:,}"
    if dataset.broken:
        rows += f", and {dataset.broken:,} that cannot be trained on"
    held_out = 0.0
    if view.space.data:
        held_out = view.space.data.eval_fraction
    lengths = dataset.quantiles
    facts = {
        "dataset": f"{dataset.source}: {dataset.kind}, {counted}",
        noun: rows,
        "tokens": f"{dataset.tokens:,}, of which {dataset.loss_tokens:,} are supervised",
        "lengths": f"half of the rows up to {lengths.p50:,} tokens, 95 % up to {lengths.p95:,}, "
        f"99 % up to {lengths.p99:,}, the longest {lengths.max:,}",
        "held out": f"{units.share(held_out)} of the {noun}; none of them is part of an epoch",
        "tokenizer": dataset.tokenizer,
        "fingerprint": dataset.fingerprint,
    }
    if view.winner is not None and view.winner.epoch is not None:
        facts["cut by the winner"] = words.cut_in_words(view.winner.epoch, view.winner.config)
    title = f"Dataset: {Path(dataset.source).name}"
    return Section(title=title, facts=facts.items(), cuts=list(_by_length(view)))


def _by_length(view: StudyView) -> Iterator[tuple[str, ...]]:
    """Yield the fastest of each length: length, trial, tokens/s, share of the tokens that it cuts
    off or leaves out, epoch."""
    fastest: dict[int, RankedTrial] = {}
    for trial in sorted(view.ranked, key=lambda ranked: ranked.estimate.value, reverse=True):
        fastest.setdefault(trial.config.seq_len, trial)
    for length, trial in sorted(fastest.items()):
        epoch = view.epoch_of(trial)
        if epoch is None:
            continue
        epoch_words = units.duration(epoch.seconds)
        if epoch.dollars is not None:
            epoch_words += f", {units.usd(epoch.dollars)}"
        yield (
            units.count(length),
            str(trial.number),
            units.rate(trial.estimate.value),
            units.share(epoch.tokens_cut + epoch.tokens_left_out),
            epoch_words,
        )


def trials_of(document: TrialTable) -> Section | None:
    """Return what the table of all trials may be filtered by; None where there are none."""
    if not document.records:
        return None
    counts = Counter(record.verdict for record in document.records)
    verdicts = {}
    meanings = {}
    for verdict, label in words.VERDICT_LABELS.items():
        count = counts[verdict]
        if count:
            verdicts[str(verdict)] = f"{label} ({count:,})"
            meanings[label] = words.VERDICT_MEANINGS[verdict]
    return Section(total=len(document.records), verdicts=verdicts, meanings=meanings)


def environment_rows(view: StudyView) -> list[tuple[str, str]]:
    """Return what the study ran on and with: the target first, then the stored fingerprint."""
    space = view.space
    rows = {
        "model": view.model or units.DASH,
        "weights": space.weights,
        "target GPU": view.gpu.name,
        "memory budget": units.gib(view.gpu.budget_bytes),
        "measured on": view.gpu.emulated_on or view.gpu.name,
        "search space": f"{space.name} (sampler {space.sampler}, seed {space.seed})",
        "driver time": units.duration(view.seconds["wall"]),
    }
    for key, value in view.environment.items():
        named: Mapping[str, Any] = {key.replace("_", " "): value}
        if isinstance(value, Mapping):
            named = value
        for name, entry in named.items():
            rows[name] = units.DASH
            if entry is not None:
                rows[name] = str(entry)
    return list(rows.items())
