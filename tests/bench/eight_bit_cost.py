"""What bases and 8-bit compute cost in what a training learns, of a real model.

    python -m tests.bench.eight_bit_cost

It reads the trainings in `results/real_weights_h200.jsonl` and writes the tables of
docs/lab/eight_bits.md; a test holds the page and `search_spaces.quality` to them. Trainings are
paired by seed, which decides adapters and order of the rows: what is stated is the mean of
differences, with the 95 % interval of Student's t where there are several.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from scipy.stats import t as student

from qlora_sweep.search_spaces.learning_rates import in_words
from tests.bench.harness import ROOT, Row, with_part

RESULTS = ROOT / "tests" / "bench" / "results" / "real_weights_h200.jsonl"
PAGE = ROOT / "docs" / "lab" / "eight_bits.md"
BEGIN = "<!-- Made by `python -m tests.bench.eight_bit_cost` from tests/bench/results. -->"
END = "<!-- End of what is made. -->"
STATED_RATE = 5e-4
"""The rate at which `search_spaces.quality` states what is known."""
KINDS = (
    ("none", "bf16"),
    ("fp8", "bf16"),
    ("fp8", "fp8"),
    ("int8", "bf16"),
    ("int8", "int8"),
    ("nf4", "bf16"),
    ("nf4", "fp8"),
    ("nf4", "int8"),
)
"""Bases and computes in the order of the tables."""

NOISE = {"product": "the product", "gradient": "the input's gradient"}
"""What noise was added to, in words."""
TWICE = (
    ("fp8", 1 / 64, "spread", False),
    ("fp8", 1 / 32, "product", False),
    ("nf4", 1 / 32, "product", False),
    ("nf4", 1 / 64, "product", True),
    ("nf4", 1 / 32, "product", True),
)
"""Base, share of the features, by what they are chosen, whether their weights are rounded twice."""

Kind = tuple[str, str]
Losses = Mapping[int, float]
"""In nats a token, by seed."""


@dataclass(frozen=True)
class Difference:
    """Between trainings that are alike but for one thing."""

    values: tuple[float, ...]
    """In nats a token, one for each seed."""

    @classmethod
    def between(cls, losses: Losses, others: Losses) -> Difference:
        """Return by how much losses are over others, of the seeds that both have."""
        return cls(tuple(losses[seed] - others[seed] for seed in sorted(losses) if seed in others))

    @property
    def mean(self) -> float:
        """In nats a token."""
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval; None of a single one."""
        count = len(self.values)
        if count < 2:
            return None
        spread = statistics.stdev(self.values) / math.sqrt(count)
        return float(student.ppf(0.975, count - 1)) * spread

    @property
    def words(self) -> str:
        """Return mean and interval."""
        half = self.half_width
        if half is None:
            return f"{self.mean:+.4f} (one seed)"
        return f"{self.mean:+.4f} ± {half:.4f}"


@dataclass(frozen=True)
class Results:
    """Rows of `real_weights`, by what was asked of them."""

    stamp: Row
    rows: Sequence[Row]

    @classmethod
    def read(cls) -> Results:
        """Return what is committed."""
        stamp, *rows = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
        return cls(stamp, rows)

    def named(self, name: str) -> list[Row]:
        """Return the rows of a name."""
        return [row for row in self.rows if row["name"] == name]

    def losses(self, kind: Kind, rate: float, key: str = "eval_loss", **asked: object) -> Losses:
        """Return the losses of trainings of a base and compute at a rate.

        Args:
            kind: base and compute.
            rate: learning rate.
            key: of the row: which loss.
            asked: further fields of the rows; ``name`` is ``quality`` where it is not given.
        """
        wanted = {
            "name": "quality",
            "base": kind[0],
            "compute": kind[1],
            "learning_rate": rate,
            **asked,
        }
        return {
            row["seed"]: row[key]
            for row in self.rows
            if all(row.get(name) == value for name, value in wanted.items())
        }

    def over(self, kind: Kind, other: Kind, rate: float, key: str = "eval_loss") -> Difference:
        """Return by how much a kind's loss is over another's own."""
        return Difference.between(self.losses(kind, rate, key), self.losses(other, rate))


def stated(results: Results) -> dict[Kind, float]:
    """Return what `search_spaces.quality` states: nats a token over a 16-bit base and compute."""
    return {
        kind: round(results.over(kind, ("none", "bf16"), STATED_RATE).mean, 3) for kind in KINDS
    }


def made(results: Results) -> str:
    """Return what the page has of the trainings."""
    parts = (_about(results), _costs(results), _before(results), _others(results))
    return "\n\n".join("\n".join(part) for part in parts)


