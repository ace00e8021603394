"""Speeds, gains, needs, losses and the ends of trials in words, the same wherever they stand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.config import TrialConfig, targets_in_words
from qlora_sweep.search_spaces.space import Objective
from qlora_sweep.storage import records as ended
from qlora_sweep.storage.confirmations import Ratio, binomial_ci95
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.ranking import LESS_IS_BETTER, NoGain, Ranking, verdict_counts
from qlora_sweep.storage.records import (
    NEIGHBOUR,
    SPEED_REUSED,
    EpochRecord,
    Measurement,
    Need,
    QualityReport,
    TrialRecord,
    Verdict,
    need_of,
    without_repeated,
)

WIDE = 1.5
"""A gain whose interval ends this many times as high as it begins is known by its lower end."""
_REASON_CHARACTERS = 160
"""A worker's last words can be long; its log has them all."""
_DOUBTS = {
    "noisy": "noisy",
    NEIGHBOUR: NEIGHBOUR,
    "throttled": "throttled",
    SPEED_REUSED: "carried over",
}
"""Flags that say why a speed may be off, as they stand beside it."""
_FLAGS = {
    "emulated": "",
    "throttled": "slowed by a power or heat limit",
    "noisy": "uneven steps",
    NEIGHBOUR: "another process shared the GPU",
    "remeasured": "measured twice, as something disturbed it",
    "allocator_retries": "the allocator had to give memory back",
    "accumulation_extrapolated": "its step is derived from fewer micro-steps",
    SPEED_REUSED: "its speed was measured at another learning rate",
    "round_extrapolated": "its step is derived from micro-batches of other sizes",
}
_NAMES: Mapping[Objective, str] = {
    "tokens_per_second": "speed",
    "peak_memory": "peak memory",
    "trainable_parameters": "trainable parameters",
    "eval_loss": "held-out loss",
}

VERDICT_LABELS: Mapping[Verdict, str] = {
    Verdict.FITS: "fits",
    Verdict.OOM: "ran out of memory",
    Verdict.PREDICTED_OOM: "predicted not to fit",
    Verdict.DOMINATED_OOM: "larger than one that ran out",
    Verdict.PRUNED_SLOW: "stopped as too slow",
    Verdict.DIVERGED: "diverged",
    Verdict.INVALID: "invalid",
    Verdict.INEFFECTIVE: "had no effect",
    Verdict.TIMED_OUT: "timed out",
    Verdict.CRASHED: "crashed",
    Verdict.LOST: "lost",
}
"""What each verdict is called for people."""
VERDICT_MEANINGS: Mapping[Verdict, str] = {
    Verdict.FITS: "It trained within the budget and was measured.",
    Verdict.OOM: "A real allocation failed while it trained.",
    Verdict.PREDICTED_OOM: "It was predicted not to fit, surely; it was not launched.",
    Verdict.DOMINATED_OOM: "It is at least as large in every dimension as one that ran out of "
    "memory; it was not launched.",
    Verdict.PRUNED_SLOW: "It fits, and was stopped once it could no longer be the fastest.",
    Verdict.DIVERGED: "The loss was not finite, so its speed does not count.",
    Verdict.INVALID: "A rule forbids it on this model or GPU; it was not launched.",
    Verdict.INEFFECTIVE: "A setting did not take effect, so this is not what was run.",
    Verdict.TIMED_OUT: "A phase outlasted its deadline; it may be retried.",
    Verdict.CRASHED: "The worker ended, not for want of memory; it may be retried.",
    Verdict.LOST: "The driver ended while it ran, so nothing is known of it; it may be retried.",
}
"""One sentence on each verdict."""


def names_of(objectives: Sequence[Objective]) -> str:
    """Return what a study is ranked by: ``speed``, ``speed and peak memory``."""
    names = [_NAMES[objective] for objective in objectives]
    last = names.pop()
    if not names:
        return last
    return f"{', '.join(names)} and {last}"


def best_by(objectives: Sequence[Objective], *, is_confirmed: bool) -> str:
    """Return what the best trial of a study is, as the beginning of a sentence."""
    names = names_of(objectives)
    if len(objectives) > 1:
        best = f"The best compromise between {names} (the knee of the Pareto front)"
    elif objectives[0] == "tokens_per_second":
        best = "The fastest configuration"
    elif objectives[0] in LESS_IS_BETTER:
        best = f"The configuration with the lowest {names}"
    else:
        best = f"The configuration with the most {names}"
    if is_confirmed:
        return f"{best} that fits"
    return f"{best} measured so far"


