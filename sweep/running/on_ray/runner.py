"""A runner whose trials run on a node of a Ray cluster: in an actor there, which has a supervised
runner of its own.

All that a runner does for its trials, budgets, deadlines and kills, is done on the node. Over the
network go a request, and back in one stream the progress and the outcome.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Literal

from search_spaces.errors import CardLost, EnvironmentFault
from storage.records import INTERRUPTED, Crashed, Lost, Outcome, Phase, TimedOut
from sweep.nvml import FaultWatch
from sweep.paths import cache_directory
from sweep.running import ends
from sweep.running.device_info import read_card
from sweep.running.patience import AttentiveClock
from sweep.running.runner import Observer, Runner, keep_going
from sweep.running.wire import Progress, TrialRequest

SILENCE_SECONDS = 60.0
"""Without a word of an actor, which says that it lives every `_ALIVE_SECONDS`: no machine is away
for so long and comes back."""
START_SECONDS = 180.0
"""The same for an actor that has not spoken yet: its process imports our packages first, which may
be on a disk of the network."""
_ALIVE_SECONDS = 1.0
"""Longest that an actor is silent while its trial runs."""
_CLOSE_SECONDS = 90.0
"""That an actor gets to end its worker, whose supervisor gives up after 60."""
_LOOK_SECONDS = 1.0
"""Between two looks at how long an actor has said nothing."""
_AGAIN_SECONDS = 0.5
"""Until an actor that could not be reached is asked again."""
_GONE = "it ended, or the others cannot reach it"
_CONTROL = "control"
"""The actor's thread for what interrupts a trial."""
_THREADS = "OMP_NUM_THREADS"

Device = Literal["cuda", "cpu"]


NewRunner = Callable[..., Runner]
"""Starts a runner on the node that calls it, which says its ``log_path``."""
News = list[Progress] | Outcome | Exception | None
"""What comes of a run: progress, its outcome, what befell the actor, or that it is cancelled."""


