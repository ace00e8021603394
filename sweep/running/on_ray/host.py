"""Owns the actor on a node: it has a supervised runner there, and says what that says, to a driver
that asks.

All that a runner does for its trials, budgets, deadlines and kills, is done on the node; what goes
over the network are orders, signs of life and outcomes. Runs on the node, and knows nothing of Ray:
the driver makes an actor of it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from search_spaces.errors import CardLost, EnvironmentFault
from search_spaces.models import ModelSpec
from search_spaces.space import Weights
from storage.definition import Target
from storage.records import Crashed, Outcome, TimedOut
from sweep.nvml import FaultWatch
from sweep.paths import cache_directory
from sweep.running.device_info import read_card
from sweep.running.on_ray.node import raylet_environment
from sweep.running.runner import Runner
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import Progress, TextsSettings, TrialRequest

HEAR_SECONDS = 5.0
"""Longest that an answer to `Host.hear` waits for something to say: then it says that it lives."""
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class HostSettings:
    """What a host's runner is for."""

    model: dict[str, Any]
    """`ModelSpec.to_json`."""
    target: Target
    weights: Weights
    seed: int
    texts: TextsSettings | None
    study: str
    place: str = "0"
    """Of the runner among those of the study, as a name for its directory."""
    neighbours: int = 0
    """How many other workers of the study share the node's cores."""

    @property
    def log_path(self) -> Path:
        """Where the worker's log goes, on the node's own disk; its outcome file stands beside."""
        return cache_directory() / "ray" / self.study / self.place / "worker.log"


@dataclass(frozen=True)
class Trial:
    """One run that is ordered."""

    run_id: str
    request: TrialRequest


@dataclass(frozen=True)
class Ended:
    """A run has ended, well or not."""

    outcome: Outcome


@dataclass(frozen=True)
class Faulted:
    """A run has no outcome: the device is not to be had."""

    fault: EnvironmentFault


@dataclass(frozen=True)
class Broken:
    """A run has no outcome, for a mistake of ours."""

    trace: str


Word = Progress | Ended | Faulted | Broken
"""What a host says of a run."""


class Host:
    """A runner on a node, and a thread that it runs trials in while the host listens.

    Args:
        settings: what it is for.
        new_runner: what runs the trials; tests put another one here.
        fault: says what is wrong with the card after a trial that failed; tests put one here.
    """

    def __init__(
        self,
        settings: HostSettings,
        *,
        new_runner: Callable[[HostSettings], Runner] | None = None,
        fault: Callable[[], str | None] | None = None,
    ) -> None:
        _restore_threads()
        self._fault = fault or _card_watch(settings)
        self._runner = (new_runner or _supervised)(settings)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._run_id = ""
        self._words: list[Word] = []
        self._dropped = 0
        """Words of this run that were heard and are gone."""
        self._news = threading.Condition()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._obey, name="sweep-trials", daemon=True)
        self._thread.start()

    def device(self) -> str:
        """Return what the driver of this node's cards calls the one that Ray handed to this."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def start(self, *, is_fresh: bool) -> None:
        """Begin with what takes time before a trial; see `runner.Runner.start`."""
        self._orders.put(lambda: self._start(is_fresh=is_fresh))

    def begin(self, trial: Trial, *, is_fresh: bool) -> None:
        """Run a trial, in a fresh process where that is asked for; `hear` says how it goes.

        An order that comes twice, as nobody knew whether it had come, is one.
        """
        with self._news:
            if self._run_id == trial.run_id:
                return
            self._run_id, self._words, self._dropped = trial.run_id, [], 0
        self._stopped.clear()
        self._orders.put(lambda: self._run(trial, is_fresh=is_fresh))

    def hear(self, run_id: str, heard: int) -> list[Word] | None:
        """Return what was said of a run since, once there is anything; nothing after a while.

        What was not acknowledged is said again, so that an answer that was lost loses nothing.

        Args:
            run_id: of the run.
            heard: so many words of it were heard.

        Returns:
            None where no such run was ordered.
        """
        with self._news:
            # Its order may still be on the way.
            self._news.wait_for(lambda: self._has_news(run_id, heard), timeout=HEAR_SECONDS)
            if self._run_id != run_id:
                return None
            del self._words[: heard - self._dropped]
            self._dropped = heard
            return list(self._words)

    def stop(self) -> None:
        """Stop the running trial as slow, at its next sign of life."""
        self._stopped.set()

    def close(self) -> None:
        """Free the device, once the running trial is ended."""
        self._runner.cancel()
        self._orders.put(None)
        self._thread.join()
        self._runner.close()

    def _has_news(self, run_id: str, heard: int) -> bool:
        return self._run_id == run_id and len(self._words) > heard - self._dropped

    def _obey(self) -> None:
        while (order := self._orders.get()) is not None:
            order()

    def _start(self, *, is_fresh: bool) -> None:
        # What keeps it from being started does so at the run too, which says it.
        with contextlib.suppress(Exception):
            if is_fresh:
                self._runner.renew()
            self._runner.start()

    def _run(self, trial: Trial, *, is_fresh: bool) -> None:
        try:
            if is_fresh:
                self._runner.renew()
            outcome = self._runner.run(trial.request, observe=self._observe)
        except EnvironmentFault as fault:
            self._say(Faulted(fault))
        except BaseException:  # noqa: BLE001 - whoever drives this raises it
            self._say(Broken(traceback.format_exc()))
        else:
            self._say(self._end_of(outcome))

    def _end_of(self, outcome: Outcome) -> Word:
        """Return what to say of a trial: one that the card had a hand in says nothing of it."""
        fault = self._fault() if isinstance(outcome, Crashed | TimedOut) else None
        return Ended(outcome) if fault is None else Faulted(CardLost(fault))

    def _observe(self, progress: Progress) -> bool:
        self._say(progress)
        return self._stopped.is_set()

    def _say(self, word: Word) -> None:
        with self._news:
            self._words.append(word)
            self._news.notify_all()


def _supervised(settings: HostSettings) -> Runner:
    return SupervisedRunner(
        ModelSpec.from_json(settings.model),
        target=settings.target,
        weights=settings.weights,
        log_path=settings.log_path,
        seed=settings.seed,
        texts=settings.texts,
        neighbours=settings.neighbours,
    )


def _card_watch(settings: HostSettings) -> Callable[[], str | None]:
    card = read_card() if settings.target.device == "cuda" else None
    return (lambda: None) if card is None or card.uuid is None else FaultWatch(card.uuid)


def _restore_threads() -> None:
    """Take back what Ray sets for its workers: a trial is to have the threads that it has without
    Ray.
    """
    threads = raylet_environment().get(_THREADS)
    if threads is None:
        os.environ.pop(_THREADS, None)
    else:
        os.environ[_THREADS] = threads
