"""A gain is stated within one capacity class, with its interval, which noise widens."""

from __future__ import annotations

import math
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from storage.confirmations import Ratio
from storage.ranking import Gain, rank
from storage.records import Measured, Outcome, OutOfMemory, TrialRecord
from tests.storage.builders import a_definition, confirmed, fits

SPACE: dict[str, Any] = {
    "dimensions": {
        "lora_rank": {"choices": [16, 64]},
        "micro_batch_size": {"choices": [1, 2, 4]},
    }
}


def searched(*trials: tuple[Outcome, dict[str, Any]]) -> list[TrialRecord]:
    """Return trials of a search, of which the first is the baseline."""
    return [
        TrialRecord(
            number=number,
            config=TrialConfig.model_validate(config),
            outcome=outcome,
            is_baseline=number == 0,
        )
        for number, (outcome, config) in enumerate(trials)
    ]


def compared(*trials: tuple[Outcome, dict[str, Any]], **space: Any) -> Gain:
    """Return the gain of a study, whose first trial is the baseline, all of them confirmed."""
    records = searched(*trials)
    return rank(records, a_definition(**(SPACE | space)), confirmed(*records)).gain


def noisy(speed: float, *flags: str, **changes: Any) -> Measured:
    return fits(speed, spread=0.3, flags=flags or ("noisy",), **changes)


def test_a_gain_has_the_ends_of_both_intervals() -> None:
    found = compared(
        (fits(100.0, spread=0.01), {}), (fits(250.0, spread=0.02), {"micro_batch_size": 2})
    )
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(2.5)
    # Of two runs that agree each interval is narrower by the root of two, as a share.
    share = math.hypot(math.log(1 / 0.99), math.log(1 / 0.98)) / math.sqrt(2)
    assert found.ratio.low == pytest.approx(2.5 * math.exp(-share))
    assert found.ratio.high == pytest.approx(2.5 * math.exp(share))
    assert found.reason is None


def test_a_winner_that_is_the_baseline_gained_nothing_for_sure() -> None:
    found = compared((fits(100.0, spread=0.02), {}))
    assert found.ratio is not None
    assert (found.ratio.value, found.ratio.low, found.ratio.high) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("flag", ["noisy", "neighbour"])
def test_what_a_noisy_speed_gained_has_a_wider_interval(flag: str) -> None:
    found = compared((noisy(100.0), {}), (noisy(250.0, flag), {"micro_batch_size": 2}))
    assert found.ratio is not None
    assert found.ratio.low is not None
    assert 1.0 < found.ratio.low < 2.0 < found.ratio.value


def test_what_noise_may_have_made_is_no_gain() -> None:
    found = compared((noisy(100.0), {}), (noisy(120.0), {"micro_batch_size": 2}))
    assert (found.ratio, found.reason) == (None, "not_shown")


@pytest.mark.parametrize("again", [[], [0], [1]])
def test_the_gain_of_what_was_not_measured_again_is_that_of_the_search(again: list[int]) -> None:
    records = searched(
        (fits(100.0, spread=0.02), {}), (fits(200.0, spread=0.02), {"micro_batch_size": 2})
    )
    runs = confirmed(*(records[number] for number in again), soak=False)
    found = rank(records, a_definition(**SPACE), runs).gain
    assert found.ratio is not None
    assert found.ratio.low is not None
    assert 1.8 < found.ratio.low < found.ratio.value == pytest.approx(2.0)


def test_without_intervals_a_gain_has_none() -> None:
    few = {"step_seconds_ci95": None}
    records = searched((fits(100.0), {}), (fits(250.0, **few), {"micro_batch_size": 2}))
    found = rank(records, a_definition(**SPACE)).gain
    assert found.ratio == Ratio(2.5, None, None)


def test_runs_of_a_few_steps_have_a_gain_where_they_agree() -> None:
    found = compared(
        (fits(100.0), {}), (fits(250.0, step_seconds_ci95=None), {"micro_batch_size": 2})
    )
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(2.5)


def test_a_card_that_its_power_limit_slows_down_steadily_has_a_gain() -> None:
    steady = fits(250.0, flags=("emulated", "throttled"), throttle_reasons=("power",))
    found = compared((fits(100.0), {}), (steady, {"micro_batch_size": 2}))
    assert found.ratio is not None


