"""When the search of a study ends: its trials, its time or its money are spent, nothing is left to
try, nothing that is left is worth a trial, or trial after trial fails by the machine's doing; when
a running trial can no longer matter, and what is kept of one that another process disturbed.

No Optuna pruner is used: those read reported values back from storage and refuse studies with
several objectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import MORE_DESCRIPTORS, EnvironmentFault, InputError
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.kinds import EIGHT_BIT
from qlora_sweep.search_spaces.linears import nearest_capacity
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.preference import TIE
from qlora_sweep.search_spaces.prices import load_prices
from qlora_sweep.search_spaces.space import Objective, SearchSpace
from qlora_sweep.storage.definition import StudyDefinition
from qlora_sweep.storage.directory import WORTH_KEEPING
from qlora_sweep.storage.ranking import CONCLUSIVE, Ranking, rank
from qlora_sweep.storage.records import (
    NEIGHBOUR,
    RETRYABLE,
    Crashed,
    Lost,
    Measured,
    Outcome,
    OutOfMemory,
    PrunedSlow,
    TimedOut,
    TrialRecord,
    Verdict,
)
from qlora_sweep.sweep.paths import own_price_file
from qlora_sweep.sweep.planning.evidence import OnTarget
from qlora_sweep.sweep.running.wire import Progress
from qlora_sweep.sweep.sampling.encoding import identity
from qlora_sweep.sweep.sampling.guided import ClassForecast, Outlook
from qlora_sweep.sweep.study.events import StopReason

FastestOf = Callable[[Callable[[TrialConfig], bool], Sequence[TrialConfig]], TrialConfig | None]
CLASS_TRIALS_MAX = 2
"""Of a class of numerics that is owed a trial."""
FAILURES_IN_A_ROW = 5
"""So many trials that fail alike are the machine's doing; a night of them teaches nothing more."""
REMEASURED_AT_MOST = 2
REMEASURED = "remeasured"
LOSS_MARGIN = 1.0
"""What counts as a tie where a held-out loss is asked for as well: only what is less than half as
fast goes untrained. A slow one may learn more, but not one that takes twice as long."""


@dataclass(frozen=True)
class Stopping:
    """When a search ends.

    Args:
        space: says how many trials, how long, for how much, and down to what gain.
        usd_per_hour: price of the GPU that runs it; None where nothing is to be limited by it.
        outlook: says what is still to be gained by what all trials say, or all but that of a
            number; None from samplers that cannot tell.
        fastest_of: says what is expected to be the fastest of some configurations that were not
            tried; None from samplers that cannot tell, where none is left, and where that is
            hardly faster than those that were measured.
        unmeasured_classes: says what is expected to be the fastest of each capacity class that was
            not measured; nothing from samplers that cannot tell.
    """

    space: SearchSpace
    usd_per_hour: float | None = None
    outlook: Callable[[int | None], Outlook | None] = lambda _: None
    fastest_of: FastestOf = lambda _, measured: None
    unmeasured_classes: Callable[[], Sequence[ClassForecast]] = tuple

    def out_of_trials(
        self, spent: int, *, is_exhausted: Callable[[], bool], records: Sequence[TrialRecord]
    ) -> StopReason | None:
        """Return why no further configuration is tried; None where one should be."""
        if spent >= self.space.trials:
            return StopReason.TRIALS_SPENT
        if is_exhausted():
            return StopReason.EXHAUSTED
        # Twice in a row: one trial may make believe that there is nothing left, and the next may
        # show otherwise. On 24 replays that left 0.02 % to be found instead of 0.3 %.
        if self.is_little_left(records) and self.is_little_left(records, records[-1].number):
            return StopReason.GAIN_SPENT
        return None

    def is_little_left(self, records: Sequence[TrialRecord], besides: int | None = None) -> bool:
        """Whether too little is to be gained by what the trials say, one of them apart."""
        # The baseline alone says little, and where nothing can fit one verdict has to say so.
        if self.space.stop_below_gain == 0 or all(record.is_baseline for record in records):
            return False
        outlook = self.outlook(besides)
        return outlook is not None and outlook.gain < self.space.stop_below_gain

    def still_owed(self, ranking: Ranking) -> TrialConfig | None:
        """Return what is tried before a search ends for want of gain; None for nothing.

        A class of numerics is chosen by what its fastest reached (`Ranking`). So where the winner
        computes in 8 bits, the most promising with 16-bit compute is measured, or a second one
        where that came to little. Where another GPU stands in for the target, what is predicted
        decides between them: an 8-bit one that may be faster than a winner with 16-bit compute is
        measured too, so that it is known to fit.
        """
        winner = ranking.winner
        if winner is None or not ranking.is_for_speed_alone:
            return None
        wanted: tuple[str, ...] = ()
        if winner.config.is_8bit_compute:
            wanted = ("16-bit",)
        elif ranking.definition.target.emulated_on is not None:
            wanted = EIGHT_BIT
        for numerics in wanted:

            def is_wanted(config: TrialConfig, numerics: str = numerics) -> bool:
                return config.numerics == numerics and ranking.is_asked(config)

            tried = 0
            to_outrun = []
            for record in ranking.of_space:
                if not record.is_baseline and is_wanted(record.config):
                    tried += 1
                    if record.verdict is Verdict.FITS:
                        to_outrun.append(record.config)
            if tried >= CLASS_TRIALS_MAX:
                continue
            if not winner.config.is_8bit_compute:
                to_outrun.append(winner.config)
            owed = self.fastest_of(is_wanted, to_outrun)
            if owed is not None:
                return owed
        return None


