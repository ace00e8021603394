"""`run` and `confirm` where this process drives the study: its GPUs, its view, its conclusion."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from qlora_sweep.reports import format as units
from qlora_sweep.reports.answer import stopped_words
from qlora_sweep.reports.page import render, write_page
from qlora_sweep.reports.view import StudyView, view_of
from qlora_sweep.reports.words import emulation_note
from qlora_sweep.search_spaces.documents import home_expanded
from qlora_sweep.search_spaces.errors import InputError, NothingFits, quote, words_of
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.loading import load_space
from qlora_sweep.search_spaces.redaction import redact
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudyDefinition, StudySnapshot
from qlora_sweep.storage.reading import read_spooled_study, read_study
from qlora_sweep.storage.records import RETRYABLE
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.storage.surfaces import read_surface
from qlora_sweep.storage.urls import parse_url
from qlora_sweep.sweep.data.choice import ReadDataset
from qlora_sweep.sweep.paths import STORAGE, report_path, runs_directory, storage_url
from qlora_sweep.sweep.request import RunRequest, Where
from qlora_sweep.sweep.running import device_info as gpus
from qlora_sweep.sweep.running.device_info import ChosenGpu, GpuInfo, read_gpu
from qlora_sweep.sweep.running.ray_nodes import Cluster, checked_address, joined
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.running.runner import Lanes, Runner
from qlora_sweep.sweep.stop_signals import INTERRUPTED
from qlora_sweep.sweep.study import recorded, session
from qlora_sweep.sweep.study.events import Interruption, Listener, StopReason, undisturbed
from qlora_sweep.sweep.study.prepared import Prepared, prepare, prepare_again
from qlora_sweep.sweep.study.run_time import MARGIN, CommandStart
from qlora_sweep.sweep.study.session import Watch, drive
from qlora_sweep.sweep.terminal import console
from qlora_sweep.sweep.terminal.board import Board, fixed_words, search_words
from qlora_sweep.sweep.terminal.commands import read_for_report
from qlora_sweep.sweep.terminal.dataset import prepared as read_dataset
from qlora_sweep.sweep.terminal.listings import warn
from qlora_sweep.sweep.terminal.live import watching
from qlora_sweep.sweep.terminal.options import seconds
from qlora_sweep.sweep.terminal.summary import last_screen, why_invalid

STEPS_WITHOUT_END = 1_000_000
_REASONS = {
    StopReason.TIME_SPENT: "The time budget is spent; the same command resumes the study.",
    StopReason.DOLLARS_SPENT: "The study's dollars are spent; a higher --max-dollars resumes it.",
    StopReason.EXHAUSTED: "Every configuration of the space has been tried.",
    StopReason.INTERRUPTED: "Interrupted; the same command resumes the study.",
}

_LIMITS = {
    StopReason.TIME_SPENT: "the time budget",
    StopReason.DOLLARS_SPENT: "the study's money",
}


class LocalGpus:
    """Where trials run: the GPUs of this machine that were typed, read when a space asks for one.

    Other places derive from it.
    """

    def __init__(self, devices: str | None) -> None:
        self.typed = devices
        self.gpus: tuple[ChosenGpu, ...] = ()

    def first(self) -> GpuInfo | None:
        """Return the GPU that decides what a study is for: all that run its trials are like it."""
        if self.typed is None:
            return read_gpu()
        self.gpus = self.gpus or gpus.choose_gpus(self.typed, gpus.read_gpus())
        return self.gpus[0].info

    def narrowed(self, space: SearchSpace) -> SearchSpace:
        """Return the part of a space that can be run here."""
        return space

    def given_to(self, prepared: Prepared) -> Prepared:
        """Return a study with the GPUs that it runs on.

        Raises:
            InputError: it runs on none, or fewer than one of its trials trains on.
            EnvironmentFault: nothing was typed, and not so many GPUs are to be had.
        """
        size = prepared.gpus_per_trial
        if self.typed is None:
            if size == 1:
                return replace(prepared, gpus=())
            return replace(prepared, gpus=gpus.gpus_for(size, gpus.read_gpus()))
        if not self.gpus:
            raise InputError(f"--devices {self.typed}: {prepared.space.name} is for the CPU")
        if len(self.gpus) < size:
            needed = f"data_parallel {size} trains on {size} GPUs at once"
            raise InputError(f"--devices {self.typed}: {needed}, not on {len(self.gpus)}")
        return replace(prepared, gpus=self.gpus)

    def new_runner(self, prepared: Prepared) -> Runner | Lanes:
        """Return what runs the trials of a study."""
        return session.supervised_runner(prepared)

    def close(self) -> None:
        """Leave it."""


class RayGpus(LocalGpus):
    """A Ray cluster, joined when a space asks for a GPU, or for what runs its trials."""

    def __init__(self, request: RunRequest, address: str, warn: Callable[[str], None]) -> None:
        super().__init__(None)
        self._request = request
        self._address = checked_address(address)
        self._warn = warn
        self._stack = ExitStack()
        self._joined: Cluster | None = None

    def first(self) -> GpuInfo | None:
        """Return the cluster's GPU of the product that the space is for."""
        typed = self._request.overrides.get("gpu")
        return self._cluster().gpu_info(typed or load_space(self._request.space).gpu)

    def given_to(self, prepared: Prepared) -> Prepared:
        """Return the study as it is: its GPUs are not this machine's."""
        if (size := prepared.gpus_per_trial) > 1:
            many = f"data_parallel {size} trains on many GPUs, and a trial has one on a cluster"
            raise InputError(f"--on ray:{self._address}: {many}: run it on a machine, --devices")
        return prepared

    def new_runner(self, prepared: Prepared) -> Runner | Lanes:
        """Return a lane on each GPU of the cluster."""
        return session.lanes_on_ray(prepared, self._cluster(), warn=self._warn)

    def _cluster(self) -> Cluster:
        if self._joined is None:
            console.announce_if_slow("Asking the nodes of the Ray cluster ...")
            self._joined = Cluster(self._stack.enter_context(joined(self._address)))
        return self._joined

    def close(self) -> None:
        """Leave the cluster."""
        self._stack.close()


