"""What a report is decided by: the answer, what to take instead for memory or money, and how sure
that is.

Speeds are those on the target GPU, and money follows from them. Which trial is the fastest goes by
what was measured, as one GPU ran them all.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

import yaml

from reports import sentences, units, words
from reports.advice import how_to_go_faster
from reports.view import StudyView, view_of
from search_spaces.errors import InputError
from storage.definition import StudySnapshot
from storage.ranking import measured_of
from storage.records import TrialRecord

SPEED_LOSS = 0.10
"""Share of the best speed that may be given up for memory."""
ALIKE = 0.02
"""Prices of a token that are closer than this do not say which of two is the cheaper."""
JOB_TOKENS = 10_000_000.0
"""What is priced until a reader says otherwise."""


@dataclass(frozen=True)
class Job:
    """A training that is to be priced, as it is typed; nothing of it need be known.

    Raises:
        InputError: a figure is not positive, or tokens and samples are both given.
    """

    tokens: float | None = None
    """Of the dataset, that carry loss."""
    dataset_samples: float | None = None
    """Rows of the dataset; each counts as long as the study's baseline takes them."""
    epochs: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "dataset_samples", "epochs"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                option = f"--work {name.replace('_', '-')}"
                raise InputError(f"{option} must be greater than 0, got {value:g}")
        if self.tokens is not None and self.dataset_samples is not None:
            raise InputError("--work: tokens and dataset-samples both say how large the dataset is")
        if self.epochs is not None and self.tokens is None and self.dataset_samples is None:
            raise InputError("--work: epochs needs tokens or dataset-samples: of what?")

    def priced(self, snapshot: StudySnapshot) -> StudySnapshot:
        """Return the study with the tokens of the job, over all epochs."""
        length = snapshot.definition.space.baseline_config().seq_len
        samples = self.dataset_samples
        tokens = self.tokens if samples is None else samples * length
        if tokens is None:
            return snapshot
        return replace(snapshot, job_tokens=tokens * (self.epochs or 1.0))


@dataclass(frozen=True)
class Card:
    """The configuration to take, as text."""

    number: int
    what: str
    """The configuration in words, and what was odd about its measurement."""
    facts: tuple[tuple[str, str], ...]
    """Names and sentences, the terminal's own."""
    tokens_per_second: float | None
    """On the target GPU, to compute with."""
    usd_per_million_tokens: tuple[float, ...]
    """With its least and its most, to compute with; empty where it is not known."""
    job: str
    """What the training that is asked about costs and takes; empty where it is not known."""
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
    job_tokens: float
    notes: tuple[str, ...]
    advice: tuple[str, ...]
    """What it would take to have an answer; empty where there is one."""


def decision_of(snapshot: StudySnapshot) -> Decision:
    """Return what a report is decided by."""
    view = view_of(snapshot)
    epoch = None if view.winner is None else view.winner.epoch
    tokens = snapshot.job_tokens or (JOB_TOKENS if epoch is None else float(epoch.loss_tokens))
    is_sure = view.winner is None or view.ranking.is_settled
    return Decision(
        headline=sentences.headline(view),
        command="" if is_sure else sentences.commands(view)[0],
        card=None if view.winner is None else _card(view, view.winner, tokens),
        lines=tuple(_instead(view)),
        price_source="" if snapshot.offer is None else snapshot.offer.source,
        job_tokens=tokens,
        notes=tuple(sentences.notes(view)),
        advice=() if view.winner else tuple(how_to_go_faster(view)),
    )


def _card(view: StudyView, record: TrialRecord, tokens: float) -> Card:
    measured, baseline = measured_of(record), view.ranking.definition.space.baseline_config()
    configuration = sentences.in_words(record.config, baseline)
    speed, dollars = view.target_tokens_per_second, view.snapshot.usd_per_million_tokens(record)
    usd = () if dollars is None else (dollars, *(view.snapshot.usd_interval(record) or ()))
    return Card(
        number=record.number,
        what="; ".join(filter(None, (configuration, words.flags_in_words(measured)))),
        facts=tuple(f for f in sentences.facts(view) if f[0] not in ("trials", "warning")),
        tokens_per_second=None if speed is None else speed.value,
        usd_per_million_tokens=usd,
        job="" if speed is None else _job(tokens / speed.value, [d * tokens / 1e6 for d in usd]),
        memory_share=min(1.0, measured.peak_allocated_bytes / view.gpu.budget_bytes),
        recipes=tuple(_recipes(view, record)),
    )


def _job(seconds: float, usd: list[float]) -> str:
    """Return what a training costs and takes; the page's script says the same."""
    took = f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:,.1f} h"
    took = took if seconds >= 60 else f"{seconds:.0f} s"
    if not usd:
        return took
    within = f" ({units.usd_interval((usd[1], usd[2]))})" if len(usd) > 1 else ""
    return f"{units.usd(usd[0])}{within}, {took}"


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
    own = ranking.fastest_of_baselines_class or ranking.baseline
    compared = ranking.compared(fastest)
    limit = (1.0 - SPEED_LOSS) * measured_of(compared[0]).tokens_per_second
    quick = {r.number for r in compared if measured_of(r).tokens_per_second >= limit}
    usd = {r.number: dollars for r in fastest if (dollars := snapshot.usd_per_million_tokens(r))}
    saved = usd.get(view.winner.number, 0.0) * (1.0 - ALIKE)
    cheaper = [record for record in fastest if usd.get(record.number, saved) < saved]
    baseline = ranking.definition.space.baseline_config()
    questions = {
        "Fastest": fastest[0],
        f"Fastest at {words.capacity(baseline)}, as the baseline": own,
        "Cheapest per token": min(cheaper, key=lambda r: usd[r.number], default=None),
        f"Most memory left, at most {units.percent(SPEED_LOSS)} slower than the fastest": min(
            (record for record in fastest if record.number in quick),
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
