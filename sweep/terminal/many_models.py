"""Owns one command for several models: a study for each, as many of them at a time as there are
cards.

Each study is driven by a `sweep run` of its own on one card, so that it is what it would be alone:
its lease, its log, its resume. Knows nothing of how a study is run.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import IO, Any

from reports import units
from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault, InputError
from sweep.stop_signals import INTERRUPTED
from sweep.study.interruption import Interruption
from sweep.study.session import Prepared
from sweep.study.targets import least_weight_bytes
from sweep.terminal.board import search_words
from sweep.terminal.commands import DONE, NOTHING_FITS
from sweep.terminal.console import note, say, say_json, table, width_of
from sweep.terminal.typed import respelled

PROGRAM = (sys.executable, "-P", "-m", "sweep")
OWN = ("model", "cards", "study", "as_json")
"""Parameters of a run that each study has its own value of."""
_WORST_FIRST = (INTERRUPTED, EnvironmentFault.exit_code, InputError.exit_code, NOTHING_FITS)


@dataclass(frozen=True)
class Planned:
    """One model's study, not yet begun."""

    model: str
    """As it was typed."""
    prepared: Prepared
    attempts: int = 0

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
        EnvironmentFault: a card is not to be had.
    """
    planned = [Planned(model, prepare(model, None)) for model in models]
    if study is not None:
        named = [(p.model, f"{study}-{p.short_name}") for p in planned]
        planned = [Planned(model, prepare(model, name)) for model, name in named]
    name, times = Counter(p.study for p in planned).most_common(1)[0]
    if times > 1:
        raise InputError(
            f"--model: {' and '.join(p.model for p in planned if p.study == name)} would both be "
            f"study '{name}': name each model once"
        )
    sizes = {p.study: least_weight_bytes(p.prepared.space, p.prepared.model) for p in planned}
    return tuple(sorted(planned, key=lambda p: -(sizes[p.study] or 0)))


def run(
    planned: Sequence[Planned],
    *,
    places: Sequence[str | None],
    command: Any,
    words: Sequence[str],
    as_json: bool,
    program: Sequence[str] = PROGRAM,
) -> int:
    """Drive every study, and print what came of them; return the worst of their exit codes.

    Args:
        planned: the studies, in the order in which they begin.
        places: what `--cards` says of the card of each study that runs at a time; None for the one
            that is there.
        command: the `sweep run` that was typed.
        words: behind its name.
        as_json: a document a line on stdout, as each study ends.
        program: what drives one study.
    """
    shared = respelled(command, words, without=OWN)
    fleet = _Fleet([*program, "run", *shared], deque(planned), list(places))
    interruption = Interruption(cancel=fleet.stop)
    ended = []
    with interruption.handling_signals():
        for end in fleet.ends(interruption.is_requested):
            ended.append(end)
            if as_json and end.document is not None:
                say_json(end.document)
    if not as_json:
        say(_summary(ended))
    if interruption.is_requested():
        note("Interrupted; the same command goes on where this one stopped.")
        return INTERRUPTED
    codes = {end.code for end in ended}
    return next((code for code in _WORST_FIRST if code in codes), DONE)


class _Fleet:
    """The drivers of some studies, one on each place at a time."""

    def __init__(
        self, command: list[str], waiting: deque[Planned], places: list[str | None]
    ) -> None:
        self._command = command
        self._waiting = waiting
        self._idle = places
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._said: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._requests = 0

    def ends(self, is_stopping: Callable[[], bool]) -> Any:
        """Yield each study as it ends, and begin those that wait; none once somebody asks."""
        while True:
            while self._waiting and self._idle and not is_stopping():
                self._begin(self._waiting.popleft(), self._idle.pop(0))
            if not self._running:
                return
            end = self._next(is_stopping)
            del self._running[end.planned.study]
            if self._is_the_places_fault(end):
                note(f"{end.planned.study}: tried again on another card; this one is left out")
                self._waiting.append(replace(end.planned, attempts=1))
                continue
            self._idle.append(end.place)
            yield end

    def _next(self, is_stopping: Callable[[], bool]) -> Ended:
        """Wait for an end; pass on meanwhile that somebody asked to stop."""
        while True:
            if is_stopping() and self._requests == 0:
                self.stop()
            with suppress(queue.Empty):
                return self._said.get(timeout=0.2)

    def _is_the_places_fault(self, end: Ended) -> bool:
        """Whether a study should be tried on another card: its own may be what failed."""
        is_fault = end.code == EnvironmentFault.exit_code and end.document is None
        others = len(self._idle) + len(self._running)
        return is_fault and end.place is not None and others > 0 and end.planned.attempts == 0

    def stop(self) -> None:
        """Ask every driver to stop, once more than before."""
        self._requests += 1
        for process in list(self._running.values()):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)

    def _begin(self, planned: Planned, place: str | None) -> None:
        own = [f"--model={planned.model}", f"--study={planned.study}", "--json"]
        own += [] if place is None else [f"--cards={place}"]
        process = subprocess.Popen(
            [*self._command, *own],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C in the terminal reaches this process alone, which passes it on.
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        said = process.stderr
        # It prints its document last of all, so that no pipe fills while the other is read.
        answered = process.stdout
        self._running[planned.study] = process

        def follow() -> None:
            with said, answered:
                for line in said:
                    note(f"{planned.study}: {line.decode(errors='replace').rstrip()}")
                document = _document(answered)
            self._said.put(Ended(planned, place, process.wait(), document))

        threading.Thread(target=follow, daemon=True).start()


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
