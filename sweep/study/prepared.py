"""What a run of a study is about: what was typed is resolved into a study that is checked, and not
yet opened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from qlora_sweep.reports.format import capitalized
from qlora_sweep.search_spaces.checkpoints import check_weights
from qlora_sweep.search_spaces.documents import Document, validate
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.feasibility import refuse_impossible, refuse_without_dataset
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.gpus import match_product
from qlora_sweep.search_spaces.loading import (
    Offered,
    preset_name,
    with_fixed,
    with_learning_rate,
    with_own_settings,
    with_room_for_images,
)
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.recurrent import plain_loop
from qlora_sweep.search_spaces.rules import Setting, torch_for
from qlora_sweep.search_spaces.sizes import with_offered_batches
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.search_spaces.trainer_spaces import for_trainer
from qlora_sweep.storage.definition import StudyDefinition, Target
from qlora_sweep.storage.surfaces import Surface
from qlora_sweep.sweep.data.choice import (
    ReadDataset,
    dataset_of_study,
    is_same_choice,
    space_with_dataset,
)
from qlora_sweep.sweep.data.prepared_dataset import DatasetRequest, PreparedDataset, prepare_dataset
from qlora_sweep.sweep.data.study_epochs import StudyEpochs, refuse_too_few
from qlora_sweep.sweep.request import (
    RunRequest,
    checked_name,
    default_study_name,
    fixed_in,
    overridden,
    refuse_unmeasured,
    with_confirm,
)
from qlora_sweep.sweep.running.device_info import ChosenGpu, GpuInfo
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import DatasetSettings
from qlora_sweep.sweep.study.driver import eval_seq_len
from qlora_sweep.sweep.study.run_time import CommandStart
from qlora_sweep.sweep.study.stopping import price_of
from qlora_sweep.sweep.study.targets import ResolvedTarget, check_budget, resolve_target


@dataclass(frozen=True)
class Prepared:
    """A study that is resolved and checked, and not yet opened."""

    name: str
    definition: StudyDefinition
    model: ModelSpec
    resolved: ResolvedTarget
    gpu: GpuInfo | None
    """The GPU in this machine; None on a CPU."""
    gpus: tuple[ChosenGpu, ...] = ()
    """Those that trials run on at a time, all of one product; none where none were chosen."""
    dataset: PreparedDataset | None = None
    """What its trials train on; None for random rows."""
    epochs: StudyEpochs | None = None
    """What passes over those texts are to its configurations."""
    notes: tuple[str, ...] = ()
    """What the texts made of the space, for a person."""
    usd_per_hour: float | None = None
    """Price of the GPU that is there; None where nothing is to be limited by it."""
    surface: Surface | None = None
    """What answers instead of a GPU, where trials were recorded."""
    clock: Callable[[], float] = time.monotonic
    """Of the seconds that trials take."""

    @property
    def space(self) -> SearchSpace:
        """What is searched."""
        return self.definition.space

    @property
    def target(self) -> Target:
        """What it is searched for."""
        return self.definition.target

    def seconds_since(self, start: CommandStart) -> float:
        """Return what its clock counts since a command began; recorded trials alone take recorded
        seconds."""
        if self.surface is not None:
            return 0.0
        return time.monotonic() - start.at_seconds

    @property
    def gpus_per_trial(self) -> int:
        """GPUs that the widest of its trials trains on together; 1 on a CPU, which all share."""
        if not self.target.is_on_gpu:
            return 1
        return self.space.gpus_per_trial

    @property
    def dataset_settings(self) -> DatasetSettings | None:
        """Where a worker finds the study's texts; None for random rows."""
        if self.dataset is None or self.space.data is None:
            return None
        return DatasetSettings(
            directory=str(self.dataset.directory.absolute()),
            fingerprint=self.dataset.summary.fingerprint,
            eval_fraction=self.space.data.eval_fraction,
        )

    @property
    def new_runner(self) -> Callable[..., SupervisedRunner]:
        """Makes what runs its trials in a child, of what is known of all of them."""
        return partial(
            SupervisedRunner,
            self.model,
            target=self.target,
            weights=self.space.weights,
            seed=self.space.seed,
            dataset=self.dataset_settings,
        )


