"""A GPU with a clock: counts what trials take of it; steps are as uneven as real ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from qlora_sweep.search_spaces.config import SETTINGS, TrialConfig
from qlora_sweep.storage.records import (
    OUT_OF_TIME,
    Measured,
    Outcome,
    OutOfMemory,
    PrunedSlow,
)
from qlora_sweep.sweep.running.runner import Observer, Runner, keep_going
from qlora_sweep.sweep.running.wire import Progress, TrialRequest
from qlora_sweep.sweep.training.meter import (
    GpuReader,
    Meter,
    NeighbourWatch,
    fastest_median,
    median_interval,
)
from tests.storage.builders import SOAKED
from tests.sweep.simulated_device import a_measurement

ATTACH_SECONDS = 1.0
REBUILD_SECONDS = 2.0
INTERLUDE_SECONDS = 1.0
SPREAD = 0.01
"""Of steps."""
HELD_UP_SHARE = 0.2
HELD_UP = 0.08
"""By how much the host holds up that share of steps: runs of a baseline have intervals as on an
H200, 7,173 to 8,160 about 8,109 tokens/s."""
BETWEEN_RUNS = 0.005
"""Half of all pairs of runs of one configuration in `tests/bench/results` differ by less."""


def no_pace(_: float) -> float:
    return 1.0


@dataclass(eq=False)
class TimedRunner(Runner):
    """Answers by the seconds of a configuration's steps; None for what does not fit.

    Args:
        step_seconds: of a configuration.
        peak_bytes: of a configuration.
        seed: of the noise.
        pace: by which the GPU is slower at a moment, seconds since its start.
    """

    step_seconds: Callable[[TrialConfig], float | None]
    peak_bytes: Callable[[TrialConfig], int]
    seed: int = 0
    pace: Callable[[float], float] = no_pace
    seconds: float = 0.0
    """The device's, the start of workers apart."""
    ran: list[tuple[TrialConfig, str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._base: tuple[Any, ...] | None = None

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        began = self.seconds
        self._stop_at = math.inf
        if request.seconds_left is not None:
            self._stop_at = began + request.seconds_left
        outcome = self._trained(request, observe)
        self.ran.append((request.config, str(outcome.verdict), self.seconds - began))
        return outcome

    def _trained(self, request: TrialRequest, observe: Observer) -> Outcome:
        config = request.config
        base = tuple(
            getattr(config, key) for key, setting in SETTINGS.items() if setting.shapes_base
        )
        self.seconds += ATTACH_SECONDS + REBUILD_SECONDS * (base != self._base)
        self._base, step = base, self.step_seconds(config)
        if step is None:
            return OutOfMemory(stage="forward")
        run = step * math.exp(self._rng.gauss(0.0, BETWEEN_RUNS))
        watch = NeighbourWatch(
            cast(Any, SimpleNamespace(room_bytes=lambda: None)), GpuReader(None), None
        )
        meter = Meter(config, request.steps, watch, request.is_soak)
        self.seconds += 2 * run
        while not meter.is_warm():
            if self.seconds >= self._stop_at:
                return OUT_OF_TIME
            meter.add([self._step(run)], (), is_warmup=True)
        begun, is_slow, is_cut = self.seconds, False, False
        if request.is_soak:
            self.seconds += INTERLUDE_SECONDS
        while not (is_slow or is_cut or meter.is_enough(self.seconds - begun)):
            meter.add([self._step(run)], (), is_warmup=False)
            tokens, fastest = config.tokens_per_step, fastest_median(meter.measured)
            is_slow = observe(
                Progress(
                    phase="measure",
                    step=len(meter.measured),
                    tokens_per_second=tokens / meter.median_seconds,
                    tokens_per_second_high=tokens / fastest if fastest else None,
                )
            )
            is_cut = self.seconds >= self._stop_at
        if is_cut and len(meter.measured) < request.steps.measured_min:
            return OUT_OF_TIME
        median = meter.median_seconds
        spent = {"steps": len(meter.measured), "seconds": self.seconds - begun}
        soak = SOAKED.model_copy(update=spent)
        measurement = a_measurement(
            config,
            tokens_per_second=config.tokens_per_step / median,
            step_seconds=median,
            step_seconds_ci95=median_interval(meter.measured),
            steps_measured=len(meter.measured),
            steps_warmup=len(meter.warmup),
            peak_allocated_bytes=self.peak_bytes(config),
            measured_seconds=meter.measured_spent,
            flags=("noisy",) if meter.flags()["noisy"] else (),
            soak=soak if request.is_soak else None,
        )
        kind = PrunedSlow if is_slow else Measured
        return kind(measurement=measurement)

    def _step(self, median: float) -> float:
        seconds = median * math.exp(self._rng.gauss(0.0, SPREAD)) * self.pace(self.seconds)
        if self._rng.random() < HELD_UP_SHARE:
            seconds *= 1.0 + self._rng.expovariate(1.0 / HELD_UP)
        self.seconds += seconds
        return seconds

    def start(self) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...
