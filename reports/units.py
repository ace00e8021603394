"""Numbers, names and configurations in words; what is unknown or not finite reads as a dash."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from qlora_sweep.search_spaces.config import CAPACITY_KEYS, KNOBS, SIZE_KEYS, TrialConfig
from qlora_sweep.search_spaces.errors import in_percent
from qlora_sweep.search_spaces.gpus import GIB, gpu_catalogue

DASH = "–"
MIB = 2**20


def is_known(value: float | None) -> bool:
    """Whether a number is there and finite."""
    return value is not None and math.isfinite(value)


class MemoryUnit(NamedTuple):
    """What bytes are written in."""

    name: str
    bytes: int


def memory_unit(count: float) -> MemoryUnit:
    """Return GiB, and MiB below a tenth of one: the first digits would be zeros."""
    return MemoryUnit("MiB", MIB) if 0 < abs(count) < GIB / 10 else MemoryUnit("GiB", GIB)


def gib(count: float | None, unit: MemoryUnit | None = None) -> str:
    """Return bytes with two decimals, in their own unit where none is given: ``20.10 GiB``."""
    if count is None or not is_known(count):
        return DASH
    unit = unit or memory_unit(count)
    return f"{count / unit.bytes:.2f} {unit.name}"


def gpu_name(gpu: str) -> str:
    """Return what people call a GPU of the catalogue, or a product: ``A10``, ``RTX 4090``."""
    known = gpu_catalogue().get(gpu)
    product = gpu if known is None else known.product
    return "CPU" if gpu == "cpu" else re.sub(r"^(NVIDIA|Tesla) |\bGeForce ", "", product)


def model_name(model: str) -> str:
    """Return what people call a shipped model, a hub id or a directory: ``Mistral-7B-v0.3``."""
    if model == "demo":
        return "The demo model"
    if "/" in model:
        return model.rstrip("/").rpartition("/")[2]
    sized = re.sub(r"(?<![a-z])[\d.a]+[bm]\b", lambda size: size[0].upper(), model)
    return sized[:1].upper() + sized[1:]


def with_article(noun: str) -> str:
    """Return a GPU's name with its article, by the sound of its first letter: ``an H200``."""
    return f"{'an' if noun[:1].upper() in set('AEFHILMNORSX') else 'a'} {noun}"


def rate(tokens_per_second: float | None) -> str:
    """Return tokens/s with thousands separators, and a decimal below one hundred: ``16,800``."""
    if tokens_per_second is None or not is_known(tokens_per_second):
        return DASH
    return f"{tokens_per_second:,.{0 if abs(tokens_per_second) >= 100 else 1}f}"


def short_rate(tokens_per_second: float) -> str:
    """Return tokens/s in few characters, for a cell of a figure: ``16.8k``."""
    if abs(tokens_per_second) < 1000:
        return rate(tokens_per_second)
    return f"{tokens_per_second / 1000:.1f}k"


def rate_interval(ends: tuple[float | None, float | None] | None) -> str:
    """Return the ends of an interval of tokens/s: ``16,700–16,900``."""
    return DASH if ends is None else f"{rate(ends[0])}–{rate(ends[1])}"


def count(value: int | None) -> str:
    """Return a count with thousands separators: ``13,631,488``."""
    return DASH if value is None else f"{value:,}"


def usd(dollars: float | None) -> str:
    """Return dollars: ``$1.10``, and with three digits where they are few: ``$0.000114``."""
    if dollars is None or not is_known(dollars):
        return DASH
    if dollars >= 1 or dollars <= 0:
        return f"${dollars:,.2f}"
    return f"${dollars:.{2 - math.floor(math.log10(dollars))}f}"


def usd_interval(ends: tuple[float, float] | None) -> str:
    """Return the ends of an interval of dollars: ``$0.0953–0.286``."""
    return DASH if ends is None else f"{usd(ends[0])}–{usd(ends[1]).removeprefix('$')}"


def percent(share: float | None) -> str:
    """Return a share as whole percent: ``93 %``."""
    return DASH if share is None or not is_known(share) else f"{100 * share:.0f} %"


def share(value: float | None) -> str:
    """Return a share of texts, say, with a decimal where it has one: ``3.8 %``."""
    return DASH if value is None or not is_known(value) else in_percent(value)


def error(share: float | None) -> str:
    """Return a relative error with the digits that it has: ``1.5 %``, ``25 %``."""
    return DASH if share is None or not is_known(share) else f"{100 * share:.3g} %"


def step_time(seconds: float | None) -> str:
    """Return the seconds of a step with three significant digits: ``0.305 s``, ``12.4 ms``."""
    if seconds is None or not is_known(seconds):
        return DASH
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:#.3g} s" if seconds >= 0.1 else f"{1000 * seconds:#.3g} ms"


def duration(seconds: float | None) -> str:
    """Return how long something took in its two largest units: ``4 min 12 s``."""
    if seconds is None or not is_known(seconds):
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def out_of(done: int, total: int) -> str:
    """Return how far something is: ``7 of 40``, and ``7 (2 asked for)`` beyond the end."""
    return f"{done:,} of {total:,}" if done <= total else f"{done:,} ({total:,} asked for)"


def plural(number: int, noun: str) -> str:
    """Return a count with its noun: ``1 trial``, ``1,000 trials``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


_SHAPE_FIRST = (*SIZE_KEYS, *CAPACITY_KEYS)


def phrase(key: str, value: Any) -> str:
    """Return one setting in words: ``checkpoint_fraction`` of 0 is ``no checkpointing``."""
    return KNOBS[key].phrase(value)


def short(value: Any) -> str:
    """Return a setting's value in at most forty characters."""
    text = ",".join(value) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def size(config: TrialConfig) -> str:
    """Return the micro-batch and length of a configuration: ``10 x 512``."""
    return f"{config.micro_batch_size} x {config.seq_len}"


def shape(config: TrialConfig) -> str:
    """Return the size of a configuration with its rank: ``10 x 512, rank 16``."""
    return f"{size(config)}, {phrase('lora_rank', config.lora_rank)}"


def differing(config: TrialConfig, other: TrialConfig) -> dict[str, Any]:
    """Return the settings of ``config`` that differ from the other's and mean something in it.

    A 16-bit base has no double quantization to speak of.
    """
    changed, applies = config.changes_from(other), {key: KNOBS[key].applies for key in KNOBS}
    return {key: changed[key] for key in changed if (of := applies[key]) is None or of(config)}


def changes(config: TrialConfig, *, baseline: TrialConfig) -> str:
    """Return in words where a configuration differs from the baseline, its shape first."""
    changed = differing(config, baseline)
    order = [*_SHAPE_FIRST, *(key for key in changed if key not in _SHAPE_FIRST)]
    words = [phrase(key, changed[key]) for key in order if key in changed]
    return ", ".join(words) if words else "as the baseline"
