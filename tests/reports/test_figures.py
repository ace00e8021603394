"""Figures and tables of the page draw what the records say, and nothing that is not known.

What whole studies have on their pages is among the golden answers; here is what those do not hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest

from qlora_sweep.reports.accuracy import accuracy_of
from qlora_sweep.reports.boundary import boundary_of
from qlora_sweep.reports.document import document_of
from qlora_sweep.reports.figures import MARKS, PageFigure, Section
from qlora_sweep.reports.front import front_of
from qlora_sweep.reports.search import search_of
from qlora_sweep.reports.trust import trust_of
from qlora_sweep.reports.view import view_of
from qlora_sweep.reports.words import VERDICT_LABELS
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.storage.definition import MemoryForecast, StudySnapshot, TargetSpeed
from qlora_sweep.storage.ranking import measured_of
from qlora_sweep.storage.records import (
    Carried,
    Crashed,
    DominatedOutOfMemory,
    Lost,
    Measured,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    PrunedSlow,
    TrialRecord,
    Verdict,
)
from tests.reports.synthetic import (
    BASELINE,
    definition,
    fits,
    measurement,
    one_of_each,
    plausible_study,
    predicted,
    record,
    snapshot,
)

HAVE_SPEED = {Verdict.FITS, Verdict.PRUNED_SLOW}
FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)
LEAN = TrialConfig(micro_batch_size=8, upcast_fp32=False)
OOM = OutOfMemory(stage="forward")
ON_TARGET = {0: TargetSpeed(2_400.0, 2_000.0, 2_900.0, "predicted")}

# The page's data


def of(study: StudySnapshot, key: str) -> tuple[tuple[Any, str], ...]:
    """Return each trial's value and words."""
    return document_of(view_of(study)).columns[key].pairs


def test_every_trial_is_there_once_with_what_it_needs() -> None:
    study = snapshot(one_of_each())
    assert [value for value, _ in of(study, "number")] == list(range(11))
    assert of(study, "need")[2:4] == (
        (21.5, "at least 21.50 GiB"),
        (25.0, "25.00 GiB by prediction"),
    )
    assert of(study, "tokens_per_second")[2] == (None, "")


def test_values_that_repeat_are_sent_once_and_true_is_not_one() -> None:
    study = snapshot([fits(n, 8_000.0 + n % 2) for n in range(6)])
    sent = document_of(view_of(study)).columns["tokens_per_second"].to_json()
    assert sent["at"] == [0, 1, 0, 1, 0, 1]
    assert [value for value, _ in sent["pairs"]] == [8_000.0, 8_001.0]
    column = replace(document_of(view_of(study)).columns["number"], pairs=((True, "1"), (1, "1")))
    assert column.to_json()["pairs"] == [(True, "1"), (1, "1")]


def test_a_column_is_there_where_it_says_something() -> None:
    assert not document_of(view_of(snapshot([record(0, Lost())]))).columns.keys() & {
        "tokens_per_second",
        "peak_allocated",
        "final_loss",
    }
    trained = definition(space={"weights": "pretrained"})
    view = view_of(snapshot([fits(0, 8_000.0)], definition=trained))
    assert "final_loss" in document_of(view).columns


