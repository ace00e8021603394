"""What is known of a study, in numbers: the document of ``sweep best STUDY --json``.

The terminal and the page are words over it (`reports.answer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, InstanceOf

from qlora_sweep.reports import format as units
from qlora_sweep.reports import words
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.costs import usd_per_million_tokens, usd_per_training_second
from qlora_sweep.search_spaces.learning_rates import LearningRate, learning_rate_of
from qlora_sweep.search_spaces.linears import CapacityClass
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.search_spaces.quality import KnownQuality
from qlora_sweep.search_spaces.space import Objective, SearchSpace
from qlora_sweep.storage.confirmations import Ratio
from qlora_sweep.storage.definition import (
    MemoryForecast,
    StudyDefinition,
    StudySnapshot,
    TargetSpeed,
)
from qlora_sweep.storage.ranking import (
    ClassBest,
    NoGain,
    RankedGain,
    RankedTrial,
    Ranking,
    measured_of,
    objective_value,
    rank_study,
    verdict_counts,
)
from qlora_sweep.storage.records import (
    NOT_SHOWN,
    EpochRecord,
    Measurement,
    Need,
    TrialRecord,
    need_of,
)

_NOT_RECORDED = (
    "steps_measured",
    "steps_warmup",
    "final_loss",
    "setup_seconds",
    "measured_seconds",
    "allocator_retries",
)
"""Of a measurement, what a surface says nothing of."""
_SOAK_SHOWN = {
    "allocator_retries",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "tokens_per_second",
}
"""Of the measurement of a soak, what is in the document."""


class _ViewPart(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)


class Gpu(_ViewPart):
    """The GPU that the study is for."""

    name: str
    budget_bytes: int
    emulated_on: str | None = None
    """The GPU that measured in its place, capped to its memory; None where it did itself."""


class Speed(_ViewPart):
    """How fast a configuration trains on that GPU, in supervised tokens/s."""

    value: float = Field(validation_alias="tokens_per_second")
    low: float | None
    high: float | None
    basis: Literal["measured", "predicted"]


class TokenCost(_ViewPart):
    """What tokens cost as the winner trains, with the ends of the speed's interval."""

    usd_per_million_tokens: float
    usd_per_million_tokens_low: float | None
    usd_per_million_tokens_high: float | None
    provider: str
    usd_per_hour: float
    is_spot: bool
    date: str


class EpochEstimate(EpochRecord):
    """One pass over the rows of the dataset that are not held out; start-up, evaluation and
    checkpoints come on top."""

    seconds: float | None = None
    """None where the speed on the target GPU is not known."""
    seconds_low: float | None = None
    seconds_high: float | None = None
    dollars: float | None = None
    """At the study's offer; None without a price or a speed."""
    dollars_low: float | None = None
    dollars_high: float | None = None


class Sureness(_ViewPart):
    """How surely a speed is known, on whatever GPU ran."""

    tokens_per_second_ci95: tuple[float, float] | None
    noisy: bool


class WinnerTrial(Sureness):
    """The winner."""

    number: int
    config: TrialConfig
    learning_rate: LearningRate
    """That it trains with, with its range and what it rests on."""
    quality: KnownQuality
    """What base and compute dtype are known to cost in loss."""
    measurement: Mapping[str, Any]
    """Null where a surface says nothing of it."""
    target_tokens_per_second: Speed | None


class Times(_ViewPart):
    """How many times as fast, with the ends of the 95 % interval; null where nothing bounds it."""

    ratio: float = Field(validation_alias="value")
    low: float | None
    high: float | None


class Reference(Sureness):
    """What a gain is over."""

    baseline: bool
    """Whether it is the baseline itself, not its recipe in the winner's class."""
    config: TrialConfig
    tokens_per_second: float
    """Measured."""
    target_tokens_per_second: Speed | None


class Gain(Times):
    """How many times as fast the winner is on the GPU that the study is for, within its capacity
    class."""

    over: Reference
    basis: Literal["measured", "predicted"]
    measured: Times | None
    """The same on the GPU that stood in, where the gain is predicted."""


