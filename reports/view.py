"""What is known of a study, in numbers: the document of ``sweep best STUDY --json``.

The terminal and the page are words over it (`reports.sentences`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, InstanceOf

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.costs import usd_per_training_second
from qlora_sweep.search_spaces.learning_rates import LearningRate, learning_rate_of
from qlora_sweep.search_spaces.quality import KnownQuality
from qlora_sweep.search_spaces.space import Objective
from qlora_sweep.storage.definition import StudySnapshot, TargetSpeed
from qlora_sweep.storage.ranking import (
    ClassBest,
    NoGain,
    Ranking,
    measured_of,
    objective_value,
    rank_study,
    verdict_counts,
)
from qlora_sweep.storage.records import NOT_SHOWN, EpochRecord, TrialRecord

_NOT_RECORDED = (
    *("steps_measured", "steps_warmup", "final_loss", "setup_seconds"),
    *("measured_seconds", "allocator_retries"),
)
"""Of a measurement, what a surface says nothing of."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)


class Gpu(_Part):
    """The GPU that the study is for."""

    name: str
    budget_bytes: int
    emulated_on: str | None = None
    """The GPU that measured in its place, capped to its memory; None where it did itself."""


class Speed(_Part):
    """How fast a configuration trains on that GPU, in supervised tokens/s."""

    value: float = Field(validation_alias="tokens_per_second")
    low: float | None
    high: float | None
    basis: Literal["measured", "predicted"]


class Cost(_Part):
    """What tokens cost as the winner trains, with the ends of the speed's interval."""

    usd_per_million_tokens: float
    usd_per_million_tokens_low: float | None
    usd_per_million_tokens_high: float | None
    provider: str
    usd_per_hour: float
    is_spot: bool
    date: str


class Epoch(EpochRecord):
    """One pass over the rows of the dataset that are not held out; start-up, evaluation and
    checkpoints come on top."""

    seconds: float | None
    """None where the speed on the target GPU is not known."""
    seconds_low: float | None
    seconds_high: float | None
    dollars: float | None
    """At the study's offer; None without a price or a speed."""
    dollars_low: float | None
    dollars_high: float | None


class Sureness(_Part):
    """How surely a speed is known, on whatever GPU ran."""

    tokens_per_second_ci95: tuple[float, float] | None
    noisy: bool


class Trial(Sureness):
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


class Times(_Part):
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


class OnFront(_Part):
    """A trial of the Pareto front."""

    number: int
    values: Mapping[Objective, float]
    config: TrialConfig


class Confirmed(_Part):
    """What measuring the winner again came to."""

    runs: int
    seconds: float
    fallen: tuple[int, ...]
    """Trials that fitted in the search and did not hold."""
    searched_tokens_per_second: float
    soak: Mapping[str, Any] | None


class StudyView(_Part):
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
    best: Trial | None
    """The winner, of several objectives the knee of their front; None where nothing fits."""
    cost: Cost | None
    texts: Mapping[str, Any] | None
    epoch: Epoch | None
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
        of_texts = set() if self.texts else {"texts", "epoch"}
        return self.model_dump(mode="json", by_alias=True, exclude=of_texts)

    @property
    def winner(self) -> TrialRecord | None:
        """The winner as it is ranked."""
        return self.ranking.winner


def view_of(snapshot: StudySnapshot) -> StudyView:
    """Return what is known of a study as it stands."""
    ranking, target = rank_study(snapshot), snapshot.definition.target
    records, texts, winner = snapshot.records, snapshot.definition.texts, ranking.winner
    speed = None if winner is None else snapshot.target_speed(winner)
    gain, over = ranking.gain, ranking.gain.over
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
            "device": sum(r.device_seconds for r in (*records, *snapshot.confirmations)),
        },
        trials={"total": len(records), **verdict_counts(records)},
        ended=snapshot.ended,
        best=None if winner is None else _winner(snapshot, winner, speed),
        cost=None if winner is None else _cost(snapshot, winner),
        texts=None if texts is None else texts.model_dump(mode="json"),
        epoch=None if winner is None else epoch_of(snapshot, winner),
        target_tokens_per_second=speed,
        gain=None
        if gain.ratio is None or over is None
        else Gain(
            over=Reference(
                baseline=ranking.baseline is not None and over.number == ranking.baseline.number,
                config=over.config,
                tokens_per_second=measured_of(over).tokens_per_second,
                target_tokens_per_second=snapshot.target_speed(over),
                **_sureness(over),
            ),
            basis="predicted" if gain.ratio.is_predicted else "measured",
            measured=gain.measured,
            **vars(gain.ratio),
        ),
        no_gain=gain.reason,
        front=tuple(
            OnFront(
                number=record.number,
                values={o: objective_value(o, measured_of(record)) for o in ranking.objectives},
                config=record.config,
            )
            for record in ranking.front
        ),
        knee=winner.number if winner is not None and len(ranking.objectives) > 1 else None,
        baseline=_baseline(ranking),
        tied=ranking.tied,
        confirmed=ranking.is_confirmed,
        confirmation=_confirmation(ranking),
        numerics_choice=None if winner is None else ranking.numerics_choice,
        fastest_by_class=ranking.fastest_by_class,
    )


