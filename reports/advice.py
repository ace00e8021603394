"""What it would take to go faster than a study's winner, or to fit at all, as its records show."""

from __future__ import annotations

from collections.abc import Iterator

from qlora_sweep.reports import units, words
from qlora_sweep.reports.view import StudyView
from qlora_sweep.search_spaces.config import KNOBS, SIZE_KEYS, canonical
from qlora_sweep.search_spaces.dimensions import Choices
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage import records
from qlora_sweep.storage.ranking import measured_of

_NEAREST_SHOWN = 2


def how_to_go_faster(view: StudyView) -> list[str]:
    """Return sentences on what stands between the winner and a better one, most useful first.

    Where speed was not asked for, what would buy speed is left out.
    """
    winner = view.winner
    found = _for_the_winner(view, winner) if winner else _why_nothing_fits(view)
    failed = sum(record.verdict in records.RETRYABLE for record in view.snapshot.trials)
    retryable = f"Unknown so far: {units.plural(failed, 'trial')} crashed, timed out or got lost."
    return [*found, *([retryable] if failed else [])]


def _for_the_winner(view: StudyView, winner: records.TrialRecord) -> Iterator[str]:
    ranking, space = view.ranking, view.ranking.definition.space
    if "tokens_per_second" in view.objectives:
        yield from _too_large(view, winner)
        yield from _edges(view, winner)
        fixed = [key for key, knob in KNOBS.items() if knob.tried and key not in space.dimensions]
        if fixed:
            yield (
                "Settings that were not searched and can change the speed, not the model: "
                f"{', '.join(fixed)}."
            )
    size, tried = space.size(), len({canonical(record.config) for record in ranking.of_space})
    if size is not None and tried < size:
        yield (
            f"More trials: {tried:,} of the {size:,} configurations of the space have been tried; "
            "the same command with more --trials resumes."
        )


def _named(record: records.TrialRecord, view: StudyView) -> str:
    baseline = view.ranking.definition.space.baseline_config()
    return f"trial {record.number} ({units.changes(record.config, baseline=baseline)})"


def _excess(record: records.TrialRecord, view: StudyView) -> str:
    need = records.need_of(record, budget_bytes=view.gpu.budget_bytes)
    assert need is not None, "only what did not fit exceeds the budget"
    return words.excess(need, budget_bytes=view.gpu.budget_bytes)


def _too_large(view: StudyView, winner: records.TrialRecord) -> Iterator[str]:
    """Yield what more memory would buy, by expected speed; without any, what missed narrowly."""
    ranking, expected = view.ranking, list[tuple[float, records.TrialRecord]]()
    for record in view.snapshot.records:
        if record.verdict in records.OUT_OF_MEMORY:
            rate = ranking.expected_speed(record)
            if rate is not None:
                expected.append((rate, record))
    if not expected:
        yield from _nearest_to_fitting(view)
    best = ranking.speed_of(winner)
    faster = [(rate, record) for rate, record in expected if rate > best]
    nearest = sorted(
        faster, key=lambda pair: (records.predicted_need(pair[1]) or 0, pair[1].number)
    )
    host = view.gpu.emulated_on
    on = f" on {host}" if host is not None and not ranking.is_predicted else ""
    for rate, record in nearest[:_NEAREST_SHOWN]:
        yield (
            f"More memory: {_named(record, view)} is expected at {units.rate(rate)} tokens/s{on} "
            f"and did not fit; {_excess(record, view)}."
        )


def _nearest_to_fitting(view: StudyView) -> Iterator[str]:
    """Yield which came nearest, by prediction: which allocation happened to fail says nothing."""
    unfit = [record for record in view.snapshot.records if record.verdict in records.OUT_OF_MEMORY]
    if nearest := records.nearest_to_fitting(unfit)[:1]:
        named, excess = _named(nearest[0], view), _excess(nearest[0], view)
        yield f"Predicted nearest to fitting: {named}; {excess}."
    elif unfit:
        yield f"{units.plural(len(unfit), 'trial')} did not fit; by how much is not known."


def _edges(view: StudyView, winner: records.TrialRecord) -> Iterator[str]:
    """Yield which size the space could offer more of; not where a larger one is none: it does not
    go into the effective batch that the space fixes, the model has no positions for it, or no row
    of the dataset is as long."""
    definition = view.ranking.definition
    space, limit = definition.space, ModelSpec.from_json(definition.model).max_positions
    length = winner.config.seq_len
    is_uncut = winner.epoch is not None and winner.epoch.is_whole
    is_enough = {
        "micro_batch_size": space.fixed.get("effective_batch_size")
        == winner.config.micro_batch_size,
        "seq_len": is_uncut or (limit is not None and length >= limit),
    }
    for key in SIZE_KEYS:
        dimension = space.dimensions.get(key)
        if dimension is None or is_enough[key]:
            continue
        largest = max(dimension.choices) if isinstance(dimension, Choices) else dimension.high
        if getattr(winner.config, key) >= largest:
            used = measured_of(winner).peak_allocated_bytes / view.gpu.budget_bytes
            yield (
                f"A wider space: the winner has the largest {KNOBS[key].label} that the space "
                f"'{space.name}' offers ({largest:g}) and uses {units.percent(used)} of the "
                f"budget. Offer larger values of {key}."
            )


def _why_nothing_fits(view: StudyView) -> Iterator[str]:
    baseline, tried = view.ranking.baseline, view.ranking.of_space
    if tried and baseline is not None and not view.ranking.is_baseline_in_space:
        peak = units.gib(measured_of(baseline).peak_allocated_bytes)
        yield (
            f"The baseline fits at {peak}: a space that holds what it sets has an answer "
            f"({words.capacity(baseline.config)}, {units.shape(baseline.config)})."
        )
    yield from _nearest_to_fitting(view)
    if any(record.verdict in records.OUT_OF_MEMORY for record in view.snapshot.records):
        yield (
            "Less memory: smaller micro-batches, shorter sequences, full checkpointing, no fp32 "
            "upcast, or a smaller model."
        )
