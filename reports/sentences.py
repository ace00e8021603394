"""What is said of a study, each thing in one sentence: the terminal and the page share them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from reports import units, words
from reports.view import StudyView, epoch_of
from search_spaces.config import TrialConfig, canonical
from search_spaces.knobs import CAPACITY_KEYS, SIZE_KEYS, targets_in_words
from storage.definition import StudySnapshot
from storage.ranking import (
    CLAIMED_RANK,
    ClassBest,
    Ranking,
    claimed_pair,
    learned_apart,
    measured_of,
)
from storage.records import RETRYABLE, Measurement, TrialRecord

AS_FAST = 1.05
"""A tie whose speeds differ by more says that the runs were too few, and not that it is as fast."""


@dataclass(frozen=True)
class Row:
    """One measured configuration, as text; a dash where a number is not known."""

    number: str
    """Of the trial; a dash for the baseline in the winner's class, which no search tried."""
    changes: str
    """Where it differs from the baseline, in words."""
    tokens_per_second: str
    interval: str
    """95 % interval of the tokens/s."""
    peak_allocated: str
    flags: str
    values: tuple[str, ...]
    """What it is ranked by, a value for each objective."""
    runs: str
    """Tokens/s of each run that measured it again, in order."""
    result: str
    """What came of measuring it again."""


def headline(view: StudyView) -> str:
    """Return the recommendation in one sentence: what to run, how fast, in how much memory, and
    its gain where one is stated."""
    ranking, winner = view.ranking, view.winner
    if winner is None:
        return _nothing_fits(view)
    baseline = ranking.definition.space.baseline_config()
    named = in_words(winner.config, baseline)
    if canonical(winner.config) == canonical(baseline):
        named = f"the baseline itself, {named}"
    known = (_short_speed(view, winner), _peak(view, winner), gain_words(view).partition(" (")[0])
    best = words.best_by(view.objectives, is_confirmed=ranking.is_settled)
    return f"{best} is trial {winner.number}, {named}: {', '.join(filter(None, known))}."


def _nothing_fits(view: StudyView) -> str:
    records, baseline = view.snapshot.records, view.ranking.baseline
    if all(record.verdict in RETRYABLE for record in records):
        if not records:
            return "No trial has finished yet."
        return "No trial has come to a conclusion yet: the same command tries them again."
    budget = units.gib(view.gpu.budget_bytes)
    if baseline is None or view.ranking.is_baseline_in_space:
        return f"Nothing that was tried was measured to fit in {budget}."
    is_tried = "that was tried was measured to fit" if view.ranking.of_space else "was tried yet"
    return (
        f"Nothing of the space {is_tried}. Its baseline fits in {budget}, at "
        f"{words.speed(measured_of(baseline))}: a reference that the space does not hold, and so "
        "no answer."
    )


def in_words(config: TrialConfig, baseline: TrialConfig, *, has_capacity: bool = True) -> str:
    """Return the size, the capacity and the compute dtype of a configuration, and what else it
    changes over the baseline."""
    said = {"compute_dtype": config.compute_dtype} | units.differing(config, baseline)
    rest = (units.phrase(k, v) for k, v in said.items() if k not in SIZE_KEYS + CAPACITY_KEYS)
    capacity = [words.capacity(config)] if has_capacity else []
    return ", ".join([units.size(config), *capacity, *rest])


def facts(view: StudyView) -> Iterator[tuple[str, str]]:
    """Yield what a person asks of a study's answer, each with its name, in the order in which they
    do; of a study without one, how its trials ended."""
    winner = view.winner
    if winner is not None:
        measured = measured_of(winner)
        yield "speed", speed_on_target(view.snapshot, winner)
        if measured.quality is not None:
            after = f"after training on {measured.quality.train_tokens:,} tokens"
            yield "loss", f"{words.loss(measured)} on held-out examples, {after}"
        share = units.percent(measured.peak_allocated_bytes / view.gpu.budget_bytes)
        yield "memory", f"{_peak(view, winner)} ({share})"
        if "trainable_parameters" in view.objectives:
            yield "size", f"{units.count(measured.trainable_parameters)} trainable parameters"
        yield "gain", _gain(view, winner)
        if compute := _numerics(view):
            yield "compute", compute
        if cost := cost_words(view.snapshot, winner):
            yield "cost", cost
        if epoch := epoch_words(view.snapshot, winner):
            yield "epoch", epoch
        yield "sure", _sureness(view)
    counted = words.verdict_words(view.snapshot.records)
    carried = sum(record.carried is not None for record in view.snapshot.records)
    over = f", {carried} of them carried over" if carried else ""
    took = f"{len(view.snapshot.trials):,} in {units.duration(view.seconds['wall'])}{over}"
    yield "trials", f"{took}: {counted}" if counted else took
    for warning in view.snapshot.warnings:
        yield "warning", warning


