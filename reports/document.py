"""The trials of a page: columns of words and numbers, for its table, its panel and the front.

A column has each pair of a number and its words once, and for each trial the place of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qlora_sweep.reports import format as units
from qlora_sweep.reports import words
from qlora_sweep.reports.view import StudyView
from qlora_sweep.search_spaces.config import SETTINGS, TrialConfig
from qlora_sweep.search_spaces.gpus import gpu_catalogue
from qlora_sweep.search_spaces.linears import CapacityClass
from qlora_sweep.search_spaces.redaction import shown
from qlora_sweep.storage.ranking import RankedTrial
from qlora_sweep.storage.records import TrialRecord

Pair = tuple[Any, str]
"""A value to sort by and its words."""
UNKNOWN: Pair = (None, "")
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
class TrialColumn:
    """One thing that is known of trials."""

    label: str
    pairs: tuple[Pair, ...]
    """One a trial; an unknown one is None without words."""
    is_shown: bool = True
    """In the table at first."""

    @cached_property
    def values(self) -> list[Any]:
        """The values alone."""
        return [value for value, _ in self.pairs]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        pairs: list[Pair] = []
        places: dict[tuple[str, str], int] = {}
        at = []
        for value, text in self.pairs:
            # True and 1 are one key and two values.
            key = (repr(value), text)
            if key not in places:
                places[key] = len(pairs)
                pairs.append((value, text))
            at.append(places[key])
        return {"label": self.label, "shown": self.is_shown, "at": at, "pairs": pairs}


@dataclass(frozen=True)
class TrialTable:
    """The trials of a study, as a page has them."""

    view: StudyView
    records: tuple[TrialRecord, ...]
    """The trials, with the baseline where the confirmation alone measured it."""
    unit: units.MemoryUnit
    """Of all sizes: its largest peak's, before any its budget's."""
    columns: Mapping[str, TrialColumn]
    """Of what is known of any trial, by key, in the order of the table; settings come last."""

    @cached_property
    def rows(self) -> Mapping[int, int]:
        """Which row a trial's number has."""
        return {record.number: row for row, record in enumerate(self.records)}

    @property
    def speed_key(self) -> str:
        """The column of the speed that decides."""
        if self.view.is_predicted:
            return "target_tokens_per_second"
        return "tokens_per_second"

    @property
    def axes(self) -> dict[str, str]:
        """What the front may be drawn by, with its words."""
        return {key: self.columns[key].label for key in AXES if key in self.columns}

    def in_unit(self, count: float) -> float:
        """Return bytes in the unit of all sizes."""
        return count / self.unit.bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        space = self.view.space
        gpu: str | None = self.view.gpu.name
        if gpu != "cpu" and gpu not in gpu_catalogue():
            gpu = space.gpu
        of_space: dict[str, Any] = {
            "gpu": gpu,
            "model": space.model,
            "weights": space.weights,
            "objectives": space.objectives,
        }
        if space.budget_gib is not None:
            of_space["budget_gib"] = space.budget_gib
        return {
            "columns": {key: column.to_json() for key, column in self.columns.items()},
            "settings": list(TrialConfig.model_fields),
            "space": of_space,
            "baseline": self.view.baseline_config.model_dump(mode="json"),
        }


def document_of(view: StudyView) -> TrialTable:
    """Return what a page knows of a study's trials."""
    records = view.records
    ended = {record.number: record for record in view.ranking.records}
    trials = dict(view.measured_trials)
    baseline = view.measured_baseline
    if baseline is not None and baseline.number not in ended:
        records += (baseline.record,)
        trials[baseline.number] = baseline
    peaks = [r.measurement.peak_allocated_bytes for r in records if r.measurement]
    unit = units.memory_unit(max(peaks, default=view.gpu.budget_bytes))
    roles = _roles(view)
    classes = _class_names(view, records)
    places = {trial.number: place for place, trial in enumerate(view.ranked, start=1)}
    rows = []
    for record in records:
        number = record.number
        row = _row(ended.get(number, record), view, unit)
        if number in trials:
            row |= _measured(trials[number], view, unit)
        row["role"] = _text(", ".join(roles[number]))
        row["class"] = _text(classes[number])
        if number in places:
            row["order"] = (places[number], str(places[number]))
        rows.append(row)
    target = units.gpu_name(view.gpu.name)
    host = units.gpu_name(view.gpu.emulated_on or view.gpu.name)
    labels = _SHOWN | _HIDDEN
    labels["target_tokens_per_second"] = f"tokens/s on {target}, predicted"
    labels["tokens_per_second"] = f"tokens/s measured on {host}"
    labels["peak_allocated"] = f"peak allocated memory ({unit.name})"
    columns = {}
    for key, label in labels.items():
        pairs = tuple(row.get(key, UNKNOWN) for row in rows)
        if set(pairs) - {UNKNOWN}:
            columns[key] = TrialColumn(label, pairs, key not in _HIDDEN)
    for key in TrialConfig.model_fields:
        settings = []
        for record in records:
            value = getattr(record.config, key)
            settings.append((value, setting_words(value)))
        columns[key] = TrialColumn(SETTINGS[key].label, tuple(settings), len(set(settings)) > 1)
    return TrialTable(view, records, unit, columns)


