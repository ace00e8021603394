"""Owns one command for several models: a study for each, as many of them at a time as there are
GPUs.

Each study is driven by a `sweep run` of its own on one GPU, so that it is what it would be alone:
its lease, its log, its resume. Knows nothing of how a study is run.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import IO, Any

from reports import units
from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, InputError
from search_spaces.models import load_model_spec
from storage.names import check_name
from sweep.request import REQUEST, RunRequest
from sweep.stop_signals import INTERRUPTED
from sweep.study.events import Interruption
from sweep.study.session import Prepared
from sweep.study.targets import least_weight_bytes
from sweep.terminal.board import search_words
from sweep.terminal.commands import DONE, NOTHING_FITS
from sweep.terminal.console import note, say, say_json, table, width_of
from sweep.terminal.edge import OUR_ERROR

PROGRAM = (sys.executable, "-P", "-m", "sweep")
_BOUND = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(130); os.execv(sys.argv[2], sys.argv[2:])"
)
"""Has the kernel ask a driver to stop when this process is gone, however that ended."""
_TURN_SECONDS = 0.2
_END_SECONDS = 30.0
"""That drivers get to stop in which nobody waits for any more."""
_WORST_FIRST = (
    INTERRUPTED,
    OUR_ERROR,
    EnvironmentFault.exit_code,
    InputError.exit_code,
    NOTHING_FITS,
)


@dataclass(frozen=True)
class Planned:
    """One model's study, not yet begun."""

    model: str
    """As it was typed."""
    prepared: Prepared
    failed_on: str | None = None
    """The place on which it was tried in vain."""

    @property
    def study(self) -> str:
        """Name of its study."""
        return self.prepared.name

    @property
    def short_name(self) -> str:
        """The model's name without the directory or the organisation that it is in."""
        return PurePath(self.prepared.model.name).name


@dataclass(frozen=True)
class Ended:
    """A study's driver that ended."""

    planned: Planned
    place: str | None
    code: int
    document: Mapping[str, Any] | None
    """What `sweep best --json` says of it; None where its driver said nothing."""


def study_name(typed: str | None, model: str) -> str | None:
    """Return what one of several models' studies is called; None where it is named by itself."""
    # Without the directory or the organisation that the model is in.
    return None if typed is None else f"{typed}-{PurePath(load_model_spec(model).name).name}"


def plan_studies(
    models: Sequence[str], *, study: str | None, prepare: Callable[[str, str | None], Prepared]
) -> tuple[Planned, ...]:
    """Return a study for each model, the largest first, so that none is left alone at the end.

    Args:
        models: as they were typed.
        study: what all their names begin with; None where each is named by itself.
        prepare: resolves what one of them is about, under a name or the one that it derives.

    Raises:
        InputError: something that was typed is not right, or two studies would have one name.
        EnvironmentFault: a GPU is not to be had.
    """
    names = [study_name(study, model) for model in models]
    for name in names:
        if name is not None:
            check_name(name)
    planned = [Planned(m, prepare(m, name)) for m, name in zip(models, names, strict=True)]
    name, times = Counter(p.study for p in planned).most_common(1)[0]
    if times > 1:
        alike = [p.model for p in planned if p.study == name]
        cure = "name each model once" if len({*alike}) == 1 else "leave --study out"
        raise InputError(f"--model: {' and '.join(alike)} would both be study '{name}': {cure}")
    sizes = {p.study: least_weight_bytes(p.prepared.space, p.prepared.model) for p in planned}
    return tuple(sorted(planned, key=lambda p: -(sizes[p.study] or 0)))


def run(
    planned: Sequence[Planned],
    *,
    request: RunRequest,
    places: Sequence[str | None],
    program: Sequence[str] = PROGRAM,
) -> int:
    """Drive every study, and print what came of them; return the worst of their exit codes.

    Args:
        planned: the studies, in the order in which they begin.
        request: what was typed; with ``as_json`` a document a line is printed as each study ends.
        places: what `--devices` says of the GPU of each study that runs at a time; None for the
            one that is there.
        program: what drives one study.
    """
    fleet = _Fleet([*program, "run"], request, deque(planned), list(places))
    interruption = Interruption()
    ended = []
    with interruption.handling_signals(), closing(fleet):
        for end in fleet.ends(interruption.is_requested):
            ended.append(end)
            if request.as_json and end.document is not None:
                say_json(end.document)
    if not request.as_json:
        say(_summary(ended))
    if interruption.is_requested():
        note("Interrupted; the same command goes on where this one stopped.")
        return INTERRUPTED
    codes = {end.code for end in ended}
    return next((code for code in _WORST_FIRST if code in codes), DONE)


@dataclass
class _Driver:
    """A driver that runs."""

    process: subprocess.Popen[bytes]
    is_asked: bool = False
    """Whether it was asked to stop."""