class OfClass(Sureness):
    """A trial of the baseline's capacity class."""

    number: int
    capacity: Mapping[str, Any] = Field(serialization_alias="class")
    tokens_per_second: float


class ClassGain(OfClass):
    """The fastest of the baseline's class, where the winner is of another."""

    gain: Times | None


class Baseline(OfClass):
    """The measured baseline."""

    config: TrialConfig
    in_space: bool
    class_gain: ClassGain | None


class OnFront(_ViewPart):
    """A trial of the Pareto front."""

    number: int
    values: Mapping[Objective, float]
    config: TrialConfig


class Confirmed(_ViewPart):
    """What measuring the winner again came to."""

    runs: int
    seconds: float
    fallen: tuple[int, ...]
    """Trials that fitted in the search and did not hold."""
    searched_tokens_per_second: float
    soak: Mapping[str, Any] | None


class StudyView(_ViewPart):
    """What is known of a study."""

    snapshot: InstanceOf[StudySnapshot] = Field(exclude=True, repr=False)
    ranking: InstanceOf[Ranking] = Field(exclude=True, repr=False)

    study: str
    gpu: Gpu
    model: str | None
    objective: str
    """What is ranked by; of several objectives all of them."""
    objectives: tuple[Objective, ...]
    seconds: Mapping[Literal["wall", "device"], float]
    trials: Mapping[str, int]
    """How many there are in ``total``, and of each verdict."""
    ended: Mapping[str, Any] | None
    """Why the search ended last; None where it has not."""
    best: WinnerTrial | None
    """The winner, of several objectives the knee of their front; None where nothing fits."""
    cost: TokenCost | None
    texts: Mapping[str, Any] | None
    """The dataset."""
    epoch: EpochEstimate | None
    target_tokens_per_second: Speed | None
    gain: Gain | None
    no_gain: NoGain | None
    """Why none is stated."""
    front: tuple[OnFront, ...]
    knee: int | None
    baseline: Baseline | None
    tied: tuple[int, ...]
    """Measured side by side with the winner and statistically indistinguishable from it."""
    confirmed: bool
    confirmation: Confirmed | None
    numerics_choice: Literal["measured", "predicted"] | None
    """``predicted`` where another GPU stood in: what is predicted of the target chose the winner
    and its class of numerics."""
    fastest_by_class: tuple[ClassBest, ...]

    def document(self) -> dict[str, Any]:
        """Return what ``sweep best STUDY --json`` prints."""
        excluded: set[str] = set()
        if not self.texts:
            excluded = {"texts", "epoch"}
        return self.model_dump(mode="json", by_alias=True, exclude=excluded)

    # What words and figures read of a study besides.

    @property
    def winner(self) -> RankedTrial | None:
        """The winner as it is ranked."""
        return self.ranking.winner

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """The trials as the search measured them, by number."""
        return self.snapshot.records

    @property
    def of_space(self) -> tuple[TrialRecord, ...]:
        """The trials whose configuration the space holds, by number."""
        return self.ranking.of_space

    @property
    def ranked(self) -> tuple[RankedTrial, ...]:
        """The trials of the space that fit, the recommended one first."""
        return self.ranking.ranked

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to be measured again."""
        return self.ranking.is_settled

    @property
    def is_predicted(self) -> bool:
        """Whether what is predicted of the target decides, as another GPU stood in for it."""
        return self.ranking.is_predicted

    @property
    def definition(self) -> StudyDefinition:
        """What was asked: the space, the model, the target GPU, the dataset."""
        return self.snapshot.definition

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the study must know."""
        return self.snapshot.warnings

    @property
    def offer(self) -> Offer | None:
        """The price of its GPU; None where none is known."""
        return self.snapshot.offer

    @property
    def space(self) -> SearchSpace:
        """What was searched."""
        return self.definition.space

    @property
    def baseline_config(self) -> TrialConfig:
        """The baseline's configuration, measured or not."""
        return self.ranking.baseline_config

    def changes(self, config: TrialConfig) -> str:
        """Return in words where a configuration differs from the baseline."""
        return units.changes(config, baseline=self.baseline_config)

    def target_speed(self, trial: RankedTrial) -> TargetSpeed | None:
        """Return how fast a trial is on the GPU that the study is for; None where unknown."""
        return self.ranking.target_speed(trial)

    def usd_per_million_tokens(self, trial: RankedTrial) -> float | None:
        """Return what a million tokens cost at a trial's speed on that GPU; None without a price or
        a speed."""
        dollars = _dollars(self.ranking, self.offer, trial)
        if dollars is None:
            return None
        return dollars.value

    def usd_interval(self, trial: RankedTrial) -> tuple[float, float] | None:
        """Return the least and the most that they cost, by that speed's interval."""
        dollars = _dollars(self.ranking, self.offer, trial)
        if dollars is None or dollars.low is None or dollars.high is None:
            return None
        return dollars.low, dollars.high

    @property
    def measured_trials(self) -> Mapping[int, RankedTrial]:
        """Every measured trial of the search as it is ranked, by number."""
        return self.ranking.trials

    @property
    def measured_baseline(self) -> RankedTrial | None:
        """The baseline as it is ranked; None where it was not measured."""
        return self.ranking.baseline

    @property
    def is_driven(self) -> bool:
        """Whether a process drives the study now."""
        return self.snapshot.holder is not None

    @property
    def finished(self) -> tuple[TrialRecord, ...]:
        """The trials of the search without attempts that were repeated, by number."""
        return self.snapshot.trials

    @property
    def environment(self) -> Mapping[str, Any]:
        """What the newest run ran on."""
        return self.snapshot.environment

    @property
    def is_surface(self) -> bool:
        """Whether it shows a file of recorded trials, and no study."""
        return self.definition.target.recorded is not None and not self.snapshot.identity

    @property
    def confirmation_runs(self) -> tuple[TrialRecord, ...]:
        """What measured winners again, by number."""
        return self.snapshot.confirmations

    @property
    def fallen(self) -> Mapping[int, TrialRecord]:
        """Trials that fitted in the search and did not hold, by number, each with the run that says
        so."""
        return self.ranking.fallen

    @property
    def is_for_speed_alone(self) -> bool:
        """Whether nothing but speed is asked for."""
        return self.ranking.is_for_speed_alone

    @property
    def other_numerics(self) -> RankedTrial | None:
        """The fastest of the other class of numerics than the winner's; None for none to name."""
        return self.ranking.other_numerics

    @property
    def fastest_of_baselines_class(self) -> RankedTrial | None:
        """The fastest trial of the space in the baseline's capacity class."""
        return self.ranking.fastest_of_baselines_class

    def gain_of(self, trial: RankedTrial) -> RankedGain:
        """Return what a trial gained within its capacity class, or why that is not stated."""
        return self.ranking.gain_of(trial)

    def ratio(self, trial: RankedTrial, over: RankedTrial) -> Ratio:
        """Return how much faster a trial is than another."""
        return self.ranking.ratio(trial, over)

    def reference_for(self, config: TrialConfig) -> RankedTrial | None:
        """Return what a configuration's gain is stated over; None where it was not measured."""
        return self.ranking.reference_for(config)

    def reference_name(self, config: TrialConfig) -> str:
        """Return what that is called: ``the baseline``, ``the baseline at rank 8 on q,v``."""
        return words.reference_of(self.ranking, config)

    def is_measured_again(self, trial: RankedTrial) -> bool:
        """Whether a trial's speed is that of several runs which confirm it."""
        return self.ranking.is_measured_again(trial)

    def runs_of(self, config: TrialConfig) -> Sequence[Measurement]:
        """Return the runs that measured a configuration again, in order."""
        return self.ranking.runs_of(config)

    def capacity_class(self, config: TrialConfig) -> CapacityClass:
        """Return the class in which the speed of a configuration compares."""
        return self.ranking.capacity_class(config)

    def expected_speed(self, record: TrialRecord) -> float | None:
        """Return the tokens/s that are predicted of a trial that was not measured."""
        return self.ranking.expected_speed(record)

    def memory_forecast(self, config: TrialConfig) -> MemoryForecast | None:
        """Return what a configuration is predicted to need; None where that is not at hand."""
        return self.snapshot.memory_forecasts.get(config)

    def need_of(self, record: TrialRecord) -> Need | None:
        """Return the memory that a trial needs which did not fit; None where nothing is known."""
        return need_of(record, budget_bytes=self.gpu.budget_bytes)

    def epoch_of(self, trial: RankedTrial) -> EpochEstimate | None:
        """Return what an epoch of the study's dataset takes as a trial trains; None without one."""
        return _epoch(self.snapshot, self.ranking, trial)


