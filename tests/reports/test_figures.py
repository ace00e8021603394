"""What a figure draws is what the records say, and nothing without a speed is drawn with one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest

from reports.figures.course import course_drawing, spans_of
from reports.figures.figure import PageFigure
from reports.figures.style import MARKS
from reports.page import SECTIONS
from reports.words import VERDICT_LABELS
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.definition import StudySnapshot
from storage.records import (
    PredictedOutOfMemory,
    TrialRecord,
    Verdict,
)
from tests.reports.synthetic import (
    fits,
    one_of_each,
    plausible_study,
    record,
    snapshot,
)

HAVE_SPEED = {Verdict.FITS, Verdict.PRUNED_SLOW}
FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)


def _bars(study: StudySnapshot) -> list[Any]:
    return [trace for trace in course_drawing(study)["data"] if trace["type"] == "bar"]


def test_no_two_verdicts_look_alike() -> None:
    assert set(MARKS) == set(Verdict)
    assert len({mark.symbol for mark in MARKS.values()}) == len(Verdict)
    assert len({mark.lane for mark in MARKS.values()}) == len(Verdict)


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
    assert any(
        "paused 47 h 59 min" in a["text"] for a in course_drawing(study)["layout"]["annotations"]
    )


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


def test_every_trial_has_a_bar_in_the_lane_of_its_verdict() -> None:
    study = plausible_study()
    bars = _bars(study)
    assert sorted(row for trace in bars for row in trace["rows"]) == list(range(len(study.records)))
    for trace in bars:
        verdicts = {study.records[row].verdict for row in trace["rows"]}
        assert {VERDICT_LABELS[verdict] for verdict in verdicts} == {trace["name"]}
    widths = sorted(x for trace in bars for x in trace["x"])
    assert widths == pytest.approx(sorted(r.wall_seconds / 60 for r in study.records), abs=1e-4)


def test_a_trial_that_took_no_time_is_edged_in_its_own_colour_so_that_it_is_seen() -> None:
    quick = record(1, PredictedOutOfMemory(predicted_bytes=30 * GIB), wall_seconds=0.0)
    bars = _bars(snapshot([fits(0, 8_000.0), quick]))
    edges = {trace["name"]: trace["marker"]["line"]["color"][0] for trace in bars}
    assert edges["predicted not to fit"] == MARKS[Verdict.PREDICTED_OOM].colour
    assert edges["fits"] != MARKS[Verdict.FITS].colour


def _figures(study: StudySnapshot) -> list[PageFigure]:
    values = [section.make(study) for section in SECTIONS]
    return [figure for value in values for figure in getattr(value, "figures", ())]


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
    for figure in _figures(snapshot(records)):
        for trace in figure.plain["data"]:
            numbers = [*_listed(trace.get("x")), *_listed(trace.get("y"))]
            assert all(math.isfinite(number) for number in numbers)


def _listed(values: Any) -> list[float]:
    """Return the numbers of an array; one that refers to trials has none of its own."""
    listed = [] if isinstance(values, str) or values is None else list(values)
    return [value for value in listed if isinstance(value, float)]


def test_an_empty_study_has_no_figures() -> None:
    assert _figures(snapshot()) == []
