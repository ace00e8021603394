"""What lengths of texts say of sequence lengths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from qlora_sweep.search_spaces.dataset_choice import CUT_MAX
from qlora_sweep.sweep.data.collation import Truncation, split
from qlora_sweep.sweep.data.lengths import (
    Waste,
    candidate_lengths,
    histogram,
    longer_lengths,
    rounded_up,
    waste_at,
    worthwhile_lengths,
)
from tests.tables import cases

LIMITS = st.integers(1, 5000)
LENGTHS = arrays(np.int32, st.integers(1, 200), elements=st.integers(2, 3000))


def waste(seq_len: int, lengths: Any, loss: Any, size: int, **options: Any) -> Waste:
    found = waste_at(seq_len, lengths, loss, micro_batch_size=size, **options)
    assert found is not None
    return found


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


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
    lengths = ints(10, 40, 20, 20, 90, 10)
    left = ints(5, 2, 5, 5, 0, 5)
    alone = Truncation.of(32, lengths=lengths, supervised=np.full(6, 5), left=left)
    assert (alone.examples, alone.examples_cut, alone.examples_left_out) == (6, 2, 1)
    assert (alone.tokens_cut, alone.supervised_tokens_cut) == (8 + 90, 3 + 5)
    assert alone.supervised_share == pytest.approx(8 / 30)
    both = alone + alone
    assert (both.seq_len, both.examples, both.tokens) == (32, 12, 2 * alone.tokens)
    assert both.supervised_share == alone.supervised_share


def test_a_pair_is_cut_as_a_whole_with_what_its_other_row_would_have_taught() -> None:
    pairs = Truncation.of(
        32,
        lengths=ints(10, 40, 20, 20, 90, 10),
        supervised=np.full(6, 5),
        left=ints(5, 2, 5, 5, 0, 5),
        rows_per_sample=2,
    )
    assert (pairs.examples, pairs.examples_cut, pairs.examples_left_out) == (3, 2, 1)
    assert (pairs.tokens_cut, pairs.supervised_tokens_cut) == (8 + 100, 3 + 10)


@settings(max_examples=25)
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
    lengths = ints(10, 40, 20, 20, 90, 10)
    found = waste(64, lengths, np.full(6, 5), 1, method="dpo")
    # The third pair is left out: of its longer row nothing supervised is left.
    assert found.rows_left_out == pytest.approx(1 / 3)
    assert found.padding_waste == found.grouped_waste == pytest.approx(1 - 90 / 120)
    assert found.packed_waste is None
    both = waste(64, lengths, np.full(6, 5), 4, method="dpo")
    assert both.padding_waste == pytest.approx(1 - 90 / 160)


def test_shares_are_of_rows_tokens_and_what_is_computed() -> None:
    lengths = ints(10, 20, 30, 40)
    found = waste(30, lengths, lengths - 1, 2)
    assert (found.rows_cut, found.rows_left_out) == (0.25, 0.0)
    assert found.tokens_cut == pytest.approx(10 / 100)
    # 30, 30, 20 + 10: three rows of 30, full.
    assert found.packed_waste == pytest.approx(0.0)


def test_rows_whose_answer_is_cut_off_are_left_out() -> None:
    lengths = ints(100, 10, 10, 10)
    found = waste(50, lengths, np.full(4, 5), 4)
    assert (found.rows_left_out, found.padding_waste) == (0.25, 0.0)
    assert waste_at(4, lengths, np.full(4, 5), micro_batch_size=4) is None


def test_of_a_chat_an_answer_before_the_cut_is_left() -> None:
    def cut_at(_: int) -> Any:
        return ints(50, 10, 10, 10), ints(2, 5, 5, 5)

    found = waste(50, ints(100, 10, 10, 10), np.full(4, 5), 4, cut_at=cut_at)
    assert (found.rows_left_out, found.padding_waste) == (0.0, pytest.approx(1 - 80 / 200))


@settings(max_examples=25)
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
    assert held.tolist() == [1, 22, 34, 45, 84]
    assert sorted([*train, *held]) == list(range(100))
    assert split(100, 0.05, 4)[1].tolist() != held.tolist()


@pytest.mark.parametrize(
    ("rows", "share", "held"),
    cases(
        """
        1 | 0.5 | 0
        2 | 0.01 | 1
        2 | 0.99 | 1
        10 | 0.0 | 0
        0 | 0.1 | 0
        """
    ),
)
def test_small_splits_leave_something_to_train_on(rows: int, share: float, held: int) -> None:
    train, kept = split(rows, share, 0)
    assert (len(train), len(kept)) == (rows - held, held)