def outlook_document(
    reason: StopReason, outlook: Outlook | None, classes: Sequence[ClassForecast] = ()
) -> dict[str, Any]:
    """Return what a study keeps of why its search ended, in plain JSON values, with what is
    predicted of capacity classes that were not measured.

    ``gain`` is expected over all cases: the chance that the most promising is better, times what is
    gained where it is, which is ``gain_if_better``.
    """
    document: dict[str, Any] = {"reason": str(reason), "open": None, "most_promising": None}
    document["unmeasured_classes"] = [
        {
            "config": one.config.model_dump(mode="json"),
            "tokens_per_second": one.tokens_per_second,
            "peak_allocated_bytes": one.peak_allocated_bytes,
        }
        for one in classes
    ]
    if outlook is None:
        return document
    if outlook.config is None:
        return document | {"open": 0}
    promising = {
        "config": outlook.config.model_dump(mode="json"),
        "chance": outlook.chance,
        "gain": None,
        "gain_if_better": None,
    }
    # Infinite where nothing fits yet, which JSON has no number for.
    if outlook.gain < float("inf"):
        promising["gain"] = outlook.gain
        if outlook.chance > 0:
            promising["gain_if_better"] = outlook.gain / outlook.chance
    return document | {
        "open": outlook.open,
        "looked_at": outlook.looked_at,
        "most_promising": promising,
    }


def price_of(space: SearchSpace, *, gpu: str) -> float | None:
    """Return what an hour of a GPU costs at least; None without a limit.

    Raises:
        InputError: a limit in dollars is set, and no price is known.
    """
    if space.max_dollars is None:
        return None
    offers = load_prices(own_price_file()).get(gpu)
    if not offers:
        raise InputError(
            f"space '{space.name}': max_dollars {space.max_dollars:g}: no price is known for "
            f"'{gpu}': put one into runs/prices.yaml, or set a time_budget instead"
        )
    return min(offer.usd_per_hour for offer in offers)


@dataclass(frozen=True)
class Rival:
    """A finished trial that fits: what a running one would have to beat."""

    config: TrialConfig
    tokens_per_second: float
    """The slow end of its 95 % interval: what it reached for sure. Where another GPU stands in for
    the target, what is predicted there."""
    peak_allocated_bytes: int