def test_a_class_has_one_name_and_what_another_study_measured_is_marked() -> None:
    spelled = TrialConfig(target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    mark = Carried(study="narrow", identity="i", number=7)
    other = fits(1, 9_000.0, spelled).model_copy(update={"carried": mark})
    study = snapshot([fits(0, 8_000.0), other])
    first, second = of(study, "class")
    assert first == second
    assert [words.endswith("carried over from narrow") for _, words in of(study, "role")] == [0, 1]


# The front


def _front(study: StudySnapshot) -> Section:
    section = front_of(document_of(view_of(study)))
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
    figure = _figure(study)
    for one in study.records:
        marks = [
            trace
            for trace in figure.data
            if one.number in trace.customdata and trace.name == VERDICT_LABELS[one.verdict]
        ]
        assert [trace.yaxis == "y2" for trace in marks] == [one.verdict not in HAVE_SPEED]
    left, right = figure.layout.xaxis.range
    assert all(left <= math.log10(x) <= right for trace in figure.data for x in trace.x)
    shown = {tick.partition(":")[0] for tick in figure.layout.yaxis2.ticktext}
    ended = {one.verdict for one in study.records} - HAVE_SPEED
    assert shown == {VERDICT_LABELS[verdict] for verdict in ended}
    assert set(MARKS) == set(Verdict)
    assert len({mark.symbol for mark in MARKS.values()}) == len(Verdict)


@pytest.mark.parametrize("seed", range(2))
def test_the_front_is_what_nothing_measured_beats_in_both(seed: int) -> None:
    study = plausible_study(seed)
    (front,) = _traces(study, "front")
    columns = document_of(view_of(study)).columns
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
    assert len(_front(study).figures[0].rows) == len(expected) > 1


def test_what_was_stopped_is_hollow_and_a_baseline_outside_the_space_is_on_no_front() -> None:
    slow = PrunedSlow(measurement=measurement(3_000.0, peak_allocated_bytes=2 * GIB))
    (front,) = _traces(snapshot([fits(0, 8_000.0), record(1, slow, FAST)]), "front")
    assert list(front.marker.symbol) == ["circle-open", "circle"]
    outside = fits(0, 90_000.0, TrialConfig(lora_rank=64), peak_allocated_bytes=GIB)
    study = snapshot([outside, fits(1, 16_000.0, FAST), fits(2, 8_000.0, TrialConfig())])
    named = {trace.name: trace.y for trace in _traces(study, "others")}
    assert (named["winner"], named["baseline"]) == ((16_000.0,), (90_000.0,))
    (line,) = _traces(study, "front")
    assert 90_000.0 not in line.y
    drawn = [trace.y for one in _searched(study).values() for trace in one.figure.data]
    assert not any(90_000.0 in speeds for speeds in drawn)
    assert boundary_of(document_of(view_of(snapshot([outside])))) is None


def test_a_lower_bound_has_an_arrow_and_what_nothing_is_known_of_a_question_mark() -> None:
    need = PredictedOutOfMemory(predicted_bytes=30 * GIB)
    trials = [fits(0, 8_000.0), record(1, OOM), record(2, need), record(3, Crashed(phase="build"))]
    lanes = list(_traces(snapshot(trials), "lane"))
    assert [trace.text for trace in lanes] == [("→",), ("",), ("?",)]
    assert [trace.x for trace in lanes[:2]] == [(21.5,), (30.0,)]
    (lane,) = _traces(snapshot([record(n, need) for n in range(50)]), "lane")
    assert len(set(lane.y)) == 50, "equals do not hide each other"
    assert all(abs(y) < 0.5 for y in lane.y)


def test_a_view_is_the_front_of_its_two_columns_within_its_class() -> None:
    trials = [
        fits(0, 8_000.0, trainable_parameters=10),
        fits(1, 9_000.0, FAST, trainable_parameters=10),
        fits(2, 5_000.0, TrialConfig(micro_batch_size=8, lora_rank=64), trainable_parameters=40),
    ]
    searched = {"lora_rank": (16, 64), "micro_batch_size": (8, 10), "checkpoint_fraction": (0, 1)}
    dimensions = {key: {"choices": values} for key, values in searched.items()}
    about = definition(space={"fixed": {}, "dimensions": dimensions})
    views = _front(snapshot(trials, definition=about)).views
    assert set(views["tokens_per_second|trainable_parameters|"]) == {1, 2}
    assert list(views["tokens_per_second|trainable_parameters|rank 16 on q,k,v,o"]) == [1]


def test_the_targets_speed_is_drawn_where_another_gpu_stood_in_and_without_whiskers() -> None:
    study = snapshot([fits(0, 8_000.0)], target_speeds=ON_TARGET)
    assert _figure(study).layout.yaxis.title.text == "tokens/s on A10, predicted"
    (front,) = _traces(study, "front")
    assert (front.y, front.error_y.array) == ((2_400.0,), None)
    assert of(study, "tokens_per_second")[0][0] == 8_000.0
    assert of(study, "target_tokens_per_second") == ((2_400.0, "2,400 (2,000–2,900)"),)
    itself = snapshot([fits(0, 8_000.0)], definition=definition(emulated_on=None))
    (front,) = _traces(itself, "front")
    assert list(front.error_y.array) == pytest.approx([80.8], abs=1)
    assert list(front.error_y.arrayminus) == pytest.approx([79.2], abs=1)


def test_an_empty_study_has_no_figures() -> None:
    empty = document_of(view_of(snapshot()))
    assert front_of(empty) is boundary_of(empty) is search_of(empty) is None


# The memory table


def _boundary(study: StudySnapshot) -> Section:
    boundary = boundary_of(document_of(view_of(study)))
    assert boundary is not None
    return boundary


def _cells(study: StudySnapshot) -> list[tuple[str, str, str, int | None]]:
    """Return what the cells say in which anything was tried."""
    cells = [c for panel in _boundary(study).panels for _, row in panel.rows for c in row]
    return [(c.kind, c.text, c.memory, c.trial) for c in cells if c.kind != "untried"]


RAN_OUT = OutOfMemory(stage="backward", peak_allocated_bytes=18 * GIB)
REFUSED = PredictedOutOfMemory(predicted_bytes=25 * GIB)


@pytest.mark.parametrize(
    ("outcomes", "cell"),
    [
        # The fastest of its size, with a mark where another did not fit.
        ([8_000.0, 9_000.0], ("fits", "9.0k", "10.0", 1)),
        ([9_000.0, OOM], ("fits", "9.0k ◩", "10.0", 0)),
        # What ran out needs at least the budget, and what was predicted needs that.
        ([RAN_OUT], ("oom", "✕", "≥ 22.3", 0)),
        ([REFUSED], ("refused", "△", "25.0", 0)),
        ([DominatedOutOfMemory(by=7)], ("refused", "△", "≥ 22.3", 0)),
        ([REFUSED, OOM], ("oom", "✕", "≥ 22.3", 1)),
        # What was not measured to the end.
        ([PrunedSlow(measurement=measurement(3_000.0))], ("partial", "~3.0k", "10.0", 0)),
        ([Crashed(phase="build")], ("unknown", "?", "", 0)),
    ],
)
def test_a_cell_never_takes_a_bound_for_a_need(
    outcomes: list[Outcome | float], cell: tuple[str, str, str, int]
) -> None:
    trials = []
    for number, outcome in enumerate(outcomes):
        config = (BASELINE, LEAN)[number]
        if isinstance(outcome, float):
            trials.append(fits(number, outcome, config))
        else:
            trials.append(record(number, outcome, config, prediction=predicted(22.3)))
    assert _cells(snapshot(trials)) == [cell]


def test_nearest_to_fitting_goes_by_prediction_not_by_where_the_allocation_failed() -> None:
    near, far, unknown = (TrialConfig(micro_batch_size=size) for size in (10, 32, 24))
    early = OutOfMemory(stage="forward", peak_allocated_bytes=5 * GIB)
    late = OutOfMemory(stage="backward", peak_allocated_bytes=21 * GIB)
    records = [
        record(0, early, far, prediction=predicted(60)),
        record(1, late, near, prediction=predicted(22)),
        record(2, OOM, unknown),
    ]
    nearest = _boundary(snapshot(records)).nearest
    assert [row[0] for row in nearest] == ["1", "0"]
    assert nearest[0][2] == "at least 22.00 GiB by prediction"


def test_what_was_not_tried_is_predicted_where_that_is_at_hand() -> None:
    # At each micro-batch and length one was tried, and as the fastest nothing else.
    long = LEAN.model_copy(update={"micro_batch_size": 4, "seq_len": 1024})
    untried = {
        LEAN.model_copy(update={"micro_batch_size": 4}): MemoryForecast(12 * GIB, {}, "yes"),
        LEAN.model_copy(update={"seq_len": 1024}): MemoryForecast(12 * GIB, {}, "no"),
    }
    study = snapshot([fits(0, 9_000.0, LEAN), fits(1, 8_000.0, long)], memory_forecasts=untried)
    found = [(kind, text) for kind, text, *_ in _cells(study)]
    assert sorted(found) == [
        ("expected", "△"),
        ("expected", "○"),
        ("fits", "8.0k"),
        ("fits", "9.0k"),
    ]


def test_a_size_that_does_not_go_into_the_effective_batch_is_untried() -> None:
    batches = {"micro_batch_size": [4, 8], "effective_batch_size": [8, 12], "seq_len": [512, 1024]}
    about = definition(space={"dimensions": batches})
    fast = TrialConfig(micro_batch_size=4, effective_batch_size=12)
    slow = TrialConfig(micro_batch_size=8, effective_batch_size=8, seq_len=1024)
    trials = [fits(0, 9_000.0, fast), fits(1, 8_000.0, slow)]
    study = snapshot(trials, definition=about, memory_forecasts={})
    assert [kind for kind, *_ in _cells(study)] == ["fits", "fits"]


# How far to trust it


def _trust(study: StudySnapshot) -> Section:
    return trust_of(document_of(view_of(study)))


def _trial(number: int, gib: float, speed: float | None = None) -> TrialRecord:
    outcome = Measured(measurement=measurement(10_000.0))
    config = TrialConfig(micro_batch_size=number + 1)
    return record(number, outcome, config, prediction=predicted(gib, speed))


def test_errors_are_of_trials_that_fit_with_their_median_and_their_worst() -> None:
    whole = [_trial(0, 10.0, 10_000.0), _trial(1, 10.2, 9_000.0), _trial(2, 9.0, None)]
    # Neither is held against a prediction: the one has no whole speed, the other no peak.
    others = (PrunedSlow(measurement=measurement(50.0)), OOM)
    cut = [record(3 + n, o, prediction=predicted(90, 1.0)) for n, o in enumerate(others)]
    study = snapshot([*whole, *cut])
    memory, speed = _trust(study).accuracy
    assert memory.errors == pytest.approx({0: 0.0, 1: 0.02, 2: -0.1})
    assert memory.median == pytest.approx(0.02)
    assert speed.errors == pytest.approx({0: 0.0, 1: -0.1})
    assert "trial 2, was predicted 10 % too little" in str(memory)
    assert "10 % too slow" in str(speed)
    shown, _, _ = _trust(study).figures
    assert list(shown.figure.data[0].customdata) == [0, 1, 2]
    assert accuracy_of(document_of(view_of(snapshot([fits(0, 9_000.0)]))), "memory") is None


@pytest.mark.parametrize("trials", [0, 1, 60])
def test_every_trial_has_a_bar_as_long_as_it_took(trials: int) -> None:
    study = plausible_study(1, trials=trials)
    section = _trust(study)
    assert sum(int(number) for _, number, _ in section.spent) == trials
    bars = section.figures[-1].figure.data if trials else ()
    took = {n: ms for bar in bars for n, ms in zip(bar.customdata, bar.x, strict=True)}
    assert took == pytest.approx({r.number: 1000 * r.wall_seconds for r in study.records}, abs=1)


def test_a_pause_is_cut_out_and_a_start_that_is_no_time_breaks_nothing() -> None:
    starts = ("2025-03-01T09:30:00+00:00", "yesterday", None, "2025-03-03T09:30:00+00:00")
    records = [
        fits(n, 8_000.0 + n).model_copy(update={"started_at": start})
        for n, start in enumerate(starts)
    ]
    (pause,) = _trust(snapshot(records)).figures[-1].figure.layout.xaxis.rangebreaks
    assert [end[:16] for end in pause.bounds] == ["2025-03-01T09:30", "2025-03-03T09:30"]


# What the search found


def _searched(study: StudySnapshot) -> dict[str, PageFigure]:
    section = search_of(document_of(view_of(study)))
    assert section is not None
    return {figure.id: figure for figure in section.figures}


def test_the_best_so_far_only_rises_and_falls_where_less_is_asked_for() -> None:
    study = plausible_study()
    line = _searched(study)["history"].figure.data[0]
    fitting = [r for r in study.records if r.verdict is Verdict.FITS]
    fastest = max(measured_of(record).tokens_per_second for record in fitting)
    assert list(line.y) == sorted(line.y)
    assert line.y[-1] == pytest.approx(fastest, rel=1e-5)
    about = definition(space={"objectives": ["peak_memory"]})
    trials = [
        fits(0, 8_000.0, peak_allocated_bytes=8 * GIB),
        fits(1, 7_000.0, FAST, peak_allocated_bytes=4 * GIB),
    ]
    line = _searched(snapshot(trials, definition=about))["history"].figure.data[0]
    assert list(line.y) == [8.0, 4.0]


def test_nothing_is_drawn_of_fewer_than_two_trials_that_fitted_or_of_settings_that_stay() -> None:
    assert search_of(document_of(view_of(snapshot(one_of_each())))) is None
    assert set(_searched(snapshot([fits(0, 8_000.0), fits(1, 8_100.0)]))) == {"history"}