def value(objective: Objective, measured: Measurement) -> str:
    """Return what was measured of an objective, with what it is."""
    match objective:
        case "tokens_per_second":
            return speed(measured)
        case "peak_memory":
            return units.gib(measured.peak_allocated_bytes)
        case "trainable_parameters":
            return f"{units.count(measured.trainable_parameters)} trainable"
        case "eval_loss":
            return f"held-out loss {loss(measured)}"
        case _:
            assert_never(objective)


def loss(measured: Measurement) -> str:
    """Return a held-out loss with its interval over seeds: ``1.9512 (1.948–1.954)``."""
    quality = measured.quality
    if quality is None:
        return units.DASH
    if quality.eval_loss_ci95 is None:
        return f"{quality.eval_loss:.4f}"
    low, high = quality.eval_loss_ci95
    return f"{quality.eval_loss:.4f} ({low:.4g}–{high:.4g})"


def held_out(quality: QualityReport) -> str:
    """Return what a loss is of: ``120 held-out examples``."""
    kind = "held-out pairs"
    if quality.eval_wins is None:
        kind = "held-out examples"
    if not quality.eval_rows:
        return kind
    return f"{quality.eval_rows:,} {kind}"


def reward_accuracy(wins: float | None, pairs: int) -> str:
    """Return in what share of held-out pairs the chosen completion gained more; empty of
    examples."""
    if wins is None or not pairs:
        return ""
    low, high = map(units.percent, binomial_ci95(wins, pairs))
    share = units.percent(wins / pairs)
    return f", the chosen completion gained more in {share} of {pairs:,} ({low} to {high})"


def interval(measured: Measurement) -> str:
    """Return the 95 % interval of the speed: ``16,700–16,900``; ``no interval`` without one."""
    if measured.speed_interval is None:
        return "no interval"
    return units.rate_interval(measured.speed_interval)


def interval_words(measured: Measurement) -> str:
    """Return the interval with what it is, or why there is none."""
    if measured.speed_interval is None:
        return f"no interval: {units.plural(measured.steps_measured, 'step')} are too few for one"
    return f"95 % interval {interval(measured)}"


def doubts(measured: Measurement) -> str:
    """Return the flags for which the speed may be off."""
    return ", ".join(word for flag, word in _DOUBTS.items() if flag in measured.flags)


def flags_in_words(measured: Measurement) -> str:
    """Return what a measurement is marked with, in words, but for that another GPU stood in."""
    words = [_FLAGS.get(flag, flag.replace("_", " ")) for flag in measured.flags]
    return _joined(*words)


def _joined(*parts: str) -> str:
    """Return the parts that say something, with commas."""
    return ", ".join(filter(None, parts))


def speed(measured: Measurement) -> str:
    """Return a speed, of a noisy one with its interval: ``7,010 tokens/s (6,500–7,600, noisy)``."""
    rate = f"{units.rate(measured.tokens_per_second)} tokens/s"
    if measured.is_noisy:
        return f"{rate} ({_joined(interval(measured), doubts(measured))})"
    if SPEED_REUSED in measured.flags:
        return f"{rate} ({doubts(measured)})"
    return rate


def gain(ratio: Ratio, over: str = "") -> str:
    """Return a gain with its interval, of measurements that of 95 %: ``2.1x the baseline
    (2.06–2.17x)``."""
    factor_over = f"{factor(ratio)} {over}".rstrip()
    ends = factor_interval(ratio)
    if not ends:
        return factor_over
    if ratio.is_predicted:
        return f"{factor_over} (predicted, {ends})"
    if ratio.is_paired:
        return f"{factor_over} ({ends})"
    return f"{factor_over} ({ends}, by single runs)"


def times(ratio: Ratio) -> str:
    """Return a ratio that may be below 1, with its interval: ``1.47 times (0.92 to 2.37)``."""
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f} times"
    return f"{ratio.value:.2f} times ({ratio.low:.2f} to {ratio.high:.2f})"


