"""One run of a study: what was typed is resolved into it, then it is opened and driven."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from optuna.samplers import BaseSampler

from search_spaces.checkpoints import check_weights
from search_spaces.config import TrialConfig
from search_spaces.documents import Document
from search_spaces.errors import InputError
from search_spaces.feasibility import refuse_impossible
from search_spaces.gpus import match_product
from search_spaces.loading import load_space, preset_name
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.offering import Offered, refuse_without_texts
from search_spaces.rules import Violation, violation
from search_spaces.space import SearchSpace
from search_spaces.validation import validate
from storage.definition import StudyDefinition, StudySnapshot, Target
from storage.opening import open_study
from storage.patience import waits_end_when
from storage.reading import changed_versions
from storage.study import OpenStudy
from storage.surfaces import Surface
from sweep import stop_signals
from sweep.data.choice import (
    ReadTexts,
    is_same_choice,
    space_with_texts,
    texts_of_study,
)
from sweep.data.study_epochs import StudyEpochs, refuse_too_few
from sweep.data.texts import PreparedTexts, TextsRequest, prepare_texts
from sweep.nvml import FaultWatch
from sweep.paths import cache_directory, runs_directory, worker_log_path
from sweep.predict.forecast import Forecaster, SpeedForecast
from sweep.predict.memory.predictor import (
    CpuMemory,
    MemoryPredictor,
    TracingPredictor,
    one_of_each_kind,
)
from sweep.predict.on_texts import ShapesOnTexts
from sweep.running.cards import ChosenCard, teams_of
from sweep.running.device_info import Card, environment_with
from sweep.running.lanes import Lane, Lanes
from sweep.running.on_ray.cluster import Cluster
from sweep.running.runner import Runner
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import TextsSettings
from sweep.sampling.guided import GuidedSampler, Outlook
from sweep.sampling.samplers import make_sampler, quiet_optuna
from sweep.study.asked import (
    as_held,
    default_study_name,
    held_in,
    overridden,
    refuse_reserved,
    with_confirm,
)
from sweep.study.carrying import carry_over, refuse_incomparable
from sweep.study.driver import Driver
from sweep.study.events import GainForeseen, LanesOpened, Listener, SpaceTraced, StopReason
from sweep.study.interruption import Interruption
from sweep.study.quality import eval_seq_len, is_asked
from sweep.study.recorded import RecordedPeaks, only_recorded, recorded_peaks
from sweep.study.stopping import Stopping, price_of
from sweep.study.targets import ResolvedTarget, check_budget, resolve_target
from sweep.study.tuner import tune

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
    """The card in this machine; None on a CPU."""
    cards: tuple[ChosenCard, ...] = ()
    """Those that trials run on at a time, all of one product; none where nobody chose."""
    texts: PreparedTexts | None = None
    """What its trials train on; None for random rows."""
    epochs: StudyEpochs | None = None
    """What passes over those texts are to its configurations."""
    notes: tuple[str, ...] = ()
    """What the texts made of the space, for a person."""
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

    @property
    def cards_per_trial(self) -> int:
        """Cards that the widest of its trials trains on together; 1 on a CPU, which all share."""
        if self.target.device == "cpu":
            return 1
        space = self.space
        return int(max(*space.values_of("data_parallel"), space.baseline_config().data_parallel))


def prepare(
    space_name: str,
    *,
    overrides: Mapping[str, Any],
    held: Mapping[str, Any] | None = None,
    study: str | None,
    card: Callable[[], Card | None],
    read_texts: ReadTexts = prepare_texts,
    stored: Callable[[str], StudyDefinition | None] = lambda _: None,
    narrowed: Callable[[SearchSpace], SearchSpace] = lambda space: space,
) -> Prepared:
    """Resolve what a run is about, before anything is opened or started.

    Args:
        space_name: a preset or a YAML file.
        overrides: keys of the space with what was typed instead; None leaves the space's value.
            Under ``confirm`` false, or some keys of the section, which is switched on by them;
            under ``data`` some keys of the section.
        held: knobs that were typed: fixed, while the rest of the space is searched.
        study: its name; None derives one from the space and the overrides.
        card: reads the card in this machine.
        read_texts: reads and tokenizes texts, or finds what did so before.
        stored: reads the definition of the study of that name; None where there is none. A study
            of texts goes on with them where nobody names any.
        narrowed: returns what of a space can be run where it is to run.

    Raises:
        InputError: something that was typed, written or named is not right.
        EnvironmentFault: the card, or the network for a hub id, is not to be had.
    """
    known = None if study is None else stored(study)
    space, changed = overridden(space_name, overrides, known)
    space = narrowed(space)
    refuse_without_texts(space if not held else as_held(space, held))
    model = load_model_spec(space.model)
    here = card() if space.gpu != "cpu" else None
    # Texts may take a minute to read: what can be refused without them is refused before.
    resolve_target(space, here)
    if space.weights == "pretrained":
        check_weights(model)
    if known is None and study is None and space.data is not None and not held:
        known = stored(default_study_name(space, changed))
    texts = _texts(space, known, model, read_texts)
    offered = Offered(space)
    if texts is not None:
        is_preset = preset_name(space_name) is not None
        offered = space_with_texts(space, texts, model=model, is_preset=is_preset, held=held or ())
    space, changed = held_in(offered.space, held or {}, changed, typed=space_name)
    space, sampled = _sampled(space)
    name = default_study_name(space, changed) if study is None else study
    refuse_reserved(name)
    return _checked(name, space, model, here, texts, (*offered.notes, *sampled))


def prepare_again(
    name: str,
    stored: StudyDefinition,
    *,
    confirm: Mapping[str, Any],
    card: Callable[[], Card | None],
    read_texts: ReadTexts = prepare_texts,
) -> Prepared:
    """Resolve what measuring a stored study's winner again is about.

    Args:
        name: of the study.
        stored: its definition.
        confirm: keys of the space's section with what was typed instead.
        card: reads the card in this machine.
        read_texts: as for `prepare`.

    Raises:
        InputError: a value that the section does not take, or another card than the study's.
        EnvironmentFault: the card is not to be had.
    """
    values = {**stored.space.model_dump(), "confirm": with_confirm(stored.space, confirm)}
    space = validate(SearchSpace, values, Document(f"study '{name}'"))
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
    """Return a study whose model, card, texts and budget go together."""
    if space.weights == "pretrained":
        check_weights(model)
    resolved = resolve_target(space, here)
    check_budget(space, model, resolved.target)
    refuse_impossible(
        space,
        model=model,
        compute_capability=resolved.compute_capability,
        device=resolved.target.device,
        has_texts=texts is not None,
    )
    price_of(space, gpu=_paid_gpu(resolved.target))
    epochs = None
    if texts is not None and space.data is not None:
        epochs = StudyEpochs.of(texts, space.data, seed=space.seed)
        refuse_too_few(space, epochs)
        _refuse_unanswerable(space, epochs)
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
    )


def _refuse_unanswerable(space: SearchSpace, epochs: StudyEpochs) -> None:
    """Refuse texts of which nothing that is held out can say what was learned."""
    length = eval_seq_len(space)
    if is_asked(space) and not epochs.held_out_loss_tokens(length):
        raise InputError(
            f"space '{space.name}': objectives: eval_loss: of these texts no row with a token that "
            f"carries loss in its first {length:,} is held out: take a larger data.eval_fraction"
        )


def _sampled(space: SearchSpace) -> tuple[SearchSpace, tuple[str, ...]]:
    """Return a space with a sampler that learns from losses, and what that changed.

    The guided sampler knows the physics of speed and memory, and nothing of what is learned.
    """
    if not is_asked(space) or space.sampler != "guided":
        return space, ()
    note = (
        f"Held-out loss cannot be foreseen, so the sampler is tpe, and the search ends after "
        f"{space.trials} trials, or its time budget."
    )
    return space.model_copy(update={"sampler": "tpe"}), (note,)


def _texts(
    space: SearchSpace, stored: StudyDefinition | None, model: ModelSpec, read: ReadTexts
) -> PreparedTexts | None:
    """Return what a space's texts are, those of a stored study where they are the same; None for a
    space without."""
    if space.data is None:
        return None
    if stored is not None and is_same_choice(stored.space.data, space.data):
        return texts_of_study(stored, model=model, read=read)
    return read(TextsRequest.of(space.data, model))


def supervised_runner(prepared: Prepared) -> Lanes:
    """Return the real runner; its child starts when it is told to, or with the first trial.

    Where GPUs were chosen each has a lane of its own, or as many together as a trial trains on.
    """

    def lane(number: int, team: Sequence[ChosenCard], *, is_alone: bool) -> Lane:
        runner = SupervisedRunner(
            prepared.model,
            target=prepared.target,
            weights=prepared.space.weights,
            log_path=worker_log_path(prepared.name, lane=number),
            seed=prepared.space.seed,
            texts=texts_settings(prepared),
            cards=tuple(card.cuda_name for card in team),
            neighbours=max(0, len(prepared.cards) - 1),
        )
        watches = [FaultWatch(card.cuda_name) for card in team]
        return Lane(
            runner,
            name="" if is_alone else " and ".join(card.name for card in team),
            fault=lambda: next((fault for watch in watches if (fault := watch())), None),
        )

    teams = teams_of(prepared.cards, size=prepared.cards_per_trial) or [()]
    return Lanes([lane(at, team, is_alone=len(teams) == 1) for at, team in enumerate(teams)])


def texts_settings(prepared: Prepared) -> TextsSettings | None:
    """Return where a worker finds the study's texts; None for random rows."""
    texts, choice = prepared.texts, prepared.space.data
    if texts is None or choice is None:
        return None
    return TextsSettings(
        directory=str(texts.directory.absolute()),
        fingerprint=texts.summary.fingerprint,
        eval_fraction=choice.eval_fraction,
    )


