from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import NothingFits
from qlora_sweep.storage.definition import (
    StudySnapshot,
)
from qlora_sweep.storage.records import Crashed, Invalid, Lost, OutOfMemory, TrialRecord
from qlora_sweep.sweep.export.record import record_of
from qlora_sweep.sweep.terminal.live import follow
from qlora_sweep.sweep.terminal.summary import (
    best_text,
    last_screen,
    status_text,
    why_invalid,
)
from tests.reports import synthetic
from tests.storage.builders import changed
from tests.sweep.simulated_device import a_definition, a_record, a_space
from tests.sweep.terminal.screen import Screen


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
    return StudySnapshot(
        name="night",
        definition=a_definition(emulated_on=emulated_on),
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
    assert text.startswith("night (seven-billion on a10): ")
    assert "trial 1, " in text.splitlines()[0]
    assert facts(text).keys() >= {"speed", "memory", "gain", "quality", "sure", "warning"}
    assert facts(text)["trials"] == "3 in 4 min 20 s: 2 fits, 1 ran out of memory"
    *_, confirm, train, export, best, last = text.splitlines()
    for line, words in ((confirm, "confirm"), (train, "train"), (export, "export"), (best, "best")):
        assert line.startswith(f"  sweep {words} night")
        assert line.endswith(option)
    assert last == f"  report: {report}"


def test_every_command_says_it_in_the_same_words_on_one_screen() -> None:
    shown = screens(a_snapshot(*trials()), width=80)
    answer = shown[0].partition("\n\n")[0]
    for text in shown:
        assert text.startswith(answer)
        assert max(map(len, text.splitlines())) <= 80
        assert len(text.splitlines()) <= 24


def test_where_nothing_fits_that_is_what_is_said_with_what_it_would_take() -> None:
    snapshot = a_snapshot(a_record(TrialConfig(), OutOfMemory(stage="load")))
    assert view_of(snapshot).winner is None
    for text in screens(snapshot)[:2]:
        assert "Less memory: " in text


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
    definition = changed(snapshot.definition, space=a_space(**changes))
    return replace(snapshot, definition=definition)


def test_where_only_a_baseline_outside_the_space_fits_there_is_nothing_to_export() -> None:
    baseline, _, ran_out = trials()
    values = {"fixed": {"lora_rank": 64}, "baseline": {"lora_rank": 16, "micro_batch_size": 8}}
    config = changed(ran_out.config, lora_rank=64)
    large = changed(ran_out, config=config)
    snapshot = with_space(a_snapshot(baseline, large), **values)
    assert view_of(snapshot).winner is None
    assert "a space that holds what it sets has an answer" in best_text(snapshot)
    with pytest.raises(NothingFits, match="has nothing to export"):
        record_of(snapshot)


def test_a_study_is_invalid_where_nothing_of_its_space_was_valid() -> None:
    space = synthetic.snapshot().definition.space
    inside = space.config({key: (one.values() or ())[0] for key, one in space.dimensions.items()})
    outside = TrialConfig(lora_rank=3, micro_batch_size=3, seq_len=3)
    invalid = Invalid(rule="targets", detail="no such module")
    baseline = synthetic.fits(0, 8_000.0, outside)
    refused = synthetic.record(1, invalid, inside)
    assert why_invalid(synthetic.snapshot([baseline, refused])) == invalid
    for records in ([], [baseline], [refused, synthetic.fits(2, 8_000.0, inside)]):
        assert why_invalid(synthetic.snapshot(records)) is None


def test_attempts_that_were_repeated_are_counted_as_one_trial_on_screens() -> None:
    baseline, faster, _ = trials()
    crashed = a_record(faster.config, Crashed(phase="warmup"), number=1)
    again = a_snapshot(baseline, crashed, changed(faster, number=2, attempt=2))
    for text in screens(again):
        assert facts(text)["trials"] == "2 in 4 min 20 s: 2 fits (after 1 failed attempt)"
    # Programs are told of every attempt.
    assert view_of(again).trials["total"] == 3
    assert view_of(again).trials["crashed"] == 1


# `sweep status --watch`: a study that another process drives, from storage alone.


def looks(*trials: int) -> Callable[[], StudySnapshot]:
    """Hand out a driven study with so many trials at each look, and in the end nobody drives it."""
    snapshots = []
    for count in trials:
        records = [a_record(TrialConfig(micro_batch_size=n + 1), number=n) for n in range(count)]
        running = (a_record(TrialConfig(), Lost(), number=count),)
        snapshots.append(replace(a_snapshot(*records), holder="host:12", running=running))
    last = replace(snapshots[-1], holder=None, running=())
    return iter([*snapshots, last]).__next__


def test_a_study_is_followed_until_nobody_drives_it(capsys: pytest.CaptureFixture[str]) -> None:
    waits: list[float] = []
    follow(looks(1, 1, 2), stream=io.StringIO(), sleep=waits.append)
    out, err = capsys.readouterr()
    assert out == ""
    # Said again where a trial has ended, and not at every look.
    assert err.count("Driven by host:12") == 2
    assert "Trial 2 (" in err
    assert len(waits) == 3
    assert min(waits) >= 1.0


def test_a_terminal_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    screen = Screen(100)
    follow(looks(1, 2, 3), stream=screen, sleep=lambda _: None)
    assert any("Trial 3 (" in picture for picture in screen.pictures)
    assert all(picture.count("Driven by") <= 1 for picture in screen.pictures)
    assert "Driven by" not in screen.seen


def test_what_is_off_the_front_is_not_called_the_front() -> None:
    alone = synthetic.about_loss(
        synthetic.learned(0, 16, 1.2), synthetic.learned(1, 8, 1.0, speed=12_000.0)
    )
    assert "Pareto front (" not in best_text(alone)
    two = synthetic.about_loss(
        synthetic.learned(0, 16, 1.0, speed=9_000.0), synthetic.learned(1, 8, 1.4, speed=12_000.0)
    )
    assert "Pareto front (2) of" in best_text(two)
