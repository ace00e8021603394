"""What a training is of: the trial of a study, a configuration in a file, or the baseline on a
shipped model, each with the record of what was measured of it; and what would need less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.documents import exists, home_expanded, read_json
from qlora_sweep.search_spaces.errors import InputError, NothingFits, did_you_mean, quote
from qlora_sweep.search_spaces.learning_rates import LearningRate, learning_rate_of
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec, shipped_models
from qlora_sweep.search_spaces.rules import own_settings
from qlora_sweep.storage.definition import StudyDefinition, StudySnapshot
from qlora_sweep.storage.ranking import rank_study
from qlora_sweep.sweep.export.record import Record, parse_record, record_of
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.predict.memory.prediction import Fit

ReadStudy = Callable[[str], StudySnapshot]


@dataclass(frozen=True)
class Subject:
    """A configuration of a model, and where it is from."""

    config: TrialConfig
    model: ModelSpec
    words: str
    """What it is: ``the winner of study 'a10', trial 12``."""
    record: Record | None = None
    """Of this configuration on this model."""
    definition: StudyDefinition | None = None
    """Of the study, which says on what device and on what texts it was measured."""

    @property
    def learning_rate(self) -> LearningRate:
        """That it is trained with."""
        return learning_rate_of(self.config, self.model.config)


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
        return _of_file(name, model=model)
    try:
        snapshot = read_study(name)
    except InputError as error:
        shipped = [spec.name for spec in shipped_models()]
        if number is None and name in shipped:
            words = f"the standard recipe on model '{model or name}' (no study '{name}')"
            return _with_own_settings(TrialConfig(), load_model_spec(model or name), words)
        hint = did_you_mean(name, shipped)
        words = f"{error}; a configuration is named by its file, x.json"
        if hint.startswith("; did"):
            words += f" (or a shipped model{hint})"
        raise InputError(words) from error
    return _of_study(snapshot, number=number, model=model)


def _of_file(name: str, *, model: str | None) -> Subject:
    """Return the configuration of a file: alone, or in a record."""
    values = read_json(home_expanded(name), label=name)
    words = f"the configuration of {name}"
    if "config" in values or "best" in values:
        record = parse_record(values, where=name)
        if model is None:
            return Subject(record.config, record.model.spec, words, record)
        return _with_own_settings(record.config, load_model_spec(model), words)
    config = parse_config(values, where=name)
    if model is None:
        raise InputError(f"{name} says no model: name one with --model")
    return _with_own_settings(config, load_model_spec(model), words, named=values)


def _with_own_settings(
    config: TrialConfig, model: ModelSpec, words: str, *, named: Collection[str] = ()
) -> Subject:
    """Return a configuration that was not written for this model, with the settings that the model
    decides but for those that are named."""
    values = config.model_dump()
    reasons = []
    for key, (value, why) in own_settings(model).items():
        if key not in named and values[key] != value:
            values[key] = value
            reasons.append(why)
    if not reasons:
        return Subject(config, model, words)
    reason = "; ".join(dict.fromkeys(reasons))
    return Subject(parse_config(values, where=words), model, f"{words}; {reason}")


def _of_study(snapshot: StudySnapshot, *, number: int | None, model: str | None) -> Subject:
    winner = rank_study(snapshot).winner
    if number is None and winner is None:
        raise NothingFits(
            f"study {quote(snapshot.name)} has nothing to train: no trial of its space was "
            "measured to fit"
        )
    record = record_of(snapshot, number=number)
    trial = next(trial for trial in snapshot.records if trial.number == record.number)
    stored = ModelSpec.from_json(snapshot.definition.model)
    chosen = stored
    if model is not None:
        chosen = load_model_spec(model)
    role = "a trial"
    if winner is not None and winner.number == record.number:
        role = "the winner"
    words = f"{role} of study {quote(snapshot.name)}, trial {record.number}"
    subject = _with_own_settings(trial.config, chosen, words)
    subject = replace(subject, definition=snapshot.definition)
    if chosen.fingerprint == stored.fingerprint:
        subject = replace(subject, record=record)
    return subject


def with_settings(config: TrialConfig, typed: Mapping[str, Any]) -> TrialConfig:
    """Return a configuration with settings that were typed. Another micro-batch trains the same,
    where it goes into the effective batch; a larger one is a step of its own.

    Raises:
        InputError: they make no configuration, with what is wrong.
    """
    changes = dict(typed)
    if "micro_batch_size" in changes and "effective_batch_size" not in changes:
        size = changes["micro_batch_size"] * config.data_parallel
        changes["effective_batch_size"] = _effective_batch(config, size)
    return parse_config({**config.model_dump(), **changes}, where="options")


def on_devices(config: TrialConfig, devices: int | None) -> TrialConfig:
    """Return a configuration on so many GPUs, which trains the same where its effective batch is a
    multiple of theirs; one without accumulation has none there.

    Raises:
        InputError: an effective batch was chosen that is no multiple.
    """
    if devices is None:
        return config
    effective = _effective_batch(config, config.micro_batch_size * devices)
    changes = {"data_parallel": devices, "effective_batch_size": effective}
    return parse_config({**config.model_dump(), **changes}, where=f"--devices {devices}")


def _effective_batch(config: TrialConfig, size: int) -> int | None:
    """Return the effective batch with which a configuration trains the same in micro-batches of so
    many examples on all GPUs together; None, no accumulation, where they do not go into a step that
    nobody chose."""
    if config.effective_batch_size is None and config.samples_per_step % size:
        return None
    return config.samples_per_step


# What would fit


def candidates(config: TrialConfig) -> Iterator[TrialConfig]:
    """Yield configurations that need less memory, the nearest first.

    Smaller micro-batches train the same, as accumulation makes up for them; so does recomputing
    every layer, more slowly, and what is recomputed from may wait on the host. Shorter sequences
    cut more of the examples, and come last.
    """
    samples = config.samples_per_step
    smaller = []
    for size in range(config.micro_batch_size - 1, 0, -1):
        if samples % (size * config.data_parallel) == 0:
            smaller.append(config.changed(micro_batch_size=size, effective_batch_size=samples))
    yield from smaller
    recomputing = [config.changed(checkpoint_fraction=1.0)]
    recomputing += [one.changed(checkpoint_fraction=1.0) for one in smaller]
    if config.checkpoint_fraction < 1:
        yield from recomputing
    on_host = [one.changed(checkpoint_offload=True) for one in recomputing]
    if not (config.checkpoint_offload and config.checkpoint_fraction == 1):
        yield from on_host
    length = config.seq_len // 2
    while length >= 1:
        yield recomputing[-1].changed(seq_len=length)
        yield on_host[-1].changed(seq_len=length)
        length //= 2


def nearest_that_fits(
    config: TrialConfig, forecaster: Forecaster, *, has_run_out: bool = False
) -> TrialConfig | None:
    """Return the nearest smaller configuration that fits; None where none is predicted to. Without
    a prediction it is the nearest one, which may not fit either.

    Args:
        config: that is too large.
        forecaster: for this model, GPU and dataset.
        has_run_out: whether it ran out of memory, whatever had been predicted of it: as much of
            another would be no better.
    """
    room = forecaster.budget_bytes
    own = forecaster.expect(config).memory
    if has_run_out and own is not None:
        room = min(room, own.peak_allocated_bytes - 1)
    for smaller in filter(forecaster.is_valid, candidates(config)):
        memory = forecaster.expect(smaller).memory
        if memory is None or memory.fits(room) is Fit.YES:
            return smaller
    return None


def next_smaller(
    config: TrialConfig, forecaster: Forecaster, *, has_run_out: bool = False
) -> str | None:
    """Return the same in words: what is to be changed, what it then needs, and what to type."""
    smaller = nearest_that_fits(config, forecaster, has_run_out=has_run_out)
    if smaller is None:
        return None
    memory = forecaster.expect(smaller).memory
    words = "not predicted"
    if memory is not None:
        words = f"predicted: {units.gib(memory.peak_allocated_bytes)}"
    changes = [f"{key} {value}" for key, value in smaller.changes_from(config).items()]
    return f"{', '.join(changes)} ({words}): {as_options(config, smaller)}"


def as_options(config: TrialConfig, other: TrialConfig) -> str:
    """Return the options of `sweep train` that make another configuration of one."""
    changed = other.changes_from(config)
    typed = []
    if "seq_len" in changed:
        typed.append(f"--seq-len {changed['seq_len']}")
    for key in ("micro_batch_size", "checkpoint_fraction"):
        if key in changed:
            typed.append(f"--set {key}={changed[key]:g}")
    if "checkpoint_offload" in changed:
        typed.append("--set checkpoint_offload=true")
    return " ".join(typed)


def refuse_too_large(config: TrialConfig, forecaster: Forecaster) -> None:
    """Refuse what is predicted not to fit, before anything is loaded.

    Raises:
        NothingFits: with the prediction, and the next smaller configuration that fits.
    """
    expected = forecaster.expect(config)
    budget = forecaster.budget_bytes
    if expected.memory is not None and expected.fit is Fit.NO:
        then = "none fits"
        smaller = next_smaller(config, forecaster)
        if smaller is not None:
            then = f"the next smaller one that fits: {smaller}"
        raise NothingFits(
            f"predicted not to fit: it needs {units.gib(expected.memory.needed_bytes(budget))}, "
            f"and the budget is {units.gib(budget)}; {then}"
        )
