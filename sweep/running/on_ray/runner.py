"""Owns the runner whose trials run on a node of a Ray cluster, on one card of it.

Satisfies `runner.Runner`. Its actor there has a supervised runner (`host.Host`); here are orders,
what is heard, and what it means when nothing is heard any more. Knows nothing of studies, or of how
nodes are chosen.
"""

from __future__ import annotations

import contextlib
import queue
import time
import uuid
from concurrent.futures import Future
from functools import cache
from typing import Any, Literal, Self

from search_spaces.errors import CardLost, EnvironmentFault
from storage.records import INTERRUPTED, Crashed, Outcome, Phase
from sweep.running import ends
from sweep.running.on_ray.host import (
    Broken,
    Ended,
    Faulted,
    Host,
    HostSettings,
    Trial,
    Word,
)
from sweep.running.patience import AttentiveClock
from sweep.running.runner import Observer, keep_going
from sweep.running.wire import Progress, TrialRequest

SILENCE_SECONDS = 60.0
"""Without a word of an actor, which says that it lives every `HEAR_SECONDS`: no machine is away for
so long and comes back."""
START_SECONDS = 180.0
"""The same for an actor that has not spoken yet: its process imports our packages first, which may
be on a disk of the network."""
_CLOSE_SECONDS = 90.0
"""That an actor gets to end its worker, whose supervisor gives up after 60."""
_LOOK_SECONDS = 1.0
_GONE = "it ended, or the others cannot reach it"
_HEARING = "hear"
"""The actor's threads for what waits there, beside those for orders."""
_AGAIN_SECONDS = 0.5
"""Until an actor that could not be reached is asked again."""

Answer = Future[list[Word] | None]


class _Gone(Exception):  # noqa: N818 - what it means depends on the node
    """The actor will not answer any more; says why."""


class _Silent(_Gone):
    """Nothing is heard of the actor, nor of what became of it."""


class _Cancelled(Exception):  # noqa: N818 - somebody asked for it
    """The run is to end."""


