"""Plans as JSON documents. Keys may be added here, and are never renamed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, assert_never

from qlora_sweep.search_spaces.costs import Bill, OfferComparison, ties, usd_per_training_second
from qlora_sweep.search_spaces.estimates import Estimate
from qlora_sweep.search_spaces.linears import standard_capacity
from qlora_sweep.search_spaces.quality import KnownQuality
from qlora_sweep.sweep.planning.answers import (
    Answer,
    CalibrationTrials,
    GpuPlans,
    HostPlans,
    LongestSequences,
    PlannedFile,
)
from qlora_sweep.sweep.planning.backwards import (
    LENGTH_STEP,
    Cheapest,
    GpuForJob,
    Longest,
    LongestRow,
    Outcome,
)
from qlora_sweep.sweep.planning.calibrating import Lessons
from qlora_sweep.sweep.planning.candidates import speed_ratio
from qlora_sweep.sweep.planning.images import ImagePlan
from qlora_sweep.sweep.planning.plan import GpuPlan, PlanComparison, WhatIf
from qlora_sweep.sweep.planning.survey import ShapeTable, Survey
from qlora_sweep.sweep.predict.forecast import Evidence, Forecast
from qlora_sweep.sweep.predict.memory.peaks import PARTS
from qlora_sweep.sweep.predict.memory.predictor import Fit
from qlora_sweep.sweep.predict.speed.steps import LINK_SHARES, link_of

MEASURED = ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds", "tokens_per_second")


def documents_of(answer: Answer) -> Sequence[dict[str, Any]]:
    """Return what `sweep plan --json` prints, a document a line."""
    match answer:
        case HostPlans():
            return [ways_document(answer)]
        case GpuPlans(plans=(plan,)):
            return [gpu_document(plan)]
        case GpuPlans(plans=plans, comparison=comparison):
            return [comparison_document(plans, comparison)]
        case CalibrationTrials(of_gpus=of_gpus):
            return _of_gpus(list(map(lessons_document, of_gpus)))
        case LongestSequences(of_gpus=of_gpus):
            return _of_gpus(list(map(longest_document, of_gpus)))
        case Cheapest():
            return [cheapest_document(answer)]
        case PlannedFile():
            return list(map(_line_document, answer.forecasts, answer.bills))
        case _:
            assert_never(answer)


def _of_gpus(documents: list[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the document of one GPU, or one that holds those of several."""
    if len(documents) == 1:
        return documents
    return [{"plans": documents}]


def _line_document(forecast: Forecast, bills: Sequence[Bill]) -> dict[str, Any]:
    """Return the answer to one configuration of a file."""
    return forecast_document(forecast, bills=bills) | epoch_document(forecast, bills)


def _leading(what: str, tied: Sequence[Any]) -> dict[str, Any]:
    """Return what leads beyond doubt, or else all that perhaps does."""
    if len(tied) == 1:
        return {what: tied[0], f"perhaps_{what}": []}
    return {what: None, f"perhaps_{what}": list(tied)}


def _of(thing: object, *names: str) -> dict[str, Any]:
    """Return attributes by their names, as JSON has them; all null where there is no thing."""
    found: dict[str, Any] = dict.fromkeys(names)
    if thing is not None:
        for name in names:
            value = getattr(thing, name)
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _ends(estimate: Estimate | None) -> list[float] | None:
    return None if estimate is None else list(estimate.ends)


def epoch_document(forecast: Forecast, bills: Sequence[Bill]) -> dict[str, Any]:
    """Return what one epoch of the dataset takes, at the cheapest offer; nothing without one.

    Seconds are of training alone; a bill has what comes on top.
    """
    epoch = forecast.epoch
    speed = forecast.tokens_per_second
    if epoch is None or speed is None:
        return {}
    _, low, high = forecast.speed_estimate or (speed, speed, speed)
    price = None
    if bills:
        price = usd_per_training_second(bills[0].offer, forecast.config.data_parallel)
    document = epoch.model_dump(mode="json")
    for end, rate in {"": speed, "_low": high, "_high": low}.items():
        seconds = epoch.loss_tokens / rate
        document[f"seconds{end}"] = seconds
        document[f"dollars{end}"] = price and price * seconds
    return {"epoch": document}


