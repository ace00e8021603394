"""Behaviour of single changes: what is turned, what that does, and which are worth a line."""

from __future__ import annotations

import pytest

from search_spaces.config import KNOBS, TrialConfig
from sweep.planning.evidence import evidence_from
from sweep.planning.plan import TASK_KEYS, Use, few, what_ifs
from sweep.predict.memory.predictor import Fit
from tests.sweep.imagined_study import MISTRAL, TRIALS, a_snapshot
from tests.sweep.planning.imagined import a_forecaster

RECIPE = TrialConfig(micro_batch_size=8)
UNTURNED = {
    *("lora_alpha", "effective_batch_size", "learning_rate", "packing"),
    *("data_parallel", "sharding"),
}
"""Some change nothing that is asked about, one is not there to be halved, and what is asked about
is one GPU."""


def test_each_change_turns_one_knob_and_every_knob_that_matters_is_turned() -> None:
    changes = what_ifs(a_forecaster().expect(RECIPE))
    for change in changes:
        assert set(change.forecast.config.changes_from(RECIPE)) == {change.key}
        assert change.forecast.broken is None
    assert {change.key for change in changes} == set(KNOBS) - UNTURNED
    assert len({change.forecast.config for change in changes}) == len(changes)


def test_half_of_the_checkpointing_is_among_the_changes() -> None:
    for fraction, values in ((1.0, {0.5, 0.0}), (0.5, {0.25, 0.0, 1.0}), (0.0, {0.5, 1.0})):
        config = RECIPE.model_copy(update={"checkpoint_fraction": fraction})
        changes = what_ifs(a_forecaster().expect(config))
        assert {c.value for c in changes if c.key == "checkpoint_fraction"} == values


def test_a_change_tells_the_difference_of_two_forecasts() -> None:
    forecaster = a_forecaster()
    shown = forecaster.expect(RECIPE)
    for change in what_ifs(shown):
        own = forecaster.expect(change.forecast.config)
        difference = own.memory.peak_allocated_bytes - shown.memory.peak_allocated_bytes
        assert change.memory_change_bytes == difference
        assert change.speed_change is not None
        speeds = own.tokens_per_second, shown.tokens_per_second
        assert change.speed_change == pytest.approx(speeds[0] / speeds[1] - 1)  # type: ignore[operator]


def test_what_is_faster_and_fits_comes_before_what_saves_memory_and_what_does_not_fit() -> None:
    forecaster = a_forecaster(budget_gib=10)
    changes = what_ifs(forecaster.expect(RECIPE))
    assert [change.use for change in changes] == sorted(change.use for change in changes)
    for change in changes:
        is_faster = (change.speed_change or 0) > 0.005
        match change.use:
            case Use.FASTER:
                assert is_faster
                assert change.forecast.fit is not Fit.NO
            case Use.LEANER:
                assert not is_faster
                assert change.memory_change_bytes < 0
                assert change.forecast.fit is not Fit.NO
            case Use.FASTER_WHERE_IT_FITS:
                assert is_faster
                assert change.forecast.fit is Fit.NO
            case Use.NONE:
                assert not (is_faster and change.forecast.fit is Fit.YES)
    without = next(c for c in changes if (c.key, c.value) == ("checkpoint_fraction", 0.0))
    assert without.use is Use.FASTER_WHERE_IT_FITS
    upcast = next(c for c in changes if c.key == "upcast_fp32")
    assert (upcast.value, upcast.use) == (False, Use.FASTER)


def test_only_useful_changes_that_leave_the_task_alone_are_worth_a_line() -> None:
    changes = what_ifs(a_forecaster().expect(RECIPE))
    shown = few(changes)
    assert 0 < len(shown) < len(changes) / 2
    assert not {change.key for change in shown} & set(TASK_KEYS)
    assert Use.NONE not in {change.use for change in shown}


def test_nothing_is_asked_of_what_a_rule_forbids() -> None:
    forecaster = a_forecaster(gpu="t4")
    assert forecaster.expect(RECIPE).broken is not None
    assert what_ifs(forecaster.expect(RECIPE)) == ()


def test_a_measured_configuration_is_compared_by_what_is_predicted_of_both() -> None:
    """Its trials ran at 1.2 times the predicted step: no change may gain or lose by that."""
    evidence = evidence_from(a_snapshot(*TRIALS), model=MISTRAL, gpu=a_forecaster().gpu)
    forecaster = a_forecaster(evidence=evidence)
    shown = forecaster.expect(TRIALS[0].config)
    assert shown.speed_basis == "measured"
    (quant,) = [c for c in what_ifs(shown) if c.value == "fp4"]
    assert quant.speed_change == pytest.approx(0.0, abs=1e-9)