def _about(results: Results) -> Iterator[str]:
    rows = results.named("quality")
    first = rows[0]
    share = first["tokens"] / first["training_tokens"]
    versions = ", ".join(f"{name} {v}" for name, v in results.stamp["versions"].items() if v)
    yield (
        f"{len(rows)} trainings of SmolLM2-135M-Instruct: rank {first['config']['lora_rank']} on "
        f"all linear layers, {first['steps']} steps of 16 x 512 tokens without padding, "
        f"{share:.0%} of Python's standard library (one file in twelve held out: "
        f"{first['eval_tokens']:,} tokens of it). Held-out loss in nats a token; differences are "
        "of trainings with the same seed, mean and 95 % interval (Student's t)."
    )
    yield f"{results.stamp['measured_on']}, {results.stamp['date']}, {versions}."


def _costs(results: Results) -> Iterator[str]:
    plain = ("none", "bf16")
    yield (
        "| rate | base | compute | seeds | loss | over a 16-bit base and compute | over 16-bit "
        "compute on the same base | its adapters on a 16-bit base, over the same |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for rate in sorted({row["learning_rate"] for row in results.named("quality")}):
        for kind in KINDS:
            losses = results.losses(kind, rate)
            of_base = ""
            if kind[1] != "bf16":
                of_base = results.over(kind, (kind[0], "bf16"), rate).words
            on_wide = ""
            over = ""
            if kind != plain:
                over = results.over(kind, plain, rate).words
                on_wide = results.over(kind, plain, rate, "eval_loss_16_bit_base").words
            cells = (
                in_words(rate),
                *kind,
                str(len(losses)),
                f"{statistics.fmean(losses.values()):.4f}",
                over,
                of_base,
                on_wide,
            )
            yield f"| {' | '.join(cells)} |"


def _before(results: Results) -> Iterator[str]:
    yield "Before any training:"
    yield ""
    yield "| base | compute | loss | over 16-bit compute on the same base |"
    yield "|---|---|---|---|"
    for kind in KINDS:
        for row in results.named("before training"):
            if (row["base"], row["compute"]) != kind:
                continue
            of_products = row["eval_loss"] - row["eval_loss_16_bit"]
            over = "" if kind[1] == "bf16" else f"{of_products:+.4f}"
            yield f"| {kind[0]} | {kind[1]} | {row['eval_loss']:.4f} | {over} |"


def _others(results: Results) -> Iterator[str]:
    """Yield the table of what else was trained at the stated rate."""
    int8 = ("int8", "int8")
    losses: Callable[..., Losses] = partial(results.losses, rate=STATED_RATE)
    of_base = losses(("int8", "bf16"))
    plain = losses(("none", "bf16"))
    tried = [
        ("int8 on int8, not fitted", losses(int8, name="unfitted"), of_base),
        ("the mean out, size^0", losses(int8, name="power", power=0), of_base),
        ("the mean out, size^0.2", losses(int8, name="power", power=0.2), of_base),
        ("the mean out, size^0.35 (what is taken)", losses(int8), of_base),
        ("the same, layers not compiled", losses(int8, name="not compiled"), of_base),
    ]
    for where, said in NOISE.items():
        sizes = {row["noise"][where] for row in results.named("noise") if where in row["noise"]}
        for size in sorted(sizes):
            noisy = losses(("none", "bf16"), name="noise", noise={where: size})
            tried.append((f"bf16, noise of {size:g} on {said} of each layer", noisy, plain))
    for base, share, by, weights in TWICE:
        asked = {"share": share, "by": by, "weights_twice": weights}
        found = losses((base, "fp8"), name="rounded twice", **asked)
        what = "inputs and weights" if weights else "inputs"
        features = f"1/{1 / share:g} of the features, the largest by {by}"
        said = f"fp8 on {base}, {what} of {features}, rounded twice"
        tried.append((said, found, losses((base, "bf16"))))
    yield f"What else was trained, at {in_words(STATED_RATE)}:"
    yield ""
    yield "| | seeds | over 16-bit compute on the same base |"
    yield "|---|---|---|"
    for said, found, others in tried:
        yield f"| {said} | {len(found)} | {Difference.between(found, others).words} |"


def page(text: str, part: str) -> str:
    """Return the page with other tables."""
    return with_part(text, f"\n\n{part}\n\n", begin=BEGIN, end=END)


def main() -> None:
    """Write the tables into the page; print them, and what `search_spaces.quality` states."""
    results = Results.read()
    part = made(results)
    print(part)
    print(stated(results))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), part), encoding="utf-8")


if __name__ == "__main__":
    main()
