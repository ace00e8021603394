from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reports.view import view_of
from search_spaces.config import TrialConfig
from search_spaces.errors import NothingFits
from storage.definition import (
    StudyDefinition,
    StudySnapshot,
    Target,
    TargetSpeed,
)
from storage.records import Crashed, Invalid, Lost, Measured, OutOfMemory, TrialRecord
from sweep.export.record import record_of
from sweep.terminal.summary import (
    best_text,
    has_fit,
    last_screen,
    status_text,
    studies_text,
    why_invalid,
)
from tests.reports import synthetic
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


def facts(text: str) -> dict[str, str]:
    """Return what is said of each fact of a screen, by its name."""
    found = re.findall(r"^  (\w+) +(.*)$", text.partition("\n\n")[0], re.MULTILINE)
    return dict(found)


def screens(known: StudySnapshot, **options: Any) -> list[str]:
    """Return what a run ends with, what `best` says and what `status` does."""
    return [show(known, **options) for show in (last_screen, best_text, status_text)]


def test_a_run_ends_with_what_a_person_asks_of_the_winner_and_what_to_type_next() -> None:
    option = " --storage sqlite:///other.db"
    report = Path("runs/night/report.html")
    text = last_screen(a_snapshot(*trials()), report=report, storage_option=option)
    opening = "night (seven-billion on a10): The fastest configuration measured so far is trial 1, "
    assert text.startswith(opening)
    assert list(facts(text)) == ["speed", "memory", "gain", "sure", "trials", "warning"]
    assert "10 x 512, rank 16 on q,k,v,o, bf16 compute, no fp32 upcast, Liger kernels" in text
    assert facts(text)["trials"] == "3 in 4 min 20 s: 2 fits, 1 ran out of memory"
    *_, confirm, train, export, best, last = text.splitlines()
    for line, words in ((confirm, "confirm"), (train, "train"), (export, "export"), (best, "best")):
        assert line.startswith(f"  sweep {words} night")
        assert line.endswith(option)
    assert last == f"  report: {report}"


@pytest.mark.parametrize("width", [80, 200])
def test_every_command_says_it_in_the_same_words_on_one_screen(width: int) -> None:
    end, best, status = screens(a_snapshot(*trials()), width=width)
    answer = end.partition("\n\n")[0]
    assert best.startswith(answer)
    assert status.startswith(answer)
    for text in (end, best, status):
        assert max(map(len, text.splitlines())) <= width
        assert len(text.splitlines()) <= 24


def test_the_speed_is_the_target_gpus_and_the_measured_one_is_named_beside_it() -> None:
    predicted = TargetSpeed(3000.0, 2000.0, 4000.0, "predicted")
    known = replace(a_snapshot(*trials()), target_speeds={1: predicted})
    speed = "3,000 tokens/s on a10 (predicted 2,000–4,000; measured on NVIDIA H200: "
    assert facts(last_screen(known))["speed"].startswith(speed)
    assert "not predicted on a10" in last_screen(a_snapshot(*trials()))
    assert "NVIDIA H200" not in best_text(a_snapshot(*trials(), emulated_on=None))


def test_a_winner_is_said_to_be_confirmed_or_how_to_have_it_so() -> None:
    alone = a_snapshot(*trials())
    assert facts(last_screen(alone))["sure"] == "not confirmed: sweep confirm night"
    assert facts(last_screen(alone))["gain"].endswith(", by single runs)")
    again = last_screen(replace(alone, confirmations=confirmed(*trials())))
    assert facts(again)["sure"].startswith("confirmed (2 runs); stood a soak of 12 steps")
    assert re.match(r"[\d.]+x the baseline \([^a-z]+x\)$", facts(again)["gain"])
    assert "sweep confirm" not in again


def test_where_nothing_fits_that_is_what_is_said_with_what_it_would_take() -> None:
    snapshot = a_snapshot(a_record(TrialConfig(), OutOfMemory(stage="load")))
    assert not has_fit(snapshot)
    for text in screens(snapshot)[:2]:
        assert "Nothing that was tried was measured to fit in" in text
        assert "  Less memory: " in text


