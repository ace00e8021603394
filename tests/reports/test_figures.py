"""What a figure draws is what the records say, and nothing without a speed is drawn with one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import pytest

from reports.figures.all import figures_of
from reports.figures.pareto import FAR_BEYOND_BUDGET, memory_position_gib, pareto_figure
from reports.figures.settings import VALUES_SHOWN, effects_of, settings_figure
from reports.figures.sizes import cells_of, sizes_figure
from reports.figures.style import MARKS, hover
from reports.figures.timeline import fastest_so_far, spans_of, timeline_figure
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage import ranking
from storage.definition import StudySnapshot
from storage.records import (
    OUT_OF_MEMORY,
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


def _traces(figure: go.Figure, axis: str) -> list[Any]:
    return [trace for trace in figure.data if (trace.yaxis or "y") == axis]


def _trace(figure: go.Figure, name: str) -> Any:
    (found,) = [trace for trace in figure.data if trace.name == name]
    return found


def _in_verdict(study: StudySnapshot, verdict: Verdict) -> list[TrialRecord]:
    return [record for record in study.records if record.verdict is verdict]


@pytest.mark.parametrize("seed", range(3))
def test_every_measured_trial_is_a_point_at_its_memory_and_speed(seed: int) -> None:
    study = plausible_study(seed)
    points = _trace(pareto_figure(study), "fits")
    measured = [r.measurement for r in _in_verdict(study, Verdict.FITS) if r.measurement]
    assert list(points.x) == [m.peak_allocated_bytes / GIB for m in measured]
    assert list(points.y) == [m.tokens_per_second for m in measured]


def test_whiskers_end_at_the_interval_of_the_speed() -> None:
    study = snapshot([fits(0, 8_000.0)])
    points = _trace(pareto_figure(study), "fits")
    low, high = measurement(8_000.0).speed_interval or (0.0, 0.0)
    assert points.y[0] + points.error_y.array[0] == pytest.approx(high)
    assert points.y[0] - points.error_y.arrayminus[0] == pytest.approx(low)


def test_nothing_without_a_speed_is_drawn_among_the_speeds() -> None:
    study = snapshot(one_of_each())
    figure = pareto_figure(study)
    speeds = {m.tokens_per_second for r in study.records if (m := r.measurement)}
    drawn = {y for trace in _traces(figure, "y") for y in trace.y}
    assert drawn == speeds
    without = [r for r in study.records if r.verdict not in HAVE_SPEED]
    assert sum(len(trace.x) for trace in _traces(figure, "y2")) == len(without)


def test_every_verdict_without_a_speed_has_a_lane_of_its_own_with_its_name() -> None:
    figure = pareto_figure(snapshot(one_of_each()))
    lanes = {trace.name: set(trace.y) for trace in _traces(figure, "y2")}
    assert len(lanes) == len(Verdict) - len(HAVE_SPEED)
    assert sorted(lane for (lane,) in lanes.values()) == list(range(len(lanes)))
    names = [MARKS[verdict].lane for verdict in Verdict if verdict not in HAVE_SPEED]
    assert list(figure.layout.yaxis2.ticktext) == names


def test_no_two_verdicts_look_alike() -> None:
    assert set(MARKS) == set(Verdict)
    assert len({mark.symbol for mark in MARKS.values()}) == len(Verdict)
    assert len({mark.lane for mark in MARKS.values()}) == len(Verdict)


@pytest.mark.parametrize("seed", range(3))
def test_the_front_is_the_ranking_s_from_least_memory_to_most(seed: int) -> None:
    study = plausible_study(seed)
    line = _trace(pareto_figure(study), "best for its memory (Pareto front)")
    front = ranking.pareto_front(study.records, ("tokens_per_second", "peak_memory"))
    expected = {
        (m.peak_allocated_bytes / GIB, m.tokens_per_second) for r in front if (m := r.measurement)
    }
    assert set(zip(line.x, line.y, strict=True)) == expected
    assert list(line.x) == sorted(line.x)
    assert list(line.y) == sorted(line.y)


def test_a_baseline_outside_the_space_is_marked_and_neither_wins_nor_draws_a_front() -> None:
    outside = fits(0, 90_000.0, TrialConfig(lora_rank=64), peak_allocated_bytes=GIB)
    study = snapshot([outside, fits(1, 16_000.0, FAST)])
    figure = pareto_figure(study)
    assert list(_trace(figure, "baseline").y) == [90_000.0]
    assert list(_trace(figure, "winner").y) == [16_000.0]
    assert list(_trace(figure, "best for its memory (Pareto front)").y) == [16_000.0]
    assert list(_trace(timeline_figure(study), "fastest so far").y) == [16_000.0, 16_000.0]
    assert set(cells_of(study)) == {(512, 10)}
    assert effects_of(study) == ()


def test_of_several_objectives_the_knee_is_marked_and_a_front_of_others_is_ringed() -> None:
    trials = [
        fits(0, 8_000.0, peak_allocated_bytes=4 * GIB),
        fits(1, 16_000.0, FAST, peak_allocated_bytes=20 * GIB),
        fits(2, 15_500.0, peak_allocated_bytes=8 * GIB, trainable_parameters=1),
    ]
    trials[2] = trials[2].model_copy(update={"config": TrialConfig(micro_batch_size=6)})
    both = {"objectives": ["tokens_per_second", "peak_memory"]}
    study = snapshot(trials, definition=definition(space=both))
    assert list(_trace(pareto_figure(study), "knee of the front").y) == [15_500.0]
    other = {"objectives": ["tokens_per_second", "trainable_parameters"]}
    ringed = pareto_figure(snapshot(trials, definition=definition(space=other)))
    assert list(_trace(ringed, "on the front of the objectives").y) == [16_000.0]


def test_a_speed_without_an_interval_has_no_whiskers_and_says_so() -> None:
    study = snapshot([fits(0, 8_000.0, steps_measured=3)])
    points = _trace(pareto_figure(study), "fits")
    assert (points.error_y.array[0], points.error_y.arrayminus[0]) == (0.0, 0.0)
    assert "no interval: 3 steps are too few" in points.hovertext[0]


def test_the_need_in_a_hover_text_is_the_one_that_the_figure_is_placed_at() -> None:
    failed = OutOfMemory(stage="backward", peak_allocated_bytes=20 * GIB, requested_bytes=GIB)
    trial = record(1, failed)
    text = hover(trial, budget_bytes=BUDGET_BYTES)
    assert "backward, needs at least 21.50 GiB" in text
    assert memory_position_gib(trial, budget_bytes=BUDGET_BYTES) == 21.5


def test_the_budget_is_a_line_across_both_panels_with_its_size() -> None:
    figure = pareto_figure(plausible_study())
    (line,) = figure.layout.shapes
    assert line.x0 == line.x1 == BUDGET_BYTES / GIB
    assert "21.50 GiB" in figure.layout.annotations[0].text


def test_winner_and_baseline_are_marked() -> None:
    figure = pareto_figure(snapshot([fits(0, 8_000.0), fits(1, 16_000.0, FAST)]))
    assert list(_trace(figure, "winner").y) == [16_000.0]
    assert list(_trace(figure, "baseline").y) == [8_000.0]


@pytest.mark.parametrize(
    ("outcome", "expected_gib"),
    [
        (
            OutOfMemory(stage="forward", peak_allocated_bytes=20 * GIB, requested_bytes=3 * GIB),
            21.5,
        ),
        (OutOfMemory(stage="forward", peak_allocated_bytes=23 * GIB), 23.0),
        (OutOfMemory(stage="forward"), 21.5),
        (PredictedOutOfMemory(predicted_bytes=24 * GIB), 24.0),
        (PredictedOutOfMemory(predicted_bytes=400 * GIB), 21.5 * FAR_BEYOND_BUDGET),
    ],
)
def test_what_did_not_fit_is_placed_at_its_need_or_at_the_budget(
    outcome: OutOfMemory | PredictedOutOfMemory, expected_gib: float
) -> None:
    assert memory_position_gib(record(1, outcome), budget_bytes=BUDGET_BYTES) == pytest.approx(
        expected_gib
    )


def test_a_trial_of_unknown_memory_is_shown_with_a_question_mark() -> None:
    figure = pareto_figure(snapshot([fits(0, 8_000.0), record(1, Crashed(phase="build"))]))
    assert list(_trace(figure, "crashed").text) == ["?"]


@pytest.mark.parametrize("seed", range(3))
def test_every_mark_lies_within_the_memory_axis(seed: int) -> None:
    figure = pareto_figure(plausible_study(seed))
    left, right = figure.layout.xaxis.range
    assert all(left <= x <= right for trace in figure.data for x in trace.x)


def test_the_hover_text_names_the_verdict_the_numbers_and_every_setting() -> None:
    text = hover(fits(3, 16_000.0, FAST), budget_bytes=BUDGET_BYTES)
    assert text.startswith("<b>Trial 3: fits</b>")
    assert "16,000 tokens/s" in text
    assert "10.00 GiB allocated" in text
    assert all(f"{key}: " in text for key in TrialConfig.model_fields)


@pytest.mark.parametrize("trial", one_of_each(), ids=lambda trial: str(trial.verdict))
def test_every_verdict_has_a_hover_text(trial: TrialRecord) -> None:
    assert f"Trial {trial.number}: " in hover(trial, budget_bytes=BUDGET_BYTES)


@pytest.mark.parametrize("seed", range(3))
def test_a_cell_has_the_best_speed_that_fitted_there(seed: int) -> None:
    study = plausible_study(seed)
    cells = cells_of(study)
    assert set(cells) == {(r.config.seq_len, r.config.micro_batch_size) for r in study.records}
    for (length, batch), cell in cells.items():
        here = [
            r.measurement.tokens_per_second
            for r in _in_verdict(study, Verdict.FITS)
            if r.measurement and (r.config.seq_len, r.config.micro_batch_size) == (length, batch)
        ]
        assert cell.tokens_per_second == (max(here) if here else None)


def _cell_text(*records: TrialRecord) -> str:
    (cell,) = cells_of(snapshot(records)).values()
    return cell.text


def test_a_cell_without_a_fit_says_why() -> None:
    real, predicted = OutOfMemory(stage="forward"), PredictedOutOfMemory(predicted_bytes=30 * GIB)
    assert _cell_text(record(1, predicted), record(2, real)) == "✕ OOM"
    assert _cell_text(record(1, predicted)) == "✕ over budget"
    assert _cell_text(record(1, Crashed(phase="build")), record(2, real)) == "no result"
    assert _cell_text(record(1, PrunedSlow(measurement=measurement()))).startswith("~")
    assert _cell_text(
        record(1, real), fits(2, 9_000.0, FAST.model_copy(update={"micro_batch_size": 8}))
    )


def test_the_heatmap_draws_each_cell_in_its_place_and_leaves_untried_ones_blank() -> None:
    study = plausible_study()
    cells = cells_of(study)
    drawn: dict[tuple[int, int], str] = {}
    for trace in sizes_figure(study).data:
        for batch, zs, texts in zip(trace.y, trace.z, trace.text, strict=True):
            for length, z, text in zip(trace.x, zs, texts, strict=True):
                assert (z is None) == (text == "")
                if z is not None:
                    drawn[int(length), int(batch)] = text
    assert drawn == {place: cell.text for place, cell in cells.items()}


def test_shapes_are_in_the_order_of_their_size_not_of_their_digits() -> None:
    axis = sizes_figure(plausible_study()).layout.yaxis
    sizes = [int(batch) for batch in axis.categoryarray]
    assert sizes == sorted(sizes)


def test_trials_lie_on_the_study_s_clock_one_after_another() -> None:
    spans = spans_of(plausible_study())
    assert spans[0].start == 0.0
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    assert all(s.end - s.start == pytest.approx(s.record.wall_seconds) for s in spans)


def test_a_pause_of_the_study_is_cut_out_and_marked() -> None:
    before = fits(0, 8_000.0)
    after = fits(1, 9_000.0, FAST).model_copy(update={"started_at": "2025-03-03T09:30:00+00:00"})
    study = snapshot([before, after])
    second = spans_of(study)[1]
    assert second.start == pytest.approx(8.0)
    assert second.pause_before == pytest.approx(2 * 86_400 - 8.0)
    assert any("paused 47 h 59 min" in a.text for a in timeline_figure(study).layout.annotations)


def test_trials_without_a_start_time_follow_the_one_before() -> None:
    records = [fits(n, 8_000.0 + n).model_copy(update={"started_at": None}) for n in (0, 1)]
    late = fits(2, 9_000.0, FAST)
    spans = spans_of(snapshot([*records, late]))
    assert [span.start for span in spans] == [0.0, 8.0, 16.0]
    assert not any(span.pause_before for span in spans)


def test_a_start_time_that_is_no_time_or_a_clock_that_ran_back_does_not_break_the_order() -> None:
    records = [
        fits(0, 8_000.0).model_copy(update={"started_at": "yesterday"}),
        fits(1, 8_000.0, FAST, final_loss=math.nan),
        fits(2, 8_500.0).model_copy(update={"started_at": "2025-03-01T09:30:11"}),
    ]
    spans = spans_of(snapshot(records))
    assert [span.record.number for span in spans] == [0, 1, 2]
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))


def test_the_fastest_so_far_only_rises_and_ends_at_the_winner() -> None:
    study = plausible_study()
    everything = range(len(study.records))
    rates = [rate for _, rate in fastest_so_far(spans_of(study), of_space=everything)]
    winner = ranking.rank_study(study).winner
    assert rates == sorted(rates)
    assert winner is not None
    assert winner.measurement is not None
    assert rates[-1] == winner.measurement.tokens_per_second
    line = _trace(timeline_figure(study), "fastest so far")
    assert list(line.y) == [*rates, rates[-1]]


def test_every_trial_has_a_bar_in_the_lane_of_its_verdict() -> None:
    study = plausible_study()
    bars = [trace for trace in timeline_figure(study).data if trace.type == "bar"]
    assert sum(len(trace.x) for trace in bars) == len(study.records)
    widths = sorted(x for trace in bars for x in trace.x)
    assert widths == pytest.approx(sorted(r.wall_seconds / 60 for r in study.records))


def test_a_trial_that_took_no_time_is_edged_in_its_own_colour_so_that_it_is_seen() -> None:
    quick = record(1, PredictedOutOfMemory(predicted_bytes=30 * GIB), wall_seconds=0.0)
    bars = timeline_figure(snapshot([fits(0, 8_000.0), quick])).data
    edges = {trace.name: trace.marker.line.color[0] for trace in bars if trace.type == "bar"}
    assert edges["predicted not to fit"] == MARKS[Verdict.PREDICTED_OOM].colour
    assert edges["fits"] != MARKS[Verdict.FITS].colour


def test_effects_count_what_fitted_and_what_did_not_for_each_value() -> None:
    study = plausible_study()
    effects = [e for e in effects_of(study) if e.key == "kernels"]
    assert [e.label for e in effects] == ["standard kernels", "Liger kernels"]
    fitted = _in_verdict(study, Verdict.FITS) + _in_verdict(study, Verdict.PRUNED_SLOW)
    expected = [sum(r.config.kernels == kernels for r in fitted) for kernels in ("hf", "liger")]
    assert [len(e.speeds) for e in effects] == expected
    lost = [r for r in study.records if r.verdict in OUT_OF_MEMORY and r.config.kernels == "hf"]
    assert effects[0].out_of_memory == len(lost)


def test_a_dimension_that_was_tried_at_one_value_has_no_effect_to_show() -> None:
    assert effects_of(snapshot([fits(0, 8_000.0), fits(1, 8_100.0)])) == ()


def test_many_values_of_a_dimension_are_shown_in_ranges() -> None:
    trials = [fits(n, 8_000.0 + n, TrialConfig(micro_batch_size=n)) for n in range(1, 31)]
    wide = definition(space={"dimensions": {"micro_batch_size": {"low": 1, "high": 30}}})
    effects = effects_of(snapshot(trials, definition=wide))
    assert 2 <= len(effects) <= VALUES_SHOWN
    assert sum(len(effect.speeds) for effect in effects) == 30
    assert effects[0].label == "micro-batch 1–3"


def test_a_value_at_which_nothing_fitted_keeps_its_row_and_says_so() -> None:
    none = record(1, OutOfMemory(stage="load"), TrialConfig(micro_batch_size=32))
    figure = settings_figure(snapshot([fits(0, 8_000.0), none]))
    (text,) = [trace for trace in figure.data if trace.mode == "text"]
    assert list(text.y) == [1]
    assert len(figure.layout.yaxis.ticktext) == 2


@pytest.mark.parametrize(
    "records",
    [
        (),
        one_of_each()[:1],
        one_of_each()[1:2],
        one_of_each()[2:5],
        one_of_each()[5:],
        one_of_each(),
        (fits(0, math.nan), fits(1, math.inf, FAST)),
    ],
    ids=["empty", "one fit", "one slow", "all out of memory", "all failed", "each", "not finite"],
)
def test_any_study_can_be_drawn_without_a_number_that_is_not_finite(
    records: Sequence[TrialRecord],
) -> None:
    for figure in figures_of(snapshot(records)).figures:
        numbers = [
            value
            for trace in figure.drawing.data
            for values in (trace.x, trace.y)
            for value in values
            if isinstance(value, float)
        ]
        assert all(math.isfinite(number) for number in numbers)


def test_an_empty_study_has_no_figures() -> None:
    assert figures_of(snapshot()).figures == ()


def test_little_memory_has_an_axis_in_mib() -> None:
    study = snapshot(
        [fits(0, 8_000.0, peak_allocated_bytes=2**25)],
        definition=definition(budget_bytes=2**26),
    )
    figure = pareto_figure(study)
    axis = figure.layout.xaxis
    assert axis.title.text == "peak allocated memory (MiB)"
    assert axis.ticktext == ("40", "50", "60")
    assert [tick * 1024 for tick in axis.tickvals] == pytest.approx([40, 50, 60])
    assert "64.00 MiB" in figure.layout.annotations[0].text
