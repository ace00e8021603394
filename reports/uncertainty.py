"""Owns how the uncertainty of speeds, gains and needs is put into words, the same everywhere.

Knows nothing of where the words go.
"""

from __future__ import annotations

import math

from reports import texts, units
from search_spaces.config import TrialConfig
from search_spaces.knobs import targets_in_words
from storage.confirmations import Ratio
from storage.definition import StudySnapshot, Target
from storage.gain import Comparison, NoGain
from storage.objectives import measured_of
from storage.ranking import Ranking
from storage.records import NEIGHBOUR, Measurement, Need, TrialRecord

_DOUBTS = ("noisy", NEIGHBOUR, "throttled")
"""Flags that say why a speed may be off."""

_FLAGS = {
    "emulated": "",
    "throttled": "slowed by a power or heat limit",
    "noisy": "uneven steps",
    NEIGHBOUR: "another process shared the GPU",
    "remeasured": "measured twice, as something disturbed it",
    "allocator_retries": "the allocator had to give memory back",
    "accumulation_extrapolated": "its step is derived from fewer micro-steps",
    "round_extrapolated": "its step is derived from micro-batches of other sizes",
}

WIDE = 1.5
"""A gain whose interval ends this many times as high as it begins is known by its lower end."""


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
    return ", ".join(flag for flag in _DOUBTS if flag in measured.flags)


def speed(measured: Measurement) -> str:
    """Return a speed, of a noisy one with its interval: ``7,010 tokens/s (6,500–7,600, noisy)``."""
    rate = f"{units.rate(measured.tokens_per_second)} tokens/s"
    known = ", ".join(filter(None, (interval(measured), doubts(measured))))
    return f"{rate} ({known})" if measured.is_noisy else rate


def measured_beside(measured: Measurement, target: Target) -> str:
    """Return what the GPU that stood in for the target reached; empty where none did."""
    if target.emulated_on is None:
        return ""
    verb = "measured" if target.recorded is None else "recorded"
    return f"{verb} on {target.emulated_on}: {units.rate(measured.tokens_per_second)}"


def speed_on_target(snapshot: StudySnapshot, record: TrialRecord) -> str:
    """Return a trial's speed on the GPU that the study is for, how sure it is, and what another
    GPU reached that stood in."""
    measured, target = measured_of(record), snapshot.definition.target
    if target.emulated_on is None:
        ends = ", ".join(filter(None, (interval(measured), doubts(measured))))
        return f"{units.rate(measured.tokens_per_second)} tokens/s ({ends})"
    speed, beside = snapshot.target_speed(record), measured_beside(measured, target)
    if speed is None:
        return f"{beside}; not predicted on {target.gpu}"
    known = None if speed.low is None or speed.high is None else (speed.low, speed.high)
    ends = "" if known is None else f" {units.rate_interval(known)}"
    rate = units.rate(speed.tokens_per_second)
    return f"{rate} tokens/s on {target.gpu} (predicted{ends}; {beside})"


def short_speed_on_target(snapshot: StudySnapshot, record: TrialRecord) -> str:
    """Return the same without intervals, for a sentence that says more than this."""
    measured, target = measured_of(record), snapshot.definition.target
    own = units.rate(measured.tokens_per_second)
    if target.emulated_on is None:
        return f"{own} tokens/s"
    there, gpu = snapshot.target_speed(record), units.gpu_name(target.emulated_on)
    if there is None:
        return f"{own} tokens/s on {units.with_article(gpu)}"
    rate, name = units.rate(there.tokens_per_second), units.gpu_name(target.gpu)
    return f"{rate} tokens/s predicted on {units.with_article(name)} ({own} on the {gpu})"


