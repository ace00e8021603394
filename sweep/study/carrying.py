"""Owns what a study takes over from another: trials that would come out the same if they ran again.

Each is stored whole or not at all and knows where it was measured, so that a run that was killed on
the way goes on where it stopped, and one that is repeated takes nothing twice. Knows nothing of how
a study is driven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import InputError
from search_spaces.space import SearchSpace, StepBudget
from storage.definition import StudyDefinition, StudySnapshot
from storage.objectives import CONCLUSIVE
from storage.ranking import rank_study
from storage.records import RETRYABLE, Carried, TrialRecord, Verdict
from storage.study import OpenStudy
from sweep.sampling.encoding import Encoding

HOLDING = frozenset({Verdict.FITS, Verdict.OOM, Verdict.DIVERGED})
"""Verdicts of the device that hold in another space too. What was refused without it is judged anew
for nothing, and what was stopped as too slow was so beside that study's trials."""


@dataclass(frozen=True)
class Taken:
    """What came of taking trials over."""

    new: int
    """Taken over now."""
    all: int
    """Of that study's, earlier runs' included."""


def refuse_incomparable(source: StudySnapshot, given: StudyDefinition) -> None:
    """Raise where no trial of one study says anything of another's.

    Raises:
        InputError: model, weights, card or budget differ.
    """
    old = source.definition
    pairs = {
        "model": (_model(old), _model(given)),
        "weights": (old.space.weights, given.space.weights),
        "card": (old.target.gpu, given.target.gpu),
        "budget": (f"{old.target.budget_bytes:,} bytes", f"{given.target.budget_bytes:,} bytes"),
        "measured on": (
            old.target.emulated_on or old.target.gpu,
            given.target.emulated_on or given.target.gpu,
        ),
    }
    lines = [f"{what}: {a} -> {b}" for what, (a, b) in pairs.items() if a != b]
    if lines:
        raise InputError(
            f"--from {source.name}: its trials cannot be carried over, as they were measured "
            "under other conditions:\n  " + "\n  ".join(lines)
        )


def _model(definition: StudyDefinition) -> str:
    return f"{definition.model.get('name')} (config {definition.model_fingerprint})"


def carry_over(
    study: OpenStudy, source: StudySnapshot, *, is_valid: Callable[[TrialConfig], bool]
) -> Taken:
    """Store every trial of another study that holds in this one and is not there yet.

    Args:
        study: open, under its lease.
        source: checked by `refuse_incomparable`.
        is_valid: the rules.
    """
    encoding = Encoding(study.definition.space)
    baseline = study.definition.space.baseline_config()
    new = 0
    for record in holding(source, study.definition.space):
        known = study.records()
        marks = {r.carried for r in known}
        tried = {canonical(r.config) for r in known if r.verdict not in RETRYABLE}
        mark = record.carried or Carried(
            study=source.name, identity=source.identity, number=record.number
        )
        if mark in marks or canonical(record.config) in tried or not is_valid(record.config):
            continue
        params = encoding.params_of(record.config)
        study.carry(
            record.model_copy(
                update={
                    "carried": mark,
                    "is_baseline": record.config == baseline,
                    "attempt": 1,
                    "wall_seconds": 0.0,
                    "device_seconds": 0.0,
                }
            ),
            params=params or {},
            distributions={} if params is None else encoding.distributions,
        )
        new += 1
    return Taken(new, sum(r.carried is not None for r in study.records()))


def holding(source: StudySnapshot, space: SearchSpace) -> Iterator[TrialRecord]:
    """Yield the trials of a study that hold in another space, by number.

    Of one configuration it is the last that came to a conclusion, as in that study's own ranking.
    Not those that did not hold when they were measured again, and none of those runs: they compare
    with each other alone.
    """
    fallen = rank_study(source).fallen
    baseline = space.baseline_config()
    concluded = (r for r in source.records if r.verdict in CONCLUSIVE)
    last = {canonical(record.config): record.number for record in concluded}
    for record in source.records:
        if record.verdict not in HOLDING or record.number in fallen:
            continue
        if last[canonical(record.config)] != record.number:
            continue
        is_asked = record.config == baseline or space.params_of(record.config) is not None
        if is_asked and _is_long_enough(record, space.steps):
            yield record


def _is_long_enough(record: TrialRecord, steps: StepBudget) -> bool:
    """Whether a trial trained as long as the fewest steps of another budget ask for."""
    measured = record.measurement
    return measured is None or (
        measured.steps_warmup >= steps.warmup_min and measured.steps_measured >= steps.measured_min
    )
