"""What is read off trainings at several learning rates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.learning_rates import learning_rate_of
from tests.bench import learning_rates

RATES = (2e-4, 6e-4, 2e-3, 6e-3)


def trainings(
    rank: int, best: float, *, rows: int = 16, targets: str = "all-linear", seeds: int = 3
) -> Iterator[dict[str, Any]]:
    """Yield trainings whose losses are a parabola of the rate's logarithm, with a seed's own."""
    for rate in RATES:
        for seed in range(seeds):
            loss = 1.8 + 0.02 * math.log(rate / best) ** 2 + 0.03 * seed
            yield {
                "rank": rank,
                "targets": targets,
                "rows": rows,
                "seq_len": 512,
                "steps": 120,
                "learning_rate": rate,
                "alpha": 2 * rank,
                "seed": seed,
                "eval_loss": loss,
                "base": "bf16",
                "compute": "bf16",
            }


@pytest.fixture
def results(tmp_path: Path) -> Path:
    gpu = {"measured_on": "NVIDIA H200", "date": "2026-11-28", "versions": {"torch": "2.11.0"}}
    rows: list[dict[str, Any]] = [gpu]
    for rank, best in ((4, 2.8e-3), (16, 1.4e-3), (64, 7e-4)):
        rows += trainings(rank, best)
    rows += trainings(16, 1e-3, targets="attention", seeds=1)
    rows += trainings(16, 2.8e-3, rows=64, seeds=1)
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_best_rates_and_their_powers_are_those_that_made_the_losses(results: Path) -> None:
    found = learning_rates.groups(learning_rates.read(results)[1])
    assert learning_rates.noise_of(found) == pytest.approx(0, abs=1e-9)
    known = {(g.targets, g.rank, g.rows): g for g in found}
    assert known["all-linear", 4, 16].optimum == pytest.approx(2.8e-3)
    assert known["attention", 16, 16].optimum == pytest.approx(1e-3)
    ranks, tokens = learning_rates.powers(found).values()
    assert (ranks.exponent, ranks.level) == pytest.approx((-0.5, 1.4e-3))
    assert tokens.exponent == pytest.approx(0.5)
    rule = learning_rates.rule(found)
    assert rule["attention"] == pytest.approx(1 / 1.4, rel=0.05)
    assert rule["factors"]["tokens"] == {"at": 8192, "exponent": 0.5, "low": 8192, "high": 32768}
    # With alpha twice the rank both powers together are the measured one.
    together = rule["factors"]["alpha"]["exponent"] + rule["factors"]["rank"]["exponent"]
    assert together == pytest.approx(-0.5)
    reference = learning_rates.reference(found)
    assert (reference.rank, reference.rows) == (16, 16)
    low, high = reference.tolerated()
    within = math.exp(math.sqrt(learning_rates.TOLERATED_NATS / 0.02))
    assert (low, high) == pytest.approx((1.4e-3 / within, 1.4e-3 * within), rel=0.01)
    assert reference.cost(2.8e-3) == pytest.approx(0.02 * math.log(2) ** 2)


def test_a_best_rate_at_an_end_is_a_bound_and_one_that_diverged_is_none() -> None:
    rows = list(trainings(16, 1e-5, seeds=1))
    rows[-1]["eval_loss"] = None
    found = learning_rates.groups(rows)
    assert not found[0].is_bracketed
    assert found[0].optimum == RATES[0]
    assert learning_rates.noise_of(found) is None
    assert learning_rates.powers(found) == {}


def test_noise_widens_the_interval_of_a_best_rate() -> None:
    (group,) = learning_rates.groups(trainings(16, 1.4e-3))
    low, high = group.interval(0.001)
    lower, higher = group.interval(0.003)
    assert lower < low < 1.4e-3 < high < higher


def test_page_and_rule_are_what_the_committed_trainings_come_to() -> None:
    """Run: python -m tests.bench.learning_rates"""
    found = learning_rates.groups(learning_rates.read()[1])
    shipped = learning_rates.RULE.read_text(encoding="utf-8")
    assert learning_rates.rule_file(found) == shipped
    page = learning_rates.PAGE.read_text(encoding="utf-8")
    assert learning_rates.page(page, learning_rates.made()) == page


def test_the_rules_rates_cost_little_where_trainings_say_what_they_cost() -> None:
    """Of every group whose rates reach that of the rule."""
    known = []
    for group in learning_rates.groups(learning_rates.read()[1]):
        rate = learning_rate_of(group.config, {"hidden_size": learning_rates.WIDTH}).value
        if min(group.means) <= rate <= max(group.means):
            known.append(group.cost(rate))
    assert len(known) >= 3
    assert max(known) < 0.03
