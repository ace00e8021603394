"""How sure a winner is, in words, wherever it is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reports.confirmation import confirmation_rows, status_words
from reports.page import render
from reports.summary import summary_of
from reports.tables import top_configurations
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.definition import StudySnapshot
from storage.ranking import rank_study
from storage.records import Measured, OutOfMemory, SoakReport, TrialRecord
from tests.reports.synthetic import definition, fits, measurement, snapshot
from tests.storage.builders import confirmed

FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)
SLOW = TrialConfig(micro_batch_size=12)
TRIALS = (fits(0, 8_000.0), fits(1, 16_800.0, FAST), fits(2, 9_000.0, SLOW))
SOAKED = SoakReport(
    steps=53,
    seconds=15.2,
    evaluation_loss=10.4,
    evaluation_seconds=0.4,
    checkpoint_bytes=80_000_000,
    checkpoint_seconds=0.3,
)


def again(*records: TrialRecord, **values: Any) -> StudySnapshot:
    return snapshot(records, confirmations=confirmed(*records[:2]), **values)


def with_soak(study: StudySnapshot, outcome: Any, *, of: int = 1) -> StudySnapshot:
    runs = tuple(
        run.model_copy(update={"outcome": outcome})
        if run.purpose == "soak" and run.confirms == of
        else run
        for run in study.confirmations
    )
    return replace(study, confirmations=runs)


def test_a_winner_is_confirmed_by_so_many_runs_or_there_is_a_command_to_type() -> None:
    assert status_words(rank_study(again(*TRIALS)), study="night") == "confirmed (2 runs)"
    alone = rank_study(snapshot(TRIALS))
    assert status_words(alone, study="a night") == "not confirmed: sweep confirm 'a night'"
    assert status_words(alone, study="night", is_driven=True) == "not confirmed yet"


def test_the_soak_is_told_with_what_strained_it() -> None:
    soaked = measurement(16_700.0, soak=SOAKED, allocator_retries=2, peak_allocated_bytes=20 * GIB)
    said = summary_of(with_soak(again(*TRIALS), Measured(measurement=soaked))).sentence
    assert (
        "It is confirmed (2 runs), and stood a soak of 53 steps in 15.2 s with an evaluation and a "
        "checkpoint, at 20.00 GiB, in which the allocator gave memory back 2 times." in said
    )


def test_a_trial_that_ran_out_in_its_soak_is_said_to_have_lost() -> None:
    study = with_soak(again(*TRIALS), OutOfMemory(stage="forward"))
    said = summary_of(study)
    assert said.sentence.startswith("The fastest configuration measured so far is trial 2, ")
    assert "Trial 1 fitted in the search and ran out of memory in its soak, so it lost." in (
        said.sentence
    )
    rows = {row.number: row for row in confirmation_rows(study)}
    assert rows["1"].result == "ran out of memory in its soak"
    assert rows["0"].result == "baseline"


def test_a_noisy_machine_has_a_winner_whose_gain_is_its_lower_end() -> None:
    wide = {"step_seconds_ci95": (0.12, 1.0)}
    study = again(fits(0, 1_000.0), fits(1, 16_800.0, FAST, **wide))
    said = summary_of(study)
    assert said.sentence.startswith("The fastest configuration that fits is trial 1, ")
    gain = {fact.label: fact for fact in said.facts}["the baseline's speed"]
    assert gain.value.startswith("at least ")
    assert gain.detail.startswith("confirmed (2 runs); 95 % interval ")


def test_one_is_recommended_and_what_is_as_fast_is_a_footnote() -> None:
    twin = fits(2, 16_790.0, SLOW, peak_allocated_bytes=6 * GIB)
    study = replace(snapshot((*TRIALS[:2], twin)), confirmations=confirmed(*TRIALS[:2], twin))
    said = summary_of(study).sentence
    assert said.startswith("The fastest configuration that fits is trial 1, ")
    assert "Trial 2 is as fast and has memory to spare (6.00 GiB)." in said
    assert [(row.number, row.result) for row in confirmation_rows(study)] == [
        ("1", "recommended"),
        ("2", "as fast"),
        ("0", "baseline"),
    ]
    more = fits(3, 16_800.0, TrialConfig(micro_batch_size=10))
    trials = (*TRIALS[:2], twin, more)
    study = replace(snapshot(trials), confirmations=confirmed(*trials))
    footnote = "2 others are as fast; of these trial 2 has memory to spare (6.00 GiB)."
    assert footnote in summary_of(study).sentence


def test_what_was_not_confirmed_is_the_fastest_measured_so_far() -> None:
    said = summary_of(snapshot(TRIALS))
    assert said.sentence.startswith("The fastest configuration measured so far is trial 1, ")
    assert said.commands[0] == "sweep confirm a10-mistral"


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
    rows = confirmation_rows(study)
    assert [(row.number, row.runs, row.result) for row in rows] == [
        ("1", "16,000, 16,000", "recommended"),
        ("–", "6,400, 6,400", "baseline at rank 64 on q,k,v,o"),
    ]
    facts = {fact.label: fact for fact in summary_of(study).facts}
    gain = facts["the speed of the baseline at rank 64 on q,k,v,o"]
    assert gain.value == "2.5x"
    assert "nothing of the space was measured in the baseline's class" in gain.detail
    assert "6,400 tokens/s on NVIDIA H200 (8 x 512, rank 64)" in gain.detail


def test_speeds_of_the_search_are_marked_once_others_were_measured_again() -> None:
    rows = {row.number: row.tokens_per_second for row in top_configurations(again(*TRIALS))}
    assert rows == {0: "8,000", 1: "16,800", 2: "9,000 (search, scaled)"}
    assert "search" not in top_configurations(snapshot(TRIALS))[0].tokens_per_second


def test_the_page_shows_what_was_measured_again_and_the_energy_of_a_token() -> None:
    trials = (TRIALS[0], fits(1, 16_800.0, FAST, joules_per_token=0.0412))
    page = render(again(*trials))
    assert "<h2>Measured again</h2>" in page
    assert "16,800, 16,800" in page
    assert '"joules_per_token":0.0412' in page
    assert "<h2>Measured again</h2>" not in render(snapshot(trials))
