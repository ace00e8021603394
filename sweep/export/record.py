"""The record of a trial: a configuration, what was measured of it, and where that comes from.

`sweep export` writes it as JSON, alone or beside a file that runs; `sweep train` and `sweep verify`
read it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    computed_field,
)

from qlora_sweep.reports import format as units
from qlora_sweep.reports import words
from qlora_sweep.reports.answer import status_words
from qlora_sweep.search_spaces.config import SETTINGS, TrialConfig, canonical
from qlora_sweep.search_spaces.dataset_choice import DatasetChoice, DatasetSummary
from qlora_sweep.search_spaces.documents import home_expanded, is_directory, parse_object, read_text
from qlora_sweep.search_spaces.errors import InputError, NothingFits, in_percent, quote
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.gpus import match_product
from qlora_sweep.search_spaces.kinds import ComputeDtype
from qlora_sweep.search_spaces.learning_rates import LearningRate, learning_rate_of
from qlora_sweep.search_spaces.linears import (
    has_adapted_experts,
    has_experts,
    lora_parameters,
    resolve_targets,
)
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec, shipped_models
from qlora_sweep.search_spaces.space import Weights
from qlora_sweep.storage.confirmations import Ratio
from qlora_sweep.storage.definition import StudySnapshot, Target, TargetSpeed
from qlora_sweep.storage.files import WRITTEN_BY
from qlora_sweep.storage.ranking import NoGain, RankedTrial, Ranking, rank_study
from qlora_sweep.storage.records import (
    NOT_SHOWN,
    Count,
    EpochRecord,
    Measurement,
    Verdict,
)
from qlora_sweep.sweep.predict.forecast import Forecast

Trainer = Literal["script", "trl", "axolotl", "llama-factory", "unsloth"]
"""What trains an exported file: transformers' `Trainer` in our script, or a program of others."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class RecordedModel(_Part):
    """A model: its architecture, and where its weights are."""

    name: str
    weights: str | None = None
    """A directory or a hub id; None for a shipped architecture."""
    fingerprint: str | None = None
    source: Literal["shipped", "directory", "hub"] | None = None
    config: Mapping[str, Any] = {}
    """Its ``config.json``."""
    path: str | None = None

    @cached_property
    def spec(self) -> ModelSpec:
        """The model as it was recorded where its files are here, else the one of that name.

        Raises:
            InputError: there is none.
        """
        is_here = self.source == "shipped" or (self.path is not None and Path(self.path).is_dir())
        if self.config and is_here:
            return ModelSpec.from_json(self.model_dump())
        return load_model_spec(self.weights or self.name)

    @property
    def has_experts(self) -> bool:
        """Whether it has experts that are one tensor a layer; no where its config is not known."""
        return bool(self.config) and has_experts(self._as_it_says)

    @property
    def _as_it_says(self) -> ModelSpec:
        return ModelSpec(self.name, "directory", dict(self.config))

    def has_adapted_experts(self, config: TrialConfig) -> bool:
        """Whether a configuration puts adapters on experts; no where the config is not known."""
        return bool(self.config) and has_adapted_experts(config, self._as_it_says)


class RecordedGpu(_Part):
    """The GPU that a study is for, and what stood in for it."""

    name: str
    budget_bytes: PositiveInt
    emulated_on: str | None = None
    recorded: str | None = None

    @property
    def target(self) -> Target:
        """The same as a study's definition has it."""
        return Target(
            gpu=self.name,
            device="cpu" if self.name == "cpu" else "cuda",
            **self.model_dump(exclude={"name"}),
        )


