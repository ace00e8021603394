"""What is said of a study, each thing in one sentence: the terminal and the page share them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from qlora_sweep.reports import format as units
from qlora_sweep.reports import words
from qlora_sweep.reports.view import StudyView
from qlora_sweep.reports.view_parts import EpochEstimate, TokenCost
from qlora_sweep.search_spaces.config import (
    CAPACITY_KEYS,
    SIZE_KEYS,
    TrialConfig,
    canonical,
    targets_in_words,
)
from qlora_sweep.search_spaces.dataset_choice import CUT_MAX
from qlora_sweep.search_spaces.quality import quality_in_words
from qlora_sweep.search_spaces.trainers import trainer_of
from qlora_sweep.storage.confirmations import FEW_ROWS
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.ranking import RankedTrial, Ranking, measured_of
from qlora_sweep.storage.records import RETRYABLE, Measurement, QualityReport


def headline(view: StudyView) -> str:
    """Return the recommendation in one sentence; its numbers are `facts`."""
    winner = view.winner
    if winner is None:
        return _nothing_fits(view)
    named = in_words(winner.config, view.baseline_config)
    if canonical(winner.config) == canonical(view.baseline_config):
        named = f"the baseline itself, {named}"
    best = words.best_by(view.objectives, is_confirmed=view.is_settled)
    return f"{best} is trial {winner.number}, {named}."


def _nothing_fits(view: StudyView) -> str:
    if not view.records:
        return "No trial has finished yet."
    if all(record.verdict in RETRYABLE for record in view.records):
        return "No trial has come to a conclusion yet: the same command tries them again."
    budget = units.gib(view.gpu.budget_bytes)
    baseline = view.measured_baseline
    if baseline is None or view.baseline is None or view.baseline.in_space:
        return f"Nothing that was tried was measured to fit in {budget}."
    return (
        f"Nothing of the space was measured to fit in {budget}. Its baseline fits, at "
        f"{words.speed(baseline.measurement)}: a reference that the space does not hold, and so "
        "no answer."
    )


def in_words(config: TrialConfig, baseline: TrialConfig) -> str:
    """Return the size, the capacity and the compute dtype of a configuration, and what else it
    changes over the baseline."""
    settings = {"compute_dtype": config.compute_dtype} | units.differing(config, baseline)
    phrases = [units.size(config), words.capacity(config)]
    for key, value in settings.items():
        if key not in SIZE_KEYS + CAPACITY_KEYS:
            phrases.append(units.phrase(key, value))
    return ", ".join(phrases)


def facts(view: StudyView) -> Iterator[tuple[str, str]]:
    """Yield what a person asks of a study's answer, each with its name, in the order in which they
    do; of a study without one, how its trials ended."""
    if view.winner is not None:
        yield from winner_facts(view, view.winner)
    trials = f"{len(view.finished):,} in {units.duration(view.seconds['wall'])}"
    carried = sum(record.carried is not None for record in view.records)
    if carried:
        trials += f", {carried} of them carried over"
    if view.records:
        trials += f": {words.verdict_words(view.records)}"
    yield "trials", trials
    for warning in view.warnings:
        yield "warning", warning


def winner_facts(view: StudyView, winner: RankedTrial) -> Iterator[tuple[str, str]]:
    """Yield what a person asks of a winner, each with its name."""
    measured = winner.measurement
    yield "speed", speed_on_target(view, winner)
    if measured.quality is not None:
        yield "loss", _loss(measured, measured.quality)
    peak = units.gib(measured.peak_allocated_bytes)
    share = units.percent(measured.peak_allocated_bytes / view.gpu.budget_bytes)
    yield "memory", f"{peak} of {units.gib(view.gpu.budget_bytes)} ({share})"
    if "trainable_parameters" in view.objectives:
        yield "size", f"{words.value('trainable_parameters', measured)} parameters"
    yield "gain", f"{gain_clause(view, winner)}{_gain_of_class(view, winner)}"
    configs = [winner.config]
    other = view.other_numerics
    if other is not None:
        yield "compute", _numerics(view, winner, other)
        configs.append(other.config)
    quality = quality_in_words(configs)
    if quality:
        yield "quality", quality
    if view.cost is not None:
        yield "cost", _cost(view, view.cost)
    if view.epoch is not None and view.epoch.seconds is not None:
        yield "epoch", _epoch(view.epoch, winner.config)
    yield "sure", _sureness(view)
    if winner.config.trainer != "sweep":
        yield "for", trainer_words(winner.config)


def _loss(measured: Measurement, quality: QualityReport) -> str:
    """Return a held-out loss, what it is of, and that so few examples say little, where they do."""
    rows = words.held_out(quality) + words.reward_accuracy(quality.eval_wins, quality.eval_rows)
    after = f"after training on {quality.train_tokens:,} tokens"
    sentence = f"{words.loss(measured)} on {rows}, {after}"
    if 0 < quality.eval_rows < FEW_ROWS:
        sentence += f"; fewer than {FEW_ROWS} decide little: hold out more (data.eval_fraction)"
    return sentence


def _cost(view: StudyView, cost: TokenCost) -> str:
    """Return what tokens cost as the winner trains, and the offer that says so."""
    offer = view.offer
    assert offer is not None, "what has a cost has an offer"
    basis = f"{offer.label} at ${offer.usd_per_hour:,.2f} an hour, as of {offer.date}"
    low = cost.usd_per_million_tokens_low
    high = cost.usd_per_million_tokens_high
    if low is not None and high is not None:
        basis = f"{units.usd_interval((low, high))}; {basis}"
    return f"{units.usd(cost.usd_per_million_tokens)} per million tokens ({basis})"


def trainer_words(config: TrialConfig) -> str:
    """Return what trials of a configuration for another trainer are of."""
    trainer = trainer_of(config)
    return (
        f"{trainer.label}: only what it can run is searched, and trials run what it does: "
        f"{trainer.does}"
    )


def speed_on_target(view: StudyView, trial: RankedTrial) -> str:
    """Return a trial's speed on the GPU that the study is for, how sure it is, and what another
    GPU reached that stood in."""
    measured = trial.measurement
    rate = units.rate(measured.tokens_per_second)
    sureness = _with_doubts(measured)
    if view.gpu.emulated_on is None:
        if trial.config.is_on_pairs:
            return f"{measured.samples_per_second:.3g} pairs/s, {rate} tokens/s ({sureness})"
        return f"{rate} tokens/s ({sureness})"
    host = f"measured on {view.gpu.emulated_on}"
    if view.definition.target.recorded is not None:
        host = f"recorded on {view.gpu.emulated_on}"
    speed = view.target_speed(trial)
    if speed is None:
        return f"{rate} tokens/s {host}; not predicted on {view.gpu.name}"
    predicted = "predicted"
    if speed.low is not None and speed.high is not None:
        predicted += f" {units.rate_interval((speed.low, speed.high))}"
    host += f": {rate}"
    if measured.speed_interval is not None:
        host += f", {sureness}"
    on_target = f"{units.rate(speed.tokens_per_second)} tokens/s on {view.gpu.name}"
    return f"{on_target} ({predicted}; {host})"


def _with_doubts(measured: Measurement, *more: str) -> str:
    """Return the interval of a speed, why it may be off, and what else there is to say of it."""
    return ", ".join(filter(None, (words.interval(measured), words.doubts(measured), *more)))


def gain_words(view: StudyView, trial: RankedTrial) -> str:
    """Return a trial's gain with what it is over: ``2.2x the baseline (2.1–2.3x)``; empty where
    none is stated, and for the baseline itself. Where it is predicted of the target, what the GPU
    that stood in measured is named beside it."""
    gain = view.gain_of(trial)
    if gain.ratio is None or gain.ratio.value == 1:
        return ""
    stated = words.gain(gain.ratio, view.reference_name(trial.config))
    if gain.measured is None or view.gpu.emulated_on is None:
        return stated
    host = units.gpu_name(view.gpu.emulated_on)
    return f"{stated}; measured on the {host}: {words.gain(gain.measured)}"


def gain_clause(view: StudyView, trial: RankedTrial) -> str:
    """Return a trial's gain or why none is stated, and that what it is over is the faster of both
    and no answer all the same, where that is so."""
    gain = view.gain_of(trial)
    over = view.reference_name(trial.config)
    clause = gain_words(view, trial) or f"none: it is {over}"
    if gain.ratio is None:
        clause = f"none stated: {words.why_no_gain(gain.reason, over)}"
    return f"{clause}{_faster_and_no_answer(view, trial)}"


def _gain_of_class(view: StudyView, winner: RankedTrial) -> str:
    """Return what the baseline's own class gained where the winner is of another."""
    fastest = view.fastest_of_baselines_class
    if fastest is None or view.ranking.is_of_baselines_class(winner.config):
        return ""
    gained = gain_words(view, fastest) or "no faster than the baseline"
    return f"; the fastest of the baseline's class is trial {fastest.number}, {gained}"


