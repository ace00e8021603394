"""The page's data: every trial of a study once, as JSON that figures and tables refer to.

A trial's keys are the columns that a figure may name (``"@peak_allocated"``); what is not known of
it is left out. Numbers have six digits, and memory is in the study's own unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from reports import units, words
from reports.words import VERDICT_LABELS, reason
from search_spaces.config import KNOBS, TrialConfig
from search_spaces.gpus import gpu_catalogue
from search_spaces.redaction import shown
from storage.definition import StudySnapshot
from storage.ranking import Ranking, rank_study
from storage.records import Measurement, TrialRecord, need_of


@dataclass(frozen=True)
class Column:
    """One number of a trial that trials may be compared by."""

    label: str
    more_is_better: bool
    unit: Literal["rate", "memory", "usd", "count", "number"]
    """How the page writes it."""


def columns_of(snapshot: StudySnapshot) -> dict[str, Column]:
    """Return the columns that trials are compared by, whether anything is known of them or not.

    A speed that was measured on the target itself is there once.
    """
    target = snapshot.definition.target
    other = target.emulated_on
    on_target = Column(f"tokens/s on {units.gpu_name(target.gpu)}, predicted", True, "rate")
    ran_on = units.gpu_name(other or target.gpu)
    measured = Column(f"tokens/s measured on {ran_on}", True, "rate")
    speeds = {"target_tokens_per_second": on_target} if other is not None else {}
    unit = memory_unit(snapshot).name
    return {
        **speeds,
        "tokens_per_second": measured,
        "peak_allocated": Column(f"peak allocated memory ({unit})", False, "memory"),
        "usd_per_million_tokens": Column("dollars per million tokens", False, "usd"),
        "trainable_parameters": Column("trainable parameters", True, "count"),
        "final_loss": Column("final loss", False, "number"),
        "eval_loss": Column("held-out loss", False, "number"),
    }


def memory_unit(snapshot: StudySnapshot) -> units.MemoryUnit:
    """Return the unit that a study's sizes are in: its largest peak's, before any its budget's."""
    measured = (record.measurement for record in snapshot.records)
    peaks = (one.peak_allocated_bytes for one in measured if one is not None)
    return units.memory_unit(max(peaks, default=snapshot.definition.target.budget_bytes))


def title_of(snapshot: StudySnapshot) -> str:
    """Return what a study is about: ``Mistral-7B-v0.3 on an A10: 23 trials``."""
    model = units.model_name(str(snapshot.definition.model["name"]))
    gpu = units.with_article(units.gpu_name(snapshot.definition.target.gpu))
    return f"{model} on {gpu}: {units.plural(len(snapshot.trials), 'trial')}"


_DOCUMENTS: WeakKeyDictionary[StudySnapshot, dict[str, Any]] = WeakKeyDictionary()
"""Of each snapshot for as long as that is in use: the page and its figures ask for the same."""


def document_of(snapshot: StudySnapshot) -> dict[str, Any]:
    """Return what the page knows of a study: its trials by number, and what their columns mean.

    It is the same value each time, and nobody's to change.
    """
    if snapshot not in _DOCUMENTS:
        _DOCUMENTS[snapshot] = _document(snapshot)
    return _DOCUMENTS[snapshot]