class Recorded(LocalGpus):
    """Trials that were recorded, and answer as they did."""

    def __init__(self, file: str) -> None:
        super().__init__(None)
        self.surface = read_surface(file)
        self._runner = ReplayRunner()

    def first(self) -> GpuInfo:
        """Return the GPU that measured them."""
        gpu = self.surface.measured_on
        memory = gpu.memory_bytes
        return GpuInfo(gpu.product, memory, memory, gpu.compute_capability, None, None)

    def narrowed(self, space: SearchSpace) -> SearchSpace:
        """Return the space of what was recorded."""
        return recorded.space_of(self.surface, space)

    def given_to(self, prepared: Prepared) -> Prepared:
        """Return the study with what answers for its GPU.

        Raises:
            InputError: the surface is of a model of that name and another architecture, or of
                nothing that the space holds.
        """
        if prepared.model.fingerprint != self.surface.model.fingerprint:
            raise InputError(f"{self.surface.name}: its {prepared.model.name} is another model")
        definition = prepared.definition
        target = recorded.target_of(self.surface, definition.target)
        budget = target.budget_bytes
        surface = recorded.within(self.surface, prepared.space, budget_bytes=budget)
        records = recorded.records_of(surface, budget_bytes=budget)
        seconds = recorded.PAUSE_SECONDS
        self._runner = runner = ReplayRunner(records, pause=lambda: time.sleep(seconds))
        return replace(
            prepared,
            definition=replaced(definition, target=target),
            resolved=replace(prepared.resolved, target=target),
            surface=surface,
            clock=lambda: runner.device_seconds,
        )

    def new_runner(self, prepared: Prepared) -> Runner:
        """Return what answers as it was recorded."""
        return self._runner


def _place(request: RunRequest, where: Where, warn: Callable[[str], None]) -> LocalGpus:
    """Return where a study runs that this process drives.

    Raises:
        InputError: it is another machine, or GPUs were named where none of this machine's take
            part.
    """
    if where.kind == "local":
        return LocalGpus(request.devices)
    if where.kind not in ("ray", "recorded"):
        must = f"on must be local, ray:ADDRESS or recorded:SURFACE, got {quote(str(where))}"
        raise InputError(f"{must}: `sweep run --on {where}` starts a study elsewhere")
    is_ray = where.kind == "ray"
    if request.devices is not None:
        why = "Ray hands out the GPUs of its nodes" if is_ray else "no GPU takes part"
        raise InputError(f"--devices and --on {where}: {why}: leave --devices out")
    if is_ray:
        return RayGpus(request, where.address, warn)
    return Recorded(where.address)


def run(request: RunRequest, where: Where, *, is_dry: bool) -> int:
    """Start or resume a study; write its report; print the winner, or the document of `best`."""
    start = CommandStart.of_process()
    if is_dry:
        _say_what_would_run(request, where)
        return 0
    url = _driven_url(request.storage)
    prepared, reason = tune(request, where, url=url, start=start)
    return _conclude(prepared, reason, storage=request.storage, as_json=request.as_json)


