"""What is said of a study, each thing in one sentence: the terminal and the page share them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from qlora_sweep.reports import units, words
from qlora_sweep.reports.view import Epoch, StudyView
from qlora_sweep.search_spaces.config import (
    CAPACITY_KEYS,
    SIZE_KEYS,
    TrialConfig,
    canonical,
    targets_in_words,
)
from qlora_sweep.search_spaces.quality import quality_in_words
from qlora_sweep.search_spaces.texts import CUT_MAX
from qlora_sweep.search_spaces.trainers import trainer_of
from qlora_sweep.storage.confirmations import FEW_ROWS
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.ranking import Ranking, measured_of
from qlora_sweep.storage.records import RETRYABLE, Measurement, QualityReport, TrialRecord


class ConfirmedRow(NamedTuple):
    """One configuration that was measured again, as text."""

    number: str
    """Of the trial; a dash for the baseline in the winner's class, which no search tried."""
    changes: str
    """Where it differs from the baseline, in words."""
    runs: str
    """Tokens/s of each run, in order."""
    tokens_per_second: str
    interval: str
    peak_allocated: str
    result: str


def headline(view: StudyView) -> str:
    """Return the recommendation in one sentence; its numbers are `facts`."""
    ranking, winner = view.ranking, view.winner
    if winner is None:
        return _nothing_fits(view)
    baseline = ranking.definition.space.baseline_config()
    is_itself = canonical(winner.config) == canonical(baseline)
    named = f"{'the baseline itself, ' * is_itself}{in_words(winner.config, baseline)}"
    best = words.best_by(view.objectives, is_confirmed=ranking.is_settled)
    return f"{best} is trial {winner.number}, {named}."


def _nothing_fits(view: StudyView) -> str:
    records, baseline = view.snapshot.records, view.ranking.baseline
    if all(record.verdict in RETRYABLE for record in records):
        if not records:
            return "No trial has finished yet."
        return "No trial has come to a conclusion yet: the same command tries them again."
    budget = units.gib(view.gpu.budget_bytes)
    if baseline is None or view.ranking.is_baseline_in_space:
        return f"Nothing that was tried was measured to fit in {budget}."
    return (
        f"Nothing of the space was measured to fit in {budget}. Its baseline fits, at "
        f"{words.speed(measured_of(baseline))}: a reference that the space does not hold, and so "
        "no answer."
    )


def in_words(config: TrialConfig, baseline: TrialConfig) -> str:
    """Return the size, the capacity and the compute dtype of a configuration, and what else it
    changes over the baseline."""
    said = {"compute_dtype": config.compute_dtype} | units.differing(config, baseline)
    rest = (units.phrase(k, v) for k, v in said.items() if k not in SIZE_KEYS + CAPACITY_KEYS)
    return ", ".join([units.size(config), words.capacity(config), *rest])


def facts(view: StudyView) -> Iterator[tuple[str, str]]:
    """Yield what a person asks of a study's answer, each with its name, in the order in which they
    do; of a study without one, how its trials ended."""
    winner = view.winner
    if winner is not None:
        measured = measured_of(winner)
        yield "speed", speed_on_target(view.snapshot, winner)
        if measured.quality is not None:
            after = f"after training on {measured.quality.train_tokens:,} tokens"
            rows = words.held_out(measured.quality) + words.reward_accuracy(
                measured.quality.eval_wins, measured.quality.eval_rows
            )
            yield "loss", f"{words.loss(measured)} on {rows}, {after}{_too_few(measured.quality)}"
        peak, budget = measured.peak_allocated_bytes, view.gpu.budget_bytes
        share = units.percent(peak / budget)
        yield "memory", f"{units.gib(peak)} of {units.gib(budget)} ({share})"
        if "trainable_parameters" in view.objectives:
            yield "size", f"{words.value('trainable_parameters', measured)} parameters"
        yield "gain", f"{gain_clause(view, winner)}{_gain_of_class(view, winner)}"
        if compute := _numerics(view):
            yield "compute", compute
        answers = [winner, view.ranking.other_numerics]
        quality = quality_in_words(one.config for one in answers if one is not None)
        if quality:
            yield "quality", quality
        if view.cost is not None and (offer := view.snapshot.offer):
            ends = view.snapshot.usd_interval(winner)
            between = "" if ends is None else f"{units.usd_interval(ends)}; "
            price = f"{offer.label} at ${offer.usd_per_hour:,.2f} an hour, as of {offer.date}"
            cost = f"{units.usd(view.cost.usd_per_million_tokens)} per million tokens"
            yield "cost", f"{cost} ({between}{price})"
        if view.epoch is not None and view.epoch.seconds is not None:
            yield "epoch", _epoch(view.epoch, winner.config)
        yield "sure", _sureness(view)
        if winner.config.trainer != "sweep":
            yield "for", trainer_words(winner.config)
    counted = words.verdict_words(view.snapshot.records)
    carried = sum(record.carried is not None for record in view.snapshot.records)
    over = f", {carried} of them carried over" if carried else ""
    took = f"{len(view.snapshot.trials):,} in {units.duration(view.seconds['wall'])}{over}"
    yield "trials", f"{took}: {counted}" if counted else took
    for warning in view.snapshot.warnings:
        yield "warning", warning