class Rivals:
    """The trials of a space that ran to the end within the budget, at a known speed: what a running
    one has to beat. Told each trial once.

    A configuration counts by the last trial of it that came to a conclusion, as in the ranking.

    Args:
        definition: the study's.
        records: trials of the search so far.
        confirmations: what measured some of them again, before this search.
    """

    def __init__(
        self,
        definition: StudyDefinition,
        records: Iterable[TrialRecord] = (),
        *,
        confirmations: Sequence[TrialRecord] = (),
    ) -> None:
        self._definition = definition
        self._confirmations = tuple(confirmations)
        self._space = rank((), definition)
        self._model = ModelSpec.from_json(definition.model)
        self._rivals: dict[str, Rival] = {}
        """By the identity of what they were of."""
        self._is_target = definition.target.emulated_on is None
        self._measured: tuple[TrialRecord, ...] = ()
        """Where another GPU stands in for the target: all that was measured tells of the rest."""
        self._running: dict[TrialConfig, OnTarget] = {}
        """What is predicted on the target of what runs since the last trial ended."""
        self.learn(records)

    def learn(self, records: Iterable[TrialRecord]) -> None:
        """Take in finished trials of the search, later than every one before.

        Their speed is that which the search measured: what runs is measured by the search as well.
        """
        by_number = {record.number: record for record in records}
        ranking = rank(by_number.values(), self._definition, self._confirmations)
        # Another mapping, as what runs in another thread reads the one that was.
        rivals = dict(self._rivals)
        for record in ranking.records:
            if record.verdict in CONCLUSIVE and self._space.holds(record.config):
                key = identity(record.config)
                rivals.pop(key, None)
                rival = _rival(record)
                if rival is not None:
                    rivals[key] = rival
        if not self._is_target:
            self._measured += tuple(filter(_is_measured, by_number.values()))
            self._running = {}
            rivals = self._on_target(rivals)
        self._rivals = rivals

    def _on_target(self, rivals: Mapping[str, Rival]) -> dict[str, Rival]:
        """Return rivals with what is predicted of them on the target; those of which nothing is
        stop nobody."""
        on_target = OnTarget(self._definition, self._measured)
        predicted: dict[str, Rival] = {}
        for key, rival in rivals.items():
            speed = on_target.speed_of(rival.config)
            if speed is not None:
                predicted[key] = replace(rival, tokens_per_second=speed.tokens_per_second)
        return predicted

    def as_decided(self, progress: Progress, config: TrialConfig) -> Progress:
        """Return a running trial's progress with the speed that rivals are compared by: its best
        case, on the target where another GPU stands in for it."""
        high = progress.tokens_per_second_high
        if self._is_target or high is None:
            return progress
        # Another thread may put a new one in its place.
        running = self._running
        if config not in running:
            running[config] = OnTarget(self._definition, self._measured, [config])
        speed = running[config].speed_at(config, high)
        best_case = None
        if speed is not None:
            best_case = speed.tokens_per_second
        return replaced(progress, tokens_per_second_high=best_case)

    def of(self, config: TrialConfig) -> tuple[Rival, ...]:
        """Return what a running trial has to beat.

        A baseline outside the space cannot win it, so it stops nothing either. A speed without an
        interval is not surely faster than any. The capacity class that would be recommended from
        and the baseline's are stopped by their like alone, though smaller adapters are faster. So
        is a class of numerics where another GPU stands in for the target: which is the faster
        there is not sure.
        """
        all_rivals = tuple(self._rivals.values())
        capacity = self._space.capacity_class(config)
        capacities = {self._space.capacity_class(rival.config) for rival in all_rivals} | {capacity}
        is_asked = nearest_capacity(capacities, self._model) == capacity
        is_apart = is_asked or self._space.is_of_baselines_class(config)
        chosen = []
        for rival in all_rivals:
            if not self._is_target and rival.config.numerics != config.numerics:
                continue
            if not is_apart or self._space.capacity_class(rival.config) == capacity:
                chosen.append(rival)
        return tuple(chosen)


def _is_measured(record: TrialRecord) -> bool:
    return record.measurement is not None


def _rival(record: TrialRecord) -> Rival | None:
    """Return what a trial is to others; None where it does not fit, or its speed is not known."""
    measured = record.measurement
    if record.verdict is not Verdict.FITS or measured is None or measured.speed_interval is None:
        return None
    slowest, _ = measured.speed_interval
    return Rival(record.config, slowest, measured.peak_allocated_bytes)


def is_hopeless(
    progress: Progress,
    *,
    config: TrialConfig,
    rivals: Iterable[Rival],
    objectives: Sequence[Objective] = ("tokens_per_second",),
) -> bool:
    """Return whether a rival beats the trial in every objective even in the trial's best case.

    Only where speed is among what is asked for: a slow trial may still need the least memory.

    The best case is the fast end of the median's 95 % interval. Before there are steps enough for
    one it is a generous guess, so that only a trial that is far behind is stopped by it; during the
    warm-up there is none, as those steps are not the rate. What a trial would learn is not known:
    how far behind it is decides, by `LOSS_MARGIN`. Both intervals hold whenever they are looked at.
    A trial within a tie of a rival continues, as ties are shown.

    Args:
        progress: the newest sign of life; `tokens_per_second_high` is the trial's best case.
        config: what is running.
        rivals: what has been measured so far.
        objectives: the study's; where there are several, a rival has to dominate (Pareto).
    """
    high = progress.tokens_per_second_high
    if progress.phase != "measure" or high is None or "tokens_per_second" not in objectives:
        return False
    margin = LOSS_MARGIN if "eval_loss" in objectives else TIE
    for rival in rivals:
        is_better = rival.tokens_per_second > high * (1.0 + margin)
        # What is allocated by now bounds the peak from below: it can only get worse.
        is_smaller = rival.peak_allocated_bytes <= (progress.allocated_bytes or 0)
        # A running trial does not report its count; equal adapters have equal counts.
        is_as_lean = rival.config.capacity() == config.capacity()
        if "peak_memory" in objectives and not is_smaller:
            is_better = False
        if "trainable_parameters" in objectives and not is_as_lean:
            is_better = False
        if is_better:
            return True
    return False


def is_disturbed(outcome: Outcome) -> bool:
    """Whether another process had a hand in how a trial ended."""
    match outcome:
        case Measured(measurement=measurement) | PrunedSlow(measurement=measurement):
            return NEIGHBOUR in measurement.flags
        case OutOfMemory(flags=flags):
            return NEIGHBOUR in flags
    return False