def factor(ratio: Ratio) -> str:
    """Return a gain with no more digits than its interval supports, two decimals at the most.

    The last digit shown counts at least half the interval's width: 2.12 between 2.06 and 2.17 is
    ``2.1x``. Of a wide interval the lower end is what is sure: ``at least 4.1x``.
    """
    if ratio.low is None or not _is_wide(ratio):
        return f"{ratio.value:.{_decimals(ratio)}f}x"
    return f"at least {_floor(ratio.low, _decimals_of_ends(ratio))}x"


def factor_interval(ratio: Ratio) -> str:
    """Return the interval of a gain, ``2.06–2.17x``; empty where there is none."""
    if ratio.low is None or ratio.high is None or ratio.low == ratio.high:
        return ""
    decimals = _decimals_of_ends(ratio)
    high = f"{ratio.high:.{decimals}f}x"
    if _is_wide(ratio):
        return f"{ratio.value:.1f}x, {_floor(ratio.low, decimals)}–{high}"
    return f"{ratio.low:.{decimals}f}–{high}"


def _floor(low: float, decimals: int) -> str:
    """Return a lower end, never more than what is sure."""
    return f"{math.floor(low * 10**decimals) / 10**decimals:.{decimals}f}"


def _is_wide(ratio: Ratio) -> bool:
    if ratio.low is None or ratio.high is None:
        return False
    return ratio.low >= 1 and ratio.high > WIDE * ratio.low


def _decimals_of_ends(ratio: Ratio) -> int:
    if ratio.low is not None and _is_wide(ratio):
        if ratio.low < 1.1:
            return 2
        return 1
    return min(_decimals(ratio) + 1, 2)


def _decimals(ratio: Ratio) -> int:
    if ratio.low is None or ratio.high is None:
        return 1
    half_width = (ratio.high - ratio.low) / 2
    for decimals in (0, 1):
        supports_more = half_width <= 10.0 ** -(decimals + 1)
        # A small factor keeps its first digit: 0x would say nothing.
        has_digits = ratio.value >= 10.0**-decimals
        # Nor may rounding take a factor out of its own interval: 2x between 2.1 and 2.6.
        is_inside = ratio.low <= round(ratio.value, decimals) <= ratio.high
        if has_digits and is_inside and not supports_more:
            return decimals
    return 2


def capacity(config: TrialConfig) -> str:
    """Return the capacity class of a configuration: ``rank 16 on q,k,v,o``."""
    rank = units.phrase("lora_rank", config.lora_rank)
    return f"{rank} on {targets_in_words(config.target_modules)}"


def reference_of(ranking: Ranking, config: TrialConfig) -> str:
    """Return what its gain is over: ``the baseline``, or ``the baseline at rank 8 on q,v``."""
    if ranking.is_of_baselines_class(config):
        return "the baseline"
    return f"the baseline at {capacity(config)}"


def why_no_gain(reason: NoGain | None, over: str) -> str:
    """Return in a clause why no gain over what is named ``over`` is stated; empty with a gain."""
    match reason:
        case None:
            return ""
        case "no_winner":
            return "nothing of the space was measured to fit"
        case "not_measured":
            return f"{over} was not measured"
        case "did_not_fit":
            return f"{over} did not fit"
        case "not_shown":
            return f"statistically indistinguishable from {over}"
        case _:
            assert_never(reason)


def need(needed: Need, unit: units.MemoryUnit | None = None) -> str:
    """Return what a trial that did not fit needs: ``at least 23.00 GiB by prediction``."""
    size = units.gib(needed.allocated_bytes, unit)
    if needed.is_lower_bound:
        size = f"at least {size}"
    if needed.is_predicted:
        size = f"{size} by prediction"
    return size


def excess(needed: Need, *, budget_bytes: int) -> str:
    """Return by how much a trial missed the budget, in a clause."""
    over = needed.allocated_bytes - budget_bytes
    if over <= 0:
        return "it needs more than the budget, by how much is not known"
    more = f"{units.gib(over, units.memory_unit(min(over, budget_bytes)))} more than the budget"
    if not needed.is_lower_bound:
        return f"it is predicted to need {more}"
    if needed.is_predicted:
        return f"it needs at least {more} by prediction"
    return f"it needs at least {more}"


def outcome_line(record: TrialRecord, *, budget_bytes: int) -> str:
    """Return how a trial ended: ``fits, 7,006 tokens/s, 6.65 GiB``, ``crashed (attach: ...)``.

    Where it trained for its held-out loss, that stands behind.
    """
    label = VERDICT_LABELS[record.verdict]
    if record.measurement is not None:
        return f"{label}, {measured_line(record.measurement)}"
    why = reason(record, budget_bytes=budget_bytes)
    if not why:
        return label
    return f"{label} ({why})"


