"""Several GPUs beside each other, as studies measured them.

Speeds are compared on one ground: a model, a capacity class, a length. Nothing is claimed inside
the uncertainty of the speeds: not who is cheaper, and not where two GPUs change places.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from qlora_sweep.search_spaces import costs
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.estimates import Estimate
from qlora_sweep.search_spaces.kinds import Method
from qlora_sweep.search_spaces.linears import CapacityClass
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.ranking import rank_study

JOB_TOKENS = 10_000_000.0
"""What is priced until a reader says otherwise."""


class Ground(NamedTuple):
    """What two configurations must have in common for their speeds to compare."""

    model: str
    """The fingerprint of its architecture."""
    name: str
    capacity: CapacityClass
    seq_len: int
    method: Method


@dataclass(frozen=True)
class Option:
    """A configuration on one GPU."""

    ground: Ground
    config: TrialConfig
    speed: Estimate
    """Supervised tokens/s."""
    has_interval: bool
    basis: str
    peak_bytes: int
    number: int
    """Of the trial."""
    tokens_per_sample: float | None = None


@dataclass(frozen=True)
class ComparedGpu:
    """One GPU, as a study knows it."""

    label: str
    """What it is called in a comparison; no two are called alike."""
    gpu: str
    source: str
    budget_bytes: int
    offer: Offer | None
    model_bytes: float
    options: tuple[Option, ...]
    """In the order in which they are recommended."""


@dataclass(frozen=True)
class GpuEntry:
    """What a GPU is recommended to run on a ground, and what the work takes with it."""

    candidate: ComparedGpu
    option: Option
    seconds: Estimate
    """Of training alone."""
    bill: costs.Bill | None
    """None where no price is known."""


@dataclass(frozen=True)
class Group:
    """The GPUs that can be compared on one ground."""

    ground: Ground
    entries: tuple[GpuEntry, ...]
    """The cheapest first; those without a price last, the fastest of them first."""
    offered: costs.OfferComparison | None
    """None where fewer than two prices are known."""


@dataclass(frozen=True)
class GpuComparison:
    """Several GPUs beside each other."""

    candidates: tuple[ComparedGpu, ...]
    work: costs.AskedWork
    groups: tuple[Group, ...]
    """Of at least two GPUs, the one with the most GPUs first."""
    alone: tuple[GpuEntry, ...]
    """The fastest on each ground that a single GPU has."""


def of_study(snapshot: StudySnapshot) -> ComparedGpu:
    """Return the GPU that a study is for, with all that was measured to fit on it.

    Speeds are the target GPU's, predicted where another stood in, and which configuration stands
    for a GPU is the study's own answer.
    """
    target = snapshot.definition.target
    model = ModelSpec.from_json(snapshot.definition.model)
    options = []
    ranking = rank_study(snapshot)
    for trial in ranking.ranked:
        speed = ranking.target_speed(trial)
        if speed is None:
            continue
        config = trial.config
        measured = trial.measurement
        tokens_per_sample = None
        if measured.loss_tokens_per_step is not None:
            tokens_per_sample = measured.loss_tokens_per_step / config.samples_per_step
        ground = Ground(
            snapshot.definition.model_fingerprint,
            model.name,
            CapacityClass.of(config, model),
            config.seq_len,
            config.method,
        )
        options.append(
            Option(
                ground,
                config,
                *_speed(speed.tokens_per_second, speed.low, speed.high),
                speed.basis,
                measured.peak_allocated_bytes,
                trial.number,
                tokens_per_sample,
            )
        )
    source = f"study {snapshot.name}"
    if target.emulated_on:
        source += f", run on {target.emulated_on}"
    return ComparedGpu(
        label=snapshot.name,
        gpu=target.gpu,
        source=source,
        budget_bytes=target.budget_bytes,
        offer=snapshot.offer,
        model_bytes=costs.checkpoint_bytes(model),
        options=tuple(options),
    )


def _speed(value: float, low: float | None, high: float | None) -> tuple[Estimate, bool]:
    """Return a speed with its ends, and whether they are known: else they are far."""
    has_interval = bool(low and high)
    low = low or costs.SHORTEST_SHARE * value
    high = high or value / costs.SHORTEST_SHARE
    return Estimate(value, low, high), has_interval


def compare(candidates: Sequence[ComparedGpu], *, work: costs.AskedWork) -> GpuComparison:
    """Return what can be told of several GPUs.

    Raises:
        InputError: there are fewer than two.
    """
    if len(candidates) < 2:
        raise InputError("comparing takes at least two studies")
    named = _told_apart(candidates)
    # What each GPU is recommended to run on a ground.
    entries: dict[Ground, list[GpuEntry]] = defaultdict(list)
    for candidate in named:
        for ground, option in _first_by_ground(candidate.options).items():
            entries[ground].append(entry_of(candidate, option, priced(work)))
    groups = []
    alone = []
    for ground, of_ground in entries.items():
        if len(of_ground) == 1:
            alone.append(of_ground[0])
            continue
        of_ground.sort(key=_cheapest_first)
        bills = [entry.bill for entry in of_ground if entry.bill is not None]
        offered = None
        if len(bills) > 1:
            offered = costs.compare_offers(bills)
        groups.append(Group(ground, tuple(of_ground), offered))
    groups.sort(key=lambda group: -len(group.entries))
    return GpuComparison(named, work, tuple(groups), tuple(alone))


def _told_apart(candidates: Sequence[ComparedGpu]) -> tuple[ComparedGpu, ...]:
    """Return candidates of which no two are called alike: those of one label are numbered."""
    totals = Counter(candidate.label for candidate in candidates)
    counts: Counter[str] = Counter()
    named = []
    for candidate in candidates:
        label = candidate.label
        counts[label] += 1
        if totals[label] > 1:
            candidate = replace(candidate, label=f"{label} {counts[label]}")
        named.append(candidate)
    return tuple(named)


def _first_by_ground(options: Iterable[Option]) -> dict[Ground, Option]:
    first: dict[Ground, Option] = {}
    for option in options:
        first.setdefault(option.ground, option)
    return first


def priced(work: costs.AskedWork) -> costs.AskedWork:
    """Return the work that is priced: what is asked, else `JOB_TOKENS`."""
    if work.is_asked:
        return work
    return costs.AskedWork(tokens=JOB_TOKENS)


def _cheapest_first(entry: GpuEntry) -> tuple[bool, float]:
    """Return what sorts entries: by the bill, those without one last, by their time."""
    if entry.bill is None:
        return True, entry.seconds.value
    return False, entry.bill.usd


def entry_of(candidate: ComparedGpu, option: Option, work: costs.AskedWork) -> GpuEntry:
    """Return what work takes with a configuration on a GPU."""
    amount = work.workload(
        option.config,
        tokens_per_sample=option.tokens_per_sample,
        download_bytes=candidate.model_bytes,
    )
    # The high end of the speed is the low end of the time.
    seconds = Estimate(
        amount.tokens / option.speed.value,
        amount.tokens / option.speed.high,
        amount.tokens / option.speed.low,
    )
    bill = None
    if candidate.offer is not None:
        bill = costs.Bill(
            amount,
            candidate.offer,
            seconds.value / amount.steps,
            (seconds.low / amount.steps, seconds.high / amount.steps),
            gpus=option.config.data_parallel,
        )
    return GpuEntry(candidate, option, seconds, bill)
