"""Behaviour of the GPUs for a job: what each does it with, in time or not, and which is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.costs import AskedWork
from search_spaces.errors import InputError
from search_spaces.loading import with_fixed
from search_spaces.prices import Offer
from search_spaces.space import SearchSpace
from sweep.planning.backwards import Cheapest, JobCard, Outcome, job, on_card, ranked
from sweep.planning.candidates import own_space
from sweep.planning.documents import cheapest_document
from sweep.planning.survey import survey
from sweep.predict.memory.profiles import Untraceable
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.imagined_study import MISTRAL
from tests.sweep.planning.imagined import a_forecaster, an_offer

TERMS: dict[str, Any] = {
    "work": AskedWork(samples=10_000),
    "offers": [an_offer()],
    "deadline_seconds": None,
}


def the_job(gpu: str, **held: Any) -> SearchSpace:
    space = with_fixed(own_space(gpu, None)[0], job(held))
    assert isinstance(space, SearchSpace)
    return space


def a_card(gpu: str, *offers: Offer, budget_gib: float | None = None, **terms: Any) -> JobCard:
    known = TERMS | {"offers": offers or [an_offer(gpu=gpu)]} | terms
    return on_card(the_job(gpu), a_forecaster(gpu=gpu, budget_gib=budget_gib), **known)


def answered(*cards: JobCard) -> Cheapest:
    return Cheapest(MISTRAL, cards[0].bill.workload, job({}), None, ranked(cards))


def test_what_is_not_typed_of_a_job_is_the_recipes() -> None:
    assert job({}) == {
        "lora_rank": 16,
        "target_modules": "attention",
        "seq_len": 512,
        "effective_batch_size": 16,
    }
    assert job({"lora_rank": 64, "micro_batch_size": 10})["effective_batch_size"] == 20
    fixed = {"seq_len": 2048, "micro_batch_size": 10, "effective_batch_size": None}
    assert job({}, fixed=fixed)["seq_len"] == 2048
    assert job({}, fixed=fixed)["effective_batch_size"] == 20
    assert job({"seq_len": 64}, fixed=fixed)["seq_len"] == 64
    assert job({"effective_batch_size": 64, "micro_batch_size": 8})["effective_batch_size"] == 64


@pytest.mark.parametrize("gpu", ["t4", "a10", "h200"])
def test_a_gpu_does_it_with_what_a_survey_recommends(gpu: str) -> None:
    best, card = survey(the_job(gpu), a_forecaster(gpu=gpu)).recommended, a_card(gpu)
    assert card.forecast.config == best.config
    assert (card.outcome, card.bill.workload.samples) == (Outcome.IN_TIME, 10_000)


def test_a_deadline_is_met_missed_or_open_inside_the_uncertainty_of_the_speed() -> None:
    bill = a_card("a10").bill
    soonest, latest = (3600 * end.wall_hours for end in bill.extremes)
    took = 3600 * bill.wall_hours
    deadlines = [0.99 * soonest, (soonest + took) / 2, (took + latest) / 2, 1.01 * latest]
    outcomes = [a_card("a10", deadline_seconds=deadline).outcome for deadline in deadlines]
    assert outcomes == [
        Outcome.TOO_SLOW,
        Outcome.PERHAPS_IN_TIME,
        Outcome.PERHAPS_LATE,
        Outcome.IN_TIME,
    ]


def test_an_offer_with_a_queue_beyond_the_deadline_is_not_taken_however_cheap() -> None:
    queued = an_offer(usd_per_hour=0.1, queue_seconds=1e6)
    prompt = an_offer(usd_per_hour=2.0)
    assert a_card("a10", queued, prompt).bill.offer == queued
    card = a_card("a10", queued, prompt, deadline_seconds=86_400)
    assert [bill.offer for bill in card.bills] == [prompt]


def test_the_cheapest_and_the_smallest_are_of_those_in_time() -> None:
    cards = [
        a_card("a10", an_offer(usd_per_hour=9.0)),
        a_card("a100-40gb", an_offer(gpu="a100-40gb", usd_per_hour=1.0)),
        a_card("h200", an_offer(gpu="h200", usd_per_hour=90.0)),
        a_card("l4", deadline_seconds=1.0),
        a_card("t4", budget_gib=3),
    ]
    answer = answered(*cards)
    assert [card.gpu.name for card in answer.cards] == ["a100-40gb", "h200", "a10", "l4", "t4"]
    assert answer.cheapest is cards[1]
    assert answer.smallest is cards[0]
    assert answer.that(Outcome.TOO_SLOW) == (cards[3],)
    assert answer.that(Outcome.TOO_SMALL) == (cards[4],)
    assert cards[4].least_bytes is not None
    assert cards[4].least_bytes > 3 * 2**30
    json.dumps(cheapest_document(answer), allow_nan=False)


def test_cards_whose_costs_overlap_are_not_told_apart() -> None:
    base = a_card("a10", an_offer(usd_per_hour=1.0))
    other = a_card("l4", an_offer(gpu="l4", usd_per_hour=1.0))
    # The price at which the l4's shortest steps cost what the a10's longest do.
    parted = base.bill.extremes[1].usd / other.bill.extremes[0].usd
    even = base.bill.usd / other.bill.usd
    for price, tied in ((1.01 * even, ["l4"]), (0.99 * parted, ["l4"]), (1.01 * parted, [])):
        rival = a_card("l4", an_offer(gpu="l4", usd_per_hour=price))
        answer = answered(base, rival)
        assert answer.cheapest is base
        assert [card.gpu.name for card in answer.perhaps_cheapest] == tied


def test_a_card_without_a_price_or_without_a_rule_that_allows_it_says_so() -> None:
    config = TrialConfig(compute_dtype="bf16", effective_batch_size=16)
    old = on_card(config, a_forecaster(gpu="t4"), **TERMS)
    assert (old.outcome, old.forecast) == (Outcome.FORBIDDEN, None)
    assert "bf16" in old.reason
    dear = on_card(the_job("a10"), a_forecaster(), **TERMS | {"offers": []})
    assert dear.outcome is Outcome.NO_PRICE
    assert dear.forecast is not None


def test_a_model_that_cannot_be_traced_is_an_error_and_not_too_large() -> None:
    untraceable = a_forecaster(predictor=ImaginedPredictor(fault=Untraceable("data decides")))
    with pytest.raises(InputError, match="data decides"):
        on_card(the_job("a10"), untraceable, **TERMS)