def _document(snapshot: StudySnapshot) -> dict[str, Any]:
    ranking = rank_study(snapshot)
    names = class_names(snapshot, ranking)
    space, target = snapshot.definition.space, snapshot.definition.target
    baseline, axes, unit = space.baseline_config(), _axes(snapshot.records), memory_unit(snapshot)
    # What was measured again has the speed of those runs, the rest is scaled to them.
    effective = {record.number: record for record in ranking.records}
    trials = [
        _trial(record, snapshot, ranking, names, baseline, unit)
        | {"at": [axis["values"].index(getattr(record.config, axis["key"])) for axis in axes]}
        for record in (effective.get(r.number, r) for r in snapshot.records)
    ]
    columns = {
        key: asdict(column)
        for key, column in columns_of(snapshot).items()
        if any(key in trial for trial in trials)
    }
    return {
        "study": snapshot.name,
        "gpu": target.gpu,
        "memory_unit": unit.name,
        "budget": _rounded(target.budget_bytes / unit.bytes),
        "recipe": baseline.model_dump(mode="json"),
        "space": {
            "gpu": target.gpu if target.gpu in {"cpu", *gpu_catalogue()} else space.gpu,
            "model": space.model,
            "weights": space.weights,
            "objectives": list(space.objectives),
            **({} if space.budget_gib is None else {"budget_gib": space.budget_gib}),
        },
        "columns": columns,
        "settings": {key: KNOBS[key].label for key in TrialConfig.model_fields},
        "axes": axes,
        "classes": sorted(set(names.values())),
        "verdicts": {str(verdict): label for verdict, label in VERDICT_LABELS.items()},
        "named": named_trials(ranking),
        "trials": trials,
    }


def _axes(records: Sequence[TrialRecord]) -> list[dict[str, Any]]:
    """Return the settings that vary, each with its values in order; ``at`` has a trial's places."""
    axes = []
    for key in TrialConfig.model_fields:
        values = {getattr(record.config, key) for record in records}
        if len(values) > 1:
            ordered = sorted(values, key=lambda value, key=key: sort_place(key, value))  # type: ignore[misc]
            axes.append({"key": key, "label": KNOBS[key].label, "values": ordered})
    return axes


def sort_place(key: str, value: Any) -> tuple[float, str]:
    """Return where a setting's value stands among others: numbers rising, words the lean first."""
    lean = KNOBS[key].lean_first
    if isinstance(value, bool | int | float):
        return float(value), ""
    return float(lean.index(value) if value in lean else len(lean)), str(value)


def no_document() -> dict[str, Any]:
    """Return the data of a page that is about no single study: it has no trials."""
    nothing: dict[str, Any] = {
        "recipe": {},
        "space": {},
        "columns": {},
        "settings": {},
        "axes": [],
        "memory_unit": "GiB",
        "named": {},
        "verdicts": {},
    }
    return {"study": "", "gpu": "", "budget": 0.0, "classes": [], "trials": [], **nothing}


def named_trials(ranking: Ranking) -> dict[str, list[int]]:
    """Return the numbers of the trials that the page speaks of by name."""
    winner, baseline = ranking.winner, ranking.baseline
    return {
        "winner": [] if winner is None else [winner.number],
        "baseline": [] if baseline is None else [baseline.number],
        "tied with the winner": list(ranking.tied),
        "on the front": [record.number for record in ranking.front],
        "fastest of its class": [best.number for best in ranking.fastest_by_class],
    }


def class_names(snapshot: StudySnapshot, ranking: Ranking) -> dict[int, str]:
    """Return each trial's capacity class in words: ``rank 16 on q,k,v,o``.

    Trials of one class have one name, however their configurations spell the layers.
    """
    classes = {r.number: ranking.capacity_class(r.config) for r in snapshot.records}
    # The first trial of a class names it.
    first = {classes[r.number]: r.config for r in reversed(snapshot.records)}
    names = {known: shown(words.capacity(config)) for known, config in first.items()}
    return {number: names[known] for number, known in classes.items()}


