"""Numbers, names and configurations in words; what is unknown or not finite reads as a dash."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec

from qlora_sweep.search_spaces.config import CAPACITY_KEYS, SETTINGS, SIZE_KEYS, TrialConfig
from qlora_sweep.search_spaces.errors import in_percent
from qlora_sweep.search_spaces.gpus import GIB, gpu_catalogue

DASH = "–"
MIB = 2**20

P = ParamSpec("P")


def _or_dash(
    write: Callable[Concatenate[float, P], str],
) -> Callable[Concatenate[float | None, P], str]:
    """Return how a number is written, as a dash where it is not there or not finite."""

    @wraps(write)
    def written(value: float | None, /, *args: P.args, **kwargs: P.kwargs) -> str:
        if value is None or not math.isfinite(value):
            return DASH
        return write(value, *args, **kwargs)

    return written


class MemoryUnit(NamedTuple):
    """What bytes are written in."""

    name: str
    bytes: int


def memory_unit(count: float) -> MemoryUnit:
    """Return GiB, and MiB below a tenth of one: the first digits would be zeros."""
    if 0 < abs(count) < GIB / 10:
        return MemoryUnit("MiB", MIB)
    return MemoryUnit("GiB", GIB)


@_or_dash
def gib(count: float, unit: MemoryUnit | None = None) -> str:
    """Return bytes with two decimals, in their own unit where none is given: ``20.10 GiB``."""
    unit = unit or memory_unit(count)
    return f"{count / unit.bytes:.2f} {unit.name}"


def gpu_name(gpu: str) -> str:
    """Return what people call a GPU of the catalogue, or a product: ``A10``, ``RTX 4090``."""
    if gpu == "cpu":
        return "CPU"
    spec = gpu_catalogue().get(gpu)
    product = gpu if spec is None else spec.product
    return re.sub(r"^(NVIDIA|Tesla) |\bGeForce ", "", product)


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
    if noun[:1].upper() in set("AEFHILMNORSX"):
        return f"an {noun}"
    return f"a {noun}"


@_or_dash
def rate(tokens_per_second: float) -> str:
    """Return tokens/s with thousands separators, and a decimal below one hundred: ``16,800``."""
    if abs(tokens_per_second) >= 100:
        return f"{tokens_per_second:,.0f}"
    return f"{tokens_per_second:,.1f}"


def short_rate(tokens_per_second: float) -> str:
    """Return tokens/s in few characters, for a cell of a figure: ``16.8k``."""
    if abs(tokens_per_second) < 1000:
        return rate(tokens_per_second)
    return f"{tokens_per_second / 1000:.1f}k"


def rate_interval(ends: tuple[float | None, float | None] | None) -> str:
    """Return the ends of an interval of tokens/s: ``16,700–16,900``."""
    if ends is None:
        return DASH
    return f"{rate(ends[0])}–{rate(ends[1])}"


@_or_dash
def count(value: float) -> str:
    """Return a count with thousands separators: ``13,631,488``."""
    return f"{value:,}"


@_or_dash
def usd(dollars: float) -> str:
    """Return dollars: ``$1.10``, and with three digits where they are few: ``$0.000114``."""
    if dollars >= 1 or dollars <= 0:
        return f"${dollars:,.2f}"
    return f"${dollars:.{2 - math.floor(math.log10(dollars))}f}"


def usd_interval(ends: tuple[float, float] | None) -> str:
    """Return the ends of an interval of dollars: ``$0.0953–0.286``."""
    if ends is None:
        return DASH
    return f"{usd(ends[0])}–{usd(ends[1]).removeprefix('$')}"


@_or_dash
def percent(share: float) -> str:
    """Return a share as whole percent: ``93 %``."""
    return f"{100 * share:.0f} %"


@_or_dash
def share(value: float) -> str:
    """Return a share of a dataset, say, with a decimal where it has one: ``3.8 %``."""
    return in_percent(value)


@_or_dash
def error(share: float) -> str:
    """Return a relative error with the digits that it has: ``1.5 %``, ``25 %``."""
    return f"{100 * share:.3g} %"


@_or_dash
def step_time(seconds: float) -> str:
    """Return the seconds of a step with three significant digits: ``0.305 s``, ``12.4 ms``."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 0.1:
        return f"{seconds:#.3g} s"
    return f"{1000 * seconds:#.3g} ms"


@_or_dash
def duration(seconds: float) -> str:
    """Return how long something took in its two largest units: ``4 min 12 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s"


def out_of(done: int, total: int) -> str:
    """Return how far something is: ``7 of 40``, and ``7 (2 asked for)`` beyond the end."""
    if done <= total:
        return f"{done:,} of {total:,}"
    return f"{done:,} ({total:,} asked for)"


def capitalized(text: str) -> str:
    """Return words with the first letter in upper case and all else as it is."""
    return text[:1].upper() + text[1:]


def plural(number: int, noun: str) -> str:
    """Return a count with its noun: ``1 trial``, ``1,000 trials``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


_SHAPE_KEYS = SIZE_KEYS + CAPACITY_KEYS


def phrase(key: str, value: Any) -> str:
    """Return one setting in words: ``checkpoint_fraction`` of 0 is ``no checkpointing``."""
    return SETTINGS[key].phrase(value)


def short(value: Any) -> str:
    """Return a setting's value in at most forty characters."""
    if isinstance(value, list | tuple):
        value = ",".join(value)
    text = str(value)
    if len(text) <= 40:
        return text
    return f"{text[:39]}…"


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
    differences = {}
    for key, value in config.changes_from(other).items():
        applies = SETTINGS[key].applies
        if applies is None or applies(config):
            differences[key] = value
    return differences


def changes(config: TrialConfig, *, baseline: TrialConfig) -> str:
    """Return in words where a configuration differs from the baseline, its shape first."""
    differences = differing(config, baseline)
    if not differences:
        return "as the baseline"
    # Sorting is stable: of the rest each stays where it is.
    places = {key: place for place, key in enumerate(_SHAPE_KEYS)}
    keys = sorted(differences, key=lambda key: places.get(key, len(places)))
    return ", ".join(phrase(key, differences[key]) for key in keys)


def lean_order(key: str, value: Any) -> tuple[float, str]:
    """Return what sorts values of a setting that are words: the lean first, then by spelling."""
    lean = SETTINGS[key].lean_first
    place = len(lean)
    if value in lean:
        place = lean.index(value)
    return float(place), str(value)