def _faster_and_no_answer(view: StudyView, trial: RankedTrial) -> str:
    """Return that what a trial's gain is over is the faster of both, and why it is no answer all
    the same: a clause after a semicolon, empty where that is not so."""
    named = view.reference_name(trial.config)
    over = view.reference_for(trial.config)
    if over is None:
        named = "the baseline"
        over = view.measured_baseline
    if over is None or view.ranking.holds(over.config):
        return ""
    if over.estimate.value <= trial.estimate.value:
        return ""
    why = "the space does not hold it"
    is_offered = over.config.seq_len in view.space.values_of("seq_len")
    if over.epoch is not None and not over.epoch.is_whole and not is_offered:
        why = f"its {words.cut_in_words(over.epoch, over.config)}"
    if view.is_predicted:
        return f"; {named} is predicted to be faster and is no answer: {why}"
    return f"; {named} was measured faster and is no answer: {why}"


def _numerics(view: StudyView, winner: RankedTrial, other: RankedTrial) -> str:
    """Return how fast the fastest of the other class of numerics is, 16-bit compute or 8 bits, and
    what would settle which is the faster where that is not sure."""
    speed = speed_on_target(view, other)
    if winner.config.is_8bit_compute:
        return f"The fastest with 16-bit compute is trial {other.number}: {speed}."
    computes = units.phrase("compute_dtype", other.config.compute_dtype)
    times = words.times(view.ratio(other, winner))
    comparison = f"With {computes} trial {other.number} is {times} as fast: {speed}"
    if view.numerics_choice == "measured":
        return f"{comparison}; that is not sure to be faster."
    gpu = units.with_article(units.gpu_name(view.gpu.name))
    return f"{comparison}; only `sweep run` on {gpu} can measure which is faster."


