"""What lengths of texts say of sequence lengths."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from qlora_sweep.search_spaces.dataset_choice import CUT_MAX
from qlora_sweep.sweep.data.collation import Truncation, split
from qlora_sweep.sweep.data.lengths import (
    candidate_lengths,
    histogram,
    longer_lengths,
    rounded_up,
    waste_at,
    worthwhile_lengths,
)

LIMITS = st.integers(1, 5000)
LENGTHS = arrays(np.int32, st.integers(1, 200), elements=st.integers(2, 3000))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_lengths_are_rounded_up_as_kernels_like_them() -> None:
    rounded = {1: 64, 64: 64, 65: 128, 1000: 1024, 1024: 1024, 1025: 1152, 1153: 1280}
    assert {n: rounded_up(n) for n in rounded} == rounded


def test_worthwhile_lengths_leave_most_rows_whole() -> None:
    lengths = np.arange(1, 1001, dtype=np.int32)
    assert worthwhile_lengths(lengths) == (960, 1024)
    assert worthwhile_lengths(np.append(lengths, 9000).astype(np.int32)) == (960, 1024)
    assert worthwhile_lengths(lengths, max_positions=512) == (512,)
    assert worthwhile_lengths(ints(3)) == (64,)
    assert worthwhile_lengths(ints(3), max_positions=32) == (32,)


def test_a_length_that_cuts_off_much_is_not_worth_searching() -> None:
    lengths = ints(*[60] * 91, *[500] * 9)
    assert worthwhile_lengths(lengths) == (512,)
    # Where each cuts off as much, the longest is what is left.
    assert worthwhile_lengths(lengths, max_positions=100) == (100,)


def test_it_is_the_supervised_tokens_whose_cut_decides() -> None:
    # Nine in ten are short; of the others the answer is at the end.
    lengths = ints(*[60] * 90, *[70] * 10)
    answers = ints(*[10] * 90, *[8] * 10)

    def truncation_at(seq_len: int) -> Truncation:
        left = np.clip(answers - np.maximum(lengths - seq_len, 0), 0, None)
        return Truncation.of(seq_len, lengths=lengths, supervised=answers, left=left)

    assert truncation_at(64).supervised_share > CUT_MAX > (10 * 6) / lengths.sum()
    assert worthwhile_lengths(lengths) == (64, 128)
    assert worthwhile_lengths(lengths, truncation_at=truncation_at) == (128,)


def test_a_truncation_counts_examples_and_what_was_to_be_learned_of_them() -> None:
    lengths, supervised = ints(10, 40, 20, 20, 90, 10), ints(5, 5, 5, 5, 5, 5)
    left = ints(5, 2, 5, 5, 0, 5)
    alone = Truncation.of(32, lengths=lengths, supervised=supervised, left=left)
    assert (alone.examples, alone.examples_cut, alone.examples_left_out) == (6, 2, 1)
    assert (alone.tokens_cut, alone.supervised_tokens_cut) == (8 + 90, 3 + 5)
    assert alone.supervised_share == pytest.approx(8 / 30)
    pairs = Truncation.of(32, lengths=lengths, supervised=supervised, left=left, rows_per_sample=2)
    # A pair goes as a whole, with what its other row would have taught.
    assert (pairs.examples, pairs.examples_cut, pairs.examples_left_out) == (3, 2, 1)
    assert (pairs.tokens_cut, pairs.supervised_tokens_cut) == (8 + 100, 3 + 10)
    both = pairs + pairs
    assert (both.seq_len, both.examples, both.tokens) == (32, 6, 2 * pairs.tokens)
    assert both.supervised_share == pairs.supervised_share


@settings(max_examples=50, deadline=None)
@given(longest=st.integers(1, 4000), above=st.integers(1, 4000), limit=st.none() | LIMITS)
def test_longer_lengths_rise_from_one_that_is_too_short_to_one_that_cuts_nothing(
    longest: int, above: int, limit: int | None
) -> None:
    found = longer_lengths(longest, above=above, max_positions=limit)
    most = limit or rounded_up(longest)
    assert found == sorted(set(found))
    assert all(above < length <= most for length in found)
    assert all(length in (rounded_up(length), limit) for length in found)
    # As long as any row, or as the model takes.
    assert max(above, *found, 0) >= min(most, longest)


def test_candidates_are_powers_of_two_quantiles_and_the_models_limit() -> None:
    lengths = np.arange(1, 1001, dtype=np.int32)
    assert candidate_lengths(lengths) == (64, 128, 256, 512, 960, 1024)
    assert candidate_lengths(lengths, max_positions=600) == (64, 128, 256, 512, 600)
    assert candidate_lengths(lengths, max_positions=4096)[-2:] == (1024, 4096)
    assert candidate_lengths(ints(3)) == (64,)


def test_both_rows_of_a_pair_are_in_its_micro_batch_and_padded_to_the_longer() -> None:
    lengths, loss = ints(10, 40, 20, 20, 90, 10), ints(5, 5, 5, 5, 5, 5)
    waste = waste_at(64, lengths, loss, micro_batch_size=1, method="dpo")
    assert waste is not None
    # The third pair is left out: of its longer row nothing supervised is left.
    assert waste.rows_left_out == pytest.approx(1 / 3)
    assert waste.padding_waste == waste.grouped_waste == pytest.approx(1 - 90 / 120)
    assert waste.packed_waste is None
    both = waste_at(64, lengths, loss, micro_batch_size=4, method="dpo")
    assert both is not None
    assert both.padding_waste == pytest.approx(1 - 90 / 160)


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, limit=st.none() | st.integers(1, 5000))
def test_worthwhile_lengths_are_candidates_within_the_limit(
    lengths: np.ndarray, limit: int | None
) -> None:
    worthwhile = worthwhile_lengths(lengths, max_positions=limit)
    assert set(worthwhile) <= set(candidate_lengths(lengths, max_positions=limit))
    assert worthwhile
    assert list(worthwhile) == sorted(set(worthwhile))
    assert limit is None or worthwhile[-1] <= limit


def test_shares_are_of_rows_tokens_and_what_is_computed() -> None:
    lengths = ints(10, 20, 30, 40)
    waste = waste_at(30, lengths, lengths - 1, micro_batch_size=2)
    assert waste is not None
    assert waste.rows_cut == 0.25
    assert waste.tokens_cut == pytest.approx(10 / 100)
    assert waste.rows_left_out == 0.0
    # 30, 30, 20 + 10: three rows of 30, full.
    assert waste.packed_waste == pytest.approx(0.0)


def test_grouping_wastes_next_to_nothing_of_what_padding_wastes() -> None:
    lengths = np.tile(ints(10, 20, 30, 40), 500)
    waste = waste_at(40, lengths, lengths - 1, micro_batch_size=2)
    assert waste is not None
    # Of two rows drawn at random the longer has 31.25 tokens in the mean, and both 25.
    assert waste.padding_waste == pytest.approx(1 - 25 / 31.25, abs=0.01)
    assert waste.grouped_waste < 0.02
    assert waste_at(40, lengths, lengths - 1, micro_batch_size=8).padding_waste > 0.3  # type: ignore[union-attr]


def test_rows_whose_answer_is_cut_off_are_left_out() -> None:
    lengths, loss = ints(100, 10, 10, 10), ints(5, 5, 5, 5)
    waste = waste_at(50, lengths, loss, micro_batch_size=4)
    assert waste is not None
    assert waste.rows_left_out == 0.25
    assert waste.padding_waste == 0.0
    assert waste_at(4, lengths, loss, micro_batch_size=4) is None
    # Of a chat an answer before the cut may be left.
    exact = lambda _: (np.minimum(lengths, 50).astype(np.int64), np.array([2, 5, 5, 5]))  # noqa: E731
    waste = waste_at(50, lengths, loss, micro_batch_size=4, cut_at=exact)
    assert waste is not None
    assert (waste.rows_left_out, waste.padding_waste) == (0.0, pytest.approx(1 - 80 / 200))
    # Fewer rows than a micro-batch are one.
    waste = waste_at(64, ints(10), ints(9), micro_batch_size=4)
    assert waste is not None
    assert (waste.padding_waste, waste.packed_waste) == (0.0, 1 - 10 / 64)


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(2, 3000), size=st.integers(1, 8))
def test_wastes_are_shares_and_rise_with_the_length(
    lengths: np.ndarray, seq_len: int, size: int
) -> None:
    waste = waste_at(seq_len, lengths, lengths - 1, micro_batch_size=size)
    longer = waste_at(2 * seq_len, lengths, lengths - 1, micro_batch_size=size)
    assert waste is not None
    assert longer is not None
    for share in (waste.rows_cut, waste.tokens_cut, waste.padding_waste, waste.packed_waste):
        assert 0.0 <= share < 1.0 or (share == 1.0 and waste.rows_cut == 1.0)
    assert longer.rows_cut <= waste.rows_cut
    assert longer.tokens_cut <= waste.tokens_cut
    if size == 1:
        assert waste.padding_waste == pytest.approx(0.0)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS)
def test_a_histogram_holds_every_row_once(lengths: np.ndarray) -> None:
    bins = histogram(lengths)
    assert sum(bin.rows for bin in bins) == len(lengths)
    for bin in bins:
        inside = (lengths >= bin.at_least) & (lengths <= bin.at_most)
        assert int(inside.sum()) == bin.rows
    assert len(bins) <= 17
    assert all(one.at_most + 1 == two.at_least for one, two in pairwise(bins))


def test_a_split_is_the_same_every_time_and_holds_every_row_once() -> None:
    train, held = split(100, 0.05, 3)
    assert [part.tolist() for part in split(100, 0.05, 3)] == [train.tolist(), held.tolist()]
    assert (len(train), len(held)) == (95, 5)
    assert sorted([*train, *held]) == list(range(100))
    assert split(100, 0.05, 4)[1].tolist() != held.tolist()
    assert held.tolist() == [1, 22, 34, 45, 84]


@pytest.mark.parametrize(
    ("rows", "share", "held"), [(1, 0.5, 0), (2, 0.01, 1), (2, 0.99, 1), (10, 0.0, 0), (0, 0.1, 0)]
)
def test_small_splits_leave_something_to_train_on(rows: int, share: float, held: int) -> None:
    train, kept = split(rows, share, 0)
    assert (len(train), len(kept)) == (rows - held, held)
