"""A runner whose trials run on a node of a Ray cluster: in an actor there, which has a supervised
runner of its own.

All that a runner does for its trials, budgets, deadlines and kills, is done on the node. Over the
network go a request, and back in one stream the progress and the outcome.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from search_spaces.errors import CardLost, EnvironmentFault
from storage.records import INTERRUPTED, Crashed, Lost, Outcome, Phase
from sweep.nvml import FaultWatch
from sweep.paths import cache_directory
from sweep.running.child import AttentiveClock, shown, storable
from sweep.running.device_info import read_card
from sweep.running.runner import Lane, Observer, Runner, keep_going
from sweep.running.wire import Progress, TrialRequest

SILENCE_SECONDS = 60.0
"""Without a word of an actor, which says that it lives every `_ALIVE_SECONDS`: no machine is away
for so long and comes back."""
START_SECONDS = 180.0
"""The same for an actor that has not spoken yet: its process imports our packages first, which may
be on a disk of the network."""
_ALIVE_SECONDS = 0.2
"""Between two things that an actor says while its trial runs."""
_CLOSE_SECONDS = 90.0
"""That an actor gets to end its worker, whose supervisor gives up after 60."""
_LOOK_SECONDS = 0.5
"""Between two looks at how long an actor has said nothing, and whether it is still wanted."""
_AGAIN_SECONDS = 0.5
"""Until an actor that could not be reached is asked again."""
_GONE = "it ended, or the others cannot reach it"
_CONTROL = "control"
"""The actor's thread for what interrupts a trial."""
_THREADS = "OMP_NUM_THREADS"

