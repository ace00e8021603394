"""The front draws what the records say by any two numbers, and nothing without a speed has one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest

from reports.document import document_of
from reports.figures.figure import resolved
from reports.figures.front import told_apart
from reports.figures.memory_scale import MemoryScale
from reports.figures.style import MARKS
from reports.front import front_of
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


def _drawing(study: StudySnapshot) -> dict[str, Any]:
    section = front_of(study)
    assert section is not None
    return resolved(section.figures[0].plain, document_of(study)["trials"])


def _traces(study: StudySnapshot, meta: str) -> Iterator[dict[str, Any]]:
    return (trace for trace in _drawing(study)["data"] if trace["meta"] == meta)


def _controls(study: StudySnapshot) -> dict[str, Any]:
    section = front_of(study)
    assert section is not None
    return dict(section.figures[0].controls or {})


@pytest.mark.parametrize(
    "study", [plausible_study(), snapshot(one_of_each())], ids=["whole", "each"]
)
def test_every_trial_has_one_mark_and_plotly_understands_all_of_them(study: StudySnapshot) -> None:
    section = front_of(study)
    assert section is not None
    data = section.figures[0].plain["data"]
    rows = [r for t in data if t["meta"] in {"others", "front", "lane"} for r in t["rows"]]
    assert sorted(rows) == list(range(len(study.records)))
    go.Figure(_drawing(study))


def test_a_measured_trial_is_at_its_memory_and_speed() -> None:
    study = snapshot([fits(0, 8_000.0), fits(1, 16_000.0, FAST, peak_allocated_bytes=20 * GIB)])
    (front,) = _traces(study, "front")
    assert list(zip(front["x"], front["y"], strict=True)) == [(10.0, 8_000.0), (20.0, 16_000.0)]


@pytest.mark.parametrize("seed", range(3))
def test_the_front_is_what_nothing_measured_beats_in_both(seed: int) -> None:
    study = plausible_study(seed)
    (front,) = _traces(study, "line")
    measured = [
        (t["peak_allocated"], t["tokens_per_second"])
        for t in document_of(study)["trials"]
        if "tokens_per_second" in t
    ]
    expected = [
        (memory, speed)
        for memory, speed in measured
        if not any(
            less <= memory and more >= speed and (less, more) != (memory, speed)
            for less, more in measured
        )
    ]
    assert list(zip(front["x"], front["y"], strict=True)) == sorted(expected)
    ranked = ranking.pareto_front(study.records, ("tokens_per_second", "peak_memory"))
    assert len(ranked) >= len(expected) > 1


def test_a_trial_that_was_stopped_is_hollow_on_the_front() -> None:
    slow = PrunedSlow(measurement=measurement(3_000.0, peak_allocated_bytes=2 * GIB))
    (front,) = _traces(snapshot([fits(0, 8_000.0), record(1, slow, FAST)]), "front")
    assert front["marker"]["symbol"] == ["circle-open", "circle"]


def test_a_baseline_outside_the_space_is_marked_and_on_no_front() -> None:
    outside = fits(0, 90_000.0, TrialConfig(lora_rank=64), peak_allocated_bytes=GIB)
    study = snapshot([outside, fits(1, 16_000.0, FAST)])
    named = {trace["name"]: trace["y"] for trace in _traces(study, "named")}
    assert named == {"winner": [16_000.0], "baseline": [90_000.0]}
    (line,) = _traces(study, "line")
    assert line["y"] == [16_000.0]


def test_every_verdict_without_a_speed_has_a_lane_with_its_name_and_count() -> None:
    study = snapshot([*one_of_each(), record(11, Crashed(phase="build"))])
    ticks = _drawing(study)["layout"]["yaxis2"]["ticktext"]
    names = [MARKS[verdict].lane for verdict in Verdict if verdict not in HAVE_SPEED]
    counts = [2 if name == "crashed" else 1 for name in names]
    assert ticks == [f"{name}: {n}" for name, n in zip(names, counts, strict=True)]
    assert all(trace["yaxis"] == "y2" for trace in _traces(study, "lane"))


def test_a_lower_bound_has_an_arrow_and_what_nothing_is_known_of_a_question_mark() -> None:
    trials = [
        fits(0, 8_000.0),
        record(1, OutOfMemory(stage="forward")),
        record(2, PredictedOutOfMemory(predicted_bytes=30 * GIB)),
        record(3, Crashed(phase="build")),
    ]
    texts = [trace["text"] for trace in _traces(snapshot(trials), "lane")]
    assert texts == [["→"], [""], ["?"]]


def test_needs_far_beyond_the_budget_stay_apart_and_in_order() -> None:
    needs = [22, 30, 60, 200, 900]
    trials: list[TrialRecord] = [
        record(n, PredictedOutOfMemory(predicted_bytes=need * GIB)) for n, need in enumerate(needs)
    ]
    study = snapshot([*trials, fits(9, 8_000.0)])
    (lane,) = _traces(study, "lane")
    left, right = _drawing(study)["layout"]["xaxis"]["range"]
    places = [(x - left) / (right - left) for x in lane["x"]]
    assert all(b - a > 0.02 for a, b in itertools.pairwise(places))
    assert all(0 < place < 1 for place in places)


def test_equals_of_a_lane_do_not_hide_each_other() -> None:
    trials = [record(n, PredictedOutOfMemory(predicted_bytes=30 * GIB)) for n in range(50)]
    (lane,) = _traces(snapshot(trials), "lane")
    assert len(set(lane["y"])) == 50
    assert all(abs(y) < 0.5 for y in lane["y"])


@pytest.mark.parametrize("seed", range(3))
def test_every_mark_lies_within_the_memory_axis(seed: int) -> None:
    drawing = _drawing(plausible_study(seed))
    left, right = drawing["layout"]["xaxis"]["range"]
    assert all(left <= x <= right for trace in drawing["data"] for x in trace["x"])


def test_the_memory_axis_is_even_up_to_the_budget_and_little_is_told_in_mib() -> None:
    scale = MemoryScale(left=4.0, budget=21.5, right=172.0, unit="GiB")
    assert [scale.position(gib) for gib in (4.0, 20.0, 21.5)] == [4.0, 20.0, 21.5]
    assert scale.axis()["ticktext"] == ["5", "10", "15", "20", "2×", "4×", "8×"]
    small = snapshot(
        [fits(0, 8_000.0, peak_allocated_bytes=2**25)], definition=definition(budget_bytes=2**26)
    )
    axis = _drawing(small)["layout"]["xaxis"]
    assert axis["title"]["text"] == "peak allocated memory (MiB)"
    assert axis["ticktext"] == ["40", "50", "60"]
    assert "64.00 MiB" in _drawing(small)["layout"]["annotations"][0]["text"]


def test_the_budget_is_a_line_across_both_panels_with_its_size() -> None:
    layout = _drawing(plausible_study())["layout"]
    (line,) = layout["shapes"]
    assert line["x0"] == line["x1"] == BUDGET_BYTES / GIB
    assert "21.50 GiB" in layout["annotations"][0]["text"]


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
    views = _controls(study)["views"]
    speed_and_rank = views["tokens_per_second|trainable_parameters|"]
    assert set(speed_and_rank["rows"]) == {1, 2}
    within = views["tokens_per_second|trainable_parameters|rank 16 on q,k,v,o"]
    assert within["rows"] == (1,)


def test_the_target_s_speed_is_drawn_where_another_card_stood_in() -> None:
    speed = TargetSpeed(2_400.0, 2_000.0, 2_900.0, "predicted")
    study = replace(snapshot([fits(0, 8_000.0)]), target_speeds={0: speed})
    drawing = _drawing(study)
    assert drawing["layout"]["yaxis"]["title"]["text"] == "tokens/s on A10, predicted"
    (front,) = _traces(study, "front")
    assert front["y"] == [2_400.0]


def test_labels_say_what_differs_and_leave_out_what_all_share() -> None:
    recipe = TrialConfig(micro_batch_size=8).model_dump(mode="json")
    first = recipe | {"micro_batch_size": 4, "kernels": "liger"}
    second = recipe | {"checkpoint_fraction": 0.0, "kernels": "liger"}
    labels, shared = told_apart([first, second], recipe=recipe)
    assert labels == ["4 × 512, full checkpointing", "8 × 512, no checkpointing"]
    assert shared == "Liger kernels"


@pytest.mark.parametrize(
    "records",
    [one_of_each()[:1], one_of_each()[1:2], one_of_each()[2:5], one_of_each()[5:]],
    ids=["one fit", "one slow", "all out of memory", "all failed"],
)
def test_any_study_has_a_front_that_plotly_understands(records: Sequence[TrialRecord]) -> None:
    go.Figure(_drawing(snapshot(records)))
    assert front_of(snapshot()) is None


def test_whiskers_are_the_intervals_of_measured_speeds_alone() -> None:
    target = {"gpu": "a10", "emulated_on": None}
    study = snapshot([fits(0, 8_000.0)], definition=definition(**target))
    (front,) = _traces(study, "front")
    assert front["error_y"]["array"] == pytest.approx([80.8], abs=1)
    assert front["error_y"]["arrayminus"] == pytest.approx([79.2], abs=1)
    speeds = {0: TargetSpeed(1_000.0, 800.0, 1_300.0, "predicted")}
    (front,) = _traces(snapshot([fits(0, 8_000.0)], target_speeds=speeds), "front")
    assert "error_y" not in front


def test_the_front_has_a_table_behind_it() -> None:
    section = front_of(plausible_study())
    assert section is not None
    figure = section.figures[0]
    assert figure.table is not None
    (view,) = (v for k, v in (figure.controls or {})["views"].items() if k == _opening(figure))
    assert len(figure.table.rows) == len(view["rows"]) > 2


def _opening(figure: Any) -> str:
    return f"{figure.controls['y']}|{figure.controls['x']}|"
