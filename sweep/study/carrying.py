"""What a study takes over from another: trials that would come out the same if they ran again.

Each is stored whole or not at all and knows where it was measured, so that a run that was killed on
the way resumes where it stopped, and one that is repeated takes nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudyDefinition, StudySnapshot
from qlora_sweep.storage.ranking import last_conclusive, rank_study
from qlora_sweep.storage.reading import changed_versions
from qlora_sweep.storage.records import RETRYABLE, Carried, TrialRecord, Verdict
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.sweep.sampling.encoding import Encoding

HOLDING = frozenset({Verdict.FITS, Verdict.OOM, Verdict.DIVERGED})
"""Verdicts of the device that hold in another space too. What was refused without it is judged anew
for nothing, and what was stopped as too slow was so beside that study's trials."""


def refuse_incomparable(
    source: StudySnapshot, given: StudyDefinition, *, is_own: bool = False
) -> None:
    """Raise where no trial of one study says anything of another's.

    Args:
        source: the study that ran them.
        given: what the other is about.
        is_own: whether they are the study's own, from its spool.

    Raises:
        InputError: model, weights, GPU, budget or texts differ, or a held-out loss is asked for,
            which only trainings on the same tokens compare in.
    """
    old = source.definition
    pairs = {
        "model": (_model(old), _model(given)),
        "weights": (old.space.weights, given.space.weights),
        "gpu": (old.target.gpu, given.target.gpu),
        "budget": (f"{old.target.budget_bytes:,} bytes", f"{given.target.budget_bytes:,} bytes"),
        "measured on": (
            old.target.emulated_on or old.target.gpu,
            given.target.emulated_on or given.target.gpu,
        ),
    }
    if old.texts is not None or given.texts is not None:
        pairs["dataset"] = (_dataset_of(old), _dataset_of(given))
    if "eval_loss" in given.space.objectives and not is_own:
        pairs["held-out loss"] = ("of its own tokens", "of this study's")
    lines = []
    for what, (before, now) in pairs.items():
        if before != now:
            lines.append(f"{what}: {before} -> {now}")
    if lines:
        raise InputError(
            f"--from {source.name}: its trials cannot be carried over, as they were measured "
            "under other conditions:\n  " + "\n  ".join(lines)
        )


def _model(definition: StudyDefinition) -> str:
    return f"{definition.model.get('name')} (config {definition.model_fingerprint})"


def _dataset_of(definition: StudyDefinition) -> str:
    """Return which rows of which texts a study trains on."""
    dataset = definition.texts
    choice = definition.space.data
    if dataset is None or choice is None:
        return "none"
    held = f"{choice.eval_fraction:g} of them held out by seed {definition.space.seed}"
    return f"{dataset.source} (fingerprint {dataset.fingerprint}), {held}"


def carry_over(
    study: OpenStudy, source: StudySnapshot, *, is_valid: Callable[[TrialConfig], bool]
) -> int:
    """Store every trial of another study that holds in this one and is not there yet;
    return how many.

    Of the study's own spool those are the results that it has not; see `storage.directory`.

    Args:
        study: open, under its lease.
        source: checked by `refuse_incomparable`.
        is_valid: the rules.
    """
    encoding = Encoding(study.definition.space)
    baseline = study.definition.space.baseline_config()
    attempts: set[str | None] = set()
    tried: set[TrialConfig] = set()
    for record in study.ledger.all:
        if record.verdict not in RETRYABLE:
            attempts.add(record.attempt_id)
            if record.purpose == "search":
                tried.add(canonical(record.config))
    if source.identity == study.known.identity:
        candidates = _own(study, source)
    else:
        candidates = holding(source, study.definition.space)
    new = 0
    for record in candidates:
        is_searched = record.purpose == "search"
        config = canonical(record.config)
        is_kept = record.attempt_id is not None and record.attempt_id in attempts
        if is_kept or (is_searched and config in tried) or not is_valid(record.config):
            continue
        mark = Carried(study=source.name, identity=source.identity, number=record.number)
        taken = replaced(
            record,
            carried=record.carried or mark,
            is_baseline=record.config == baseline,
            attempt=1,
            wall_seconds=0.0,
            device_seconds=0.0,
        )
        params = None
        if is_searched:
            params = encoding.params_of(record.config)
        if params is None:
            study.carry(taken, params={}, distributions={})
        else:
            study.carry(taken, params=params, distributions=encoding.distributions)
        attempts.add(record.attempt_id)
        if is_searched:
            tried.add(config)
        new += 1
    return new


def take_over(
    study: OpenStudy,
    carried: StudySnapshot,
    *,
    is_valid: Callable[[TrialConfig], bool],
    warn: Callable[[str], None],
) -> None:
    """Carry another study's trials over, and warn of what makes them differ from this one's."""
    new = carry_over(study, carried, is_valid=is_valid)
    for problem in carried.warnings:
        warn(problem)
    if carried.identity == study.known.identity:
        if not new:
            warn(f"the spool of '{carried.name}' has no result that the study has not")
    elif all(record.carried is None for record in study.records()):
        warn(f"no trial of study '{carried.name}' holds in this space: none is carried over")
    changed = changed_versions(carried.environment, study.environment)
    if new and changed:
        warn(
            f"trials of '{carried.name}' were measured before {', '.join(changed)}; they may not "
            "compare with this study's"
        )


def _own(study: OpenStudy, source: StudySnapshot) -> Iterator[TrialRecord]:
    """Yield what a study's own spool has and the study has not: of a configuration the last."""
    lacking = study.lacking(source.records + source.confirmations)
    last = {}
    for record in lacking:
        if record.purpose == "search":
            last[canonical(record.config)] = record
    stored = {record.number: canonical(record.config) for record in study.records()}
    for record in lacking:
        config = canonical(record.config)
        if record.purpose == "search":
            if last[config] is record:
                yield record
        elif record.confirms is None or stored.get(record.confirms) == config:
            yield record


def holding(source: StudySnapshot, space: SearchSpace) -> Iterator[TrialRecord]:
    """Yield the trials of a study that hold in another space, by number.

    Of one configuration it is the last that came to a conclusion, as in that study's own ranking.
    It trained as long as the fewest steps of the space ask for.
    Not those that did not hold when they were measured again, and none of those runs: they compare
    with each other alone.
    """
    fallen = rank_study(source).fallen
    baseline = space.baseline_config()
    last = last_conclusive(source.records)
    for record in source.records:
        if record.verdict not in HOLDING or record.number in fallen:
            continue
        if last[canonical(record.config)].number != record.number:
            continue
        is_asked = record.config == baseline or space.params_of(record.config) is not None
        measured = record.measurement
        steps = space.steps
        is_long_enough = measured is None or (
            measured.steps_warmup >= steps.warmup_min
            and measured.steps_measured >= steps.measured_min
        )
        if is_asked and is_long_enough:
            yield record