def prepare(
    request: RunRequest,
    *,
    read_gpu: Callable[[], GpuInfo | None],
    read_dataset: ReadDataset = prepare_dataset,
    stored: Callable[[str], StudyDefinition | None] = lambda _: None,
    narrowed: Callable[[SearchSpace], SearchSpace] = lambda space: space,
) -> Prepared:
    """Resolve what a run is about, before anything is opened or started.

    Args:
        request: what was typed; without a study's name one is derived from the rest.
        gpu: reads the GPU in this machine.
        read_dataset: reads and tokenizes texts, or finds what did so before.
        stored: reads the definition of the study of that name; None where there is none. A study
            of texts is resumed with them where none are named.
        narrowed: returns the part of a space that can be run where it is to run.

    Raises:
        InputError: something that was typed, written or named is not right.
        EnvironmentFault: the GPU, or the network for a hub id, is not to be had.
    """
    fixed_settings = request.fixed_settings
    is_preset = preset_name(request.space) is not None
    definition = None
    if request.study is not None:
        definition = stored(request.study)
    typed_space, changed = overridden(request.space, request.overrides, definition)
    typed_space = narrowed(typed_space)
    model = load_model_spec(typed_space.model)
    able = for_trainer(typed_space, model, is_preset=is_preset, fixed_settings=fixed_settings)
    refuse_unmeasured(able.space)
    _, changed_as_typed = fixed_in(typed_space, fixed_settings, changed, typed=request.space)
    _refuse_without_dataset(able.space, fixed_settings)
    here = read_gpu() if able.space.gpu != "cpu" else None
    # Texts may take a minute to read: what can be refused without them is refused before.
    resolved = resolve_target(able.space, here)
    if able.space.weights == "pretrained":
        check_weights(model)
    of_model = with_own_settings(
        able.space, model, is_preset=is_preset, fixed_settings=fixed_settings
    )
    if (
        able.space.data is not None
        and definition is None
        and request.study is None
        and not fixed_settings
    ):
        definition = stored(default_study_name(able.space, changed))
    dataset = _dataset_of(able.space, model, definition, read_dataset)
    offered = Offered(of_model.space)
    if dataset is not None:
        offered = space_with_dataset(
            of_model.space, dataset, model=model, is_preset=is_preset, fixed_settings=fixed_settings
        )
    space, changed = fixed_in(offered.space, fixed_settings, changed, typed=request.space)
    space = with_room_for_images(space, model)
    if able.space is not typed_space:
        # What a trainer cannot run is not what was typed: the name is as it is told elsewhere.
        changed = changed_as_typed
    target = match_product(resolved.target.gpu)
    if is_preset and target is not None:
        space = with_offered_batches(space, model, target.budget_bytes)
    sampled = _with_able_sampler(space)
    name = request.study
    if name is None:
        name = default_study_name(sampled.space, changed)
    begun = Offered(sampled.space)
    if "eval_loss" in sampled.space.objectives:
        begun = with_learning_rate(sampled.space, model)
    notes = able.notes + of_model.notes + offered.notes + sampled.notes + begun.notes
    return _checked(checked_name(name), begun.space, model, here, dataset, notes)


def _refuse_without_dataset(space: SearchSpace, fixed_settings: Mapping[str, Any]) -> None:
    """Refuse what needs texts, of the space with what was fixed, where anything is left free."""
    if fixed_settings:
        rest = with_fixed(space, fixed_settings)
        if isinstance(rest, SearchSpace):
            space = rest
    refuse_without_dataset(space)


def _dataset_of(
    space: SearchSpace,
    model: ModelSpec,
    definition: StudyDefinition | None,
    read_dataset: ReadDataset,
) -> PreparedDataset | None:
    """Return what a space's trials train on, those of the study that is there where it names the
    same; None for random rows."""
    if space.data is None:
        return None
    if definition is not None and is_same_choice(definition.space.data, space.data):
        return dataset_of_study(definition, model=model, read=read_dataset)
    return read_dataset(DatasetRequest.of(space.data, model))


