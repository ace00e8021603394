"""What is known of a study, in numbers: the document of ``sweep best STUDY --json``.

The terminal and the page are words over it (`reports.answer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, InstanceOf

from qlora_sweep.reports import format as units
from qlora_sweep.reports import words
from qlora_sweep.reports.view_parts import (
    Baseline,
    Confirmed,
    EpochEstimate,
    Gain,
    Gpu,
    OnFront,
    Speed,
    TokenCost,
    ViewPart,
    WinnerTrial,
    baseline_of,
    confirmation_of,
    device_seconds,
    epoch_estimate,
    on_front,
    token_cost,
    token_dollars,
    winner_gain,
    winner_trial,
)
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.linears import CapacityClass
from qlora_sweep.search_spaces.prices import Offer
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
    rank_study,
    verdict_counts,
)
from qlora_sweep.storage.records import Measurement, Need, TrialRecord, need_of


class StudyView(ViewPart):
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
        dollars = token_dollars(self.ranking, self.offer, trial)
        if dollars is None:
            return None
        return dollars.value

    def usd_interval(self, trial: RankedTrial) -> tuple[float, float] | None:
        """Return the least and the most that they cost, by that speed's interval."""
        dollars = token_dollars(self.ranking, self.offer, trial)
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
        return epoch_estimate(self.snapshot, self.ranking, trial)


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
        best = winner_trial(snapshot, winner, speed)
        cost = token_cost(ranking, snapshot.offer, winner)
        epoch = epoch_estimate(snapshot, ranking, winner)
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
            "device": device_seconds(snapshot.records + snapshot.confirmations),
        },
        trials={"total": len(snapshot.records)} | verdict_counts(snapshot.records),
        ended=snapshot.ended,
        best=best,
        cost=cost,
        texts=dataset and dataset.model_dump(mode="json"),
        epoch=epoch,
        target_tokens_per_second=speed,
        gain=winner_gain(ranking),
        no_gain=ranking.gain.reason,
        front=tuple(on_front(record, ranking.objectives) for record in ranking.front),
        knee=knee,
        baseline=baseline_of(ranking),
        tied=ranking.tied,
        confirmed=ranking.is_confirmed,
        confirmation=confirmation_of(ranking),
        numerics_choice=numerics_choice,
        fastest_by_class=ranking.fastest_by_class,
    )
