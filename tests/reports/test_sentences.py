"""What is said of a study's answer: what it is, what it gained, and how sure it is."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from reports.document import document_of
from reports.page import render
from reports.search import quality_of
from reports.sentences import (
    classes,
    commands,
    confirmed_rows,
    facts,
    headline,
    rank_claim,
    runners_up,
    status_words,
)
from reports.view import view_of
from reports.words import cut_in_words
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from search_spaces.prices import Offer
from storage.definition import StudySnapshot
from storage.ranking import rank_study
from storage.records import Measured, OutOfMemory, PrunedSlow, TrialRecord
from tests.reports.on_texts import (
    LONG,
    SHORT,
    SOAKED,
    TARGET,
    about_loss,
    an_epoch,
    learned,
    of_texts,
    trained,
)
from tests.reports.synthetic import definition, fits, measurement, record, snapshot
from tests.storage.builders import confirmed

FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)
SLOW = TrialConfig(micro_batch_size=12)
TRIALS = (fits(0, 8_000.0), fits(1, 16_800.0, FAST), fits(2, 9_000.0, SLOW))
RANKS = {
    "dimensions": {"lora_rank": {"choices": [16, 64]}, "micro_batch_size": {"choices": [8, 10]}},
    "fixed": {},
}


def said(study: StudySnapshot) -> dict[str, str]:
    return dict(facts(view_of(study)))


def opening(study: StudySnapshot) -> str:
    return headline(view_of(study))


def again(*records: TrialRecord, **values: Any) -> StudySnapshot:
    return snapshot(records, confirmations=confirmed(*records[:2]), **values)


def with_soak(study: StudySnapshot, outcome: Any) -> StudySnapshot:
    runs = tuple(
        run.model_copy(update={"outcome": outcome})
        if run.purpose == "soak" and run.confirms == 1
        else run
        for run in study.confirmations
    )
    return replace(study, confirmations=runs)


def test_a_winner_is_confirmed_by_so_many_runs_or_there_is_a_command_to_type() -> None:
    assert status_words(rank_study(again(*TRIALS)), study="night") == "confirmed (2 runs)"
    alone = snapshot(TRIALS)
    ranking = rank_study(alone)
    assert status_words(ranking, study="a night") == "not confirmed: sweep confirm 'a night'"
    assert status_words(ranking, study="night", is_driven=True) == "not confirmed yet"
    assert opening(alone).startswith("The fastest configuration measured so far is trial 1, ")
    assert commands(view_of(alone))[0] == "sweep confirm a10-mistral"


def test_the_soak_is_told_with_what_strained_it() -> None:
    soaked = measurement(16_700.0, soak=SOAKED, allocator_retries=2, peak_allocated_bytes=20 * GIB)
    assert said(with_soak(again(*TRIALS), Measured(measurement=soaked)))["sure"] == (
        "confirmed (2 runs); stood a soak of 53 steps in 15.2 s, at 20.00 GiB; the allocator gave "
        "memory back 2 times"
    )


def test_a_trial_that_ran_out_in_its_soak_is_said_to_have_lost() -> None:
    study = with_soak(again(*TRIALS), OutOfMemory(stage="forward"))
    assert opening(study).startswith("The fastest configuration measured so far is trial 2, ")
    lost = "Trial 1 fitted in the search and ran out of memory in its soak, so it lost"
    assert lost in said(study)["sure"]
    rows = {row.number: row for row in confirmed_rows(view_of(study))}
    assert rows["1"].result == "ran out of memory in its soak"
    assert rows["0"].result == "baseline"


def test_a_noisy_machine_has_a_winner_whose_gain_is_its_lower_end() -> None:
    wide = {"step_seconds_ci95": (0.12, 1.0)}
    study = again(fits(0, 1_000.0), fits(1, 16_800.0, FAST, **wide))
    assert opening(study).startswith("The fastest configuration that fits is trial 1, ")
    assert said(study)["gain"].startswith("at least ")


def test_what_may_be_as_fast_as_the_baseline_has_no_gain_and_its_doubts_are_named() -> None:
    noisy = {"flags": ("neighbour",), "step_seconds_ci95": (0.1, 1.0)}
    known = said(again(fits(0, 8_000.0), fits(1, 16_800.0, FAST, **noisy)))
    assert known["gain"] == "none stated: statistically indistinguishable from the baseline"
    at_home = definition(emulated_on=None)
    study = again(fits(0, 8_000.0), fits(1, 16_800.0, FAST, **noisy), definition=at_home)
    assert "neighbour)" in said(study)["speed"]


def test_one_is_recommended_and_what_is_as_fast_is_a_footnote() -> None:
    twin = fits(2, 16_790.0, SLOW, peak_allocated_bytes=6 * GIB)
    study = replace(snapshot((*TRIALS[:2], twin)), confirmations=confirmed(*TRIALS[:2], twin))
    assert opening(study).startswith("The fastest configuration that fits is trial 1, ")
    assert said(study)["sure"].endswith("Statistically indistinguishable: trial 2 (6.00 GiB)")
    assert [(row.number, row.result) for row in confirmed_rows(view_of(study))] == [
        ("1", "recommended"),
        ("2", "as fast"),
        ("0", "baseline"),
    ]
    trials = (*TRIALS[:2], twin, fits(3, 16_800.0, TrialConfig(micro_batch_size=10)))
    more = said(replace(snapshot(trials), confirmations=confirmed(*trials)))
    assert more["sure"].endswith(": trial 2 (6.00 GiB), trial 3 (10.00 GiB)")


def test_the_baseline_in_the_winners_class_is_among_what_was_measured_again() -> None:
    space = {"dimensions": {"micro_batch_size": {"choices": [10]}}, "fixed": {"lora_rank": 64}}
    small = {"micro_batch_size": 8, "lora_rank": 16}
    about = definition(space=space | {"baseline": small})
    trials = (
        fits(0, 8_000.0),
        fits(1, 16_000.0, TrialConfig(micro_batch_size=10, lora_rank=64)),
    )
    errand = {"purpose": "confirm", "series": 1, "confirms": None, "is_baseline": False}
    recipe = TrialConfig(micro_batch_size=8, lora_rank=64)
    runs = [fits(900 + n, 6_400.0, recipe).model_copy(update=errand) for n in range(2)]
    study = snapshot(trials, definition=about, confirmations=(*confirmed(trials[1]), *runs))
    assert [(row.number, row.runs, row.result) for row in confirmed_rows(view_of(study))] == [
        ("1", "16,000, 16,000", "recommended"),
        ("–", "6,400, 6,400", "baseline at rank 64 on q,k,v,o"),
    ]
    assert said(study)["gain"].startswith("2.5x the baseline at rank 64 on q,k,v,o (2.4")


def test_across_capacity_classes_the_fastest_of_the_baselines_class_is_named_with_its_gain() -> (
    None
):
    trials = (
        fits(0, 8_000.0),
        fits(1, 20_000.0, TrialConfig(micro_batch_size=10, lora_rank=64)),
        fits(2, 12_000.0, TrialConfig(micro_batch_size=10)),
    )
    about = definition(space=RANKS)
    study = snapshot(trials, definition=about, confirmations=confirmed(*trials))
    assert said(study)["gain"] == (
        "none stated: the baseline at rank 64 on q,k,v,o was not measured; the fastest of the "
        "baseline's class is trial 2, 1.5x the baseline (1.48–1.52x)"
    )


def test_a_baseline_outside_the_space_is_no_answer_where_nothing_of_the_space_fits() -> None:
    space = {
        "dimensions": {"micro_batch_size": {"choices": [8, 10]}},
        "fixed": {"lora_rank": 64},
        "baseline": {"micro_batch_size": 8, "lora_rank": 16},
    }
    alone, about = fits(0, 8_000.0), definition(space=space)
    wide = alone.config.model_copy(update={"lora_rank": 64})
    study = snapshot([alone, record(1, OutOfMemory(stage="forward"), wide)], definition=about)
    assert opening(study).startswith("Nothing of the space was measured to fit in 21.50 GiB.")
    assert "at 8,000 tokens/s: a reference that the space does not hold" in opening(study)
    assert commands(view_of(study)) == ()


@pytest.mark.parametrize(
    ("objectives", "sentence"),
    [
        (["tokens_per_second"], "The fastest configuration measured so far is trial 1, "),
        (
            ["peak_memory"],
            "The configuration with the lowest peak memory measured so far is trial 0, ",
        ),
        (
            ["trainable_parameters"],
            "The configuration with the most trainable parameters measured so far is trial 1, ",
        ),
        (
            ["peak_memory", "tokens_per_second"],
            "The best compromise between peak memory and speed (the knee of the Pareto front)",
        ),
    ],
)
def test_the_answer_is_by_what_was_asked_for(objectives: list[str], sentence: str) -> None:
    trials = (
        fits(0, 8_000.0, peak_allocated_bytes=8 * GIB),
        fits(1, 16_000.0, FAST, peak_allocated_bytes=20 * GIB),
    )
    about = definition(space={"objectives": objectives})
    assert opening(snapshot(trials, definition=about)).startswith(sentence)


def test_runners_up_are_said_by_what_they_change_and_scaled_where_not_measured_again() -> None:
    assert list(runners_up(view_of(again(*TRIALS)))) == [
        "trial 2: 9,000 tokens/s (8,911–9,091, scaled), 10.00 GiB: micro-batch 12, full "
        "checkpointing",
        "trial 0: 8,000 tokens/s (7,943–8,057), 10.00 GiB: micro-batch 8, full checkpointing",
    ]


def test_each_capacity_class_has_its_fastest_and_says_when_it_was_stopped_early() -> None:
    wide = TrialConfig(micro_batch_size=8, lora_rank=64, target_modules="all-linear")
    free = RANKS["dimensions"] | {
        "target_modules": {"choices": ["attention", "all-linear"]},
        "checkpoint_fraction": {"choices": [0.0, 1.0]},
    }
    study = snapshot(
        [
            fits(0, 8_000.0),
            fits(1, 9_000.0, FAST),
            record(2, PrunedSlow(measurement=measurement(4_000.0)), wide),
        ],
        definition=definition(space={"dimensions": free, "fixed": {}}),
    )
    assert list(classes(view_of(study))) == [
        "rank 16 on q,k,v,o: 9,000 at 512 (trial 1)",
        "rank 64 on all linear layers: 4,000 at 512 (trial 2, stopped early)",
    ]


def test_the_page_shows_what_was_measured_again_and_the_energy_of_a_token() -> None:
    trials = (TRIALS[0], fits(1, 16_800.0, FAST, joules_per_token=0.0412))
    page = render(again(*trials))
    assert "<h2>Measured again</h2>" in page
    assert "16,800, 16,800" in page
    assert '[0.0412,"41.2 mJ"]' in page
    assert "<h2>Measured again</h2>" not in render(snapshot(trials))


# A dataset


def test_an_epoch_is_its_loss_tokens_over_the_speed_and_costs_what_the_gpus_do() -> None:
    offer = Offer(
        gpu="a10", usd_per_hour=3.6, provider="here", source="a list", date=date(2026, 11, 1)
    )
    known = replace(of_texts(trained(0, 8_000.0, SHORT)), offer=offer)
    epoch = view_of(known).document()["epoch"]
    assert (epoch["seconds"], epoch["dollars"]) == pytest.approx((360.0, 0.36))
    assert epoch["seconds_low"] < 360.0 < epoch["seconds_high"]
    assert (epoch["loss_tokens"], epoch["tokens_cut"]) == (2_880_000, 0.032)
    assert said(known)["epoch"].startswith("6 min 0 s (5 min 56 s–6 min 4 s), $0.360, 2,880,000 ")
    two = SHORT.model_copy(update={"data_parallel": 2})
    on_two = replace(
        of_texts(trained(0, 8_000.0, two), fixed={"micro_batch_size": 8, "data_parallel": 2}),
        offer=offer,
    )
    assert view_of(on_two).document()["epoch"]["dollars"] == pytest.approx(0.72)


def test_without_a_dataset_nothing_is_said_of_an_epoch() -> None:
    known = snapshot([fits(0, 8_000.0)], definition=definition(**TARGET))
    assert not {"epoch", "texts"} & view_of(known).document().keys()
    assert "epoch" not in said(known)


def test_an_epoch_on_a_gpu_that_another_stood_in_for_takes_the_predicted_speed() -> None:
    known = of_texts(trained(0, 8_000.0, SHORT))
    target = known.definition.target.model_copy(update={"emulated_on": "H200"})
    about = known.definition.model_copy(update={"target": target})
    other = replace(known, definition=about)
    assert view_of(other).document()["epoch"]["seconds"] is None
    assert "epoch" not in said(other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {},
            "length 512 cuts off 3.2 % of the tokens (900 of 9,500 training rows); 100 rows with "
            "1.1 % of the tokens left out, as no supervised token is left of them",
        ),
        ({"rows_cut": 0, "rows_left_out": 0}, "length 512 cuts nothing off"),
    ],
)
def test_what_a_length_cuts_off_is_said(changes: dict[str, Any], words: str) -> None:
    assert cut_in_words(an_epoch(**changes), 512) == words


def test_a_baseline_that_is_faster_and_no_answer_is_said_so_where_the_gain_is() -> None:
    """Its length is fast at leaving examples out, so the space does not offer it."""
    about = {
        "dimensions": {"seq_len": {"choices": [1024, 2048]}},
        "fixed": {"micro_batch_size": 8, "lora_rank": 16},
        "baseline": {"micro_batch_size": 8, "seq_len": 512},
    }
    baseline = trained(0, 8_000.0, SHORT, tokens_cut=0.4)
    winner = trained(1, 7_000.0, LONG)
    known = of_texts(baseline, winner, **about)
    why = (
        "the baseline was measured faster and is no answer: its length 512 cuts off 40 % of "
        "the tokens (900 of 9,500 training rows)"
    )
    for study in (known, replace(known, confirmations=confirmed(baseline, winner))):
        assert why in said(study)["gain"]
    for slow in (
        of_texts(trained(0, 6_000.0, SHORT), winner, **about),
        of_texts(baseline, winner),
        of_texts(winner),
    ):
        assert "is no answer" not in said(slow)["gain"]
    plain = snapshot(
        [fits(0, 8_000.0, SHORT), fits(1, 7_000.0, LONG)],
        definition=definition(space=about, **TARGET),
    )
    assert said(plain)["gain"].endswith("is no answer: the space does not hold it")


# Held-out losses


@pytest.mark.parametrize(
    ("records", "verdict"),
    [
        ((learned(0, 16, 2.0, 0.01), learned(1, 64, 1.9, 0.01)), "refuted on this dataset"),
        ((learned(0, 16, 1.9, 0.01), learned(1, 64, 2.0, 0.01)), "confirmed on this dataset"),
        ((learned(0, 16, 2.0, 0.1), learned(1, 64, 1.9, 0.1)), "intervals over seeds overlap"),
        ((learned(0, 16, 2.0), learned(1, 64, 1.9)), "not both were trained with several seeds"),
        (
            (learned(0, 8, 2.0), learned(1, 64, 1.9)),
            "no two trials were trained that",
        ),
        ((learned(0, 16, 2.0, 0.1),), "no two trials were trained that"),
    ],
)
def test_a_claim_about_rank_is_judged_by_the_intervals_over_seeds(
    records: tuple[TrialRecord, ...], verdict: str
) -> None:
    assert verdict in rank_claim(rank_study(about_loss(*records)))


def at_rate(record: TrialRecord, rate: float) -> TrialRecord:
    config = record.config.model_copy(update={"learning_rate": rate})
    return record.model_copy(update={"config": config})


def test_a_claim_about_rank_is_not_judged_by_what_another_learning_rate_did() -> None:
    rates = {"learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}

    def claim(*records: TrialRecord) -> str:
        known = of_texts(
            *records,
            objectives=["tokens_per_second", "eval_loss"],
            weights="pretrained",
            dimensions={"lora_rank": {"choices": [8, 16, 64]}, **rates},
            fixed={"micro_batch_size": 8, "seq_len": 512},
        )
        return rank_claim(rank_study(known))

    own, faster = learned(0, 16, 2.0, 0.01), at_rate(learned(1, 8, 1.5, 0.01), 5e-3)
    assert "no two trials were trained that differ in this rank alone" in claim(own, faster)
    judged = claim(own, faster, learned(2, 64, 2.1, 0.01))
    assert "confirmed on this dataset" in judged
    assert "that of rank 64, the lowest of those that differ in nothing else, is 2.1" in judged


def test_the_report_shows_loss_against_speed_and_against_rank() -> None:
    known = about_loss(learned(0, 16, 2.0, 0.01), learned(1, 64, 1.9, 0.02, speed=8_000.0))
    section = quality_of(document_of(known))
    assert section is not None
    (figure,) = section.figures
    speed, rank = figure.figure.data
    losses = {16: (2.0, 0.01), 64: (1.9, 0.02)}
    for trace in (speed, rank):
        shown = zip(rank.x, zip(trace.y, trace.error_y.array, strict=True), strict=True)
        assert {at: pytest.approx(one) for at, one in shown} == losses
    assert sorted(speed.x) == [8_000.0, 9_000.0]
    assert "refuted on this dataset" in render(known)
    assert "on held-out examples" in said(known)["loss"]
    assert quality_of(document_of(of_texts(trained(0, 8_000.0, SHORT)))) is None


def test_losses_whose_intervals_overlap_are_close_and_others_are_not() -> None:
    near = about_loss(learned(0, 16, 2.0, 0.1), learned(1, 64, 1.95, 0.1))
    assert rank_study(near).close
    far = about_loss(learned(0, 16, 2.0, 0.01), learned(1, 64, 1.9, 0.01))
    assert not rank_study(far).close
