"""A gain is stated within one capacity class, with its interval, and never of a noisy speed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from storage.gain import Comparison, compare
from storage.ranking import rank
from storage.records import Measured, Outcome, OutOfMemory, TrialRecord
from tests.storage.builders import a_definition, confirmed, fits

SPACE: dict[str, Any] = {
    "dimensions": {
        "lora_rank": {"choices": [16, 64]},
        "micro_batch_size": {"choices": [1, 2, 4]},
    }
}


def compared(*trials: tuple[Outcome, dict[str, Any]], **space: Any) -> Comparison | None:
    """Compare trials of a study, of which the first is the baseline, all of them confirmed."""
    records = [
        TrialRecord(
            number=number,
            config=TrialConfig.model_validate(config),
            outcome=outcome,
            is_baseline=number == 0,
        )
        for number, (outcome, config) in enumerate(trials)
    ]
    return compare(rank(records, a_definition(**(SPACE | space)), confirmed(*records)))


def noisy(speed: float, *flags: str, **changes: Any) -> Measured:
    return fits(speed, spread=0.3, flags=flags or ("noisy",), **changes)


def test_a_gain_has_the_ends_of_both_intervals() -> None:
    found = compared(
        (fits(100.0, spread=0.01), {}), (fits(250.0, spread=0.02), {"micro_batch_size": 2})
    )
    assert found is not None
    assert found.gain is not None
    assert found.gain.ratio == pytest.approx(2.5)
    # Of two runs that agree each interval is narrower by the root of two, as a share.
    share = (math.log(1 / 0.99) + math.log(1 / 0.98)) / math.sqrt(2)
    assert found.gain.low == pytest.approx(2.5 * math.exp(-share))
    assert found.gain.high == pytest.approx(2.5 * math.exp(share))
    assert found.reason is None


def test_a_winner_that_is_the_baseline_gained_nothing_for_sure() -> None:
    found = compared((fits(100.0, spread=0.02), {}))
    assert found is not None
    assert found.gain is not None
    assert (found.gain.ratio, found.gain.low, found.gain.high) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("baseline", "winner", "reason"),
    [
        (fits(100.0), noisy(250.0), "noisy_winner"),
        (noisy(100.0), fits(250.0), "noisy_baseline"),
        (noisy(100.0), noisy(250.0), "noisy_both"),
        (fits(100.0), noisy(250.0, "neighbour"), "noisy_winner"),
    ],
)
def test_a_noisy_speed_has_no_gain(baseline: Outcome, winner: Outcome, reason: str) -> None:
    found = compared((baseline, {}), (winner, {"micro_batch_size": 2}))
    assert found is not None
    assert (found.gain, found.reason) == (None, reason)


def test_what_was_not_confirmed_has_no_gain_however_sure_its_speed_seems() -> None:
    records = [
        TrialRecord(
            number=number,
            config=TrialConfig(micro_batch_size=2 + 2 * number),
            outcome=fits(100.0 * (1 + number)),
            is_baseline=number == 0,
        )
        for number in range(2)
    ]
    found = compare(rank(records, a_definition(**SPACE)))
    assert found is not None
    assert (found.gain, found.reason) == (None, "not_confirmed")
    found = compare(rank(records, a_definition(**SPACE), confirmed(*records, soak=False)))
    assert found is not None
    assert (found.gain, found.reason) == (None, "not_confirmed")
    found = compare(rank(records, a_definition(**SPACE), confirmed(records[1])))
    assert found is not None
    assert (found.gain, found.reason) == (None, "baseline_not_confirmed")


def test_runs_of_a_few_steps_have_a_gain_where_they_agree() -> None:
    found = compared((fits(100.0), {}), (fits(250.0, steps_measured=5), {"micro_batch_size": 2}))
    assert found is not None
    assert found.gain is not None
    assert found.gain.ratio == pytest.approx(2.5)


def test_a_card_that_its_power_limit_slows_down_steadily_has_a_gain() -> None:
    steady = fits(250.0, flags=("emulated", "throttled"), throttle_reasons=("power",))
    found = compared((fits(100.0), {}), (steady, {"micro_batch_size": 2}))
    assert found is not None
    assert found.gain is not None


def test_across_capacity_classes_the_gain_is_that_of_the_baselines_own_class() -> None:
    found = compared(
        (fits(100.0), {"lora_rank": 16}),
        (fits(300.0), {"lora_rank": 64, "micro_batch_size": 2}),
        (fits(150.0), {"lora_rank": 16, "micro_batch_size": 2}),
        (fits(140.0), {"lora_rank": 16, "micro_batch_size": 1}),
    )
    assert found is not None
    assert (found.gain, found.reason) == (None, "another_class")
    assert found.fastest_of_class is not None
    assert found.fastest_of_class.number == 2
    assert found.class_gain is not None
    assert found.class_gain.ratio == pytest.approx(1.5)


def run_again(config: TrialConfig, *speeds: float, number: int) -> list[TrialRecord]:
    """Runs of a confirmation that no trial of the search stands behind."""
    errand = {"purpose": "confirm", "series": 1, "confirms": None}
    return [
        TrialRecord.model_validate(
            {"number": number + n, "config": config, "outcome": fits(speed)} | errand
        )
        for n, speed in enumerate(speeds)
    ]


def in_another_class(*more: TrialRecord) -> Comparison:
    records = [
        TrialRecord(
            number=0, config=TrialConfig(lora_rank=16), outcome=fits(100.0), is_baseline=True
        ),
        TrialRecord(
            number=1,
            config=TrialConfig(lora_rank=64, micro_batch_size=2),
            outcome=fits(300.0, spread=0.01),
        ),
    ]
    found = compare(rank(records, a_definition(**SPACE), (*confirmed(records[1]), *more)))
    assert found is not None
    return found


def test_in_another_class_the_gain_is_over_the_published_recipe_in_that_class() -> None:
    found = in_another_class(*run_again(TrialConfig(lora_rank=64), 148.0, 152.0, number=2000))
    assert found.gain is not None
    assert found.gain.trial.number == 1
    assert found.gain.ratio == pytest.approx(2.0, rel=0.001)
    assert found.gain.low < 2.0 < found.gain.high
    assert found.over is not None
    assert found.over.config == TrialConfig(lora_rank=64)
    assert (found.reason, found.is_over_the_baseline) == (None, False)


@pytest.mark.parametrize(
    ("speeds", "config"), [((150.0,), {"lora_rank": 64}), ((150.0, 150.0), {"lora_rank": 32})]
)
def test_a_recipe_run_once_or_of_a_third_class_gives_no_gain(
    speeds: tuple[float, ...], config: dict[str, Any]
) -> None:
    found = in_another_class(*run_again(TrialConfig(**config), *speeds, number=2000))
    assert (found.gain, found.over, found.reason) == (None, None, "another_class")


def test_a_recipe_that_ran_out_of_memory_in_the_winners_class_gives_no_gain() -> None:
    (lost,) = run_again(TrialConfig(lora_rank=64), 1.0, number=2000)
    lost = lost.model_copy(update={"outcome": OutOfMemory(stage="forward")})
    found = in_another_class(lost)
    assert (found.gain, found.over, found.reason) == (None, None, "recipe_did_not_fit")


def test_a_noisy_fastest_of_the_class_has_no_gain_either() -> None:
    found = compared(
        (fits(100.0), {"lora_rank": 16}),
        (fits(300.0), {"lora_rank": 64}),
        (noisy(150.0), {"lora_rank": 16, "micro_batch_size": 2}),
    )
    assert found is not None
    assert found.fastest_of_class is not None
    assert found.class_gain is None


def test_a_baseline_outside_the_space_is_no_trial_of_its_class() -> None:
    found = compared(
        (fits(100.0), {"lora_rank": 8}), (fits(300.0), {"lora_rank": 64, "micro_batch_size": 2})
    )
    assert found is not None
    assert (found.reason, found.fastest_of_class, found.class_gain) == ("another_class", None, None)


def test_other_target_modules_are_another_class_and_another_spelling_is_none() -> None:
    by_name = ["q_proj", "k_proj", "v_proj", "o_proj"]
    space = {"dimensions": {"target_modules": {"choices": ["qv", by_name]}}}
    within = compared((fits(100.0), {}), (fits(200.0), {"target_modules": by_name}), **space)
    across = compared((fits(100.0), {}), (fits(200.0), {"target_modules": "qv"}), **space)
    assert within is not None
    assert within.reason is None
    assert across is not None
    # The winner is the baseline's recipe on q,v itself.
    assert across.over is not None
    assert (across.over.number, across.is_over_the_baseline) == (1, False)


def test_without_a_measured_baseline_there_is_nothing_to_compare() -> None:
    assert compared((OutOfMemory(stage="load"), {}), (fits(), {"micro_batch_size": 2})) is None


def test_where_nothing_of_the_space_fits_there_is_no_gain() -> None:
    found = compared((fits(100.0), {"lora_rank": 8}), (OutOfMemory(stage="load"), {}))
    assert found is not None
    assert (found.gain, found.reason) == (None, "no_winner")
