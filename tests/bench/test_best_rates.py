"""What is read off the committed trainings at several learning rates."""

from __future__ import annotations

from qlora_sweep.search_spaces.learning_rates import learning_rate_of
from tests.bench import learning_rates


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
            known.append(group.over_lowest(rate))
    assert len(known) >= 3
    assert max(known) < 0.03