def epoch_of(snapshot: StudySnapshot, record: TrialRecord) -> Epoch | None:
    """Return what an epoch of the study's dataset takes as a trial trains; None without one."""
    epoch, speed = record.epoch, snapshot.target_speed(record)
    if epoch is None:
        return None
    rates = (None,) * 3 if speed is None else (speed.tokens_per_second, speed.high, speed.low)
    gpus, offer = record.config.data_parallel, snapshot.offer
    price = None if offer is None else usd_per_training_second(offer, gpus)
    seconds = [epoch.loss_tokens / rate if rate else None for rate in rates]
    dollars = [None if s is None or price is None else s * price for s in seconds]
    ends = ("", "_low", "_high")
    return Epoch(
        **epoch.model_dump(),
        **{f"seconds{end}": value for end, value in zip(ends, seconds, strict=True)},
        **{f"dollars{end}": value for end, value in zip(ends, dollars, strict=True)},
    )


def _winner(snapshot: StudySnapshot, record: TrialRecord, speed: TargetSpeed | None) -> Trial:
    measurement = measured_of(record).model_dump(mode="json", exclude=NOT_SHOWN)
    is_recorded = bool(snapshot.definition.target.recorded)
    model = snapshot.definition.model.get("config", {})
    return Trial(
        number=record.number,
        config=record.config,
        learning_rate=learning_rate_of(record.config, model),
        quality=KnownQuality.of(record.config),
        measurement=measurement | (dict.fromkeys(_NOT_RECORDED) if is_recorded else {}),
        target_tokens_per_second=speed,
        **_sureness(record),
    )


def _sureness(record: TrialRecord) -> dict[str, Any]:
    measured = measured_of(record)
    return {"tokens_per_second_ci95": measured.speed_interval, "noisy": measured.is_noisy}


def _cost(snapshot: StudySnapshot, winner: TrialRecord) -> Cost | None:
    dollars, offer = snapshot.usd_per_million_tokens(winner), snapshot.offer
    if dollars is None or offer is None:
        return None
    low, high = snapshot.usd_interval(winner) or (None, None)
    return Cost(
        usd_per_million_tokens=dollars,
        usd_per_million_tokens_low=low,
        usd_per_million_tokens_high=high,
        **offer.model_dump(mode="json", include={"usd_per_hour", "provider", "is_spot", "date"}),
    )


def _of_class(record: TrialRecord) -> dict[str, Any]:
    speed = measured_of(record).tokens_per_second
    known = {"number": record.number, "capacity": record.config.capacity()}
    return {**known, "tokens_per_second": speed, **_sureness(record)}


def _baseline(ranking: Ranking) -> Baseline | None:
    base, winner, fastest = ranking.baseline, ranking.winner, ranking.fastest_of_baselines_class
    if base is None:
        return None
    is_of_class = winner is None or ranking.is_of_baselines_class(winner.config)
    of_class = None
    if fastest is not None and not is_of_class:
        of_class = ClassGain(**_of_class(fastest), gain=ranking.gain_of(fastest).ratio)
    is_in_space = ranking.is_baseline_in_space
    return Baseline(
        config=base.config, in_space=is_in_space, class_gain=of_class, **_of_class(base)
    )


def _confirmation(ranking: Ranking) -> Confirmed | None:
    """Return what measuring the winner again came to; None where it was not done."""
    winner, known = ranking.winner, ranking.confirmations
    if winner is None or not ranking.is_measured_again(winner):
        return None
    soak = None if ranking.soak is None else measured_of(ranking.soak)
    kept = {"allocator_retries", "peak_allocated_bytes", "peak_reserved_bytes", "tokens_per_second"}
    return Confirmed(
        runs=ranking.runs,
        seconds=sum(r.device_seconds for r in known.records if r.series == known.series),
        fallen=tuple(ranking.fallen),
        searched_tokens_per_second=ranking.searched[winner.number].tokens_per_second,
        soak=None
        if soak is None
        else {
            "steps": soak.steps_measured,
            "seconds": soak.measured_seconds,
            **soak.model_dump(mode="json", include=kept),
            **({} if soak.soak is None else soak.soak.model_dump(mode="json")),
        },
    )