class RecordedMeasurement(Measurement):
    """What was measured; other keys are left out."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    tokens_per_second: PositiveFloat
    peak_allocated_bytes: PositiveInt
    steps_measured: Count
    """None of what is only predicted."""
    final_loss: float | None  # type: ignore[assignment]
    """None of what is only predicted."""


class RecordedDataset(_Part):
    """The dataset that a study trained on, and how it read it."""

    summary: DatasetSummary
    source: str
    """Where it is: an absolute path, or a hub id."""
    eval_fraction: float = Field(ge=0, lt=1)
    """Share of the examples that no training saw."""
    seed: int = Field(ge=0)
    """Of the choice of those."""
    tokenizer: str | None = None
    """The one that was named, a path or a hub id; None for the model's own."""
    epoch: EpochRecord | None = None
    """What one pass over it is to the configuration, and what is cut of it."""

    def column(self, field: str) -> str | None:
        """Return the column of a field of the examples' kind, which has its name where nothing else
        is recorded; None where there is no such column."""
        summary = self.summary
        if field == "text":
            return summary.text_column or field
        if field in summary.columns:
            return summary.columns_read.get(field, field)
        return summary.columns_read.get(field)


class PredictedSpeed(_Part):
    """A predicted speed in supervised tokens/s, and what nine in ten such are between."""

    value: PositiveFloat
    low: PositiveFloat | None = None
    high: PositiveFloat | None = None


class Provenance(_Part):
    """Where a measurement comes from; null where nothing recorded it."""

    study: str
    trial: int
    date: str | None = None
    """When the trial began, UTC, ISO 8601."""
    environment: Mapping[str, Any] = {}
    """`storage.environment.fingerprint` of the machine: GPU, driver, versions, our commit."""
    tokens_per_second_ci95: tuple[float, float] | None = None
    target_tokens_per_second: PredictedSpeed | None = None
    """What is predicted of the GPU that the study is for, where another one measured: what decided
    in the study."""
    confirmed: bool = False
    role: str = ""
    """What the trial is in its study, in words."""
    certainty: str = ""
    """Whether it was measured again, and what to type where it was not."""
    baseline_trial: int | None = None
    baseline_tokens_per_second: float | None = None
    gain: Ratio | None = None
    measured_gain: Ratio | None = None
    """The same on the GPU that measured, where the gain is predicted."""
    no_gain: NoGain | None = None
    """Why no gain over it is stated."""


