"""Which learning rate is best on a real model, how flat the optimum is, and how near the rule is.

    python -m tests.bench.learning_rates

It reads the trainings in `results/learning_rates.jsonl`, writes `search_spaces/learning_rates.yaml`
by them and by what is published, and the tables of docs/learning_rates.md. A test holds both to
what this makes of the trainings.

A best rate is the lowest point of the parabola through the lowest held-out loss and its two
neighbours, in the logarithm of the rate. Where the lowest loss is that of the lowest or highest
rate, it is not bracketed, and only a bound is known.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import yaml

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.learning_rates import Rule, in_words, learning_rate_of
from tests.bench.harness import ROOT, Row, with_part

RESULTS = ROOT / "tests" / "bench" / "results" / "learning_rates.jsonl"
PAGE = ROOT / "docs" / "learning_rates.md"
BEGIN = "<!-- Made by `python -m tests.bench.learning_rates` from tests/bench/results. -->"
END = "<!-- End of what is made. -->"
TOLERATED_NATS = 0.01
"""Held-out loss a token over the lowest one that a range of rates allows."""
DRAWS = 4_000
"""Of the noise of losses, from which the intervals of best rates are."""
WIDTH = 576
"""Hidden size of SmolLM2-135M."""
RULE = ROOT / "search_spaces" / "learning_rates.yaml"

# Published: read off Tinker's tables (docs/learning_rates.md) as off the trainings here.

PUBLISHED_RATE, PUBLISHED_WIDTH = 4.3e-4, 4096
"""The best rate of dense models of that width, at rank 16 with alpha 32."""
WIDEST = 5120
"""Of the dense models of which a best rate is known."""
PUBLISHED_RANK_POWER = 0.23
"""By which best rates go with the rank where alpha is fixed."""
BASIS = (
    "published sweeps of 1B to 1000B models, and for rank and small models by trainings of a 135M "
    "one (docs/learning_rates.md)"
)
SPREAD = 2.0
"""Times down and up: 29 of the 31 published best rates are in that range."""


@dataclass(frozen=True)
class Group:
    """Trainings that differ in rate and seed alone."""

    targets: str
    rank: int
    rows: int
    seq_len: int
    losses: Mapping[float, Mapping[int, float]]
    """Held-out loss in nats a token, by learning rate and seed."""

    @property
    def config(self) -> TrialConfig:
        """What was trained, without its learning rate."""
        return TrialConfig(
            target_modules=self.targets,
            lora_rank=self.rank,
            micro_batch_size=self.rows,
            seq_len=self.seq_len,
        )

    @cached_property
    def shared_seeds(self) -> frozenset[int]:
        """Seeds that every rate has; none where some rate has none of the others'."""
        return frozenset.intersection(*(frozenset(of) for of in self.losses.values()))

    @cached_property
    def means(self) -> dict[float, float]:
        """Mean loss of each rate, from the lowest rate on.

        It is over the seeds that every rate has, where there are any, as each seed has a loss of
        its own.
        """
        found = {}
        for rate in sorted(self.losses):
            known = self.losses[rate]
            seeds = self.shared_seeds or known.keys()
            found[rate] = statistics.fmean(known[seed] for seed in seeds)
        return found

    @cached_property
    def best(self) -> float:
        """The measured rate with the lowest loss."""
        return min(self.means, key=lambda rate: self.means[rate])

    @property
    def is_bracketed(self) -> bool:
        """Whether higher and lower rates than the best one were measured."""
        rates = list(self.means)
        return rates[0] < self.best < rates[-1]

    @cached_property
    def around(self) -> tuple[float, ...]:
        """The best rate and its two neighbours, or the three rates at the end where it lies."""
        rates = list(self.means)
        at = rates.index(self.best)
        first = min(max(at - 1, 0), max(len(rates) - 3, 0))
        return tuple(rates[first : first + 3])

    @cached_property
    def parabola(self) -> Parabola:
        """Through those three."""
        return Parabola.through(self.around, [self.means[rate] for rate in self.around])

    @property
    def optimum(self) -> float:
        """The best rate; the measured one where it is not bracketed."""
        if not self.is_bracketed:
            return self.best
        return self.parabola.lowest

    def interval(self, noise: float) -> tuple[float, float]:
        """Return the 95 % interval of the best rate, for so much noise of a loss.

        Args:
            noise: standard deviation of one loss around what rate and seed make of it, in nats.
        """
        losses = np.array([self.means[rate] for rate in self.around])
        of_mean = noise / math.sqrt(max(1, len(self.shared_seeds)))
        drawn = losses + np.random.default_rng(0).normal(0.0, of_mean, (DRAWS, len(losses)))
        found = []
        for each in drawn:
            parabola = Parabola.through(self.around, each)
            lowest = self.around[int(each.argmin())]
            if parabola.curvature > 0:
                lowest = parabola.lowest
            found.append(min(max(lowest, self.around[0]), self.around[-1]))
        low, high = np.quantile(found, [0.025, 0.975])
        return float(low), float(high)

    def over_lowest(self, rates: Any) -> Any:
        """Return how far losses at rates are over the lowest one, in nats a token.

        The parabola is what is known near the optimum. Elsewhere losses are interpolated in the
        logarithm of the rate; beyond all measured rates it is the last one's.
        """
        floor = min(self.parabola.loss(self.optimum), self.means[self.best])
        inside = np.clip(rates, min(self.means), max(self.means))
        logs = np.log(list(self.means))
        losses = np.interp(np.log(inside), logs, list(self.means.values()))
        if self.is_bracketed:
            near = (inside >= self.around[0]) & (inside <= self.around[-1])
            losses = np.where(near, self.parabola.loss(inside), losses)
        return losses - floor

    def tolerated(self) -> tuple[float, float]:
        """Return the lowest and the highest rate of `TOLERATED_NATS` at most over the lowest loss;
        an end beyond all measured rates is the last one."""
        fine = np.exp(np.linspace(math.log(min(self.means)), math.log(max(self.means)), 2_001))
        good = fine[self.over_lowest(fine) <= TOLERATED_NATS]
        return float(good[0]), float(good[-1])