def test_across_capacity_classes_the_baselines_own_class_has_its_gain() -> None:
    records = searched(
        (fits(100.0), {"lora_rank": 16}),
        (fits(300.0), {"lora_rank": 64, "micro_batch_size": 2}),
        (fits(150.0), {"lora_rank": 16, "micro_batch_size": 2}),
        (fits(140.0), {"lora_rank": 16, "micro_batch_size": 1}),
    )
    ranking = rank(records, a_definition(**SPACE), confirmed(*records))
    assert (ranking.gain.ratio, ranking.gain.reason) == (None, "not_measured")
    assert ranking.fastest_of_baselines_class is not None
    assert ranking.fastest_of_baselines_class.number == 2
    of_class = ranking.gain_of(ranking.fastest_of_baselines_class).ratio
    assert of_class is not None
    assert of_class.value == pytest.approx(1.5)


def run_again(config: TrialConfig, *speeds: float, number: int) -> list[TrialRecord]:
    """Runs of a confirmation that no trial of the search stands behind."""
    errand = {"purpose": "confirm", "series": 1, "confirms": None}
    return [
        TrialRecord.model_validate(
            {"number": number + n, "config": config, "outcome": fits(speed)} | errand
        )
        for n, speed in enumerate(speeds)
    ]


def in_another_class(*more: TrialRecord) -> Gain:
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
    return rank(records, a_definition(**SPACE), (*confirmed(records[1]), *more)).gain


def test_in_another_class_the_gain_is_over_the_published_recipe_in_that_class() -> None:
    found = in_another_class(*run_again(TrialConfig(lora_rank=64), 148.0, 152.0, number=2000))
    assert found.ratio is not None
    # One of its runs alone had the winner beside it.
    assert found.ratio.value == pytest.approx(300 / 148, rel=0.001)
    assert found.ratio.low < 2.0 < found.ratio.high
    assert found.over is not None
    assert found.over.config == TrialConfig(lora_rank=64)
    assert found.reason is None


@pytest.mark.parametrize(
    ("speeds", "config"), [((150.0,), {"lora_rank": 64}), ((150.0, 150.0), {"lora_rank": 32})]
)
def test_a_recipe_run_once_or_of_a_third_class_gives_no_gain(
    speeds: tuple[float, ...], config: dict[str, Any]
) -> None:
    found = in_another_class(*run_again(TrialConfig(**config), *speeds, number=2000))
    assert (found.ratio, found.over, found.reason) == (None, None, "not_measured")


def test_a_recipe_that_ran_out_of_memory_in_the_winners_class_gives_no_gain() -> None:
    (lost,) = run_again(TrialConfig(lora_rank=64), 1.0, number=2000)
    lost = lost.model_copy(update={"outcome": OutOfMemory(stage="forward")})
    found = in_another_class(lost)
    assert (found.ratio, found.over, found.reason) == (None, None, "did_not_fit")


def test_a_recipe_that_the_search_measured_is_what_a_gain_is_over_before_a_confirmation() -> None:
    records = searched(
        (fits(100.0), {"lora_rank": 16}),
        (fits(300.0, spread=0.01), {"lora_rank": 64, "micro_batch_size": 2}),
        (fits(150.0, spread=0.01), {"lora_rank": 64}),
    )
    found = rank(records, a_definition(**SPACE)).gain
    assert found.over == records[2]
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(2.0)


def test_a_baseline_outside_the_space_is_no_trial_of_its_class() -> None:
    found = compared(
        (fits(100.0), {"lora_rank": 8}), (fits(300.0), {"lora_rank": 64, "micro_batch_size": 2})
    )
    assert found.reason == "not_measured"


def test_other_target_modules_are_another_class_and_another_spelling_is_none() -> None:
    by_name = ["q_proj", "k_proj", "v_proj", "o_proj"]
    space = {"dimensions": {"target_modules": {"choices": ["qv", by_name]}}}
    within = compared((fits(100.0), {}), (fits(200.0), {"target_modules": by_name}), **space)
    across = compared((fits(100.0), {}), (fits(200.0), {"target_modules": "qv"}), **space)
    assert within.reason is None
    # The winner is the baseline's recipe on q,v itself.
    assert across.over is not None
    assert across.over.number == 1


def test_without_a_measured_baseline_there_is_nothing_to_compare() -> None:
    found = compared((OutOfMemory(stage="load"), {}), (fits(), {"micro_batch_size": 2}))
    assert (found.ratio, found.reason) == (None, "not_measured")


def test_where_nothing_of_the_space_fits_there_is_no_gain() -> None:
    found = compared((fits(100.0), {"lora_rank": 8}), (OutOfMemory(stage="load"), {}))
    assert (found.ratio, found.reason) == (None, "no_winner")
