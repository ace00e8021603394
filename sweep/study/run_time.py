"""How long a run of a study may take: by its time budget and its money, from the command's start to
its end, and the least that it needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.linears import parameters
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.sweep.planning.survey import COMPILE_SECONDS, START_SECONDS, TRIAL_SECONDS
from qlora_sweep.sweep.predict.forecast import Forecaster
from qlora_sweep.sweep.processes import own_age_seconds
from qlora_sweep.sweep.study.events import StopReason

IMPORT_SECONDS = 1.5
"""What `sweep run` takes until it has imported what it drives a study with. This and what follows
was measured on two cores (2026-11-28), idle and with up to five times as much to do."""
CLOSING_RATIO = 0.4
"""What a command takes from its last trial on, over its imports: to end the worker, to write and
print what came out. 0.19 to 0.32, for the demo and for a preset."""
OPENING_RATIO = 0.5
"""What it takes to open a study and to choose its first trial."""
BUSY_SHARE = 0.65
"""Of how much longer imports took than on an idle machine: so much longer a worker's start takes at
least. It was 0.64 to 1.13 of that."""
CPU_START_SECONDS = 3.0
"""A worker's start on a CPU, and a trial of the demo's model."""
CPU_BUILD_SECONDS = 3e-8
"""For each weight of a base in 4 bits, on one core: 4 s for 135 million."""
CPU_STEP_SECONDS = 7e-11
"""For each weight and token of a training step, on one core: 0.6 s for that model and 64 tokens."""
END_SHARE = 1.0 / 3.0
"""Of the run's time, what may be kept for measuring the winner again."""
MARGIN = 1.5
"""Over the least that is estimated, what is said to be enough."""


@dataclass(frozen=True)
class CommandStart:
    """When a command began."""

    at_seconds: float
    """By the monotonic clock."""
    import_seconds: float = IMPORT_SECONDS
    """That its imports took: how fast this machine is at the moment."""

    @classmethod
    def of_process(cls) -> CommandStart:
        """Return the start of this process, which has just imported what its command needs."""
        age_seconds = own_age_seconds()
        return cls(time.monotonic() - age_seconds, age_seconds)

    @classmethod
    def now(cls) -> CommandStart:
        """Return a start at this moment, of a call in a process that has run for any time."""
        return cls(time.monotonic())

    @property
    def _pace(self) -> float:
        """How many times longer something takes here, at least, than on an idle machine."""
        return max(1.0, BUSY_SHARE * self.import_seconds / IMPORT_SECONDS)

    @property
    def opening_seconds(self) -> float:
        """Seconds from when a study is resolved until its first trial is launched."""
        return OPENING_RATIO * IMPORT_SECONDS * self._pace

    @property
    def closing_seconds(self) -> float:
        """Seconds from a run's last trial to its command's end."""
        return CLOSING_RATIO * self.import_seconds

    def least_seconds(self, space: SearchSpace, forecaster: Forecaster) -> float:
        """Return about how long a run takes until its first trial is measured, from when it starts
        its worker: start, build, compiling, and as few steps of the baseline as there may be.

        Args:
            space: that is searched.
            forecaster: predicts the steps' speed; without a prediction they count as nothing.
        """
        tokens = space.steps.fewest * space.baseline_config().tokens_per_step
        if space.gpu == "cpu":
            weights = parameters(forecaster.model) or 0
            of_weight = CPU_BUILD_SECONDS + CPU_STEP_SECONDS * tokens
            return self._pace * (CPU_START_SECONDS + weights * of_weight)
        seconds = START_SECONDS + TRIAL_SECONDS
        if True in space.values_of("compile"):
            # What is predicted to be the fastest goes first.
            seconds += COMPILE_SECONDS
        speed = None
        if forecaster.speed is not None:
            speed = forecaster.speed.predict(space.baseline_config())
        if speed is not None:
            seconds += tokens / speed
        return seconds


@dataclass(eq=False)
class RunTime:
    """The time of one run of a study, counted from when this is made.

    Args:
        clock: seconds; only differences count.
        seconds: that it may take; infinite without a limit.
        reason: why it ends then.
    """

    clock: Callable[[], float]
    seconds: float = math.inf
    reason: StopReason = StopReason.TIME_SPENT
    _began_seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_seconds = self.clock()

    @classmethod
    def of(
        cls,
        space: SearchSpace,
        clock: Callable[[], float],
        *,
        spent_seconds: float = 0.0,
        paid_seconds: float = math.inf,
    ) -> RunTime:
        """Return the time of a run that ends with its time budget, or where its money ends sooner.

        Args:
            space: says the time budget.
            clock: seconds.
            spent_seconds: of the time budget, what is no part of this time.
            paid_seconds: that its money pays for.
        """
        seconds = math.inf
        if space.time_budget_seconds is not None:
            seconds = space.time_budget_seconds - spent_seconds
        if paid_seconds < seconds:
            return cls(clock, paid_seconds, StopReason.DOLLARS_SPENT)
        return cls(clock, seconds)

    @property
    def is_limited(self) -> bool:
        """Whether it ends at any time."""
        return math.isfinite(self.seconds)

    @property
    def left_seconds(self) -> float:
        """Seconds until it ends, below 0 once it is over."""
        if not self.is_limited:
            return math.inf
        return self._began_seconds + self.seconds - self.clock()

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.left_seconds <= 0.0

    def refuse_too_short(self, least_seconds: float, space: SearchSpace) -> None:
        """See that what is left is enough for a first trial.

        Args:
            least_seconds: that it takes about.
            space: says what the run may take, or cost.

        Raises:
            InputError: it is not; says what would be enough.
        """
        left_seconds = self.left_seconds
        if left_seconds >= least_seconds:
            return
        takes = f"the worker's start and a first trial take about {units.duration(least_seconds)}"
        if self.reason is StopReason.DOLLARS_SPENT or space.time_budget_seconds is None:
            left = units.duration(max(0.0, left_seconds))
            raise InputError(
                f"max_dollars {space.max_dollars:g} pays for {left} more, and {takes}: "
                "give more with --max-dollars"
            )
        spent_seconds = space.time_budget_seconds - left_seconds
        enough = math.ceil(MARGIN * (spent_seconds + least_seconds))
        raise InputError(
            f"the time budget of {units.duration(space.time_budget_seconds)} is too short for one "
            f"trial: {takes}, and imports, planning and the report "
            f"{units.duration(spent_seconds)}: --time-budget {enough}s would be enough"
        )

    def kept_seconds(self, *, least_seconds: float, full_seconds: float) -> float:
        """Return how much of it is kept for measuring the winner again: a third at most; nothing
        where that is less than the fewest runs take, which say nothing unless all are there.

        Args:
            least_seconds: of the fewest runs.
            full_seconds: of all that the space asks for.
        """
        most = END_SHARE * self.seconds
        return min(full_seconds, most) if least_seconds <= most else 0.0
