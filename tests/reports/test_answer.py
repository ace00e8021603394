"""What is said of a study's answer: what to take, what it gained and costs, how sure it is.

How whole studies are worded is among the golden answers; here is what decides what is said.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
import yaml

from qlora_sweep.reports.advice import how_to_go_faster
from qlora_sweep.reports.answer import facts, headline
from qlora_sweep.reports.confirmed_rows import confirmed_rows
from qlora_sweep.reports.decision import Choice, decision_of
from qlora_sweep.reports.page import render
from qlora_sweep.reports.sections import texts_of
from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.costs import AskedWork
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.storage.definition import StudySnapshot, TargetSpeed
from qlora_sweep.storage.ranking import rank_study
from qlora_sweep.storage.records import (
    Crashed,
    Outcome,
    OutOfMemory,
    TrialRecord,
)
from tests.reports.synthetic import (
    HOSTILE,
    LONG,
    SHORT,
    TARGET,
    about_loss,
    definition,
    fits,
    learned,
    of_dataset,
    predicted,
    record,
    snapshot,
    trained,
)
from tests.storage.builders import changed, confirmed
from tests.sweep.prepared_dataset import a_summary

FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)
SLOW = TrialConfig(micro_batch_size=12)
LARGE = TrialConfig(micro_batch_size=12, checkpoint_fraction=0.0)
TRIALS = (fits(0, 8_000.0), fits(1, 16_800.0, FAST), fits(2, 9_000.0, SLOW))
OOM = OutOfMemory(stage="forward")
OFFER = Offer(
    gpu="a10", provider="Lender", usd_per_hour=3.6, date=date(2026, 7, 1), source="their page"
)
RANKS: dict[str, Any] = {
    "dimensions": {
        "lora_rank": [8, 16, 64],
        "micro_batch_size": [2, 4, 8, 10],
    },
    "fixed": {},
    "baseline": {"micro_batch_size": 8},
}


def said(study: StudySnapshot) -> dict[str, str]:
    return dict(facts(view_of(study)))


def opening(study: StudySnapshot) -> str:
    return headline(view_of(study))


def again(*records: TrialRecord, **values: Any) -> StudySnapshot:
    return snapshot(records, confirmations=confirmed(*records), **values)


def with_soak(study: StudySnapshot, outcome: Outcome) -> StudySnapshot:
    runs = tuple(
        changed(run, outcome=outcome) if run.purpose == "soak" and run.confirms == 1 else run
        for run in study.confirmations
    )
    return replace(study, confirmations=runs)


# How sure it is


def test_a_trial_that_ran_out_of_memory_in_its_soak_is_not_recommended() -> None:
    study = with_soak(again(*TRIALS), OOM)
    assert "is trial 2, " in opening(study)
    assert "Trial 1 " in said(study)["sure"]
    results = {row.number: row.result for row in confirmed_rows(view_of(study))}
    assert results["1"] == "ran out of memory in its soak"


def test_one_trial_is_recommended_and_ties_are_named_after_it() -> None:
    twin = fits(2, 16_810.0, SLOW, peak_allocated_bytes=21 * GIB)
    study = again(*TRIALS[:2], twin)
    assert "is trial 1, " in opening(study)
    assert said(study)["sure"].endswith("trial 2 (21.00 GiB)")
    results = [(row.number, row.result) for row in confirmed_rows(view_of(study))]
    assert results == [("1", "recommended"), ("2", "as fast"), ("0", "baseline")]


# What to take, and what instead

BASE = fits(0, 8_000.0, TrialConfig(micro_batch_size=8), peak_allocated_bytes=8 * GIB)
OWN = fits(1, 16_000.0, TrialConfig(micro_batch_size=10), peak_allocated_bytes=20 * GIB)
SMALL = fits(
    2, 18_000.0, TrialConfig(lora_rank=8, micro_batch_size=10), peak_allocated_bytes=19 * GIB
)
FRUGAL = fits(
    3, 17_000.0, TrialConfig(lora_rank=8, micro_batch_size=4), peak_allocated_bytes=10 * GIB
)
MEMORY = "Most memory left, at most 10 % slower than the fastest"


def study(
    *records: TrialRecord, space: dict[str, Any] | None = None, target: Any = None, **values: Any
) -> StudySnapshot:
    about = definition(space=RANKS | (space or {}), **({"emulated_on": None} | (target or {})))
    return snapshot(records, definition=about, **({"offer": OFFER} | values))


def the_choice(known: StudySnapshot, **work: float) -> Choice:
    return decision_of(view_of(known), AskedWork(**work)).choice  # type: ignore[arg-type]


def instead(known: StudySnapshot) -> dict[str, str]:
    """Return the number of each other trial that may be taken, by why."""
    found: dict[str, str] = {}
    for titles, text in decision_of(view_of(known)).alternatives:
        for title in titles.split("; "):
            found[title] = text.partition(":")[0]
    return found


def test_the_choice_has_its_speed_cost_and_memory_and_alternatives_beside_it() -> None:
    frugal = fits(4, 15_000.0, TrialConfig(micro_batch_size=4), peak_allocated_bytes=10 * GIB)
    known = study(BASE, OWN, SMALL, FRUGAL, frugal)
    choice = the_choice(known)
    # It is of the baseline's class, though a smaller adapter is faster.
    assert choice.number == 1
    told = dict(choice.facts)
    assert told["speed"] == "16,000 tokens/s (15,842–16,162)"
    # $3.6 an hour is $0.001 a second.
    assert told["cost"].startswith("$0.0625 per million tokens ($0.0619–0.0631; ")
    assert told["memory"] == "20.00 GiB of 21.50 GiB (93 %)"
    assert instead(known) == {
        "Fastest": "trial 2",
        "Cheapest per token": "trial 2",
        MEMORY: "trial 4",
    }


def test_without_a_better_trial_in_any_way_there_is_no_alternative() -> None:
    assert instead(study(BASE, OWN)) == {}
    slow = fits(4, 14_300.0, TrialConfig(micro_batch_size=4), peak_allocated_bytes=10 * GIB)
    assert MEMORY not in instead(study(BASE, OWN, SMALL, slow)), "more than 10 % slower"


def test_the_fastest_of_the_baselines_class_is_an_alternative() -> None:
    space = {"dimensions": RANKS["dimensions"] | {"lora_rank": [8]}}
    title = "Fastest at rank 16 on q,k,v,o, as the baseline"
    assert instead(study(BASE, SMALL, space=space))[title] == "trial 0"
    lost = record(0, OutOfMemory(stage="load"), BASE.config, is_baseline=True)
    assert instead(study(lost, SMALL, space=space)) == {}
    of_memory = study(BASE, OWN, SMALL, FRUGAL, space={"objectives": ["peak_memory"]})
    assert the_choice(of_memory).number == 0
    assert instead(of_memory)["Fastest"] == "trial 2"


def on_another_gpu(*records: TrialRecord, speeds: dict[int, float], **values: Any) -> StudySnapshot:
    known = {n: TargetSpeed(at, at / 2, at * 2, "predicted") for n, at in speeds.items()}
    return study(*records, target={"emulated_on": "NVIDIA H200"}, target_speeds=known, **values)


def test_the_target_gpus_speed_comes_first_and_the_measured_one_stands_beside_it() -> None:
    speeds = {0: 800.0, 1: 1_600.0, 2: 1_650.0}
    speed = dict(the_choice(on_another_gpu(BASE, OWN, SMALL, speeds=speeds)).facts)["speed"]
    assert speed.startswith("1,600 tokens/s on a10 (predicted 800–3,200; ")
    assert "NVIDIA H200: 16,000, 15,842–16,162" in speed
    bare = dict(the_choice(on_another_gpu(BASE, OWN, speeds={})).facts)
    assert bare["speed"].startswith("16,000 tokens/s measured on NVIDIA H200")
    assert not bare.keys() & {"cost", "training"}
    # Another is cheaper only where the intervals of the predicted speeds are apart.
    for small, is_cheaper in ((6_300.0, False), (6_500.0, True)):
        lines = instead(on_another_gpu(BASE, OWN, SMALL, speeds=speeds | {2: small}))
        assert ("Cheapest per token" in lines) is is_cheaper


def test_memory_is_not_bought_with_a_class_of_numerics_that_is_slower_on_the_target() -> None:
    rounded = TrialConfig(micro_batch_size=8, compute_dtype="int8")
    fast = fits(1, 12_000.0, rounded, peak_allocated_bytes=19 * GIB)
    lean = fits(2, 16_000.0, TrialConfig(micro_batch_size=4), peak_allocated_bytes=5 * GIB)
    dimensions = RANKS["dimensions"] | {"compute_dtype": ["bf16", "int8"]}
    speeds = {0: 800.0, 1: 1_600.0, 2: 1_000.0}
    known = on_another_gpu(BASE, fast, lean, speeds=speeds, space={"dimensions": dimensions})
    assert MEMORY not in instead(known)


@pytest.mark.parametrize(
    ("work", "offer", "told"),
    [
        # 2,442 whole steps of 4,096 tokens; a second that was begun is paid for.
        ({}, {}, ("10,000,000 tokens", "10 min 25 s (10 min 19 s to 10 min 32 s)", "$0.626 ")),
        ({"tokens": 2e9, "epochs": 3}, {}, ("3 epochs", "104 h 10 min", "$375.00")),
        ({"dataset_samples": 1000}, {}, ("1,000 sequences", "32.0 s")),
        (
            {"dataset_samples": 1000},
            {"gpus": 8, "minimum_seconds": 3600.0, "boot_seconds": 60.0},
            ("$28.80 ($28.80 to $28.80)",),
        ),
    ],
)
def test_what_a_training_takes_and_costs_follows_the_work_and_the_offer(
    work: dict[str, Any], offer: dict[str, Any], told: tuple[str, ...]
) -> None:
    known = study(BASE, OWN, offer=OFFER.model_copy(update=offer))
    training = dict(the_choice(known, **work).facts)["training"]
    for words in told:
        assert words in training


def test_a_training_without_a_price_has_its_time_alone() -> None:
    free = study(BASE, OWN, target={"gpu": "cpu", "device": "cpu"}, offer=None)
    training = dict(the_choice(free).facts)["training"]
    assert training.startswith("10,000,000 tokens: 10 min")
    assert "$" not in training


def test_marks_of_a_measurement_are_told_and_its_recipes_are_whole() -> None:
    flags = ("emulated", "throttled", "something_new")
    marked = study(BASE, fits(1, 16_000.0, OWN.config, flags=flags))
    choice = the_choice(replace(marked, name="it's"))
    assert choice.what.endswith("heat limit, something new")
    recipes = dict(choice.recipes)
    assert recipes["command"] == "sweep export 'it'\"'\"'s' --format script --trial 1"
    assert TrialConfig(**json.loads(recipes["JSON"])) == OWN.config
    assert TrialConfig(**yaml.safe_load(recipes["YAML"])) == OWN.config


# How to go faster


def advised(*records: TrialRecord, **values: Any) -> str:
    return "\n".join(how_to_go_faster(view_of(snapshot(records, **values))))


@pytest.mark.parametrize(
    ("need", "speed", "objective", "is_named"),
    [
        (23.0, 17_000.0, "tokens_per_second", True),
        # It is slower, or speed was not asked for.
        (30.0, 15_000.0, "tokens_per_second", False),
        (23.0, 9e9, "peak_memory", False),
    ],
)
def test_a_faster_configuration_that_did_not_fit_is_named_with_its_speed_and_its_excess(
    need: float, speed: float, objective: str, is_named: bool
) -> None:
    too_large = record(2, OutOfMemory(stage="backward"), LARGE, prediction=predicted(need, speed))
    about = definition(space={"objectives": [objective]})
    text = advised(*TRIALS[:2], too_large, definition=about)
    assert ("trial 2 (micro-batch 12, no checkpointing)" in text) is is_named
    assert ("17,000 tokens/s" in text) is is_named
    assert ("at least 1.50 GiB more" in text) is is_named


def test_the_nearest_to_fitting_is_so_by_prediction_and_not_by_what_happened_to_fail() -> None:
    late = OutOfMemory(stage="optimizer", peak_allocated_bytes=21 * GIB, requested_bytes=GIB // 8)
    early = OutOfMemory(stage="load", peak_allocated_bytes=5 * GIB, requested_bytes=4 * GIB)
    far = record(1, late, LARGE, prediction=predicted(25.0))
    near = record(2, early, FAST, prediction=predicted(23.0))
    text = advised(TRIALS[0], far, near)
    assert "nearest to fitting: trial 2" in text
    assert "at least 1.50 GiB more" in text
    # Without a prediction, or with one below the budget, nothing is said of a need.
    for prediction in (None, predicted(20.5)):
        unknown = advised(TRIALS[0], record(1, late, LARGE, prediction=prediction))
        assert "by how much is not known" in unknown
        assert "GiB" not in unknown


def test_a_wider_space_is_advised_where_the_winner_has_its_largest_micro_batch() -> None:
    widest = fits(1, 16_000.0, TrialConfig(micro_batch_size=32))
    assert "(32)" in advised(TRIALS[0], widest)
    whole = fits(1, 16_000.0, TrialConfig(micro_batch_size=32, effective_batch_size=32))
    fixed = {"lora_rank": 16, "target_modules": "attention", "effective_batch_size": 32}
    assert "A wider" not in advised(whole, definition=definition(space={"fixed": fixed}))
    text = advised(*TRIALS, record(3, Crashed(phase="build"), LARGE))
    assert "A wider" not in text
    assert "4 of the 360 configurations" in text
    assert "1 trial crashed" in text


@pytest.mark.parametrize(
    ("lost", "longest", "is_advised"),
    [
        ({"rows_cut": 3}, None, True),
        ({"rows_cut": 0, "rows_left_out": 5}, None, True),
        ({"rows_cut": 0, "rows_left_out": 0}, None, False),
        # The model takes no longer ones.
        ({"rows_cut": 3}, LONG.seq_len, False),
    ],
)
def test_a_greater_length_is_advised_only_where_examples_are_cut_or_left_out(
    lost: dict[str, int], longest: int | None, is_advised: bool
) -> None:
    known = of_dataset(trained(0, 8_000.0, LONG, **lost))
    if longest is not None:
        limited = known.definition.model | {"config": {"max_position_embeddings": longest}}
        about = changed(known.definition, model=limited)
        known = replace(known, definition=about)
    text = "\n".join(how_to_go_faster(view_of(known)))
    assert ("seq_len" in text) is is_advised


# A dataset


def test_an_epoch_is_its_loss_tokens_over_the_speed_and_costs_what_the_gpus_do() -> None:
    known = replace(of_dataset(trained(0, 8_000.0, SHORT)), offer=OFFER)
    epoch = view_of(known).document()["epoch"]
    assert (epoch["seconds"], epoch["dollars"]) == pytest.approx((360.0, 0.36))
    assert epoch["seconds_low"] < 360.0 < epoch["seconds_high"]
    assert (epoch["loss_tokens"], epoch["tokens_cut"]) == (2_880_000, 0.032)
    assert said(known)["epoch"].startswith("6 min 0 s (5 min 56 s–6 min 4 s), $0.360, 2,880,000 ")
    two = trained(0, 8_000.0, changed(SHORT, data_parallel=2))
    on_two = of_dataset(two, fixed={"micro_batch_size": 8, "data_parallel": 2})
    dollars = view_of(replace(on_two, offer=OFFER)).document()["epoch"]["dollars"]
    assert dollars == pytest.approx(0.72)
    # On a GPU that another stood in for it takes the predicted speed, and there is none.
    target = changed(known.definition.target, emulated_on="H200")
    other = replace(known, definition=changed(known.definition, target=target))
    assert view_of(other).document()["epoch"]["seconds"] is None


def test_a_study_without_a_dataset_has_no_epoch() -> None:
    plain = snapshot([fits(0, 8_000.0)], definition=definition(**TARGET))
    assert not {"epoch", "texts"} & view_of(plain).document().keys()
    assert "epoch" not in said(plain)


def test_the_fastest_of_each_length_is_shown_with_what_it_leaves_out() -> None:
    known = of_dataset(
        trained(0, 5_000.0, LONG, tokens_cut=0.0, tokens_left_out=0.0, loss_tokens=3_000_000),
        trained(1, 8_000.0, changed(SHORT, lora_rank=8)),
        trained(2, 7_000.0, changed(SHORT, lora_rank=64)),
    )
    section = texts_of(view_of(known))
    assert section.cuts == [
        ("512", "1", "8,000", "4.3 %", "6 min 0 s"),
        ("2,048", "0", "5,000", "0 %", "10 min 0 s"),
    ]
    about = changed(known.definition, texts=a_summary(source=HOSTILE))
    assert HOSTILE not in render(replace(known, definition=about))


def test_a_faster_baseline_that_the_space_does_not_hold_is_no_answer() -> None:
    """Its length is fast at leaving examples out, so the space does not offer it."""
    about: dict[str, Any] = {
        "dimensions": {"seq_len": [1024, 2048]},
        "fixed": {"micro_batch_size": 8, "lora_rank": 16},
        "baseline": {"micro_batch_size": 8, "seq_len": 512},
    }
    baseline = trained(0, 8_000.0, SHORT, tokens_cut=0.4)
    winner = trained(1, 7_000.0, LONG)
    known = of_dataset(baseline, winner, **about)
    for told in (known, replace(known, confirmations=confirmed(baseline, winner))):
        assert "is no answer: its length 512 cuts off 40 %" in said(told)["gain"]
    slower = of_dataset(trained(0, 6_000.0, SHORT), winner, **about)
    for told in (slower, of_dataset(baseline, winner)):
        assert "is no answer" not in said(told)["gain"]


# Held-out losses


def test_losses_are_a_tie_where_their_intervals_over_seeds_overlap() -> None:
    apart = rank_study(about_loss(learned(0, 16, 2.0, 0.01), learned(1, 64, 1.9, 0.01)))
    assert not apart.close
    overlapping = rank_study(about_loss(learned(0, 16, 2.0, 0.1), learned(1, 64, 1.9, 0.1)))
    assert overlapping.close
