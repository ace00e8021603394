"""Owns the document of ``sweep best --json``: the keys that scripts rely on. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from storage.confirmations import Ratio
from storage.definition import StudySnapshot
from storage.epochs import epoch_cost
from storage.gain import Comparison, compare
from storage.objectives import measured_of, objective_value
from storage.ranking import Ranking, rank_study, verdict_counts
from storage.records import Measurement, TrialRecord

NOT_RECORDED = (
    "steps_measured",
    "steps_warmup",
    "final_loss",
    "setup_seconds",
    "measured_seconds",
    "allocator_retries",
)
"""Of a measurement, what a surface says nothing of."""


def best_document(snapshot: StudySnapshot) -> dict[str, Any]:
    """Return the document of ``sweep best --json``; ``best`` is null where nothing fits.

    ``objective`` names what is ranked by, of several objectives all of them; then ``best`` is the
    knee of their ``front``. ``tied`` were measured side by side with it and are statistically
    indistinguishable. ``gain`` is over the baseline, for another capacity class over the baseline's
    recipe in that class, with its 95 % interval; where it is null, ``no_gain`` says why.
    ``numerics_choice`` is ``predicted`` where another GPU stood in and several classes of numerics
    fit: what is predicted of the target chose between them.
    """
    records, target = snapshot.records, snapshot.definition.target
    ranking = rank_study(snapshot)
    winner = ranking.winner
    speed = None if winner is None else _target_speed(snapshot, winner)
    is_front = len(ranking.objectives) > 1
    return {
        "study": snapshot.name,
        "gpu": {
            "name": target.gpu,
            "budget_bytes": target.budget_bytes,
            "emulated_on": target.emulated_on,
        },
        "model": snapshot.definition.model.get("name"),
        "objective": ", ".join(ranking.objectives),
        "objectives": list(ranking.objectives),
        "seconds": {
            "wall": snapshot.wall_seconds,
            "device": sum(r.device_seconds for r in (*records, *snapshot.confirmations)),
        },
        "trials": {"total": len(records), **verdict_counts(records)},
        "ended": snapshot.ended,
        "best": None
        if winner is None
        else _trial(winner, is_recorded=target.recorded is not None)
        | {"target_tokens_per_second": speed},
        "cost": None if winner is None else _cost(snapshot, winner),
        **_texts(snapshot, winner),
        "target_tokens_per_second": speed,
        **_gain(ranking),
        "front": [_on_front(record, ranking) for record in ranking.front],
        "knee": winner.number if winner is not None and is_front else None,
        "baseline": _baseline(ranking),
        "tied": list(ranking.tied),
        "confirmed": ranking.is_confirmed,
        "confirmation": _confirmation(ranking),
        "numerics_choice": None if winner is None else ranking.numerics_choice,
        "fastest_by_class": [asdict(best) for best in ranking.fastest_by_class],
    }


def _texts(snapshot: StudySnapshot, winner: TrialRecord | None) -> dict[str, Any]:
    """Return the study's texts, and what an epoch of them takes as the winner trains; nothing of a
    study without texts."""
    texts = snapshot.definition.texts
    if texts is None:
        return {}
    cost = None if winner is None else epoch_cost(snapshot, winner)
    return {
        "texts": texts.model_dump(mode="json"),
        "epoch": None if cost is None else cost.to_json(),
    }


def _confirmation(ranking: Ranking) -> dict[str, Any] | None:
    """Return what measuring the winner again came to; None where it was not done."""
    winner = ranking.winner
    if winner is None or not ranking.is_measured_again(winner):
        return None
    known = ranking.confirmations
    return {
        "runs": ranking.runs,
        "seconds": known.seconds(series=known.series),
        "fallen": list(ranking.fallen),
        "searched_tokens_per_second": ranking.searched[winner.number].tokens_per_second,
        "soak": None if ranking.soak is None else _soak(measured_of(ranking.soak)),
    }


def _soak(measured: Measurement) -> dict[str, Any]:
    report = {} if measured.soak is None else measured.soak.model_dump(mode="json")
    return {
        "steps": measured.steps_measured,
        "seconds": measured.measured_seconds,
        "allocator_retries": measured.allocator_retries,
        "peak_allocated_bytes": measured.peak_allocated_bytes,
        "peak_reserved_bytes": measured.peak_reserved_bytes,
        "tokens_per_second": measured.tokens_per_second,
        **report,
    }


def _trial(record: TrialRecord, *, is_recorded: bool) -> dict[str, Any]:
    values = record.to_json()
    measurement = dict(values["outcome"]["measurement"])
    del measurement["soak"]
    if is_recorded:
        measurement |= dict.fromkeys(NOT_RECORDED)
    return {
        "number": record.number,
        "config": values["config"],
        "measurement": measurement,
        **_certainty(record),
    }


def _certainty(record: TrialRecord) -> dict[str, Any]:
    measured = measured_of(record)
    ends = measured.speed_interval
    return {
        "tokens_per_second_ci95": None if ends is None else list(ends),
        "noisy": measured.is_noisy,
    }


def _cost(snapshot: StudySnapshot, winner: TrialRecord) -> dict[str, Any] | None:
    """Return what tokens cost as the winner trains on the target GPU, and under which offer."""
    dollars, offer = snapshot.usd_per_million_tokens(winner), snapshot.offer
    if dollars is None or offer is None:
        return None
    low, high = snapshot.usd_interval(winner) or (None, None)
    shown = offer.model_dump(mode="json", include={"usd_per_hour", "provider", "is_spot", "date"})
    return {
        "usd_per_million_tokens": dollars,
        "usd_per_million_tokens_low": low,
        "usd_per_million_tokens_high": high,
        **shown,
    }


def _target_speed(snapshot: StudySnapshot, winner: TrialRecord) -> dict[str, Any] | None:
    """Return the winner's speed on the GPU that the study is for; None where it is not known."""
    speed = snapshot.target_speed(winner)
    if speed is None:
        return None
    ends = {"low": speed.low, "high": speed.high}
    return {"value": speed.tokens_per_second, **ends, "basis": speed.basis}


