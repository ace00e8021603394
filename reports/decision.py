"""Owns what a report is decided by: which configuration to take for speed, money, memory or
capacity, how sure that is, and what to do where it is not.

Each question has one card; where two have the same answer, the second says so in a line. Speeds are
those on the target GPU, and money follows from them. Which trial is the fastest goes by what was
measured, as one GPU ran them all. Pure: a study's snapshot in, frozen values of finished text out;
knows nothing of HTML.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import yaml

from reports import confirmation, objectives, uncertainty, units
from reports.advice import how_to_go_faster
from reports.summary import answer, in_words, notes, offer_words
from reports.texts import epoch_words
from search_spaces.errors import InputError
from search_spaces.prices import Offer
from storage.definition import StudySnapshot, TargetSpeed
from storage.gain import compare, gain_of
from storage.objectives import measured_of
from storage.ranking import Ranking, rank_study
from storage.records import TrialRecord, Verdict

SPEED_LOSS = 0.10
"""Share of the best speed that may be given up for memory."""
ALIKE = 0.02
"""Predicted speeds that are closer than this do not say which of two is the cheaper."""
JOB_TOKENS = 10_000_000.0
"""What is priced until a reader says otherwise."""

CLASS, CHEAPEST, MEMORY, CAPACITY = (
    "Fastest in your capacity class",
    "Cheapest per token",
    "Most memory left",
    "Largest capacity",
)
"""The questions, in the order of the page."""
COMPROMISE, LEAST = "Best compromise", "Least memory"
"""What comes before them where speed alone was not what was asked for."""


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
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"{option} must be greater than 0, got {value:g}")
        if self.tokens is not None and self.dataset_samples is not None:
            raise InputError("--tokens and --dataset-samples both say how large the dataset is")
        if self.epochs is not None and self.tokens is None and self.dataset_samples is None:
            raise InputError("--epochs needs --tokens or --dataset-samples: of what?")

    def priced(self, snapshot: StudySnapshot) -> StudySnapshot:
        """Return the study with the tokens of the job, over all epochs."""
        length = snapshot.definition.space.baseline_config().seq_len
        samples = self.dataset_samples
        tokens = self.tokens if samples is None else samples * length
        if tokens is None:
            return snapshot
        return replace(snapshot, job_tokens=tokens * (self.epochs or 1.0))


@dataclass(frozen=True)
class Recipe:
    """Something to copy."""

    label: str
    text: str


@dataclass(frozen=True)
class Card:
    """The answer to one question, as text; what is not known of it is empty."""

    title: str
    meaning: str
    """What the question means, and of what the answer was chosen."""
    number: int
    capacity: str
    configuration: str
    speed: str
    unit: str
    """Of the speed, with the GPU that it is on."""
    basis: str
    """On what ground the speed is known, and how surely."""
    measured: str
    """What the GPU that stood in reached; empty where the target ran itself."""
    gain: str
    gain_detail: str
    dollars: str
    dollars_detail: str
    usd_per_million_tokens: tuple[float, float | None, float | None] | None
    """The same with its least and its most, to compute with."""
    tokens_per_second: float | None
    """On the target GPU, to compute with."""
    epoch: str
    """What one epoch of the study's texts takes; empty without texts."""
    job: str
    """What the training that is asked about costs and takes."""
    peak: str
    margin: str
    memory_share: float
    """Of the budget, 0 to 1."""
    flags: str
    recipes: tuple[Recipe, ...]


@dataclass(frozen=True)
class Line:
    """The answer to a question that needs no card: another has it, or there is none."""

    title: str
    text: str


@dataclass(frozen=True)
class Decision:
    """The first screen of a report."""

    headline: str
    alike: str
    """What is as good as the recommendation; empty where nothing is."""
    command: str
    """What to type to be surer; empty where nothing would help."""
    cards: tuple[Card, ...]
    lines: tuple[Line, ...]
    price: str
    """At what the target is rented, where and when that was read; empty where it is not known."""
    price_source: str
    job_tokens: float
    notes: tuple[str, ...]
    advice: tuple[str, ...]
    """What it would take to have an answer; empty where there is one."""


def decision_of(snapshot: StudySnapshot) -> Decision:
    """Return what a report is decided by."""
    ranking = rank_study(snapshot)
    cards, lines = _answers(snapshot, ranking)
    headline = answer(snapshot, ranking)
    advice = () if cards else how_to_go_faster(snapshot)
    is_sure = ranking.winner is None or ranking.is_settled
    return Decision(
        headline=headline,
        alike=confirmation.as_fast(ranking),
        command="" if is_sure else confirmation.measure_again(snapshot.name),
        cards=tuple(cards),
        lines=tuple(lines),
        price="" if snapshot.offer is None else offer_words(snapshot.offer),
        price_source="" if snapshot.offer is None else snapshot.offer.source,
        job_tokens=_job_tokens(snapshot),
        notes=notes(snapshot),
        advice=tuple(sentence for sentence in advice if sentence != headline),
    )


