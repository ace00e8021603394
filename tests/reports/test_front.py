"""The front draws what the records say by any two numbers, and nothing without a speed has one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest

from reports.document import document_of
from reports.front import FrontSection, front_of
from reports.words import VERDICT_LABELS
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage import ranking
from storage.definition import StudySnapshot, TargetSpeed
from storage.records import (
    Crashed,
    OutOfMemory,
    PredictedOutOfMemory,
    PrunedSlow,
    TrialRecord,
    Verdict,
)
from tests.reports.synthetic import (
    BUDGET_BYTES,
    definition,
    fits,
    measurement,
    one_of_each,
    plausible_study,
    record,
    snapshot,
)

HAVE_SPEED = {Verdict.FITS, Verdict.PRUNED_SLOW}
FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)
RICH = TrialConfig(micro_batch_size=8, lora_rank=64)


def _front(study: StudySnapshot) -> FrontSection:
    section = front_of(document_of(study))
    assert section is not None
    return section


def _figure(study: StudySnapshot) -> go.Figure:
    return _front(study).figures[0].figure


def _traces(study: StudySnapshot, meta: str) -> Iterator[Any]:
    return (trace for trace in _figure(study).data if trace.meta == meta)


@pytest.mark.parametrize(
    "study", [plausible_study(), snapshot(one_of_each())], ids=["whole", "each"]
)
def test_every_trial_has_a_mark_of_how_it_ended_and_only_what_ran_has_a_speed(
    study: StudySnapshot,
) -> None:
    for one in study.records:
        marks = [
            trace
            for trace in _figure(study).data
            if one.number in trace.customdata and trace.name == VERDICT_LABELS[one.verdict]
        ]
        assert [trace.yaxis == "y2" for trace in marks] == [one.verdict not in HAVE_SPEED]


@pytest.mark.parametrize("seed", range(3))
def test_the_front_is_what_nothing_measured_beats_in_both(seed: int) -> None:
    study = plausible_study(seed)
    (front,) = _traces(study, "front")
    columns = document_of(study).columns
    known = zip(columns["peak_allocated"].values, columns["tokens_per_second"].values, strict=True)
    measured = [(memory, speed) for memory, speed in known if speed is not None]
    expected = [
        (memory, speed)
        for memory, speed in measured
        if not any(
            less <= memory and more >= speed and (less, more) != (memory, speed)
            for less, more in measured
        )
    ]
    assert list(zip(front.x, front.y, strict=True)) == sorted(expected)
    ranked = ranking.pareto_front(study.records, ("tokens_per_second", "peak_memory"))
    assert len(ranked) >= len(expected) > 1
    assert len(_front(study).figures[0].rows) == len(expected)


def test_a_measured_trial_is_at_its_memory_and_speed() -> None:
    study = snapshot([fits(0, 8_000.0), fits(1, 16_000.0, FAST, peak_allocated_bytes=20 * GIB)])
    (front,) = _traces(study, "front")
    assert list(zip(front.x, front.y, strict=True)) == [(10.0, 8_000.0), (20.0, 16_000.0)]


def test_a_trial_that_was_stopped_is_hollow_on_the_front() -> None:
    slow = PrunedSlow(measurement=measurement(3_000.0, peak_allocated_bytes=2 * GIB))
    (front,) = _traces(snapshot([fits(0, 8_000.0), record(1, slow, FAST)]), "front")
    assert list(front.marker.symbol) == ["circle-open", "circle"]


def test_a_baseline_outside_the_space_is_marked_and_on_no_front() -> None:
    outside = fits(0, 90_000.0, TrialConfig(lora_rank=64), peak_allocated_bytes=GIB)
    study = snapshot([outside, fits(1, 16_000.0, FAST)])
    named = {trace.name: trace.y for trace in _traces(study, "others")}
    assert (named["winner"], named["baseline"]) == ((16_000.0,), (90_000.0,))
    (line,) = _traces(study, "front")
    assert line.y == (16_000.0,)


def test_every_verdict_without_a_speed_has_a_lane_with_its_name_and_count() -> None:
    study = snapshot([*one_of_each(), record(11, Crashed(phase="build"))])
    ticks = _figure(study).layout.yaxis2.ticktext
    names = [VERDICT_LABELS[verdict] for verdict in Verdict if verdict not in HAVE_SPEED]
    counts = [2 if name == "crashed" else 1 for name in names]
    assert list(ticks) == [f"{name}: {n}" for name, n in zip(names, counts, strict=True)]


def test_a_lower_bound_has_an_arrow_and_what_nothing_is_known_of_a_question_mark() -> None:
    trials = [
        fits(0, 8_000.0),
        record(1, OutOfMemory(stage="forward")),
        record(2, PredictedOutOfMemory(predicted_bytes=30 * GIB)),
        record(3, Crashed(phase="build")),
    ]
    lanes = list(_traces(snapshot(trials), "lane"))
    assert [trace.text for trace in lanes] == [("→",), ("",), ("?",)]
    assert [trace.x for trace in lanes[:2]] == [(21.5,), (30.0,)]
    assert [trace.hovertext for trace in lanes] == [
        ("needs at least 21.5 GiB",),
        ("needs 30 GiB",),
        ("what it needs is not known",),
    ]


def test_equals_of_a_lane_do_not_hide_each_other() -> None:
    trials = [record(n, PredictedOutOfMemory(predicted_bytes=30 * GIB)) for n in range(50)]
    (lane,) = _traces(snapshot(trials), "lane")
    assert len(set(lane.y)) == 50
    assert all(abs(y) < 0.5 for y in lane.y)


@pytest.mark.parametrize("seed", range(3))
def test_every_mark_lies_within_the_memory_axis(seed: int) -> None:
    figure = _figure(plausible_study(seed))
    left, right = figure.layout.xaxis.range
    assert all(left <= math.log10(x) <= right for trace in figure.data for x in trace.x)


def test_the_budget_is_a_line_across_both_panels_with_its_size() -> None:
    layout = _figure(plausible_study()).layout
    (line,) = layout.shapes
    assert line.x0 == line.x1 == BUDGET_BYTES / GIB
    assert "21.50 GiB" in layout.annotations[0].text
    small = snapshot(
        [fits(0, 8_000.0, peak_allocated_bytes=2**25)], definition=definition(budget_bytes=2**26)
    )
    layout = _figure(small).layout
    assert layout.xaxis.title.text == "peak allocated memory (MiB)"
    assert "64.00 MiB" in layout.annotations[0].text


def test_a_view_is_the_front_of_its_two_columns_within_its_class() -> None:
    trials = [
        fits(0, 8_000.0, trainable_parameters=10),
        fits(1, 9_000.0, FAST, trainable_parameters=10),
        fits(2, 5_000.0, RICH, trainable_parameters=40),
    ]
    searched = {
        "lora_rank": (16, 64),
        "micro_batch_size": (8, 10),
        "checkpoint_fraction": (0.0, 1.0),
    }
    dimensions = {key: {"choices": values} for key, values in searched.items()}
    space = {"fixed": {}, "dimensions": dimensions}
    study = snapshot(trials, definition=definition(space=space))
    views = _front(study).views
    assert set(views["tokens_per_second|trainable_parameters|"]) == {1, 2}
    assert list(views["tokens_per_second|trainable_parameters|rank 16 on q,k,v,o"]) == [1]


def test_the_target_s_speed_is_drawn_where_another_gpu_stood_in() -> None:
    speed = TargetSpeed(2_400.0, 2_000.0, 2_900.0, "predicted")
    study = replace(snapshot([fits(0, 8_000.0)]), target_speeds={0: speed})
    assert _figure(study).layout.yaxis.title.text == "tokens/s on A10, predicted"
    (front,) = _traces(study, "front")
    assert front.y == (2_400.0,)


@pytest.mark.parametrize(
    "records",
    [one_of_each()[:1], one_of_each()[1:2], one_of_each()[2:5], one_of_each()[5:]],
    ids=["one fit", "one slow", "all out of memory", "all failed"],
)
def test_any_study_has_a_front(records: Sequence[TrialRecord]) -> None:
    assert _figure(snapshot(records)).data
    assert front_of(document_of(snapshot())) is None


def test_whiskers_are_the_intervals_of_measured_speeds_alone() -> None:
    study = snapshot([fits(0, 8_000.0)], definition=definition(emulated_on=None))
    (front,) = _traces(study, "front")
    assert list(front.error_y.array) == pytest.approx([80.8], abs=1)
    assert list(front.error_y.arrayminus) == pytest.approx([79.2], abs=1)
    speeds = {0: TargetSpeed(1_000.0, 800.0, 1_300.0, "predicted")}
    (front,) = _traces(snapshot([fits(0, 8_000.0)], target_speeds=speeds), "front")
    assert front.error_y.array is None