def _on_front(record: TrialRecord, ranking: Ranking) -> dict[str, Any]:
    measured = measured_of(record)
    return {
        "number": record.number,
        "values": {o: objective_value(o, measured) for o in ranking.objectives},
        "config": record.config.model_dump(mode="json"),
    }


def _baseline(ranking: Ranking) -> dict[str, Any] | None:
    comparison = compare(ranking)
    if comparison is None:
        return None
    base = comparison.baseline
    return {
        "number": base.number,
        "config": base.config.model_dump(mode="json"),
        "tokens_per_second": measured_of(base).tokens_per_second,
        **_certainty(base),
        "in_space": ranking.is_baseline_in_space,
        "class": base.config.capacity(),
        "class_gain": _class_gain(comparison),
    }


def _gain(ranking: Ranking) -> dict[str, Any]:
    """Return the winner's gain within its capacity class, or why there is none."""
    comparison = compare(ranking)
    if comparison is None:
        return {"gain": None, "no_gain": "not_measured"}
    gain, over = comparison.gain, comparison.over
    if gain is None or over is None:
        return {"gain": None, "no_gain": comparison.reason}
    reference = {
        "baseline": comparison.is_over_the_baseline,
        "config": over.config.model_dump(mode="json"),
        "tokens_per_second": measured_of(over).tokens_per_second,
        **_certainty(over),
    }
    return {"gain": {"over": reference, **_ratio(gain)}, "no_gain": None}


def _class_gain(comparison: Comparison) -> dict[str, Any] | None:
    """Return the gain within the baseline's class, where the winner is in another."""
    fastest, gain = comparison.fastest_of_class, comparison.class_gain
    if fastest is None:
        return None
    return {
        "number": fastest.number,
        "class": fastest.config.capacity(),
        "tokens_per_second": measured_of(fastest).tokens_per_second,
        **_certainty(fastest),
        "gain": None if gain is None else _ratio(gain),
    }


def _ratio(gain: Ratio) -> dict[str, float | None]:
    return {"ratio": gain.value, "low": gain.low, "high": gain.high}