def _say_what_would_run(request: RunRequest, where: Where) -> None:
    if request.devices is not None:
        gpus.check_spelling(request.devices)
    name, space = request.named()
    if request.carried is not None:
        refuse_own(request.carried, of=name)
    about = {"space": space.name, "model": space.model, "gpu": space.gpu}
    words = ", ".join(f"{key} {value}" for key, value in about.items())
    most = units.plural(space.trials, "trial")
    text = f"Would start or resume study {name} on {where}: {words}, at most {most}."
    document = {"study": name, "on": str(where), **about, "trials": space.trials}
    console.say_result(document, text, as_json=request.as_json)


def _prepared(request: RunRequest, place: LocalGpus, *, url: str, read: ReadDataset) -> Prepared:
    def stored(study: str) -> StudyDefinition | None:
        # Opening it says why it cannot be read, where it is there at all.
        with suppress(InputError):
            return read_study(study, url=url, home=runs_directory()).definition
        return None

    return prepare(
        request, read_gpu=place.first, read_dataset=read, stored=stored, narrowed=place.narrowed
    )


def _driven_url(typed: str | None) -> str:
    """Return the database to drive a study in, and say who may read a password that was typed."""
    url = storage_url(typed)
    # What is no database URL is refused, and nothing else is said of it.
    parse_url(url)
    if typed is not None and redact(typed) != typed:
        shown = "the list of processes shows the password in --storage to every user"
        console.note(f"note: {shown}; {STORAGE} stands in for the option and is not shown")
    return url


def refuse_own(carried: str, *, of: str) -> None:
    """Refuse to take a study's trials over from itself."""
    if carried == of:
        raise InputError(f"--from {carried} is the study itself: name the new one with --study")


def carried_source(carried: str, *, of: str, url: str) -> StudySnapshot:
    """Return the study that trials are taken over from: one of the database's, or a spool's."""
    path = home_expanded(carried)
    if "/" in carried or path.suffix == ".jsonl":
        return read_spooled_study(path)
    refuse_own(carried, of=of)
    return read_study(carried, url=url, home=runs_directory())


def confirm(
    study: str,
    *,
    soak: str | None,
    max_dollars: float | None,
    storage: str | None,
    as_json: bool,
) -> int:
    """Measure a study's winner again; then conclude as a run does."""
    typed: dict[str, Any] = {}
    if soak is not None:
        # Where a time was typed, steps do not end it sooner.
        typed = {"soak_seconds": seconds("--soak", soak), "soak_steps": STEPS_WITHOUT_END}
    url = _driven_url(storage)
    stored = read_study(study, url=url, home=runs_directory()).definition
    if stored.target.recorded is not None:
        raise InputError(f"study '{study}' is of recorded trials: nothing can be measured again")
    again = prepare_again(
        study,
        stored,
        confirm=typed,
        max_dollars=max_dollars,
        read_gpu=read_gpu,
        read_dataset=read_dataset,
    )
    prepared = LocalGpus(None).given_to(again)
    reason = drive(prepared, storage=url, watch=_watch, warn=warn, is_anew=True)
    return _conclude(prepared, reason, storage=storage, as_json=as_json)


def _conclude(prepared: Prepared, reason: StopReason, *, storage: str | None, as_json: bool) -> int:
    """Say why a study stopped, write its report and print what came out; return the exit code.

    All of it also where Ctrl-C is pressed on.
    """
    url = storage_url(storage)
    option = f" --storage {shlex.quote(redact(storage))}" if storage else ""
    if reason is StopReason.INTERRUPTED:
        with undisturbed(), suppress(console.ReaderGoneError):
            console.note(_REASONS[reason])
            _print_result(prepared, url=url, storage_option=option, as_json=as_json)
        return INTERRUPTED
    if reason in _REASONS:
        console.note(_REASONS[reason])
    view = _print_result(
        prepared, url=url, storage_option=option, as_json=as_json, has_stopped=True
    )
    if (invalid := why_invalid(view.snapshot)) is not None:
        # Only the real model knows its modules, where its architecture is not known from here.
        why = f"no configuration that was tried is valid: {invalid.rule}: {invalid.detail}"
        raise InputError(f"space '{prepared.space.name}': {why}")
    if reason in _LIMITS and all(record.verdict in RETRYABLE for record in view.snapshot.records):
        raise InputError(
            f"{_LIMITS[reason]} ended before one trial was measured: give it {MARGIN:g} times "
            "as much, or more; what was begun is tried again"
        )
    return 0 if view.winner else NothingFits.exit_code


