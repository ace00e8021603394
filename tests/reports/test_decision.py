"""The first screen says what to take for speed, money, memory or capacity, and how surely."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
import yaml

from reports.decision import CAPACITY, CHEAPEST, CLASS, MEMORY, Card, Decision, Job, decision_of
from reports.page import render
from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GIB
from search_spaces.prices import Offer
from storage.definition import StudySnapshot, TargetSpeed
from storage.records import OutOfMemory, PrunedSlow, TrialRecord
from tests.reports.synthetic import definition, fits, measurement, record, snapshot
from tests.storage.builders import confirmed

OFFER = Offer(
    gpu="a10", provider="Lender", usd_per_hour=3.6, date=date(2026, 7, 1), source="their page"
)
SPACE = {
    "dimensions": {
        "lora_rank": {"choices": [8, 16, 64]},
        "micro_batch_size": {"choices": [2, 4, 8, 10]},
    },
    "fixed": {},
    "baseline": {"micro_batch_size": 8},
}
BASE = fits(0, 8_000.0, TrialConfig(micro_batch_size=8), peak_allocated_bytes=8 * GIB)
OWN = fits(1, 16_000.0, TrialConfig(micro_batch_size=10), peak_allocated_bytes=20 * GIB)
SMALL = fits(
    2,
    18_000.0,
    TrialConfig(lora_rank=8, micro_batch_size=10),
    peak_allocated_bytes=19 * GIB,
    trainable_parameters=1_000_000,
)
FRUGAL = fits(
    3,
    17_000.0,
    TrialConfig(lora_rank=8, micro_batch_size=4),
    peak_allocated_bytes=10 * GIB,
    trainable_parameters=1_000_000,
)
LARGE = fits(
    4,
    12_000.0,
    TrialConfig(lora_rank=64, micro_batch_size=4),
    peak_allocated_bytes=15 * GIB,
    trainable_parameters=50_000_000,
)
ALL = (BASE, OWN, SMALL, FRUGAL, LARGE)


def study(
    *records: TrialRecord, space: dict[str, Any] | None = None, target: Any = None, **values: Any
) -> StudySnapshot:
    about = definition(space=SPACE | (space or {}), **({"emulated_on": None} | (target or {})))
    return snapshot(records, definition=about, **({"offer": OFFER} | values))


def of(decision: Decision) -> dict[str, int]:
    return {card.title: card.number for card in decision.cards}


def card(decision: Decision, title: str) -> Card:
    return next(card for card in decision.cards if card.title == title)


def test_each_question_has_its_own_answer() -> None:
    decision = decision_of(study(*ALL))
    assert of(decision) == {CLASS: 1, CHEAPEST: 2, MEMORY: 3, CAPACITY: 4}
    assert decision.lines == ()
    own = card(decision, CLASS)
    assert own.meaning == "rank 16 on q,k,v,o, as the baseline"
    assert (own.speed, own.unit) == ("16,000", "tokens/s on a10")
    assert own.basis == "measured 15,842–16,162"
    assert own.measured == ""
    # A dollar buys 3.6 s per thousandth: $3.6 an hour is $0.001 a second.
    assert (own.dollars, own.dollars_detail) == ("$0.0625", "$0.0619–0.0631")
    assert (own.peak, own.margin) == ("20.00 GiB", "of 21.50 GiB, 1.50 GiB left")
    assert own.memory_share == pytest.approx(20 / 21.5)
    assert own.configuration == "10 x 512, bf16 compute"
    assert decision.price == "a10 Lender at $3.60 an hour, as of 2026-07-01"


def test_what_was_not_measured_again_is_scaled_to_what_was() -> None:
    """A machine that got slower by half makes nothing else the fastest, nor much slower."""
    slower = fits(2, 9_000.0, SMALL.config, peak_allocated_bytes=19 * GIB).outcome
    later = [run.model_copy(update={"outcome": slower}) for run in confirmed(SMALL)]
    decision = decision_of(study(*ALL, confirmations=tuple(later)))
    assert of(decision)[MEMORY] == 3
    assert card(decision, CHEAPEST).basis == "measured 8,936–9,064"
    assert card(decision, MEMORY).basis.endswith(", scaled from the search")


def test_what_answers_two_questions_has_one_card_and_a_line() -> None:
    decision = decision_of(study(BASE, OWN))
    assert of(decision) == {CLASS: 1}
    assert [line.title for line in decision.lines] == [CHEAPEST, MEMORY, CAPACITY]
    assert all(line.text.startswith("trial 1 as well; ") for line in decision.lines)


def test_where_nothing_of_the_class_was_measured_the_baseline_stands_for_it() -> None:
    space = {"dimensions": SPACE["dimensions"] | {"lora_rank": {"choices": [8]}}}
    own = card(decision_of(study(BASE, SMALL, space=space)), CLASS)
    assert (own.number, own.gain, own.gain_detail) == (0, "1x", "the baseline itself")
    assert own.meaning == "rank 16 on q,k,v,o: only the baseline was measured"
    lost = record(0, OutOfMemory(stage="load"), BASE.config, is_baseline=True)
    decision = decision_of(study(lost, SMALL, space=space))
    assert CLASS not in of(decision)
    assert decision.lines[0].text.endswith("nothing of it was measured to fit")


def test_the_largest_that_fitted_may_be_the_baseline_or_what_was_stopped_as_slow() -> None:
    space = {"dimensions": SPACE["dimensions"] | {"lora_rank": {"choices": [8, 64]}}}
    own = BASE.config.model_copy(update={"lora_rank": 64})
    small = fits(2, 9_000.0, SMALL.config, trainable_parameters=1_000)
    assert of(decision_of(study(BASE, small, space=space)))[CLASS] == 0
    lines = {line.title: line.text for line in decision_of(study(BASE, small, space=space)).lines}
    assert lines[CAPACITY].startswith("trial 0 as well; 13,631,488 trainable parameters")
    slow = PrunedSlow(measurement=measurement(3_000.0, trainable_parameters=54_525_952))
    decision = decision_of(study(BASE, small, record(5, slow, own), space=space))
    large = card(decision, CAPACITY)
    assert large.number == 5
    assert large.meaning.endswith("the most that fitted, stopped as too slow")


def test_where_nothing_fits_the_first_screen_says_what_it_would_take() -> None:
    lost = record(0, OutOfMemory(stage="load"), BASE.config, is_baseline=True)
    decision = decision_of(study(lost))
    assert decision.cards == ()
    assert any("Less memory" in sentence for sentence in decision.advice)
    assert decision_of(study(BASE, OWN)).advice == ()
    assert decision_of(study()).advice == ()


def test_memory_is_not_bought_with_more_speed_than_is_said() -> None:
    slow = fits(3, 16_100.0, FRUGAL.config, peak_allocated_bytes=10 * GIB)
    assert "at most 10 % slower" in card(decision_of(study(*ALL)), MEMORY).meaning
    decision = decision_of(study(BASE, OWN, SMALL, slow))
    assert MEMORY not in of(decision)
    assert next(line for line in decision.lines if line.title == MEMORY).text.startswith("trial 2")


def on_another_card(
    *records: TrialRecord, speeds: dict[int, float], **values: Any
) -> StudySnapshot:
    known = {
        n: TargetSpeed(speed, speed / 2, speed * 2, "predicted") for n, speed in speeds.items()
    }
    return study(*records, target={"emulated_on": "NVIDIA H200"}, target_speeds=known, **values)


def test_the_target_cards_speed_comes_first_and_the_measured_one_stands_beside_it() -> None:
    speeds = {0: 800.0, 1: 1_600.0, 2: 1_650.0}
    decision = decision_of(on_another_card(BASE, OWN, SMALL, speeds=speeds))
    own = card(decision, CLASS)
    assert (own.speed, own.basis) == ("1,600", "predicted 800–3,200")
    assert own.measured == "measured on NVIDIA H200: 16,000"
    assert own.dollars == "$0.625"
    assert "1,650 tokens/s predicted on an A10 (18,000 on the H200)" in decision.headline
    assert any("NVIDIA H200" in note for note in decision.notes)


@pytest.mark.parametrize(("own_speed", "cheapest"), [(1_660.0, 2), (1_800.0, 1)])
def test_the_cheapest_is_another_only_where_its_predicted_speed_is_clearly_higher(
    own_speed: float, cheapest: int
) -> None:
    speeds = {0: 800.0, 1: own_speed, 2: 1_650.0}
    decision = decision_of(on_another_card(BASE, OWN, SMALL, speeds=speeds))
    found = of(decision).get(CHEAPEST) or 1
    assert found == cheapest


def test_memory_is_not_bought_with_a_class_of_numerics_that_is_slower_on_the_target() -> None:
    rounded = TrialConfig(micro_batch_size=8, compute_dtype="int8")
    fast = fits(1, 12_000.0, rounded, peak_allocated_bytes=19 * GIB)
    lean = fits(2, 16_000.0, TrialConfig(micro_batch_size=4), peak_allocated_bytes=5 * GIB)
    dimensions = SPACE["dimensions"] | {"compute_dtype": {"choices": ["bf16", "int8"]}}
    speeds = {0: 800.0, 1: 1_600.0, 2: 1_000.0}
    records = BASE, fast, lean
    found = decision_of(on_another_card(*records, speeds=speeds, space={"dimensions": dimensions}))
    (line,) = (line for line in found.lines if line.title == MEMORY)
    assert line.text.startswith("trial 1 as well")


def test_without_a_prediction_only_what_was_measured_is_said() -> None:
    decision = decision_of(on_another_card(BASE, OWN, speeds={}))
    own = card(decision, CLASS)
    assert (own.speed, own.basis, own.dollars, own.job) == ("–", "not predicted", "", "")
    assert own.measured == "measured on NVIDIA H200: 16,000"
    cheapest = next(line for line in decision.lines if line.title == CHEAPEST)
    assert cheapest.text == "the speed on a10, and with it the cost, is not predicted"


def test_without_a_price_there_are_no_dollars_and_the_time_stays() -> None:
    cpu = {"gpu": "cpu", "device": "cpu"}
    decision = decision_of(study(BASE, OWN, target=cpu, offer=None))
    own = card(decision, CLASS)
    assert (own.dollars, own.usd_per_million_tokens) == ("", None)
    assert own.job == "10 min"
    assert decision.price == ""
    assert CHEAPEST not in {one.title for one in (*decision.cards, *decision.lines)}


def test_a_gain_is_within_the_class_or_it_is_said_why_there_is_none() -> None:
    recipe = TrialConfig(lora_rank=8, micro_batch_size=8)
    errand = {"purpose": "confirm", "series": 1, "confirms": None}
    again = [
        fits(900 + n, 9_000.0, recipe).model_copy(update=errand | {"is_baseline": False})
        for n in range(2)
    ]
    runs = (*confirmed(BASE, OWN, SMALL), *again)
    decision = decision_of(study(*ALL, confirmations=runs))
    assert card(decision, CLASS).gain == "2.0x"
    assert card(decision, CLASS).gain_detail.startswith("the baseline (1.9")
    cheapest = card(decision, CHEAPEST)
    assert cheapest.gain == "2.0x"
    assert cheapest.gain_detail.startswith("the baseline at rank 8 on q,k,v,o (1.9")
    frugal, large = card(decision, MEMORY), card(decision, CAPACITY)
    # By its speed in the search.
    assert frugal.gain == "1.9x"
    assert (large.gain, large.gain_detail) == (
        "",
        "The baseline at rank 64 on q,k,v,o was not measured.",
    )
    assert "18,000 tokens/s, " in decision.headline
    assert ", 2.0x the baseline at rank 8 on q,k,v,o." in decision.headline
    assert decision.command == ""


def test_the_headline_is_one_recommendation_and_what_is_as_fast_stands_below() -> None:
    twin = fits(3, 17_950.0, FRUGAL.config, peak_allocated_bytes=10 * GIB)
    trials = (BASE, OWN, SMALL, twin)
    decision = decision_of(study(*trials, confirmations=confirmed(*trials)))
    assert decision.headline.startswith("The fastest configuration that fits is trial 2, 10 x 512,")
    assert decision.alike == "Trial 3 is as fast and has memory to spare (10.00 GiB)."
    assert decision.command == ""
    unsure = decision_of(study(*trials))
    assert unsure.headline.startswith("The fastest configuration measured so far is trial 2")
    assert (unsure.alike, unsure.command) == ("", "sweep confirm a10-mistral")


@pytest.mark.parametrize(
    ("records", "headline"),
    [
        pytest.param((), "No trial has finished yet.", id="nothing"),
        pytest.param(
            (record(0, OutOfMemory(stage="forward"), is_baseline=True),),
            "Nothing that was tried was measured to fit in 21.50 GiB.",
            id="all-oom",
        ),
    ],
)
def test_without_anything_that_fits_there_is_no_card(
    records: tuple[TrialRecord, ...], headline: str
) -> None:
    decision = decision_of(study(*records))
    assert (decision.headline, decision.cards, decision.lines) == (headline, (), ())
    assert (decision.alike, decision.command) == ("", "")
    assert headline in render(study(*records))


def test_a_single_trial_answers_everything_on_one_card() -> None:
    decision = decision_of(study(BASE))
    assert of(decision) == {CLASS: 0}
    assert len(decision.lines) == 3


def test_of_several_objectives_the_compromise_comes_first() -> None:
    both = {"objectives": ["tokens_per_second", "peak_memory"]}
    decision = decision_of(study(*ALL, space=both))
    assert decision.cards[0].title == "Best compromise"
    assert "speed and peak memory" in decision.cards[0].meaning
    assert CLASS in of(decision)
    least = decision_of(study(*ALL, space={"objectives": ["peak_memory"]}))
    assert (least.cards[0].title, least.cards[0].number) == ("Least memory", 0)


def test_what_a_training_costs_follows_the_tokens_asked_for() -> None:
    assert card(decision_of(study(BASE, OWN)), CLASS).job == "$0.625 ($0.619–0.631), 10 min"
    asked = Job(tokens=2e9, epochs=3).priced(study(BASE, OWN))
    assert card(decision_of(asked), CLASS).job == "$375.00 ($371.25–378.75), 104.2 h"
    rows = Job(dataset_samples=1000).priced(study(BASE, OWN))
    assert rows.job_tokens == 512_000


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        ({"tokens": 0}, "tokens must be greater than 0"),
        ({"tokens": 5, "dataset_samples": 5}, "both say how large"),
        ({"epochs": 2}, "of what"),
    ],
)
def test_a_job_that_cannot_be_is_refused(typed: dict[str, float], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Job(**typed)


def test_what_is_marked_is_said_in_words() -> None:
    flags = ("emulated", "throttled", "neighbour", "something_new")
    marked = fits(1, 16_000.0, OWN.config, flags=flags)
    said = card(decision_of(study(BASE, marked)), CLASS).flags
    assert said == "slowed by a power or heat limit, another process shared the GPU, something new"


def test_recipes_are_whole_and_the_command_is_quoted() -> None:
    decision = decision_of(replace(study(BASE, OWN), name="it's"))
    command, as_json, as_yaml = card(decision, CLASS).recipes
    assert command.text == "sweep export 'it'\"'\"'s' --format script --trial 1"
    assert TrialConfig(**json.loads(as_json.text)) == OWN.config
    assert TrialConfig(**yaml.safe_load(as_yaml.text)) == OWN.config
