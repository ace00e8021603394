"""What is unsure is said to be so, and no number has more digits than its interval supports."""

from __future__ import annotations

from typing import Any

import pytest

from reports import uncertainty
from reports.summary import summary_of
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.confirmations import Ratio
from storage.records import Need, OutOfMemory
from tests.reports.synthetic import BUDGET_BYTES, definition, fits, measurement, record, snapshot
from tests.storage.builders import confirmed

FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)
RANKS = {
    "dimensions": {"lora_rank": {"choices": [16, 64]}, "micro_batch_size": {"choices": [8, 10]}},
    "fixed": {},
}


@pytest.mark.parametrize(
    ("value", "low", "high", "words"),
    [
        (2.122, 2.115, 2.13, "2.12x (2.12–2.13x)"),
        (2.122, 2.06, 2.17, "2.1x (2.06–2.17x)"),
        (2.122, 1.9, 2.4, "2x (1.9–2.4x)"),
        (13.82, 9.09, 19.0, "at least 9.0x (13.8x, 9.0–19.0x)"),
        (1.8, 1.049, 3.1, "at least 1.04x (1.8x, 1.04–3.10x)"),
        (0.42, 0.2, 0.7, "0.4x (0.20–0.70x)"),
        (0.04, 0.01, 0.5, "0.04x (0.01–0.50x)"),
        (1.0, 1.0, 1.0, "1.00x"),
        (2.31, 2.13, 2.58, "2.3x (2.13–2.58x)"),
        (2.31, None, None, "2.3x"),
    ],
)
def test_a_gain_has_no_more_digits_than_its_interval_supports(
    value: float, low: float | None, high: float | None, words: str
) -> None:
    assert uncertainty.gain(Ratio(value, low, high, is_paired=True)) == words


def test_a_gain_of_single_runs_says_so() -> None:
    assert uncertainty.gain(Ratio(2.1, 2.05, 2.15)) == "2.1x (2.05–2.15x, by single runs)"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "8,000 tokens/s"),
        ({"flags": ("emulated", "throttled")}, "8,000 tokens/s"),
        ({"flags": ("emulated", "noisy")}, "8,000 tokens/s (7,921–8,081, noisy)"),
        ({"flags": ("neighbour",)}, "8,000 tokens/s (7,921–8,081, neighbour)"),
        ({"step_seconds_ci95": None}, "8,000 tokens/s (no interval)"),
    ],
)
def test_a_noisy_speed_is_never_said_without_its_interval(
    changes: dict[str, Any], words: str
) -> None:
    assert uncertainty.speed(measurement(8_000.0, **changes)) == words


@pytest.mark.parametrize(
    ("need", "words", "excess"),
    [
        (
            Need(23 * GIB, is_lower_bound=True, is_predicted=True),
            "at least 23.00 GiB by prediction",
            "it needs at least 1.50 GiB more than the budget by prediction",
        ),
        (
            Need(22 * GIB, is_lower_bound=True, is_predicted=False),
            "at least 22.00 GiB",
            "it needs at least 0.50 GiB more than the budget",
        ),
        (
            Need(BUDGET_BYTES, is_lower_bound=True, is_predicted=False),
            "at least 21.50 GiB",
            "it needs more than the budget, by how much is not known",
        ),
        (
            Need(25 * GIB, is_lower_bound=False, is_predicted=True),
            "25.00 GiB by prediction",
            "it is predicted to need 3.50 GiB more than the budget",
        ),
    ],
)
def test_a_need_says_whether_it_is_a_bound_or_a_prediction(
    need: Need, words: str, excess: str
) -> None:
    assert uncertainty.need(need) == words
    assert uncertainty.excess(need, budget_bytes=BUDGET_BYTES) == excess


def _facts(*trials: Any, **space: Any) -> dict[str, tuple[str, str]]:
    study = snapshot(trials, definition=definition(space=space), confirmations=confirmed(*trials))
    said = summary_of(study)
    return {fact.label: (fact.value, fact.detail) for fact in said.facts}