@dataclass(frozen=True)
class Parabola:
    """A loss as a parabola of the rate's logarithm."""

    curvature: float
    slope: float
    level: float

    @classmethod
    def through(cls, rates: Sequence[float], losses: Sequence[float]) -> Parabola:
        """Return the one through three points, or as near as may be to more."""
        degree = min(2, len(rates) - 1)
        found = [float(one) for one in np.polyfit(np.log(rates), losses, degree)]
        curvature, slope, level = [0.0] * (2 - degree) + found
        return cls(curvature, slope, level)

    @property
    def lowest(self) -> float:
        """The rate at which it is lowest."""
        return math.exp(-self.slope / (2 * self.curvature))

    def loss(self, rate: Any) -> Any:
        """Return the loss at a rate, or at each of several."""
        log = np.log(rate)
        return self.curvature * log**2 + self.slope * log + self.level


def read() -> tuple[list[Row], list[Row]]:
    """Return what was said of the runs as a whole, and the trainings."""
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    trainings = [row for row in rows if "eval_loss" in row]
    return [row for row in rows if "eval_loss" not in row], trainings


def groups(trainings: Iterable[Row]) -> list[Group]:
    """Return the trainings in groups that differ in rate and seed alone, the smallest first.

    One that diverged has no loss, and counts as the highest loss of its group twice over.
    """
    found: dict[tuple[str, int, int, int], dict[float, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for row in trainings:
        key = (row["targets"], row["rank"], row["rows"], row["seq_len"])
        loss = row["eval_loss"]
        is_finite = loss is not None and math.isfinite(loss)
        found[key][row["learning_rate"]][row["seed"]] = loss if is_finite else math.inf
    return [Group(*key, _finite(losses)) for key, losses in sorted(found.items())]


def _finite(losses: Mapping[float, Mapping[int, float]]) -> dict[float, dict[int, float]]:
    known = [loss for of in losses.values() for loss in of.values() if math.isfinite(loss)]
    worst = 2 * max(known)
    return {
        rate: {seed: min(loss, worst) for seed, loss in of.items()} for rate, of in losses.items()
    }


def noise_of(found: Sequence[Group]) -> float | None:
    """Return the standard deviation of a loss over the seeds of one rate, in nats; None where no
    training was repeated with another seed."""
    spreads = []
    for group in found:
        spreads += [statistics.variance(of.values()) for of in group.losses.values() if len(of) > 1]
    if not spreads:
        return None
    return math.sqrt(statistics.fmean(spreads))


@dataclass(frozen=True)
class Power:
    """A power of a quantity that best rates follow."""

    exponent: float
    level: float
    """The best rate where the quantity is that of the reference."""
    interval: tuple[float, float] | None
    """The exponent's, 95 %; None where the noise of losses is not known."""


def power(known: Sequence[tuple[float, Group]], *, at: float, noise: float | None) -> Power:
    """Return the power of a quantity that best rates follow, by least squares of logarithms.

    Args:
        known: the quantity's values with their groups, two at least.
        at: the reference's value of the quantity.
        noise: of one loss, in nats.
    """
    logs = np.log([value / at for value, _ in known])
    best = np.log([group.optimum for _, group in known])
    exponent, level = (float(one) for one in np.polyfit(logs, best, 1))
    interval = None
    if noise is not None:
        ends = [group.interval(noise) for _, group in known]
        errors = np.array([math.log(high / low) / 3.92 for low, high in ends])
        centred = logs - logs.mean()
        error = math.sqrt(float(((centred * errors) ** 2).sum())) / float((centred**2).sum())
        interval = exponent - 1.96 * error, exponent + 1.96 * error
    return Power(exponent, math.exp(level), interval)


def reference(found: Sequence[Group]) -> Group:
    """Return the group that others are compared with: rank 16 on every linear layer, at the batch
    that several ranks were trained at."""
    batches = [group.rows for group in found if group.rank != 16]
    rows = statistics.mode(batches) if batches else found[0].rows
    return next(g for g in found if (g.targets, g.rank, g.rows) == ("all-linear", 16, rows))


def differing_in(key: str, found: Sequence[Group]) -> list[Group]:
    """Return the groups that differ from the reference in rank, rows or targets alone."""
    own = reference(found)
    others = {"rank", "rows", "targets"} - {key}
    return [g for g in found if all(getattr(g, k) == getattr(own, k) for k in others)]


def powers(found: Sequence[Group]) -> dict[str, Power]:
    """Return by what changes the power that best rates follow, where two or more are bracketed."""
    noise = noise_of(found)
    ranks = [(float(g.rank), g) for g in differing_in("rank", found) if g.is_bracketed]
    tokens = [(float(g.rows * g.seq_len), g) for g in differing_in("rows", found) if g.is_bracketed]
    own = reference(found)
    known = {
        "rank, with alpha twice the rank": (ranks, float(own.rank)),
        "tokens of a step, as many in all": (tokens, float(own.rows * own.seq_len)),
    }
    return {name: power(of, at=at, noise=noise) for name, (of, at) in known.items() if len(of) > 1}


def rule(found: Sequence[Group]) -> dict[str, Any]:
    """Return the rule of supervised training, as its file has it.

    The level at common widths is the published one. How it goes with the rank is measured here,
    where alpha is twice the rank; alpha's share of that is what the published power leaves. How it
    goes with the width is between the published level and the one measured here.
    """
    known = powers(found)
    rank = known["rank, with alpha twice the rank"]
    own = reference(found)
    width = math.log(rank.level / PUBLISHED_RATE) / math.log(WIDTH / PUBLISHED_WIDTH)
    ranks = [group.rank for group in differing_in("rank", found)]
    alphas = [2 * rank for rank in ranks]
    factors = {
        "alpha": _factor(2 * own.rank, rank.exponent - PUBLISHED_RANK_POWER, alphas),
        "rank": _factor(own.rank, PUBLISHED_RANK_POWER, ranks),
        "width": _factor(PUBLISHED_WIDTH, width, [WIDTH, WIDEST]),
    }
    tokens = known.get("tokens of a step, as many in all")
    if tokens is not None:
        measured = [g.rows * g.seq_len for g in differing_in("rows", found) if g.is_bracketed]
        factors["tokens"] = _factor(own.rows * own.seq_len, tokens.exponent, measured)
    return {
        "rate": PUBLISHED_RATE,
        "spread": SPREAD,
        "basis": BASIS,
        "factors": factors,
        "attention": _two_digits(attention(found)),
    }


def _factor(at: float, exponent: float, known: Sequence[float]) -> dict[str, float]:
    return {"at": at, "exponent": round(exponent, 2), "low": min(known), "high": max(known)}


def attention(found: Sequence[Group]) -> float:
    """Return how many times the best rate of every linear layer that of attention alone is; 1 where
    either is not bracketed."""
    both = {group.targets: group for group in differing_in("targets", found) if group.is_bracketed}
    if len(both) < 2:
        return 1.0
    return both["attention"].optimum / both["all-linear"].optimum


def rule_file(found: Sequence[Group]) -> str:
    """Return the rule's file with what this makes of the trainings."""
    text = RULE.read_text(encoding="utf-8")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    known = {**yaml.safe_load(text), "sft": rule(found)}
    body = yaml.safe_dump(known, sort_keys=False, default_flow_style=None, width=120)
    return "\n".join([*comments, body])


def made() -> str:
    """Return what the page says of the trainings."""
    said, trainings = read()
    found = groups(trainings)
    run = _run(said, trainings, noise_of(found))
    parts = (run, _table(found), _powers(found), _factors(rule(found)), _rates(rule(found)))
    return "\n\n".join("\n".join(part) for part in parts)


def _run(said: Sequence[Row], trainings: Sequence[Row], noise: float | None) -> Iterator[str]:
    first = trainings[0]
    tokens = f"{first['tokens']:,} of {first['training_tokens']:,} tokens"
    base = "16-bit" if first["base"] == "none" else first["base"]
    seeds = len({row["seed"] for row in trainings})
    repeated = "One seed: intervals are not known."
    if noise is not None:
        repeated = (
            f"Up to {seeds} seeds: a loss varies by {noise:.4f} nats (standard deviation) beside "
            "what rate and seed make of it."
        )
    yield (
        f"{len(trainings)} trainings of SmolLM2-135M ({WIDTH} wide) on {tokens} of Python's "
        f"standard library, packed; {base} base with {first['compute']} compute, AdamW, the rate "
        "falling to 0 without a warm-up, alpha twice the rank. Losses are held-out, in nats a "
        f"token. {repeated}"
    )
    for row in said:
        versions = ", ".join(f"{name} {v}" for name, v in row["versions"].items() if v)
        yield f"{row['measured_on']}, {row['date']}, {versions}."


def _table(found: Sequence[Group]) -> Iterator[str]:
    noise = noise_of(found)
    within = f"within {TOLERATED_NATS} nats"
    yield f"| adapters | rank | batch | held-out loss | best rate | {within} | the rule's |"
    yield "|---|---|---|---|---|---|---|"
    for group in found:
        losses = ", ".join(f"{in_words(rate)}: {_loss(group, rate)}" for rate in group.means)
        low, high = group.tolerated()
        rate = learning_rate_of(group.config, {"hidden_size": WIDTH}).value
        is_measured = min(group.means) <= rate <= max(group.means)
        cost = f"{float(group.over_lowest(rate)):+.4f}" if is_measured else "beyond"
        cells = (
            group.targets,
            str(group.rank),
            f"{group.rows} x {group.seq_len}",
            losses,
            _optimum(group, noise),
            f"{_two(low)} to {_two(high)}",
            f"{in_words(rate)}: {cost}",
        )
        yield f"| {' | '.join(cells)} |"


def _loss(group: Group, rate: float) -> str:
    loss = group.means[rate]
    return "diverged" if loss > 2 * min(group.means.values()) else f"{loss:.4f}"


def _optimum(group: Group, noise: float | None) -> str:
    if not group.is_bracketed:
        side = "or more" if group.best == max(group.means) else "or less"
        return f"{in_words(group.best)} {side}"
    if noise is None:
        return _two(group.optimum)
    low, high = group.interval(noise)
    return f"{_two(group.optimum)} ({_two(low)} to {_two(high)})"


def _two(rate: float) -> str:
    return in_words(_two_digits(rate))


def _two_digits(number: float) -> float:
    return float(f"{number:.1e}")


def _powers(found: Sequence[Group]) -> Iterator[str]:
    yield "| what changes | best rates go with its power of | 95 % |"
    yield "|---|---|---|"
    for name, known in powers(found).items():
        between = ""
        if known.interval is not None:
            between = f"{known.interval[0]:.2f} to {known.interval[1]:.2f}"
        yield f"| {name} | {known.exponent:.2f} | {between} |"


_WORDS = {
    "alpha": "alpha",
    "rank": "rank",
    "width": "width of the model (hidden size)",
    "tokens": "tokens of an optimizer step",
}
_WIDTHS = (WIDTH, 2048, PUBLISHED_WIDTH, WIDEST)
"""Of the table of rates."""


def _factors(made_rule: Mapping[str, Any]) -> Iterator[str]:
    attention = ""
    if made_rule["attention"] != 1:
        attention = f"times {made_rule['attention']:g} where attention alone has adapters, "
    yield f"The rule: {in_words(made_rule['rate'])}, {attention}times the product of"
    yield ""
    yield "| quantity | over | to the power of | from | to |"
    yield "|---|---|---|---|---|"
    for quantity, of in made_rule["factors"].items():
        ends = f"{of['low']:,} | {of['high']:,}"
        yield f"| {_WORDS[quantity]} | {of['at']:,} | {of['exponent']} | {ends} |"


def _rates(made_rule: Mapping[str, Any]) -> Iterator[str]:
    shown = Rule.model_validate(made_rule)
    widths = " | ".join(f"{width:,} wide" for width in _WIDTHS)
    yield "Its rates on every linear layer, at 16 x 512, with alpha twice the rank:"
    yield ""
    yield f"| rank | {widths} |"
    yield f"|---|{'---|' * len(_WIDTHS)}"
    for rank in (4, 8, 16, 32, 64, 128, 256):
        config = TrialConfig(target_modules="all-linear", lora_rank=rank, micro_batch_size=16)
        rates = (shown.rate_of(config, {"hidden_size": width}) for width in _WIDTHS)
        yield f"| {rank} | {' | '.join(_two(rate) for rate in rates)} |"


def page(text: str, part: str) -> str:
    """Return the page with another table."""
    return with_part(text, f"\n\n{part}\n\n", begin=BEGIN, end=END)


def main() -> None:
    """Write the rule, and the tables into the page; print them."""
    RULE.write_text(rule_file(groups(read()[1])), encoding="utf-8")
    part = made()
    print(part)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), part), encoding="utf-8")


if __name__ == "__main__":
    main()