def speed_on_target(snapshot: StudySnapshot, record: TrialRecord) -> str:
    """Return a trial's speed on the GPU that the study is for, how sure it is, and what another
    GPU reached that stood in."""
    measured, target = measured_of(record), snapshot.definition.target
    own = units.rate(measured.tokens_per_second)
    if target.emulated_on is None:
        ends = ", ".join(filter(None, (words.interval(measured), words.doubts(measured))))
        return f"{own} tokens/s ({ends})"
    verb = "measured" if target.recorded is None else "recorded"
    beside = f"{verb} on {target.emulated_on}: {own}"
    speed = snapshot.target_speed(record)
    if speed is None:
        return f"{beside}; not predicted on {target.gpu}"
    is_bounded = speed.low is not None and speed.high is not None
    ends = f" {units.rate(speed.low)}–{units.rate(speed.high)}" if is_bounded else ""
    rate = units.rate(speed.tokens_per_second)
    return f"{rate} tokens/s on {target.gpu} (predicted{ends}; {beside})"


def _short_speed(view: StudyView, record: TrialRecord) -> str:
    """Return the same without intervals, for a sentence that says more than this."""
    own = units.rate(measured_of(record).tokens_per_second)
    if view.gpu.emulated_on is None:
        return f"{own} tokens/s"
    there, gpu = view.snapshot.target_speed(record), units.gpu_name(view.gpu.emulated_on)
    if there is None:
        return f"{own} tokens/s on {units.with_article(gpu)}"
    rate, target = units.rate(there.tokens_per_second), units.gpu_name(view.gpu.name)
    named = units.with_article(target)
    return f"{rate} tokens/s predicted on {named} ({own} on the {gpu})"


def _peak(view: StudyView, record: TrialRecord) -> str:
    peak = units.gib(measured_of(record).peak_allocated_bytes)
    return f"{peak} of {units.gib(view.gpu.budget_bytes)}"


def gain_words(view: StudyView) -> str:
    """Return the winner's gain with what it is over: ``2.2x the baseline (2.1–2.3x)``; empty where
    none is stated, and for the baseline itself. Where its class of numerics was chosen by what is
    predicted of the target, it is named whose gain that is."""
    ratio, winner = view.ranking.gain.ratio, view.winner
    if winner is None or ratio is None or ratio.value == 1:
        return ""
    over = words.reference_of(view.ranking, winner.config)
    if view.numerics_choice == "predicted" and view.gpu.emulated_on is not None:
        over = f"{over} on the {units.gpu_name(view.gpu.emulated_on)}"
    return words.gain(ratio, over)


def _gain(view: StudyView, winner: TrialRecord) -> str:
    """Return the winner's gain or why none is stated, and what its own class's baseline has to say
    where that is faster, or another class."""
    ranking = view.ranking
    if ranking.baseline is None:
        return "none stated: the baseline was not measured"
    over = words.reference_of(ranking, winner.config)
    gained = gain_words(view) or f"none: it is {over}"
    if ranking.gain.ratio is None:
        gained = f"none stated: {words.why_no_gain(ranking.gain.reason, over)}"
    fastest = ranking.fastest_of_baselines_class
    if fastest is not None and not ranking.is_of_baselines_class(winner.config):
        ratio = ranking.gain_of(fastest).ratio
        speed = words.speed(measured_of(fastest))
        reached = f"{words.gain(ratio)} the baseline" if ratio and ratio.value != 1 else speed
        gained += f"; the fastest of the baseline's class is trial {fastest.number}, {reached}"
    return f"{gained}{faster_and_no_answer(ranking, winner)}"


def gain_of(ranking: Ranking, record: TrialRecord) -> tuple[str, str]:
    """Return any trial's gain, and what it is over or why there is none."""
    if ranking.baseline is None:
        return "", "the baseline was not measured"
    if record.number == ranking.baseline.number:
        return "1x", "the baseline itself"
    gain, over = ranking.gain_of(record), words.reference_of(ranking, record.config)
    faster = faster_and_no_answer(ranking, record)
    if gain.ratio is None:
        return "", f"{words.why_no_gain(gain.reason, over)}{faster}"
    ends = words.factor_interval(gain.ratio)
    return words.factor(gain.ratio), f"{over}{f' ({ends})' if ends else ''}{faster}"