def numerics_words(snapshot: StudySnapshot, ranking: Ranking) -> str:
    """Return how fast the fastest with 16-bit compute is where the winner computes in 8 bits, and
    that a run on the target has to decide between them where another GPU stood in; else nothing."""
    winner, other, words = ranking.winner, ranking.fastest_with_16_bits, []
    if other is not None:
        speed = short_speed_on_target(snapshot, other)
        words.append(f"Of 16-bit compute the fastest is trial {other.number}: {speed}.")
    if winner is not None and ranking.numerics_choice == "predicted":
        gpu = units.with_article(units.gpu_name(ranking.definition.target.gpu))
        chosen = f"That {units.phrase('compute_dtype', winner.config.compute_dtype)} is the faster"
        words.append(f"{chosen} is predicted, not measured: a run on {gpu} decides it.")
    return " ".join(words)


def flags_in_words(measured: Measurement) -> str:
    """Return what a measurement is marked with, in words, but for that another GPU stood in."""
    known = [_FLAGS.get(flag, flag.replace("_", " ")) for flag in measured.flags]
    return ", ".join(word for word in known if word)


def gain(ratio: Ratio, over: str = "") -> str:
    """Return a gain with its 95 % interval: ``2.1x the baseline (2.06–2.17x)``."""
    factor_over, ends = f"{factor(ratio)} {over}".rstrip(), factor_interval(ratio)
    single = "" if ratio.is_paired else ", by single runs"
    return f"{factor_over} ({ends}{single})" if ends else factor_over


def factor(ratio: Ratio) -> str:
    """Return a gain with no more digits than its interval supports, two decimals at the most.

    The last digit shown counts at least half the interval's width: 2.12 between 2.06 and 2.17 is
    ``2.1x``. Of a wide interval the lower end is what is sure: ``at least 4.1x``.
    """
    if ratio.low is None or not _is_wide(ratio):
        return f"{ratio.value:.{_decimals(ratio)}f}x"
    decimals = _decimals_of_ends(ratio)
    # Never more than what is sure.
    return f"at least {math.floor(ratio.low * 10**decimals) / 10**decimals:.{decimals}f}x"


def factor_interval(ratio: Ratio) -> str:
    """Return the interval of a gain, ``2.06–2.17x``; empty where there is none."""
    if ratio.low is None or ratio.high is None or ratio.low == ratio.high:
        return ""
    decimals, low = _decimals_of_ends(ratio), ratio.low
    if _is_wide(ratio):
        low = math.floor(low * 10**decimals) / 10**decimals
        return f"{ratio.value:.1f}x, {low:.{decimals}f}–{ratio.high:.{decimals}f}x"
    return f"{low:.{decimals}f}–{ratio.high:.{decimals}f}x"


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
    return "the baseline" if ranking.is_of_baselines_class(config) else at_capacity(config)


def faster_and_no_answer(ranking: Ranking, record: TrialRecord) -> str:
    """Return that what a trial's gain is over is the faster of both, and why it is no answer all
    the same: a clause, empty where that is not so."""
    own = ranking.reference_for(record.config)
    over = ranking.baseline if own is None else own
    if over is None or ranking.holds(over.config):
        return ""
    if measured_of(over).tokens_per_second <= measured_of(record).tokens_per_second:
        return ""
    why = "the space does not hold it"
    is_offered = over.config.seq_len in ranking.definition.space.values_of("seq_len")
    if over.epoch is not None and not over.epoch.is_whole and not is_offered:
        why = f"its {texts.cut_in_words(over.epoch, over.config.seq_len)}"
    named = "the baseline" if own is None else reference_of(ranking, record.config)
    return f"{named} was measured faster and is no answer: {why}"


def at_capacity(config: TrialConfig) -> str:
    """Return what the baseline is called in the class of ``config``, another than its own."""
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


def within_the_baselines_class(comparison: Comparison) -> str:
    """Return what the baseline's own class gained, where the winner is in another."""
    fastest, ratio = comparison.fastest_of_class, comparison.class_gain
    if fastest is None or fastest.measurement is None:
        return "nothing of the space was measured in the baseline's class"
    of_class = "the fastest of the baseline's class"
    if fastest.number == comparison.baseline.number:
        return f"{of_class} that was measured is the baseline itself"
    reached = f"{gain(ratio)} the baseline" if ratio else speed(fastest.measurement)
    return f"{of_class} is trial {fastest.number}, {reached}"


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