SINCE = "2026-01-01T00:00:00+00:00"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"purpose": "confirm"}, "Trial 3 (4 x 512, rank 16, measured again): running."),
        ({"purpose": "soak"}, "Trial 3 (4 x 512, rank 16, a soak): running."),
        ({"started_at": SINCE}, f"Trial 3 (4 x 512, rank 16) since {SINCE}: running."),
    ],
)
def test_the_status_says_what_is_running_and_what_was_left_behind(
    changes: dict[str, Any], words: str
) -> None:
    running = (a_record(TrialConfig(), Lost(), number=3, **changes),)
    driven = replace(a_snapshot(*trials()), running=running, holder="host:12")
    assert words in status_text(driven)
    assert "Driven by host:12." in status_text(driven)
    assert "left unfinished" in status_text(replace(driven, holder=None))


def with_space(snapshot: StudySnapshot, **changes: object) -> StudySnapshot:
    definition = snapshot.definition.model_copy(update={"space": a_space(**changes)})
    return replace(snapshot, definition=definition)


def test_where_only_a_baseline_outside_the_space_fits_there_is_nothing_to_export() -> None:
    baseline, _, ran_out = trials()
    values = {"fixed": {"lora_rank": 64}, "baseline": {"lora_rank": 16, "micro_batch_size": 8}}
    config = ran_out.config.model_copy(update={"lora_rank": 64})
    large = ran_out.model_copy(update={"config": config})
    snapshot = with_space(a_snapshot(baseline, large), **values)
    assert not has_fit(snapshot)
    assert "a space that holds what it sets has an answer" in best_text(snapshot)
    with pytest.raises(NothingFits, match="has nothing to export"):
        record_of(snapshot)


def test_a_study_is_invalid_where_nothing_of_its_space_was_valid() -> None:
    space = synthetic.snapshot().definition.space
    inside = space.config({key: (one.values() or ())[0] for key, one in space.dimensions.items()})
    outside = TrialConfig(lora_rank=3, micro_batch_size=3, seq_len=3)
    invalid = Invalid(rule="targets", detail="no such module")
    refused = synthetic.record(1, invalid, inside)
    baseline, fitting = (
        synthetic.fits(number, 8_000.0, config) for number, config in ((0, outside), (2, inside))
    )
    assert why_invalid(synthetic.snapshot([baseline, refused])) == invalid
    for records in ([], [baseline], [refused, fitting]):
        assert why_invalid(synthetic.snapshot(records)) is None


def test_the_list_of_studies_says_what_each_is_ranked_by_and_how_sure_its_best_is() -> None:
    noisy = a_measurement(TrialConfig(), spread=0.2, flags=("noisy",))
    trial = a_record(TrialConfig(), Measured(measurement=noisy), number=1)
    fast = a_snapshot(trial, emulated_on=None)
    small = with_space(fast, objectives=["peak_memory"])
    first, second, third = studies_text([fast, small, a_snapshot()]).splitlines()[1:]
    assert re.search(r"7,006 tokens/s \(5,838–8,757, noisy\), not confirmed +speed", first)
    assert re.search(r"noisy\), 6.65 GiB, not confirmed +peak memory", second)
    assert "–  " in third


def test_attempts_that_were_repeated_are_counted_as_one_trial_on_screens() -> None:
    baseline, faster, _ = trials()
    crashed = a_record(faster.config, Crashed(phase="warmup"), number=1)
    again = a_snapshot(baseline, crashed, faster.model_copy(update={"number": 2, "attempt": 2}))
    for text in screens(again):
        assert facts(text)["trials"] == "2 in 4 min 20 s: 2 fits (after 1 failed attempt)"
    # Programs are told of every attempt.
    assert view_of(again).trials["total"] == 3
    assert view_of(again).trials["crashed"] == 1