def view_of(snapshot: StudySnapshot) -> StudyView:
    """Return what is known of a study as it stands."""
    ranking = rank_study(snapshot)
    target = snapshot.definition.target
    dataset = snapshot.definition.texts
    winner = ranking.winner
    speed = None
    best = None
    cost = None
    epoch = None
    knee = None
    numerics_choice = None
    if winner is not None:
        speed = ranking.target_speed(winner)
        best = _winner(snapshot, winner, speed)
        cost = _cost(ranking, snapshot.offer, winner)
        epoch = _epoch(snapshot, ranking, winner)
        numerics_choice = ranking.numerics_choice
        if len(ranking.objectives) > 1:
            knee = winner.number
    return StudyView(
        snapshot=snapshot,
        ranking=ranking,
        study=snapshot.name,
        gpu=Gpu(name=target.gpu, budget_bytes=target.budget_bytes, emulated_on=target.emulated_on),
        model=snapshot.definition.model.get("name"),
        objective=", ".join(ranking.objectives),
        objectives=ranking.objectives,
        seconds={
            "wall": snapshot.wall_seconds,
            "device": _device_seconds(snapshot.records + snapshot.confirmations),
        },
        trials={"total": len(snapshot.records)} | verdict_counts(snapshot.records),
        ended=snapshot.ended,
        best=best,
        cost=cost,
        texts=dataset and dataset.model_dump(mode="json"),
        epoch=epoch,
        target_tokens_per_second=speed,
        gain=_gain(ranking),
        no_gain=ranking.gain.reason,
        front=tuple(_on_front(record, ranking.objectives) for record in ranking.front),
        knee=knee,
        baseline=_baseline(ranking),
        tied=ranking.tied,
        confirmed=ranking.is_confirmed,
        confirmation=_confirmation(ranking),
        numerics_choice=numerics_choice,
        fastest_by_class=ranking.fastest_by_class,
    )