def outcome_to_keep(outcomes: Sequence[Outcome]) -> Outcome:
    """Return which of a configuration's outcomes to keep; only the last may be undisturbed.

    Without such a one the fastest measurement is kept, since a neighbour only takes speed away. A
    failure of the machine does not replace a measurement. Memory that a neighbour held all the time
    says nothing of the configuration: that is a failure of the machine too.
    """
    kept = outcomes[-1]
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measured | PrunedSlow)]
    if is_disturbed(kept) and not measured:
        assert isinstance(kept, OutOfMemory)
        return Crashed(
            phase="build" if kept.stage == "load" else "warmup",
            detail=f"another process held memory that this trial was to have: {kept.detail}",
        )
    if measured and (is_disturbed(kept) or kept.verdict in RETRYABLE):
        # One that was measured to its end before one that was stopped.
        kept = max(measured, key=lambda o: (o.verdict is Verdict.FITS, _speed(o)))
    if len(outcomes) == 1 or not isinstance(kept, Measured | PrunedSlow):
        return kept
    flags = kept.measurement.flags + (REMEASURED,)
    measurement = replaced(kept.measurement, flags=flags)
    return replaced(kept, measurement=measurement)


def _speed(outcome: Measured | PrunedSlow) -> float:
    return outcome.measurement.tokens_per_second


class ConsecutiveFailures:
    """The trials since the last one that the machine brought to an end of its own."""

    def __init__(self) -> None:
        self._failures: list[Crashed | TimedOut] = []

    def __bool__(self) -> bool:
        return bool(self._failures)

    def count(self, outcome: Outcome) -> None:
        """Count a trial that ran; one that somebody interrupted says nothing either way.

        Raises:
            EnvironmentFault: this was one failure of a kind too many; names the first cause.
        """
        if isinstance(outcome, Lost) and outcome.is_interrupted:
            return
        if not isinstance(outcome, Crashed | TimedOut):
            self._failures = []
            return
        self._failures = [one for one in self._failures if _kind(one) == _kind(outcome)]
        self._failures.append(outcome)
        if len(self._failures) >= FAILURES_IN_A_ROW:
            first = self._failures[0]
            how, suspect, cure = _words_of(first)
            raise EnvironmentFault(
                f"{FAILURES_IN_A_ROW} trials in a row {how}: {suspect}. {_first_said(how, first)} "
                f"What was measured is stored; {cure}, then run the same command again"
            )


def _kind(failure: Crashed | TimedOut) -> tuple[str, str]:
    """Return what failures have in common that are the machine's doing; what the host lacks it
    lacks in whichever phase."""
    match failure:
        case Crashed(cause="host_out_of_memory" | "too_few_descriptors"):
            return failure.verdict, str(failure.cause)
    return failure.verdict, failure.phase


def nothing_concluded(records: Iterable[TrialRecord]) -> EnvironmentFault | None:
    """Return the fault of a study in which every trial that ran failed; None where one did not.

    What was refused before it ran says nothing of those that did: that nothing fits is not known.
    """
    all_records = tuple(records)
    failures = [r.outcome for r in all_records if isinstance(r.outcome, Crashed | TimedOut)]
    if not failures or any(record.verdict in WORTH_KEEPING for record in all_records):
        return None
    count = f"all {len(failures)} trials"
    if len(failures) == 1:
        count = "the only trial that ran"
    how, suspect, cure = _words_of(failures[0])
    return EnvironmentFault(
        f"nothing is known of what fits: {count} failed, and {suspect}. "
        f"{_first_said(how, failures[0])} To go on, {cure}; the same command tries them again"
    )


def _words_of(failure: Crashed | TimedOut) -> tuple[str, str, str]:
    """Return how a trial failed, what is at fault, and what helps."""
    at_fault = "the machine is at fault rather than a configuration"
    if failure.phase == "build":
        at_fault = (
            "either the model cannot be built from its config here, or the machine is at fault"
        )
    match failure:
        case Crashed(cause="host_out_of_memory"):
            return (
                "ran out of this machine's own memory, not the GPU's",
                "no configuration is at fault, which are measured by the GPU's memory",
                "end what else uses this machine's memory, `free -h` shows how much is left, or "
                "raise the limit of its container",
            )
        case Crashed(cause="too_few_descriptors"):
            return "could open no further file", at_fault, MORE_DESCRIPTORS
    how = f"{failure.verdict.replace('_', ' ')} in phase '{failure.phase}'"
    return how, at_fault, "see `sweep doctor`"


def _first_said(how: str, first: Crashed | TimedOut) -> str:
    return f"The first {how} and said: {first.detail.rstrip('.') or 'nothing'}."
