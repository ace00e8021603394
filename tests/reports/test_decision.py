"""The first screen says what to take, what to take instead for memory or money, and how surely."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
import yaml

from reports.decision import Card, decision_of
from reports.page import render
from search_spaces.config import TrialConfig
from search_spaces.costs import AskedWork
from search_spaces.gpus import GIB
from search_spaces.prices import Offer
from storage.definition import StudySnapshot, TargetSpeed
from storage.records import OutOfMemory, TrialRecord
from tests.reports.on_texts import SHORT, of_texts, trained
from tests.reports.synthetic import definition, fits, record, snapshot

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


MEMORY = "Most memory left, at most 10 % slower than the fastest"
CLASS = "Fastest at rank 16 on q,k,v,o, as the baseline"


def the_card(known: StudySnapshot, **work: float) -> Card:
    card = decision_of(known, AskedWork(**work)).card  # type: ignore[arg-type]
    assert card is not None
    return card


def instead(known: StudySnapshot) -> dict[str, str]:
    """Return what else may be taken, by why."""
    lines = decision_of(known).lines
    return {title: text for titles, text in lines for title in titles.split("; ")}


def test_the_answer_has_a_card_and_what_to_take_instead_a_line() -> None:
    known = study(*ALL)
    card, decision = the_card(known), decision_of(known)
    assert card.number == 2
    facts = dict(card.facts)
    assert facts["speed"] == "18,000 tokens/s (17,822–18,182)"
    # A dollar buys 3.6 s per thousandth: $3.6 an hour is $0.001 a second.
    assert facts["cost"].startswith("$0.0556 per million tokens ($0.0550–0.0561; a10 Lender at ")
    assert facts["memory"] == "19.00 GiB of 21.50 GiB (88 %)"
    assert card.memory_share == pytest.approx(19 / 21.5)
    assert (decision.price_source, decision.command) == ("their page", "sweep confirm a10-mistral")
    lines = instead(known)
    assert list(lines) == [CLASS, MEMORY]
    assert lines[CLASS].startswith(
        "trial 1: 16,000 tokens/s (15,842–16,162); 20.00 GiB; gain 2.0x the baseline"
    )
    assert lines[MEMORY].startswith("trial 3: 17,000 tokens/s")
    assert instead(study(BASE, OWN)) == {}


def test_where_nothing_of_the_class_was_measured_the_baseline_stands_for_it() -> None:
    space = {"dimensions": SPACE["dimensions"] | {"lora_rank": {"choices": [8]}}}
    known = study(BASE, SMALL, space=space)
    assert instead(known)[CLASS].startswith("trial 0: 8,000 tokens/s")
    lost = record(0, OutOfMemory(stage="load"), BASE.config, is_baseline=True)
    assert instead(study(lost, SMALL, space=space)) == {}


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
def test_without_anything_that_fits_there_is_what_it_would_take(
    records: tuple[TrialRecord, ...], headline: str
) -> None:
    decision = decision_of(study(*records))
    assert (decision.headline, decision.card, decision.lines) == (headline, None, ())
    assert any("Less memory" in sentence for sentence in decision.advice) is bool(records)
    assert headline in render(study(*records))
    assert decision_of(study(BASE, OWN)).advice == ()


def test_memory_is_not_bought_with_more_speed_than_is_said() -> None:
    slow = fits(3, 16_100.0, FRUGAL.config, peak_allocated_bytes=10 * GIB)
    assert MEMORY not in instead(study(BASE, OWN, SMALL, slow))


def on_another_gpu(*records: TrialRecord, speeds: dict[int, float], **values: Any) -> StudySnapshot:
    known = {
        n: TargetSpeed(speed, speed / 2, speed * 2, "predicted") for n, speed in speeds.items()
    }
    return study(*records, target={"emulated_on": "NVIDIA H200"}, target_speeds=known, **values)


def test_the_target_gpus_speed_comes_first_and_the_measured_one_stands_beside_it() -> None:
    speeds = {0: 800.0, 1: 1_600.0, 2: 1_650.0}
    decision = decision_of(on_another_gpu(BASE, OWN, SMALL, speeds=speeds))
    assert decision.card is not None
    own = "measured on NVIDIA H200: 18,000, 17,822–18,182"
    speed = f"1,650 tokens/s on a10 (predicted 825–3,300; {own})"
    assert dict(decision.card.facts)["speed"] == speed
    assert any("NVIDIA H200" in note for note in decision.notes)


@pytest.mark.parametrize(("own_speed", "is_cheaper"), [(1_660.0, False), (1_800.0, True)])
def test_another_is_cheaper_only_where_its_predicted_speed_is_clearly_higher(
    own_speed: float, is_cheaper: bool
) -> None:
    speeds = {0: 800.0, 1: own_speed, 2: 1_650.0}
    lines = instead(on_another_gpu(BASE, OWN, SMALL, speeds=speeds))
    assert ("Cheapest per token" in lines) is is_cheaper


def test_memory_is_not_bought_with_a_class_of_numerics_that_is_slower_on_the_target() -> None:
    rounded = TrialConfig(micro_batch_size=8, compute_dtype="int8")
    fast = fits(1, 12_000.0, rounded, peak_allocated_bytes=19 * GIB)
    lean = fits(2, 16_000.0, TrialConfig(micro_batch_size=4), peak_allocated_bytes=5 * GIB)
    dimensions = SPACE["dimensions"] | {"compute_dtype": {"choices": ["bf16", "int8"]}}
    speeds = {0: 800.0, 1: 1_600.0, 2: 1_000.0}
    space = {"dimensions": dimensions}
    assert MEMORY not in instead(on_another_gpu(BASE, fast, lean, speeds=speeds, space=space))


def test_without_a_prediction_only_what_was_measured_is_said() -> None:
    facts = dict(the_card(on_another_gpu(BASE, OWN, speeds={})).facts)
    assert facts["speed"] == "16,000 tokens/s measured on NVIDIA H200; not predicted on a10"
    assert not facts.keys() & {"cost", "training"}


def test_without_a_price_there_are_no_dollars_and_the_time_stays() -> None:
    known = study(BASE, OWN, target={"gpu": "cpu", "device": "cpu"}, offer=None)
    facts = dict(the_card(known).facts)
    assert "cost" not in facts
    assert facts["training"].startswith("10,000,000 tokens: 10 min")
    assert "$" not in facts["training"]


def test_of_other_objectives_the_fastest_is_named_beside_the_answer() -> None:
    known = study(*ALL, space={"objectives": ["peak_memory"]})
    assert the_card(known).number == 0
    assert instead(known)["Fastest"].startswith("trial 2: ")


def test_what_a_training_costs_follows_the_work_asked_for() -> None:
    known = study(BASE, OWN)

    def told(**work: float) -> str:
        return dict(the_card(known, **work).facts)["training"]

    # 2,442 whole steps of 4,096 tokens, and a second that was begun is paid for.
    assert told() == (
        "10,000,000 tokens: 10 min 25 s (10 min 19 s to 10 min 32 s), $0.626 ($0.620 to $0.632) "
        "in all"
    )
    asked = told(tokens=2e9, epochs=3)
    assert asked.startswith("3 epochs of 2,000,000,000 tokens: 104 h 10 min ")
    assert asked.endswith(", $375.00 ($371.25 to $378.75) in all")
    assert told(dataset_samples=1000).startswith("1,000 sequences of full length: 32.0 s")
    of_dataset = the_card(of_texts(trained(0, 8_000.0, SHORT)))
    assert dict(of_dataset.facts)["training"].startswith("2,880,000 tokens: 6 min 0 s")


def test_a_speed_without_an_interval_is_priced_without_one() -> None:
    few = {"steps_measured": 3, "step_seconds_ci95": None}
    known = study(fits(0, 16_000.0, BASE.config, **few))
    told = dict(the_card(known).facts)["training"]
    assert told == "10,000,000 tokens: 10 min 25 s, $0.626 in all"


def test_a_bill_has_its_minimum_and_the_whole_machine() -> None:
    terms = {"gpus": 8, "minimum_seconds": 3600.0, "boot_seconds": 60.0}
    known = study(BASE, OWN, offer=OFFER.model_copy(update=terms))
    told = dict(the_card(known, dataset_samples=1000).facts)["training"]
    assert told.endswith(", $28.80 ($28.80 to $28.80) in all")


def test_what_is_marked_is_said_in_words() -> None:
    flags = ("emulated", "throttled", "neighbour", "something_new")
    marked = fits(1, 16_000.0, OWN.config, flags=flags)
    words = "slowed by a power or heat limit, another process shared the GPU, something new"
    assert the_card(study(BASE, marked)).what.endswith(f"; {words}")


def test_recipes_are_whole_and_the_command_is_quoted() -> None:
    recipes = dict(the_card(replace(study(BASE, OWN), name="it's")).recipes)
    assert recipes["command"] == "sweep export 'it'\"'\"'s' --format script --trial 1"
    assert TrialConfig(**json.loads(recipes["JSON"])) == OWN.config
    assert TrialConfig(**yaml.safe_load(recipes["YAML"])) == OWN.config