def _device_seconds(records: Iterable[TrialRecord]) -> float:
    return sum(record.device_seconds for record in records)


def _epoch(snapshot: StudySnapshot, ranking: Ranking, trial: RankedTrial) -> EpochEstimate | None:
    if trial.epoch is None:
        return None
    figures: dict[str, float] = {}
    speed = ranking.target_speed(trial)
    if speed is not None:
        # The high end of the speed is the low end of the time.
        rates = {"": speed.tokens_per_second, "_low": speed.high, "_high": speed.low}
        for end, rate in rates.items():
            if not rate:
                continue
            seconds = trial.epoch.loss_tokens / rate
            figures[f"seconds{end}"] = seconds
            if snapshot.offer is not None:
                price = usd_per_training_second(snapshot.offer, trial.config.data_parallel)
                figures[f"dollars{end}"] = seconds * price
    return EpochEstimate(**trial.epoch.model_dump(), **figures)


def _gain(ranking: Ranking) -> Gain | None:
    gain = ranking.gain
    over = gain.over
    if gain.ratio is None or over is None:
        return None
    basis: Literal["measured", "predicted"] = "measured"
    if gain.ratio.is_predicted:
        basis = "predicted"
    return Gain(
        over=Reference(
            baseline=ranking.baseline is not None and over.number == ranking.baseline.number,
            config=over.config,
            tokens_per_second=over.measurement.tokens_per_second,
            target_tokens_per_second=ranking.target_speed(over),
            **_sureness(over.measurement),
        ),
        basis=basis,
        measured=gain.measured,
        **vars(gain.ratio),
    )


