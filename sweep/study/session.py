"""One run of a study: what was typed is resolved into it, then it is opened and driven."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from optuna.samplers import BaseSampler

from qlora_sweep.search_spaces.checkpoints import check_weights
from qlora_sweep.search_spaces.documents import Document, validate
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.feasibility import refuse_impossible, refuse_without_texts
from qlora_sweep.search_spaces.gpus import match_product
from qlora_sweep.search_spaces.loading import (
    Offered,
    preset_name,
    with_fixed,
    with_learning_rate,
    with_own_settings,
)
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.rules import Setting, torch_for
from qlora_sweep.search_spaces.sizes import with_offered_batches
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.search_spaces.trainer_spaces import for_trainer
from qlora_sweep.storage.definition import StudyDefinition, StudySnapshot, Target
from qlora_sweep.storage.directory import keep_outcomes, read_identity
from qlora_sweep.storage.study import OpenStudy, open_study
from qlora_sweep.storage.surfaces import Surface
from qlora_sweep.sweep import stop_signals
from qlora_sweep.sweep.data.choice import (
    ReadTexts,
    is_same_choice,
    space_with_texts,
    texts_of_study,
)
from qlora_sweep.sweep.data.study_epochs import StudyEpochs, refuse_too_few
from qlora_sweep.sweep.data.texts import PreparedTexts, TextsRequest, prepare_texts
from qlora_sweep.sweep.paths import cache_directory, runs_directory, worker_log_path
from qlora_sweep.sweep.predict.building import build_forecaster
from qlora_sweep.sweep.predict.forecast import Forecaster, Rule
from qlora_sweep.sweep.predict.memory.predictor import (
    CpuMemory,
    MemoryPredictor,
    TracingPredictor,
    one_of_each_kind,
)
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from qlora_sweep.sweep.predict.on_texts import ShapesOnTexts
from qlora_sweep.sweep.request import (
    RunRequest,
    checked_name,
    default_study_name,
    held_in,
    overridden,
    refuse_unmeasured,
    with_confirm,
)
from qlora_sweep.sweep.running.device_info import Card, ChosenCard, environment_with, teams_of
from qlora_sweep.sweep.running.ray_nodes import Cluster
from qlora_sweep.sweep.running.runner import Lane, Lanes, Runner
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import TextsSettings
from qlora_sweep.sweep.sampling.encoding import LISTED_MAX
from qlora_sweep.sweep.sampling.guided import GuidedSampler, Outlook
from qlora_sweep.sweep.sampling.samplers import make_sampler, quiet_optuna
from qlora_sweep.sweep.scratch import remove_left
from qlora_sweep.sweep.study.carrying import refuse_incomparable, take_over
from qlora_sweep.sweep.study.driver import Driver, eval_seq_len
from qlora_sweep.sweep.study.events import (
    GainForeseen,
    Interruption,
    LanesOpened,
    Listener,
    SpaceTraced,
    StopReason,
)
from qlora_sweep.sweep.study.recorded import RecordedPeaks, only_recorded, recorded_peaks
from qlora_sweep.sweep.study.run_time import CommandStart, RunTime
from qlora_sweep.sweep.study.stopping import Stopping, price_of
from qlora_sweep.sweep.study.targets import ResolvedTarget, check_budget, resolve_target
from qlora_sweep.sweep.study.tuner import tune

Watch = Callable[[OpenStudy, Interruption], AbstractContextManager[Listener]]
"""Shows a study while it runs."""


@dataclass(frozen=True)
class Prepared:
    """A study that is resolved and checked, and not yet opened."""

    name: str
    definition: StudyDefinition
    model: ModelSpec
    resolved: ResolvedTarget
    card: Card | None
    """The GPU in this machine; None on a CPU."""
    cards: tuple[ChosenCard, ...] = ()
    """Those that trials run on at a time, all of one product; none where nobody chose."""
    texts: PreparedTexts | None = None
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
        return 0.0 if self.surface is not None else time.monotonic() - start.at_seconds

    @property
    def cards_per_trial(self) -> int:
        """GPUs that the widest of its trials trains on together; 1 on a CPU, which all share."""
        if not self.target.is_on_gpu:
            return 1
        return self.space.gpus_per_trial

    @property
    def texts_settings(self) -> TextsSettings | None:
        """Where a worker finds the study's texts; None for random rows."""
        if self.texts is None or self.space.data is None:
            return None
        return TextsSettings(
            directory=str(self.texts.directory.absolute()),
            fingerprint=self.texts.summary.fingerprint,
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
            texts=self.texts_settings,
        )


