"""An epoch of texts is made in numpy alone as transformers and TRL make it, and a few of its
micro-batches go as fast through as all of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import parse_config
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.sweep.data.epoch import (
    MASKED_COST,
    Epoch,
    cut,
    epoch,
    packed,
    representative,
)
from tests.sweep.data.prepared import configured
from tests.tables import cases

PACKINGS = ("none", "grouped", "packed")


def _lengths(rows: int, *, seed: int = 0, most: int = 4096) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(4.5, 1.0, rows).astype(int), 2, most)


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_text_is_in_the_epoch_once_in_an_order_of_its_seed(packing: str) -> None:
    lengths = _lengths(2503)
    config = configured(packing, seq_len=256)

    whole, again, other = (epoch(lengths, lengths - 1, config, seed=s) for s in (3, 3, 4))

    assert sorted(whole.rows.documents) == list(range(2503))
    assert whole.tokens == other.tokens == np.minimum(lengths, 256).sum()
    assert whole.loss_tokens == (np.minimum(lengths, 256) - 1).sum()
    assert whole.tokens <= whole.padded_tokens
    assert whole.rows_cut == (lengths > 256).sum()
    assert np.array_equal(whole.rows.documents, again.rows.documents)
    assert not np.array_equal(whole.rows.documents, other.rows.documents)


def test_a_pair_is_cut_once_however_many_of_its_rows_are() -> None:
    lengths = np.array([10, 300, 300, 300, 20, 20])
    config = parse_config({"method": "dpo", "micro_batch_size": 1, "seq_len": 256})
    assert epoch(lengths, lengths - 1, config, seed=0).rows_cut == 2


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_largest_micro_batch_is_no_smaller_than_that_of_any_order(packing: str) -> None:
    lengths = _lengths(64)
    config = configured(packing, seq_len=512, micro_batch_size=4)
    epochs = [epoch(lengths, lengths - 1, config, seed=seed) for seed in range(20)]
    assert len({whole.largest for whole in epochs}) == 1
    assert all(whole.largest.tokens >= whole.padded.max() for whole in epochs)


def test_under_compile_there_are_no_more_than_four_widths() -> None:
    lengths = _lengths(2000)
    for seq_len in (256, 250, 3):
        config = configured(seq_len=seq_len, micro_batch_size=2, compile=True)
        widths = set(epoch(lengths, lengths - 1, config, seed=0).widths.tolist())
        assert len(widths) <= 4
        assert max(widths) == seq_len


@pytest.mark.parametrize("loss", [[5, 30], [4, 29]])
def test_nothing_comes_before_a_rows_first_token_however_it_was_counted(loss: list[int]) -> None:
    assert np.array_equal(cut([5, 30], loss, 16), [[5, 16], [4, 15]])


@pytest.mark.parametrize(
    ("lengths", "values", "words"),
    cases(
        """
        [1, 1] | {} | no row of the texts
        [9, 9] | {micro_batch_size: 3} | is 3.*make 2 rows
        [9, 9, 9, 9] | {packing: packed, micro_batch_size: 2} | make 1 packed row at
        """
    ),
)
def test_texts_that_make_no_micro_batch_are_refused(
    lengths: list[int], values: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        epoch(lengths, lengths, configured(**values), seed=0)


def test_packing_wastes_less_than_grouping_and_grouping_less_than_nothing() -> None:
    lengths = _lengths(5000)
    packed_, grouped, none = (
        epoch(lengths, lengths - 1, configured(packing, seq_len=1024), seed=0).waste
        for packing in ("packed", "grouped", "none")
    )
    assert packed_ < grouped < none
    rows = packed(lengths, 256)
    assert sorted(np.concatenate(rows)) == list(range(5000))
    assert max(np.minimum(lengths[row], 256).sum() for row in rows) == 256


# The few that stand for all


def _epoch(packing: str, *, rows: int, completions: bool = False, **values: object) -> Epoch:
    random = np.random.default_rng(rows)
    lengths = np.clip(random.lognormal(5.5, 0.9, rows).astype(int), 8, 6000)
    shares = random.uniform(0.1, 0.9, rows) if completions else np.ones(rows)
    _, loss = cut(lengths, np.maximum((lengths * shares).astype(int) - 1, 1), 1024)
    return epoch(lengths, loss, configured(packing, seq_len=1024, **values), seed=1)


def assert_as_fast(whole: Epoch, chosen: list[int], costs: list[tuple[float, float]]) -> None:
    """Check loss-carrying tokens a second where a micro-batch takes a fixed time, one for each
    token, and one for each pair of tokens in a row, more under a mask."""

    def rate(which: object, launch: float, quadratic: float) -> float:
        attention = whole.pairs[which] * np.where(whole.masked[which], MASKED_COST, 1.0)
        seconds = launch + 1e-5 * whole.padded[which] + quadratic * attention
        return float(whole.loss[which].sum() / seconds.sum())

    for cost in costs:
        assert rate(chosen, *cost) == pytest.approx(rate(slice(None), *cost), rel=0.02)


@pytest.mark.parametrize(("rows", "completions"), [(1_500, True), (20_000, False)])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_round_is_as_fast_as_its_epoch(packing: str, completions: bool, rows: int) -> None:
    count = {"none": (4,), "grouped": (4,), "packed": (1, 8)}[packing]
    for values in ({}, {"compile": True}, {"micro_batch_size": 16}):
        whole = _epoch(packing, rows=rows, completions=completions, **values)
        chosen = representative(whole, micro_steps=1)
        assert len(chosen) in count
        assert_as_fast(whole, chosen, [(0.0, 0.0), (0.005, 0.0), (0.002, 2e-9)])


@pytest.mark.parametrize("median", [200, 700])
@pytest.mark.parametrize("values", [{}, {"attention": "flash_attention_2"}])
def test_a_round_of_packed_rows_is_as_fast_where_some_hold_one_text(
    median: int, values: dict[str, object]
) -> None:
    """A row of one text has no mask, and flattened rows have each text's own pairs."""
    lengths = np.random.default_rng(median).lognormal(np.log(median), 0.5, 4000).astype(int) + 2
    config = configured("packed", seq_len=512, micro_batch_size=1, **values)
    whole = epoch(lengths, lengths - 1, config, seed=1)
    assert whole.masked.any() == (not values)
    assert_as_fast(whole, representative(whole, micro_steps=1), [(0.0, 1e-9), (0.0, 4e-9)])


def test_a_round_is_whole_optimizer_steps_of_full_micro_batches_of_every_size() -> None:
    alike = np.full(400, 100)
    whole = epoch(alike, alike, configured("packed", seq_len=512, micro_batch_size=2), seed=1)
    assert len(representative(whole, micro_steps=1)) == 1
    whole = _epoch("none", rows=2_000)
    counts = {1: 4, 2: 4, 3: 6, 4: 4, 16: 16}
    assert {n: len(representative(whole, micro_steps=n)) for n in counts} == counts
    for rows in (4, 5, 9, 23):
        few = representative(_epoch("none", rows=rows), micro_steps=1)
        assert set(few) <= set(range(rows // 4)), "the last has fewer rows"
    whole = _epoch("grouped", rows=4_000)
    quarters = np.quantile(whole.padded, [0.25, 0.5, 0.75])
    places = np.searchsorted(quarters, whole.padded[representative(whole, micro_steps=1)])
    assert sorted(places) == [0, 1, 2, 3]
