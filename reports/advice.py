"""Owns what a study says it would take to go faster than its winner, or to fit at all.

Pure: a study's snapshot in, sentences out. Says only what the records show; knows nothing of where
it is printed.
"""

from __future__ import annotations

from collections.abc import Iterator

from reports import uncertainty, units
from search_spaces.config import canonical
from search_spaces.dimensions import Choices
from search_spaces.knobs import KNOBS, SIZE_KEYS
from search_spaces.models import ModelSpec
from search_spaces.space import SearchSpace
from storage.definition import StudyDefinition, StudySnapshot
from storage.objectives import measured_of
from storage.ranking import Ranking, rank_study
from storage.records import (
    OUT_OF_MEMORY,
    RETRYABLE,
    Measurement,
    TrialRecord,
    nearest_to_fitting,
    need_of,
    predicted_need,
)

_NEAREST_SHOWN = 2


def advice_title(snapshot: StudySnapshot) -> str:
    """Return what the sentences are about: more speed, where that was asked for."""
    is_speed = "tokens_per_second" in snapshot.definition.space.objectives
    return "To go faster" if is_speed else "To find better"


def how_to_go_faster(snapshot: StudySnapshot) -> list[str]:
    """Return sentences on what stands between the winner and a better one, most useful first.

    Where speed was not asked for, what would buy speed is left out.
    """
    ranking = rank_study(snapshot)
    winner = ranking.winner
    if winner is None or winner.measurement is None:
        return [*_why_nothing_fits(snapshot, ranking), *_retryable(snapshot)]
    return [
        *_towards_speed(snapshot, ranking, winner),
        *_untried(ranking),
        *_suspect(ranking, winner.measurement),
        *_retryable(snapshot),
    ]


def _towards_speed(snapshot: StudySnapshot, ranking: Ranking, winner: TrialRecord) -> Iterator[str]:
    if "tokens_per_second" not in ranking.objectives:
        return
    yield from _too_large(snapshot, ranking, winner)
    yield from _edges(snapshot, winner)
    yield from _not_searched(snapshot.definition.space)


def _out_of_memory(snapshot: StudySnapshot) -> list[TrialRecord]:
    return [record for record in snapshot.records if record.verdict in OUT_OF_MEMORY]


def _named(record: TrialRecord, space: SearchSpace) -> str:
    return (
        f"trial {record.number} ({units.changes(record.config, baseline=space.baseline_config())})"
    )


def _excess(record: TrialRecord, budget_bytes: int) -> str:
    need = need_of(record, budget_bytes=budget_bytes)
    assert need is not None, "only what did not fit exceeds the budget"
    return uncertainty.excess(need, budget_bytes=budget_bytes)


def _too_large(snapshot: StudySnapshot, ranking: Ranking, winner: TrialRecord) -> Iterator[str]:
    """Yield what more memory would buy, by expected speed; without any, what missed narrowly."""
    expected = [
        (record.prediction.tokens_per_second, record)
        for record in _out_of_memory(snapshot)
        if record.prediction is not None
        and record.prediction.tokens_per_second is not None
        and ranking.compares(winner, record)
    ]
    if not expected:
        yield from _nearest_to_fitting(snapshot)
    best = measured_of(winner).tokens_per_second
    faster = [(rate, record) for rate, record in expected if rate > best]
    nearest = sorted(faster, key=lambda pair: (predicted_need(pair[1]) or 0, pair[1].number))
    for rate, record in nearest[:_NEAREST_SHOWN]:
        yield (
            f"More memory: {_named(record, snapshot.definition.space)} is expected at "
            f"{units.rate(rate)} tokens/s{_host(snapshot)} and did not fit; "
            f"{_excess(record, snapshot.definition.target.budget_bytes)}."
        )


def _host(snapshot: StudySnapshot) -> str:
    """Return on which GPU a speed is expected, where that is not the target."""
    host = snapshot.definition.target.emulated_on
    return "" if host is None else f" on {host}"


def _nearest_to_fitting(snapshot: StudySnapshot) -> Iterator[str]:
    """Yield which came nearest, by prediction: which allocation happened to fail says nothing."""
    unfit = _out_of_memory(snapshot)
    predicted = [r for r in unfit if predicted_need(r) is not None]
    if not predicted:
        if unfit:
            yield (
                f"{units.plural(len(unfit), 'trial')} did not fit; each needs more than the "
                "budget, and without a prediction of memory by how much is not known."
            )
        return
    nearest = nearest_to_fitting(predicted)[0]
    among = (
        ""
        if len(predicted) == len(unfit)
        else f" (of the {len(predicted)} of {len(unfit)} whose memory was predicted)"
    )
    yield (
        f"Nearest to fitting{among}: {_named(nearest, snapshot.definition.space)}; "
        f"{_excess(nearest, snapshot.definition.target.budget_bytes)}."
    )