class Record(_Part):
    """The winner of a study or another trial of it, every default of its configuration written out.

    What `sweep best --json` prints is one too, without provenance.
    """

    format: str = "json"
    """Of the file that it is beside; ``json`` for one that stands alone."""
    unsupported: tuple[str, ...] = ()
    """What that file cannot do of what was measured, in words."""
    study: str
    number: int
    model: RecordedModel
    weights: Weights = "random"
    """Those that were measured."""
    gpu: RecordedGpu
    config: TrialConfig
    measurement: RecordedMeasurement
    confirmed: bool = False
    """Whether it was measured again after the search."""
    is_predicted: bool = False
    """Whether its measurement is a prediction, as nothing was run."""
    texts: RecordedDataset | None = None
    """None where full random sequences were trained on."""
    provenance: Provenance | None = None

    @computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def learning_rate(self) -> LearningRate:
        """That of the configuration on this model, with its range and what it rests on."""
        return learning_rate_of(self.config, self.model.config)

    @property
    def has_named_experts(self) -> bool:
        """Whether adapters are on experts whose weights are named."""
        is_named = self.config.target_modules != "all-linear"
        return is_named and self.model.has_adapted_experts(self.config)

    @property
    def output_dir(self) -> str:
        """A directory for what a training leaves: no other export has it."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", self.study)[:60].strip("-.")
        if plain != self.study:
            # Two names may be equal without the characters that a file's name cannot have.
            digest = hashlib.sha256(self.study.encode("utf-8", "surrogateescape")).hexdigest()
            plain = f"{plain or 'study'}-{digest[:8]}"
        return f"outputs/{plain}-trial{self.number}-{self.format}"

    @property
    def kind(self) -> Literal["training", "script", "trl"]:
        """What runs it: `sweep train`, the script beside the record, TRL on the file beside it."""
        kinds: dict[str, Literal["script", "trl"]] = {"script": "script", "trl": "trl"}
        return kinds.get(self.format, "training")

    @property
    def basis(self) -> Literal["measured", "predicted"]:
        """How its speed and memory are known, in a word."""
        return "predicted" if self.is_predicted else "measured"

    @property
    def label(self) -> str:
        """The trial in words: ``trial 12 of study 'a10'``."""
        return f"trial {self.number} of study {quote(self.study)}"

    @property
    def device(self) -> str:
        """What it was measured on: the product's name, or ``CPU``."""
        if self.gpu.name == "cpu":
            return "CPU"
        return self.environment.get("gpu") or self.gpu.emulated_on or self.gpu.name

    @property
    def environment(self) -> Mapping[str, Any]:
        """Fingerprint of the machine that measured; empty where nothing says."""
        if self.provenance is None:
            return {}
        return self.provenance.environment

    @property
    def dataset_kind(self) -> str | None:
        """What the dataset's examples are; None for full random sequences."""
        if self.texts is None:
            return None
        return self.texts.summary.kind

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return int(self.model.config["num_hidden_layers"])

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Decoder layers whose activations are recomputed, in order."""
        return tuple(sorted(self.config.checkpointed_layers(self.layers)))

    @property
    def dtype(self) -> ComputeDtype:
        """Of matrix products, where none is in 8 bits; beside 8-bit ones, of all else."""
        if not self.config.is_8bit_compute:
            return self.config.compute_dtype
        target = match_product(self.gpu.name)
        if target is None:
            return "bf16"
        return target.half

    @property
    def target_modules(self) -> tuple[str, ...] | None:
        """Names of the layers with an adapter; None for every linear layer of a model type whose
        layers' names are not known."""
        names = self.config.target_modules
        if isinstance(names, str):
            return None
        return names

    def to_json(self) -> str:
        """Return it as JSON; ASCII alone, so that any name can be in it."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"


# From a study


def record_of(snapshot: StudySnapshot, *, number: int | None = None) -> Record:
    """Return the record of a study's winner, or of the trial of that number.

    Raises:
        NothingFits: nothing that was tried was measured to fit.
        InputError: there is no trial of that number, or it was not measured to fit.
    """
    definition = snapshot.definition
    ranking = rank_study(snapshot)
    best = ranking.winner
    trial = best
    if number is not None:
        trial = _trial(snapshot, ranking, number)
    if trial is None:
        raise NothingFits(
            f"study {quote(snapshot.name)} has nothing to export: no trial of its space was "
            "measured to fit"
        )
    measured = trial.measurement
    spec = ModelSpec.from_json(definition.model)
    if best is not None and trial.number == best.number:
        is_confirmed = ranking.is_confirmed
        role = words.best_by(definition.space.objectives, is_confirmed=is_confirmed)
        certainty = status_words(ranking, study=snapshot.name)
    else:
        is_confirmed = ranking.is_measured_again(trial)
        role = "One of the configurations that fit, not the best"
        certainty = "measured again"
        if not is_confirmed:
            certainty = "not measured again"
    gain = ranking.gain_of(trial)
    baseline_trial = None
    baseline_speed = None
    baseline = ranking.reference_for(trial.config) or ranking.baseline
    if baseline is not None:
        baseline_trial = baseline.number
        baseline_speed = baseline.measurement.tokens_per_second
    return Record(
        study=snapshot.name,
        number=trial.number,
        model=_recorded_model(spec, fingerprint=definition.model_fingerprint),
        weights=definition.space.weights,
        gpu=_recorded_gpu(definition.target),
        config=_written_out(trial.config, spec),
        measurement=RecordedMeasurement(**measured.model_dump(exclude=NOT_SHOWN)),
        confirmed=is_confirmed,
        texts=recorded_dataset(snapshot, trial.epoch),
        provenance=Provenance(
            study=snapshot.name,
            trial=trial.number,
            date=trial.record.started_at,
            environment=snapshot.environment,
            tokens_per_second_ci95=measured.speed_interval,
            target_tokens_per_second=_predicted(ranking.target_speed(trial)),
            confirmed=is_confirmed,
            role=role,
            certainty=certainty,
            baseline_trial=baseline_trial,
            baseline_tokens_per_second=baseline_speed,
            gain=gain.ratio,
            measured_gain=gain.measured,
            no_gain=gain.reason,
        ),
    )


def predicted_record(
    name: str,
    forecast: Forecast,
    *,
    target: Target,
    weights: Weights = "random",
    dataset: RecordedDataset | None = None,
) -> Record:
    """Return the record of a configuration that nothing ran.

    Args:
        name: the study's in whose place it is, or what stands in place of one.
        forecast: what is predicted of the configuration.
        target: the GPU, and what a training may take.
        weights: that it trains on.
        dataset: the dataset; None for random tokens.

    Raises:
        InputError: neither speed nor memory of it is predicted.
    """
    config = forecast.config
    model = forecast.forecaster.model
    memory = forecast.memory
    step_seconds = forecast.step_seconds
    rate = forecast.tokens_per_second
    if memory is None or step_seconds is None or rate is None:
        raise InputError(f"nothing is predicted of it: {'; '.join(forecast.notes)}")
    return Record(
        study=name,
        number=0,
        model=_recorded_model(model, fingerprint=model.fingerprint),
        weights=weights,
        gpu=_recorded_gpu(target),
        texts=dataset,
        config=_written_out(config, model),
        measurement=RecordedMeasurement(
            tokens_per_second=rate,
            samples_per_second=config.samples_per_step / step_seconds,
            step_seconds=step_seconds,
            step_seconds_ci95=None,
            steps_measured=0,
            steps_warmup=0,
            peak_allocated_bytes=memory.peak_allocated_bytes,
            trainable_parameters=lora_parameters(config, model) or 0,
            final_loss=None,
            setup_seconds=0.0,
            measured_seconds=0.0,
        ),
        is_predicted=True,
    )


def _recorded_model(spec: ModelSpec, *, fingerprint: str | None) -> RecordedModel:
    weights = None
    if spec.source == "directory" and spec.path:
        weights = str(spec.path)
    elif spec.source != "shipped":
        weights = spec.name
    return RecordedModel(**spec.to_json(), weights=weights, fingerprint=fingerprint)


def _recorded_gpu(target: Target) -> RecordedGpu:
    return RecordedGpu(name=target.gpu, **target.model_dump())


def _written_out(config: TrialConfig, spec: ModelSpec) -> TrialConfig:
    """Return a configuration with every default, and the modules that have adapters by name."""
    names = resolve_targets(config, spec)
    targets: str | tuple[str, ...] = tuple(sorted(names))
    if "all-linear" in names:
        targets = "all-linear"
    return canonical(config).changed(target_modules=targets)


def _predicted(speed: TargetSpeed | None) -> PredictedSpeed | None:
    if speed is None or speed.basis != "predicted":
        return None
    return PredictedSpeed(value=speed.tokens_per_second, low=speed.low, high=speed.high)


def _trial(snapshot: StudySnapshot, ranking: Ranking, number: int) -> RankedTrial:
    """Return a trial as it is ranked: what was measured again with the speed of those runs."""
    if number not in {record.number for record in snapshot.records}:
        raise InputError(
            f"study {quote(snapshot.name)} has no trial {number}; `sweep report` shows all of them"
        )
    trial = ranking.trials.get(number)
    if trial is None or trial.record.verdict is not Verdict.FITS:
        raise InputError(
            f"trial {number} of study {quote(snapshot.name)} was not measured to fit: name one "
            "that was"
        )
    return trial


def recorded_dataset(snapshot: StudySnapshot, epoch: EpochRecord | None) -> RecordedDataset | None:
    """Return a study's dataset with what a pass over it is; None where it has none."""
    summary = snapshot.definition.texts
    space = snapshot.definition.space
    if summary is None:
        return None
    choice = space.data or DatasetChoice(texts=summary.source)
    tokenizer = choice.tokenizer
    if tokenizer is not None and not home_expanded(tokenizer).is_dir():
        # Other trainers do not know the names of shipped models.
        paths = {spec.name: spec.tokenizer_path for spec in shipped_models()}
        tokenizer = str(paths.get(tokenizer) or tokenizer)
    return RecordedDataset(
        summary=summary,
        source=choice.texts,
        eval_fraction=float(choice.eval_fraction),
        seed=space.seed,
        tokenizer=tokenizer,
        epoch=epoch,
    )


