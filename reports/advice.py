"""What it would take to go faster than a study's winner, or to fit at all, as its records show."""

from __future__ import annotations

from collections.abc import Iterator

from qlora_sweep.reports import format as units
from qlora_sweep.reports import words
from qlora_sweep.reports.view import StudyView
from qlora_sweep.search_spaces.config import SETTINGS, SIZE_KEYS, canonical
from qlora_sweep.search_spaces.dimensions import Choices
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage import records
from qlora_sweep.storage.ranking import RankedTrial

_NEAREST_SHOWN = 2


def how_to_go_faster(view: StudyView) -> list[str]:
    """Return sentences on what stands between the winner and a better one, most useful first.

    Where speed was not asked for, what would buy speed is left out.
    """
    if view.winner is None:
        advice = list(_why_nothing_fits(view))
    else:
        advice = list(_for_the_winner(view, view.winner))
    failed = 0
    for record in view.finished:
        failed += record.verdict in records.RETRYABLE
    if failed:
        trials = units.plural(failed, "trial")
        advice.append(f"Unknown so far: {trials} crashed, timed out or got lost.")
    return advice


def _for_the_winner(view: StudyView, winner: RankedTrial) -> Iterator[str]:
    space = view.space
    if "tokens_per_second" in view.objectives:
        yield from _too_large(view, winner)
        yield from _edges(view, winner)
        fixed = [
            key
            for key, setting in SETTINGS.items()
            if setting.tried and key not in space.dimensions
        ]
        if fixed:
            yield (
                "Settings that were not searched and can change the speed, not the model: "
                f"{', '.join(fixed)}."
            )
    size = space.size()
    tried = len({canonical(record.config) for record in view.of_space})
    if size is not None and tried < size:
        yield (
            f"More trials: {tried:,} of the {size:,} configurations of the space have been tried; "
            "the same command with more --trials resumes."
        )


def _named(record: records.TrialRecord, view: StudyView) -> str:
    return f"trial {record.number} ({view.changes(record.config)})"


def _excess(record: records.TrialRecord, view: StudyView) -> str:
    need = view.need_of(record)
    assert need is not None, "only what did not fit exceeds the budget"
    return words.excess(need, budget_bytes=view.gpu.budget_bytes)


def _out_of_memory(view: StudyView) -> list[records.TrialRecord]:
    return [record for record in view.records if record.verdict in records.OUT_OF_MEMORY]


def _too_large(view: StudyView, winner: RankedTrial) -> Iterator[str]:
    """Yield what more memory would buy, by expected speed; without any, what missed narrowly."""
    expected = {}
    faster = []
    for record in _out_of_memory(view):
        rate = view.expected_speed(record)
        if rate is not None:
            expected[record.number] = rate
            if rate > winner.estimate.value:
                faster.append(record)
    if not expected:
        yield from _nearest_to_fitting(view)
    faster.sort(key=lambda record: (records.predicted_need(record) or 0, record.number))
    unit = "tokens/s"
    if view.gpu.emulated_on is not None and not view.is_predicted:
        unit = f"tokens/s on {view.gpu.emulated_on}"
    for record in faster[:_NEAREST_SHOWN]:
        yield (
            f"More memory: {_named(record, view)} is expected at "
            f"{units.rate(expected[record.number])} {unit} and did not fit; "
            f"{_excess(record, view)}."
        )


def _nearest_to_fitting(view: StudyView) -> Iterator[str]:
    """Yield which came nearest, by prediction: which allocation happened to fail says nothing."""
    unfit = _out_of_memory(view)
    nearest = records.nearest_to_fitting(unfit)
    if nearest:
        named = _named(nearest[0], view)
        yield f"Predicted nearest to fitting: {named}; {_excess(nearest[0], view)}."
    elif unfit:
        yield f"{units.plural(len(unfit), 'trial')} did not fit; by how much is not known."


def _edges(view: StudyView, winner: RankedTrial) -> Iterator[str]:
    """Yield which size the space could offer more of; not where a larger one is none: it does not
    go into the effective batch that the space fixes, the model has no positions for it, or no row
    of the dataset is as long."""
    space = view.space
    config = winner.config
    limit = ModelSpec.from_json(view.definition.model).max_positions
    is_uncut = winner.epoch is not None and winner.epoch.is_whole
    is_enough = {
        "micro_batch_size": space.fixed.get("effective_batch_size") == config.micro_batch_size,
        "seq_len": is_uncut or (limit is not None and config.seq_len >= limit),
    }
    for key in SIZE_KEYS:
        dimension = space.dimensions.get(key)
        if dimension is None or is_enough[key]:
            continue
        if isinstance(dimension, Choices):
            largest = max(dimension.choices)
        else:
            largest = dimension.high
        if getattr(config, key) >= largest:
            used = winner.measurement.peak_allocated_bytes / view.gpu.budget_bytes
            yield (
                f"A wider space: the winner has the largest {SETTINGS[key].label} that the space "
                f"'{space.name}' offers ({largest:g}) and uses {units.percent(used)} of the "
                f"budget. Offer larger values of {key}."
            )


def _why_nothing_fits(view: StudyView) -> Iterator[str]:
    baseline = view.measured_baseline
    is_outside = view.baseline is not None and not view.baseline.in_space
    if view.of_space and baseline is not None and is_outside:
        peak = units.gib(baseline.measurement.peak_allocated_bytes)
        yield (
            f"The baseline fits at {peak}: a space that holds what it sets has an answer "
            f"({words.capacity(baseline.config)}, {units.shape(baseline.config)})."
        )
    yield from _nearest_to_fitting(view)
    if _out_of_memory(view):
        yield (
            "Less memory: smaller micro-batches, shorter sequences, full checkpointing, no fp32 "
            "upcast, or a smaller model."
        )