def test_the_gain_stands_with_its_interval() -> None:
    value, detail = _facts(fits(0, 8_000.0), fits(1, 16_800.0, FAST))["the baseline's speed"]
    assert value == "2.1x"
    assert detail.startswith(
        "confirmed (2 runs); 95 % interval 2.08–2.12x; "
        "baseline: 8,000 tokens/s on NVIDIA H200 (8 x 512, rank 16)"
    )


def test_a_noisy_speed_is_said_to_be_so_and_what_may_be_as_fast_has_no_gain() -> None:
    noisy = {"flags": ("neighbour",), "step_seconds_ci95": (0.1, 1.0)}
    facts = _facts(fits(0, 8_000.0), fits(1, 16_800.0, FAST, **noisy))
    value, detail = facts["gain over the baseline"]
    assert (value, detail.partition(";")[0]) == (
        "–",
        "statistically indistinguishable from the baseline",
    )
    assert "it may be more or less" in facts["tokens/s on a10"][1]


def test_across_capacity_classes_the_fastest_of_the_baselines_class_is_named_with_its_gain() -> (
    None
):
    facts = _facts(
        fits(0, 8_000.0),
        fits(1, 20_000.0, TrialConfig(micro_batch_size=10, lora_rank=64)),
        fits(2, 12_000.0, TrialConfig(micro_batch_size=10)),
        **RANKS,
    )
    value, detail = facts["gain over the baseline"]
    assert value == "–"
    assert "the baseline at rank 64 on q,k,v,o was not measured" in detail
    assert (
        "the fastest of the baseline's class is trial 2, 1.5x (1.48–1.52x) the baseline" in detail
    )


def test_where_nothing_of_the_space_is_in_the_baselines_class_that_is_said() -> None:
    facts = _facts(
        fits(0, 8_000.0),
        fits(1, 20_000.0, TrialConfig(micro_batch_size=10, lora_rank=64)),
        dimensions={"micro_batch_size": {"choices": [8, 10]}},
        fixed={"lora_rank": 64},
        baseline={"micro_batch_size": 8, "lora_rank": 16},
    )
    _, detail = facts["gain over the baseline"]
    assert "nothing of the space was measured in the baseline's class" in detail


def test_a_baseline_outside_the_space_is_no_answer_where_nothing_of_the_space_fits() -> None:
    about = definition(
        space={
            "dimensions": {"micro_batch_size": {"choices": [8, 10]}},
            "fixed": {"lora_rank": 64},
            "baseline": {"micro_batch_size": 8, "lora_rank": 16},
        }
    )
    alone = fits(0, 8_000.0)
    wide = alone.config.model_copy(update={"lora_rank": 64})
    tried = record(1, OutOfMemory(stage="forward"), wide)
    said = summary_of(snapshot([alone, tried], definition=about))
    assert said.sentence.startswith("Nothing of the space that was tried was measured to fit")
    assert "Its baseline was, at 8,000 tokens/s: a reference" in said.sentence
    assert (said.configuration, said.commands) == ("", ())


@pytest.mark.parametrize(
    ("objectives", "sentence", "first"),
    [
        (
            ["tokens_per_second"],
            "The fastest configuration measured so far is trial 1, ",
            "tokens/s on a10",
        ),
        (
            ["peak_memory"],
            "The configuration with the lowest peak memory measured so far is trial 0, ",
            "peak allocated memory",
        ),
        (
            ["trainable_parameters"],
            "The configuration with the most trainable parameters measured so far is trial 1, ",
            "tokens/s on a10",
        ),
        (
            ["peak_memory", "tokens_per_second"],
            "The best compromise between peak memory and speed (the knee of the Pareto front)",
            "tokens/s on a10",
        ),
    ],
)
def test_the_answer_is_by_what_was_asked_for(
    objectives: list[str], sentence: str, first: str
) -> None:
    about = definition(space={"objectives": objectives})
    trials = (
        fits(0, 8_000.0, peak_allocated_bytes=8 * GIB),
        fits(1, 16_000.0, FAST, peak_allocated_bytes=20 * GIB),
    )
    said = summary_of(snapshot(trials, definition=about))
    assert said.sentence.startswith(sentence)
    assert said.facts[0].label == first
