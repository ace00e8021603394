"""History, slices and parallel coordinates show what the trials of the space reached."""

from __future__ import annotations

from typing import Any

import pytest

from reports.document import document_of
from reports.figures.figure import resolved
from reports.figures.search import search_of
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.definition import StudySnapshot
from tests.reports.synthetic import definition, fits, one_of_each, plausible_study, snapshot

FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)


def _drawn(study: StudySnapshot) -> dict[str, dict[str, Any]]:
    """Return the data and layout of each figure, with the trials' own values."""
    section = search_of(study)
    assert section is not None
    trials = document_of(study)["trials"]
    return {figure.id: resolved(figure.plain, trials) for figure in section.figures}  # type: ignore[misc]


@pytest.mark.parametrize("trials", [5, 40, 1_000])
def test_the_best_so_far_only_rises_and_ends_at_the_fastest_that_fits(trials: int) -> None:
    study = plausible_study(trials=trials)
    line, *_ = _drawn(study)["history"]["data"]
    speeds = [
        trial["tokens_per_second"]
        for trial in document_of(study)["trials"]
        if trial["verdict"] == "fits"
    ]
    assert line["y"] == sorted(line["y"])
    assert line["y"][-1] == max(speeds)
    assert line["x"][-1] < trials


def test_the_best_so_far_falls_where_less_is_asked_for() -> None:
    about = definition(space={"objectives": ["peak_memory"]})
    heavy = fits(0, 8_000.0, peak_allocated_bytes=8 * GIB)
    light = fits(1, 7_000.0, FAST, peak_allocated_bytes=4 * GIB)
    line, *_ = _drawn(snapshot([heavy, light], definition=about))["history"]["data"]
    assert line["y"] == [8.0, 4.0, 4.0]


def test_a_baseline_outside_the_space_is_in_none_of_them() -> None:
    outside = fits(0, 90_000.0, TrialConfig(lora_rank=64))
    study = snapshot([outside, fits(1, 16_000.0, FAST), fits(2, 8_000.0, TrialConfig())])
    for drawing in _drawn(study).values():
        values = [y for trace in drawing["data"] for y in trace["y"]]
        assert 90_000.0 not in values


def test_each_setting_that_varies_has_a_slice_with_every_trial_that_fitted_at_its_value() -> None:
    study = plausible_study()
    axes, trials = document_of(study)["axes"], document_of(study)["trials"]
    fitting = [trial for trial in trials if trial["verdict"] == "fits"]
    slices = _drawn(study)["slice"]["data"]
    assert [axis["key"] for axis in axes] == [
        "micro_batch_size", "seq_len", "checkpoint_fraction", "upcast_fp32", "kernels",
    ]  # fmt: skip
    for axis, trace in zip(axes, slices, strict=True):
        values = [axis["values"][place] for place in trace["x"]]
        assert values == [_config(study, trial["number"])[axis["key"]] for trial in fitting]
        assert trace["y"] == [trial["tokens_per_second"] for trial in fitting]


def _config(study: StudySnapshot, number: int) -> dict[str, Any]:
    (found,) = [r.config.model_dump() for r in study.records if r.number == number]
    return found


def test_a_line_of_the_parallel_coordinates_runs_through_its_trial_s_values() -> None:
    study = snapshot([fits(0, 8_000.0), fits(1, 16_000.0, FAST), fits(2, 10_000.0, TrialConfig())])
    parallel = _drawn(study)["parallel"]
    lines = [trace["y"] for trace in parallel["data"]]
    # Speed, then micro-batch (4, 8, 10) and checkpointing (0, 1), each from its least to its most.
    assert sorted(lines) == [[0.0, 0.5, 1.0, None], [0.25, 0.0, 1.0, None], [1.0, 1.0, 0.0, None]]
    assert all(trace["x"] == [0, 1, 2, None] for trace in parallel["data"])
    assert parallel["data"][-1]["name"] == "the best tenth"
    assert parallel["data"][-1]["y"][0] == 1.0


def test_nothing_is_drawn_of_fewer_than_two_trials_that_fitted_or_of_settings_that_stay() -> None:
    assert search_of(snapshot()) is None
    assert search_of(snapshot(one_of_each())) is None
    twice = snapshot([fits(0, 8_000.0), fits(1, 8_100.0)])
    assert set(_drawn(twice)) == {"history"}
