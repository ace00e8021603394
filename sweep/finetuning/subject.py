"""What a training is of: the trial of a study, a configuration in a file, or the recipe on a
shipped model, each with what was measured of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.config import CONFIG_KEYS, TrialConfig, parse_config
from search_spaces.documents import exists, home_expanded, read_json
from search_spaces.errors import InputError, NothingFits, did_you_mean, quote
from search_spaces.models import ModelSpec, load_model_spec, shipped_models
from storage.definition import StudyDefinition, StudySnapshot
from storage.ranking import measured_of, rank_study
from storage.records import TrialRecord, Verdict
from sweep.export.record import parse_record
from sweep.finetuning.wire import Promise

ReadStudy = Callable[[str], StudySnapshot]


@dataclass(frozen=True)
class Subject:
    """A configuration of a model, and where it is from."""

    config: TrialConfig
    model: ModelSpec
    words: str
    """What it is: ``the winner of study 'a10', trial 12``."""
    promise: Promise | None = None
    definition: StudyDefinition | None = None
    """Of the study, which says on what device and on what texts it was measured."""
    study: str | None = None
    number: int | None = None


def subject_of(
    name: str, *, number: int | None, model: str | None, read_study: ReadStudy
) -> Subject:
    """Return what a name says is to be trained.

    Args:
        name: a file with a configuration, a study, or a shipped model.
        number: of another trial of the study than the winner.
        model: that is trained instead of the one it was measured on.
        read_study: reads a study by its name.

    Raises:
        InputError: no such file, study or trial, or it is no configuration.
        NothingFits: nothing of the study was measured to fit.
    """
    path = home_expanded(name)
    if path.suffix == ".json" or "/" in name or exists(path, label=name):
        if number is not None:
            raise InputError("--trial is of a study; a configuration has none: leave it out")
        return _of_file(path, label=name, model=model)
    try:
        snapshot = read_study(name)
    except InputError as error:
        if number is None and name in {spec.name for spec in shipped_models()}:
            return _of_shipped(name, model=model)
        raise _unknown(name, error) from error
    return _of_study(snapshot, number=number, model=model)


def _unknown(name: str, error: InputError) -> InputError:
    shipped = [spec.name for spec in shipped_models()]
    hint = did_you_mean(name, shipped)
    meant = f" (or a shipped model{hint})" if hint.startswith("; did") else ""
    return InputError(f"{error}; a configuration is named by its file, x.json{meant}")


def _of_file(path: Path, *, label: str, model: str | None) -> Subject:
    """Return the configuration of a file: alone, or as `sweep export --format json` writes it."""
    values = read_json(path, label=label)
    inner = values.get("config")
    # What `sweep best --json` prints has it one level down.
    best = values.get("best")
    if inner is None and isinstance(best, dict):
        values, inner = {**values, **best}, best.get("config")
    config = parse_config(values if inner is None else _object(inner, label), where=label)
    named = values.get("model") if inner is not None else None
    name = model or (_name_of(named) if named is not None else None)
    if name is None:
        raise InputError(f"{label} says no model: name one with --model")
    return Subject(
        config=config,
        model=load_model_spec(name),
        words=f"the configuration of {label}",
        promise=_promise_of_file(values, label) if inner is not None and model is None else None,
    )


def _object(value: Any, label: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{label}: config must be an object, got {quote(value)}")
    return value


def _name_of(model: Any) -> str | None:
    """Return the model that a document names: where its weights are, or what it is called."""
    if isinstance(model, dict):
        model = model.get("weights") or model.get("name")
    return model if isinstance(model, str) and model else None


def _promise_of_file(values: dict[str, Any], label: str) -> Promise | None:
    """Return what an export says was measured; None where it is a configuration alone."""
    if "measurement" not in values:
        return None
    record = parse_record(values, where=label)
    return Promise(
        tokens_per_second=record.measurement.tokens_per_second,
        peak_allocated_bytes=record.measurement.peak_allocated_bytes,
        source=f"{record.label}, by {label}",
        device=record.device,
        texts=None if record.texts is None else record.texts.summary.fingerprint,
        flags=record.measurement.flags,
        is_confirmed=record.confirmed,
        environment=record.environment,
    )


def _of_shipped(name: str, *, model: str | None) -> Subject:
    return Subject(
        config=TrialConfig(),
        model=load_model_spec(model or name),
        words=f"the standard recipe on model '{model or name}' (no study '{name}')",
    )


def _of_study(snapshot: StudySnapshot, *, number: int | None, model: str | None) -> Subject:
    ranking = rank_study(snapshot)
    winner = ranking.winner
    record = winner if number is None else _trial(snapshot, number)
    if record is None:
        raise NothingFits(
            f"study {quote(snapshot.name)} has nothing to train: no trial of its space was "
            "measured to fit"
        )
    # What was measured again has the speed of those runs.
    ranked = {known.number: known for known in ranking.records}
    record = ranked.get(record.number, record)
    stored = ModelSpec.from_json(snapshot.definition.model)
    chosen = stored if model is None else load_model_spec(model)
    is_best = winner is not None and record.number == winner.number
    role = "the winner" if is_best else "a trial"
    same = chosen.fingerprint == stored.fingerprint
    return Subject(
        config=record.config,
        model=chosen,
        words=f"{role} of study {quote(snapshot.name)}, trial {record.number}",
        promise=_promise(
            snapshot,
            record,
            is_confirmed=ranking.is_confirmed if is_best else ranking.is_measured_again(record),
        )
        if same
        else None,
        definition=snapshot.definition,
        study=snapshot.name,
        number=record.number,
    )


def _trial(snapshot: StudySnapshot, number: int) -> TrialRecord:
    found = next((r for r in snapshot.records if r.number == number), None)
    study = quote(snapshot.name)
    if found is None:
        raise InputError(f"study {study} has no trial {number}; `sweep report` shows all of them")
    if found.verdict is not Verdict.FITS or found.measurement is None:
        raise InputError(
            f"trial {number} of study {study} was not measured to fit ({found.verdict}): name one "
            "that was"
        )
    return found


def _promise(snapshot: StudySnapshot, record: TrialRecord, *, is_confirmed: bool) -> Promise:
    measured = measured_of(record)
    target, texts = snapshot.definition.target, snapshot.definition.texts
    device = snapshot.environment.get("gpu") or target.emulated_on or target.gpu
    return Promise(
        tokens_per_second=measured.tokens_per_second,
        peak_allocated_bytes=measured.peak_allocated_bytes,
        source=f"trial {record.number} of study {quote(snapshot.name)}",
        device="CPU" if target.device == "cpu" else str(device),
        texts=None if texts is None else texts.fingerprint,
        flags=measured.flags,
        is_confirmed=is_confirmed,
        environment=snapshot.environment,
    )


def with_changes(config: TrialConfig, **changes: Any) -> TrialConfig:
    """Return a configuration with what was typed in place of its own, checked as any other is.

    Raises:
        InputError: a value that cannot be.
    """
    given = {key: value for key, value in changes.items() if value is not None}
    assert set(given) <= set(CONFIG_KEYS)
    return parse_config({**config.model_dump(), **given}, where="options") if given else config