def pairs_per_second(forecast: Forecast) -> float | None:
    """Return pairs/s of a training on pairs; None of any other, and where no speed is known."""
    if not forecast.config.is_on_pairs or not forecast.step_seconds:
        return None
    return forecast.config.samples_per_step / forecast.step_seconds


def forecast_document(forecast: Forecast, *, bills: Sequence[Bill]) -> dict[str, Any]:
    """Return one configuration's answer; what is not known is null.

    ``fits`` is the best guess and ``fits_certainty`` says whether it is more than that. Where
    memory cannot be predicted it is null, and ``notes`` say why. ``cost`` is the cheapest bill.
    ``invalid`` is the rule that forbids the configuration.
    """
    memory = forecast.memory
    document = {
        **_fit(forecast),
        "learning_rate": forecast.learning_rate.model_dump(mode="json"),
        "quality": KnownQuality.of(forecast.config).model_dump(),
        "peak_allocated_bytes": forecast.peak_allocated_bytes,
        **_of(memory, "peak_reserved_bytes"),
        "breakdown": None,
        "peak_moment": None,
        **_of(memory, "quantized_share"),
        "step_seconds": forecast.step_seconds,
        "step_seconds_range": _ends(forecast.step_estimate),
        "tokens_per_second": forecast.tokens_per_second,
        "tokens_per_second_range": _ends(forecast.speed_estimate),
        **_of(forecast.speed, "bottleneck", "flops_utilization"),
        "basis": _basis(forecast),
        "measured": None,
        "cost": None,
        "invalid": None,
        "notes": list(forecast.notes),
    }
    if memory is not None:
        document["breakdown"] = {part: memory.breakdown[part] for part in PARTS}
        document["peak_moment"] = memory.moment
        if memory.host_bytes:
            document["host_bytes"] = memory.host_bytes
    pairs = pairs_per_second(forecast)
    if pairs is not None:
        # By the name that a trial has for them.
        document["samples_per_second"] = pairs
    trial = forecast.trial
    if trial is not None and trial.measurement is not None:
        document["measured"] = {"trial": trial.number, **_of(trial.measurement, *MEASURED)}
    if bills:
        document["cost"] = bills[0].to_json()
    if forecast.violation is not None:
        document["invalid"] = _of(forecast.violation, "rule", "reason")
    return document


def _basis(forecast: Forecast) -> dict[str, Any]:
    """Return what an answer rests on."""
    memory = forecast.memory
    basis = {
        "memory": None,
        "memory_uncertainty": None,
        **_of(memory, "reserved_uncertainty"),
        "speed": forecast.speed_basis,
        "speed_trials": 0,
    }
    if memory is not None:
        basis["memory"] = "predicted"
        basis["memory_uncertainty"] = memory.uncertainty
    if forecast.speed is not None:
        basis["speed_trials"] = forecast.speed.trials
        files, trials = forecast.speed.contributed
        if files:
            basis["speed_contributed"] = {"files": files, "trials": trials}
    return basis


def _fit(forecast: Forecast) -> dict[str, Any]:
    """Return a configuration and whether it fits."""
    certainty = "uncertain" if forecast.fit is Fit.UNCERTAIN else "sure"
    config = forecast.config.model_dump(mode="json")
    return {"config": config, "fits": forecast.fits, "fits_certainty": certainty}


def gpu_document(plan: GpuPlan) -> dict[str, Any]:
    """Return the plan of one GPU.

    Where one configuration was asked about, its answer's keys are the document's own; where a space
    was, the one to take is under ``recommended``.
    """
    document: dict[str, Any] = {}
    if plan.shown is not None:
        document = forecast_document(plan.shown, bills=plan.bills)
    if plan.survey is not None:
        document = {"recommended": document or None}
    document |= _about(plan)
    document["table"] = None if plan.table is None else _table(plan.table)
    if plan.survey is not None:
        document |= _survey(plan, plan.survey)
    document["what_ifs"] = list(map(_what_if, plan.what_ifs))
    if plan.images is not None:
        document["images"] = _images(plan.images)
    document["bills"] = _bills(plan.bills)
    if plan.shown is not None:
        document |= epoch_document(plan.shown, plan.bills)
    document["study"] = _study(plan.forecaster.evidence)
    document["notes"] = list(plan.all_notes)
    if plan.grpo_config is not None:
        document["grpo_config"] = plan.grpo_config
    return document


