"""How far to trust a study: errors over fits alone, steps and peaks as seen, where time went."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reports.document import document_of
from reports.figures import MARKS
from reports.page import render
from reports.trust import TrustSection, accuracy_of, trust_of
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.definition import MemoryForecast, StudySnapshot
from storage.records import (
    Measured,
    OutOfMemory,
    PredictionRecord,
    PrunedSlow,
    TrialRecord,
    Verdict,
)
from tests.reports.synthetic import (
    fits,
    measurement,
    one_of_each,
    plausible_study,
    record,
    snapshot,
)


def _trust(study: StudySnapshot) -> TrustSection:
    return trust_of(document_of(study))


def _predicted(gib: float, speed: float | None = None) -> PredictionRecord:
    size = int(gib * GIB)
    return PredictionRecord(
        peak_allocated_bytes=size, peak_reserved_bytes=size, tokens_per_second=speed
    )


def _trial(number: int, gib: float, speed: float | None = None, **measured: object) -> TrialRecord:
    config = TrialConfig(micro_batch_size=number + 1)
    outcome = Measured(measurement=measurement(10_000.0, **measured))
    return record(number, outcome, config, prediction=_predicted(gib, speed))


def test_errors_are_of_trials_that_fit_with_their_median_and_their_worst() -> None:
    study = snapshot(
        [
            _trial(0, 10.0, 10_000.0),
            _trial(1, 10.2, 9_000.0),
            _trial(2, 9.0, None),
            # Neither is held against a prediction: the one has no whole speed, the other no peak.
            record(3, PrunedSlow(measurement=measurement(50.0)), prediction=_predicted(90, 1.0)),
            record(4, OutOfMemory(stage="forward"), prediction=_predicted(90, 1.0)),
        ]
    )
    memory, speed = _trust(study).accuracy
    assert memory.errors == pytest.approx({0: 0.0, 1: 0.02, 2: -0.1})
    assert memory.median == pytest.approx(0.02)
    assert speed.errors == pytest.approx({0: 0.0, 1: -0.1})
    assert "median error of 2 % over 3 trials" in str(memory)
    assert "trial 2, was predicted 10 % too little" in str(memory)
    assert "10 % too slow" in str(speed)


def test_nothing_is_said_of_predictions_that_were_not_made() -> None:
    study = snapshot([fits(0, 9_000.0)])
    assert accuracy_of(study, "memory") is None
    assert _trust(study).accuracy == ()


def test_figures_draw_what_was_predicted_against_what_was_measured() -> None:
    study = snapshot([record(0, OutOfMemory(stage="forward")), _trial(1, 9.0, 9_000.0)])
    memory, speed, _ = _trust(study).figures
    drawn = [(list(f.figure.data[0].x), list(f.figure.data[0].y)) for f in (memory, speed)]
    assert drawn == [([9.0], [10.0]), ([9_000.0], [10_000.0])]
    assert list(memory.figure.data[0].customdata) == [1]


def test_steps_of_the_best_are_those_of_the_search_with_each_run_that_measured_again() -> None:
    again = [
        fits(number, speed).model_copy(
            update={"purpose": "confirm", "series": 1, "confirms": 0, "is_baseline": False}
        )
        for number, speed in ((10, 8_900.0), (11, 9_100.0))
    ]
    (row,) = _trust(snapshot([fits(0, 9_500.0)], confirmations=tuple(again))).steps
    assert row[:2] == ("0", "0.431 s")
    assert row[-1] == "0.460 s, 0.450 s"


def test_the_winner_s_memory_is_what_was_measured_and_its_parts_only_where_they_are_known() -> None:
    study = snapshot([fits(0, 9_000.0)])
    bare = _trust(study)
    assert "10.00 GiB allocated, 12.00 GiB reserved" in bare.memory
    assert bare.parts == ()
    parts = {"weights": 4 * GIB, "activations": 6 * GIB, "loss": 0}
    forecast = MemoryForecast(10 * GIB, parts, "yes")
    known = _trust(replace(study, memory_forecasts={study.records[0].config: forecast}))
    assert [(name, share) for name, _, share in known.parts] == [
        ("activations", 0.6),
        ("weights", 0.4),
    ]


def test_versions_that_changed_and_every_verdict_are_on_the_page() -> None:
    page = render(snapshot(one_of_each(), warnings=("run 2 changed torch 2.11.0 -> 2.12.0",)))
    trust = page[page.index('id="trust"') :]
    assert "run 2 changed torch 2.11.0 -&gt; 2.12.0" in trust
    assert "larger than one that ran out" in trust
    assert "driver" in trust


@pytest.mark.parametrize("trials", [0, 1, 60])
def test_any_study_has_the_section_and_every_trial_a_bar_as_long_as_it_took(trials: int) -> None:
    study = plausible_study(1, trials=trials)
    section = _trust(study)
    assert section.facts
    assert sum(int(number) for _, number, _ in section.spent) == trials
    bars = section.figures[-1].figure.data if trials else ()
    took = {n: ms for bar in bars for n, ms in zip(bar.customdata, bar.x, strict=True)}
    expected = {r.number: 1000 * r.wall_seconds for r in study.records}
    assert took == pytest.approx(expected, abs=1)


def test_a_pause_is_cut_out_and_a_start_that_is_no_time_breaks_nothing() -> None:
    starts = ("2025-03-01T09:30:00+00:00", "yesterday", None, "2025-03-03T09:30:00+00:00")
    records = [
        fits(n, 8_000.0 + n).model_copy(update={"started_at": start})
        for n, start in enumerate(starts)
    ]
    figure = _trust(snapshot(records)).figures[-1].figure
    (pause,) = figure.layout.xaxis.rangebreaks
    assert [end[:16] for end in pause.bounds] == ["2025-03-01T09:30", "2025-03-03T09:30"]


def test_no_two_verdicts_look_alike() -> None:
    assert set(MARKS) == set(Verdict)
    assert len({mark.symbol for mark in MARKS.values()}) == len(Verdict)