def card_on_ray(cluster: Cluster, space: str, overrides: Mapping[str, Any]) -> Card | None:
    """Return the card that a run of a space has on a cluster, for `prepare`.

    Raises:
        InputError: no such space, or the cluster has cards of several products and none is named.
        EnvironmentFault: the cluster has no card, or not the libraries that are here.
    """
    return cluster.card(overrides.get("gpu") or load_space(space).gpu)


def lanes_on_ray(prepared: Prepared, cluster: Cluster, *, warn: Callable[[str], None]) -> Lanes:
    """Open a lane on each card of the study's product; on each node where it is for a CPU.

    Args:
        prepared: what `prepare` resolved, with the card of `card_on_ray`.
        cluster: where it runs.
        warn: told of cards that others hold.

    Raises:
        EnvironmentFault: the study's texts or weights are not on every node, or no card is free.
    """
    texts, model = texts_settings(prepared), prepared.model
    paths = [] if texts is None else [texts.directory]
    # The architecture goes along; weights that are a directory's do not.
    if prepared.space.weights == "pretrained" and model.source == "directory" and model.path:
        paths.append(str(model.path.absolute()))
    new_runner = partial(
        SupervisedRunner,
        model,
        target=prepared.target,
        weights=prepared.space.weights,
        seed=prepared.space.seed,
        texts=texts,
    )
    places = cluster.places(
        new_runner,
        # Another database may have a study of this name, and its runners the same nodes.
        study=f"{prepared.name}-{secrets.token_hex(4)}",
        device=prepared.target.device,
        gpu=prepared.space.gpu,
        paths=tuple(paths),
        warn=warn,
    )
    return Lanes([Lane(one.runner, name=one.name, fault=one.runner.fault) for one in places])


