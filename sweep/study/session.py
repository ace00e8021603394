"""Owns one run of a study, from what was typed to the last trial: resolve it, then drive it.

Knows nothing of options' spelling and prints nothing; who listens is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from optuna.samplers import BaseSampler

from search_spaces.checkpoints import check_weights
from search_spaces.config import TrialConfig
from search_spaces.documents import Document
from search_spaces.errors import InputError
from search_spaces.feasibility import refuse_impossible
from search_spaces.gpus import match_product
from search_spaces.loading import preset_name
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
from sweep.predict.memory.kinds import one_of_each_kind
from sweep.predict.memory.on_cpu import CpuMemory
from sweep.predict.memory.predictor import MemoryPredictor, TracingPredictor
from sweep.predict.on_texts import ShapesOnTexts
from sweep.running.cards import ChosenCard, teams_of
from sweep.running.device_info import Card, environment_with
from sweep.running.lanes import Lane, Lanes
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
from sweep.study.events import GainForeseen, LanesOpened, Listener, SpaceTraced, StopReason
from sweep.study.interruption import Interruption
from sweep.study.preflight import Preflight, SpeedForecast
from sweep.study.quality import eval_seq_len, is_asked
from sweep.study.recorded import RecordedPeaks, only_recorded, recorded_peaks
from sweep.study.stopping import Stopping, price_of
from sweep.study.targets import ResolvedTarget, check_budget, resolve_target
from sweep.study.tuner import tune

Watch = Callable[[OpenStudy, Interruption], AbstractContextManager[Listener]]
"""Shows a study while it runs."""


class Work(Protocol):
    """What `tune` and `confirm_anew` are."""

    def __call__(
        self,
        study: OpenStudy,
        *,
        runner: Runner | Lanes,
        clock: Callable[[], float],
        preflight: Preflight,
        stopping: Stopping,
        on_event: Listener,
        interruption: Interruption,
    ) -> StopReason:
        """Work on an open study and say why that stopped."""
        ...


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
    price_of(space, gpu=resolved.target.gpu)
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


def supervised_runner(prepared: Prepared) -> Runner | Lanes:
    """Return the real runner; its child starts when it is told to, or with the first trial.

    Where cards were chosen each has a lane of its own, or as many together as a trial trains on.
    """
    teams = teams_of(prepared.cards, size=prepared.cards_per_trial)
    if not teams:
        return _runner_of(prepared)
    return Lanes(
        [
            Lane(
                _runner_of(prepared, lane=lane, cards=tuple(card.cuda_name for card in team)),
                name=" and ".join(card.name for card in team) if len(teams) > 1 else "",
                fault=partial(_first_fault, [FaultWatch(card.cuda_name) for card in team]),
            )
            for lane, team in enumerate(teams)
        ]
    )


def _first_fault(watches: Sequence[FaultWatch]) -> str | None:
    return next((fault for watch in watches if (fault := watch()) is not None), None)


def _runner_of(prepared: Prepared, *, lane: int = 0, cards: tuple[str, ...] = ()) -> Runner:
    return SupervisedRunner(
        prepared.model,
        target=prepared.target,
        weights=prepared.space.weights,
        log_path=worker_log_path(prepared.name, lane=lane),
        seed=prepared.space.seed,
        texts=texts_settings(prepared),
        cards=cards,
        neighbours=max(0, len(prepared.cards) - 1),
    )


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


def drive(
    prepared: Prepared,
    *,
    storage: str,
    watch: Watch,
    warn: Callable[[str], None],
    carried: StudySnapshot | None = None,
    new_runner: Callable[[Prepared], Runner | Lanes] = supervised_runner,
    work: Work = tune,
) -> StopReason:
    """Create or resume the study and run it until it stops.

    Args:
        prepared: what `prepare` resolved.
        storage: URL of the database.
        watch: shows the study while it runs.
        warn: told of what works less well than it could.
        carried: a study whose trials are taken over where they hold.
        new_runner: what runs the trials.
        work: what is done with the study once it is open: the search, or measuring again alone.

    Raises:
        InputError: the storage's study of that name is about something else, or another study's
            trials cannot be compared with this one's.
        EnvironmentFault: database, device or disk is not to be had.
        KeyboardInterrupt: somebody asked to stop before the study was open.
    """
    quiet_optuna()
    preflight = _preflight(prepared, warn=warn)
    space, sampler = prepared.space, _sampler(prepared.space, preflight)
    lanes = Lanes.of(new_runner(prepared))
    interruption = Interruption(cancel=lanes.cancel, requests=stop_signals.asked())
    # Signals are requests until all is closed: one more while that lasts costs nothing.
    with interruption.handling_signals(), waits_end_when(interruption.is_requested):
        with interruption.interruptible():
            study = _opened(prepared, storage, sampler, carried, warn)
            if carried is not None:
                _take_over(study, carried, is_valid=preflight.is_valid, warn=warn)
        try:
            study.cards = max(len(lanes.all), len(prepared.cards))
            # Shown until the runner has ended, too.
            with study, watch(study, interruption) as listener, lanes:
                if len(lanes.all) > 1:
                    listener(LanesOpened(tuple(lane.name for lane in lanes.all)))
                if work is tune and _has_trials_left(study):
                    # Its imports take longer than all that is done here until the first trial.
                    lanes.start()
                    _look_ahead(space, sampler, preflight, interruption, listener)
                return work(
                    study,
                    runner=lanes,
                    clock=prepared.clock,
                    preflight=preflight,
                    stopping=Stopping(
                        space,
                        usd_per_hour=price_of(space, gpu=prepared.target.gpu),
                        outlook=partial(_outlook, sampler, study, listener),
                        fastest_of=partial(_fastest_of, sampler, study),
                    ),
                    on_event=listener,
                    interruption=interruption,
                )
        except KeyboardInterrupt:
            # Whatever it was at, storage can go on from there.
            if not interruption.is_requested():
                raise
            return StopReason.INTERRUPTED


def _has_trials_left(study: OpenStudy) -> bool:
    ledger = study.ledger
    return ledger.trials_spent(since=ledger.next_number) < study.definition.space.trials


def _look_ahead(
    space: SearchSpace,
    sampler: BaseSampler,
    preflight: Preflight,
    interruption: Interruption,
    listener: Listener,
) -> None:
    """Trace what the space's memory is predicted from, and foresee the whole space."""
    with interruption.interruptible():
        preflight.prepare(
            one_of_each_kind(space), on_progress=lambda *done: listener(SpaceTraced(*done))
        )
        if isinstance(sampler, GuidedSampler):
            sampler.prepare()


def _outlook(
    sampler: BaseSampler, study: OpenStudy, listener: Listener, besides: int | None
) -> Outlook | None:
    """Return what is still to be gained, and say it; None from a sampler that cannot tell."""
    if not isinstance(sampler, GuidedSampler):
        return None
    outlook = sampler.outlook(study.study, besides=besides)
    if besides is None:
        listener(GainForeseen(outlook.gain, outlook.open))
    return outlook


def _fastest_of(
    sampler: BaseSampler, study: OpenStudy, is_wanted: Callable[[TrialConfig], bool]
) -> TrialConfig | None:
    """Return what is expected to be the fastest of some; None from a sampler that cannot tell."""
    if not isinstance(sampler, GuidedSampler):
        return None
    return sampler.fastest_of(study.study, is_wanted)


def _sampler(space: SearchSpace, preflight: Preflight) -> BaseSampler:
    return make_sampler(space.sampler, space, seed=space.seed, preflight=preflight)


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
    for problem in carried.warnings if carried.identity == study.identity else ():
        warn(problem)
    if carried.identity == study.identity:
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


def _preflight(prepared: Prepared, *, warn: Callable[[str], None]) -> Preflight:
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
    return Preflight(
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
