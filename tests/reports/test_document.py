"""The page's data: each trial once, what is not known left out, and references that resolve."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from reports.document import document_of, title_of
from reports.figures.figure import resolved
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.definition import TargetSpeed
from tests.reports.synthetic import definition, fits, one_of_each, snapshot


def test_every_trial_is_there_once_in_the_order_of_its_number() -> None:
    trials = document_of(snapshot(one_of_each()))["trials"]
    assert [trial["number"] for trial in trials] == list(range(11))
    assert trials[2]["need"] == 21.5
    assert trials[2]["need_is_lower_bound"] is True
    assert trials[3]["need_is_lower_bound"] is False
    assert "tokens_per_second" not in trials[2]


def test_a_speed_on_the_target_is_the_prediction_where_another_card_stood_in() -> None:
    speed = TargetSpeed(2_400.0, 2_000.0, 2_900.0, "predicted")
    study = replace(snapshot([fits(0, 8_000.0)]), target_speeds={0: speed})
    (trial,) = document_of(study)["trials"]
    assert trial["tokens_per_second"] == 8_000.0
    assert (trial["target_tokens_per_second"], trial["target_low"]) == (2_400.0, 2_000.0)
    assert trial["target_basis"] == "predicted"


@pytest.mark.parametrize(("weights", "is_there"), [("random", False), ("pretrained", True)])
def test_a_loss_is_a_column_where_it_says_something_of_quality(
    weights: str, is_there: bool
) -> None:
    study = snapshot([fits(0, 8_000.0)], definition=definition(space={"weights": weights}))
    assert ("final_loss" in document_of(study)["trials"][0]) is is_there


def test_what_is_not_finite_is_not_known() -> None:
    (trial,) = document_of(snapshot([fits(0, math.nan)]))["trials"]
    assert "tokens_per_second" not in trial
    assert "peak_allocated" not in trial


def test_trials_of_one_class_have_one_name_however_the_layers_are_spelled() -> None:
    spelled = TrialConfig(target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    trials = document_of(snapshot([fits(0, 8_000.0), fits(1, 9_000.0, spelled)]))["trials"]
    assert trials[0]["class"] == trials[1]["class"]


def test_a_study_is_titled_by_its_model_its_gpu_and_how_many_trials_it_has() -> None:
    assert title_of(snapshot([fits(0, 8_000.0)])) == "Mistral-7B-v0.3 on an A10: 1 trial"


def test_references_become_the_values_of_the_trials_that_a_trace_names() -> None:
    trials = document_of(
        snapshot([fits(0, 8_000.0), fits(1, 9_000.0, peak_allocated_bytes=2 * GIB)])
    )["trials"]
    drawing = {
        "data": [
            {
                "rows": [1, 0],
                "x": "@peak_allocated",
                "marker": {"size": 9, "color": "@need"},
                "name": "fits",
            },
            {"name": "@home", "x": [1]},
        ],
        "layout": {"title": {"text": "@home"}},
    }
    first, second = resolved(drawing, trials)["data"]
    assert first == {
        "x": [2.0, 10.0],
        "marker": {"size": 9, "color": [None, None]},
        "name": "fits",
    }
    assert second == {"name": "@home", "x": [1]}