def measured_line(measured: Measurement) -> str:
    """Return speed and memory, and a held-out loss: ``7,006 tokens/s, 6.65 GiB``."""
    line = f"{speed(measured)}, {value('peak_memory', measured)}"
    if measured.quality is not None:
        line += f", {value('eval_loss', measured)}"
    return line


def reason(record: TrialRecord, *, budget_bytes: int) -> str:
    """Return what is known of why a trial was not measured, in one line; empty for one that was."""
    why = _cause(record)
    needed = need_of(record, budget_bytes=budget_bytes)
    if needed is not None:
        why = _joined(why, f"needs {need(needed, units.memory_unit(budget_bytes))}")
    line = " ".join(why.split())
    if len(line) <= _REASON_CHARACTERS:
        return line
    return f"{line[:_REASON_CHARACTERS]}..."


def _cause(record: TrialRecord) -> str:
    match record.outcome:
        case ended.OutOfMemory(stage=stage):
            return stage
        case ended.DominatedOutOfMemory(by=number):
            return f"trial {number}"
        case ended.Diverged(step=step, detail=detail):
            return detail or f"at step {step}"
        case ended.Invalid(rule=rule, detail=detail):
            return detail or rule
        case (
            ended.Ineffective(setting=where, detail=detail)
            | ended.TimedOut(phase=where, detail=detail)
            | ended.Crashed(phase=where, detail=detail)
        ):
            if not detail:
                return where
            return f"{where}: {detail}"
        case ended.Lost(detail=detail):
            return detail
        case ended.Measured() | ended.PrunedSlow() | ended.PredictedOutOfMemory():
            return ""
        case _:
            assert_never(record.outcome)


def fell(record: TrialRecord) -> str:
    """Return how a configuration lost in the run that ruled it out: ``ran out of memory in its
    soak``."""
    label = VERDICT_LABELS[record.verdict]
    if record.purpose == "soak":
        return f"{label} in its soak"
    return f"{label} in a run that was to confirm it"


def verdict_words(records: Iterable[TrialRecord]) -> str:
    """Return how many trials ended in each way: ``5 fits, 3 ran out of memory``.

    An attempt that failed and was repeated is no trial of its own, and is counted apart.
    """
    records = tuple(records)
    trials = without_repeated(records)
    counts = verdict_counts(trials)
    shown = (f"{counts[v]} {label}" for v, label in VERDICT_LABELS.items() if counts[v])
    line = ", ".join(shown)
    repeated = len(records) - len(trials)
    if repeated:
        line += f" (after {units.plural(repeated, 'failed attempt')})"
    return line


def emulation_note(target: Target) -> str | None:
    """Return what is real and what is not where trials were recorded, or another GPU stood in."""
    if target.recorded is not None:
        return f"Recorded on {target.recorded}: nothing is measured now."
    if target.emulated_on is None:
        return None
    return (
        f"Measured on {target.emulated_on} with its memory capped to the budget of {target.gpu}: "
        f"the fit is real; where it says measured, the speed is that of {target.emulated_on}."
    )


def cut_in_words(epoch: EpochRecord, config: TrialConfig) -> str:
    """Return what a length cuts off the dataset, in tokens and in rows or pairs."""
    noun = "row"
    if config.is_on_pairs:
        noun = "pair"
    parts = [f"length {config.seq_len:,} cuts nothing off"]
    if epoch.rows_cut:
        tokens = units.share(epoch.tokens_cut)
        total = epoch.rows + epoch.rows_left_out
        rows = f"{epoch.rows_cut:,} of {total:,} training {noun}s"
        parts = [f"length {config.seq_len:,} cuts off {tokens} of the tokens ({rows})"]
    if epoch.rows_left_out:
        rows = units.plural(epoch.rows_left_out, noun)
        tokens = f"{units.share(epoch.tokens_left_out)} of the tokens"
        parts.append(f"{rows} with {tokens} left out, as no supervised token is left of them")
    if epoch.supervised_tokens_cut:
        parts.append(
            f"{units.share(epoch.supervised_tokens_cut)} of the supervised tokens are lost"
        )
    return "; ".join(parts)