def _on_front(trial: RankedTrial, objectives: Iterable[Objective]) -> OnFront:
    values = {name: objective_value(name, trial.measurement) for name in objectives}
    return OnFront(number=trial.number, values=values, config=trial.config)


def _winner(snapshot: StudySnapshot, trial: RankedTrial, speed: TargetSpeed | None) -> WinnerTrial:
    measurement = trial.measurement.model_dump(mode="json", exclude=NOT_SHOWN)
    if snapshot.definition.target.recorded:
        measurement |= dict.fromkeys(_NOT_RECORDED)
    model = snapshot.definition.model.get("config", {})
    return WinnerTrial(
        number=trial.number,
        config=trial.config,
        learning_rate=learning_rate_of(trial.config, model),
        quality=KnownQuality.of(trial.config),
        measurement=measurement,
        target_tokens_per_second=speed,
        **_sureness(trial.measurement),
    )


def _sureness(measured: Measurement) -> dict[str, Any]:
    return {"tokens_per_second_ci95": measured.speed_interval, "noisy": measured.is_noisy}


class _Dollars(NamedTuple):
    """What a million tokens cost, with the ends of the speed's interval."""

    value: float
    low: float | None
    high: float | None


def _dollars(ranking: Ranking, offer: Offer | None, trial: RankedTrial) -> _Dollars | None:
    speed = ranking.target_speed(trial)
    if speed is None or offer is None:
        return None
    price = partial(usd_per_million_tokens, offer, trial.config.data_parallel)
    value = price(speed.tokens_per_second)
    if speed.low is None or speed.high is None:
        return _Dollars(value, None, None)
    # The high end of the speed is the low end of the price.
    return _Dollars(value, price(speed.high), price(speed.low))


def _cost(ranking: Ranking, offer: Offer | None, winner: RankedTrial) -> TokenCost | None:
    dollars = _dollars(ranking, offer, winner)
    if dollars is None or offer is None:
        return None
    return TokenCost(
        usd_per_million_tokens=dollars.value,
        usd_per_million_tokens_low=dollars.low,
        usd_per_million_tokens_high=dollars.high,
        **offer.model_dump(mode="json", include={"usd_per_hour", "provider", "is_spot", "date"}),
    )


def _of_class(trial: RankedTrial) -> dict[str, Any]:
    return {
        "number": trial.number,
        "capacity": trial.config.capacity(),
        "tokens_per_second": trial.measurement.tokens_per_second,
        **_sureness(trial.measurement),
    }


def _baseline(ranking: Ranking) -> Baseline | None:
    baseline = ranking.baseline
    if baseline is None:
        return None
    class_gain = None
    winner = ranking.winner
    if winner is not None and not ranking.is_of_baselines_class(winner.config):
        fastest = ranking.fastest_of_baselines_class
        if fastest is not None:
            class_gain = ClassGain(**_of_class(fastest), gain=ranking.gain_of(fastest).ratio)
    return Baseline(
        config=baseline.config,
        in_space=ranking.is_baseline_in_space,
        class_gain=class_gain,
        **_of_class(baseline),
    )


def _confirmation(ranking: Ranking) -> Confirmed | None:
    """Return what measuring the winner again came to; None where it was not done."""
    winner = ranking.winner
    if winner is None or not ranking.is_measured_again(winner):
        return None
    confirmations = ranking.confirmations
    runs = (run for run in confirmations.records if run.series == confirmations.series)
    return Confirmed(
        runs=len(ranking.runs_of(winner.config)),
        seconds=_device_seconds(runs),
        fallen=tuple(ranking.fallen),
        searched_tokens_per_second=ranking.searched_speed(winner),
        soak=ranking.soak and _soak(measured_of(ranking.soak)),
    )


def _soak(measured: Measurement) -> dict[str, Any]:
    soak = {"steps": measured.steps_measured, "seconds": measured.measured_seconds}
    soak |= measured.model_dump(mode="json", include=_SOAK_SHOWN)
    if measured.soak is not None:
        soak |= measured.soak.model_dump(mode="json")
    return soak
