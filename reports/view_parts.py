"""The parts of what is known of a study, each with how it follows from the ranking: winner, gain,
cost, epoch, baseline, Pareto front, confirmation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.costs import usd_per_million_tokens, usd_per_training_second
from qlora_sweep.search_spaces.learning_rates import LearningRate, learning_rate_of
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.search_spaces.quality import KnownQuality
from qlora_sweep.search_spaces.space import Objective
from qlora_sweep.storage.definition import StudySnapshot, TargetSpeed
from qlora_sweep.storage.ranking import RankedTrial, Ranking, measured_of, objective_value
from qlora_sweep.storage.records import NOT_SHOWN, EpochRecord, Measurement, TrialRecord

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


class ViewPart(BaseModel):
    """A part of the document: read from what has attributes of its names."""

    model_config = ConfigDict(frozen=True, from_attributes=True)


class Gpu(ViewPart):
    """The GPU that the study is for."""

    name: str
    budget_bytes: int
    emulated_on: str | None = None
    """The GPU that measured in its place, capped to its memory; None where it did itself."""


class Speed(ViewPart):
    """How fast a configuration trains on that GPU, in supervised tokens/s."""

    value: float = Field(validation_alias="tokens_per_second")
    low: float | None
    high: float | None
    basis: Literal["measured", "predicted"]


class TokenCost(ViewPart):
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


class Sureness(ViewPart):
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


class Times(ViewPart):
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


class OnFront(ViewPart):
    """A trial of the Pareto front."""

    number: int
    values: Mapping[Objective, float]
    config: TrialConfig


class Confirmed(ViewPart):
    """What measuring the winner again came to."""

    runs: int
    seconds: float
    fallen: tuple[int, ...]
    """Trials that fitted in the search and did not hold."""
    searched_tokens_per_second: float
    soak: Mapping[str, Any] | None


def device_seconds(records: Iterable[TrialRecord]) -> float:
    """Return how long trials took devices."""
    return sum(record.device_seconds for record in records)


def epoch_estimate(
    snapshot: StudySnapshot, ranking: Ranking, trial: RankedTrial
) -> EpochEstimate | None:
    """Return what an epoch takes as a trial trains; None without a dataset."""
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


def winner_gain(ranking: Ranking) -> Gain | None:
    """Return what the winner gained; None where none is stated."""
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


def on_front(trial: RankedTrial, objectives: Iterable[Objective]) -> OnFront:
    """Return a trial of the Pareto front with what it is there for."""
    values = {name: objective_value(name, trial.measurement) for name in objectives}
    return OnFront(number=trial.number, values=values, config=trial.config)


def winner_trial(
    snapshot: StudySnapshot, trial: RankedTrial, speed: TargetSpeed | None
) -> WinnerTrial:
    """Return the winner, with its speed on the target."""
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


class Dollars(NamedTuple):
    """What a million tokens cost, with the ends of the speed's interval."""

    value: float
    low: float | None
    high: float | None


def token_dollars(ranking: Ranking, offer: Offer | None, trial: RankedTrial) -> Dollars | None:
    """Return what a million tokens cost as a trial trains; None without a price or a speed."""
    speed = ranking.target_speed(trial)
    if speed is None or offer is None:
        return None
    price = partial(usd_per_million_tokens, offer, trial.config.data_parallel)
    value = price(speed.tokens_per_second)
    if speed.low is None or speed.high is None:
        return Dollars(value, None, None)
    # The high end of the speed is the low end of the price.
    return Dollars(value, price(speed.high), price(speed.low))


def token_cost(ranking: Ranking, offer: Offer | None, winner: RankedTrial) -> TokenCost | None:
    """Return that of the winner, with the offer."""
    dollars = token_dollars(ranking, offer, winner)
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


def baseline_of(ranking: Ranking) -> Baseline | None:
    """Return the measured baseline; None where it was not measured."""
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


def confirmation_of(ranking: Ranking) -> Confirmed | None:
    """Return what measuring the winner again came to; None where it was not done."""
    winner = ranking.winner
    if winner is None or not ranking.is_measured_again(winner):
        return None
    confirmations = ranking.confirmations
    runs = (run for run in confirmations.records if run.series == confirmations.series)
    return Confirmed(
        runs=len(ranking.runs_of(winner.config)),
        seconds=device_seconds(runs),
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