def _trial(
    record: TrialRecord,
    snapshot: StudySnapshot,
    ranking: Ranking,
    names: Mapping[int, str],
    baseline: TrialConfig,
    unit: units.MemoryUnit,
) -> dict[str, Any]:
    budget_bytes = snapshot.definition.target.budget_bytes
    why = reason(record, budget_bytes=budget_bytes)
    error = getattr(record.outcome, "detail", "")
    known = {
        "number": record.number,
        "verdict": str(record.verdict),
        "class": names[record.number],
        "config": record.config.changes_from(baseline),
        "changes": units.changes(record.config, baseline=baseline),
        "reason": why or None,
        "error": error if error and error != why else None,
        "is_measured_again": ranking.is_measured_again(record) or None,
        "carried_from": None if record.carried is None else record.carried.study,
        "started_at": record.started_at,
        "wall_seconds": record.wall_seconds,
        "device_seconds": record.device_seconds,
        **_need(record, budget_bytes, unit),
        **_prediction(record, unit),
    }
    measured = record.measurement
    if measured is not None and measured.is_sound:
        known |= _measured(measured, snapshot, unit) | _target(record, snapshot)
    return _plain(known)


def _measured(
    measured: Measurement, snapshot: StudySnapshot, unit: units.MemoryUnit
) -> dict[str, Any]:
    low, high = measured.speed_interval or (None, None)
    reserved, close = measured.peak_reserved_bytes, measured.faithfulness
    is_real = snapshot.definition.space.weights == "pretrained"
    return {
        "tokens_per_second": measured.tokens_per_second,
        "tokens_per_second_low": low,
        "tokens_per_second_high": high,
        "step_seconds": measured.step_seconds,
        "peak_allocated": measured.peak_allocated_bytes / unit.bytes,
        "peak_reserved": None if reserved is None else reserved / unit.bytes,
        "trainable_parameters": measured.trainable_parameters,
        # Of random weights a loss says nothing about quality.
        "final_loss": measured.final_loss if is_real else None,
        **_quality(measured),
        "joules_per_token": measured.joules_per_token,
        "doubts": words.doubts(measured) or None,
        "faithful": close
        and f"gradients within {units.share(close.gradient_error)} of 16-bit compute "
        f"(cosine {close.gradient_cosine:.4f})",
        "flags": list(measured.flags) or None,
    }


def _quality(measured: Measurement) -> dict[str, Any]:
    quality = measured.quality
    if quality is None:
        return {}
    low, high = quality.eval_loss_ci95 or (None, None)
    return {"eval_loss": quality.eval_loss, "eval_loss_low": low, "eval_loss_high": high}


def _target(record: TrialRecord, snapshot: StudySnapshot) -> dict[str, Any]:
    speed = snapshot.target_speed(record)
    if speed is None:
        return {}
    return {
        "target_tokens_per_second": speed.tokens_per_second,
        "target_low": speed.low,
        "target_high": speed.high,
        "target_basis": speed.basis,
        "usd_per_million_tokens": snapshot.usd_per_million_tokens(record),
    }


def _need(record: TrialRecord, budget_bytes: int, unit: units.MemoryUnit) -> dict[str, Any]:
    need = need_of(record, budget_bytes=budget_bytes)
    if need is None:
        return {}
    return {
        "need": need.allocated_bytes / unit.bytes,
        "need_is_lower_bound": need.is_lower_bound,
        "need_is_predicted": need.is_predicted,
    }


def _prediction(record: TrialRecord, unit: units.MemoryUnit) -> dict[str, Any]:
    known = record.prediction
    if known is None:
        return {}
    return {
        "predicted_peak": known.peak_allocated_bytes / unit.bytes,
        "predicted_tokens_per_second": known.tokens_per_second,
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known, numbers with six digits; what is not finite is not known."""
    rounded = ((key, _rounded(value)) for key, value in values.items())
    return {key: value for key, value in rounded if value is not None}


_AS_THEY_ARE = frozenset({bool, int, str, type(None)})
"""Looked at first: of thousands of trials nearly every value is of one of these."""


def _rounded(value: Any) -> Any:
    if type(value) in _AS_THEY_ARE:
        return value
    match value:
        case bool() | int() | str() | None:
            return value
        case float():
            return float(f"{value:.6g}") if math.isfinite(value) else None
        case Mapping():
            return {key: _rounded(part) for key, part in value.items()}
        case Iterable():
            return [_rounded(part) for part in value]
        case _:
            return str(value)