def drive(
    prepared: Prepared,
    *,
    storage: str,
    watch: Watch,
    warn: Callable[[str], None],
    carried: StudySnapshot | None = None,
    new_runner: Callable[[Prepared], Runner | Lanes] = supervised_runner,
    is_anew: bool = False,
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

    Raises:
        InputError: the storage's study of that name is about something else, or another study's
            trials cannot be compared with this one's.
        EnvironmentFault: database, device or disk is not to be had.
        KeyboardInterrupt: somebody asked to stop before the study was open.
    """
    quiet_optuna()
    forecaster, space = _forecaster(prepared, warn=warn), prepared.space
    lanes = Lanes.of(new_runner(prepared))
    sampler = make_sampler(
        space.sampler, space, seed=space.seed, forecaster=forecaster, lanes=len(lanes.all)
    )
    interruption = Interruption(cancel=lanes.cancel, requests=stop_signals.asked())
    # Signals are requests until all is closed: one more while that lasts costs nothing.
    with interruption.handling_signals(), waits_end_when(interruption.is_requested):
        with interruption.interruptible():
            study = _opened(prepared, storage, sampler, carried, warn)
            if carried is not None:
                _take_over(study, carried, is_valid=forecaster.is_valid, warn=warn)
        try:
            study.cards = max(len(lanes.all), len(prepared.cards))
            # Shown until the runner has ended, too.
            with study, watch(study, interruption) as listener, lanes:
                if len(lanes.all) > 1:
                    listener(LanesOpened(tuple(lane.name for lane in lanes.all)))
                driver = Driver(
                    study,
                    lanes,
                    forecaster,
                    stopping=_stopping(prepared, sampler, study, listener),
                    clock=prepared.clock,
                    on_event=listener,
                    interruption=interruption,
                )
                ledger = study.ledger
                is_left = ledger.trials_spent(since=ledger.next_number) < space.trials
                if is_left and not is_anew and driver.reason_to_stop() is None:
                    # Its imports take longer than all that is done here until the first trial.
                    lanes.start()
                    with interruption.interruptible():
                        _look_ahead(driver, sampler)
                return tune(driver, is_anew=is_anew)
        except KeyboardInterrupt:
            # Whatever it was at, storage can go on from there.
            if not interruption.is_requested():
                raise
            return StopReason.INTERRUPTED


def _look_ahead(driver: Driver, sampler: BaseSampler) -> None:
    """Trace what the space's memory is predicted from, and foresee the whole space."""
    driver.forecaster.prepare(
        one_of_each_kind(driver.space),
        on_progress=lambda *done: driver.on_event(SpaceTraced(*done)),
    )
    if isinstance(sampler, GuidedSampler):
        sampler.prepare()


def _stopping(
    prepared: Prepared, sampler: BaseSampler, study: OpenStudy, listener: Listener
) -> Stopping:
    """Return when the search ends; by what is still to be gained where the sampler can tell."""
    price = price_of(prepared.space, gpu=_paid_gpu(prepared.target))
    if not isinstance(sampler, GuidedSampler):
        return Stopping(prepared.space, usd_per_hour=price)

    def outlook(besides: int | None) -> Outlook:
        found = sampler.outlook(study.study, besides=besides)
        if besides is None:
            listener(GainForeseen(found.gain, found.open))
        return found

    return Stopping(
        prepared.space,
        usd_per_hour=price,
        outlook=outlook,
        fastest_of=lambda is_wanted: sampler.fastest_of(study.study, is_wanted),
    )


def _paid_gpu(target: Target) -> str:
    """Return the catalogue's name of the GPU that is there, which is what has a price."""
    product = target.emulated_on or target.gpu
    known = match_product(product)
    return product if known is None else known.name


def _take_over(
    study: OpenStudy,
    carried: StudySnapshot,
    *,
    is_valid: Callable[[TrialConfig], bool],
    warn: Callable[[str], None],
) -> None:
    """Take over another study's trials, and warn of what makes them differ from this one's."""
    try:
        taken = carry_over(study, carried, is_valid=is_valid)
    except BaseException:
        study.close()
        raise
    if carried.identity == study.identity:
        for problem in carried.warnings:
            warn(problem)
        if not taken.new:
            warn(f"the spool of '{carried.name}' has no result that the study has not")
    elif not taken.all:
        warn(f"no trial of study '{carried.name}' holds in this space: none is carried over")
    changed = changed_versions(carried.environment, study.environment)
    if taken.new and changed:
        warn(
            f"trials of '{carried.name}' were measured before {', '.join(changed)}; they may not "
            "compare with this study's"
        )


def _opened(
    prepared: Prepared,
    storage: str,
    sampler: BaseSampler,
    carried: StudySnapshot | None,
    warn: Callable[[str], None],
) -> OpenStudy:
    if carried is not None:
        is_own = carried.name == prepared.name
        refuse_incomparable(carried, prepared.definition, is_own=is_own)
    return open_study(
        prepared.name,
        url=storage,
        definition=prepared.definition,
        sampler=sampler,
        environment=environment_with(prepared.card),
        home=runs_directory(),
        warn=warn,
    )


def _forecaster(prepared: Prepared, *, warn: Callable[[str], None]) -> Forecaster:
    target, model, resolved = prepared.target, prepared.model, prepared.resolved
    is_on_card, cache = target.device == "cuda", cache_directory() / "memory"
    memory: MemoryPredictor = (
        TracingPredictor(model, cache_dir=cache, compute_capability=resolved.host_capability)
        if is_on_card
        else CpuMemory(model, cache_dir=cache)
    )
    rule: Callable[[TrialConfig], Violation | None] = partial(
        violation,
        model=model,
        compute_capability=resolved.compute_capability,
        device=target.device,
        has_texts=prepared.texts is not None,
    )
    if prepared.surface is not None:
        memory = RecordedPeaks(recorded_peaks(prepared.surface))
        rule = only_recorded(prepared.surface)
    # Speed is that of the card that really runs, where it has a data sheet.
    host = match_product(target.emulated_on or target.gpu) if is_on_card else None
    aim = None if target.emulated_on is None else match_product(target.gpu)
    shapes = None if prepared.epochs is None else ShapesOnTexts(prepared.epochs)
    return Forecaster(
        model=model,
        budget_bytes=target.budget_bytes,
        violation=rule,
        predictor=memory,
        speed=None if host is None else SpeedForecast(model=model, gpu=host, shapes=shapes),
        target_speed=None if aim is None else SpeedForecast(model=model, gpu=aim, shapes=shapes),
        shapes=shapes,
        is_cut_up=is_on_card,
        warn=warn,
    )
