"""The page's data: each trial once, and what is not known neither a number nor words."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from reports.document import document_of
from search_spaces.config import TrialConfig
from storage.definition import StudySnapshot, TargetSpeed
from storage.records import Carried
from tests.reports.synthetic import definition, fits, one_of_each, snapshot


def of(study: StudySnapshot, key: str) -> tuple[tuple[Any, str], ...]:
    """Return each trial's value and words."""
    return document_of(study).columns[key].pairs


def test_every_trial_is_there_once_in_the_order_of_its_number() -> None:
    study = snapshot(one_of_each())
    assert [value for value, _ in of(study, "number")] == list(range(11))
    ran_out, predicted = of(study, "need")[2:4]
    assert ran_out == (21.5, "at least 21.50 GiB")
    assert predicted == (25.0, "25.00 GiB by prediction")
    assert of(study, "tokens_per_second")[2] == (None, "")


def test_values_that_repeat_are_sent_once_and_true_is_not_one() -> None:
    study = snapshot([fits(n, 8_000.0 + n % 2) for n in range(6)])
    sent = document_of(study).columns["tokens_per_second"].to_json()
    assert sent["at"] == [0, 1, 0, 1, 0, 1]
    assert [value for value, _ in sent["pairs"]] == [8_000.0, 8_001.0]
    column = replace(document_of(study).columns["number"], pairs=((True, "1"), (1, "1")))
    assert column.to_json()["pairs"] == [(True, "1"), (1, "1")]


def test_a_speed_on_the_target_is_the_prediction_where_another_gpu_stood_in() -> None:
    speed = TargetSpeed(2_400.0, 2_000.0, 2_900.0, "predicted")
    study = replace(snapshot([fits(0, 8_000.0)]), target_speeds={0: speed})
    assert of(study, "tokens_per_second")[0][0] == 8_000.0
    assert of(study, "target_tokens_per_second") == ((2_400.0, "2,400 (2,000–2,900)"),)
    labels = {key: column.label for key, column in document_of(study).columns.items()}
    assert labels["target_tokens_per_second"] == "tokens/s on A10, predicted"
    assert labels["tokens_per_second"] == "tokens/s measured on H200"


@pytest.mark.parametrize(("weights", "is_there"), [("random", False), ("pretrained", True)])
def test_a_loss_is_a_column_where_it_says_something_of_quality(
    weights: str, is_there: bool
) -> None:
    study = snapshot([fits(0, 8_000.0)], definition=definition(space={"weights": weights}))
    assert ("final_loss" in document_of(study).columns) is is_there


def test_what_is_not_finite_is_not_known() -> None:
    columns = document_of(snapshot([fits(0, math.nan)])).columns
    assert not columns.keys() & {"tokens_per_second", "peak_allocated"}


def test_trials_of_one_class_have_one_name_however_the_layers_are_spelled() -> None:
    spelled = TrialConfig(target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    first, second = of(snapshot([fits(0, 8_000.0), fits(1, 9_000.0, spelled)]), "class")
    assert first == second


def test_what_another_study_measured_is_marked() -> None:
    carried = Carried(study="narrow", identity="i", number=7)
    study = snapshot([fits(0, 8_000.0), fits(1, 9_000.0).model_copy(update={"carried": carried})])
    own, other = of(study, "role")
    assert "carried" not in own[1]
    assert other[1].endswith("carried over from narrow")