def trainer_words(config: TrialConfig) -> str:
    """Return what trials of a configuration for another trainer are of."""
    trainer = trainer_of(config)
    return (
        f"{trainer.label}: only what it can run is searched, and trials run what it does: "
        f"{trainer.does}"
    )


def _too_few(quality: QualityReport) -> str:
    """Return that so few held-out examples say little; empty where they are enough."""
    if not 0 < quality.eval_rows < FEW_ROWS:
        return ""
    return f"; fewer than {FEW_ROWS} decide little: hold out more (data.eval_fraction)"


def speed_on_target(snapshot: StudySnapshot, record: TrialRecord) -> str:
    """Return a trial's speed on the GPU that the study is for, how sure it is, and what another
    GPU reached that stood in."""
    measured, target = measured_of(record), snapshot.definition.target
    own = units.rate(measured.tokens_per_second)
    sure = ", ".join(filter(None, (words.interval(measured), words.doubts(measured))))
    if target.emulated_on is None:
        pairs = f"{measured.samples_per_second:.3g} pairs/s, " * record.config.is_on_pairs
        return f"{pairs}{own} tokens/s ({sure})"
    verb = "measured" if target.recorded is None else "recorded"
    speed = snapshot.target_speed(record)
    if speed is None:
        return f"{own} tokens/s {verb} on {target.emulated_on}; not predicted on {target.gpu}"
    ends = (speed.low, speed.high)
    within = "" if None in ends else f" {units.rate_interval(ends)}"
    rate = units.rate(speed.tokens_per_second)
    beside = f"{verb} on {target.emulated_on}: {own}"
    if measured.speed_interval is not None:
        beside += f", {sure}"
    return f"{rate} tokens/s on {target.gpu} (predicted{within}; {beside})"


def gain_words(view: StudyView, record: TrialRecord) -> str:
    """Return a trial's gain with what it is over: ``2.2x the baseline (2.1–2.3x)``; empty where
    none is stated, and for the baseline itself. Where it is predicted of the target, what the GPU
    that stood in measured is named beside it."""
    gain = view.ranking.gain_of(record)
    if gain.ratio is None or gain.ratio.value == 1:
        return ""
    stated = words.gain(gain.ratio, words.reference_of(view.ranking, record.config))
    if gain.measured is None or view.gpu.emulated_on is None:
        return stated
    host = units.gpu_name(view.gpu.emulated_on)
    return f"{stated}; measured on the {host}: {words.gain(gain.measured)}"


def gain_clause(view: StudyView, record: TrialRecord) -> str:
    """Return a trial's gain or why none is stated, and that what it is over is the faster of both
    and no answer all the same, where that is so."""
    gain, over = view.ranking.gain_of(record), words.reference_of(view.ranking, record.config)
    stated = gain_words(view, record) or f"none: it is {over}"
    if gain.ratio is None:
        stated = f"none stated: {words.why_no_gain(gain.reason, over)}"
    return f"{stated}{_faster_and_no_answer(view.ranking, record)}"


def _gain_of_class(view: StudyView, winner: TrialRecord) -> str:
    """Return what the baseline's own class gained where the winner is of another."""
    fastest = view.ranking.fastest_of_baselines_class
    if fastest is None or view.ranking.is_of_baselines_class(winner.config):
        return ""
    gained = gain_words(view, fastest) or "no faster than the baseline"
    return f"; the fastest of the baseline's class is trial {fastest.number}, {gained}"