# From a file


def beside(path: Path) -> Path:
    """Return where the record of an exported file is: beside ``train.py``, ``train.py.json``."""
    return path.with_name(f"{path.name}.json")


def read_record(typed: str) -> tuple[Record, Path]:
    """Return the record of an exported file, or of the one in a directory, and that file.

    Raises:
        InputError: it has none, or one that is not whole.
    """
    path = Path(typed)
    if is_directory(path, label=typed):
        exports = [file for file in sorted(path.iterdir()) if beside(file).is_file()]
        if len(exports) != 1:
            count = "no exports with a record in it"
            if exports:
                names = ", ".join(file.name for file in exports)
                count = f"{len(exports)} exports with a record in it: {names}"
            raise InputError(f"{typed}: {count}; name the file that `sweep export` wrote")
        path = exports[0]
    record_path = beside(path)
    if record_path.is_file():
        values = _document(record_path, label=str(record_path))
        return parse_record(values, where=typed), path.resolve()
    values = _document(path, label=typed)
    if not {"config", "measurement"} <= values.keys():
        raise InputError(
            f"{typed}: no record of what was measured in it or beside it ({record_path.name}): "
            "name a study, or a file that `sweep export --format script`, trl, json or yaml wrote"
        )
    record = replaced(parse_record(values, where=typed), format="json")
    return record, path.resolve()