def _answers(snapshot: StudySnapshot, ranking: Ranking) -> tuple[list[Card], list[Line]]:
    """Return each question's answer: a card, or a line where an earlier card has it."""
    cards: list[Card] = []
    lines: list[Line] = []
    for title, meaning, found in _questions(snapshot, ranking):
        shown = next((card for card in cards if found and card.number == found.number), None)
        if found is None:
            lines.append(Line(title, meaning))
        elif shown is not None:
            lines.append(Line(title, f"trial {found.number} as well; {meaning}"))
        else:
            cards.append(_card(title, meaning, found, snapshot, ranking))
    return cards, lines


def _questions(
    snapshot: StudySnapshot, ranking: Ranking
) -> Iterator[tuple[str, str, TrialRecord | None]]:
    """Yield each question's title, what it means, and its trial; without one, why there is none."""
    fastest = _fastest_first(ranking)
    if not fastest:
        return
    if ranking.objectives not in (("tokens_per_second",), ("trainable_parameters",)):
        meaning = f"by {objectives.names(ranking.objectives)}, as the study was asked for"
        yield COMPROMISE if len(ranking.objectives) > 1 else LEAST, meaning, ranking.winner
    yield CLASS, *_of_class(ranking, fastest)
    if snapshot.offer is not None:
        yield CHEAPEST, *_cheapest(snapshot, fastest, snapshot.offer)
    compared = ranking.compared(fastest)
    limit = (1.0 - SPEED_LOSS) * measured_of(compared[0]).tokens_per_second
    quick = {r.number for r in compared if measured_of(r).tokens_per_second >= limit}
    alike = (r for r in fastest if r.number in quick)
    frugal = min(alike, key=lambda r: measured_of(r).peak_allocated_bytes)
    yield MEMORY, f"at most {units.percent(SPEED_LOSS)} slower than the fastest", frugal
    yield CAPACITY, *_largest(ranking, fastest)


def _fastest_first(ranking: Ranking) -> Sequence[TrialRecord]:
    """Return what fits in the order of the answer where speed is what was asked for."""
    if ranking.objectives == ("tokens_per_second",):
        return ranking.ranked
    known = {record.number for record in ranking.ranked}
    return [record for record in ranking.by_speed if record.number in known]


def _of_class(ranking: Ranking, fastest: Sequence[TrialRecord]) -> tuple[str, TrialRecord | None]:
    own = uncertainty.capacity(ranking.definition.space.baseline_config())
    found = next((r for r in fastest if ranking.is_of_baselines_class(r.config)), None)
    if found is not None:
        return f"{own}, as the baseline", found
    if ranking.baseline is not None:
        return f"{own}: only the baseline was measured", ranking.baseline
    return f"{own}, as the baseline: nothing of it was measured to fit", None


def _largest(ranking: Ranking, fastest: Sequence[TrialRecord]) -> tuple[str, TrialRecord]:
    """Return who trains the most: what was stopped as slow, and the baseline, fitted as well."""
    slow = [r for r in ranking.of_space if r.verdict is Verdict.PRUNED_SLOW and r.measurement]
    own = [] if ranking.baseline is None else [ranking.baseline]
    largest = max([*fastest, *own, *slow], key=lambda r: measured_of(r).trainable_parameters)
    count = units.count(measured_of(largest).trainable_parameters)
    stopped = ", stopped as too slow" if largest.verdict is Verdict.PRUNED_SLOW else ""
    return f"{count} trainable parameters, the most that fitted{stopped}", largest


def _cheapest(
    snapshot: StudySnapshot, fastest: Sequence[TrialRecord], offer: Offer
) -> tuple[str, TrialRecord | None]:
    """Return the fastest on the target: at one price that is the cheapest."""
    gpu = snapshot.definition.target.gpu
    hour = f"${offer.usd_per_hour:,.2f} an hour"
    # Of what several GPUs make each has to be paid for.
    speeds = {
        r.number: s.tokens_per_second / r.config.data_parallel
        for r in fastest
        if (s := snapshot.target_speed(r))
    }
    if not speeds:
        return f"the speed on {gpu}, and with it the cost, is not predicted", None
    if len({record.config.data_parallel for record in fastest}) > 1:
        cheapest = max((r for r in fastest if r.number in speeds), key=lambda r: speeds[r.number])
        count = units.plural(cheapest.config.data_parallel, "GPU")
        return f"the most tokens of each GPU, with {count} at {hour} each", cheapest
    if snapshot.definition.target.emulated_on is None:
        return f"the fastest of all, at {hour}", fastest[0]
    enough = (1.0 - ALIKE) * max(speeds.values())
    found = next(r for r in fastest if speeds.get(r.number, 0.0) >= enough)
    return f"by the speed predicted for {gpu}, at {hour}", found


