"""A training from what was typed to its end: resolved, refused where it cannot be, run in a process
of its own and followed. Nothing here imports torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, assert_never

from qlora_sweep.reports import format as units
from qlora_sweep.reports.words import emulation_note
from qlora_sweep.search_spaces.checkpoints import check_weights
from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.dataset_choice import DatasetChoice
from qlora_sweep.search_spaces.errors import (
    EnvironmentFault,
    InputError,
    Interrupted,
    NothingFits,
    SweepError,
)
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.linears import lora_parameters
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.presets import preset_texts
from qlora_sweep.search_spaces.recurrent import plain_loop
from qlora_sweep.search_spaces.space import SearchSpace, Weights
from qlora_sweep.storage import files, records
from qlora_sweep.storage.definition import Target
from qlora_sweep.sweep.data.choice import (
    ReadDataset,
    dataset_of_study,
    refuse_other_kind,
    typed_dataset,
)
from qlora_sweep.sweep.data.collation import percent
from qlora_sweep.sweep.data.prepared_dataset import DatasetRequest, PreparedDataset
from qlora_sweep.sweep.data.study_epochs import TruncatedDataset
from qlora_sweep.sweep.data.tokenizers import TokenizerFiles, find_tokenizer
from qlora_sweep.sweep.finetuning import checkpoints, output, protocol
from qlora_sweep.sweep.finetuning.planned import Prediction, calibration_of, longer
from qlora_sweep.sweep.finetuning.protocol import TrainingJob, TrainingOutcome, TrainingResult
from qlora_sweep.sweep.finetuning.subject import (
    ReadStudy,
    Subject,
    as_options,
    on_devices,
    refuse_too_large,
    subject_of,
    with_settings,
)
from qlora_sweep.sweep.paths import cache_directory
from qlora_sweep.sweep.predict.building import build_forecaster, shapes_of_dataset
from qlora_sweep.sweep.predict.forecast import Evidence, Forecaster
from qlora_sweep.sweep.predict.memory.predictor import predictor_here
from qlora_sweep.sweep.predict.on_dataset import ShapesOnDataset
from qlora_sweep.sweep.running import child
from qlora_sweep.sweep.running.device_info import ChosenGpu, GpuInfo
from qlora_sweep.sweep.running.supervisor import Deadlines
from qlora_sweep.sweep.running.wire import Ready, StopCommand, Unusable, to_line
from qlora_sweep.sweep.study.targets import ResolvedTarget, resolve_target

EVAL_FRACTION = 0.05
"""Share of the examples that is held out, where neither a study nor a person says."""
_STATE_BYTES_MAX = 8
"""Of the optimizer for each trainable parameter: two numbers, in four bytes each."""
_CPU_GIB = 1.0
"""A target has to say a budget; on a CPU without a study nothing is kept to it."""

Observer = Callable[[protocol.Event], None]


@dataclass(frozen=True)
class TrainingRequest:
    """What was typed; None where nothing was."""

    name: str
    output: Path
    dataset: dict[str, Any]
    """Keys of `DatasetChoice`; None leaves a study's."""
    trial: int | None = None
    devices: int | None = None
    """GPUs that train together; None for as many as it was measured on."""
    model: str | None = None
    weights: Weights | None = None
    max_steps: int | None = None
    epochs: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration, that are to be others than those that were measured."""
    seed: int | None = None
    checkpoint_every: int | None = None
    is_resumed: bool = False


@dataclass(frozen=True)
class PreparedTraining:
    """A training that is resolved and checked, and has not begun."""

    job: TrainingJob
    subject: Subject
    dataset: PreparedDataset
    tokenizer: TokenizerFiles
    forecaster: Forecaster
    gpu: GpuInfo | None
    notes: tuple[str, ...]
    """What a person should know beforehand."""
    prediction: Prediction | None = None
    """What it is predicted to take, where settings were typed that it was not measured with."""

    @property
    def has_budget(self) -> bool:
        """Whether it is kept to a budget: there is none for a CPU without a study."""
        return self.job.budget_bytes is not None

    @cached_property
    def truncation(self) -> TruncatedDataset:
        """What its length cuts off the examples."""
        shapes = self.forecaster.shapes
        assert shapes is not None, "a training is on a dataset"
        return shapes.epochs.truncated_dataset(self.job.config.seq_len)

    @property
    def cut_words(self) -> str:
        """That as a sentence."""
        return f"{self.truncation.words('pair' if self.dataset.summary.are_pairs else 'example')}."

    @property
    def plan_words(self) -> str | None:
        """What it is predicted to take, as a sentence; None where it is as it was measured."""
        if self.prediction is None:
            return None
        words = f"{units.size(self.job.config)} was not measured: {self.prediction.words()}."
        record = self.subject.record
        if record is None:
            return words
        peak = units.gib(record.measurement.peak_allocated_bytes)
        rate = units.rate(record.measurement.tokens_per_second)
        return f"{words} Measured at {units.size(record.config)}: {peak}, {rate} tokens/s."

    def ways_out(self) -> str:
        """Return what to do where the length cuts much of the dataset: a study on it, or a longer
        length, with what that is predicted to take."""
        ways = []
        if not self._is_measured_on_dataset():
            ways.append(f"`{self._study_command()}` measures at the dataset's own lengths")
        alternative = longer(
            self.job.config,
            self.forecaster,
            max_positions=self.subject.model.max_positions,
            has_budget=self.has_budget,
        )
        if alternative is None:
            ways.append("no longer length fits here")
        else:
            typed = as_options(self.job.config, alternative.config)
            if not alternative.cuts_little:
                typed = f"{typed} --yes"
            share = percent(alternative.truncation.supervised_share)
            way = f"`{typed}` cuts {share}: {alternative.prediction.words()}"
            if not alternative.cuts_little:
                way = f"the longest that fits, {way}"
            ways.append(way)
        return "; or ".join(ways)

    def _is_measured_on_dataset(self) -> bool:
        record = self.subject.record
        if record is None or record.texts is None:
            return False
        return record.texts.summary.fingerprint == self.dataset.summary.fingerprint

    def _study_command(self) -> str:
        """Return what makes a study on the dataset."""
        definition = self.subject.definition
        source = self.dataset.summary.source
        space = "SPACE"
        if definition is not None and definition.space.name in preset_texts():
            space = definition.space.name
        trainer = self.job.config.trainer
        words = ["sweep", "run", space, "--model", self.subject.model.name, "--data", source]
        if trainer != "sweep":
            words += ["--for", trainer]
        return shlex.join(words)

    @property
    def run(self) -> dict[str, Any]:
        """What must stay the same for it to be resumed."""
        keys = {"config", "weights", "eval_fraction", "epochs", "max_steps", "seed", "device"}
        spec = self.subject.model
        return {
            **self.job.model_dump(mode="json", include=keys),
            "model": {"name": spec.name, "fingerprint": spec.fingerprint},
            "texts": {"fingerprint": self.dataset.summary.fingerprint},
        }


def prepare_training(
    request: TrainingRequest,
    *,
    read_study: ReadStudy,
    read_dataset: ReadDataset,
    read_gpus: Callable[[], Sequence[GpuInfo]],
    warn: Callable[[str], None],
) -> PreparedTraining:
    """Resolve what is to be trained, and refuse what cannot be.

    Args:
        request: what was typed.
        read_study: reads a study by its name.
        read_dataset: prepares a dataset.
        read_gpus: reads the GPUs that are here, the first of them those that train.
        warn: told what a person should know of predictions.

    Raises:
        InputError: something that was typed or named is not right.
        NothingFits: it is predicted not to fit.
        EnvironmentFault: the GPU or the network is not to be had.
    """
    subject = subject_of(
        request.name, number=request.trial, model=request.model, read_study=read_study
    )
    measured = subject.config
    typed = with_settings(measured, request.settings)
    changes = canonical(typed).changes_from(canonical(measured))
    is_planned = bool(changes.keys() - {"learning_rate"})
    subject = replace(subject, config=on_devices(typed, request.devices))
    weights = _weights(request.weights, subject.model)
    if not request.is_resumed:
        output.refuse_taken(request.output)
    resolved, present = _device_of(subject, read_gpus(), devices=request.devices)
    _refuse_untrainable(subject, resolved)
    choice, dataset = _dataset_of(request, subject, read_dataset)
    refuse_other_kind(subject.config.method, dataset)
    job = _job(
        request,
        subject,
        weights=weights,
        dataset=dataset,
        eval_fraction=choice.eval_fraction,
        target=resolved.target,
        present=present,
    )
    gpu = next(iter(present), None)
    tokenizer = find_tokenizer(choice.tokenizer, subject.model)
    shapes = shapes_of_dataset(dataset, choice, seed=job.seed)
    forecaster = _forecaster(subject, resolved, dataset=dataset, shapes=shapes, gpu=gpu, warn=warn)
    notes = _notes(subject, measured, resolved.target, job)
    prepared = PreparedTraining(job, subject, dataset, tokenizer, forecaster, gpu, notes)
    _refuse_untrainable_dataset(prepared)
    if request.is_resumed:
        output.refuse_another(request.output, prepared.run)
    elif prepared.has_budget and (is_planned or present):
        # What ran in a study on this CPU fits; to predict that takes seconds.
        refuse_too_large(subject.config, forecaster)
    if not is_planned:
        return prepared
    predicted = Prediction.of(subject.config, forecaster, has_budget=prepared.has_budget)
    return replace(prepared, prediction=predicted)


def _device_of(
    subject: Subject, present: Sequence[GpuInfo], *, devices: int | None
) -> tuple[ResolvedTarget, Sequence[GpuInfo]]:
    """Return the device that a subject is trained on, and its GPUs that are here: none for a CPU.

    Args:
        subject: with the configuration that is trained.
        present: the GPUs of this machine.
        devices: how many were typed; None for as many as it was measured on.

    Raises:
        EnvironmentFault: a study's GPU, or one as large, is not here.
        InputError: a budget that the GPU has not, or more GPUs than are here.
    """
    resolved = _resolved(subject, next(iter(present), None))
    if not resolved.target.is_on_gpu:
        if devices is not None:
            raise InputError(f"--devices: {subject.words} is for the CPU")
        return resolved, ()
    if subject.config.data_parallel > len(present):
        raise InputError(
            f"{subject.words} trains on {subject.config.data_parallel} GPUs together "
            f"(data_parallel), and this machine has {units.plural(len(present), 'GPU')}: --devices "
            "says on how many instead"
        )
    return resolved, present


def _job(
    request: TrainingRequest,
    subject: Subject,
    *,
    weights: Weights,
    dataset: PreparedDataset,
    eval_fraction: float,
    target: Target,
    present: Sequence[GpuInfo],
) -> TrainingJob:
    """Return a training, whole: on the GPUs that are here, or on the CPU."""
    config = subject.config
    study = subject.definition
    seed = request.seed
    if seed is None:
        seed = 0 if study is None else study.space.seed
    budget_bytes: int | None = target.budget_bytes
    if not present and study is None:
        # A CPU without a study.
        budget_bytes = None
    return TrainingJob(
        # With the number, which a resumed training has to have again.
        config=config.changed(learning_rate=subject.learning_rate.value),
        model=subject.model.to_json(),
        weights=weights,
        dataset=str(dataset.directory.absolute()),
        eval_fraction=eval_fraction,
        epochs=request.epochs or 1.0,
        max_steps=request.max_steps,
        seed=seed,
        device=target.device,
        gpus=_shown(present, count=config.data_parallel),
        budget_bytes=budget_bytes,
        output=str(request.output.absolute()),
        checkpoint_steps=request.checkpoint_every,
    )


def _refuse_untrainable_dataset(prepared: PreparedTraining) -> None:
    """Raise `InputError` where a configuration cannot train on the dataset, as where no
    micro-batch is full."""
    violation = prepared.forecaster.violation(prepared.subject.config)
    if violation is None:
        return
    words = f"{prepared.dataset.summary.source}: {violation.reason}"
    if prepared.truncation.is_much:
        words = f"{words}; {prepared.ways_out()}"
    raise InputError(words)


def _notes(
    subject: Subject, measured: TrialConfig, target: Target, job: TrainingJob
) -> tuple[str, ...]:
    """Return what a person should know before a subject is trained.

    Args:
        subject: with the configuration that is trained.
        measured: the configuration before settings and GPUs were typed.
        target: what it was measured for.
        job: the training.
    """
    config = subject.config
    is_without_gpu = job.budget_bytes is None
    notes = [f"Learning rate {subject.learning_rate.words}."]
    if config.samples_per_step != measured.samples_per_step:
        where = f"{units.size(config)} on {units.plural(config.data_parallel, 'GPU')}"
        notes.append(
            f"With {where} an optimizer step is of {config.samples_per_step} examples, not of "
            f"{measured.samples_per_step}."
        )
    if job.weights == "random":
        notes.append(
            f"The weights of model '{subject.model.name}' are random: this shows how a training "
            "runs, and its adapter is of no other use."
        )
    emulation = emulation_note(target)
    if emulation is not None:
        notes.append(emulation)
    if is_without_gpu:
        notes.append("No GPU is here: this trains on the CPU.")
    looping = plain_loop(subject.model, is_on_gpu=target.is_on_gpu and not is_without_gpu)
    if looping is not None:
        notes.insert(0, f"{units.capitalized(looping)}.")
    return tuple(notes)


def _forecaster(
    subject: Subject,
    resolved: ResolvedTarget,
    *,
    dataset: PreparedDataset,
    shapes: ShapesOnDataset,
    gpu: GpuInfo | None,
    warn: Callable[[str], None],
) -> Forecaster:
    """Return what predicts of the model on the device and the dataset; ``gpu`` is the one that is
    here, None on a CPU."""
    model = subject.model
    product = None
    if gpu is not None:
        product = gpu.product
    predictor = predictor_here(
        model,
        is_on_gpu=gpu is not None,
        cache_dir=cache_directory() / "memory",
        compute_capability=resolved.host_capability,
    )
    calibration = calibration_of(subject.record, product, dataset=dataset, shapes=shapes)
    return build_forecaster(
        model,
        resolved.target,
        shapes=shapes,
        predictor=predictor,
        violation=partial(resolved.violation, model=model, has_dataset=True),
        evidence=Evidence(calibration=calibration),
        is_cut_up=gpu is not None,
        warn=warn,
    )


def _shown(present: Sequence[GpuInfo], *, count: int) -> tuple[str, ...]:
    """Return the GPUs that a training is to see, as Trainer takes all; none where one is here."""
    if len(present) <= 1:
        return ()
    return tuple(ChosenGpu(at, gpu).cuda_name for at, gpu in enumerate(present[:count]))


def _refuse_untrainable(subject: Subject, resolved: ResolvedTarget) -> None:
    """Refuse what does not train here, whatever it is trained on."""
    broken = resolved.violation(subject.config, model=subject.model, has_dataset=True)
    if broken is not None:
        raise InputError(f"{subject.words} cannot be trained here: {broken.reason}")
    if subject.config.is_sharded:
        raise InputError(
            f"{subject.words} has sharding {subject.config.sharding}, and sweep train holds the "
            "whole model on each GPU: `sweep export --format script` writes what trains it"
        )


def _dataset_of(
    request: TrainingRequest, subject: Subject, read_dataset: ReadDataset
) -> tuple[DatasetChoice, PreparedDataset]:
    """Return what is trained on: the study's dataset, changed by what was typed.

    Raises:
        InputError: nothing names one.
    """
    study = subject.definition
    of_study = None if study is None else study.space.data
    choice = typed_dataset(of_study, request.dataset)
    if choice is None:
        raise InputError("which dataset? name it with --data")
    if request.dataset.get("eval_fraction") is None and of_study is None:
        choice = replaced(choice, eval_fraction=EVAL_FRACTION)
    if choice == of_study and study is not None:
        stored = dataset_of_study(study, model=subject.model, read=read_dataset)
        if stored is not None:
            return choice, stored
    return choice, read_dataset(DatasetRequest.of(choice, subject.model))


def _weights(typed: Weights | None, model: ModelSpec) -> Weights:
    """Return which weights are trained on: the real ones wherever there are any.

    Raises:
        InputError: the real ones are wanted, and not there.
    """
    weights: Weights = "pretrained"
    if typed is not None:
        weights = typed
    elif model.source == "shipped":
        weights = "random"
    if weights == "pretrained":
        try:
            check_weights(model)
        except InputError as error:
            raise InputError(f"{error} (--set weights=random trains without them)") from error
    return weights


def _resolved(subject: Subject, gpu: GpuInfo | None) -> ResolvedTarget:
    """Return the device: the study's, else the GPU that is here, else the CPU.

    Raises what `_device_of` raises.
    """
    if subject.definition is not None:
        return resolve_target(subject.definition.space, gpu)
    values: dict[str, Any] = {
        "name": "train",
        "gpu": "auto",
        "dimensions": {"lora_rank": {"choices": [subject.config.lora_rank]}},
    }
    if gpu is None:
        values |= {"gpu": "cpu", "budget_gib": _CPU_GIB}
    return resolve_target(SearchSpace.model_validate(values), gpu)


def train(
    prepared: PreparedTraining, *, resume_from: Path | None, observe: Observer
) -> TrainingOutcome:
    """Run a training to its end, whatever that is; a result is not written yet.

    Args:
        prepared: the training.
        resume_from: the checkpoint that it is resumed from; None begins at the first step.
        observe: told what happens on the way.

    Raises:
        EnvironmentFault: the disk has no room, or no process can be started.
    """
    job = prepared.job
    directory = Path(job.output)
    parameters = lora_parameters(job.config, prepared.subject.model) or 10**8
    size = parameters * (4 + _STATE_BYTES_MAX) + 2**20
    output.begin(directory, prepared.run, checkpoint_bytes=size)
    first = 0
    if resume_from is not None:
        first = checkpoints.step_of(resume_from)
        job = replaced(job, resume_from=str(resume_from.absolute()))
    # Later ones are written anew.
    kept = [step for step in checkpoints.steps_of(directory) if step <= first]
    checkpoints.remove(directory, keep=kept)
    try:
        return follow(job, observe=observe)
    finally:
        checkpoints.release(directory)


def follow(
    job: TrainingJob,
    *,
    observe: Observer = lambda _: None,
    deadlines: Deadlines | None = None,
    module: str = "qlora_sweep.sweep.finetuning",
) -> TrainingOutcome:
    """Train in a process of its own and return how it ended, whatever that is.

    A `KeyboardInterrupt` asks the training to write a checkpoint and to stop; a second one ends it.

    Args:
        job: the training.
        observe: told what happens on the way.
        deadlines: how long it may be silent: as it starts or stops, and as it builds and trains,
            when weights are loaded and layers compiled without a word.
        module: the process's; tests put a misbehaving one here.

    Raises:
        EnvironmentFault: no process can be started, or none can use the device.
        KeyboardInterrupt: the second.
    """
    limits = deadlines or Deadlines()
    clock = child.AttentiveClock()
    files.make_directory(Path(job.output))
    log = Path(job.output).absolute() / output.LOG
    process = child.WorkerProcess(
        job, log_path=log, module=module, clock=clock, patience=limits.closed
    )
    phase: records.Phase = "start"
    is_stopping = False
    quiet_seconds = limits.start
    heard_at = clock.look()
    try:
        while True:
            try:
                message = process.next_message(protocol.message_adapter)
                if message is None:
                    if clock.now >= heard_at + quiet_seconds:
                        raise child.WorkerSilent(f"no sign of life for {quiet_seconds:g} s")
                    continue
                heard_at = clock.now
                match message:
                    case protocol.TrainingFinished(outcome=outcome):
                        return outcome
                    case Unusable(reason=reason):
                        raise EnvironmentFault(f"the training cannot begin: {child.shown(reason)}")
                    case Ready():
                        if not is_stopping:
                            quiet_seconds = limits.build
                    case _:
                        phase = getattr(message, "phase", phase)
                        observe(message)
            except KeyboardInterrupt:
                if is_stopping:
                    raise
                is_stopping = True
                quiet_seconds = limits.start
                heard_at = clock.look()
                process.send(to_line(StopCommand()))
            except child.WorkerFault as fault:
                patience = 0.0
                if isinstance(fault, child.WorkerEnded):
                    patience = limits.closed
                end, words = process.close(patience=patience)
                return child.outcome_of(fault, phase, end, words=words)
    finally:
        process.close()


def fault_of(outcome: TrainingOutcome, *, kept: str = "") -> SweepError:
    """Return the error of a training that did not come to its end.

    Args:
        outcome: no result.
        kept: what is left of it, as the end of a sentence.
    """
    match outcome:
        case records.OutOfMemory(step=step, detail=detail):
            return NothingFits(f"out of memory in {detail}, after step {step:,}{kept}")
        case records.Diverged(step=step, detail=detail):
            return NothingFits(
                f"{detail} at step {step:,}: the training stopped there{kept}. A lower "
                "learning_rate may help"
            )
        case records.Invalid(detail=detail):
            return InputError(detail)
        case records.Ineffective(setting=setting, detail=detail):
            return InputError(f"{setting}: {detail}")
        case records.Crashed(detail=detail) | records.TimedOut(detail=detail):
            return EnvironmentFault(f"{detail}{kept}")
        case records.Lost():
            return Interrupted(f"the training was stopped{kept}")
        case TrainingResult():
            raise AssertionError("a result is no fault")
        case _:
            assert_never(outcome)