def _epoch(epoch: EpochEstimate, config: TrialConfig) -> str:
    """Return what an epoch takes: time, dollars, tokens, and what its length cuts off."""
    sentence = units.duration(epoch.seconds)
    if epoch.seconds_low is not None and epoch.seconds_high is not None:
        ends = f"{units.duration(epoch.seconds_low)}–{units.duration(epoch.seconds_high)}"
        sentence += f" ({ends})"
    if epoch.dollars is not None:
        sentence += f", {units.usd(epoch.dollars)}"
    sentence += f", {epoch.loss_tokens:,} supervised tokens"
    return f"{sentence}; {words.cut_in_words(epoch, config)}"


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
    if ranking.is_confirmed and ranking.winner is not None:
        runs = ranking.runs_of(ranking.winner.config)
        return f"confirmed ({units.plural(len(runs), 'run')})"
    if is_driven:
        return "not confirmed yet"
    return f"not confirmed: sweep confirm {shlex.quote(study)}"


def _sureness(view: StudyView) -> str:
    status = status_words(view.ranking, study=view.study, is_driven=view.is_driven)
    soak = view.ranking.soak
    if soak is not None:
        status += f"; {_soak(measured_of(soak))}"
    sentences = [status]
    if view.tied:
        sentences.append(f"Statistically indistinguishable: {_tied(view)}")
    for number, run in view.fallen.items():
        sentences.append(f"Trial {number} fitted in the search and {words.fell(run)}, so it lost")
    return ". ".join(sentences)


def _soak(measured: Measurement) -> str:
    """Return what the soak was, and what strained it."""
    steps = measured.steps_measured
    seconds = measured.measured_seconds
    if measured.soak is not None:
        steps = measured.soak.steps
        seconds = measured.soak.seconds
    sentence = (
        f"stood a soak of {units.plural(steps, 'step')} in {units.duration(seconds)}, at "
        f"{units.gib(measured.peak_allocated_bytes)}"
    )
    if measured.allocator_retries:
        times = units.plural(measured.allocator_retries, "time")
        sentence += f"; the allocator gave memory back {times}"
    return sentence


def _tied(view: StudyView) -> str:
    """Return what is statistically indistinguishable from the winner, with the memory of each,
    those of the least first."""
    tied = (trial for trial in view.ranked if trial.number in view.tied)
    peaks = sorted((trial.measurement.peak_allocated_bytes, trial.number) for trial in tied)
    return ", ".join(f"trial {number} ({units.gib(peak)})" for peak, number in peaks)


def notes(view: StudyView) -> Iterator[str]:
    """Yield what a reader must know before believing a number: emulation, progress, warnings."""
    emulation = words.emulation_note(view.definition.target)
    if emulation:
        yield emulation
    if view.is_driven:
        yield "The study is running: this is how it stood when the report was written."
    if abs(view.ranking.scale - 1) >= 0.005:
        yield (
            f"Speeds of trials that were not measured again are shown times "
            f"{view.ranking.scale:.2f}, so that they compare with those measured side by side."
        )
    yield from view.warnings


