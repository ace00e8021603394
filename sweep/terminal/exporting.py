"""`sweep export`: a winner as a file of a format, for a trainer that can run it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing

from qlora_sweep.reports import format as units
from qlora_sweep.reports.answer import status_words
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, NothingFits, did_you_mean
from qlora_sweep.search_spaces.gpus import match_product
from qlora_sweep.search_spaces.kinds import TrainerName
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.trainers import TRAINERS
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.files import checked_output, write_output
from qlora_sweep.storage.ranking import rank_study
from qlora_sweep.sweep import paths
from qlora_sweep.sweep.export import formats
from qlora_sweep.sweep.export.in_trainer import Best, InTrainer, figures, is_predicted
from qlora_sweep.sweep.export.record import Record, predicted_record, record_of, recorded_dataset
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from qlora_sweep.sweep.terminal import console
from qlora_sweep.sweep.terminal.listings import read


def export(
    study: str,
    *,
    format: str | None,
    trainer: str | None,
    trial: int | None,
    storage: str | None,
    output: str | None,
    is_forced: bool,
) -> None:
    """Print a study's winner or a trial of it as a file of a format, or write it and print where it
    is."""
    format = _format(format, trainer)
    endings = formats.endings_of(format)
    path = checked_output(output, what=f"format {format}", endings=endings, is_forced=is_forced)
    snapshot = read(study, url=paths.storage_url(storage))
    if format == formats.SURFACE:
        export = formats.exported(snapshot, format=format, number=trial)
    else:
        record = _record(
            snapshot, format=format, trial=trial, is_for=trainer is not None, is_forced=is_forced
        )
        export = formats.written(record, format=format)
    lost = list(export.lost)
    if path is None and export.beside:
        lost.append(f"it needs {' and '.join(export.beside)} beside it, which -o FILE writes too.")
    if path is None and export.record:
        lost.append("`sweep verify` needs its record beside it, which -o FILE writes too.")
    lost += _unsure(snapshot, trial)
    for sentence in lost:
        console.note_folded(f"{format}: {sentence}", indent=2)
    if path is None:
        console.say_as_is(export.text.removesuffix("\n"))
        return
    if path.name in export.beside:
        raise InputError(f"--output: {path.name} is what this file imports: name it otherwise")
    files = export.files(path)
    for each in files:
        checked_output(str(each), what=each.name, endings=(each.suffix,), is_forced=is_forced)
    for each, text in files.items():
        write_output(each, text.encode("utf-8"))
        console.say(str(each))


def _unsure(snapshot: StudySnapshot, trial: int | None) -> Iterator[str]:
    """Yield in how far the winner of a study may not be the best; nothing of another trial."""
    ranking = rank_study(snapshot)
    if ranking.winner is None or trial not in (None, ranking.winner.number):
        return
    if not ranking.is_settled:
        yield f"its winner is {status_words(ranking, study=snapshot.name)}."
    if ranking.tied:
        noun = "trial" if len(ranking.tied) == 1 else "trials"
        others = ", ".join(map(str, ranking.tied))
        yield f"its winner is statistically indistinguishable from {noun} {others}."


def _format(format: str | None, trainer: str | None) -> str:
    """Return the format that is asked for: that of the trainer, where only that is named.

    Raises:
        InputError: no such trainer, or a format of another one.
    """
    if trainer is None:
        return format or "script"
    if trainer not in TRAINERS:
        raise InputError(f"--for {trainer}: unknown trainer{did_you_mean(trainer, TRAINERS)}")
    own = "script" if trainer == "sweep" else trainer
    if format is None:
        return own
    if (_trainer_of(format) or "sweep") != trainer:
        raise InputError(f"--for {trainer} and --format {format} are of two trainers: keep one")
    return format


def _record(
    snapshot: StudySnapshot, *, format: str, trial: int | None, is_for: bool, is_forced: bool
) -> Record:
    """Return what is to be written: the winner, or the trial that was named; where a trainer was
    named the best that it can do.

    Raises:
        NothingFits: the file would run out of memory in its trainer.
        InputError: no such trial that fits.
    """
    record = record_of(snapshot, number=trial)
    name = _trainer_of(format)
    if name is None or not is_predicted(snapshot):
        return record
    model = ModelSpec.from_json(snapshot.definition.model)
    gpu = match_product(snapshot.definition.target.gpu)
    assert gpu is not None, "its memory is predicted"
    with closing(TracingChildren(outlive=True)) as children:
        predictor = TracingPredictor(
            model,
            cache_dir=paths.cache_directory() / "memory",
            compute_capability=gpu.compute_capability,
            tracer=children,
        )
        try:
            there = InTrainer(snapshot, name, predictor)
            return _checked(there, record, snapshot, is_for and trial is None, is_forced)
        except EnvironmentFault as fault:
            console.note_folded(
                f"{format}: what it needs there is not predicted: {fault}", indent=2
            )
            return record


def _trainer_of(format: str) -> TrainerName | None:
    """Return the trainer of a format; None where it is sweep's own, or a document."""
    for name in TRAINERS:
        if name == format and name != "sweep":
            return name
    return None


def _checked(
    there: InTrainer,
    record: Record,
    snapshot: StudySnapshot,
    is_best_wanted: bool,
    is_forced: bool,
) -> Record:
    """Return a record that fits in its trainer, and say what is predicted of it there."""
    label = there.trainer.label
    config = next(t.config for t in snapshot.records if t.number == record.number)
    unknown = there.why_unknown(config)
    if unknown is not None:
        console.note_folded(f"{label}: not predicted there: {unknown}", indent=2)
        return record
    needs = f"{figures(there.forecast(config))}, predicted"
    is_own = config.trainer == there.name or not is_best_wanted
    if is_own and (is_forced or not there.is_too_large(config)):
        console.note_folded(f"in {label} it needs {needs}", indent=2)
        return record
    best = there.best(config)
    if best is None or not is_best_wanted:
        raise NothingFits(_refusal(there, record, needs, best))
    console.note_folded(f"the best for {label}, {best.words}", indent=2)
    if best.trial is not None:
        return record_of(snapshot, number=best.trial.number)
    definition = snapshot.definition
    return predicted_record(
        snapshot.name,
        best.forecast,
        target=definition.target,
        weights=definition.space.weights,
        dataset=recorded_dataset(snapshot, best.forecast.epoch),
    )


def _refusal(there: InTrainer, record: Record, needs: str, best: Best | None) -> str:
    label = there.trainer.label
    measured = units.gib(record.measurement.peak_allocated_bytes)
    message = (
        f"{record.label}: in {label}, which cannot run it as it was measured ({measured}), the "
        f"file needs {needs}: it runs out of memory. "
    )
    command = f"sweep export {shlex.quote(record.study)} --for {there.name}"
    if best is None:
        message += f"Nothing surely fits there (`sweep plan --for {there.name}`)"
    else:
        message += f"The best that {label} can do of it, {best.words}: `{command}` writes that"
    return f"{message}; --force writes this one all the same"