def _document(path: Path, *, label: str) -> dict[str, Any]:
    """Return the values of a JSON or YAML file, whose name may have no ending; none of others."""
    text = read_text(path, label=label)
    if path.suffix == ".json" or text.startswith("{"):
        return parse_object(text, where=label)
    if path.suffix not in (".yaml", ".yml", ""):
        return {}
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{label}: no YAML: {str(error).splitlines()[0]}") from error
    if isinstance(values, dict):
        return values
    return {}


def parse_record(values: dict[str, Any], *, where: str) -> Record:
    """Return the record that a document holds, an export's or that of `sweep best --json`.

    Raises:
        InputError: names the key that is missing or cannot be.
    """
    fields = dict(values)
    if isinstance(values.get("best"), dict):
        fields |= values["best"]
    if isinstance(values.get("model"), str):
        fields["model"] = {"name": values["model"]}
    try:
        record = Record.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"]))
        raise InputError(
            f"{where}: the record in it is not whole ({key}: {fault['msg']}): export it again"
        ) from error
    if record.format not in ("json", "yaml", "script", "trl"):
        raise InputError(f"{where}: format {quote(record.format)} has no record: export it again")
    return record


# In words


def facts(record: Record) -> tuple[str, ...]:
    """Return what was measured, of what and on what, a sentence or two each; of what is only
    predicted, that."""
    if record.is_predicted:
        return _predicted_facts(record)
    origin = record.provenance
    assert origin is not None, "a study's record has one"
    environment = record.environment
    versions = dict(environment.get("versions") or {})
    our_version = versions.pop("qlora-sweep", None) or "of no known version"
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    quantization = SETTINGS["quantization"].phrase(record.config.quantization)
    compute = SETTINGS["compute_dtype"].phrase(record.config.compute_dtype)
    device = record.device
    driver = f"driver {environment.get('driver') or 'not recorded'}"
    if device == "CPU":
        device = "a CPU"
        driver = "no GPU driver"
    begun = "At a time that is not recorded"
    if origin.date:
        begun = f"Begun {origin.date}"
    return (
        f"{WRITTEN_BY}.",
        f"{origin.role}, of study {quote(record.study)}: trial {record.number}, "
        f"{origin.certainty}.",
        f"{predicted_words(record)}{figures(record.measurement)}",
        words.emulation_note(record.gpu.target) or f"Measured on {device}.",
        f"{begun}, by qlora-sweep {our_version} (commit "
        f"{environment.get('commit') or 'not recorded'}), with {driver}.",
        gain_words(record),
        f"Model: {record.model.name}, {quantization}, {compute}. "
        f"Libraries: {libraries or 'not recorded'}.",
        examples_words(record),
        f"Learning rate: {record.learning_rate.words}.",
    )


