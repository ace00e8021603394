"""One run of a study that is prepared: opened, driven and closed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial

from optuna.samplers import BaseSampler

from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.directory import keep_outcomes, read_identity
from qlora_sweep.storage.study import OpenStudy, open_study
from qlora_sweep.sweep import stop_signals
from qlora_sweep.sweep.paths import cache_directory, runs_directory, worker_log_path
from qlora_sweep.sweep.predict.building import build_forecaster
from qlora_sweep.sweep.predict.forecast import Forecaster, Rule
from qlora_sweep.sweep.predict.memory.predictor import (
    MemoryPredictor,
    one_of_each_kind,
    predictor_here,
)
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from qlora_sweep.sweep.predict.on_dataset import ShapesOnDataset
from qlora_sweep.sweep.running.device_info import environment_with, teams_of
from qlora_sweep.sweep.running.ray_nodes import Cluster
from qlora_sweep.sweep.running.runner import Lane, Lanes, Runner
from qlora_sweep.sweep.sampling.encoding import LISTED_MAX
from qlora_sweep.sweep.sampling.guided import GuidedSampler, Outlook
from qlora_sweep.sweep.sampling.samplers import make_sampler, quiet_optuna
from qlora_sweep.sweep.scratch import remove_left
from qlora_sweep.sweep.study.carrying import refuse_incomparable, take_over
from qlora_sweep.sweep.study.driver import Driver
from qlora_sweep.sweep.study.events import (
    GainForeseen,
    Interruption,
    LanesOpened,
    Listener,
    SpaceTraced,
    StopReason,
)
from qlora_sweep.sweep.study.prepared import Prepared
from qlora_sweep.sweep.study.recorded import RecordedPeaks, only_recorded, recorded_peaks
from qlora_sweep.sweep.study.run_time import CommandStart, RunTime
from qlora_sweep.sweep.study.stopping import Stopping
from qlora_sweep.sweep.study.tuner import tune

Watch = Callable[[OpenStudy, Interruption], AbstractContextManager[Listener]]
"""Shows a study while it runs."""


def supervised_runner(prepared: Prepared) -> Lanes:
    """Return the real runner; its child starts when it is told to, or with the first trial.

    Where GPUs were chosen each has a lane of its own, or as many together as a trial trains on.
    """
    teams = teams_of(prepared.gpus, size=prepared.gpus_per_trial) or [()]
    lanes = []
    for number, team in enumerate(teams):
        name = ""
        if len(teams) > 1:
            name = " and ".join(gpu.name for gpu in team)
        runner = prepared.new_runner(
            log_path=worker_log_path(prepared.name, lane=number),
            gpus=tuple(gpu.cuda_name for gpu in team),
            concurrent_jobs=max(0, len(prepared.gpus) - 1),
        )
        lanes.append(Lane(runner, name))
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
    dataset = prepared.dataset_settings
    model = prepared.model
    paths = []
    if dataset is not None:
        paths.append(dataset.directory)
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
    overhead = _Overhead.of(prepared, start or CommandStart.now(), forecaster)
    overhead.refuse_too_short()
    lanes = Lanes.of(new_runner(prepared))
    sampler = _sampler(prepared, forecaster, lanes)
    interruption = Interruption(cancel=lanes.cancel, requests=stop_signals.asked())
    if carried is not None:
        is_own = carried.name == prepared.name
        refuse_incomparable(carried, prepared.definition, is_own=is_own)
    # Signals are requests until all is closed: one more while that lasts costs nothing.
    with interruption.handling_signals(), ExitStack() as stack:
        with interruption.interruptible():
            study = stack.enter_context(_opened(prepared, sampler, url=storage, warn=warn))
            if carried is not None:
                take_over(study, carried, is_valid=forecaster.is_valid, warn=warn)
        try:
            study.gpus = max(len(lanes.all), len(prepared.gpus))
            # Shown until the runner has ended, too.
            with stack.pop_all(), watch(study, interruption) as listener, lanes:
                if len(lanes.all) > 1:
                    listener(LanesOpened(tuple(lane.name for lane in lanes.all)))
                driver = Driver(
                    study,
                    lanes,
                    forecaster,
                    stopping=_stopping(prepared, sampler, study, listener),
                    spent_seconds=overhead.spent_seconds,
                    least_seconds=overhead.least_seconds,
                    clock=prepared.clock,
                    on_event=listener,
                    interruption=interruption,
                )
                if not is_anew:
                    _get_ready(driver, sampler)
                tracing = forecaster.tracing
                if tracing is not None and tracing.other_versions:
                    warn(f"memory is predicted from profiles of {tracing.other_versions}")
                return tune(driver, is_anew=is_anew)
        except KeyboardInterrupt:
            # Whatever was interrupted, the study can be resumed from what is stored.
            if not interruption.is_requested():
                raise
            return StopReason.INTERRUPTED


@dataclass(frozen=True)
class _Overhead:
    """Seconds that a command takes beside its trials; none where trials were recorded, which alone
    take recorded seconds."""

    prepared: Prepared
    start: CommandStart
    opening_seconds: float = 0.0
    least_seconds: float = 0.0
    """From the worker's start until the first trial is measured."""
    closing_seconds: float = 0.0

    @classmethod
    def of(cls, prepared: Prepared, start: CommandStart, forecaster: Forecaster) -> _Overhead:
        """Return those of a command that began at a moment."""
        if prepared.surface is not None:
            return cls(prepared, start)
        return cls(
            prepared,
            start,
            opening_seconds=start.opening_seconds,
            least_seconds=start.least_seconds(prepared.space, forecaster),
            closing_seconds=start.closing_seconds,
        )

    @property
    def spent_seconds(self) -> float:
        """Of the time budget, what the command took by now, and what it takes after its trials."""
        return self.prepared.seconds_since(self.start) + self.closing_seconds

    def refuse_too_short(self) -> None:
        """Raise `InputError` where a new study's time budget is too short for a trial. Of a study
        that is there it is not known yet whether a trial is left to be run."""
        prepared = self.prepared
        if read_identity(runs_directory() / prepared.name) is not None:
            return
        run_time = RunTime.of(prepared.space, prepared.clock, spent_seconds=self.spent_seconds)
        run_time.refuse_too_short(self.opening_seconds + self.least_seconds, prepared.space)


