"""What a report is decided by: the answer, what to take instead for memory or money, and how sure
that is.

Speeds are those on the target GPU, and money follows from them. Which trial is the fastest goes by
them as well.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from qlora_sweep.reports import sentences, units, words
from qlora_sweep.reports.advice import how_to_go_faster
from qlora_sweep.reports.comparison import training_words
from qlora_sweep.reports.view import StudyView, view_of
from qlora_sweep.search_spaces.costs import AskedWork
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.ranking import measured_of
from qlora_sweep.storage.records import TrialRecord

SPEED_LOSS = 0.10
"""Share of the best speed that may be given up for memory."""


@dataclass(frozen=True)
class Card:
    """The configuration to take, as text."""

    number: int
    what: str
    """The configuration in words, and what was odd about its measurement."""
    facts: tuple[tuple[str, str], ...]
    """Names and sentences, the terminal's own."""
    memory_share: float
    """Of the budget, 0 to 1."""
    recipes: tuple[tuple[str, str], ...]
    """What there is to copy: a label and the text."""


@dataclass(frozen=True)
class Decision:
    """The first screen of a report."""

    headline: str
    command: str
    """What to type to be surer; empty where nothing would help."""
    card: Card | None
    """None where nothing fits."""
    lines: tuple[tuple[str, str], ...]
    """What to take instead: for what, and that."""
    price_source: str
    notes: tuple[str, ...]
    advice: tuple[str, ...]
    """What it would take to have an answer; empty where there is one."""


def decision_of(snapshot: StudySnapshot, work: AskedWork | None = None) -> Decision:
    """Return what a report is decided by.

    Args:
        snapshot: the study.
        work: the training that is to be priced; an epoch of the dataset where nothing is asked.
    """
    view = view_of(snapshot)
    is_sure = view.winner is None or view.ranking.is_settled
    return Decision(
        headline=sentences.headline(view),
        command="" if is_sure else sentences.commands(view)[0],
        card=None if view.winner is None else _card(view, view.winner, work or AskedWork()),
        lines=tuple(_instead(view)),
        price_source="" if snapshot.offer is None else snapshot.offer.source,
        notes=tuple(sentences.notes(view)),
        advice=() if view.winner else tuple(how_to_go_faster(view)),
    )


def _card(view: StudyView, record: TrialRecord, work: AskedWork) -> Card:
    measured, baseline = measured_of(record), view.ranking.definition.space.baseline_config()
    configuration = sentences.in_words(record.config, baseline)
    facts = [fact for fact in sentences.facts(view) if fact[0] not in ("trials", "warning")]
    if not work.is_asked and record.epoch is not None:
        work = AskedWork(tokens=record.epoch.loss_tokens)
    if told := training_words(view.snapshot, record, work):
        facts.append(("training", told))
    return Card(
        number=record.number,
        what="; ".join(filter(None, (configuration, words.flags_in_words(measured)))),
        facts=tuple(facts),
        memory_share=min(1.0, measured.peak_allocated_bytes / view.gpu.budget_bytes),
        recipes=tuple(_recipes(view, record)),
    )


def _recipes(view: StudyView, record: TrialRecord) -> Iterator[tuple[str, str]]:
    """Yield what there is to copy: the command that writes a script of it, and its values."""
    if sentences.commands(view):
        script = f"sweep export {shlex.quote(view.study)} --format script"
        yield "command", f"{script} --trial {record.number}"
    values = record.config.model_dump(mode="json")
    yield "JSON", json.dumps(values, indent=2)
    yield "YAML", yaml.safe_dump(values, sort_keys=False)


def _instead(view: StudyView) -> Iterator[tuple[str, str]]:
    """Yield what answers another question than the study's, where that is another trial."""
    ranking, snapshot = view.ranking, view.snapshot
    known = {record.number for record in ranking.ranked}
    fastest = [record for record in ranking.by_speed if record.number in known]
    if view.winner is None:
        return
    is_told_apart = not ranking.ratio(fastest[0], view.winner).is_open
    own = ranking.fastest_of_baselines_class or ranking.baseline
    alike = [r for r in fastest if not ranking.is_for_speed_alone or ranking.is_asked(r.config)]
    limit = (1.0 - SPEED_LOSS) * max(ranking.speed_of(record) for record in alike)
    usd = {r.number: ends for r in (view.winner, *fastest) if (ends := snapshot.usd_interval(r))}
    least, _ = usd.get(view.winner.number, (0.0, 0.0))
    cheaper = [record for record in fastest if usd.get(record.number, (least, least))[1] < least]
    baseline = ranking.definition.space.baseline_config()
    questions = {
        "Fastest": fastest[0] if is_told_apart else None,
        f"Fastest at {words.capacity(baseline)}, as the baseline": own,
        "Cheapest per token": min(cheaper, key=lambda r: sum(usd[r.number]), default=None),
        f"Most memory left, at most {units.percent(SPEED_LOSS)} slower than the fastest": min(
            (record for record in alike if ranking.speed_of(record) >= limit),
            key=lambda record: measured_of(record).peak_allocated_bytes,
        ),
    }
    answers: dict[int, tuple[TrialRecord, list[str]]] = {}
    for title, found in questions.items():
        if found is not None and found.number != view.winner.number:
            answers.setdefault(found.number, (found, []))[1].append(title)
    for record, titles in answers.values():
        said = (
            sentences.speed_on_target(snapshot, record),
            units.gib(measured_of(record).peak_allocated_bytes),
            f"gain {sentences.gain_clause(view, record)}",
            sentences.in_words(record.config, baseline),
        )
        yield "; ".join(titles), f"trial {record.number}: {'; '.join(said)}"
