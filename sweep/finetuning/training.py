"""A training from what was typed to what it leaves: resolved, refused where it cannot be, run,
finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reports.words import emulation_note
from search_spaces.checkpoints import check_weights
from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.linears import lora_parameters
from search_spaces.models import ModelSpec
from search_spaces.rules import Violation, violation
from search_spaces.space import SearchSpace, Weights
from search_spaces.texts import TextsChoice
from storage.definition import StudySnapshot
from storage.environment import fingerprint
from sweep.data.choice import texts_of_study, typed_texts
from sweep.data.study_epochs import StudyEpochs
from sweep.data.texts import PreparedTexts, TextsRequest
from sweep.data.tokenizers import TokenizerFiles, find_tokenizer
from sweep.finetuning import checkpoints, output
from sweep.finetuning.finishing import finish
from sweep.finetuning.fitting import Smaller, next_smaller, refuse_too_large
from sweep.finetuning.job import Observer, follow_job
from sweep.finetuning.subject import Subject, subject_of, with_changes
from sweep.finetuning.wire import End, TrainingJob, TrainingResult
from sweep.paths import cache_directory
from sweep.predict.memory.predictor import MemoryPredictor, TracingPredictor
from sweep.predict.on_texts import MemoryOnTexts, ShapesOnTexts
from sweep.running.device_info import Card
from sweep.study.targets import ResolvedTarget, resolve_target

EVAL_FRACTION = 0.05
"""Share of the texts that is held out, where neither a study nor a person says."""
_STATE_BYTES_MAX = 8
"""Of the optimizer for each trainable parameter: two numbers, in four bytes each."""

_CPU_GIB = 1.0
"""A target has to say a budget; on a CPU without a study nothing is kept to it."""

ReadTexts = Callable[[TextsRequest], PreparedTexts]


@dataclass(frozen=True)
class TrainingRequest:
    """What was typed; None where nothing was."""

    name: str
    output: Path
    texts: dict[str, Any]
    """Keys of `TextsChoice`; None leaves a study's."""
    trial: int | None = None
    model: str | None = None
    weights: Weights | None = None
    max_steps: int | None = None
    epochs: float | None = None
    learning_rate: float | None = None
    seed: int | None = None
    checkpoint_every: int | None = None
    is_resumed: bool = False


@dataclass(frozen=True)
class PreparedTraining:
    """A training that is resolved and checked, and has not begun."""

    job: TrainingJob
    subject: Subject
    texts: PreparedTexts
    epochs: StudyEpochs
    tokenizer: TokenizerFiles
    resolved: ResolvedTarget
    card: Card | None
    notes: tuple[str, ...]
    """What a person should know beforehand."""

    @property
    def run(self) -> dict[str, Any]:
        """What must stay the same for it to go on where it was."""
        job, spec = self.job, self.subject.model
        return {
            "config": job.config.model_dump(mode="json"),
            "model": {"name": spec.name, "fingerprint": spec.fingerprint},
            "weights": job.weights,
            "texts": {"fingerprint": self.texts.summary.fingerprint},
            "eval_fraction": job.eval_fraction,
            "epochs": job.epochs,
            "max_steps": job.max_steps,
            "seed": job.seed,
            "device": job.device,
        }

    def can_train(self, config: TrialConfig) -> bool:
        """Whether another configuration breaks no rule here, and the texts make batches of it."""
        is_valid = _violation(config, self.subject, self.resolved) is None
        return is_valid and self.epochs.refusal(config) is None

    @property
    def checkpoint_bytes(self) -> int:
        """What a checkpoint takes on the disk at most."""
        parameters = lora_parameters(self.job.config, self.subject.model) or 10**8
        return parameters * (4 + _STATE_BYTES_MAX) + 2**20


