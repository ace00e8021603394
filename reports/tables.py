"""The tables that people read, as finished text: top configurations, classes, environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reports import objectives, uncertainty, units
from search_spaces.config import TrialConfig
from search_spaces.knobs import targets_in_words
from storage.definition import StudySnapshot
from storage.ranking import ClassBest, rank_study
from storage.records import TrialRecord


@dataclass(frozen=True)
class ConfigurationRow:
    """One measured configuration, as text; a dash where a number is not known."""

    rank: int
    number: int
    changes: str
    """Where it differs from the baseline, in words."""
    tokens_per_second: str
    interval: str
    """95 % interval of the tokens/s."""
    peak_allocated: str
    budget_share: str
    """Peak allocated over the budget."""
    flags: str
    values: tuple[str, ...]
    """What it is ranked by, a value for each objective."""


@dataclass(frozen=True)
class ClassRow:
    """The fastest configuration of one capacity class."""

    lora_rank: str
    target_modules: str
    compute: str
    """Its class of numerics."""
    seq_len: str
    number: int
    changes: str
    tokens_per_second: str
    peak_allocated: str


@dataclass(frozen=True)
class FactRow:
    """A name and what it is, for the environment."""

    name: str
    value: str


def top_configurations(snapshot: StudySnapshot, *, limit: int = 10) -> tuple[ConfigurationRow, ...]:
    """Return the best configurations of the space that fit, in the order of its objectives."""
    ranking = rank_study(snapshot)
    return tuple(
        _configuration_row(
            record,
            snapshot,
            rank=rank,
            is_of_one_process=not ranking.searched or ranking.is_measured_again(record),
        )
        for rank, record in enumerate(ranking.ranked[:limit], start=1)
    )


def runners_up(snapshot: StudySnapshot, *, limit: int = 3) -> tuple[ConfigurationRow, ...]:
    """Return the best configurations after the winner."""
    return top_configurations(snapshot, limit=limit + 1)[1:]


def front_rows(snapshot: StudySnapshot) -> tuple[ConfigurationRow, ...]:
    """Return the front of a study of several objectives, the knee first; of one, nothing."""
    front = len(rank_study(snapshot).front)
    return top_configurations(snapshot, limit=front) if front else ()


def value_columns(snapshot: StudySnapshot) -> tuple[str, ...]:
    """Return what heads the values that a study is ranked by."""
    return tuple(objectives.COLUMNS[o] for o in snapshot.definition.space.objectives)


def class_rows(snapshot: StudySnapshot) -> tuple[ClassRow, ...]:
    """Return the fastest trial per rank, target modules and length, which decide the capacity."""
    baseline = snapshot.definition.space.baseline_config()
    by_number = {record.number: record for record in snapshot.records}
    return tuple(
        _class_row(best, by_number[best.number], baseline=baseline)
        for best in rank_study(snapshot).fastest_by_class
    )


def _class_row(best: ClassBest, record: TrialRecord, *, baseline: TrialConfig) -> ClassRow:
    measured = record.measurement
    return ClassRow(
        lora_rank=str(best.lora_rank),
        target_modules=targets_in_words(best.target_modules),
        compute=best.numerics,
        seq_len=units.count(best.seq_len),
        number=best.number,
        changes=units.changes(record.config, baseline=baseline),
        tokens_per_second=units.rate(best.tokens_per_second)
        + (" (stopped early)" if best.is_partial else ""),
        peak_allocated=units.gib(measured.peak_allocated_bytes if measured else None),
    )


def environment_rows(snapshot: StudySnapshot) -> tuple[FactRow, ...]:
    """Return what the study ran on and with: the target first, then the stored fingerprint."""
    target, space = snapshot.definition.target, snapshot.definition.space
    fixed = (
        FactRow("model", str(snapshot.definition.model.get("name", units.DASH))),
        FactRow("weights", space.weights),
        FactRow("target GPU", target.gpu),
        FactRow("memory budget", units.gib(target.budget_bytes)),
        FactRow("measured on", target.emulated_on or target.gpu),
        FactRow("search space", f"{space.name} (sampler {space.sampler}, seed {space.seed})"),
        FactRow("driver time", units.duration(snapshot.wall_seconds)),
    )
    return fixed + tuple(
        FactRow(name, _plain(value)) for name, value in _flat(snapshot.environment)
    )


def _configuration_row(
    record: TrialRecord,
    snapshot: StudySnapshot,
    *,
    rank: int,
    is_of_one_process: bool,
) -> ConfigurationRow:
    """Return a row, which says of a speed that it does not compare with those measured again."""
    space, budget_bytes = snapshot.definition.space, snapshot.definition.target.budget_bytes
    measured = record.measurement
    assert measured is not None, "only measured trials are ranked"
    where = "" if is_of_one_process else " (search, scaled)"
    return ConfigurationRow(
        rank=rank,
        number=record.number,
        changes=units.changes(record.config, baseline=space.baseline_config()),
        tokens_per_second=units.rate(measured.tokens_per_second) + where,
        interval=uncertainty.interval(measured),
        peak_allocated=units.gib(measured.peak_allocated_bytes),
        budget_share=units.percent(measured.peak_allocated_bytes / budget_bytes),
        flags=", ".join(measured.flags),
        values=tuple(objectives.value(o, measured) for o in space.objectives),
    )


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings under their own names."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key.replace("_", " "), value


def _plain(value: Any) -> str:
    match value:
        case None:
            return units.DASH
        case bool():
            return "true" if value else "false"
        case list() | tuple():
            return ", ".join(_plain(item) for item in value)
        case _:
            return str(value)
