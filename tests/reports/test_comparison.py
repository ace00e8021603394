"""Several GPUs beside each other: nothing is claimed inside the uncertainty of the speeds."""

from __future__ import annotations

import math
from datetime import date
from typing import Any

import pytest

from reports.cards import Card, Range, card_of_study, cards_of_plan
from reports.comparison import Comparison, compare_cards
from reports.decision import Job
from reports.figures.comparison import words_of
from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer
from storage.definition import StudySnapshot, TargetSpeed
from storage.records import TrialRecord
from tests.reports.synthetic import HOSTILE, definition, fits, snapshot

SMALL = TrialConfig(micro_batch_size=8)


def _offer(usd_per_hour: float, **values: Any) -> Offer:
    day = date(2026, 9, 1)
    defaults = {"gpu": "a10", "provider": "Somebody", "date": day, "source": "a list"}
    return Offer(usd_per_hour=usd_per_hour, **(defaults | values))


def _study(
    name: str,
    speed: float,
    *,
    usd: float | None = 1.0,
    width: float = 0.01,
    config: TrialConfig = SMALL,
    records: tuple[TrialRecord, ...] = (),
    fingerprint: str = "0123456789abcdef",
    **offer: Any,
) -> StudySnapshot:
    """Return a study of one trial at a speed that is sure to a share, on a GPU at a price."""
    step = 4096 / speed
    ends = (step / (1 + width), step / (1 - width))
    trial = fits(0, speed, config, step_seconds=step, step_seconds_ci95=ends)
    about = definition(emulated_on=None)
    return snapshot(
        (trial, *records),
        name=name,
        definition=about.model_copy(update={"model_fingerprint": fingerprint}),
        offer=None if usd is None else _offer(usd, **offer),
    )


def _compared(*studies: StudySnapshot, samples: float | None = None) -> Comparison:
    return compare_cards(
        [card_of_study(study) for study in studies], job=Job(dataset_samples=samples)
    )


def test_the_cheapest_and_the_soonest_are_told_where_the_speeds_are_surely_apart() -> None:
    (group,) = _compared(_study("slow", 4_000.0, usd=0.5), _study("fast", 8_000.0, usd=2.0)).groups
    assert group.cheapest is not None
    assert [entry.card.label for entry in group.cheapest.tied] == ["slow"]
    assert [entry.card.label for entry in group.soonest.tied] == ["fast"]
    (behind,) = group.cheapest.behind
    assert behind[1].value == pytest.approx(2.0)
    assert behind[1].low < 2.0 < behind[1].high
    assert group.entries[0].usd_per_million_tokens is not None
    assert group.entries[0].usd_per_million_tokens.value == pytest.approx(0.5 / 3600 / 4_000 * 1e6)


def test_what_lies_within_the_uncertainty_is_tied_and_said_to_be() -> None:
    comparison = _compared(
        _study("one", 4_000.0, width=0.2), _study("other", 4_400.0, width=0.2), samples=1000
    )
    (group,) = comparison.groups
    assert group.cheapest is not None
    assert not group.cheapest.is_sure
    assert len(group.cheapest.tied) == 2
    verdicts = words_of(comparison).groups[0].verdicts
    assert verdicts[0].startswith("Cheapest cannot be told within the uncertainty of the speeds")
    assert verdicts[1].startswith("Soonest cannot be told")


def test_a_speed_without_an_interval_is_never_surely_ahead() -> None:
    bare = fits(0, 9_000.0, SMALL, steps_measured=3, step_seconds_ci95=None)
    study = snapshot([bare], name="bare", definition=definition(emulated_on=None))
    (group,) = _compared(study, _study("known", 4_000.0)).groups
    assert len(group.soonest.tied) == 2


def test_where_another_card_stood_in_the_predicted_speed_counts_and_not_its_own() -> None:
    stood_in = snapshot(
        [fits(0, 17_000.0, SMALL)],
        name="a10",
        target_speeds={0: TargetSpeed(1_600.0, 1_000.0, 3_000.0, "predicted")},
    )
    (group,) = _compared(stood_in, _study("h200", 17_000.0)).groups
    assert [entry.card.label for entry in group.soonest.tied] == ["h200"]
    rows = {
        row.card: row
        for row in words_of(_compared(stood_in, _study("h200", 17_000.0))).groups[0].rows
    }
    assert rows["a10"].speed == "1,600 (1,000–3,000), predicted"
    assert rows["a10"].source == "study a10, run on NVIDIA H200"


def test_a_break_even_is_where_the_bills_cross_and_none_is_told_inside_the_uncertainty() -> None:
    """The one that starts for less costs twice as much a token, until that is used up."""
    starts = {"boot_seconds": 360.0, "download_bytes_per_second": None}
    sure = _compared(
        _study("quick start", 4_000.0, usd=1.0, boot_seconds=0.0),
        _study("long run", 16_000.0, usd=2.0, **starts),
    )
    (point,) = sure.groups[0].break_evens
    assert (point.small.card.label, point.large.card.label) == ("quick start", "long run")
    ahead, dear, cheap = 2.0 * 360 / 3600, 1.0 / 3600 / 4_000, 2.0 / 3600 / 16_000
    assert point.tokens.value == pytest.approx(ahead / (dear - cheap))
    assert point.tokens.low < point.tokens.value < point.tokens.high
    unsure = _compared(
        _study("quick start", 4_000.0, usd=1.0, boot_seconds=0.0, width=0.4),
        _study("long run", 16_000.0, usd=2.0, width=0.4, **starts),
    )
    assert unsure.groups[0].break_evens == ()