def _study(evidence: Evidence) -> dict[str, Any] | None:
    """Return the study whose trials calibrate; None without one."""
    if evidence.study is None:
        return None
    return {
        "name": evidence.study,
        "trials": len(evidence.trials),
        **_of(evidence, "is_same_card", "memory_error"),
        "speed_error": evidence.calibration and evidence.calibration.relative_error,
    }


def _about(plan: GpuPlan | Longest) -> dict[str, Any]:
    forecaster = plan.forecaster
    gpu = {**_of(forecaster.gpu, "name", "memory_bytes"), **_of(forecaster, "budget_bytes")}
    return {
        "gpu": gpu,
        "model": forecaster.model.name,
        "space_kind": plan.asked.kind,
        "held": dict(plan.asked.fixed_settings),
    }


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


def _images(images: ImagePlan) -> dict[str, Any]:
    """Return what images of several sizes take, rows keeping their text."""
    document: dict[str, Any] = {
        **_of(images.seen, "side", "patches", "tokens"),
        "is_fixed": images.is_fixed,
        "by_size": [
            {
                "image_size": side,
                "seq_len": forecast.config.seq_len,
                **_fit(forecast),
                **_of(forecast, "peak_allocated_bytes", "tokens_per_second"),
            }
            for side, forecast in images.by_side.items()
        ],
        "largest": None,
    }
    if images.largest is not None:
        sure, possible = images.largest
        document["largest"] = {"sure": sure, "possible": possible}
    return document


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


def _survey(plan: GpuPlan, survey: Survey) -> dict[str, Any]:
    found = survey.found
    seconds = survey.study_seconds()
    best = survey.recommended
    capacity = None
    if best is not None:
        is_standard = survey.capacity == standard_capacity(survey.model)
        capacity = {**best.config.capacity(), "is_standard": is_standard}
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
        "capacity_class": capacity,
        "alternative": survey.alternative and _brief(survey.alternative),
        "fastest_by_class": [
            {**forecast.config.capacity(), "seq_len": forecast.config.seq_len, **_brief(forecast)}
            for forecast in survey.fastest_by_class.values()
        ],
        "fastest_by_numerics": [
            {"numerics": numerics, **_gain(plan, survey, forecast), **_brief(forecast)}
            for numerics, forecast in survey.fastest_by_numerics.items()
        ],
        "trials": survey.trials,
        "study_seconds": seconds and list(seconds),
    }


def _gain(plan: GpuPlan, survey: Survey, forecast: Forecast) -> dict[str, Any]:
    """Return how many times as fast as the fastest in 16 bits a forecast is, and which classes of
    numerics it is statistically indistinguishable from."""
    rivals = [other for other in survey.fastest_by_numerics.values() if other is not forecast]
    tied = [other.config.numerics for other in ties([forecast, *rivals], speed_ratio)[1:]]
    document: dict[str, Any] = {"times_16_bit": None, "times_16_bit_range": None, "tied": tied}
    times = plan.times_16_bit(forecast)
    if times is not None:
        document["times_16_bit"] = times.value
        document["times_16_bit_range"] = [times.low, times.high]
    return document


def _brief(forecast: Forecast) -> dict[str, Any]:
    known = _fit(forecast)
    del known["fits"]
    known["tokens_per_second"] = forecast.tokens_per_second
    known["tokens_per_second_range"] = _ends(forecast.speed_estimate)
    known["peak_allocated_bytes"] = forecast.peak_allocated_bytes
    return known


def comparison_document(
    plans: Sequence[GpuPlan], comparison: PlanComparison | None
) -> dict[str, Any]:
    """Return the plans of several GPUs, and the same training's speeds and bills on each.

    ``comparison`` is null where fewer than two GPUs can do it or no price of any is known. Of GPUs
    that are statistically indistinguishable none is called the cheapest, soonest or fastest: that
    is null, and all of them are perhaps so. One is recommended all the same, by what is predicted.
    """
    document: dict[str, Any] = {
        "plans": list(map(gpu_document, plans)),
        "speeds": None,
        "recommended": None,
        "comparison": None,
    }
    if comparison is not None:
        best, *tied = comparison.perhaps_best
        chosen_by = "tokens_per_second" if comparison.bills is None else "usd"
        document["speeds"] = {
            **_leading("fastest", comparison.perhaps_fastest),
            "configurations": _configurations(comparison),
        }
        document["recommended"] = {"gpu": best, "chosen_by": chosen_by, "tied": tied}
        if comparison.bills is not None:
            document["comparison"] = _costs(comparison, comparison.bills)
    return document


