"""Speeds, gains, needs and the ends of trials are said in the same words everywhere."""

from __future__ import annotations

from typing import Any

import pytest

from reports import words
from reports.words import VERDICT_LABELS, VERDICT_MEANINGS, outcome_line, verdict_words
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.confirmations import Ratio
from storage.records import (
    Crashed,
    Diverged,
    DominatedOutOfMemory,
    Ineffective,
    Invalid,
    Lost,
    Measured,
    Need,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    QualityReport,
    TimedOut,
    Verdict,
)
from tests.reports.synthetic import BUDGET_BYTES, measurement
from tests.sweep.simulated_device import BUDGET, a_measurement, a_record, train

CONFIG = TrialConfig()


@pytest.mark.parametrize(
    ("value", "low", "high", "said"),
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
    value: float, low: float | None, high: float | None, said: str
) -> None:
    assert words.gain(Ratio(value, low, high, is_paired=True)) == said


def test_a_gain_of_single_runs_says_so() -> None:
    assert words.gain(Ratio(2.1, 2.05, 2.15)) == "2.1x (2.05–2.15x, by single runs)"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "8,000 tokens/s"),
        ({"flags": ("emulated", "throttled")}, "8,000 tokens/s"),
        ({"flags": ("emulated", "noisy")}, "8,000 tokens/s (7,921–8,081, noisy)"),
        ({"flags": ("neighbour",)}, "8,000 tokens/s (7,921–8,081, neighbour)"),
        ({"step_seconds_ci95": None}, "8,000 tokens/s (no interval)"),
    ],
)
def test_a_noisy_speed_is_never_said_without_its_interval(
    changes: dict[str, Any], said: str
) -> None:
    assert words.speed(measurement(8_000.0, **changes)) == said


@pytest.mark.parametrize(
    ("need", "said", "excess"),
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
    need: Need, said: str, excess: str
) -> None:
    assert words.need(need) == said
    assert words.excess(need, budget_bytes=BUDGET_BYTES) == excess


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (train(CONFIG), "fits, 7,006 tokens/s, 6.65 GiB"),
        (
            OutOfMemory(stage="backward"),
            "ran out of memory (backward, needs at least 21.50 GiB)",
        ),
        (
            OutOfMemory(stage="backward", peak_allocated_bytes=2**34, requested_bytes=2**30),
            "ran out of memory (backward, needs at least 21.50 GiB)",
        ),
        (
            PredictedOutOfMemory(predicted_bytes=2**35),
            "predicted not to fit (needs 32.00 GiB by prediction)",
        ),
        (
            DominatedOutOfMemory(by=4),
            "larger than one that ran out (trial 4, needs at least 21.50 GiB)",
        ),
        (Invalid(rule="r", detail="no Triton"), "invalid (no Triton)"),
        (Diverged(step=3), "diverged (at step 3)"),
        (Lost(detail="the driver ended"), "lost (the driver ended)"),
        (Ineffective(knob="compile"), "had no effect (compile)"),
        (TimedOut(phase="build"), "timed out (build)"),
        (Crashed(phase="attach", detail="a\nb"), "crashed (attach: a b)"),
        (Crashed(phase="attach", detail="x" * 999), f"crashed (attach: {'x' * 152}...)"),
    ],
)
def test_every_end_is_said_in_a_few_words(outcome: Outcome, words: str) -> None:
    assert outcome_line(a_record(CONFIG, outcome), budget_bytes=BUDGET) == words


def test_a_noisy_speed_is_said_with_its_interval() -> None:
    noisy = Measured(measurement=a_measurement(CONFIG, spread=0.2, flags=("noisy",)))
    line = outcome_line(a_record(CONFIG, noisy), budget_bytes=BUDGET)
    assert line == "fits, 7,006 tokens/s (5,838–8,757, noisy), 6.65 GiB"


@pytest.mark.parametrize(
    ("ends", "words"), [(None, "2.1500"), ((2.1, 2.2), "2.1500 (2.1–2.2)")], ids=str
)
def test_what_trained_for_its_loss_says_it(ends: tuple[float, float] | None, words: str) -> None:
    quality = QualityReport(
        eval_loss=2.15,
        eval_tokens=1000,
        eval_seq_len=512,
        train_tokens=5000,
        train_loss=2.0,
        steps=5,
        seconds=60.0,
        seed=1,
        eval_loss_ci95=ends,
    )
    measured = Measured(measurement=a_measurement(CONFIG).model_copy(update={"quality": quality}))
    line = outcome_line(a_record(CONFIG, measured), budget_bytes=BUDGET)
    assert line.endswith(f", 6.65 GiB, held-out loss {words}")


def test_counts_by_verdict_in_words() -> None:
    outcomes = [OutOfMemory(stage="load")] * 3 + [train(CONFIG)] * 5
    assert verdict_words(a_record(CONFIG, o) for o in outcomes) == "5 fits, 3 ran out of memory"
    assert verdict_words([]) == ""


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_has_a_name_and_a_meaning(verdict: Verdict) -> None:
    assert VERDICT_LABELS[verdict]
    assert VERDICT_MEANINGS[verdict].endswith(".")


def test_an_attempt_that_was_repeated_is_no_trial_of_its_own() -> None:
    """A crash that a second attempt made up for leaves nothing unknown."""
    other = TrialConfig(micro_batch_size=2)
    records = (
        a_record(CONFIG, Crashed(phase="warmup"), number=0),
        a_record(other, Crashed(phase="warmup"), number=1),
        a_record(CONFIG, number=2),
    )
    assert verdict_words(records) == "1 fits, 1 crashed (after 1 failed attempt)"
    assert verdict_words(records[1:]) == "1 fits, 1 crashed"
    failed = (*records[:2], a_record(other, Crashed(phase="warmup"), number=2, attempt=2))
    assert verdict_words(failed) == "2 crashed (after 1 failed attempt)"
