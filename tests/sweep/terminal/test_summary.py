from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import NothingFits
from storage.best import best_document
from storage.definition import (
    RunningTrial,
    StudyDefinition,
    StudySnapshot,
    StudySummary,
    Target,
    TargetSpeed,
)
from storage.records import Crashed, OutOfMemory, TrialRecord
from sweep.export.recipe import recipe_of
from sweep.terminal.summary import best_text, has_fit, last_screen, status_text, studies_text
from tests.storage.builders import confirmed
from tests.sweep.simulated_device import BUDGET, MODEL, a_measurement, a_record, a_space


def trials() -> tuple[TrialRecord, ...]:
    baseline = a_record(a_space().baseline_config(), number=0, is_baseline=True)
    faster = TrialConfig(micro_batch_size=10, kernels="liger", upcast_fp32=False)
    ran_out = TrialConfig(micro_batch_size=32, checkpoint_fraction=0.0)
    return (
        baseline,
        a_record(faster, number=1),
        a_record(ran_out, OutOfMemory(stage="forward"), number=2),
    )


def a_snapshot(*records: TrialRecord, emulated_on: str | None = "NVIDIA H200") -> StudySnapshot:
    target = Target(gpu="a10", device="cuda", budget_bytes=BUDGET, emulated_on=emulated_on)
    definition = StudyDefinition(
        space=a_space(), model=MODEL.to_json(), model_fingerprint="f00d", target=target
    )
    return StudySnapshot(
        name="night",
        definition=definition,
        environment={},
        records=records,
        wall_seconds=260.0,
        warnings=("run 2 changed driver",),
    )


def test_a_run_ends_with_what_a_person_asks_of_the_winner_and_what_to_type_next() -> None:
    text = last_screen(a_snapshot(*trials()), report=Path("runs/night/report.html"))
    head, *facts = text.partition("\nNext:")[0].splitlines()
    opening = "night (seven-billion on a10): The fastest configuration measured so far is trial 1, "
    assert head.startswith(opening)
    names = [fact.split()[0] for fact in facts if fact]
    assert names == ["speed", "memory", "gain", "sure", "trials", "warning"]
    assert "10 x 512, rank 16 on q,k,v,o, bf16 compute, no fp32 upcast, Liger kernels" in text
    assert "3 in 4 min 20 s: 2 fits, 1 ran out of memory" in text
    assert "sweep best night" in text
    assert "report: runs/night/report.html" in text


def test_the_last_screen_goes_into_a_chat_and_the_rest_is_with_the_best() -> None:
    for width in (80, 200):
        text = last_screen(a_snapshot(*trials()), report=Path("runs/report.html"), width=width)
        assert max(map(len, text.splitlines())) <= width
        assert len(text.splitlines()) <= 18
        assert "Runners-up" not in text
    text = best_text(a_snapshot(*trials()))
    assert "Runners-up (speeds measured on NVIDIA H200):" in text
    assert "To go faster:" in text


def test_the_speed_is_the_target_cards_and_the_measured_one_is_named_beside_it() -> None:
    predicted = TargetSpeed(3000.0, 2000.0, 4000.0, "predicted")
    known = replace(a_snapshot(*trials()), target_speeds={1: predicted})
    (line,) = [line for line in last_screen(known).splitlines() if "speed  " in line]
    assert line.startswith("  speed   3,000 tokens/s on a10 (predicted 2,000–4,000; measured on")
    assert "NVIDIA H200: " in line
    assert "not predicted on a10" in last_screen(a_snapshot(*trials()))
    assert "measured on" not in last_screen(a_snapshot(*trials(), emulated_on=None))


def test_a_winner_is_said_to_be_confirmed_or_how_to_have_it_so() -> None:
    alone, again = a_snapshot(*trials()), a_snapshot(*trials())
    again = replace(again, confirmations=confirmed(*trials()))
    for text in (status_text(alone), best_text(alone)):
        assert "It is not confirmed: sweep confirm night." in text
        assert "The fastest configuration measured so far is trial 1, " in text
        assert "x the baseline's speed (not confirmed; by single runs " in text
    assert "sure    not confirmed: sweep confirm night" in last_screen(alone)
    for text in (status_text(again), best_text(again)):
        assert "It is confirmed (2 runs), and stood a soak of 12 steps" in text
        assert "x the baseline's speed (confirmed (2 runs); 95 % interval" in text
    assert re.search(r"^  1 +[\d,]+, [\d,]+ +.* recommended$", best_text(again), re.MULTILINE)
    assert "sure    confirmed (2 runs)" in last_screen(again)
    assert re.search(r"gain    [\d.]+x the baseline \(", last_screen(again))
    assert "sweep confirm" not in last_screen(again)


def test_what_is_not_confirmed_is_the_first_thing_to_do_next() -> None:
    text = last_screen(a_snapshot(*trials()), storage_option=" --storage sqlite:///other.db")
    assert text.partition("Next:\n")[2].startswith(
        "  sweep confirm night --storage sqlite:///other.db\n"
    )


def test_every_output_says_that_the_speed_is_the_host_cards() -> None:
    snapshot = a_snapshot(*trials())
    for text in (status_text(snapshot), best_text(snapshot)):
        assert "the speed is that of NVIDIA H200" in text
    assert "measured on NVIDIA H200" in last_screen(snapshot)
    itself = replace(snapshot, definition=a_snapshot(emulated_on=None).definition)
    assert "NVIDIA H200" not in best_text(itself)