def prepare_training(
    request: TrainingRequest,
    *,
    read_study: Callable[[str], StudySnapshot],
    read_texts: ReadTexts,
    card: Callable[[], Card | None],
    warn: Callable[[str], None],
) -> PreparedTraining:
    """Resolve what is to be trained, and refuse what cannot be.

    Raises:
        InputError: something that was typed or named is not right.
        NothingFits: it is predicted not to fit.
        EnvironmentFault: the GPU or the network is not to be had.
    """
    found = subject_of(
        request.name, number=request.trial, model=request.model, read_study=read_study
    )
    config = with_changes(found.config, learning_rate=request.learning_rate)
    subject = replace(found, config=config)
    weights = _weights(request.weights, subject.model)
    if not request.is_resumed:
        output.refuse_taken(request.output)
    here = card()
    resolved = _resolved(subject, here)
    _refuse_invalid(subject, resolved)
    choice, texts = _texts(request, subject, read_texts)
    epochs = StudyEpochs.of(texts, choice, seed=_seed(request, subject))
    refusal = epochs.refusal(subject.config)
    if refusal is not None:
        raise InputError(f"{texts.summary.source}: {refusal}")
    job = _job(request, subject, resolved, weights=weights, choice=choice, texts=texts)
    prepared = PreparedTraining(
        job=job,
        subject=subject,
        texts=texts,
        epochs=epochs,
        tokenizer=find_tokenizer(choice.tokenizer, subject.model),
        resolved=resolved,
        card=here if job.device == "cuda" else None,
        notes=tuple(_notes(job, subject, resolved)),
    )
    if request.is_resumed:
        output.refuse_another(request.output, prepared.run)
    elif job.device == "cuda":
        refuse_too_large(
            job.config,
            predictor=predictor_of(prepared),
            budget_bytes=resolved.target.budget_bytes,
            is_valid=prepared.can_train,
            warn=warn,
        )
    return prepared


def _job(
    request: TrainingRequest,
    subject: Subject,
    resolved: ResolvedTarget,
    *,
    weights: Weights,
    choice: TextsChoice,
    texts: PreparedTexts,
) -> TrainingJob:
    on_any_cpu = resolved.target.device == "cpu" and subject.definition is None
    return TrainingJob(
        config=subject.config,
        model=subject.model.to_json(),
        weights=weights,
        texts=str(texts.directory.absolute()),
        fingerprint=texts.summary.fingerprint,
        tokenizer=texts.summary.tokenizer,
        eval_fraction=choice.eval_fraction,
        epochs=_first(request.epochs, 1.0),
        max_steps=request.max_steps,
        seed=_seed(request, subject),
        device=resolved.target.device,
        # Nobody said a cap for a CPU without a study.
        budget_bytes=None if on_any_cpu else resolved.target.budget_bytes,
        output=str(request.output.absolute()),
        checkpoint_steps=request.checkpoint_every,
        promise=subject.promise,
    )


def predictor_of(prepared: PreparedTraining) -> MemoryPredictor:
    """Return what predicts a training's memory on a GPU: that of its largest micro-batch."""
    full = TracingPredictor(
        prepared.subject.model,
        cache_dir=cache_directory() / "memory",
        compute_capability=prepared.resolved.host_capability,
    )
    return MemoryOnTexts(full, ShapesOnTexts(prepared.epochs))


def smaller_than(prepared: PreparedTraining) -> Smaller | None:
    """Return the next smaller configuration than one that ran out of memory: predicted to fit on a
    GPU; on a CPU, whose memory is not predicted, the nearest one."""
    is_on_card = prepared.job.device == "cuda"
    return next_smaller(
        prepared.job.config,
        predictor=predictor_of(prepared) if is_on_card else None,
        budget_bytes=prepared.resolved.target.budget_bytes,
        is_valid=prepared.can_train,
        has_run_out=True,
    )


def train(
    prepared: PreparedTraining,
    *,
    is_resumed: bool,
    resume_from: Path | None,
    observe: Observer,
) -> End:
    """Run a training to its end, whatever that is; a result is not written yet.

    Args:
        prepared: the training.
        is_resumed: whether it was begun before.
        resume_from: the checkpoint that it goes on from; None begins at the first step.
        observe: told what happens on the way.

    Raises:
        InputError: somebody else trains there, or there is nothing to go on with.
        EnvironmentFault: the disk has no room, or no process can be started.
    """
    directory, job = Path(prepared.job.output), prepared.job
    if is_resumed:
        output.refuse_another(directory, prepared.run)
    else:
        output.refuse_taken(directory)
        output.begin(directory, prepared.run)
    checkpoints.remove_leftovers(directory)
    output.reserve(directory, checkpoint_bytes=prepared.checkpoint_bytes)
    resumed = None
    if resume_from is not None:
        checkpoints.remove_behind(directory, checkpoints.step_of(resume_from))
        resumed = str(resume_from.absolute())
    try:
        return follow_job(job.model_copy(update={"resume_from": resumed}), observe=observe)
    finally:
        output.release(directory)


