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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from qlora_sweep.search_spaces.errors import EnvironmentFault, GpuLost
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.kinds import DEVICES, DeviceName
from qlora_sweep.storage.directory import OUTCOME, beside_log
from qlora_sweep.storage.records import INTERRUPTED, Crashed, Outcome, Phase
from qlora_sweep.sweep.paths import cache_directory
from qlora_sweep.sweep.running.child import AttentiveClock, shown, storable
from qlora_sweep.sweep.running.device_info import read_gpu
from qlora_sweep.sweep.running.runner import Observer, Runner, keep_going
from qlora_sweep.sweep.running.wire import Progress, TrialRequest

QUIET_SECONDS = 60.0
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
_CONTROL = "control"
"""The actor's thread for what interrupts a trial."""
_THREADS = "OMP_NUM_THREADS"

_LEFT_MAX = 8
"""Outcomes of earlier drivers of a study that a node returns."""

NewRunner = Callable[..., Runner]
"""Starts a runner on the node that calls it, which says its ``log_path``."""


class Told(NamedTuple):
    """What an actor says before its first trial."""

    gpu: str
    """What the driver of this node's GPUs calls the one that Ray gave to it."""
    missing: tuple[str, ...]
    """Paths that are not there."""
    left: tuple[bytes, ...]
    """The files in which workers of earlier drivers left their last outcome."""


class Host:
    """The actor on a node: a runner, and the thread that it runs trials in.

    Args:
        new_runner: starts what runs the trials.
        home: of the runner's log and outcomes, below the node's cache.
        device: what its trials run on.
    """

    def __init__(
        self,
        new_runner: NewRunner,
        *,
        home: str,
        device: DeviceName,
    ) -> None:
        # What Ray sets for its workers: a trial has the threads that it has without Ray.
        as_ray_was_started(_THREADS)
        gpu = None
        gpus: tuple[str, ...] = ()
        if DEVICES[device].is_gpu:
            gpu = read_gpu()
        if gpu is not None and gpu.uuid is not None:
            gpus = (gpu.uuid,)
        log_path = cache_directory() / "ray" / home / "worker.log"
        self._outcomes = beside_log(log_path)
        self._runner = new_runner(log_path=log_path, gpus=gpus)
        self._trials = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sweep-trials")
        self._stopped = threading.Event()

    def tell(self, paths: Sequence[str] = (), study: str = "") -> Told:
        """Return what the driver asks for before the first trial.

        Args:
            paths: that trials read.
            study: the name of the study whose earlier drivers' outcomes are returned.
        """
        missing = tuple(path for path in paths if not Path(path).exists())
        left: tuple[bytes, ...] = ()
        if study:
            files = (cache_directory() / "ray").glob(f"{study}-????????/*/{OUTCOME}")
            newest = sorted(files, key=lambda file: file.stat().st_mtime)[-_LEFT_MAX:]
            left = tuple(map(Path.read_bytes, newest))
        return Told(os.environ.get("CUDA_VISIBLE_DEVICES", ""), missing, left)

    def left(self, request: TrialRequest) -> Outcome | None:
        """Return what a worker of this place left as the outcome of a request's attempt."""
        if request.attempt is None:
            return None
        return self._outcomes.take(request.attempt.id, request.config)

    def start(self) -> None:
        """See `runner.Runner.start`."""
        self._trials.submit(self._runner.start)

    def run(self, request: TrialRequest) -> Iterator[list[Progress] | Outcome]:
        """Run a trial and yield its progress: what came since the last, which may be nothing;
        finally its outcome.

        Raises:
            GpuLost: the trial failed, and the GPU has a fault of its own.
            EnvironmentFault: the device is not to be had.
        """
        news: queue.SimpleQueue[Progress] = queue.SimpleQueue()

        def observe(progress: Progress) -> bool:
            news.put(progress)
            return self._stopped.is_set()

        self._stopped.clear()
        trial = self._trials.submit(self._runner.run, request, observe=observe)
        is_over = False
        while not is_over:
            is_over = bool(wait([trial], timeout=_ALIVE_SECONDS).done)
            yield [news.get() for _ in range(news.qsize())]
        yield trial.result()

    def stop(self) -> None:
        """Stop the running trial as slow, at its next progress."""
        self._stopped.set()

    def close(self) -> None:
        """Free the device, once the running trial is ended."""
        self._runner.cancel()
        self._trials.submit(self._runner.close).result()