def _predicted_facts(record: Record) -> tuple[str, ...]:
    measured = record.measurement
    return (
        f"{WRITTEN_BY}.",
        f"Predicted, and not measured: {units.rate(measured.tokens_per_second)} tokens/s and "
        f"{units.gib(measured.peak_allocated_bytes)} allocated on {record.gpu.name} (budget "
        f"{units.gib(record.gpu.budget_bytes)}).",
        f"Model: {record.model.name}, {record.config.quantization} base, "
        f"{record.config.compute_dtype} compute.",
        examples_words(record),
        f"Learning rate: {record.learning_rate.words}.",
    )


def predicted_words(record: Record) -> str:
    """Return what is predicted of the study's GPU, which comes before what another one measured;
    empty where it measured itself."""
    if record.provenance is None or record.provenance.target_tokens_per_second is None:
        return ""
    speed = record.provenance.target_tokens_per_second
    rate = f"{units.rate(speed.value)} tokens/s"
    if speed.low is not None and speed.high is not None:
        rate += f" ({units.rate_interval((speed.low, speed.high))})"
    gpu = record.gpu
    return f"{rate} predicted on {gpu.name}. Measured on {gpu.emulated_on}: "


def figures(measured: Measurement) -> str:
    """Return what was measured, in a sentence or two."""
    peak = f"{units.gib(measured.peak_allocated_bytes)} allocated"
    if measured.peak_reserved_bytes is not None:
        peak += f", {units.gib(measured.peak_reserved_bytes)} reserved"
    said = (
        f"{units.rate(measured.tokens_per_second)} tokens/s ({words.interval_words(measured)}) at "
        f"the median step of {units.step_time(measured.step_seconds)}, peak {peak}, "
        f"{units.count(measured.trainable_parameters)} trainable parameters."
    )
    if measured.flags:
        said += f" Flags: {', '.join(measured.flags)}."
    if measured.is_noisy:
        said += " It may be more or less: the measurement is noisy."
    return said


def gain_words(record: Record) -> str:
    """Return how the trial compares with its study's baseline, as a sentence."""
    origin = record.provenance
    if origin is None or origin.baseline_trial is None:
        return "Baseline: none was measured beside it, so no gain is stated."
    if origin.baseline_trial == record.number:
        return "Baseline: this trial itself, so there is no gain to state."
    gained = f"not stated: {words.why_no_gain(origin.no_gain, 'it')}"
    if origin.gain is not None:
        gained = words.gain(origin.gain)
    if origin.measured_gain is not None:
        gained = f"{gained}, measured {words.gain(origin.measured_gain)}"
    return (
        f"Baseline: trial {origin.baseline_trial}, "
        f"{units.rate(origin.baseline_tokens_per_second)} tokens/s; gain {gained}."
    )


def examples_words(record: Record) -> str:
    """Return what was trained on, as a sentence."""
    if record.texts is None:
        tokens = record.config.seq_len
        return (
            f"Examples: random tokens, each sequence full ({tokens} tokens). Longer examples of a "
            "dataset are cut there: `sweep data` says how much that is."
        )
    dataset = record.texts
    summary = dataset.summary
    loss = "loss on every token"
    if summary.completions_only:
        loss = "loss on completions only"
    said = (
        f"Dataset: {quote(dataset.source)} ({summary.kind}, {loss}; fingerprint "
        f"{summary.fingerprint}), {in_percent(dataset.eval_fraction)} of the examples held out"
    )
    if dataset.epoch is not None:
        said += f"; {words.cut_in_words(dataset.epoch, record.config)}"
    return f"{said}."