_SHOWN = {
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
}
"""What is known of a trial beside its settings, in the order of the table."""
_HIDDEN = {
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
"""What the table has only where a reader asks for it."""


def _row(record: TrialRecord, view: StudyView, unit: units.MemoryUnit) -> dict[str, Pair]:
    """Return what is known of a trial."""
    row = {
        "number": (record.number, str(record.number)),
        "verdict": (str(record.verdict), words.VERDICT_LABELS[record.verdict]),
        "why": _text(words.reason(record, budget_bytes=view.gpu.budget_bytes)),
        "changes": _text(view.changes(record.config)),
        "error": _text(getattr(record.outcome, "detail", "")),
        "started_at": _text(record.started_at),
        "device_seconds": _number(record.device_seconds, units.duration(record.device_seconds)),
    }
    need = view.need_of(record)
    if need is not None:
        row["need"] = _number(need.allocated_bytes / unit.bytes, words.need(need, unit))
    if record.prediction is not None:
        row["predicted_peak"] = _memory(record.prediction.peak_allocated_bytes, unit)
    return row


def _measured(trial: RankedTrial, view: StudyView, unit: units.MemoryUnit) -> dict[str, Pair]:
    """Return what was measured of a trial, and what follows from it."""
    measured = trial.measurement
    remarks = []
    if measured.speed_interval:
        remarks.append(units.rate_interval(measured.speed_interval))
    if view.is_measured_again(trial):
        remarks.append("measured again")
    remarks.append(words.doubts(measured))
    row = {
        "tokens_per_second": _speed(measured.tokens_per_second, remarks),
        "peak_allocated": _memory(measured.peak_allocated_bytes, unit),
        "peak_reserved": _memory(measured.peak_reserved_bytes, unit),
        "trainable_parameters": (
            measured.trainable_parameters,
            units.count(measured.trainable_parameters),
        ),
        "step_seconds": _number(measured.step_seconds, units.step_time(measured.step_seconds)),
        "flags": _text(", ".join(measured.flags)),
    }
    usd = view.usd_per_million_tokens(trial)
    row["usd_per_million_tokens"] = _number(usd, units.usd(usd))
    speed = view.target_speed(trial)
    if speed is not None and view.gpu.emulated_on is not None:
        remarks = []
        if speed.low is not None and speed.high is not None:
            remarks.append(units.rate_interval((speed.low, speed.high)))
        row["target_tokens_per_second"] = _speed(speed.tokens_per_second, remarks)
    # Of random weights a loss says nothing about quality.
    if view.space.weights == "pretrained" and measured.final_loss is not None:
        row["final_loss"] = _number(measured.final_loss, f"{measured.final_loss:.4g}")
    if measured.quality is not None:
        row["eval_loss"] = _number(measured.quality.eval_loss, words.loss(measured))
    if measured.joules_per_token is not None:
        joules = measured.joules_per_token
        row["joules_per_token"] = _number(joules, f"{1000 * joules:.3g} mJ")
    if measured.faithfulness is not None and measured.faithfulness.gradient_error is not None:
        error = units.share(measured.faithfulness.gradient_error)
        row["faithful"] = _text(f"gradients within {error} of 16-bit compute")
    return row


def setting_words(value: Any) -> str:
    """Return a setting's value as people write it: ``true``, ``0.5``, ``q_proj,v_proj``."""
    if value is None:
        return units.DASH
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return units.short(value)


def _text(text: str | None) -> Pair:
    if not text:
        return UNKNOWN
    return text, text


def _number(value: float | None, text: str) -> Pair:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return float(f"{value:.6g}"), text


def _memory(count: float | None, unit: units.MemoryUnit) -> Pair:
    if count is None:
        return UNKNOWN
    return _number(count / unit.bytes, units.gib(count, unit))


def _speed(tokens_per_second: float, remarks: Iterable[str]) -> Pair:
    text = units.rate(tokens_per_second)
    remark = ", ".join(filter(None, remarks))
    if remark:
        text += f" ({remark})"
    return _number(tokens_per_second, text)


def _roles(view: StudyView) -> Mapping[int, list[str]]:
    """Return what a page calls trials by, for those that it speaks of."""
    roles: dict[int, list[str]] = defaultdict(list)
    for role, trial in (("winner", view.winner), ("baseline", view.measured_baseline)):
        if trial is not None:
            roles[trial.number].append(role)
    for number in view.tied:
        roles[number].append("tied with the winner")
    for on_front in view.front:
        roles[on_front.number].append("on the front")
    for record in view.records:
        if record.carried is not None:
            roles[record.number].append(f"carried over from {record.carried.study}")
    return roles


def _class_names(view: StudyView, records: Sequence[TrialRecord]) -> dict[int, str]:
    """Return each trial's class in words: ``rank 16 on q,k,v,o``, and ``, int8 compute`` where
    trials are of several classes of numerics.

    Trials of one class have the name of the first, however their configurations spell the layers.
    """
    has_several = len({record.config.numerics for record in records}) > 1
    name_of: dict[CapacityClass, str] = {}
    names = {}
    for record in records:
        capacity = view.capacity_class(record.config)
        if capacity not in name_of:
            name_of[capacity] = shown(words.capacity(record.config))
        names[record.number] = name_of[capacity]
        if has_several:
            names[record.number] += f", {record.config.numerics} compute"
    return names