def test_the_next_commands_find_a_storage_that_was_named() -> None:
    text = last_screen(a_snapshot(*trials()), storage_option=" --storage sqlite:///other.db")
    assert "sweep best night --storage sqlite:///other.db" in text


def test_where_nothing_fits_that_is_what_is_said() -> None:
    ran_out = a_record(TrialConfig(), OutOfMemory(stage="load"))
    snapshot = a_snapshot(ran_out)
    assert not has_fit(snapshot)
    assert "Nothing that was tried" in last_screen(snapshot)
    assert "Runners-up" not in last_screen(snapshot)
    assert "Configuration:" not in best_text(snapshot)


def test_the_status_says_what_is_measured_again() -> None:
    driven = replace(
        a_snapshot(*trials()),
        running=(
            RunningTrial(3, TrialConfig(), None, "confirm"),
            RunningTrial(4, TrialConfig(), None, "soak"),
        ),
        holder="host:12",
    )
    text = status_text(driven)
    assert "Trial 3 (4 x 512, rank 16, measured again): running." in text
    assert "Trial 4 (4 x 512, rank 16, a soak): running." in text
    assert "It is not confirmed yet." in text


def test_the_status_says_what_is_running_and_what_was_left_behind() -> None:
    running = RunningTrial(number=3, config=TrialConfig(), started_at="2026-01-01T00:00:00+00:00")
    driven = replace(a_snapshot(*trials()), running=(running,), holder="host:12")
    assert "Driven by host:12." in status_text(driven)
    assert "Trial 3 (4 x 512, rank 16) since 2026-01-01T00:00:00+00:00: running." in status_text(
        driven
    )
    assert "left unfinished" in status_text(replace(driven, holder=None))


def with_space(snapshot: StudySnapshot, **changes: object) -> StudySnapshot:
    definition = snapshot.definition.model_copy(update={"space": a_space(**changes)})
    return replace(snapshot, definition=definition)


def test_several_objectives_end_with_their_front_and_its_knee() -> None:
    snapshot = with_space(a_snapshot(*trials()), objectives=["tokens_per_second", "peak_memory"])
    assert "The best compromise between speed and peak memory" in last_screen(snapshot)
    text = best_text(snapshot)
    assert "The best compromise between speed and peak memory" in text
    assert "The front of speed and peak memory, the knee first:" in text
    assert "Runners-up" not in text


def test_where_only_a_baseline_outside_the_space_fits_nothing_does() -> None:
    baseline, _, ran_out = trials()
    values = {"fixed": {"lora_rank": 64}, "baseline": {"lora_rank": 16, "micro_batch_size": 8}}
    large = ran_out.model_copy(
        update={"config": ran_out.config.model_copy(update={"lora_rank": 64})}
    )
    snapshot = with_space(a_snapshot(baseline, large), **values)
    assert not has_fit(snapshot)
    assert "Nothing of the space that was tried" in last_screen(snapshot)
    alone = with_space(a_snapshot(baseline), **values)
    assert "Nothing of the space has been tried yet. Its baseline fits in" in last_screen(alone)
    assert "measured within" not in last_screen(alone)
    assert "a space that holds what it sets" not in best_text(alone)
    with pytest.raises(NothingFits, match="has nothing to export"):
        recipe_of(snapshot)


def test_the_list_of_studies_says_what_each_is_ranked_by_and_how_sure_its_best_is() -> None:
    noisy = a_measurement(TrialConfig(), spread=0.2, flags=("noisy",))
    text = studies_text(
        [
            StudySummary("fast", "a10", "m", 3, ("tokens_per_second",), 1, noisy, 9.0, None),
            StudySummary("small", "a10", "m", 3, ("peak_memory",), 1, noisy, 9.0, None, True),
            StudySummary("none", "a10", "m", 3, ("peak_memory",), None, None, 9.0, None),
        ]
    )
    fast, small, none = text.splitlines()[1:]
    assert re.search(r"7,006 tokens/s \(5,838–8,757, noisy\), not confirmed +speed", fast)
    assert re.search(r"noisy\), 6.65 GiB, confirmed +peak memory", small)
    assert "peak memory" in small
    assert "–  " in none


def test_the_best_shows_the_whole_configuration_and_the_capacity_classes() -> None:
    text = best_text(a_snapshot(*trials()))
    assert '"micro_batch_size": 10' in text
    assert "Fastest of each capacity class" in text


def test_attempts_that_were_repeated_are_counted_as_one_trial_on_screens() -> None:
    baseline, faster, _ = trials()
    crashed = a_record(faster.config, Crashed(phase="warmup"), number=1)
    again = a_snapshot(baseline, crashed, faster.model_copy(update={"number": 2, "attempt": 2}))
    for text in (last_screen(again), best_text(again), status_text(again)):
        assert "2 fits (after 1 failed attempt)" in text
        assert "Unknown so far" not in text
    assert "  2 trials (2 fitted" in best_text(again)
    # Programs are told of every attempt.
    assert best_document(again)["trials"]["total"] == 3
    assert best_document(again)["trials"]["crashed"] == 1
    failed = a_snapshot(baseline, crashed, crashed.model_copy(update={"number": 2, "attempt": 2}))
    assert "Unknown so far: 1 trial crashed" in best_text(failed)