def _edges(snapshot: StudySnapshot, winner: TrialRecord) -> Iterator[str]:
    space, budget_bytes = snapshot.definition.space, snapshot.definition.target.budget_bytes
    for key in SIZE_KEYS:
        dimension = space.dimensions.get(key)
        if dimension is None or _is_wide_enough(key, snapshot.definition, winner):
            continue
        largest = max(dimension.choices) if isinstance(dimension, Choices) else dimension.high
        if getattr(winner.config, key) >= largest and winner.measurement is not None:
            share = units.percent(winner.measurement.peak_allocated_bytes / budget_bytes)
            yield (
                f"A wider space: the winner has the largest {KNOBS[key].label} that the space "
                f"'{space.name}' offers ({largest:g}) and uses {share} of the budget. "
                f"Offer larger values of {key}."
            )


def _is_wide_enough(key: str, definition: StudyDefinition, winner: TrialRecord) -> bool:
    """Whether a larger size than the winner's is none: it does not go into the effective batch that
    the space fixes, the model has no positions for it, or no row of the texts is as long.
    """
    if key != "seq_len":
        return definition.space.fixed.get("effective_batch_size") == winner.config.micro_batch_size
    is_uncut = winner.epoch is not None and winner.epoch.is_whole
    limit = ModelSpec.from_json(definition.model).max_positions
    return is_uncut or (limit is not None and winner.config.seq_len >= limit)


def _untried(ranking: Ranking) -> Iterator[str]:
    size = ranking.definition.space.size()
    tried = len({canonical(record.config) for record in ranking.of_space})
    if size is not None and tried < size:
        yield (
            f"More trials: {tried:,} of the {size:,} configurations of the space have been tried "
            "so far; the same command with more --trials goes on from here."
        )


def _not_searched(space: SearchSpace) -> Iterator[str]:
    fixed = [key for key, knob in KNOBS.items() if knob.tried and key not in space.dimensions]
    if fixed:
        names = ", ".join(fixed)
        yield f"Settings that were not searched and can change the speed, not the model: {names}."


def _suspect(ranking: Ranking, best: Measurement) -> Iterator[str]:
    baseline = ranking.baseline
    measured = {"winner": best} | (
        {"baseline": measured_of(baseline)}
        if baseline is not None and measured_of(baseline) is not best
        else {}
    )
    for who, measurement in measured.items():
        doubts, ends = uncertainty.doubts(measurement), uncertainty.interval_words(measurement)
        is_recorded = ranking.definition.target.recorded is not None
        if doubts or (measurement.speed_interval is None and not is_recorded):
            what = f"is marked {doubts} ({ends})" if doubts else f"has {ends}"
            yield (
                f"A calmer machine: the {who}'s measurement {what}; "
                "its speed may be more or less than was seen."
            )


def _retryable(snapshot: StudySnapshot) -> Iterator[str]:
    failed = [record for record in snapshot.trials if record.verdict in RETRYABLE]
    if failed:
        yield (
            f"Unknown so far: {units.plural(len(failed), 'trial')} crashed, timed out or got lost, "
            "so their speed is not known."
        )


def _why_nothing_fits(snapshot: StudySnapshot, ranking: Ranking) -> Iterator[str]:
    if not snapshot.records:
        yield "No trial has finished yet."
        return
    budget = units.gib(snapshot.definition.target.budget_bytes)
    if ranking.of_space:
        yield f"No configuration of the space was measured within {budget}."
    if ranking.of_space and ranking.baseline is not None and not ranking.is_baseline_in_space:
        peak = units.gib(measured_of(ranking.baseline).peak_allocated_bytes)
        yield (
            f"The baseline fits at {peak}: a space that holds what it sets has an answer "
            f"({uncertainty.capacity(ranking.baseline.config)}, "
            f"{units.shape(ranking.baseline.config)})."
        )
    yield from _nearest_to_fitting(snapshot)
    if _out_of_memory(snapshot):
        yield (
            "Less memory: smaller micro-batches, shorter sequences, full checkpointing, no fp32 "
            "upcast, or a smaller model."
        )
