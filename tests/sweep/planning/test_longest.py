"""Behaviour of the longest rows, against asking of every length."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from search_spaces.config import TrialConfig
from sweep.planning.backwards import LENGTH_STEP, longest_rows
from sweep.planning.candidates import Asked
from sweep.planning.documents import longest_document
from sweep.predict.forecast import Forecaster
from sweep.predict.memory.predictor import Fit
from tests.sweep.imagined_study import MISTRAL, a_space
from tests.sweep.planning.imagined import a_forecaster

SPACE = a_space(
    dimensions={
        "micro_batch_size": {"choices": [1, 2, 3, 8, 16]},
        "seq_len": {"choices": [512]},
        "checkpoint_fraction": {"choices": [0.0, 0.3, 1.0]},
        "lora_rank": {"choices": [8, 16, 64]},
    }
)
SHORT = replace(MISTRAL, config={**MISTRAL.config, "max_position_embeddings": 4096})


def one_by_one(forecaster: Forecaster, batch: int) -> tuple[int, int]:
    """Return the longest row that surely fits, and that perhaps does, asking of every length."""
    longest = {Fit.YES: 0, Fit.UNCERTAIN: 0, Fit.NO: 0}
    for length in range(LENGTH_STEP, 4096 + 1, LENGTH_STEP):
        for fraction in (0.0, 0.3, 1.0):
            config = TrialConfig(
                micro_batch_size=batch, seq_len=length, checkpoint_fraction=fraction
            )
            longest[forecaster.expect(config).fit] = length
    return longest[Fit.YES], max(longest[Fit.YES], longest[Fit.UNCERTAIN])


@pytest.mark.parametrize("budget_gib", [5.2, 6.3, 7.77, 12, 30])
def test_the_longest_rows_are_those_that_asking_of_every_length_finds(budget_gib: float) -> None:
    asked, fresh = (a_forecaster(model=SHORT, budget_gib=budget_gib) for _ in range(2))
    answer = longest_rows(SPACE, asked)
    for row in answer.rows:
        assert (row.seq_len, row.possible) == one_by_one(fresh, row.micro_batch_size)
        if row.seq_len:
            assert row.forecast.fit is Fit.YES
            assert row.forecast.config.seq_len == row.seq_len
            assert row.forecast.config.lora_rank == 16
    assert answer.limit == 4096


def test_of_what_fits_at_the_longest_length_the_fastest_is_told() -> None:
    roomy = longest_rows(SPACE, a_forecaster(model=SHORT, budget_gib=30))
    first = roomy.rows[0].forecast
    assert (first.config.seq_len, first.config.checkpoint_fraction) == (4096, 0.0)
    tight = longest_rows(SPACE, a_forecaster(model=SHORT, budget_gib=7))
    assert tight.best.forecast.config.checkpoint_fraction == 1.0


def test_rows_end_with_the_first_micro_batch_at_which_nothing_fits() -> None:
    answer = longest_rows(SPACE, a_forecaster(model=SHORT, budget_gib=5.2))
    assert [row.micro_batch_size for row in answer.rows] == [1, 2, 3, 8]
    assert [bool(row.possible) for row in answer.rows] == [True, True, True, False]
    nothing = longest_rows(SPACE, a_forecaster(model=SHORT, budget_gib=4))
    assert (nothing.best, len(nothing.rows)) == (None, 1)
    assert longest_document(nothing)["longest"] is None


def test_micro_batches_go_into_the_effective_batch() -> None:
    space = a_space(dimensions=SPACE.model_dump()["dimensions"], fixed={"effective_batch_size": 6})
    answer = longest_rows(space, a_forecaster(model=SHORT))
    assert [row.micro_batch_size for row in answer.rows] == [1, 2, 3]
    configs = [row.forecast.config for row in answer.rows if row.forecast is not None]
    assert [config.accumulation_steps for config in configs] == [6, 3, 2]


def test_one_configuration_is_asked_about_at_its_micro_batch_or_at_all() -> None:
    config = TrialConfig(micro_batch_size=3, checkpoint_fraction=0.5)
    held = longest_rows(config, a_forecaster(), asked=Asked(held={"micro_batch_size": 3}))
    assert [row.micro_batch_size for row in held.rows] == [3]
    free = longest_rows(config, a_forecaster())
    assert [row.micro_batch_size for row in free.rows][:3] == [1, 2, 4]
    assert free.configurations == 1


def test_the_document_is_json_and_names_its_grain() -> None:
    answer = longest_rows(SPACE, a_forecaster(model=SHORT))
    document = json.loads(json.dumps(longest_document(answer), allow_nan=False))
    assert document["multiple_of"] == LENGTH_STEP
    assert document["longest"]["seq_len"] == max(row["seq_len"] for row in document["rows"])
    assert document["longest"]["answer"]["tokens_per_second"] > 0
