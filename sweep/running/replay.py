"""The runner that needs no device: it answers with recorded outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import InitVar, dataclass, field

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import (
    INTERRUPTED,
    OUT_OF_TIME,
    Invalid,
    Measured,
    Measurement,
    Outcome,
    OutOfMemory,
    PrunedSlow,
    TrialRecord,
    held_to_budget,
)
from qlora_sweep.sweep.running.runner import Observer, Runner, keep_going
from qlora_sweep.sweep.running.wire import Progress, TrialRequest


def not_recorded(config: TrialConfig) -> Outcome:
    """Say that no trial of ``config`` was recorded: nothing is known of it, and no number is made
    up."""
    return Invalid(rule="not_recorded", detail=f"no recorded trial of {config.key()}")


@dataclass(eq=False)
class ReplayRunner(Runner):
    """Answers each configuration with what was recorded of it, beat by beat.

    Args:
        records: the trials to replay; of several of one configuration they are answered in turn,
            then the last again.
        otherwise: answers a configuration that was not recorded; a function of the configuration
            makes a device of it. By default such a configuration is `Invalid` under the rule
            ``not_recorded``.
        budget_bytes: what was recorded with a higher peak does not fit; None for no budget.
        pause: called before each beat, where a test or a demonstration wants time to pass.
        soaking: answers a soak; by default it ends as any other run does.
    """

    records: InitVar[Iterable[TrialRecord]] = ()
    otherwise: Callable[[TrialConfig], Outcome] = not_recorded
    budget_bytes: int | None = None
    pause: Callable[[], None] = lambda: None
    soaking: Callable[[TrialConfig], Outcome] | None = None
    requests: list[TrialRequest] = field(default_factory=list)
    """All that was run, in order; recorded measurements answer as they are."""
    device_seconds: float = 0.0
    """That the recorded trials took, and nothing of this machine's."""
    _is_cancelled: bool = False

    def __post_init__(self, records: Iterable[TrialRecord]) -> None:
        self._records: dict[str, list[TrialRecord]] = {}
        for record in records:
            self._records.setdefault(record.config.key(), []).append(record)

    @property
    def ran(self) -> list[TrialConfig]:
        """Every configuration that was run, in order."""
        return [request.config for request in self.requests]

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        """Answer with the recorded outcome, with `PrunedSlow` where ``observe`` stops a measured
        one, or with `OUT_OF_TIME` where the recorded trial took longer than is left."""
        if self._is_cancelled:
            return INTERRUPTED
        self.requests.append(request)
        began_seconds = self.device_seconds
        outcome = self._replayed(request)
        seconds_left = request.seconds_left
        if seconds_left is not None and self.device_seconds >= began_seconds + seconds_left:
            self.device_seconds = began_seconds + max(0.0, seconds_left)
            outcome = OUT_OF_TIME
        for beat in _beats(outcome, request):
            self.pause()
            if self._is_cancelled:
                return INTERRUPTED
            if observe(beat) and isinstance(outcome, Measured) and beat.phase == "measure":
                return _cut_short(outcome.measurement, steps_measured=beat.step)
        return outcome

    def _replayed(self, request: TrialRequest) -> Outcome:
        """Return what is known of a configuration; out of memory for a peak above the budget, whose
        stage was not recorded."""
        known = self._records.get(request.config.key())
        if request.is_soak and self.soaking is not None:
            outcome = self.soaking(request.config)
        elif not known:
            outcome = self.otherwise(request.config)
        else:
            record = known[0]
            if len(known) > 1:
                known.pop(0)
            self.device_seconds += record.device_seconds
            outcome = record.outcome
        if self.budget_bytes is None:
            return outcome
        return held_to_budget(outcome, budget_bytes=self.budget_bytes)

    def start(self) -> None:
        """Do nothing: answers are there at once."""

    def cancel(self) -> None:
        """Make the running trial `Lost` at its next beat, and every later one before its first."""
        self._is_cancelled = True

    def close(self) -> None:
        """Do nothing: there is no device to free."""


def _beats(outcome: Outcome, request: TrialRequest) -> Iterator[Progress]:
    """Yield the beats of a trial; the interval of the median is there from the fewest measured
    steps on."""
    yield Progress(phase="attach")
    peak = None
    if isinstance(outcome, OutOfMemory):
        peak = outcome.peak_allocated_bytes
    if not isinstance(outcome, Measured | PrunedSlow):
        yield Progress(phase="warmup", allocated_bytes=peak)
        return
    measurement = outcome.measurement
    peak = measurement.peak_allocated_bytes
    tokens = measurement.loss_tokens_per_step or request.config.tokens_per_step
    for step in range(1, measurement.steps_warmup + 1):
        yield Progress(phase="warmup", step=step, allocated_bytes=peak)
    fastest = None
    if measurement.step_seconds_ci95 is not None:
        fastest = tokens / measurement.step_seconds_ci95[0]
    for step in range(1, measurement.steps_measured + 1):
        yield Progress(
            phase="measure",
            step=step,
            tokens_per_second=measurement.tokens_per_second,
            tokens_per_second_high=fastest if step >= request.steps.measured_min else None,
            allocated_bytes=peak,
        )
    yield Progress(phase="detach")


def _cut_short(measurement: Measurement, *, steps_measured: int) -> PrunedSlow:
    seconds = measurement.measured_seconds * steps_measured / measurement.steps_measured
    changes = {"steps_measured": steps_measured, "measured_seconds": seconds}
    # Validated anew, unlike a copy: an interval of so many steps may not be one of fewer.
    cut = Measurement.model_validate(measurement.model_dump() | changes)
    return PrunedSlow(measurement=cut)