def _print_result(
    prepared: Prepared,
    *,
    url: str,
    storage_option: str,
    as_json: bool,
    has_stopped: bool = False,
) -> StudyView:
    """Write a study's report and print what came out; return what is known of it.

    Args:
        prepared: the study.
        url: of the database.
        storage_option: what the next commands need to find the database again.
        as_json: whether a document is printed.
        has_stopped: whether it stopped by itself, so that what was expected then is said.
    """
    snapshot, report, fault = reported(prepared.name, url=url)
    if has_stopped and (expected := stopped_words(snapshot)):
        console.note_folded(expected)
    view = view_of(snapshot)
    width = console.width_of(sys.stdout)
    screen = last_screen(snapshot, report=report, storage_option=storage_option, width=width)
    console.say_result(view.document(), screen, as_json=as_json)
    if fault is not None:
        again = f"sweep report {prepared.name}{storage_option}"
        console.note_folded(f"warning: no report was written: {fault}; `{again}` writes it")
    return view


def reported(study: str, *, url: str) -> tuple[StudySnapshot, Path | None, str | None]:
    """Return a study and where its report was written, or why it was not: the results stand and are
    printed all the same."""
    with console.working("writing the report"):
        snapshot = read_for_report(study, url=url)
        path = report_path(study)
        try:
            write_page(render(snapshot), path)
        except Exception as fault:  # noqa: BLE001 - see below
            # Also for a mistake of ours: hours of measuring are not lost to their drawing.
            return snapshot, None, words_of(fault)
    return snapshot, path, None


@contextmanager
def _watch(study: OpenStudy, interruption: Interruption) -> Iterator[Listener]:
    """Say what begins or resumes, then show it on stderr."""
    definition = study.definition
    records = study.records()
    name = study.study.study_name
    space = definition.space
    if study.was_resumed:
        done = study.ledger.trials_spent(since=study.ledger.next_number)
        console.note(f"Resuming study {name}: {progress_words(done, space.trials)}.")
    else:
        trials = units.plural(space.trials, "trial")
        if space.sampler == "guided":
            trials = f"at most {trials}"
        console.note(f"Starting study {name}: {trials}.")
    carried = Counter(record.carried.study for record in records if record.carried is not None)
    for other, count in carried.items():
        trials = units.plural(count, "trial")
        console.note_folded(f"Carried over from {other}: {trials}, measured there, not run again.")
    # What holds for every trial, so that the trials' lines need not say it.
    emulation = emulation_note(definition.target)
    if emulation:
        console.note_folded(emulation)
    baseline = space.baseline_config()
    gains = f"Gains are over {search_words(baseline, space=space)}"
    if not space.holds(baseline):
        gains += ": a reference that the space does not hold, no answer"
    console.note_folded(f"{gains}.")
    fixed = fixed_words(space)
    if fixed:
        same = f"The same in every other trial, and changed over the baseline: {fixed}."
        console.note_folded(same)
    board = Board(name, definition, records + study.confirmations(), clock=time.monotonic)
    with watching(board, is_stopping=interruption.is_requested, stream=sys.stderr) as listener:
        yield listener


def progress_words(done: int, total: int) -> str:
    """Return how many trials are done; an earlier run may have been asked for more than this."""
    trials = units.plural(max(done, total), "trial")
    verb = "is" if done == 1 else "are"
    return f"{done:,} of {trials} {verb} done"


def tune(
    request: RunRequest,
    where: Where,
    *,
    url: str,
    watch: Watch = _watch,
    tell: Callable[[str], None] = console.note_folded,
    warn: Callable[[str], None] = warn,
    read: ReadDataset | None = None,
    start: CommandStart | None = None,
) -> tuple[Prepared, StopReason]:
    """Start or resume a study; return what it is about and why it stopped.

    Args:
        request: what was typed.
        where: of this process's places.
        url: of the database.
        watch: shows the study while it runs.
        tell: is told what the dataset made of the space.
        warn: is told of what works less well than it could.
        read: reads and tokenizes a dataset.
        start: of the command, from which on its time budget counts; None for now.

    Raises what `prepare` and `drive` raise.
    """
    start = start or CommandStart.now()
    with closing(_place(request, where, warn)) as place:
        study = _prepared(request, place, url=url, read=read or read_dataset)
        prepared = place.given_to(study)
        source = None
        if request.carried is not None:
            source = carried_source(request.carried, of=prepared.name, url=url)
        for line in prepared.notes:
            tell(line)
        reason = drive(
            prepared,
            storage=url,
            watch=watch,
            warn=warn,
            carried=source,
            new_runner=place.new_runner,
            start=start,
        )
    return prepared, reason
