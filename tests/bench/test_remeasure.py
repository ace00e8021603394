"""What a new measurement says of an old one, and how it is taken up again."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from tests.bench.moved import compare, read_rows
from tests.bench.remeasure import DATA, PRODUCERS, describe, run
from tests.bench.stamp import OUT_OF_TIME, stamp


def row(batch: int = 8, **figures: Any) -> dict[str, Any]:
    config = TrialConfig(micro_batch_size=batch).model_dump(mode="json")
    return {"model": "mistral-7b-v0.3", "config": config, **figures}


def test_memory_has_moved_where_a_byte_has() -> None:
    old = [row(8, peak_allocated_bytes=1000), row(9, peak_allocated_bytes=2000)]
    new = [row(9, peak_allocated_bytes=2001), row(8, peak_allocated_bytes=1000)]
    (change,) = compare(old, new).allocated
    assert (change.old, change.new) == (2000, 2001)
    assert '"micro_batch_size": 9' in change.what


@pytest.mark.parametrize(
    ("times", "has_moved"), [([0.35, 0.37], False), ([0.39, 0.42], False), ([0.49, 0.55], True)]
)
def test_speed_has_moved_where_the_ranges_of_steps_do_not_meet(
    times: list[float], has_moved: bool
) -> None:
    old = [row(step_seconds=0.36, step_times=[0.33, 0.40])]
    moved = compare(old, [row(step_seconds=times[0], step_times=times)])
    assert bool(moved.seconds) is has_moved
    assert moved.speed_ratio_median == pytest.approx(times[0] / 0.36)


def test_a_verdict_that_changed_is_named_and_rows_not_yet_measured_are_not_moved() -> None:
    old = [row(8, verdict="fits"), row(9, verdict="fits"), row(10, verdict="oom")]
    moved = compare(old, [row(8, verdict="fits"), row(9, verdict="oom")])
    assert [(c.old, c.new) for c in moved.verdicts] == [("fits", "oom")]
    assert (moved.rows_common, moved.rows_old) == (2, 3)
    assert "2 of 3 rows measured again" in moved.lines("edges")[0]


def test_repeated_configurations_are_compared_in_their_order() -> None:
    old = [row(peak_allocated_bytes=peak) for peak in (1, 2, 3)]
    assert compare(old, old).allocated == []
    assert len(compare(old, [*old[:2], row(peak_allocated_bytes=4)]).allocated) == 1


def test_every_committed_measurement_has_a_command_that_makes_it() -> None:
    made = {producer.committed for producer in PRODUCERS.values()}
    # What others published is read, not measured; each row names its source.
    assert set(DATA.glob("*.jsonl")) - set(DATA.glob("published_*.jsonl")) <= made
    assert all(path.exists() for path in made)
    for producer in PRODUCERS.values():
        rows = read_rows(producer.committed)
        moved = compare(rows, rows)
        assert moved.rows_common == len(rows) > 0
        assert [moved.allocated, moved.reserved, moved.seconds, moved.verdicts] == [[]] * 4


@pytest.mark.parametrize(("status", "is_whole"), [(0, True), (OUT_OF_TIME, False)])
def test_a_command_that_ran_out_of_time_leaves_a_file_that_is_not_whole(
    tmp_path: Path, status: int, is_whole: bool
) -> None:
    command = [sys.executable, "-c", f"raise SystemExit({status})"]
    deadline = time.monotonic() + 100
    assert run([command], deadline=deadline, log=tmp_path / "log") is is_whole


def test_a_command_that_failed_is_told_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(SystemExit, match="exited 3; see"):
        run([command], deadline=time.monotonic() + 100, log=tmp_path / "log")


def test_beside_a_file_stands_what_made_it(tmp_path: Path) -> None:
    rows = [row(peak_allocated_bytes=1)]
    describe(tmp_path / "held_out.jsonl", rows, is_complete=False, moved=compare(rows, rows))
    document = json.loads((tmp_path / "held_out.meta.json").read_text(encoding="utf-8"))
    assert document["rows"] == 1
    assert document["is_complete"] is False
    assert set(stamp()) <= set(document)
    assert {"card", "driver", "date", "command", "versions"} <= set(document)