def prepare(
    request: RunRequest,
    *,
    card: Callable[[], Card | None],
    read_texts: ReadTexts = prepare_texts,
    stored: Callable[[str], StudyDefinition | None] = lambda _: None,
    narrowed: Callable[[SearchSpace], SearchSpace] = lambda space: space,
) -> Prepared:
    """Resolve what a run is about, before anything is opened or started.

    Args:
        request: what was typed; without a study's name one is derived from the rest.
        card: reads the GPU in this machine.
        read_texts: reads and tokenizes texts, or finds what did so before.
        stored: reads the definition of the study of that name; None where there is none. A study
            of texts goes on with them where nobody names any.
        narrowed: returns what of a space can be run where it is to run.

    Raises:
        InputError: something that was typed, written or named is not right.
        EnvironmentFault: the GPU, or the network for a hub id, is not to be had.
    """
    study, held = request.study, request.held
    known = None if study is None else stored(study)
    space, changed = overridden(request.space, request.overrides, known)
    space = narrowed(space)
    model = load_model_spec(space.model)
    is_preset = preset_name(request.space) is not None
    able = for_trainer(space, model, is_preset=is_preset, held=held)
    refuse_unmeasured(able.space)
    _, of_trainer = held_in(space, held, changed, typed=request.space)
    is_for_others = able.space is not space
    space = able.space
    rest = with_fixed(space, held) if held else space
    refuse_without_texts(rest if isinstance(rest, SearchSpace) else space)
    here = card() if space.gpu != "cpu" else None
    # Texts may take a minute to read: what can be refused without them is refused before.
    resolved = resolve_target(space, here)
    if space.weights == "pretrained":
        check_weights(model)
    own = with_own_settings(space, model, is_preset=is_preset, held=held)
    offered, texts = Offered(own.space), None
    if space.data is not None:
        if known is None and study is None and not held:
            known = stored(default_study_name(space, changed))
        if known is not None and is_same_choice(known.space.data, space.data):
            texts = texts_of_study(known, model=model, read=read_texts)
        else:
            texts = read_texts(TextsRequest.of(space.data, model))
    if texts is not None:
        offered = space_with_texts(own.space, texts, model=model, is_preset=is_preset, held=held)
    space, changed = held_in(offered.space, held, changed, typed=request.space)
    if is_for_others:
        # What a trainer cannot run is not what was typed: the name is as it is told elsewhere.
        changed = of_trainer
    target = match_product(resolved.target.gpu)
    if is_preset and target is not None:
        space = with_offered_batches(space, model, target.budget_bytes)
    notes = (*able.notes, *own.notes, *offered.notes)
    why_tpe = ""
    if "eval_loss" in space.objectives:
        why_tpe = "Held-out loss cannot be predicted"
    elif len(space.objectives) > 1:
        why_tpe = "The guided sampler searches for one objective"
    if why_tpe and space.sampler == "guided":
        space = space.model_copy(update={"sampler": "tpe"})
        notes += (
            f"{why_tpe}, so the sampler is tpe, and the search ends after {space.trials} trials, "
            "or its time budget.",
        )
    name = checked_name(default_study_name(space, changed) if study is None else study)
    if "eval_loss" in space.objectives:
        begun = with_learning_rate(space, model)
        space = begun.space
        notes += begun.notes
    return _checked(name, space, model, here, texts, notes)