def faster_and_no_answer(ranking: Ranking, record: TrialRecord) -> str:
    """Return that what a trial's gain is over is the faster of both, and why it is no answer all
    the same: a clause after a semicolon, empty where that is not so."""
    own = ranking.reference_for(record.config)
    over = ranking.baseline if own is None else own
    if over is None or ranking.holds(over.config):
        return ""
    if measured_of(over).tokens_per_second <= measured_of(record).tokens_per_second:
        return ""
    why = "the space does not hold it"
    is_offered = over.config.seq_len in ranking.definition.space.values_of("seq_len")
    if over.epoch is not None and not over.epoch.is_whole and not is_offered:
        why = f"its {words.cut_in_words(over.epoch, over.config.seq_len)}"
    named = "the baseline" if own is None else words.reference_of(ranking, record.config)
    return f"; {named} was measured faster and is no answer: {why}"


def _numerics(view: StudyView) -> str:
    """Return how fast the fastest with 16-bit compute is where the winner computes in 8 bits, and
    that a run on the target has to decide between them where another GPU stood in; else nothing."""
    winner, other, said = view.winner, view.ranking.fastest_with_16_bits, []
    if other is not None:
        speed = _short_speed(view, other)
        said.append(f"The fastest with 16-bit compute is trial {other.number}: {speed}.")
    if winner is not None and view.numerics_choice == "predicted":
        gpu = units.with_article(units.gpu_name(view.gpu.name))
        chosen = units.phrase("compute_dtype", winner.config.compute_dtype)
        said.append(f"That {chosen} is faster is predicted; only a run on {gpu} can measure it.")
    return " ".join(said)


def cost_words(snapshot: StudySnapshot, record: TrialRecord) -> str:
    """Return what tokens cost as a trial trains, and at whose price; empty without either."""
    dollars, offer = snapshot.usd_per_million_tokens(record), snapshot.offer
    if dollars is None or offer is None:
        return ""
    ends = snapshot.usd_interval(record)
    between = "" if ends is None else f"{units.usd_interval(ends)}; "
    return f"{units.usd(dollars)} per million tokens ({between}{words.price(offer)})"


def epoch_words(snapshot: StudySnapshot, record: TrialRecord) -> str:
    """Return what an epoch of the dataset takes as a trial trains: time, dollars, tokens, and what
    its length cuts off. Empty without one, and where the speed on the target GPU is not known."""
    epoch = epoch_of(snapshot, record)
    if epoch is None or epoch.seconds is None:
        return ""
    parts = [units.duration(epoch.seconds)]
    if epoch.seconds_low is not None and epoch.seconds_high is not None:
        ends = f"{units.duration(epoch.seconds_low)}–{units.duration(epoch.seconds_high)}"
        parts = [f"{parts[0]} ({ends})"]
    if epoch.dollars is not None:
        parts.append(units.usd(epoch.dollars))
    parts.append(f"{epoch.loss_tokens:,} supervised tokens")
    return f"{', '.join(parts)}; {words.cut_in_words(epoch, record.config.seq_len)}"


def status_words(ranking: Ranking, *, study: str, is_driven: bool = False) -> str:
    """Return how sure the winner is, and what to type where it is not.

    ``confirmed (3 runs)``, ``not confirmed: sweep confirm a10``.

    Args:
        ranking: has a winner.
        study: its name.
        is_driven: whether it is running, so that it may be about to be confirmed.
    """
    if ranking.definition.target.recorded is not None:
        return "recorded once, and not measured again"
    if ranking.is_confirmed:
        return f"confirmed ({units.plural(ranking.runs, 'run')})"
    return "not confirmed yet" if is_driven else f"not confirmed: {_confirm(study)}"


def _confirm(study: str) -> str:
    return f"sweep confirm {shlex.quote(study)}"


def _sureness(view: StudyView) -> str:
    ranking, soaked = view.ranking, view.ranking.soak
    known = status_words(ranking, study=view.study, is_driven=view.snapshot.holder is not None)
    said = [f"{known}{_soak(measured_of(soaked)) if soaked else ''}", as_fast(view).rstrip(".")]
    for number, run in ranking.fallen.items():
        said.append(f"Trial {number} fitted in the search and {words.fell(run)}, so it lost")
    return ". ".join(filter(None, said))


def _soak(measured: Measurement) -> str:
    """Return what the soak was, and what strained it."""
    soak, retries = measured.soak, measured.allocator_retries
    steps = measured.steps_measured if soak is None else soak.steps
    seconds = measured.measured_seconds if soak is None else soak.seconds
    strain = f"; the allocator gave memory back {units.plural(retries, 'time')}" if retries else ""
    stood = f"stood a soak of {units.plural(steps, 'step')} in {units.duration(seconds)}"
    return f"; {stood}, at {units.gib(measured.peak_allocated_bytes)}{strain}"


