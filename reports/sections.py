"""The page's sections of words and tables alone: what next, the dataset, all trials, versions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from qlora_sweep.reports import sentences, units, words
from qlora_sweep.reports.advice import how_to_go_faster
from qlora_sweep.reports.figures import Section
from qlora_sweep.reports.view import StudyView, epoch_of, view_of
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.ranking import verdict_counts
from qlora_sweep.storage.records import TrialRecord


def next_steps_of(snapshot: StudySnapshot) -> Section | None:
    """Return what is to be done with a winner; None without one, as the decision says it then."""
    view = view_of(snapshot)
    if view.winner is None:
        return None
    return Section(
        commands=sentences.commands(view),
        configuration=json.dumps(view.winner.config.model_dump(mode="json"), indent=2),
        advice=how_to_go_faster(view),
        confirmations=list(sentences.confirmed_rows(view)),
    )


def texts_of(snapshot: StudySnapshot) -> Section | None:
    """Return what the report says of a study's dataset; None of a study without."""
    view, texts = view_of(snapshot), snapshot.definition.texts
    if texts is None:
        return None
    choice, q = snapshot.definition.space.data, texts.quantiles
    counted = "loss on completions alone" if texts.completions_only else "loss on every token"
    broken = f", and {texts.broken:,} that cannot be trained on" if texts.broken else ""
    held_out = units.share(choice.eval_fraction if choice else 0.0)
    noun = "pairs" if texts.are_pairs else "rows"
    facts = {
        "dataset": f"{texts.source}: {texts.kind}, {counted}",
        noun: f"{texts.rows:,}{broken}",
        "tokens": f"{texts.tokens:,}, of which {texts.loss_tokens:,} are supervised",
        "lengths": f"half of the rows up to {q.p50:,} tokens, 95 % up to {q.p95:,}, 99 % up to "
        f"{q.p99:,}, the longest {q.max:,}",
        "held out": f"{held_out} of the {noun}; none of them is part of an epoch",
        "tokenizer": texts.tokenizer,
        "fingerprint": texts.fingerprint,
    }
    if view.winner is not None and view.winner.epoch is not None:
        cut = words.cut_in_words(view.winner.epoch, view.winner.config)
        facts["cut by the winner"] = cut
    title = f"Dataset: {Path(texts.source).name}"
    return Section(title=title, facts=facts.items(), cuts=list(_by_length(view)))


def _by_length(view: StudyView) -> Iterator[tuple[str, ...]]:
    """Yield the fastest of each length: length, trial, tokens/s, share of the tokens that it cuts
    off or leaves out, epoch."""
    fastest: dict[int, TrialRecord] = {}
    for record in sorted(view.ranking.ranked, key=lambda r: -view.ranking.speed_of(r)):
        fastest.setdefault(record.config.seq_len, record)
    for length, record in sorted(fastest.items()):
        epoch, rate = epoch_of(view.snapshot, record), view.ranking.speed_of(record)
        if epoch is None:
            continue
        money = "" if epoch.dollars is None else f", {units.usd(epoch.dollars)}"
        lost = units.share(epoch.tokens_cut + epoch.tokens_left_out)
        took = units.DASH if epoch.seconds is None else f"{units.duration(epoch.seconds)}{money}"
        yield units.count(length), str(record.number), units.rate(rate), lost, took


def trials_of(snapshot: StudySnapshot) -> Section | None:
    """Return what the table of all trials may be filtered by; None where there are none."""
    counts = verdict_counts(snapshot.records)
    ended = [verdict for verdict in words.VERDICT_LABELS if counts[verdict]]
    if not ended:
        return None
    return Section(
        total=len(snapshot.records),
        verdicts={str(v): f"{words.VERDICT_LABELS[v]} ({counts[v]:,})" for v in ended},
        meanings={words.VERDICT_LABELS[v]: words.VERDICT_MEANINGS[v] for v in ended},
    )


def environment_rows(snapshot: StudySnapshot) -> list[tuple[str, str]]:
    """Return what the study ran on and with: the target first, then the stored fingerprint."""
    target, space = snapshot.definition.target, snapshot.definition.space
    known = {
        "model": str(snapshot.definition.model.get("name", units.DASH)),
        "weights": space.weights,
        "target GPU": target.gpu,
        "memory budget": units.gib(target.budget_bytes),
        "measured on": target.emulated_on or target.gpu,
        "search space": f"{space.name} (sampler {space.sampler}, seed {space.seed})",
        "driver time": units.duration(snapshot.wall_seconds),
    }
    for key, value in snapshot.environment.items():
        of_key = value if isinstance(value, Mapping) else {key.replace("_", " "): value}
        known |= {name: units.DASH if its is None else str(its) for name, its in of_key.items()}
    return list(known.items())
