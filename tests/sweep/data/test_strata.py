"""A few micro-batches go as fast through as the whole epoch that they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from sweep.data.epoch import Epoch, epoch
from sweep.data.strata import MASKED_COST, representative
from tests.sweep.data.prepared import configured


def _epoch(packing: str, *, rows: int, completions: bool, **values: object) -> Epoch:
    random = np.random.default_rng(rows)
    lengths = np.clip(random.lognormal(5.5, 0.9, rows).astype(int), 8, 6000)
    shares = random.uniform(0.1, 0.9, rows) if completions else np.ones(rows)
    loss = np.maximum((lengths * shares).astype(int) - 1, 1)
    return epoch(lengths, loss, configured(packing, seq_len=1024, **values), seed=1)


def _rate(whole: Epoch, chosen: object, *, launch: float, quadratic: float) -> float:
    """Return loss-carrying tokens a second where a micro-batch takes a fixed time, one for each
    token, and one for each pair of tokens in a row, more under a mask."""
    attention = whole.pairs[chosen] * np.where(whole.masked[chosen], MASKED_COST, 1.0)
    seconds = launch + 1e-5 * whole.padded[chosen] + quadratic * attention
    return float(whole.loss[chosen].sum() / seconds.sum())


@pytest.mark.parametrize("rows", [1_500, 20_000])
@pytest.mark.parametrize("completions", [False, True])
@pytest.mark.parametrize("values", [{}, {"compile": True}, {"micro_batch_size": 16}])
@pytest.mark.parametrize("packing", ["none", "grouped", "packed"])
def test_a_round_is_as_fast_as_its_epoch(
    packing: str, values: dict[str, object], completions: bool, rows: int
) -> None:
    whole = _epoch(packing, rows=rows, completions=completions, **values)
    chosen = representative(whole, micro_steps=1)
    assert len(chosen) in ((1, 8) if packing == "packed" else (4,))
    for launch, quadratic in ((0.0, 0.0), (0.005, 0.0), (0.002, 2e-9)):
        stands = _rate(whole, chosen, launch=launch, quadratic=quadratic)
        epochs = _rate(whole, slice(None), launch=launch, quadratic=quadratic)
        assert stands == pytest.approx(epochs, rel=0.02)


@pytest.mark.parametrize("median", [200, 300, 400, 500, 700])
@pytest.mark.parametrize("values", [{}, {"attention": "flash_attention_2"}])
def test_a_round_of_packed_rows_is_as_fast_where_some_hold_one_text(
    median: int, values: dict[str, object]
) -> None:
    """A row of one text has no mask, and flattened rows have each text's own pairs."""
    lengths = np.random.default_rng(median).lognormal(np.log(median), 0.5, 4000).astype(int) + 2
    config = configured("packed", seq_len=512, micro_batch_size=1, **values)
    whole = epoch(lengths, lengths - 1, config, seed=1)
    chosen = representative(whole, micro_steps=1)
    assert whole.masked.any() == (not values)
    for quadratic in (1e-9, 4e-9):
        stands = _rate(whole, chosen, launch=0.0, quadratic=quadratic)
        epochs = _rate(whole, slice(None), launch=0.0, quadratic=quadratic)
        assert stands == pytest.approx(epochs, rel=0.02)


def test_packed_rows_that_all_take_as_long_are_told_by_one() -> None:
    lengths = np.full(400, 100)
    config = configured("packed", seq_len=512, micro_batch_size=2)
    whole = epoch(lengths, lengths - 1, config, seed=1)
    assert len(representative(whole, micro_steps=1)) == 1


@pytest.mark.parametrize(
    ("packing", "micro_steps", "count"),
    [
        *(("none", micro, count) for micro, count in [(1, 4), (2, 4), (3, 6), (4, 4), (16, 16)]),
    ],
)
def test_a_round_is_a_whole_number_of_optimizer_steps(
    packing: str, micro_steps: int, count: int
) -> None:
    whole = _epoch(packing, rows=2_000, completions=False)
    assert len(representative(whole, micro_steps=micro_steps)) == count


@pytest.mark.parametrize("rows", [4, 5, 9, 23])
def test_the_micro_batch_with_fewer_rows_is_never_taken(rows: int) -> None:
    whole = _epoch("none", rows=rows, completions=False)
    full = rows // 4
    assert set(representative(whole, micro_steps=1)) <= set(range(full))


def test_short_and_long_micro_batches_are_both_in_a_round() -> None:
    whole = _epoch("grouped", rows=4_000, completions=False)
    quarters = np.quantile(whole.padded, [0.25, 0.5, 0.75])
    places = np.searchsorted(quarters, whole.padded[representative(whole, micro_steps=1)])
    assert sorted(places) == [0, 1, 2, 3]