def _faster_and_no_answer(ranking: Ranking, record: TrialRecord) -> str:
    """Return that what a trial's gain is over is the faster of both, and why it is no answer all
    the same: a clause after a semicolon, empty where that is not so."""
    own = ranking.reference_for(record.config)
    over = ranking.baseline if own is None else own
    if over is None or ranking.holds(over.config):
        return ""
    if ranking.speed_of(over) <= ranking.speed_of(record):
        return ""
    why = "the space does not hold it"
    is_offered = over.config.seq_len in ranking.definition.space.values_of("seq_len")
    if over.epoch is not None and not over.epoch.is_whole and not is_offered:
        why = f"its {words.cut_in_words(over.epoch, over.config)}"
    named = "the baseline" if own is None else words.reference_of(ranking, record.config)
    how = "is predicted to be" if ranking.is_predicted else "was measured"
    return f"; {named} {how} faster and is no answer: {why}"


def _numerics(view: StudyView) -> str:
    """Return how fast the fastest of the other class of numerics is, 16-bit compute or 8 bits, and
    what would settle which is the faster where that is not sure; else nothing."""
    winner, other = view.winner, view.ranking.other_numerics
    if winner is None or other is None:
        return ""
    speed = speed_on_target(view.snapshot, other)
    ratio = view.ranking.ratio(other, winner)
    if winner.config.is_8bit_compute:
        return f"The fastest with 16-bit compute is trial {other.number}: {speed}."
    computes = units.phrase("compute_dtype", other.config.compute_dtype)
    said = f"With {computes} trial {other.number} is {words.times(ratio)} as fast: {speed}"
    if view.numerics_choice == "measured":
        return f"{said}; that is not sure to be faster."
    gpu = units.with_article(units.gpu_name(view.gpu.name))
    return f"{said}; only `sweep run` on {gpu} can measure which is faster."


def _epoch(epoch: Epoch, config: TrialConfig) -> str:
    """Return what an epoch takes: time, dollars, tokens, and what its length cuts off."""
    parts = [units.duration(epoch.seconds)]
    if epoch.seconds_low is not None and epoch.seconds_high is not None:
        ends = f"{units.duration(epoch.seconds_low)}–{units.duration(epoch.seconds_high)}"
        parts = [f"{parts[0]} ({ends})"]
    if epoch.dollars is not None:
        parts.append(units.usd(epoch.dollars))
    parts.append(f"{epoch.loss_tokens:,} supervised tokens")
    return f"{', '.join(parts)}; {words.cut_in_words(epoch, config)}"


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
    what_to_type = f": sweep confirm {shlex.quote(study)}"
    return f"not confirmed{' yet' if is_driven else what_to_type}"


def _sureness(view: StudyView) -> str:
    ranking, soaked = view.ranking, view.ranking.soak
    known = status_words(ranking, study=view.study, is_driven=view.snapshot.holder is not None)
    said = [f"{known}{_soak(measured_of(soaked)) if soaked else ''}", _tied(view)]
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


def _tied(view: StudyView) -> str:
    """Return what is statistically indistinguishable from the winner, with the memory of each,
    those of the least first; empty for none."""
    tied = (record for record in view.ranking.ranked if record.number in view.tied)
    peaks = sorted((measured_of(record).peak_allocated_bytes, record.number) for record in tied)
    named = ", ".join(f"trial {number} ({units.gib(peak)})" for peak, number in peaks)
    return f"Statistically indistinguishable: {named}" if named else ""


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
    """Return what to type next, of a study that has an answer: to be surer, to train, to take it
    elsewhere, and for the whole configuration."""
    is_surface = view.snapshot.definition.target.recorded is not None and not view.snapshot.identity
    if view.winner is None or is_surface:
        return ()
    name = shlex.quote(view.study)
    again = () if view.ranking.is_settled else (f"sweep confirm {name}",)
    data = "" if view.texts else " --data dataset.jsonl"
    epoch = view.winner.epoch
    if epoch is not None and (epoch.supervised_tokens_cut or 0.0) > CUT_MAX:
        # What it cuts stands above.
        data += " --yes"
    return (
        *again,
        f"sweep train {name}{data} --output adapter",
        f"sweep export {name} {_export_options(view.winner.config)}",
        f"sweep best {name} --json",
    )


def _export_options(config: TrialConfig) -> str:
    if config.trainer == "sweep":
        return "--format script"
    return f"--for {config.trainer}"