def _with_able_sampler(space: SearchSpace) -> Offered:
    """Return a space with a sampler that can search for its objectives."""
    why = None
    if "eval_loss" in space.objectives:
        why = "Held-out loss cannot be predicted"
    elif len(space.objectives) > 1:
        why = "The guided sampler searches for one objective"
    if why is None or space.sampler != "guided":
        return Offered(space)
    note = (
        f"{why}, so the sampler is tpe, and the search ends after {space.trials} trials, or its "
        "time budget."
    )
    return Offered(replaced(space, sampler="tpe"), (note,))


def prepare_again(
    name: str,
    stored: StudyDefinition,
    *,
    confirm: Mapping[str, Any],
    max_dollars: float | None = None,
    read_gpu: Callable[[], GpuInfo | None],
    read_dataset: ReadDataset = prepare_dataset,
) -> Prepared:
    """Resolve what measuring a stored study's winner again is about.

    Args:
        name: of the study.
        stored: its definition.
        confirm: keys of the space's section with what was typed instead.
        max_dollars: what it may cost in all; None leaves the space's limit.
        gpu: reads the GPU in this machine.
        read_dataset: as for `prepare`.

    Raises:
        InputError: a value that the section does not take, or another GPU than the study's.
        EnvironmentFault: the GPU is not to be had.
    """
    values = {
        **stored.space.model_dump(),
        "confirm": with_confirm(stored.space, confirm),
        # That is of the runs of the study, and was typed with one of them.
        "time_budget_seconds": None,
    }
    if max_dollars is not None:
        values["max_dollars"] = max_dollars
    document = Document(f"study '{name}'", names={"max_dollars": "--max-dollars"})
    space = validate(SearchSpace, values, document)
    model = ModelSpec.from_json(stored.model)
    here = read_gpu() if space.gpu != "cpu" else None
    dataset = dataset_of_study(stored, model=model, read=read_dataset)
    return _checked(name, space, model, here, dataset)


def _checked(
    name: str,
    space: SearchSpace,
    model: ModelSpec,
    here: GpuInfo | None,
    dataset: PreparedDataset | None,
    notes: tuple[str, ...] = (),
) -> Prepared:
    """Return a study whose model, GPU, texts and budget go together."""
    if space.weights == "pretrained":
        check_weights(model)
    resolved = resolve_target(space, here)
    needed = torch_for(resolved.host_capability)
    if needed is not None:
        notes += (f"{capitalized(needed)}.",)
    looping = plain_loop(model, is_on_gpu=resolved.target.is_on_gpu)
    if looping is not None:
        notes = (f"{capitalized(looping)}.", *notes)
    check_budget(space, model, resolved.target)
    refuse_impossible(
        space,
        Setting(model, resolved.target.device, resolved.compute_capability, dataset is not None),
    )
    # What is there has a price, by the catalogue's name.
    product = resolved.target.emulated_on or resolved.target.gpu
    spec = match_product(product)
    if spec is not None:
        product = spec.name
    usd_per_hour = price_of(space, gpu=product)
    epochs = None
    if dataset is not None and space.data is not None:
        epochs = StudyEpochs.of(dataset, space.data, seed=space.seed)
        refuse_too_few(space, epochs)
        length = eval_seq_len(space)
        if "eval_loss" in space.objectives and not epochs.held_out_loss_tokens(length):
            raise InputError(
                f"space '{space.name}': objectives: eval_loss: of these texts no row with a token "
                f"that carries loss in its first {length:,} is held out: take a larger "
                "data.eval_fraction"
            )
    has_images = space.values_of("image_size") != (None,)
    definition = StudyDefinition(
        space=space,
        model=model.to_json(),
        model_fingerprint=model.fingerprint_of(sees=has_images),
        target=resolved.target,
        texts=None if dataset is None else dataset.summary,
    )
    return Prepared(
        name=name,
        definition=definition,
        model=model,
        resolved=resolved,
        gpu=here,
        dataset=dataset,
        epochs=epochs,
        notes=notes,
        usd_per_hour=usd_per_hour,
    )
