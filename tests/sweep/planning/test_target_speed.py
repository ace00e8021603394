"""A study that another GPU stood in for says how fast its trials are on the GPU it is for."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest

from search_spaces.config import TrialConfig
from search_spaces.gpus import find_gpu
from search_spaces.models import load_model_spec
from storage.definition import StudySnapshot
from storage.records import OutOfMemory, TrialRecord
from sweep.planning.evidence import with_target_speeds
from sweep.predict.speed.predictor import Calibration, calibrate
from tests.reports import synthetic
from tests.sweep.predict.predicted_steps import predict_step
from tests.sweep.predict.speed.test_published_speeds import STUDY, published

MODEL = load_model_spec("mistral-7b-v0.3")


def study(*records: TrialRecord, **target: object) -> StudySnapshot:
    definition = synthetic.definition(**target).model_copy(update={"model": MODEL.to_json()})
    return with_target_speeds(synthetic.snapshot(records, definition=definition))


def test_the_speed_is_what_is_predicted_of_the_configuration_on_that_card() -> None:
    record = synthetic.fits(0, 17_000.0, TrialConfig(micro_batch_size=8, checkpoint_fraction=0.0))
    expected = predict_step(record.config, model=MODEL, gpu=find_gpu("a10"))
    speed = study(record).target_speed(record)
    assert speed.basis == "predicted"
    assert speed.tokens_per_second == pytest.approx(expected.tokens_per_second)
    assert speed.low == pytest.approx(expected.tokens_per_second / (1 + expected.uncertainty))
    assert speed.high == pytest.approx(expected.tokens_per_second / (1 - expected.uncertainty))


def test_a_step_holds_the_tokens_that_it_was_measured_with() -> None:
    full = synthetic.fits(0, 17_000.0)
    padded = synthetic.fits(1, 8_500.0, step_seconds=4096 / 17_000.0)
    snapshot = study(full, padded)
    whole, half = snapshot.target_speed(full), snapshot.target_speed(padded)
    assert half.tokens_per_second == pytest.approx(whole.tokens_per_second / 2)


def test_a_card_that_ran_itself_has_the_speed_that_was_measured() -> None:
    record = synthetic.fits(0, 17_000.0)
    speed = study(record, emulated_on=None).target_speed(record)
    assert (speed.basis, speed.tokens_per_second) == ("measured", 17_000.0)
    assert (speed.low, speed.high) == pytest.approx(record.measurement.speed_interval)  # type: ignore[union-attr]


def test_what_was_not_measured_and_what_cannot_be_predicted_has_no_speed() -> None:
    lost, record = synthetic.record(0, OutOfMemory(stage="forward")), synthetic.fits(0, 17_000.0)
    assert study(lost).target_speed(lost) is None
    assert study(record, gpu="a-card-of-an-older-catalogue").target_speed(record) is None
    unknown = {"model": replace(MODEL, config={}).to_json()}
    definition = synthetic.definition().model_copy(update=unknown)
    snapshot = with_target_speeds(synthetic.snapshot((record,), definition=definition))
    assert snapshot.target_speed(record) is None


def test_what_a_stand_in_measured_would_not_make_other_gpus_better_predicted() -> None:
    def error(calibration: Calibration | None) -> float:
        found = published(calibration)
        return statistics.mean(abs(math.log(one.measured_over_predicted)) for one in found)

    assert error(calibrate(STUDY, model=MODEL, gpu=find_gpu("h200"))) > error(None)