def raylet_environment() -> dict[str, str]:
    """Return the variables that Ray was started with on this node; none where they cannot be read.

    Those of this process are not all the node's: Ray sets some for each of its workers.
    """
    try:
        data = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return {}
    entries = filter(lambda entry: "=" in entry, os.fsdecode(data).split("\0"))
    return dict(entry.split("=", maxsplit=1) for entry in entries)


def as_ray_was_started(name: str) -> None:
    """Give a variable of this process the value that Ray was started with; none where that had
    none."""
    os.environ.pop(name, None)
    variables = raylet_environment()
    if name in variables:
        os.environ[name] = variables[name]


@dataclass(eq=False)
class RayRunner(Runner):
    """Runs configurations in an actor on one node, which Ray starts anew where it ends.

    Args:
        ray: the module, joined to the cluster.
        new_runner: starts what runs the trials there.
        home: as for `Host`.
        device: as for `Host`.
        node_id: of the node.
        address: of the node, for messages.
        quiet_seconds: after which an actor that says nothing is given up.
    """

    ray: Any
    new_runner: NewRunner
    home: str
    device: DeviceName
    node_id: str
    address: str
    quiet_seconds: float = QUIET_SECONDS
    _has_spoken: bool = False
    _phase: Phase = "start"
    _is_cancelled: bool = False
    _lost: GpuLost | None = None
    _newest: Outcome | None = None
    """What was returned last."""

    def __post_init__(self) -> None:
        needs = {"num_cpus": 1}
        if DEVICES[self.device].is_gpu:
            needs = {"num_cpus": 0, "num_gpus": 1}
        host = self.ray.remote(concurrency_groups={_CONTROL: 1})(Host)
        here = on_node(self.ray, self.node_id)
        self._actor = host.options(
            # Ray starts it again and asks it again, but never runs a trial twice.
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=here,
            **needs,
        ).remote(self.new_runner, home=self.home, device=self.device)

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        """See `runner.Runner.run`.

        Raises what `_run` raises.
        """
        self._newest = self._run(request, observe)
        return self._newest

    def _run(self, request: TrialRequest, observe: Observer) -> Outcome:
        """Run a trial.

        Raises:
            GpuLost: the node is gone, or nothing is heard of it; the trial may run elsewhere.
            EnvironmentFault: the device on the node is not to be had.
        """
        if self._is_cancelled:
            return INTERRUPTED
        if self._lost is not None:
            raise self._lost
        self._phase = "start"
        began = time.monotonic()
        try:
            # It may have ended while it had nothing to do: that is not this trial's doing.
            if not self._answers():
                return INTERRUPTED
            if request.seconds_left is not None:
                # Each machine has a clock of its own.
                seconds_left = request.seconds_left - (time.monotonic() - began)
                request = replaced(request, seconds_left=seconds_left)
            return self._follow(request, observe)
        except self.ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, EnvironmentFault):
                raise
            raise type(error.cause)(f"node {self.address}: {error.cause}") from error
        except self.ray.exceptions.RayError as error:
            # What still runs there is no trial of this study any more.
            self._kill(no_restart=False)
            if not self._answers():
                return INTERRUPTED
            left = self._left_behind(request)
            if left is not None:
                return left
            # In one line, without what names the actor.
            lines = [line.strip() for line in str(error).splitlines() if not line.startswith("\t")]
            why = shown(" ".join(lines[1:] or lines)).rstrip(".")
            detail = f"the actor's process on node {self.address} ended: {why}"
            return storable(Crashed(phase=self._phase, cause="signal", detail=detail))
        except BaseException:
            # The observer failed, or was interrupted: the rest of this trial is not read.
            self._kill(no_restart=False)
            raise

    def _left_behind(self, request: TrialRequest) -> Outcome | None:
        """Return the outcome that the worker wrote before its actor ended; None where there is
        none, or where it is that of the run before: one attempt may take several runs."""
        reference = self._actor.left.options(concurrency_group=_CONTROL).remote(request)
        if not self._await(reference):
            return INTERRUPTED
        with contextlib.suppress(self.ray.exceptions.RayError):
            left = cast(Outcome | None, self.ray.get(reference))
            if left is not None and storable(left) != self._newest:
                return storable(left)
        return None

    def _follow(self, request: TrialRequest, observe: Observer) -> Outcome:
        """Have the actor run a trial, and observe it until it has ended."""
        run = self._actor.run.options(num_returns="streaming", max_task_retries=0)
        stream = run.remote(request)
        is_stopping = False
        while self._await(stream):
            news = self.ray.get(next(stream))
            self._has_spoken = True
            if not isinstance(news, list):
                return cast(Outcome, news)
            for progress in news:
                self._phase = progress.phase
                if observe(progress) and not is_stopping:
                    is_stopping = True
                    self._actor.stop.options(concurrency_group=_CONTROL).remote()
        return INTERRUPTED

    def _answers(self) -> bool:
        """Wait until the actor answers; return whether it did before somebody asked to stop.

        Raises:
            GpuLost: its node is gone.
            EnvironmentFault: it cannot begin there.
        """
        answer = self.tell()
        if not self._await(answer):
            return False
        try:
            self.ray.get(answer)
        except self.ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                why = shown(str(error).strip().splitlines()[-1])
                words = f"node {self.address}: no trial can be run there: {why}"
                raise EnvironmentFault(words) from error
            raise self._lose("it ended, or the others cannot reach it") from error
        return True

    def _await(self, reference: Any) -> bool:
        """Wait for what the actor says next; return whether it came before a request to stop.

        Raises:
            GpuLost: nothing is heard for too long.
        """
        clock = AttentiveClock()
        longest = START_SECONDS
        if self._has_spoken:
            longest = self.quiet_seconds
        while not self.ray.wait([reference], timeout=_LOOK_SECONDS, fetch_local=False)[0]:
            if self._is_cancelled:
                break
            if clock.look() >= longest:
                raise self._lose(f"nothing was heard of it for {longest:g} s")
        if self._is_cancelled:
            self._kill()
        return not self._is_cancelled

    def start(self) -> None:
        """See `runner.Runner.start`: the actor's process and its worker's begin on the node."""
        if not self._is_cancelled and self._lost is None:
            self._actor.start.remote()

    def tell(self, paths: Sequence[str] = (), study: str = "") -> Any:
        """Return Ray's reference to what `Host.tell` says."""
        return self._actor.tell.options(concurrency_group=_CONTROL).remote(paths, study)

    def cancel(self) -> None:
        """See `runner.Runner.cancel`. Calls nothing of Ray's: a signal may come amidst of that."""
        self._is_cancelled = True

    def close(self) -> None:
        """See `runner.Runner.close`: the worker ends before its actor does."""
        if not self.ray.is_initialized():
            return
        if self._has_spoken and not self._is_cancelled and self._lost is None:
            with contextlib.suppress(self.ray.exceptions.RayError):
                closed = self._actor.close.options(concurrency_group=_CONTROL).remote()
                self.ray.wait([closed], timeout=_CLOSE_SECONDS)
        self._kill()

    def _lose(self, why: str) -> GpuLost:
        self._kill()
        self._lost = GpuLost(
            f"node {self.address} of the Ray cluster is lost: {why}. What was measured is stored"
        )
        return self._lost

    def _kill(self, *, no_restart: bool = True) -> None:
        """End the actor at once, and with it its worker, which the kernel binds to it."""
        self._has_spoken = False
        with contextlib.suppress(self.ray.exceptions.RayError, ValueError):
            self.ray.kill(self._actor, no_restart=no_restart)


def on_node(ray: Any, node_id: str) -> Any:
    """Return what has Ray run something on a node, and nowhere else."""
    return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
