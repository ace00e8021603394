"""Figures and tables of the page draw what the records say, and nothing that is not known.

What whole studies have on their pages is among the golden answers; here is what those do not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import plotly.graph_objects as go
import pytest

from qlora_sweep.reports.accuracy import accuracy_of
from qlora_sweep.reports.boundary import boundary_of
from qlora_sweep.reports.document import TrialTable, document_of
from qlora_sweep.reports.figures import MARKS, Section
from qlora_sweep.reports.front import front_of
from qlora_sweep.reports.search import search_of
from qlora_sweep.reports.trust import trust_of
from qlora_sweep.reports.view import view_of
from qlora_sweep.reports.words import VERDICT_LABELS
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.storage.definition import MemoryForecast, StudySnapshot, TargetSpeed
from qlora_sweep.storage.records import (
    Carried,
    Crashed,
    DominatedOutOfMemory,
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
    predicted,
    record,
    snapshot,
)
from tests.storage.builders import changed

HAVE_SPEED = {Verdict.FITS, Verdict.PRUNED_SLOW}
FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)
LEAN = TrialConfig(micro_batch_size=8, upcast_fp32=False)
OOM = OutOfMemory(stage="forward")
ON_TARGET = {0: TargetSpeed(2_400.0, 2_000.0, 2_900.0, "predicted")}

# The page's data


def of(study: StudySnapshot, key: str) -> tuple[tuple[Any, str], ...]:
    """Return each trial's value and words."""
    return document_of(view_of(study)).columns[key].pairs


def section_of(make: Callable[[TrialTable], Section | None], study: StudySnapshot) -> Section:
    return make(document_of(view_of(study)))


def test_every_trial_is_there_once_with_what_it_needs() -> None:
    study = snapshot(one_of_each())
    assert [value for value, _ in of(study, "number")] == list(range(11))
    assert [need for need, _ in of(study, "need")[2:4]] == [21.5, 25.0]
    assert of(study, "tokens_per_second")[2] == (None, "")