def _opened(
    prepared: Prepared, sampler: BaseSampler, *, url: str, warn: Callable[[str], None]
) -> OpenStudy:
    return open_study(
        prepared.name,
        url=url,
        definition=prepared.definition,
        sampler=sampler,
        environment=environment_with(prepared.gpu),
        home=runs_directory(),
        warn=warn,
    )


def _get_ready(driver: Driver, sampler: BaseSampler) -> None:
    """Begin with all that takes long before the first trial of a search, where any is to be run."""
    ledger = driver.study.ledger
    spent = ledger.trials_spent(since=ledger.next_number)
    if spent >= driver.space.trials or driver.reason_to_stop() is not None:
        return
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


def _sampler(prepared: Prepared, forecaster: Forecaster, lanes: Lanes) -> BaseSampler:
    space = prepared.space
    return make_sampler(
        space.sampler,
        space,
        seed=space.seed,
        forecaster=forecaster,
        model=prepared.model,
        lanes=len(lanes.all),
    )


def _stopping(
    prepared: Prepared, sampler: BaseSampler, study: OpenStudy, listener: Listener
) -> Stopping:
    """Return when the search ends; by what is still to be gained where the sampler can tell."""
    stopping = Stopping(prepared.space, usd_per_hour=prepared.usd_per_hour)
    if not isinstance(sampler, GuidedSampler):
        return stopping

    def outlook(besides: int | None) -> Outlook:
        expected = sampler.outlook(study.study, besides=besides)
        if besides is None:
            listener(GainForeseen(expected.gain, expected.open))
        return expected

    return replace(
        stopping,
        outlook=outlook,
        fastest_of=partial(sampler.fastest_of, study.study),
        unmeasured_classes=partial(sampler.unmeasured_classes, study.study),
    )


def _forecaster(prepared: Prepared, *, warn: Callable[[str], None]) -> Forecaster:
    target = prepared.target
    model = prepared.model
    shapes = None
    if prepared.epochs is not None:
        shapes = ShapesOnDataset(prepared.epochs)
    rule: Rule = partial(
        prepared.resolved.violation, model=model, has_dataset=prepared.dataset is not None
    )
    memory: MemoryPredictor
    if prepared.surface is not None:
        memory = RecordedPeaks(recorded_peaks(prepared.surface))
        rule = only_recorded(prepared.surface)
    else:
        memory = predictor_here(
            model,
            is_on_gpu=target.is_on_gpu,
            cache_dir=cache_directory() / "memory",
            compute_capability=prepared.resolved.host_capability,
            # What a search asks first comes in several parts.
            tracer=TracingChildren(outlive=True),
        )
    return build_forecaster(
        model,
        target,
        shapes=shapes,
        predictor=memory,
        violation=rule,
        is_cut_up=target.is_on_gpu,
        warn=warn,
    )