def confirmed_rows(view: StudyView) -> Iterator[ConfirmedRow]:
    """Yield what was measured again, in the order of the answer; what gains are over among it."""
    ranking, winner, base = view.ranking, view.winner, view.ranking.baseline
    over = None if winner is None else ranking.reference_for(winner.config)
    shown = {r.number: r for r in ranking.ranked if ranking.is_measured_again(r)}
    for record in (over, base):
        if record and (record.purpose == "confirm" or ranking.is_measured_again(record)):
            shown.setdefault(record.number, record)
    shown |= {r.number: r for r in view.snapshot.records if r.number in ranking.fallen}
    results = {base.number: "baseline"} if base else {}
    results |= dict.fromkeys(view.tied, "as fast")
    results |= {winner.number: "recommended"} if winner else {}
    results |= {number: words.fell(run) for number, run in ranking.fallen.items()}
    for number, record in shown.items():
        measured, is_searched = measured_of(record), record.purpose == "search"
        runs = ranking.confirmations.runs(record.config, series=ranking.confirmations.series)
        has_fallen = number in ranking.fallen
        recipe = words.reference_of(ranking, record.config).removeprefix("the ")
        baseline = ranking.definition.space.baseline_config()
        yield ConfirmedRow(
            number=str(number) if is_searched else units.DASH,
            changes=units.changes(record.config, baseline=baseline),
            runs=", ".join(units.rate(run.tokens_per_second) for run in runs) or units.DASH,
            tokens_per_second=units.DASH if has_fallen else units.rate(measured.tokens_per_second),
            interval=units.DASH if has_fallen else words.interval(measured),
            peak_allocated=units.gib(measured.peak_allocated_bytes),
            result=results.get(number, "slower") if is_searched else recipe,
        )


def runners_up(view: StudyView) -> Iterator[str]:
    """Yield the next best configurations, of several objectives the rest of the front, each by what
    it changes over the winner: only the first few."""
    ranking = view.ranking
    for record in ranking.front[1:6] or ranking.ranked[1:4]:
        measured = measured_of(record)
        asked = [o for o in view.objectives if o not in ("tokens_per_second", "peak_memory")]
        others_asked = "".join(f", {words.value(o, measured)}" for o in asked)
        changes = units.changes(record.config, baseline=ranking.ranked[0].config)
        known = f"{_rate_of(view, record)}, {units.gib(measured.peak_allocated_bytes)}"
        yield f"trial {record.number}: {known}{others_asked}: {changes}"


def _rate_of(view: StudyView, record: TrialRecord) -> str:
    """Return the speed of a trial that decides, and how sure it is."""
    ranking, measured = view.ranking, measured_of(record)
    if ranking.is_predicted:
        return speed_on_target(view.snapshot, record)
    is_scaled = bool(ranking.searched) and not ranking.is_measured_again(record)
    sure = (words.interval(measured), words.doubts(measured), "scaled" if is_scaled else "")
    return f"{units.rate(measured.tokens_per_second)} tokens/s ({', '.join(filter(None, sure))})"


def classes(view: StudyView) -> Iterator[str]:
    """Yield the fastest of each capacity class, a line each: its tokens/s at each length. Of
    classes that were not measured, what is predicted to be the fastest that fits."""
    known, class_of = view.fastest_by_class, attrgetter("lora_rank", "target_modules")
    has_several = len({best.numerics for best in known}) > 1
    for (rank, modules), group in groupby(known, key=class_of):
        speeds = []
        for best in group:
            rate = best.target_tokens_per_second or best.tokens_per_second
            numerics = f" in {best.numerics}" if has_several else ""
            stopped = ", stopped early" if best.is_partial else ""
            where = f"{units.rate(rate)} at {best.seq_len:,}{numerics}"
            speeds.append(f"{where} (trial {best.number}{stopped})")
        yield f"rank {rank} on {targets_in_words(modules)}: {', '.join(speeds)}"
    for config, speed in unmeasured_classes(view):
        capacity, baseline = words.capacity(config), view.ranking.definition.space.baseline_config()
        changes = units.changes(config, baseline=baseline)
        where = f"{units.rate(speed)} at {config.seq_len:,}"
        yield f"{capacity}: {where} (predicted, not measured: {changes})"


def unmeasured_classes(view: StudyView) -> Iterator[tuple[TrialConfig, float]]:
    """Yield what is predicted to be the fastest of each capacity class in which nothing was
    measured, with its tokens/s on the GPU that the study is for."""
    ranking = view.ranking
    measured = {ranking.capacity_class(record.config) for record in ranking.ranked}
    for known in (view.ended or {}).get("unmeasured_classes", ()):
        config = TrialConfig.model_validate(known["config"])
        if ranking.capacity_class(config) not in measured:
            yield config, float(known["tokens_per_second"])