class _Fleet:
    """The drivers of some studies, one on each place at a time."""

    def __init__(
        self,
        command: list[str],
        request: RunRequest,
        waiting: deque[Planned],
        places: list[str | None],
    ) -> None:
        self._command = command
        self._request = request
        self._waiting = waiting
        self._idle = places
        self._running: dict[str, _Driver] = {}
        self._said: queue.SimpleQueue[Ended] = queue.SimpleQueue()

    def ends(self, is_stopping: Callable[[], bool]) -> Iterator[Ended]:
        """Yield each study as it ends, and begin those that wait; none once somebody asks."""
        while True:
            while self._waiting and self._idle and not is_stopping():
                planned = self._waiting.popleft()
                self._begin(planned, self._idle.pop(0))
            if not self._running:
                return
            end = self._next(is_stopping)
            del self._running[end.planned.study]
            if self._is_to_be_tried_elsewhere(end) and not is_stopping():
                note(f"{end.planned.study}: tried again on another GPU")
                self._waiting.appendleft(replace(end.planned, failed_on=end.place))
                continue
            self._idle.append(end.place)
            self._judge(end)
            yield end

    def _next(self, is_stopping: Callable[[], bool]) -> Ended:
        """Wait for an end; pass on meanwhile that somebody asked to stop."""
        while True:
            if is_stopping():
                self._ask()
            with suppress(queue.Empty):
                return self._said.get(timeout=_TURN_SECONDS)

    def _is_to_be_tried_elsewhere(self, end: Ended) -> bool:
        """Whether a study failed of which its GPU may be the cause."""
        others = len(self._idle) + len(self._running)
        return _is_fault(end) and others > 0 and end.planned.failed_on is None

    def _judge(self, end: Ended) -> None:
        """Take a GPU in again on which failed what fails on another too; leave others out."""
        place = end.planned.failed_on
        if place is None:
            return
        if _is_fault(end):
            self._idle.append(place)
        else:
            note(f"GPU {place.rstrip(',')} is left out: what failed on it did not on another")

    def _ask(self) -> None:
        """Ask each driver to stop, once."""
        for driver in self._running.values():
            if not driver.is_asked:
                driver.is_asked = True
                with suppress(ProcessLookupError):
                    driver.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End every driver that still runs, as nobody follows it any more; its study resumes."""
        deadline = time.monotonic() + _END_SECONDS
        while self._running and time.monotonic() < deadline:
            self._ask()
            with suppress(queue.Empty):
                end = self._said.get(timeout=_TURN_SECONDS)
                self._running.pop(end.planned.study, None)
        for driver in self._running.values():
            driver.process.kill()

    def _begin(self, planned: Planned, place: str | None) -> None:
        changes = {
            "overrides": {**self._request.overrides, "model": planned.model},
            "study": planned.study,
            "devices": place,
            "as_json": True,
        }
        # Read where it is, as what it names is named from there, and by nobody else: it may hold
        # a password.
        own = Path(tempfile.mkdtemp(prefix="sweep-run-")) / REQUEST
        own.write_text(self._request.model_copy(update=changes).model_dump_json(), encoding="utf-8")
        # Not a pipe, which a long document would fill while the other is read.
        answer = tempfile.TemporaryFile()  # noqa: SIM115 - closed by who reads it
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOUND, str(os.getpid()), *self._command, str(own)],
            stdin=subprocess.DEVNULL,
            stdout=answer,
            stderr=subprocess.PIPE,
            # Ctrl-C in the terminal reaches this process alone, which passes it on.
            start_new_session=True,
        )
        self._running[planned.study] = _Driver(process)

        def follow() -> None:
            document = None
            try:
                document = _heard(process, answer, study=planned.study)
            finally:
                shutil.rmtree(own.parent, ignore_errors=True)
                self._said.put(Ended(planned, place, _code(process.wait()), document))

        threading.Thread(target=follow, daemon=True).start()


def _heard(
    process: subprocess.Popen[bytes], answer: IO[bytes], *, study: str
) -> Mapping[str, Any] | None:
    """Pass on what a driver says until it ends, and return what it answered."""
    assert process.stderr is not None
    with answer, process.stderr as said:
        for line in said:
            note(f"{study}: {line.decode(errors='replace').rstrip()}")
        process.wait()
        answer.seek(0)
        return _document(answer)


def _code(status: int) -> int:
    """Return a driver's exit code; that of a fault of the environment where something ended it."""
    return status if status in (DONE, *_WORST_FIRST) else EnvironmentFault.exit_code


def _is_fault(end: Ended) -> bool:
    is_fault = end.code == EnvironmentFault.exit_code and end.document is None
    return is_fault and end.place is not None


def _document(printed: IO[bytes]) -> Mapping[str, Any] | None:
    try:
        document = json.loads(printed.read())
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _summary(ended: Sequence[Ended]) -> str:
    """Return every study with its winner, a line each."""
    rows = [(end.planned.short_name, end.planned.study, *_winner(end)) for end in ended]
    header = ("model", "study", "tokens/s", "memory", "best")
    return table(header, rows, width=width_of(sys.stdout))


def _winner(end: Ended) -> tuple[str, str, str]:
    best = None if end.document is None else end.document.get("best")
    if best is None:
        why = "nothing fits" if end.code == NOTHING_FITS else f"ended with exit code {end.code}"
        return "", "", why
    measured = best["measurement"]
    config = TrialConfig.model_validate(best["config"])
    return (
        f"{measured['tokens_per_second']:,.0f}",
        units.gib(measured["peak_allocated_bytes"]),
        search_words(config, space=end.planned.prepared.space),
    )