Device = Literal["cuda", "cpu"]
NewRunner = Callable[..., Runner]
"""Starts a runner on the node that calls it, which says its ``log_path``."""


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
        # What Ray sets for its workers: a trial has the threads that it has without Ray.
        os.environ.pop(_THREADS, None)
        os.environ |= {k: v for k, v in raylet_environment().items() if k == _THREADS}
        card = read_card() if device == "cuda" and fault is None else None
        watch = None if card is None or card.uuid is None else FaultWatch(card.uuid)
        runner = new_runner(log_path=cache_directory() / "ray" / home / "worker.log")
        self._runner = Lane(runner, fault=fault or watch or (lambda: None))
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
        came since the last, which may be nothing; finally its outcome.

        Raises:
            CardLost: the trial failed, and the GPU has a fault of its own.
            EnvironmentFault: the device is not to be had.
        """
        told: deque[Progress] = deque()

        def observe(progress: Progress) -> bool:
            told.append(progress)
            return self._stopped.is_set()

        def run() -> Outcome:
            if is_fresh:
                self._runner.renew()
            return self._runner.run(request, observe=observe)

        self._stopped.clear()
        trial, is_over = self._trials.submit(run), False
        while not is_over:
            is_over = bool(wait([trial], timeout=_ALIVE_SECONDS).done)
            yield [told.popleft() for _ in range(len(told))]
        yield trial.result()

    def stop(self) -> None:
        """Stop the running trial as slow, at its next progress."""
        self._stopped.set()

    def close(self) -> None:
        """Free the device, once the running trial is ended."""
        self._runner.cancel()
        self._trials.submit(self._runner.close).result()


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


@dataclass(eq=False)
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

    ray: Any
    new_runner: NewRunner
    home: str
    device: Device
    node_id: str
    address: str
    silence_seconds: float = SILENCE_SECONDS
    _actor: Any = None
    _has_spoken: bool = False
    _wants_fresh: bool = False
    _phase: Phase = "start"
    _is_cancelled: bool = False
    _lost: CardLost | None = None

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        """See `runner.Runner.run`.

        Raises:
            CardLost: the node is gone, or nothing is heard of it; the trial may run elsewhere.
            EnvironmentFault: the device on the node is not to be had.
        """
        if self._is_cancelled:
            return INTERRUPTED
        if self._lost is not None:
            raise self._lost
        exceptions, self._phase = self.ray.exceptions, "start"
        unclear = exceptions.ActorUnavailableError, exceptions.GetTimeoutError
        try:
            failure = None if self._actor is None else self._failure()
            if failure is not None and not isinstance(failure, unclear):
                # It ended while it had nothing to do: that is not this trial's doing.
                self._discard()
            return self._follow(request, observe)
        except exceptions.RayError as error:
            return self._without_answer(error)
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

    def close(self) -> None:
        """See `runner.Runner.close`: the worker ends before its actor does."""
        if not self.ray.is_initialized():
            self._actor = None
        elif self._has_spoken and not self._is_cancelled:
            with contextlib.suppress(self.ray.exceptions.RayError):
                closed = self._actor.close.options(concurrency_group=_CONTROL).remote()
                self.ray.wait([closed], timeout=_CLOSE_SECONDS)
        self._discard()

    def _follow(self, request: TrialRequest, observe: Observer) -> Outcome:
        """Have the actor run a trial, and observe it until it has ended."""
        actor, is_fresh = self._hosted(), self._wants_fresh
        self._wants_fresh = False
        stream = actor.run.options(num_returns="streaming").remote(request, is_fresh=is_fresh)
        clock, is_stopping = AttentiveClock(), False
        while True:
            ready, _ = self.ray.wait([stream], timeout=_LOOK_SECONDS, fetch_local=False)
            if self._is_cancelled:
                self._discard()
                return INTERRUPTED
            if not ready:
                self._refuse_silence(clock)
                continue
            news = self.ray.get(next(stream))
            clock, self._has_spoken = AttentiveClock(), True
            if not isinstance(news, list):
                return cast(Outcome, news)
            for progress in news:
                self._phase = progress.phase
                if observe(progress) and not is_stopping:
                    is_stopping = True
                    actor.stop.options(concurrency_group=_CONTROL).remote()

    def _failure(self) -> Exception | None:
        """Return why the actor cannot be reached, a timeout where it says nothing; None where it
        answers."""
        try:
            asked = self._actor.device.options(concurrency_group=_CONTROL).remote()
            self.ray.get(asked, timeout=_LOOK_SECONDS)
        except self.ray.exceptions.RayError as error:
            return cast(Exception, error)
        return None

    def _refuse_silence(self, clock: AttentiveClock) -> None:
        longest = self.silence_seconds if self._has_spoken else START_SECONDS
        if clock.look() >= longest:
            raise self._lose(f"nothing was heard of it for {longest:g} s")

    def _without_answer(self, error: Exception) -> Outcome:
        """Return what the trial came to whose actor failed.

        Raises:
            CardLost: its node is gone with it.
            EnvironmentFault: what the host says is at fault, or it cannot begin.
        """
        exceptions, clock = self.ray.exceptions, AttentiveClock()
        unclear = exceptions.ActorUnavailableError, exceptions.GetTimeoutError
        # It may just be given up: Ray says so in a while.
        while isinstance(error, unclear) and not self._is_cancelled:
            self._refuse_silence(clock)
            time.sleep(_AGAIN_SECONDS)
            known = self._failure()
            if known is None:
                self._discard()
                return Lost(detail="the connection to its node broke")
            error = known
        self._discard()
        if self._is_cancelled:
            return INTERRUPTED
        cause = getattr(error, "cause", None)
        if isinstance(cause, EnvironmentFault):
            raise type(cause)(f"node {self.address}: {cause}") from error
        if isinstance(error, exceptions.RayTaskError):
            raise RuntimeError(f"on node {self.address}: {error}") from error
        if getattr(error, "actor_init_failed", False):
            why = shown(str(error).strip().splitlines()[-1])
            raise EnvironmentFault(
                f"node {self.address}: no trial can be run there: {why}"
            ) from error
        if not self._is_node_alive():
            raise self._lose(_GONE)
        # In one line, without what names the actor.
        lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
        why = shown(" ".join(lines[1:] or lines)).rstrip(".")
        detail = f"the actor's process on node {self.address} ended: {why}"
        return storable(Crashed(phase=self._phase, cause="signal", detail=detail))

    def _lose(self, why: str) -> CardLost:
        self._discard()
        self._lost = CardLost(
            f"node {self.address} of the Ray cluster is lost: {why}. What was measured is stored"
        )
        return self._lost

    def _is_node_alive(self) -> bool:
        try:
            nodes = self.ray.nodes()
        except (self.ray.exceptions.RayError, RuntimeError, OSError):
            # The head is gone, and with it whoever could tell.
            return False
        return any(node["NodeID"] == self.node_id and node["Alive"] for node in nodes)

    def _hosted(self) -> Any:
        """Return the actor, which may not have begun yet."""
        if self._actor is None:
            needs = {"num_cpus": 1} if self.device == "cpu" else {"num_cpus": 0, "num_gpus": 1}
            host = self.ray.remote(concurrency_groups={_CONTROL: 1})(Host)
            here = on_node(self.ray, self.node_id)
            actor = host.options(max_restarts=0, scheduling_strategy=here, **needs)
            self._actor = actor.remote(self.new_runner, home=self.home, device=self.device)
        return self._actor

    def _discard(self) -> None:
        """End the actor at once, and with it its worker, which the kernel binds to it."""
        actor, self._actor, self._has_spoken = self._actor, None, False
        if actor is not None:
            with contextlib.suppress(self.ray.exceptions.RayError, ValueError):
                self.ray.kill(actor)


def on_node(ray: Any, node_id: str) -> Any:
    """Return what has Ray run something on a node, and nowhere else."""
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