class RayRunner:
    """Runs configurations in an actor on one node.

    Args:
        ray: the module, joined to the cluster.
        settings: what its runner there is for.
        node_id: of the node.
        address: of the node, for messages.
        silence_seconds: after which an actor that says nothing is given up.
    """

    def __init__(
        self,
        ray: Any,
        settings: HostSettings,
        *,
        node_id: str,
        address: str,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._ray = ray
        self._settings = settings
        self._node_id = node_id
        self._address = address
        self._silence_seconds = silence_seconds
        self._actor: Any = None
        self._has_spoken = False
        self._wants_fresh = False
        self._phase: Phase = "start"
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        """What came from the actor for the present run; None says that the run is cancelled."""
        self._is_cancelled = False
        self._lost: CardLost | None = None

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        """See `runner.Runner.run`.

        Raises:
            CardLost: the node is gone, or nothing is heard of it; the trial may run elsewhere.
            EnvironmentFault: the device on the node is not to be had.
        """
        self._answers = queue.SimpleQueue()
        # After there is a queue that whoever cancels from now on writes into.
        if self._is_cancelled:
            return INTERRUPTED
        if self._lost is not None:
            raise self._lost
        trial = Trial(run_id=uuid.uuid4().hex, request=request)
        try:
            return self._run(trial, observe)
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
            self._hosted().start.remote(is_fresh=self._take_fresh())

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """What its trials run on."""
        return self._settings.target.device

    def place(self) -> Any:
        """Begin with the actor; return Ray's reference to what CUDA there calls its card."""
        return self._hosted().device.remote()

    def fault(self) -> str | None:
        """Return why no trial can run here any more; None where one can."""
        if self._lost is None and not self._is_node_alive():
            self._lose(_GONE)
        return None if self._lost is None else str(self._lost)

    def renew(self) -> None:
        """See `runner.Runner.renew`: it is done with the next order."""
        self._wants_fresh = True

    def cancel(self) -> None:
        """See `runner.Runner.cancel`. Calls nothing of Ray's: a signal may come amidst of that."""
        self._is_cancelled = True
        self._answers.put(None)

    def close(self) -> None:
        """See `runner.Runner.close`: the worker ends before its actor does."""
        actor, self._actor = self._actor, None
        if actor is None or not self._ray.is_initialized():
            return
        if self._has_spoken and not self._is_cancelled:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.wait([actor.close.remote()], timeout=_CLOSE_SECONDS)
        self._kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, trial: Trial, observe: Observer) -> Outcome:
        """Run a trial in the actor that is there, or in another where that one ended since."""
        was_there, self._phase = self._actor is not None, "start"
        try:
            return self._follow(trial, observe)
        except _Gone:
            if not was_there or self._phase != "start" or not self._is_node_alive():
                raise
            # It ended while it had nothing to do: that is not this trial's doing.
            self._discard()
            return self._follow(trial, observe)

    def _follow(self, trial: Trial, observe: Observer) -> Outcome:
        """Order a trial and hear how it goes until it has ended."""
        actor, is_fresh = self._hosted(), self._take_fresh()
        actor.begin.remote(trial, is_fresh=is_fresh)
        heard, is_stopping = 0, False
        while True:
            words = self._next_words(actor, trial, heard)
            if words is None:
                actor.begin.remote(trial, is_fresh=is_fresh)
                continue
            heard += len(words)
            for word in words:
                match word:
                    case Progress():
                        self._phase = word.phase
                        if observe(word) and not is_stopping:
                            is_stopping = True
                            actor.stop.remote()
                    case Ended(outcome=outcome):
                        return outcome
                    case Faulted(fault=fault):
                        raise type(fault)(f"node {self._address}: {fault}")
                    case Broken(trace=trace):
                        raise RuntimeError(f"on node {self._address}: {trace}")

    def _next_words(self, actor: Any, trial: Trial, heard: int) -> list[Word] | None:
        """Wait for what the actor says next of a trial; None where it knows of no such trial.

        Raises:
            _Cancelled: somebody asked for that meanwhile.
            _Gone: it will not say anything any more.
        """
        clock = AttentiveClock()
        self._ask(actor, trial, heard)
        while True:
            try:
                answer = self._answers.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self._refuse_silence(clock.look())
                continue
            if answer is None:
                raise _Cancelled
            error = answer.exception()
            if error is None:
                self._has_spoken = True
                return answer.result()
            if not isinstance(error, self._ray.exceptions.ActorUnavailableError):
                raise self._as_gone(error)
            # The network, or a node that is just being given up: Ray says which in a while.
            self._refuse_silence(clock.look())
            time.sleep(_AGAIN_SECONDS)
            self._ask(actor, trial, heard)

    def _ask(self, actor: Any, trial: Trial, heard: int) -> None:
        """Ask the actor what it says; the answer goes into the present run's queue, or nowhere."""
        asked = actor.hear.options(concurrency_group=_HEARING).remote(trial.run_id, heard)
        asked.future().add_done_callback(self._answers.put)

    def _refuse_silence(self, seconds: float) -> None:
        longest = self._silence_seconds if self._has_spoken else START_SECONDS
        if seconds >= longest:
            raise _Silent(f"nothing was heard of it for {longest:g} s")

    def _as_gone(self, error: BaseException) -> Exception:
        """Return what an error of Ray's means; one of the host's own is a mistake of ours."""
        exceptions = self._ray.exceptions
        if getattr(error, "actor_init_failed", False):
            why = ends.shown(str(error).strip().splitlines()[-1])
            return EnvironmentFault(f"node {self._address}: no trial can be run there: {why}")
        if isinstance(error, exceptions.RayError) and not isinstance(
            error, exceptions.RayTaskError
        ):
            return _Gone(_in_short(str(error)))
        return RuntimeError(f"on node {self._address}: {error}")

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

    def _take_fresh(self) -> bool:
        wanted, self._wants_fresh = self._wants_fresh, False
        return wanted

    def _hosted(self) -> Any:
        """Return the actor, which may not have begun yet."""
        if self._actor is None:
            strategies = self._ray.util.scheduling_strategies
            self._has_spoken = False
            self._actor = (
                _actor_class(self._ray)
                .options(
                    num_cpus=1 if self.device == "cpu" else 0,
                    num_gpus=0 if self.device == "cpu" else 1,
                    max_restarts=0,
                    scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(
                        self._node_id, soft=False
                    ),
                )
                .remote(self._settings)
            )
        return self._actor

    def _discard(self) -> None:
        """End the actor at once, and with it its worker, which the kernel binds to it."""
        actor, self._actor = self._actor, None
        if actor is not None:
            self._kill(actor)

    def _kill(self, actor: Any) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(actor)


@cache
def _actor_class(ray: Any) -> Any:
    return ray.remote(concurrency_groups={_HEARING: 1})(Host)


def _in_short(text: str) -> str:
    """Return what Ray says of an actor's end in one line, without what names the actor."""
    lines = [line.strip() for line in text.splitlines() if not line.startswith("\t")]
    return ends.shown(" ".join(lines[1:] or lines)).rstrip(".")