def as_fast(view: StudyView) -> str:
    """Return what is statistically indistinguishable from the winner, as a sentence, with the one
    that has the most memory to spare; empty for none."""
    ranking, winner = view.ranking, view.winner
    alike = [record for record in ranking.ranked if record.number in ranking.tied]
    if winner is None or not alike:
        return ""
    is_speed = view.objectives == ("tokens_per_second",)
    word, count = "fast" if is_speed else "good", units.plural(len(alike), "other")
    if is_speed and any(ranking.ratio(winner, record).value > AS_FAST for record in alike):
        return f"{count} {'is' if len(alike) == 1 else 'are'} statistically indistinguishable."
    frugal = min(alike, key=lambda record: measured_of(record).peak_allocated_bytes)
    peak = measured_of(frugal).peak_allocated_bytes
    is_frugal = peak < measured_of(winner).peak_allocated_bytes
    spare = f"has memory to spare ({units.gib(peak)})"
    if len(alike) == 1:
        return f"Trial {frugal.number} is as {word}{f' and {spare}' if is_frugal else ''}."
    named = f"; of these trial {frugal.number} {spare}" if is_frugal else ""
    return f"{count} are as {word}{named}."


def notes(view: StudyView) -> Iterator[str]:
    """Yield what a reader must know before believing a number: emulation, progress, warnings."""
    if emulation := words.emulation_note(view.snapshot.definition.target):
        yield emulation
    if view.snapshot.holder is not None:
        yield "The study is running: this is how it stood when the report was written."
    if abs(view.ranking.scale - 1) >= 0.005:
        yield (
            f"Speeds of trials that were not measured again are shown times "
            f"{view.ranking.scale:.2f}, so that they compare with those measured side by side."
        )
    yield from view.snapshot.warnings


def stopped_words(snapshot: StudySnapshot) -> str:
    """Return what the search expected of what it did not try, where it knew; else nothing."""
    ended = snapshot.ended or {}
    gain = (ended.get("most_promising") or {}).get("gain")
    if gain is None:
        return ""
    expected = units.share(gain)
    if ended["reason"] == "gain_spent":
        return f"Stopped: no untested configuration is expected to be more than {expected} faster."
    return f"The best untested configuration is expected to be {expected} faster."


def commands(view: StudyView) -> tuple[str, ...]:
    """Return what to type next, of a study that has an answer: to be surer, to take it, and for the
    whole configuration."""
    is_surface = view.snapshot.definition.target.recorded is not None and not view.snapshot.identity
    if view.winner is None or is_surface:
        return ()
    again = () if view.ranking.is_settled else (_confirm(view.study),)
    name = shlex.quote(view.study)
    return (*again, f"sweep export {name} --format script", f"sweep best {name} --json")


def best_rows(view: StudyView, *, limit: int = 10) -> tuple[Row, ...]:
    """Return the best configurations of the space that fit, in the order of its objectives; of
    several objectives the whole front, the knee first."""
    shown = view.ranking.front or view.ranking.ranked[:limit]
    return tuple(_row(record, view) for record in shown)


def confirmed_rows(view: StudyView) -> tuple[Row, ...]:
    """Return what was measured again, in the order of the answer; what gains are over among it."""
    ranking = view.ranking
    listed = [record for record in ranking.ranked if ranking.is_measured_again(record)]
    others: list[TrialRecord] = []
    over = None if view.winner is None else ranking.reference_for(view.winner.config)
    if over is not None and over.purpose == "confirm":
        others.append(over)
    base = ranking.baseline
    if base is not None and ranking.is_measured_again(base) and base not in listed:
        others.append(base)
    fallen = (r for r in view.snapshot.records if r.number in ranking.fallen)
    return tuple(_row(record, view) for record in (*listed, *others, *fallen))


def runners_up(view: StudyView) -> Iterator[str]:
    """Yield the next best configurations, of several objectives the rest of the front, each by what
    it changes over the winner: only the first few."""
    ranking = view.ranking
    for record in ranking.front[1:6] or ranking.ranked[1:4]:
        measured = measured_of(record)
        ends = f"{words.interval(measured)}{', scaled' if _is_scaled(record, ranking) else ''}"
        known = [f"{units.rate(measured.tokens_per_second)} tokens/s ({ends})"]
        known.append(units.gib(measured.peak_allocated_bytes))
        if measured.quality is not None:
            known.append(f"held-out loss {words.loss(measured)}")
        if "trainable_parameters" in view.objectives:
            known.append(f"{units.count(measured.trainable_parameters)} trainable")
        changes = units.changes(record.config, baseline=ranking.ranked[0].config)
        yield f"trial {record.number}: {', '.join(known)}: {changes}"


