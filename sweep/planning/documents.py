"""Plans as JSON documents. Keys may be added here, and are never renamed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qlora_sweep.search_spaces.costs import Bill, OfferComparison, ties, usd_per_training_second
from qlora_sweep.search_spaces.estimates import Estimate
from qlora_sweep.search_spaces.linears import standard_capacity
from qlora_sweep.search_spaces.quality import KnownQuality
from qlora_sweep.search_spaces.rules import torch_for
from qlora_sweep.sweep.planning.backwards import (
    LENGTH_STEP,
    Cheapest,
    JobCard,
    Longest,
    LongestRow,
    Outcome,
)
from qlora_sweep.sweep.planning.candidates import speed_ratio
from qlora_sweep.sweep.planning.plan import CardComparison, CardPlan, WhatIf
from qlora_sweep.sweep.planning.survey import ShapeTable, Survey
from qlora_sweep.sweep.predict.forecast import Forecast
from qlora_sweep.sweep.predict.memory.peaks import PARTS
from qlora_sweep.sweep.predict.memory.predictor import Fit
from qlora_sweep.sweep.predict.speed.steps import LINK_SHARES, link_of

MEASURED = ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds", "tokens_per_second")


def _leading(what: str, tied: Sequence[Any]) -> dict[str, Any]:
    """Return what leads beyond doubt, or else all that perhaps does."""
    is_sure = len(tied) == 1
    return {what: tied[0] if is_sure else None, f"perhaps_{what}": [] if is_sure else list(tied)}


def _of(thing: object, *names: str) -> dict[str, Any]:
    """Return attributes by their names, as JSON has them; all null where there is no thing."""
    found = {name: None if thing is None else getattr(thing, name) for name in names}
    return {key: list(one) if isinstance(one, tuple) else one for key, one in found.items()}


def _ends(estimate: Estimate | None) -> list[float] | None:
    return None if estimate is None else list(estimate.ends)


def epoch_document(forecast: Forecast, bills: Sequence[Bill]) -> dict[str, Any]:
    """Return what one epoch of the texts takes, at the cheapest offer; nothing without texts.

    Seconds are of training alone; a bill has what comes on top.
    """
    epoch, speed = forecast.epoch, forecast.tokens_per_second
    if epoch is None or speed is None:
        return {}
    _, low, high = forecast.speed_estimate or (speed, speed, speed)
    rates = {"": speed, "_low": high, "_high": low}
    seconds = {end: epoch.loss_tokens / rate for end, rate in rates.items()}
    price = None
    if bills:
        price = usd_per_training_second(bills[0].offer, forecast.config.data_parallel)
    dollars = {f"dollars{end}": price and price * time for end, time in seconds.items()}
    took = {f"seconds{end}": time for end, time in seconds.items()}
    return {"epoch": epoch.model_dump(mode="json") | took | dollars}


def pairs_of(forecast: Forecast) -> dict[str, float]:
    """Return pairs/s by the name that a trial has for them; nothing where none are trained on."""
    config, seconds = forecast.config, forecast.step_seconds
    rate = seconds and config.samples_per_step / seconds
    return {"samples_per_second": rate} if rate and config.is_on_pairs else {}


def forecast_document(forecast: Forecast, *, bills: Sequence[Bill]) -> dict[str, Any]:
    """Return one configuration's answer; what is not known is null.

    ``fits`` is the best guess and ``fits_certainty`` says whether it is more than that. Where
    memory cannot be predicted it is null, and ``notes`` say why. ``cost`` is the cheapest bill.
    ``invalid`` is the rule that forbids the configuration.
    """
    memory, broken, trial = forecast.memory, forecast.violation, forecast.trial
    measured = None if trial is None else trial.measurement
    files, trials = (0, 0) if forecast.speed is None else forecast.speed.contributed
    contributed = {"files": files, "trials": trials}
    return {
        **_fit(forecast),
        "learning_rate": forecast.learning_rate.model_dump(mode="json"),
        "quality": KnownQuality.of(forecast.config).model_dump(),
        "peak_allocated_bytes": forecast.peak_allocated_bytes,
        **_of(memory, "peak_reserved_bytes"),
        "breakdown": None if memory is None else {part: memory.breakdown[part] for part in PARTS},
        "peak_moment": None if memory is None else memory.moment,
        **_of(memory, "quantized_share"),
        "step_seconds": forecast.step_seconds,
        "step_seconds_range": _ends(forecast.step_estimate),
        "tokens_per_second": forecast.tokens_per_second,
        "tokens_per_second_range": _ends(forecast.speed_estimate),
        **pairs_of(forecast),
        **_of(forecast.speed, "bottleneck", "flops_utilization"),
        "basis": {
            "memory": None if memory is None else "predicted",
            "memory_uncertainty": None if memory is None else memory.uncertainty,
            **_of(memory, "reserved_uncertainty"),
            "speed": forecast.speed_basis,
            "speed_trials": 0 if forecast.speed is None else forecast.speed.trials,
            **({"speed_contributed": contributed} if contributed["files"] else {}),
        },
        "measured": None
        if trial is None or measured is None
        else {"trial": trial.number, **_of(measured, *MEASURED)},
        "cost": bills[0].to_json() if bills else None,
        "invalid": None if broken is None else _of(broken, "rule", "reason"),
        "notes": list(forecast.notes),
    }


def _fit(forecast: Forecast) -> dict[str, Any]:
    """Return a configuration and whether it fits."""
    certainty = "uncertain" if forecast.fit is Fit.UNCERTAIN else "sure"
    config = forecast.config.model_dump(mode="json")
    return {"config": config, "fits": forecast.fits, "fits_certainty": certainty}


def card_document(plan: CardPlan) -> dict[str, Any]:
    """Return the plan of one GPU.

    Where one configuration was asked about, its answer's keys are the document's own; where a space
    was, the one to take is under ``recommended``.
    """
    shown = None if plan.shown is None else forecast_document(plan.shown, bills=plan.bills)
    answer = {"recommended": shown} if plan.survey is not None else (shown or {})
    epoch = {} if plan.shown is None else epoch_document(plan.shown, plan.bills)
    evidence = plan.forecaster.evidence
    return {
        **answer,
        **_about(plan),
        "table": None if plan.table is None else _table(plan.table),
        **({} if plan.survey is None else _survey(plan, plan.survey)),
        "what_ifs": [_what_if(change) for change in plan.what_ifs],
        "bills": _bills(plan.bills),
        **epoch,
        "study": None
        if evidence.study is None
        else {
            "name": evidence.study,
            "trials": len(evidence.trials),
            **_of(evidence, "is_same_card", "memory_error"),
            "speed_error": evidence.calibration and evidence.calibration.relative_error,
        },
        "notes": [*plan.notes, *filter(None, [torch_for(plan.gpu.compute_capability)])],
    }


def _about(plan: CardPlan | Longest) -> dict[str, Any]:
    forecaster, asked = plan.forecaster, plan.asked
    gpu = {**_of(forecaster.gpu, "name", "memory_bytes"), **_of(forecaster, "budget_bytes")}
    known = {"gpu": gpu, "model": forecaster.model.name}
    return {**known, "space_kind": asked.kind, "held": dict(asked.held)}


def _what_if(change: WhatIf) -> dict[str, Any]:
    """Return one setting changed; changes are against the configuration that is shown."""
    return {
        **_of(change, "key", "value"),
        **_fit(change.forecast),
        "use": change.use.name.lower(),
        "speed_change": change.speed_change,
        "peak_change_bytes": change.memory_change_bytes,
        **_of(change.forecast, "tokens_per_second", "peak_allocated_bytes"),
    }


def _table(table: ShapeTable) -> dict[str, Any]:
    """Return what fits by size.

    ``scope`` is ``space`` where each cell has the fastest structure of the space, which is its
    ``config``, and ``structure`` where all of them have that of the configuration asked about.
    """
    return {
        "scope": "space" if table.base is None else "structure",
        "micro_batch_sizes": list(table.batches),
        "seq_lens": list(table.lengths),
        "cells": [
            {
                "micro_batch_size": batch,
                "seq_len": length,
                **_fit(cell),
                **_of(cell, "peak_allocated_bytes", "tokens_per_second"),
            }
            for (batch, length), cell in table.cells.items()
        ],
        "largest_micro_batch": {
            str(length): _of(largest, "sure", "possible")
            for length, largest in table.largest.items()
        },
    }


def _survey(plan: CardPlan, survey: Survey) -> dict[str, Any]:
    found, seconds = survey.found, survey.study_seconds()
    return {
        "space": survey.space.name,
        "configurations": {
            "total": survey.total,
            "looked_at": found.looked_at,
            "is_whole": found.is_whole,
            "fit": found.fit,
            "uncertain": found.uncertain,
            "cannot_fit": found.too_large,
            "invalid": sum(found.invalid.values()),
            "invalid_by_rule": dict(found.invalid),
            "unpredicted": sum(found.unpredicted.values()),
            "unpredicted_by_reason": dict(found.unpredicted),
        },
        "least_bytes": found.least_bytes,
        "capacity_class": None
        if survey.recommended is None
        else {
            **survey.recommended.config.capacity(),
            "is_standard": survey.capacity == standard_capacity(survey.model),
        },
        "alternative": None if survey.alternative is None else _brief(survey.alternative),
        "fastest_by_class": [
            {**forecast.config.capacity(), "seq_len": forecast.config.seq_len, **_brief(forecast)}
            for forecast in survey.fastest_by_class.values()
        ],
        "fastest_by_numerics": [
            {"numerics": numerics, **_gain(plan, survey, forecast), **_brief(forecast)}
            for numerics, forecast in survey.fastest_by_numerics.items()
        ],
        "trials": survey.trials,
        "study_seconds": None if seconds is None else list(seconds),
    }


def _gain(plan: CardPlan, survey: Survey, forecast: Forecast) -> dict[str, Any]:
    """Return how many times as fast as the fastest in 16 bits a forecast is, and which classes of
    numerics it is statistically indistinguishable from."""
    rivals = [other for other in survey.fastest_by_numerics.values() if other is not forecast]
    tied = [other.config.numerics for other in ties([forecast, *rivals], speed_ratio)[1:]]
    times, *ends = plan.times_16_bit(forecast) or (None,)
    return {"times_16_bit": times, "times_16_bit_range": ends or None, "tied": tied}


def _brief(forecast: Forecast) -> dict[str, Any]:
    known = _fit(forecast)
    del known["fits"]
    known["tokens_per_second"] = forecast.tokens_per_second
    known["tokens_per_second_range"] = _ends(forecast.speed_estimate)
    known["peak_allocated_bytes"] = forecast.peak_allocated_bytes
    return known


def comparison_document(
    plans: Sequence[CardPlan], comparison: CardComparison | None
) -> dict[str, Any]:
    """Return the plans of several GPUs, and the same training's speeds and bills on each.

    ``comparison`` is null where fewer than two GPUs can do it or no price of any is known. Of GPUs
    that are statistically indistinguishable none is called the cheapest, soonest or fastest: that
    is null, and all of them are perhaps so. One is recommended all the same, by what is predicted.
    """
    costs = None if comparison is None else comparison.bills
    return {
        "plans": [card_document(plan) for plan in plans],
        "speeds": None
        if comparison is None
        else {
            **_leading("fastest", comparison.perhaps_fastest),
            "configurations": _configurations(comparison),
        },
        "recommended": None
        if comparison is None
        else {
            "gpu": comparison.perhaps_best[0],
            "chosen_by": "tokens_per_second" if costs is None else "usd",
            "tied": list(comparison.perhaps_best[1:]),
        },
        "comparison": None if comparison is None or costs is None else _costs(comparison, costs),
    }


def ways_document(
    plans: Sequence[CardPlan], comparison: CardComparison | None, refused: Mapping[str, str]
) -> dict[str, Any]:
    """Return the plans of what a host's GPUs can do, and the same training's speeds in each way.

    ``interconnect`` is what they send each other through, and the share of it that is counted on.
    """
    document, link = comparison_document(plans, comparison), link_of(plans[0].gpu)
    del document["comparison"]
    document["plans"] = [
        {"way": plan.way, **of} for plan, of in zip(plans, document["plans"], strict=True)
    ]
    if comparison is not None:
        chosen = document["recommended"]
        chosen["way"] = chosen.pop("gpu")
        document["speeds"] |= _of(comparison, "effective_batch_size", "seq_len")
    known = {**_of(link, "kind", "bytes_per_second"), "share": LINK_SHARES[link.kind]}
    return {**document, "interconnect": known, "not_possible": dict(refused)}


def _configurations(comparison: CardComparison) -> dict[str, Any]:
    return {gpu: _brief(forecast) for gpu, forecast in comparison.chosen.items()}


def _costs(comparison: CardComparison, costs: OfferComparison) -> dict[str, Any]:
    return {
        **_of(comparison, "effective_batch_size", "seq_len"),
        **_of(comparison.workload, "steps", "samples", "tokens"),
        "configurations": _configurations(comparison),
        **_leading("cheapest", _bills(costs.perhaps_cheapest)),
        **_leading("soonest", _bills(costs.perhaps_soonest)),
        "bills": _bills(costs.bills),
        "break_evens": [
            {
                "samples": point.samples.value,
                "samples_range": list(point.samples[1:]),
                "steps": point.steps,
                "cheaper_below": point.below.offer.label,
                "cheaper_above": point.above.offer.label,
            }
            for point in costs.break_evens
        ],
    }


def _bills(bills: Iterable[Bill]) -> list[dict[str, Any]]:
    return [bill.to_json() for bill in bills]


def longest_document(longest: Longest) -> dict[str, Any]:
    """Return the longest rows on one GPU; 0 tokens where not even the shortest row fits."""
    best = longest.best
    return {
        **_about(longest),
        "multiple_of": LENGTH_STEP,
        "limit": longest.limit,
        "structures": longest.configurations,
        "longest": None if best is None else _longest_row(best),
        "rows": [_longest_row(row) for row in longest.rows],
    }


def _longest_row(row: LongestRow) -> dict[str, Any]:
    return {
        **_of(row, "micro_batch_size", "seq_len"),
        "possible_seq_len": row.possible,
        "answer": row.forecast and forecast_document(row.forecast, bills=()),
    }


def cheapest_document(answer: Cheapest) -> dict[str, Any]:
    """Return a job on every GPU, those that do it first and the cheapest of them before others.

    Ties are as in `comparison_document`.
    """

    def named(*cards: JobCard | None) -> list[str]:
        return [card.gpu.name for card in cards if card is not None]

    return {
        "model": answer.model.name,
        "held": dict(answer.held),
        "within_seconds": answer.deadline_seconds,
        **_of(answer.workload, "steps", "samples", "tokens"),
        **_leading("cheapest", named(*answer.perhaps_cheapest)),
        "recommended": next(iter(named(answer.cheapest)), None),
        "smallest": next(iter(named(answer.smallest)), None),
        "too_small": named(*answer.that(Outcome.TOO_SMALL)),
        "too_slow": named(*answer.that(Outcome.TOO_SLOW)),
        "perhaps_in_time": named(*answer.that(Outcome.PERHAPS_IN_TIME)),
        "gpus": [
            {
                "gpu": card.gpu.name,
                **_of(card.gpu, "memory_bytes", "budget_bytes"),
                "outcome": card.outcome.name.lower(),
                "reason": card.reason or None,
                "least_bytes": card.least_bytes,
                "answer": card.forecast and forecast_document(card.forecast, bills=card.bills),
                "bills": _bills(card.bills),
            }
            for card in answer.cards
        ],
    }