def ways_document(answer: HostPlans) -> dict[str, Any]:
    """Return the plans of what a host's GPUs can do, and the same training's speeds in each way.

    ``interconnect`` is what they send each other through, and the share of it that is counted on.
    """
    document = comparison_document(answer.plans, answer.comparison)
    del document["comparison"]
    for plan, of_way in zip(answer.plans, document["plans"], strict=True):
        of_way["way"] = plan.way
    if answer.comparison is not None:
        chosen = document["recommended"]
        chosen["way"] = chosen.pop("gpu")
        document["speeds"] |= _of(answer.comparison, "effective_batch_size", "seq_len")
    link = link_of(answer.plans[0].gpu)
    known = {**_of(link, "kind", "bytes_per_second"), "share": LINK_SHARES[link.kind]}
    return {**document, "interconnect": known, "not_possible": dict(answer.refused)}


def _configurations(comparison: PlanComparison) -> dict[str, Any]:
    return {gpu: _brief(forecast) for gpu, forecast in comparison.chosen.items()}


def _costs(comparison: PlanComparison, costs: OfferComparison) -> dict[str, Any]:
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
                "samples_range": [point.samples.low, point.samples.high],
                "steps": point.steps,
                "cheaper_below": point.below.offer.label,
                "cheaper_above": point.above.offer.label,
            }
            for point in costs.break_evens
        ],
    }


def _bills(bills: Iterable[Bill]) -> list[dict[str, Any]]:
    return list(map(Bill.to_json, bills))


def longest_document(longest: Longest) -> dict[str, Any]:
    """Return the longest rows on one GPU; 0 tokens where not even the shortest row fits."""
    best = longest.best
    return {
        **_about(longest),
        "multiple_of": LENGTH_STEP,
        "limit": longest.limit,
        "structures": longest.configurations,
        "longest": best and _longest_row(best),
        "rows": list(map(_longest_row, longest.rows)),
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

    def names(gpus: Iterable[GpuForJob]) -> list[str]:
        return [for_job.gpu.name for for_job in gpus]

    best = answer.cheapest
    smallest = answer.smallest

    return {
        "model": answer.model.name,
        "held": dict(answer.fixed_settings),
        "within_seconds": answer.deadline_seconds,
        **_of(answer.workload, "steps", "samples", "tokens"),
        **_leading("cheapest", names(answer.perhaps_cheapest)),
        "recommended": best and best.gpu.name,
        "smallest": smallest and smallest.gpu.name,
        "too_small": names(answer.that(Outcome.TOO_SMALL)),
        "too_slow": names(answer.that(Outcome.TOO_SLOW)),
        "perhaps_in_time": names(answer.that(Outcome.PERHAPS_IN_TIME)),
        "gpus": [
            {
                "gpu": for_job.gpu.name,
                **_of(for_job.gpu, "memory_bytes", "budget_bytes"),
                "outcome": for_job.outcome.name.lower(),
                "reason": for_job.reason or None,
                "least_bytes": for_job.least_bytes,
                "answer": for_job.forecast
                and forecast_document(for_job.forecast, bills=for_job.bills),
                "bills": _bills(for_job.bills),
            }
            for for_job in answer.gpus
        ],
    }


def lessons_document(answer: Lessons) -> dict[str, Any]:
    """Return the trials that would teach most of a GPU's speed, and what to type."""
    forecaster = answer.survey.forecaster
    before, after = answer.ranges
    return {
        "gpu": forecaster.gpu.name,
        "model": forecaster.model.name,
        "recommended": answer.answer.config.model_dump(mode="json"),
        "tokens_per_second": answer.answer.tokens_per_second,
        "tokens_per_second_range": list(before),
        "expected_range": list(after),
        "trials": [
            {
                "config": lesson.forecast.config.model_dump(mode="json"),
                "seconds": lesson.seconds,
                "teaches": lesson.factor,
                "log_spread_before": lesson.log_spreads[0],
                "log_spread_after": lesson.log_spreads[1],
            }
            for lesson in answer.lessons
        ],
        **_of(answer, "seconds", "usd", "commands"),
    }
