"""The trials of a page: columns of words and numbers, for its table, its panel and the front.

A column has each pair of a number and its words once, and for each trial the place of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from qlora_sweep.reports import units, words
from qlora_sweep.search_spaces.config import KNOBS, TrialConfig
from qlora_sweep.search_spaces.gpus import gpu_catalogue
from qlora_sweep.search_spaces.redaction import shown
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.ranking import Ranking, rank_study
from qlora_sweep.storage.records import TrialRecord, need_of

UNKNOWN: tuple[None, str] = (None, "")
AXES = {
    "target_tokens_per_second": True,
    "tokens_per_second": True,
    "peak_allocated": False,
    "usd_per_million_tokens": False,
    "trainable_parameters": True,
    "final_loss": False,
    "eval_loss": False,
}
"""What the front may be drawn by, and whether more of it is better."""


@dataclass(frozen=True)
class Column:
    """One thing that is known of trials."""

    label: str
    pairs: tuple[tuple[Any, str], ...]
    """A value to sort by and its words, one pair a trial; an unknown one is None without words."""
    is_shown: bool = True
    """In the table at first."""

    @cached_property
    def values(self) -> list[Any]:
        """The values alone."""
        return [value for value, _ in self.pairs]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        places: dict[tuple[str, str], int] = {}
        # True and 1 are one key and two values.
        at = [places.setdefault((repr(value), of), len(places)) for value, of in self.pairs]
        unique = dict(zip(at, self.pairs, strict=True))
        packed = {"pairs": [unique[place] for place in range(len(places))]}
        return {"label": self.label, "shown": self.is_shown, "at": at, **packed}


@dataclass(frozen=True)
class Document:
    """The trials of a study, as a page has them."""

    snapshot: StudySnapshot
    ranking: Ranking
    unit: units.MemoryUnit
    """Of all sizes: its largest peak's, before any its budget's."""
    columns: Mapping[str, Column]
    """Of what is known of any trial, by key, in the order of the table; settings come last."""

    @cached_property
    def rows(self) -> Mapping[int, int]:
        """Which row a trial's number has."""
        return {record.number: row for row, record in enumerate(self.snapshot.records)}

    @property
    def speed_key(self) -> str:
        """The column of the speed that decides."""
        return "target_tokens_per_second" if self.ranking.is_predicted else "tokens_per_second"

    @property
    def axes(self) -> dict[str, str]:
        """What the front may be drawn by, with its words."""
        return {key: self.columns[key].label for key in AXES if key in self.columns}

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        space, gpu = self.snapshot.definition.space, self.snapshot.definition.target.gpu
        kept = {"model": space.model, "weights": space.weights, "objectives": space.objectives}
        budget = {} if space.budget_gib is None else {"budget_gib": space.budget_gib}
        known = gpu if gpu in {"cpu", *gpu_catalogue()} else space.gpu
        return {
            "columns": {key: column.to_json() for key, column in self.columns.items()},
            "settings": list(TrialConfig.model_fields),
            "space": {"gpu": known, **kept, **budget},
            "baseline": space.baseline_config().model_dump(mode="json"),
        }


def document_of(snapshot: StudySnapshot) -> Document:
    """Return what a page knows of a study's trials."""
    ranking, target = rank_study(snapshot), snapshot.definition.target
    base = ranking.baseline
    if base is not None and base.number not in {record.number for record in snapshot.records}:
        # The confirmation alone measured it; a page has it beside the trials.
        snapshot = replace(snapshot, records=(*snapshot.records, base))
    peaks = [r.measurement.peak_allocated_bytes for r in snapshot.records if r.measurement]
    unit = units.memory_unit(max(peaks, default=target.budget_bytes))
    # What was measured again has the speed of those runs, the rest is scaled to them.
    effective = {record.number: record for record in ranking.records}
    records = [effective.get(record.number, record) for record in snapshot.records]
    roles, classes = _roles(ranking), class_names(snapshot, ranking)
    places = {record.number: place for place, record in enumerate(ranking.ranked, start=1)}
    known = []
    for record in records:
        number = record.number
        place = places.get(number)
        named = {
            "order": UNKNOWN if place is None else (place, str(place)),
            "role": _text(roles.get(number)),
            "class": _text(classes[number]),
        }
        known.append(_known(record, snapshot, ranking, unit) | named)
    labels = _LABELS | {
        "target_tokens_per_second": f"tokens/s on {units.gpu_name(target.gpu)}, predicted",
        "tokens_per_second": "tokens/s measured on "
        f"{units.gpu_name(target.emulated_on or target.gpu)}",
        "peak_allocated": f"peak allocated memory ({unit.name})",
    }
    columns = {
        key: Column(label, tuple(one.get(key, UNKNOWN) for one in known), key not in _HIDDEN)
        for key, label in labels.items()
        if any(one.get(key, UNKNOWN)[1] for one in known)
    }
    for key in TrialConfig.model_fields:
        values = [getattr(record.config, key) for record in records]
        pairs = tuple((value, setting_words(value)) for value in values)
        columns[key] = Column(KNOBS[key].label, pairs, len(set(pairs)) > 1)
    return Document(snapshot, ranking, unit, columns)


_LABELS = {
    "order": "order",
    "number": "trial",
    "verdict": "ended",
    "role": "is",
    "target_tokens_per_second": "",
    "tokens_per_second": "",
    "peak_allocated": "",
    "need": "needs",
    "usd_per_million_tokens": "dollars per million tokens",
    "trainable_parameters": "trainable parameters",
    "final_loss": "final loss",
    "eval_loss": "held-out loss",
    "why": "why",
    "changes": "against the baseline",
    "class": "class",
    "error": "error",
    "step_seconds": "a step",
    "peak_reserved": "reserved",
    "predicted_peak": "predicted peak",
    "joules_per_token": "energy of a token",
    "faithful": "8-bit compute",
    "flags": "flags",
    "started_at": "started",
    "device_seconds": "device time",
}
"""What is known of a trial beside its settings, in the order of the table."""
_HIDDEN = frozenset(list(_LABELS)[list(_LABELS).index("why") :])
"""What the table has only where a reader asks for it."""