def test_a_class_has_one_name_and_trials_of_another_study_are_marked() -> None:
    spelled = TrialConfig(target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    mark = Carried(study="narrow", identity="i", number=7)
    other = changed(fits(1, 9_000.0, spelled), carried=mark)
    study = snapshot([fits(0, 8_000.0), other])
    first, second = of(study, "class")
    assert first == second
    assert [words.endswith("carried over from narrow") for _, words in of(study, "role")] == [0, 1]


# The front


def _figure(study: StudySnapshot) -> go.Figure:
    return section_of(front_of, study).figures[0].figure


def _traces(study: StudySnapshot, meta: str) -> Iterator[Any]:
    return (trace for trace in _figure(study).data if trace.meta == meta)


def test_every_trial_has_a_mark_of_its_verdict() -> None:
    study = snapshot(one_of_each())
    figure = _figure(study)
    for one in study.records:
        label = VERDICT_LABELS[one.verdict]
        marks = [t for t in figure.data if one.number in t.customdata and t.name == label]
        assert [mark.yaxis == "y2" for mark in marks] == [one.verdict not in HAVE_SPEED]
    left, right = figure.layout.xaxis.range
    assert all(left <= math.log10(x) <= right for trace in figure.data for x in trace.x)
    shown = {tick.partition(":")[0] for tick in figure.layout.yaxis2.ticktext}
    assert shown == {VERDICT_LABELS[verdict] for verdict in set(Verdict) - HAVE_SPEED}
    assert len({MARKS[verdict].symbol for verdict in Verdict}) == len(Verdict)


def test_a_trial_that_was_pruned_is_hollow() -> None:
    slow = PrunedSlow(measurement=measurement(3_000.0, peak_allocated_bytes=2 * GIB))
    (front,) = _traces(snapshot([fits(0, 8_000.0), record(1, slow, FAST)]), "front")
    assert list(front.marker.symbol) == ["circle-open", "circle"]


def test_a_baseline_outside_the_space_is_named_and_on_no_front() -> None:
    outside = fits(0, 90_000.0, TrialConfig(lora_rank=64), peak_allocated_bytes=GIB)
    study = snapshot([outside, fits(1, 16_000.0, FAST), fits(2, 8_000.0, TrialConfig())])
    named = {trace.name: trace.y for trace in _traces(study, "others")}
    assert named["winner"] == (16_000.0,)
    assert named["baseline"] == (90_000.0,)
    (line,) = _traces(study, "front")
    assert 90_000.0 not in line.y
    for figure in section_of(search_of, study).figures:
        assert not any(90_000.0 in trace.y for trace in figure.figure.data)
    assert boundary_of(document_of(view_of(snapshot([outside])))) is None


def test_a_lower_bound_has_an_arrow_and_an_unknown_need_a_question_mark() -> None:
    need = PredictedOutOfMemory(predicted_bytes=30 * GIB)
    trials = [fits(0, 8_000.0), record(1, OOM), record(2, need), record(3, Crashed(phase="build"))]
    lanes = list(_traces(snapshot(trials), "lane"))
    assert [trace.text for trace in lanes] == [("→",), ("",), ("?",)]
    assert [trace.x for trace in lanes[:2]] == [(21.5,), (30.0,)]


def test_a_view_is_the_front_of_its_two_columns_within_its_class() -> None:
    trials = [
        fits(0, 8_000.0, trainable_parameters=10),
        fits(1, 9_000.0, FAST, trainable_parameters=10),
        fits(2, 5_000.0, TrialConfig(micro_batch_size=8, lora_rank=64), trainable_parameters=40),
    ]
    dimensions = {"lora_rank": (16, 64), "micro_batch_size": (8, 10), "checkpoint_fraction": (0, 1)}
    about = definition(space={"fixed": {}, "dimensions": dimensions})
    views = section_of(front_of, snapshot(trials, definition=about)).views
    assert set(views["tokens_per_second|trainable_parameters|"]) == {1, 2}
    assert list(views["tokens_per_second|trainable_parameters|rank 16 on q,k,v,o"]) == [1]


def test_an_empty_study_has_no_figures() -> None:
    empty = document_of(view_of(snapshot()))
    assert front_of(empty) is boundary_of(empty) is search_of(empty) is None


# The memory table


def _cells(study: StudySnapshot) -> list[tuple[str, str, str, int | None]]:
    """Return what the cells say in which anything was tried."""
    panels = section_of(boundary_of, study).panels
    cells = [cell for panel in panels for _, row in panel.rows for cell in row]
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


def test_a_cell_without_a_trial_has_its_prediction() -> None:
    # At each micro-batch and length one was tried, and nothing else as the fastest.
    long = changed(LEAN, micro_batch_size=4, seq_len=1024)
    untried = {
        changed(LEAN, micro_batch_size=4): MemoryForecast(12 * GIB, {}, "yes"),
        changed(LEAN, seq_len=1024): MemoryForecast(12 * GIB, {}, "no"),
    }
    study = snapshot([fits(0, 9_000.0, LEAN), fits(1, 8_000.0, long)], memory_forecasts=untried)
    expected = [(text, kind == "expected") for kind, text, *_ in _cells(study)]
    assert sorted(expected) == [("8.0k", False), ("9.0k", False), ("△", True), ("○", True)]


def test_a_size_that_does_not_go_into_the_effective_batch_is_untried() -> None:
    batches = {"micro_batch_size": [4, 8], "effective_batch_size": [8, 12], "seq_len": [512, 1024]}
    about = definition(space={"dimensions": batches})
    fast = TrialConfig(micro_batch_size=4, effective_batch_size=12)
    slow = TrialConfig(micro_batch_size=8, effective_batch_size=8, seq_len=1024)
    trials = [fits(0, 9_000.0, fast), fits(1, 8_000.0, slow)]
    study = snapshot(trials, definition=about, memory_forecasts={})
    assert [kind for kind, *_ in _cells(study)] == ["fits", "fits"]


# How far to trust it


def _trial(number: int, gib: float, speed: float | None = None) -> TrialRecord:
    outcome = Measured(measurement=measurement(10_000.0))
    config = TrialConfig(micro_batch_size=number + 1)
    return record(number, outcome, config, prediction=predicted(gib, speed))


def test_errors_of_predictions_have_their_median_and_their_worst() -> None:
    whole = [_trial(0, 10.0, 10_000.0), _trial(1, 10.2, 9_000.0), _trial(2, 9.0, None)]
    # A pruned trial has no whole speed, and one out of memory no peak.
    slow = PrunedSlow(measurement=measurement(50.0))
    cut = [record(3 + n, o, prediction=predicted(90, 1.0)) for n, o in enumerate((slow, OOM))]
    memory, speed = section_of(trust_of, snapshot([*whole, *cut])).accuracy
    assert memory.errors == pytest.approx({0: 0.0, 1: 0.02, 2: -0.1})
    assert memory.median == pytest.approx(0.02)
    assert speed.errors == pytest.approx({0: 0.0, 1: -0.1})
    assert "trial 2, was predicted 10 % too little" in str(memory)
    assert accuracy_of(document_of(view_of(snapshot([fits(0, 9_000.0)]))), "memory") is None


def test_a_pause_is_cut_out_and_a_start_that_is_no_time_breaks_nothing() -> None:
    starts = ("2025-03-01T09:30:00+00:00", "yesterday", None, "2025-03-03T09:30:00+00:00")
    records = [changed(fits(n, 8_000.0 + n), started_at=start) for n, start in enumerate(starts)]
    (pause,) = section_of(trust_of, snapshot(records)).figures[-1].figure.layout.xaxis.rangebreaks
    assert [end[:16] for end in pause.bounds] == ["2025-03-01T09:30", "2025-03-03T09:30"]


# What the search found


def _history(study: StudySnapshot) -> Any:
    (history,) = [f for f in section_of(search_of, study).figures if f.id == "history"]
    return history.figure.data[0].y


def test_the_best_so_far_is_of_what_is_asked_for() -> None:
    trials = [
        fits(0, 8_000.0, peak_allocated_bytes=8 * GIB),
        fits(1, 7_000.0, FAST, peak_allocated_bytes=4 * GIB),
    ]
    assert list(_history(snapshot(trials))) == [8_000.0, 8_000.0]
    about = definition(space={"objectives": ["peak_memory"]})
    assert list(_history(snapshot(trials, definition=about))) == [8.0, 4.0]


def test_nothing_is_drawn_of_fewer_than_two_trials_that_fitted_or_of_settings_that_stay() -> None:
    assert search_of(document_of(view_of(snapshot(one_of_each())))) is None
    section = section_of(search_of, snapshot([fits(0, 8_000.0), fits(1, 8_100.0)]))
    assert [figure.id for figure in section.figures] == ["history"]