def finished(prepared: PreparedTraining, result: TrainingResult) -> dict[str, Any]:
    """Write what a training leaves, and return its document.

    Raises:
        EnvironmentFault: the disk does not take it.
    """
    card = prepared.card
    environment = fingerprint(
        device=prepared.job.device,
        gpu=None if card is None else card.product,
        driver=None if card is None else card.driver,
        cuda_driver=None if card is None else card.cuda,
    )
    return finish(
        prepared.job,
        result,
        texts=prepared.texts.summary,
        tokenizer=prepared.tokenizer,
        subject=prepared.subject.words,
        environment=environment,
    )


def _first(*values: Any) -> Any:
    """Return the first value that is there."""
    return next(value for value in values if value is not None)


def _seed(request: TrainingRequest, subject: Subject) -> int:
    """Return the seed that was typed, else the study's."""
    stored = None if subject.definition is None else subject.definition.space.seed
    return int(_first(request.seed, stored, 0))


def _weights(typed: Weights | None, model: ModelSpec) -> Weights:
    """Return which weights are trained on: the real ones wherever there are any.

    Raises:
        InputError: the real ones are wanted, and not there.
    """
    weights: Weights = typed or ("random" if model.source == "shipped" else "pretrained")
    if weights == "pretrained":
        try:
            check_weights(model)
        except InputError as error:
            raise InputError(f"{error} (--set weights=random trains without them)") from error
    return weights


def _resolved(subject: Subject, card: Card | None) -> ResolvedTarget:
    """Return the device: the study's, else the GPU that is here, else the CPU.

    Raises:
        EnvironmentFault: a study's GPU, or one as large, is not here.
        InputError: a budget that the GPU has not.
    """
    if subject.definition is not None:
        return resolve_target(subject.definition.space, card)
    values = {
        "name": "train",
        "gpu": "cpu" if card is None else "auto",
        "budget_gib": _CPU_GIB if card is None else None,
        "dimensions": {"lora_rank": {"choices": [subject.config.lora_rank]}},
    }
    space = SearchSpace.model_validate(values)
    return resolve_target(space, card)


def _violation(config: TrialConfig, subject: Subject, resolved: ResolvedTarget) -> Violation | None:
    """Return the rule that a configuration breaks on a device; None where it can be trained."""
    return violation(
        config,
        model=subject.model,
        compute_capability=resolved.compute_capability,
        device=resolved.target.device,
        has_texts=True,
    )


def _refuse_invalid(subject: Subject, resolved: ResolvedTarget) -> None:
    cards = subject.config.data_parallel
    if cards > 1:
        raise InputError(
            f"{subject.words} has data_parallel {cards}, and sweep train takes one GPU: what "
            "`sweep export --format script` writes trains on several, or name another trial with "
            "--trial"
        )
    broken = _violation(subject.config, subject, resolved)
    if broken is not None:
        raise InputError(f"{subject.words} cannot be trained here: {broken.reason}")


def _texts(
    request: TrainingRequest, subject: Subject, read: ReadTexts
) -> tuple[TextsChoice, PreparedTexts]:
    """Return the texts that were named, else the study's.

    Raises:
        InputError: there are none.
    """
    stored = subject.definition
    known = None if stored is None else stored.space.data
    choice = typed_texts(known, request.texts)
    if choice is None:
        raise InputError("which texts? name them with --data")
    if request.texts.get("eval_fraction") is None and known is None:
        choice = choice.model_copy(update={"eval_fraction": EVAL_FRACTION})
    if choice == known and stored is not None:
        texts = texts_of_study(stored, model=subject.model, read=read)
        if texts is not None:
            return choice, texts
    return choice, read(TextsRequest.of(choice, subject.model))


def _notes(job: TrainingJob, subject: Subject, resolved: ResolvedTarget) -> list[str]:
    notes = []
    if job.weights == "random":
        notes.append(
            f"The weights of model '{subject.model.name}' are random: this shows how a training "
            "runs, and its adapter is of no other use."
        )
    emulation = emulation_note(resolved.target)
    if emulation is not None:
        notes.append(emulation)
    if job.device == "cpu" and subject.definition is None:
        notes.append("No GPU is here: this trains on the CPU.")
    return notes