def test_the_bill_of_little_work_counts_what_is_paid_before_the_first_step() -> None:
    comparison = _compared(
        _study("quick start", 4_000.0, usd=1.0),
        _study("long run", 16_000.0, usd=2.0, boot_seconds=3600.0),
        samples=100,
    )
    (group,) = comparison.groups
    assert group.cheapest is not None
    assert group.cheapest.tied[0].card.label == "quick start"


def test_other_models_classes_and_lengths_are_told_apart() -> None:
    other_class = TrialConfig(micro_batch_size=8, seq_len=1024)
    comparison = _compared(
        _study("one", 4_000.0),
        _study("another model", 8_000.0, fingerprint="fedcba"),
        _study("another length", 8_000.0, config=other_class),
    )
    assert comparison.groups == ()
    assert len(comparison.alone) == 3
    apart = words_of(comparison).apart
    assert any("their speeds do not compare" in sentence for sentence in apart)
    assert any("Only another length has" in sentence for sentence in apart)


def test_a_card_without_a_price_is_compared_by_time_alone_and_that_is_said() -> None:
    comparison = _compared(_study("priced", 4_000.0), _study("free", 8_000.0, usd=None))
    (group,) = comparison.groups
    assert group.cheapest is None
    assert group.soonest.tied[0].card.label == "free"
    assert any("No price is known of free" in s for s in words_of(comparison).groups[0].verdicts)


def test_two_of_one_name_are_numbered_and_a_comparison_takes_two() -> None:
    comparison = _compared(_study("a10", 4_000.0), _study("a10", 8_000.0))
    assert [card.label for card in comparison.cards] == ["a10 1", "a10 2"]
    with pytest.raises(InputError, match="at least two"):
        _compared(_study("a10", 4_000.0))
    with pytest.raises(InputError, match="--work dataset-samples must be greater than 0, got 0"):
        Job(dataset_samples=0)


def _plan(gpu: str = "l4", **values: Any) -> dict[str, Any]:
    bill = {"provider": "Somebody", "is_spot": False, "usd_per_hour": 0.5, "date": "2026-09-01"}
    items = [
        {"name": "boot", "seconds": 60.0, "usd": 0.0},
        {"name": "training", "seconds": 9.0, "usd": 1.0},
    ]
    return {
        "model": "mistral-7b-v0.3",
        "gpu": {"name": gpu, "budget_bytes": 20 * 2**30},
        "bills": [{**bill, "items": items}],
        "recommended": {
            "config": SMALL.model_dump(mode="json"),
            "tokens_per_second": 3_000.0,
            "tokens_per_second_range": [2_000.0, None],
            "peak_allocated_bytes": 9 * 2**30,
        },
        "fastest_by_class": [{"config": {"lora_rank": 8}, "tokens_per_second": 3_100.0}],
    } | values


def test_a_plan_is_compared_with_a_study_of_the_same_model() -> None:
    study = _study("a10", 4_000.0)
    known = [(study.definition.model_fingerprint, _model(study))]
    (card,) = cards_of_plan(_plan(), where="l4.json", models=known)
    assert (card.label, card.source) == ("l4 (plan)", "plan l4.json")
    assert card.rent is not None
    assert card.rent.fixed_seconds == 60.0
    speeds = [option.tokens_per_second for option in card.options]
    assert speeds[0] == Range(3_000.0, 2_000.0, math.inf)
    (group,) = compare_cards([card_of_study(study), card], job=Job()).groups
    assert {entry.card.label for entry in group.entries} == {"a10", "l4 (plan)"}
    assert not group.soonest.is_sure


def _model(study: StudySnapshot) -> ModelSpec:
    return ModelSpec.from_json(study.definition.model)


def test_plans_of_several_cards_are_read_and_anything_else_is_refused_by_name() -> None:
    cards = cards_of_plan({"plans": [_plan("l4"), _plan("t4")]}, where="plan.json")
    assert [card.gpu for card in cards] == ["l4", "t4"]
    for broken in ({"plans": 3}, {"config": {}}, {"plans": [7]}):
        with pytest.raises(InputError, match=r"plan\.json"):
            cards_of_plan(broken, where="plan.json")


def test_one_configuration_that_was_asked_about_is_a_plan_as_well() -> None:
    plan = _plan()
    exact = {k: v for k, v in plan.items() if k not in ("recommended", "fastest_by_class")}
    cards = cards_of_plan({**exact, **plan["recommended"]}, where="plan.json")
    assert [option.config for option in cards[0].options] == [SMALL]


def test_names_that_people_chose_are_no_markup_in_the_figures() -> None:
    study = snapshot([fits(0, 4_000.0)], name=HOSTILE, definition=definition(emulated_on=None))
    words = words_of(_compared(study, _study("other", 5_000.0)))
    for figure in words.figures:
        assert "<img" not in str(figure.plain)
    cards: tuple[Card, ...] = _compared(study, _study("other", 5_000.0)).cards
    assert cards[0].label == HOSTILE


def test_what_a_plan_is_not_sure_fits_says_so() -> None:
    plan = _plan()
    plan["recommended"] |= {"fits_certainty": "uncertain"}
    cards = cards_of_plan({"plans": [plan, _plan("t4")]}, where="plan.json")
    rows = words_of(compare_cards(cards, job=Job())).groups[0].rows
    assert [row.peak.startswith("may not fit") for row in rows].count(True) == 1


def test_a_card_that_is_not_in_a_comparison_is_named_with_the_command_that_brings_it_in() -> None:
    other = _study("long rows", 8_000.0, config=TrialConfig(micro_batch_size=8, seq_len=1024))
    comparison = _compared(_study("one", 4_000.0), _study("two", 5_000.0), other)
    absent = words_of(comparison).groups[0].verdicts[-1]
    assert absent.startswith("long rows is not compared here")
    assert "sweep plan a10 --model mistral-7b-v0.3 --rank 16 --target-modules attention" in absent