Pair = tuple[Any, str]


def _known(
    record: TrialRecord, snapshot: StudySnapshot, ranking: Ranking, unit: units.MemoryUnit
) -> dict[str, Pair]:
    """Return what is known of a trial."""
    budget, space = snapshot.definition.target.budget_bytes, snapshot.definition.space
    need, prediction = need_of(record, budget_bytes=budget), record.prediction
    changes = units.changes(record.config, baseline=space.baseline_config())
    known = {
        "number": (record.number, str(record.number)),
        "verdict": (str(record.verdict), words.VERDICT_LABELS[record.verdict]),
        "why": _text(words.reason(record, budget_bytes=budget)),
        "changes": _text(changes),
        "error": _text(getattr(record.outcome, "detail", "")),
        "started_at": _text(record.started_at),
        "device_seconds": _number(record.device_seconds, units.duration(record.device_seconds)),
    }
    if need is not None:
        size = need.allocated_bytes / unit.bytes
        known["need"] = _number(size, words.need(need, unit))
    if prediction is not None:
        known["predicted_peak"] = _memory(prediction.peak_allocated_bytes, unit)
    measured, speed = record.measurement, snapshot.target_speed(record)
    if measured is None:
        return known
    if speed is not None and snapshot.definition.target.emulated_on is not None:
        ends = (speed.low, speed.high)
        ends_words = "" if None in ends else f" ({units.rate_interval(ends)})"
        told = f"{units.rate(speed.tokens_per_second)}{ends_words}"
        known["target_tokens_per_second"] = _number(speed.tokens_per_second, told)
    again = "measured again" if ranking.is_measured_again(record) else ""
    within = units.rate_interval(measured.speed_interval) if measured.speed_interval else ""
    remarks = ", ".join(filter(None, (within, again, words.doubts(measured))))
    rate, joules = measured.tokens_per_second, measured.joules_per_token
    usd, quality = snapshot.usd_per_million_tokens(record), measured.quality
    off = None if measured.faithfulness is None else measured.faithfulness.gradient_error
    close = "" if off is None else f"gradients within {units.share(off)} of 16-bit compute"
    # Of random weights a loss says nothing about quality.
    loss = measured.final_loss if space.weights == "pretrained" else None
    return known | {
        "tokens_per_second": _number(rate, units.rate(rate) + (f" ({remarks})" if remarks else "")),
        "peak_allocated": _memory(measured.peak_allocated_bytes, unit),
        "peak_reserved": _memory(measured.peak_reserved_bytes, unit),
        "usd_per_million_tokens": _number(usd, units.usd(usd)),
        "trainable_parameters": (
            measured.trainable_parameters,
            units.count(measured.trainable_parameters),
        ),
        "final_loss": _number(loss, f"{loss:.4g}" if loss is not None else ""),
        "eval_loss": _number(quality.eval_loss if quality else None, words.loss(measured)),
        "step_seconds": _number(measured.step_seconds, units.step_time(measured.step_seconds)),
        "joules_per_token": _number(joules, f"{1000 * (joules or 0):.3g} mJ"),
        "faithful": _text(close),
        "flags": _text(", ".join(measured.flags)),
    }


def setting_words(value: Any) -> str:
    """Return a setting's value as people write it: ``true``, ``0.5``, ``q_proj,v_proj``."""
    if value is None:
        return units.DASH
    if isinstance(value, bool):
        return str(value).lower()
    return units.short(f"{value:g}" if isinstance(value, float) else value)


def _text(known: str | None) -> Pair:
    return (known, known) if known else UNKNOWN


def _number(value: float | None, known: str) -> Pair:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return float(f"{value:.6g}"), known


def _memory(count: float | None, unit: units.MemoryUnit) -> Pair:
    return _number(None if count is None else count / unit.bytes, units.gib(count, unit))


def _roles(ranking: Ranking) -> dict[int, str]:
    """Return what a page calls trials by, for those that it speaks of."""
    named = (
        ("winner", [ranking.winner]),
        ("baseline", [ranking.baseline]),
        ("tied with the winner", [r for r in ranking.records if r.number in ranking.tied]),
        ("on the front", ranking.front),
    )
    roles: dict[int, list[str]] = {}
    for role, records in named:
        for record in records:
            if record is not None:
                roles.setdefault(record.number, []).append(role)
    for record in ranking.records:
        if record.carried is not None:
            roles.setdefault(record.number, []).append(f"carried over from {record.carried.study}")
    return {number: ", ".join(names) for number, names in roles.items()}


def class_names(snapshot: StudySnapshot, ranking: Ranking) -> dict[int, str]:
    """Return each trial's class in words: ``rank 16 on q,k,v,o``, and ``, int8 compute`` where
    trials are of several classes of numerics.

    Trials of one class have one name, however their configurations spell the layers.
    """
    classes = {r.number: ranking.capacity_class(r.config) for r in snapshot.records}
    # The first trial of a class names it.
    first = {classes[r.number]: r.config for r in reversed(snapshot.records)}
    names = {known: shown(words.capacity(config)) for known, config in first.items()}
    has_several = len({record.config.numerics for record in snapshot.records}) > 1
    found = {}
    for record in snapshot.records:
        numerics = f", {record.config.numerics} compute" if has_several else ""
        found[record.number] = f"{names[classes[record.number]]}{numerics}"
    return found
