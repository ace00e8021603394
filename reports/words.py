"""Speeds, gains, needs, losses and the ends of trials in words, the same wherever they stand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

from qlora_sweep.reports import units
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
    *first, last = [_NAMES[objective] for objective in objectives]
    return f"{', '.join(first)} and {last}" if first else last


def best_by(objectives: Sequence[Objective], *, is_confirmed: bool) -> str:
    """Return what the best trial of a study is, as the beginning of a sentence."""
    named, most = names_of(objectives), "lowest" if objectives[0] in LESS_IS_BETTER else "most"
    if len(objectives) > 1:
        best = f"The best compromise between {named} (the knee of the Pareto front)"
    elif objectives[0] == "tokens_per_second":
        best = "The fastest configuration"
    else:
        best = f"The configuration with the {most} {named}"
    return f"{best} that fits" if is_confirmed else f"{best} measured so far"


def value(objective: Objective, measured: Measurement) -> str:
    """Return what was measured of an objective, with what it is."""
    known: Mapping[Objective, str] = {
        "tokens_per_second": speed(measured),
        "peak_memory": units.gib(measured.peak_allocated_bytes),
        "trainable_parameters": f"{units.count(measured.trainable_parameters)} trainable",
        "eval_loss": f"held-out loss {loss(measured)}",
    }
    return known[objective]


def loss(measured: Measurement) -> str:
    """Return a held-out loss with its interval over seeds: ``1.9512 (1.948–1.954)``."""
    quality = measured.quality
    if quality is None:
        return units.DASH
    ends = quality.eval_loss_ci95
    within = "" if ends is None else f" ({ends[0]:.4g}–{ends[1]:.4g})"
    return f"{quality.eval_loss:.4f}{within}"


def held_out(quality: QualityReport) -> str:
    """Return what a loss is of: ``120 held-out examples``."""
    kind = "held-out examples" if quality.eval_wins is None else "held-out pairs"
    return f"{quality.eval_rows:,} {kind}" if quality.eval_rows else kind


def reward_accuracy(wins: float | None, pairs: int) -> str:
    """Return in what share of held-out pairs the chosen completion gained more; empty of texts."""
    if wins is None or not pairs:
        return ""
    low, high = map(units.percent, binomial_ci95(wins, pairs))
    share = units.percent(wins / pairs)
    return f", the chosen completion gained more in {share} of {pairs:,} ({low} to {high})"


def interval(measured: Measurement) -> str:
    """Return the 95 % interval of the speed: ``16,700–16,900``; ``no interval`` without one."""
    ends = measured.speed_interval
    return "no interval" if ends is None else units.rate_interval(ends)


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
    known = [_FLAGS.get(flag, flag.replace("_", " ")) for flag in measured.flags]
    return ", ".join(word for word in known if word)


def speed(measured: Measurement) -> str:
    """Return a speed, of a noisy one with its interval: ``7,010 tokens/s (6,500–7,600, noisy)``."""
    rate = f"{units.rate(measured.tokens_per_second)} tokens/s"
    within = interval(measured) if measured.is_noisy else ""
    known = ", ".join(filter(None, (within, doubts(measured))))
    is_told = measured.is_noisy or SPEED_REUSED in measured.flags
    return f"{rate} ({known})" if is_told else rate


def gain(ratio: Ratio, over: str = "") -> str:
    """Return a gain with its interval, of measurements that of 95 %: ``2.1x the baseline
    (2.06–2.17x)``."""
    factor_over, ends = f"{factor(ratio)} {over}".rstrip(), factor_interval(ratio)
    if not ends:
        return factor_over
    if ratio.is_predicted:
        return f"{factor_over} (predicted, {ends})"
    single = "" if ratio.is_paired else ", by single runs"
    return f"{factor_over} ({ends}{single})"


def times(ratio: Ratio) -> str:
    """Return a ratio that may be below 1, with its interval: ``1.47 times (0.92 to 2.37)``."""
    said = f"{ratio.value:.2f} times"
    if ratio.low is None or ratio.high is None:
        return said
    return f"{said} ({ratio.low:.2f} to {ratio.high:.2f})"


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
    low, high = ratio.low, ratio.high
    return low is not None and high is not None and low >= 1 and high > WIDE * low


def _decimals_of_ends(ratio: Ratio) -> int:
    if ratio.low is not None and _is_wide(ratio):
        return 1 if ratio.low >= 1.1 else 2
    return min(_decimals(ratio) + 1, 2)


def _decimals(ratio: Ratio) -> int:
    low, high = ratio.low, ratio.high
    if low is None or high is None:
        return 1
    half_width = (high - low) / 2
    supported = 2 if half_width <= 0.01 else 1 if half_width <= 0.1 else 0
    # A small factor keeps its first digit: 0x would say nothing.
    leading = max(0, math.ceil(-math.log10(ratio.value))) if ratio.value < 1 else 0
    least = max(supported, min(leading, 2))
    # Nor may rounding take a factor out of its own interval: 2x between 2.1 and 2.6.
    inside = (d for d in range(least, 2) if low <= round(ratio.value, d) <= high)
    return next(inside, 2)


def capacity(config: TrialConfig) -> str:
    """Return the capacity class of a configuration: ``rank 16 on q,k,v,o``."""
    rank = units.phrase("lora_rank", config.lora_rank)
    return f"{rank} on {targets_in_words(config.target_modules)}"


def reference_of(ranking: Ranking, config: TrialConfig) -> str:
    """Return what its gain is over: ``the baseline``, or ``the baseline at rank 8 on q,v``."""
    is_its_own = ranking.is_of_baselines_class(config)
    return "the baseline" if is_its_own else f"the baseline at {capacity(config)}"


def why_no_gain(reason: NoGain | None, over: str) -> str:
    """Return in a clause why no gain over what is named ``over`` is stated; empty with a gain."""
    known: Mapping[NoGain | None, str] = {
        None: "",
        "no_winner": "nothing of the space was measured to fit",
        "not_measured": f"{over} was not measured",
        "did_not_fit": f"{over} did not fit",
        "not_shown": f"statistically indistinguishable from {over}",
    }
    return known[reason]


def need(known: Need, unit: units.MemoryUnit | None = None) -> str:
    """Return what a trial that did not fit needs: ``at least 23.00 GiB by prediction``."""
    basis = " by prediction" if known.is_predicted else ""
    bound = "at least " if known.is_lower_bound else ""
    return f"{bound}{units.gib(known.allocated_bytes, unit)}{basis}"


def excess(known: Need, *, budget_bytes: int) -> str:
    """Return by how much a trial missed the budget, in a clause."""
    over = known.allocated_bytes - budget_bytes
    if over <= 0:
        return "it needs more than the budget, by how much is not known"
    more = f"{units.gib(over, units.memory_unit(min(over, budget_bytes)))} more than the budget"
    if known.is_lower_bound:
        return f"it needs at least {more}{' by prediction' if known.is_predicted else ''}"
    return f"it is predicted to need {more}"


def outcome_line(record: TrialRecord, *, budget_bytes: int) -> str:
    """Return how a trial ended: ``fits, 7,006 tokens/s, 6.65 GiB``, ``crashed (attach: ...)``.

    Where it trained for its held-out loss, that stands behind.
    """
    measured, label = record.measurement, VERDICT_LABELS[record.verdict]
    if measured is not None:
        learned = "" if measured.quality is None else f", {value('eval_loss', measured)}"
        return f"{label}, {speed(measured)}, {value('peak_memory', measured)}{learned}"
    why = reason(record, budget_bytes=budget_bytes)
    return f"{label} ({why})" if why else label


def reason(record: TrialRecord, *, budget_bytes: int) -> str:
    """Return what is known of why a trial was not measured, in one line; empty for one that was."""
    missing = need_of(record, budget_bytes=budget_bytes)
    unit = units.memory_unit(budget_bytes)
    known = (_cause(record), "" if missing is None else f"needs {need(missing, unit)}")
    line = " ".join(", ".join(filter(None, known)).split())
    return line if len(line) <= _REASON_CHARACTERS else f"{line[:_REASON_CHARACTERS]}..."


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
            ended.Ineffective(knob=where, detail=detail)
            | ended.TimedOut(phase=where, detail=detail)
            | ended.Crashed(phase=where, detail=detail)
        ):
            return f"{where}: {detail}" if detail else where
        case ended.Lost(detail=detail):
            return detail
        case ended.Measured() | ended.PrunedSlow() | ended.PredictedOutOfMemory():
            return ""
        case _:
            assert_never(record.outcome)


def fell(record: TrialRecord) -> str:
    """Return how a configuration lost in the run that ruled it out: ``ran out of memory in its
    soak``."""
    where = "its soak" if record.purpose == "soak" else "a run that was to confirm it"
    return f"{VERDICT_LABELS[record.verdict]} in {where}"


def verdict_words(records: Iterable[TrialRecord]) -> str:
    """Return how many trials ended in each way: ``5 fits, 3 ran out of memory``.

    An attempt that came to nothing and was repeated is no trial of its own, and is said so.
    """
    records = tuple(records)
    trials = without_repeated(records)
    counts = verdict_counts(trials)
    shown = (f"{counts[v]} {label}" for v, label in VERDICT_LABELS.items() if counts[v])
    again = len(records) - len(trials)
    after = f" (after {units.plural(again, 'failed attempt')})" if again else ""
    return f"{', '.join(shown)}{after}"


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
    noun = "pair" if config.is_on_pairs else "row"
    length, of = units.count(config.seq_len), epoch.rows + epoch.rows_left_out
    parts = [f"length {length} cuts nothing off"]
    if epoch.rows_cut:
        tokens = units.share(epoch.tokens_cut)
        rows = f"{epoch.rows_cut:,} of {of:,} training {noun}s"
        parts = [f"length {length} cuts off {tokens} of the tokens ({rows})"]
    if epoch.rows_left_out:
        rows = units.plural(epoch.rows_left_out, noun)
        tokens = f"{units.share(epoch.tokens_left_out)} of the tokens"
        parts.append(f"{rows} with {tokens} left out, as no supervised token is left of them")
    if epoch.supervised_tokens_cut:
        parts.append(
            f"{units.share(epoch.supervised_tokens_cut)} of the supervised tokens are lost"
        )
    return "; ".join(parts)
