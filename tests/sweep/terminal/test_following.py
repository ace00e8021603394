"""`sweep status --watch`: a study that another process drives, from storage alone."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from storage.definition import StudySnapshot
from storage.reading import read_study
from storage.records import Lost, TrialRecord
from sweep.terminal.live import follow
from tests.sweep.simulated_device import a_record
from tests.sweep.terminal.screen import Screen
from tests.sweep.terminal.test_summary import a_snapshot


def looks(*trials: int, began: str | None = None) -> Callable[[], StudySnapshot]:
    """Hand out a driven study with so many trials at each look, and in the end nobody drives it."""
    snapshots = []
    for count in trials:
        records = [a_record(TrialConfig(micro_batch_size=n + 1), number=n) for n in range(count)]
        running = (a_record(TrialConfig(), Lost(), number=count, started_at=began),)
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


@pytest.mark.parametrize("began", ["yesterday", "2026-11-22T10:00:00", ""])
def test_a_terminal_is_redrawn_and_a_time_that_is_none_ends_no_view(
    began: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    screen = Screen(100)
    follow(looks(1, 2, 3, began=began), stream=screen, sleep=lambda _: None)
    assert any("Trial 3 (" in picture for picture in screen.pictures)
    assert all(picture.count("Driven by") <= 1 for picture in screen.pictures)
    assert "Driven by" not in screen.seen


def test_a_study_that_is_followed_for_hours_takes_no_more_memory_at_every_look(
    study: str, tmp_path: Path
) -> None:
    from optuna.storages import BaseStorage

    runs = tmp_path / "runs"
    alive: list[int] = []

    def read() -> StudySnapshot:
        kinds = (TrialRecord, StudySnapshot, BaseStorage)
        gc.collect()
        alive.append(sum(isinstance(one, kinds) for one in gc.get_objects()))
        found = read_study(study, url=f"sqlite:///{runs}/sweep.db", home=runs)
        return replace(found, holder="host:12" if len(alive) < 8 else None)

    gc.collect()
    # What is there already is not looked at each time.
    gc.freeze()
    follow(read, stream=io.StringIO(), sleep=lambda _: None)
    assert len(set(alive[3:])) == 1