def stopped_words(snapshot: StudySnapshot) -> str:
    """Return what the search expected of what it did not try, where it knew; else nothing."""
    ended = snapshot.ended or {}
    most_promising = ended.get("most_promising") or {}
    gain = most_promising.get("gain")
    if gain is None:
        return ""
    expected = units.share(gain)
    if ended["reason"] == "gain_spent":
        return f"Stopped: no untested configuration is expected to be more than {expected} faster."
    return f"The best untested configuration is expected to be {expected} faster."


def commands(view: StudyView) -> tuple[str, ...]:
    """Return what to type next, of a study that has an answer: to be surer, to train, to take it
    elsewhere, and for the whole configuration."""
    if view.winner is None or view.is_surface:
        return ()
    name = shlex.quote(view.study)
    train = f"sweep train {name}"
    if not view.texts:
        train += " --data dataset.jsonl"
    epoch = view.winner.epoch
    if epoch is not None and (epoch.supervised_tokens_cut or 0.0) > CUT_MAX:
        # What it cuts stands above.
        train += " --yes"
    export = f"sweep export {name} --for {view.winner.config.trainer}"
    if view.winner.config.trainer == "sweep":
        export = f"sweep export {name} --format script"
    doing: tuple[str, ...] = (f"{train} --output adapter", export)
    if view.winner.config.image_size is not None:
        # Neither trains on images.
        doing = (f"sweep verify {name}",)
    lines = doing + (f"sweep best {name} --json",)
    if view.is_settled:
        return lines
    return (f"sweep confirm {name}",) + lines


def runners_up(view: StudyView) -> Iterator[str]:
    """Yield the next best configurations, of several objectives the rest of the front, each by what
    it changes over the winner: only the first few."""
    for trial in view.ranking.front[1:6] or view.ranked[1:4]:
        measured = trial.measurement
        values = [_rate_of(view, trial), units.gib(measured.peak_allocated_bytes)]
        for objective in view.objectives:
            if objective not in ("tokens_per_second", "peak_memory"):
                values.append(words.value(objective, measured))
        changes = units.changes(trial.config, baseline=view.ranked[0].config)
        yield f"trial {trial.number}: {', '.join(values)}: {changes}"


def _rate_of(view: StudyView, trial: RankedTrial) -> str:
    """Return the speed of a trial that decides, and how sure it is."""
    if view.is_predicted:
        return speed_on_target(view, trial)
    sureness = _with_doubts(trial.measurement)
    has_confirmed = any(other.basis == "confirmed" for other in view.measured_trials.values())
    if has_confirmed and trial.basis == "searched":
        sureness = _with_doubts(trial.measurement, "scaled")
    return f"{units.rate(trial.estimate.value)} tokens/s ({sureness})"


def classes(view: StudyView) -> Iterator[str]:
    """Yield the fastest of each capacity class, a line each: its tokens/s at each length. Of
    classes that were not measured, what is predicted to be the fastest that fits."""
    has_several = len({best.numerics for best in view.fastest_by_class}) > 1
    class_of = attrgetter("lora_rank", "target_modules")
    for (rank, modules), group in groupby(view.fastest_by_class, key=class_of):
        speeds = []
        for best in group:
            rate = units.rate(best.target_tokens_per_second or best.tokens_per_second)
            where = f"{rate} at {best.seq_len:,}"
            if has_several:
                where += f" in {best.numerics}"
            trial = f"trial {best.number}"
            if best.is_partial:
                trial += ", stopped early"
            speeds.append(f"{where} ({trial})")
        yield f"rank {rank} on {targets_in_words(modules)}: {', '.join(speeds)}"
    for config, speed in unmeasured_classes(view):
        changes = units.changes(config, baseline=view.baseline_config)
        where = f"{words.capacity(config)}: {units.rate(speed)} at {config.seq_len:,}"
        yield f"{where} (predicted, not measured: {changes})"


def unmeasured_classes(view: StudyView) -> Iterator[tuple[TrialConfig, float]]:
    """Yield what is predicted to be the fastest of each capacity class in which nothing was
    measured, with its tokens/s on the GPU that the study is for."""
    measured = {view.capacity_class(trial.config) for trial in view.ranked}
    for known in (view.ended or {}).get("unmeasured_classes", ()):
        config = TrialConfig.model_validate(known["config"])
        if view.capacity_class(config) not in measured:
            yield config, float(known["tokens_per_second"])
