"""How a trial ended is said in the same words everywhere."""

from __future__ import annotations

import pytest

from reports.outcomes import VERDICT_LABELS, VERDICT_MEANINGS, outcome_line, verdict_words
from search_spaces.config import TrialConfig
from storage.records import (
    Crashed,
    Diverged,
    DominatedOutOfMemory,
    Ineffective,
    Invalid,
    Lost,
    Measured,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    QualityReport,
    TimedOut,
    Verdict,
)
from tests.sweep.simulated_device import BUDGET, a_measurement, a_record, train

CONFIG = TrialConfig()


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