def prepare_again(
    name: str,
    stored: StudyDefinition,
    *,
    confirm: Mapping[str, Any],
    max_dollars: float | None = None,
    card: Callable[[], Card | None],
    read_texts: ReadTexts = prepare_texts,
) -> Prepared:
    """Resolve what measuring a stored study's winner again is about.

    Args:
        name: of the study.
        stored: its definition.
        confirm: keys of the space's section with what was typed instead.
        max_dollars: what it may cost in all; None leaves the space's limit.
        card: reads the GPU in this machine.
        read_texts: as for `prepare`.

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
    here = card() if space.gpu != "cpu" else None
    texts = texts_of_study(stored, model=model, read=read_texts)
    return _checked(name, space, model, here, texts)


def _checked(
    name: str,
    space: SearchSpace,
    model: ModelSpec,
    here: Card | None,
    texts: PreparedTexts | None,
    notes: tuple[str, ...] = (),
) -> Prepared:
    """Return a study whose model, GPU, texts and budget go together."""
    if space.weights == "pretrained":
        check_weights(model)
    resolved = resolve_target(space, here)
    if (needed := torch_for(resolved.host_capability)) is not None:
        notes += (f"{needed[0].upper()}{needed[1:]}.",)
    check_budget(space, model, resolved.target)
    refuse_impossible(
        space,
        Setting(model, resolved.target.device, resolved.compute_capability, texts is not None),
    )
    # What is there has a price, by the catalogue's name.
    product = resolved.target.emulated_on or resolved.target.gpu
    known = match_product(product)
    usd_per_hour = price_of(space, gpu=product if known is None else known.name)
    epochs = None
    if texts is not None and space.data is not None:
        epochs = StudyEpochs.of(texts, space.data, seed=space.seed)
        refuse_too_few(space, epochs)
        length = eval_seq_len(space)
        if "eval_loss" in space.objectives and not epochs.held_out_loss_tokens(length):
            raise InputError(
                f"space '{space.name}': objectives: eval_loss: of these texts no row with a token "
                f"that carries loss in its first {length:,} is held out: take a larger "
                "data.eval_fraction"
            )
    definition = StudyDefinition(
        space=space,
        model=model.to_json(),
        model_fingerprint=model.fingerprint,
        target=resolved.target,
        texts=None if texts is None else texts.summary,
    )
    return Prepared(
        name=name,
        definition=definition,
        model=model,
        resolved=resolved,
        card=here,
        texts=texts,
        epochs=epochs,
        notes=notes,
        usd_per_hour=usd_per_hour,
    )


def supervised_runner(prepared: Prepared) -> Lanes:
    """Return the real runner; its child starts when it is told to, or with the first trial.

    Where GPUs were chosen each has a lane of its own, or as many together as a trial trains on.
    """
    teams, lanes = teams_of(prepared.cards, size=prepared.cards_per_trial) or [()], []
    for number, team in enumerate(teams):
        runner = prepared.new_runner(
            log_path=worker_log_path(prepared.name, lane=number),
            cards=tuple(card.cuda_name for card in team),
            neighbours=max(0, len(prepared.cards) - 1),
        )
        lanes.append(Lane(runner, " and ".join(c.name for c in team) if len(teams) > 1 else ""))
    return Lanes(lanes)


def lanes_on_ray(prepared: Prepared, cluster: Cluster, *, warn: Callable[[str], None]) -> Lanes:
    """Open a lane on each GPU of the study's product; on each node where it is for a CPU.

    Args:
        prepared: what `prepare` resolved, with the cluster's GPU.
        cluster: where it runs.
        warn: told of GPUs that others hold.

    Raises:
        EnvironmentFault: the study's texts or weights are not on every node, or no GPU is free.
    """
    texts, model = prepared.texts_settings, prepared.model
    paths = [] if texts is None else [texts.directory]
    # The architecture goes along; weights that are a directory's do not.
    if prepared.space.weights == "pretrained" and model.source == "directory" and model.path:
        paths.append(str(model.path.absolute()))
    lanes = cluster.places(
        prepared.new_runner,
        study=prepared.name,
        device=prepared.target.device,
        gpu=prepared.space.gpu,
        paths=tuple(paths),
        keep=partial(keep_outcomes, worker_log_path(prepared.name, lane=0).parent),
        warn=warn,
    )
    return Lanes(lanes)


def drive(
    prepared: Prepared,
    *,
    storage: str,
    watch: Watch,
    warn: Callable[[str], None],
    carried: StudySnapshot | None = None,
    new_runner: Callable[[Prepared], Runner | Lanes] = supervised_runner,
    is_anew: bool = False,
    start: CommandStart | None = None,
) -> StopReason:
    """Create or resume the study and run it until it stops.

    Args:
        prepared: what `prepare` resolved.
        storage: URL of the database.
        watch: shows the study while it runs.
        warn: told of what works less well than it could.
        carried: a study whose trials are taken over where they hold.
        new_runner: what runs the trials.
        is_anew: whether its winner is measured again, and nothing is searched.
        start: of the command, from which on its time budget counts; None for now.

    Raises:
        InputError: the storage's study of that name is about something else, or another study's
            trials cannot be compared with this one's; or the time budget is too short for a trial.
        EnvironmentFault: database, device or disk is not to be had.
        KeyboardInterrupt: somebody asked to stop before the study was open.
    """
    quiet_optuna()
    # What trials of a killed run were saving.
    remove_left()
    forecaster = _forecaster(prepared, warn=warn)
    space = prepared.space
    start = start or CommandStart.now()
    opening_seconds = least_seconds = closing_seconds = 0.0
    if prepared.surface is None:
        opening_seconds = start.opening_seconds
        closing_seconds = start.closing_seconds
        least_seconds = start.least_seconds(space, forecaster)
    if read_identity(runs_directory() / prepared.name) is None:
        # Of a study that is there it is not known yet whether a trial is left to be run.
        spent_seconds = prepared.seconds_since(start) + closing_seconds
        run_time = RunTime.of(space, prepared.clock, spent_seconds=spent_seconds)
        run_time.refuse_too_short(opening_seconds + least_seconds, space)
    lanes = Lanes.of(new_runner(prepared))
    sampler = make_sampler(
        space.sampler,
        space,
        seed=space.seed,
        forecaster=forecaster,
        model=prepared.model,
        lanes=len(lanes.all),
    )
    interruption = Interruption(cancel=lanes.cancel, requests=stop_signals.asked())
    if carried is not None:
        is_own = carried.name == prepared.name
        refuse_incomparable(carried, prepared.definition, is_own=is_own)
    # Signals are requests until all is closed: one more while that lasts costs nothing.
    with (
        interruption.handling_signals(),
        ExitStack() as stack,
    ):
        with interruption.interruptible():
            study = open_study(
                prepared.name,
                url=storage,
                definition=prepared.definition,
                sampler=sampler,
                environment=environment_with(prepared.card),
                home=runs_directory(),
                warn=warn,
            )
            stack.enter_context(study)
            if carried is not None:
                take_over(study, carried, is_valid=forecaster.is_valid, warn=warn)
        try:
            study.cards = max(len(lanes.all), len(prepared.cards))
            # Shown until the runner has ended, too.
            with stack.pop_all(), watch(study, interruption) as listener, lanes:
                if len(lanes.all) > 1:
                    listener(LanesOpened(tuple(lane.name for lane in lanes.all)))
                driver = Driver(
                    study,
                    lanes,
                    forecaster,
                    stopping=_stopping(prepared, sampler, study, listener),
                    spent_seconds=prepared.seconds_since(start) + closing_seconds,
                    least_seconds=least_seconds,
                    clock=prepared.clock,
                    on_event=listener,
                    interruption=interruption,
                )
                spent = study.ledger.trials_spent(since=study.ledger.next_number)
                if spent < space.trials and not is_anew and driver.reason_to_stop() is None:
                    _get_ready(driver, sampler)
                memory = forecaster.tracing
                if memory is not None and memory.other_versions:
                    warn(f"memory is predicted from profiles of {memory.other_versions}")
                return tune(driver, is_anew=is_anew)
        except KeyboardInterrupt:
            # Whatever it was at, storage can go on from there.
            if not interruption.is_requested():
                raise
            return StopReason.INTERRUPTED


def _get_ready(driver: Driver, sampler: BaseSampler) -> None:
    """Begin with all that takes long before the first trial."""
    # Its imports take longer than all that is done here until then.
    for lane in driver.lanes.all:
        lane.runner.start()

    def on_progress(done: int, of: int) -> None:
        driver.on_event(SpaceTraced(done, of))
        driver.time.refuse_too_short(driver.least_seconds, driver.space)

    with driver.interruption.interruptible():
        size = driver.space.size()
        if size is not None and size <= LISTED_MAX:
            # Of a larger space only what bounds leave of it, or what is drawn, is traced.
            kinds = filter(driver.forecaster.is_valid, one_of_each_kind(driver.space))
            driver.forecaster.whole_memory(list(kinds), on_progress=on_progress)
        if isinstance(sampler, GuidedSampler):
            sampler.prepare(lambda _: on_progress)
        if driver.forecaster.tracing is not None:
            driver.forecaster.tracing.end_children()


def _stopping(
    prepared: Prepared, sampler: BaseSampler, study: OpenStudy, listener: Listener
) -> Stopping:
    """Return when the search ends; by what is still to be gained where the sampler can tell."""
    if not isinstance(sampler, GuidedSampler):
        return Stopping(prepared.space, usd_per_hour=prepared.usd_per_hour)

    def outlook(besides: int | None) -> Outlook:
        found = sampler.outlook(study.study, besides=besides)
        if besides is None:
            listener(GainForeseen(found.gain, found.open))
        return found

    return Stopping(
        prepared.space,
        usd_per_hour=prepared.usd_per_hour,
        outlook=outlook,
        fastest_of=partial(sampler.fastest_of, study.study),
        unmeasured_classes=partial(sampler.unmeasured_classes, study.study),
    )


def _forecaster(prepared: Prepared, *, warn: Callable[[str], None]) -> Forecaster:
    target, model, resolved = prepared.target, prepared.model, prepared.resolved
    cache = cache_directory() / "memory"
    shapes = None if prepared.epochs is None else ShapesOnTexts(prepared.epochs)
    memory: MemoryPredictor = CpuMemory(model, cache_dir=cache)
    if target.is_on_gpu:
        least = resolved.host_capability
        memory = TracingPredictor(
            model,
            cache_dir=cache,
            compute_capability=least,
            # What a search asks first comes in several parts.
            tracer=TracingChildren(outlive=True),
        )
    has_texts = prepared.texts is not None
    rule: Rule = partial(resolved.violation, model=model, has_texts=has_texts)
    if prepared.surface is not None:
        memory = RecordedPeaks(recorded_peaks(prepared.surface))
        rule = only_recorded(prepared.surface)
    return build_forecaster(
        model,
        target,
        shapes=shapes,
        predictor=memory,
        violation=rule,
        is_cut_up=target.is_on_gpu,
        warn=warn,
    )