def classes(view: StudyView) -> Iterator[str]:
    """Yield the fastest of each capacity class, a line each: its tokens/s at each length."""
    has_several = len({best.numerics for best in view.fastest_by_class}) > 1

    def of(best: ClassBest) -> tuple[int, str | tuple[str, ...]]:
        return best.lora_rank, best.target_modules

    for (rank, modules), group in groupby(view.fastest_by_class, key=of):
        speeds = [
            f"{units.rate(best.tokens_per_second)} at {best.seq_len:,}"
            f"{f' in {best.numerics}' if has_several else ''} (trial {best.number}"
            f"{', stopped early' if best.is_partial else ''})"
            for best in group
        ]
        yield f"rank {rank} on {targets_in_words(modules)}: {', '.join(speeds)}"


def _is_scaled(record: TrialRecord, ranking: Ranking) -> bool:
    """Whether a speed of the search stands beside those measured again, scaled to them."""
    return (
        record.purpose == "search"
        and bool(ranking.searched)
        and not ranking.is_measured_again(record)
    )


def _row(record: TrialRecord, view: StudyView) -> Row:
    ranking, measured = view.ranking, measured_of(record)
    runs = ranking.confirmations.runs(record.config, series=ranking.confirmations.series)
    is_scaled = _is_scaled(record, ranking)
    rate = f"{units.rate(measured.tokens_per_second)}{' (search, scaled)' if is_scaled else ''}"
    has_fallen = record.number in ranking.fallen
    return Row(
        number=str(record.number) if record.purpose == "search" else units.DASH,
        changes=units.changes(record.config, baseline=ranking.definition.space.baseline_config()),
        tokens_per_second=units.DASH if has_fallen else rate,
        interval=units.DASH if has_fallen else words.interval(measured),
        peak_allocated=units.gib(measured.peak_allocated_bytes),
        flags=", ".join(measured.flags),
        values=tuple(words.value(objective, measured) for objective in view.objectives),
        runs=", ".join(units.rate(run.tokens_per_second) for run in runs) or units.DASH,
        result=_result(record, view),
    )


def _result(record: TrialRecord, view: StudyView) -> str:
    if record.purpose != "search":
        return words.at_capacity(record.config).removeprefix("the ")
    if record.number in view.ranking.fallen:
        return words.fell(view.ranking.fallen[record.number])
    if view.winner is not None and record.number == view.winner.number:
        return "recommended"
    if record.number in view.tied:
        return "as fast"
    return "baseline" if record.is_baseline else "slower"


def rank_claim(ranking: Ranking) -> str:
    """Return what "rank 16 is the best" is worth on this dataset, as far as was measured."""
    claim = f'"Rank {CLAIMED_RANK} is the best", as articles have it'
    pair = claimed_pair(ranking.ranked)
    if pair is None:
        judged = [r.config.lora_rank for r in ranking.ranked if measured_of(r).quality]
        missing = "any other rank" if CLAIMED_RANK in judged else f"rank {CLAIMED_RANK}"
        return f"{claim}: not judged, as {missing} was not trained here."
    own, other = pair
    qualities = [quality for record in pair if (quality := measured_of(record).quality)]
    ends, others = (quality.eval_loss_ci95 for quality in qualities)
    if apart := learned_apart(own, other):
        named = ", ".join(key.replace("_", " ") for key in apart)
        verdict = f"not judged, as no two trials differ in rank alone, but in {named} too,"
    elif ends is None or others is None:
        verdict = "not judged, as not both were trained with several seeds,"
    elif ends[0] <= others[1] and others[0] <= ends[1]:
        verdict = "not to be told, as the intervals over seeds overlap,"
    else:
        verdict = "confirmed" if ends[0] < others[0] else "refuted"
    which = "the others" if apart else "those that differ in nothing else"
    known = [
        f"{words.loss(measured_of(r))} (trial {r.number}, {words.speed(measured_of(r))})"
        for r in pair
    ]
    return (
        f"{claim}: {verdict} on this dataset. After {qualities[0].train_tokens:,} tokens its "
        f"held-out loss is {known[0]}; that of rank {other.config.lora_rank}, the lowest of "
        f"{which}, is {known[1]}."
    )