class Host:
    """The actor on a node: a runner, and the thread that it runs trials in.

    Args:
        new_runner: starts what runs the trials.
        home: of the runner's log and outcomes, below the node's cache.
        device: what its trials run on.
        fault: says what is wrong with the GPU after a trial that failed; tests put one here.
    """

    def __init__(
        self,
        new_runner: NewRunner,
        *,
        home: str,
        device: Device,
        fault: Callable[[], str | None] | None = None,
    ) -> None:
        _restore_threads()
        card = read_card() if device == "cuda" and fault is None else None
        watch = None if card is None or card.uuid is None else FaultWatch(card.uuid)
        self._fault = fault or watch or (lambda: None)
        self._runner = new_runner(log_path=cache_directory() / "ray" / home / "worker.log")
        self._trials = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sweep-trials")
        self._stopped = threading.Event()

    def device(self) -> str:
        """Return what the driver of this node's GPUs calls the one that Ray handed to this."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def start(self) -> None:
        """See `runner.Runner.start`."""
        self._trials.submit(self._runner.start)

    def run(self, request: TrialRequest, *, is_fresh: bool) -> Iterator[list[Progress] | Outcome]:
        """Run a trial, in a fresh process where that is asked for, and yield its progress: what
        came since the last, which is nothing where a second passed; finally its outcome.

        Raises:
            CardLost: the trial failed, and the GPU has a fault of its own.
            EnvironmentFault: the device is not to be had.
        """
        told: queue.SimpleQueue[Progress | None] = queue.SimpleQueue()

        def observe(progress: Progress) -> bool:
            told.put(progress)
            return self._stopped.is_set()

        self._stopped.clear()
        trial = self._trials.submit(self._outcome, request, observe, is_fresh=is_fresh)
        trial.add_done_callback(lambda _: told.put(None))
        while True:
            news = _within(told, _ALIVE_SECONDS)
            yield [progress for progress in news if progress is not None]
            if None in news:
                break
        yield trial.result()

    def stop(self) -> None:
        """Stop the running trial as slow, at its next progress."""
        self._stopped.set()

    def close(self) -> None:
        """Free the device, once the running trial is ended."""
        self._runner.cancel()
        self._trials.submit(self._runner.close).result()

    def _outcome(self, request: TrialRequest, observe: Observer, *, is_fresh: bool) -> Outcome:
        if is_fresh:
            self._runner.renew()
        outcome = self._runner.run(request, observe=observe)
        fault = self._fault() if isinstance(outcome, Crashed | TimedOut) else None
        if fault is not None:
            raise CardLost(fault)
        return outcome


def _within(told: queue.SimpleQueue[Progress | None], seconds: float) -> list[Progress | None]:
    """Return all that was told, waiting for the first of it."""
    news = []
    with contextlib.suppress(queue.Empty):
        news.append(told.get(timeout=seconds))
        while True:
            news.append(told.get_nowait())
    return news


def raylet_environment() -> dict[str, str]:
    """Return the variables that Ray was started with on this node; none where nobody may know.

    Those of this process are not all the node's: Ray sets some for each of its workers.
    """
    try:
        data = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in os.fsdecode(data).split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def _restore_threads() -> None:
    """Take back what Ray sets for its workers: a trial has the threads that it has without Ray."""
    threads = raylet_environment().get(_THREADS)
    if threads is None:
        os.environ.pop(_THREADS, None)
    else:
        os.environ[_THREADS] = threads


class _Gone(Exception):  # noqa: N818 - what it means depends on the node
    """The actor will not answer any more; says why."""


class _Silent(_Gone):
    """Nothing is heard of the actor, nor of what became of it."""


class _Broke(_Gone):
    """The actor lives, and what it said of a trial is lost."""


class _Cancelled(Exception):  # noqa: N818 - somebody asked for it
    """The run is to end."""


class RayRunner(Runner):
    """Runs configurations in an actor on one node.

    Args:
        ray: the module, joined to the cluster.
        new_runner: starts what runs the trials there.
        home: as for `Host`.
        device: as for `Host`.
        node_id: of the node.
        address: of the node, for messages.
        silence_seconds: after which an actor that says nothing is given up.
    """

    def __init__(
        self,
        ray: Any,
        new_runner: NewRunner,
        *,
        home: str,
        device: Device,
        node_id: str,
        address: str,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._ray = ray
        self._new_runner = new_runner
        self._home = home
        self.device = device
        """What its trials run on."""
        self._node_id = node_id
        self._address = address
        self._silence_seconds = silence_seconds
        self._actor: Any = None
        self._has_spoken = False
        self._wants_fresh = False
        self._phase: Phase = "start"
        self._told: queue.SimpleQueue[News] = queue.SimpleQueue()
        """Of the present run."""
        self._is_cancelled = False
        self._lost: CardLost | None = None

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        """See `runner.Runner.run`.

        Raises:
            CardLost: the node is gone, or nothing is heard of it; the trial may run elsewhere.
            EnvironmentFault: the device on the node is not to be had.
        """
        self._told = queue.SimpleQueue()
        # After there is a queue that whoever cancels from now on writes into.
        if self._is_cancelled:
            return INTERRUPTED
        if self._lost is not None:
            raise self._lost
        try:
            return self._run(request, observe)
        except _Cancelled:
            self._discard()
            return INTERRUPTED
        except _Gone as error:
            return self._without_actor(error)
        except BaseException:
            # Whoever watches failed, or was interrupted: nobody hears the rest of this trial.
            self._discard()
            raise

    def start(self) -> None:
        """See `runner.Runner.start`: the actor's process and its worker's begin on the node."""
        if not self._is_cancelled and self._lost is None:
            self._hosted().start.remote()

    def place(self) -> Any:
        """Begin with the actor; return Ray's reference to what CUDA there calls its GPU."""
        return self._hosted().device.options(concurrency_group=_CONTROL).remote()

    def fault(self) -> str | None:
        """Return why no trial can run here any more; None where one can."""
        if self._lost is None and not self._is_node_alive():
            self._lose(_GONE)
        return None if self._lost is None else str(self._lost)

    def renew(self) -> None:
        """See `runner.Runner.renew`: it is done with the next request."""
        self._wants_fresh = True

    def cancel(self) -> None:
        """See `runner.Runner.cancel`. Calls nothing of Ray's: a signal may come amidst of that."""
        self._is_cancelled = True
        self._told.put(None)

    def close(self) -> None:
        """See `runner.Runner.close`: the worker ends before its actor does."""
        if self._actor is None or not self._ray.is_initialized():
            self._actor = None
            return
        if self._has_spoken and not self._is_cancelled:
            with contextlib.suppress(self._ray.exceptions.RayError):
                closed = self._actor.close.options(concurrency_group=_CONTROL).remote()
                self._ray.wait([closed], timeout=_CLOSE_SECONDS)
        self._discard()

    def _run(self, request: TrialRequest, observe: Observer) -> Outcome:
        """Run a trial in the actor that is there, or in another where that one ended since."""
        was_there, self._phase = self._actor is not None, "start"
        try:
            return self._follow(request, observe)
        except _Gone:
            if not was_there or self._phase != "start" or not self._is_node_alive():
                raise
            # It ended while it had nothing to do: that is not this trial's doing.
            self._discard()
            return self._follow(request, observe)

    def _follow(self, request: TrialRequest, observe: Observer) -> Outcome:
        """Have the actor run a trial, and observe it until it has ended."""
        actor, is_fresh = self._hosted(), self._wants_fresh
        self._wants_fresh = False
        stream = actor.run.options(num_returns="streaming").remote(request, is_fresh=is_fresh)
        # A thread of its own: whoever is interrupted within a call of Ray's does not learn of it.
        listening = threading.Thread(target=self._listen, args=(stream, self._told), daemon=True)
        listening.start()
        is_stopping = False
        while True:
            news = self._next(actor)
            if not isinstance(news, list):
                return news
            for progress in news:
                self._phase = progress.phase
                if observe(progress) and not is_stopping:
                    is_stopping = True
                    actor.stop.options(concurrency_group=_CONTROL).remote()

    def _listen(self, stream: Any, told: queue.SimpleQueue[News]) -> None:
        try:
            for reference in stream:
                told.put(self._ray.get(reference))
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            told.put(error)

    def _next(self, actor: Any) -> list[Progress] | Outcome:
        """Return what the actor says next of its trial.

        Raises:
            _Cancelled: somebody asked for that meanwhile.
            _Gone: it will not say anything any more.
            EnvironmentFault: the device on the node is not to be had.
        """
        clock = AttentiveClock()
        while True:
            try:
                news = self._told.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self._refuse_silence(clock)
                continue
            if news is None:
                raise _Cancelled
            if isinstance(news, Exception):
                raise self._as_ours(self._settled(actor, news)) from news
            self._has_spoken = True
            return news

    def _settled(self, actor: Any, error: Exception) -> Exception:
        """Return what became of an actor, once Ray says so: it may just be given up."""
        unavailable = self._ray.exceptions.ActorUnavailableError
        clock = AttentiveClock()
        while isinstance(error, unavailable) and not self._is_cancelled:
            self._refuse_silence(clock)
            time.sleep(_AGAIN_SECONDS)
            try:
                asked = actor.device.options(concurrency_group=_CONTROL).remote()
                self._ray.get(asked, timeout=_LOOK_SECONDS)
                return _Broke("the connection to its node broke")
            except self._ray.exceptions.GetTimeoutError:
                continue
            except self._ray.exceptions.RayError as known:
                error = known
        return error

    def _refuse_silence(self, clock: AttentiveClock) -> None:
        longest = self._silence_seconds if self._has_spoken else START_SECONDS
        if clock.look() >= longest:
            raise _Silent(f"nothing was heard of it for {longest:g} s")

    def _as_ours(self, error: Exception) -> Exception:
        """Return what an error of Ray's means; one of the host's own is a mistake of ours."""
        exceptions = self._ray.exceptions
        if isinstance(error, _Gone):
            return error
        cause = getattr(error, "cause", None)
        if isinstance(cause, EnvironmentFault):
            return type(cause)(f"node {self._address}: {cause}")
        if isinstance(error, exceptions.RayTaskError) or not isinstance(error, exceptions.RayError):
            return RuntimeError(f"on node {self._address}: {error}")
        if getattr(error, "actor_init_failed", False):
            why = ends.shown(str(error).strip().splitlines()[-1])
            return EnvironmentFault(f"node {self._address}: no trial can be run there: {why}")
        # In one line, without what names the actor.
        lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
        return _Gone(ends.shown(" ".join(lines[1:] or lines)).rstrip("."))

    def _without_actor(self, error: _Gone) -> Outcome:
        """Return what the trial came to whose actor is gone.

        Raises:
            CardLost: its node is gone with it.
        """
        self._discard()
        if self._is_cancelled:
            return INTERRUPTED
        if isinstance(error, _Silent):
            raise self._lose(str(error))
        if not self._is_node_alive():
            raise self._lose(_GONE)
        if isinstance(error, _Broke):
            return Lost(detail=str(error))
        detail = f"the actor's process on node {self._address} ended: {error}"
        return ends.storable(Crashed(phase=self._phase, cause="signal", detail=detail))

    def _lose(self, why: str) -> CardLost:
        self._lost = CardLost(
            f"node {self._address} of the Ray cluster is lost: {why}. What was measured is stored"
        )
        return self._lost

    def _is_node_alive(self) -> bool:
        try:
            nodes = self._ray.nodes()
        except (self._ray.exceptions.RayError, RuntimeError, OSError):
            # The head is gone, and with it whoever could tell.
            return False
        return any(node["NodeID"] == self._node_id and node["Alive"] for node in nodes)

    def _hosted(self) -> Any:
        """Return the actor, which may not have begun yet."""
        if self._actor is None:
            strategies = self._ray.util.scheduling_strategies
            here = strategies.NodeAffinitySchedulingStrategy(self._node_id, soft=False)
            needs = {"num_cpus": 1} if self.device == "cpu" else {"num_cpus": 0, "num_gpus": 1}
            self._has_spoken = False
            actor = _actor_class(self._ray).options(
                max_restarts=0, scheduling_strategy=here, **needs
            )
            self._actor = actor.remote(self._new_runner, home=self._home, device=self.device)
        return self._actor

    def _discard(self) -> None:
        """End the actor at once, and with it its worker, which the kernel binds to it."""
        actor, self._actor = self._actor, None
        if actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.kill(actor)


@cache
def _actor_class(ray: Any) -> Any:
    return ray.remote(concurrency_groups={_CONTROL: 1})(Host)
