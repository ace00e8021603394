"""History and slices show what the trials of the space reached."""

from __future__ import annotations

import pytest

from reports.document import document_of
from reports.figures import PageFigure
from reports.search import search_of
from search_spaces.config import KNOBS, TrialConfig
from search_spaces.gpus import GIB
from storage.definition import StudySnapshot
from storage.ranking import measured_of
from storage.records import TrialRecord, Verdict
from tests.reports.synthetic import definition, fits, one_of_each, plausible_study, snapshot

FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)


def _drawn(study: StudySnapshot) -> dict[str, PageFigure]:
    section = search_of(document_of(study))
    assert section is not None
    return {figure.id: figure for figure in section.figures}


def _fitting(study: StudySnapshot) -> list[TrialRecord]:
    return [record for record in study.records if record.verdict is Verdict.FITS]


@pytest.mark.parametrize("trials", [5, 200])
def test_the_best_so_far_only_rises_and_ends_at_the_fastest_that_fits(trials: int) -> None:
    study = plausible_study(trials=trials)
    line = _drawn(study)["history"].figure.data[0]
    fastest = max(measured_of(record).tokens_per_second for record in _fitting(study))
    assert list(line.y) == sorted(line.y)
    assert line.y[-1] == pytest.approx(fastest, rel=1e-5)
    assert line.x[-1] < trials


def test_the_best_so_far_falls_where_less_is_asked_for() -> None:
    about = definition(space={"objectives": ["peak_memory"]})
    heavy = fits(0, 8_000.0, peak_allocated_bytes=8 * GIB)
    light = fits(1, 7_000.0, FAST, peak_allocated_bytes=4 * GIB)
    line = _drawn(snapshot([heavy, light], definition=about))["history"].figure.data[0]
    assert list(line.y) == [8.0, 4.0]


def test_a_baseline_outside_the_space_is_in_none_of_them() -> None:
    outside = fits(0, 90_000.0, TrialConfig(lora_rank=64))
    study = snapshot([outside, fits(1, 16_000.0, FAST), fits(2, 8_000.0, TrialConfig())])
    drawn = _drawn(study)
    assert set(drawn) == {"history", "slice"}
    assert not any(90_000.0 in trace.y for one in drawn.values() for trace in one.figure.data)


def test_each_setting_that_varies_has_a_slice_with_every_trial_that_fitted_at_its_value() -> None:
    study = plausible_study()
    figure = _drawn(study)["slice"].figure
    keys = ["micro_batch_size", "seq_len", "checkpoint_fraction", "upcast_fp32", "kernels"]
    axes = [axis for axis in figure.select_xaxes() if axis.title.text]
    assert {axis.title.text for axis in axes} == {KNOBS[key].label for key in keys}
    labels = {KNOBS[key].label: key for key in keys}
    for trace in figure.data:
        axis = figure.layout[f"xaxis{trace.xaxis[1:]}"]
        key = labels[axis.title.text]
        known = dict(zip(axis.tickvals, axis.ticktext, strict=True))
        for place, number, speed in zip(trace.x, trace.customdata, trace.y, strict=True):
            record = study.records[number]
            assert speed == pytest.approx(measured_of(record).tokens_per_second, rel=1e-5)
            value = getattr(record.config, key)
            if place in known and isinstance(value, int | float) and not isinstance(value, bool):
                assert float(known[place].replace(",", "")) == value
        assert list(trace.customdata) == [record.number for record in _fitting(study)]


def test_nothing_is_drawn_of_fewer_than_two_trials_that_fitted_or_of_settings_that_stay() -> None:
    assert search_of(document_of(snapshot())) is None
    assert search_of(document_of(snapshot(one_of_each()))) is None
    assert set(_drawn(snapshot([fits(0, 8_000.0), fits(1, 8_100.0)]))) == {"history"}