def _card(
    title: str, meaning: str, record: TrialRecord, snapshot: StudySnapshot, ranking: Ranking
) -> Card:
    measured, target = measured_of(record), snapshot.definition.target
    speed, dollars = snapshot.target_speed(record), snapshot.usd_per_million_tokens(record)
    ends = snapshot.usd_interval(record)
    left = target.budget_bytes - measured.peak_allocated_bytes
    gain, gain_detail = _gain(ranking, record)
    is_searched = bool(ranking.searched) and not ranking.is_measured_again(record)
    where = ", scaled from the search" if is_searched else ""
    beside = uncertainty.measured_beside(measured, target)
    baseline = ranking.definition.space.baseline_config()
    return Card(
        title=title,
        meaning=meaning,
        number=record.number,
        capacity=uncertainty.capacity(record.config),
        configuration=in_words(record.config, baseline, has_capacity=False),
        speed=units.DASH if speed is None else units.rate(speed.tokens_per_second),
        unit=f"tokens/s on {target.gpu}",
        basis=_basis(speed) + (where if target.emulated_on is None else ""),
        measured=beside and beside + where,
        gain=gain,
        gain_detail=gain_detail,
        dollars="" if dollars is None else units.usd(dollars),
        dollars_detail="" if ends is None else units.usd_interval(ends),
        usd_per_million_tokens=None if dollars is None else (dollars, *(ends or (None, None))),
        tokens_per_second=None if speed is None else speed.tokens_per_second,
        epoch=epoch_words(snapshot, record) or "",
        job=_job(speed, dollars, ends, _job_tokens(snapshot)),
        peak=units.gib(measured.peak_allocated_bytes),
        margin=f"of {units.gib(target.budget_bytes)}, {units.gib(left)} left",
        memory_share=min(1.0, measured.peak_allocated_bytes / target.budget_bytes),
        flags=uncertainty.flags_in_words(measured),
        recipes=recipes(snapshot, record),
    )


def _basis(speed: TargetSpeed | None) -> str:
    if speed is None:
        return "not predicted"
    if speed.low is None or speed.high is None:
        return speed.basis
    return f"{speed.basis} {units.rate_interval((speed.low, speed.high))}"


def _gain(ranking: Ranking, record: TrialRecord) -> tuple[str, str]:
    """Return a trial's gain and what that is over; that this is faster and no answer, if so."""
    gain, detail = _own_gain(ranking, record)
    faster = uncertainty.faster_and_no_answer(ranking, record)
    end = "." if detail.endswith(".") else ""
    return gain, f"{detail.removesuffix('.')}; {faster}{end}" if faster else detail


def _own_gain(ranking: Ranking, record: TrialRecord) -> tuple[str, str]:
    """Return a trial's gain and what it is over; nothing and why where none is stated."""
    over = uncertainty.reference_of(ranking, record.config)
    baseline = ranking.baseline
    if baseline is not None and record.number == baseline.number:
        return "1x", "the baseline itself"
    comparison = compare(ranking)
    if comparison is None:
        return "", "The baseline was not measured."
    gain, reason = gain_of(ranking, record)
    if gain is None:
        why = uncertainty.why_no_gain(reason, over)
        return "", f"{why[0].upper()}{why[1:]}."
    ends = uncertainty.factor_interval(gain)
    return uncertainty.factor(gain), f"{over} ({ends})" if ends else over


def _job_tokens(snapshot: StudySnapshot) -> float:
    """Return the tokens that are priced: as asked, an epoch of the texts, or a round number."""
    winner = rank_study(snapshot).winner
    epoch = None if winner is None else winner.epoch
    return snapshot.job_tokens or (JOB_TOKENS if epoch is None else float(epoch.loss_tokens))


def _job(
    speed: TargetSpeed | None,
    dollars: float | None,
    ends: tuple[float, float] | None,
    tokens: float,
) -> str:
    """Return what a training of so many tokens costs and takes; the page's script says the same."""
    if speed is None:
        return ""
    took = job_duration(tokens / speed.tokens_per_second)
    if dollars is None:
        return took
    millions = tokens / 1e6
    within = (
        "" if ends is None else f" ({units.usd_interval((ends[0] * millions, ends[1] * millions))})"
    )
    return f"{units.usd(dollars * millions)}{within}, {took}"


def job_duration(seconds: float) -> str:
    """Return how long a training takes, as roughly as it is known: ``27 min``, ``3.4 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:,.1f} h"


def recipes(snapshot: StudySnapshot, record: TrialRecord) -> tuple[Recipe, ...]:
    """Return what there is to copy of a trial: the command that writes its script, its values."""
    values, name = record.config.model_dump(mode="json"), shlex.quote(snapshot.name)
    export = f"sweep export {name} --format script --trial {record.number}"
    # A surface is no study, and nothing exports from it.
    is_surface = snapshot.definition.target.recorded is not None and not snapshot.identity
    return (
        *(() if is_surface else (Recipe("command", export),)),
        Recipe("JSON", json.dumps(values, indent=2)),
        Recipe("YAML", yaml.safe_dump(values, sort_keys=False)),
    )
