"""An epoch of texts is made in numpy alone as transformers and TRL make it."""

from __future__ import annotations

import numpy as np
import pytest

from search_spaces.errors import InputError
from sweep.data.epoch import Shape, cut, epoch, packed
from tests.sweep.data.prepared import configured


def _lengths(rows: int, *, seed: int = 0, most: int = 4096) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).lognormal(4.5, 1.0, rows).astype(int), 2, most)


@pytest.mark.parametrize("packing", ["none", "grouped", "packed"])
def test_every_text_is_in_the_epoch_once(packing: str) -> None:
    lengths = _lengths(2503)

    whole = epoch(lengths, lengths - 1, configured(packing, seq_len=256), seed=3)

    assert sorted(whole.rows.documents) == list(range(2503))
    assert whole.tokens == np.minimum(lengths, 256).sum()
    assert whole.loss_tokens == (np.minimum(lengths, 256) - 1).sum()
    assert whole.tokens <= whole.padded_tokens
    assert whole.rows_cut == (lengths > 256).sum()


@pytest.mark.parametrize("packing", ["none", "grouped", "packed"])
def test_another_seed_is_another_order_of_the_same_texts(packing: str) -> None:
    lengths = _lengths(500)
    config = configured(packing, seq_len=256)

    first, again, other = (epoch(lengths, lengths - 1, config, seed=s) for s in (1, 1, 2))

    assert np.array_equal(first.rows.documents, again.rows.documents)
    assert not np.array_equal(first.rows.documents, other.rows.documents)
    assert first.tokens == other.tokens


def test_the_widths_are_those_of_the_longest_rows() -> None:
    lengths = np.array([3, 9, 5, 7, 2])

    whole = epoch(lengths, lengths - 1, configured(micro_batch_size=2, seq_len=8), seed=0)

    for index in range(whole.micro_batches):
        rows = [
            int(np.minimum(lengths[whole.rows.of(row)], 8).sum()) for row in whole.rows_of(index)
        ]
        assert whole.widths[index] == max(rows)
        assert whole.padded[index] == max(rows) * len(rows)
        assert whole.filled[index] == sum(rows)
        assert whole.loss[index] == sum(rows) - len(rows)


def test_the_largest_micro_batch_is_no_smaller_than_that_of_any_order() -> None:
    lengths = _lengths(64)
    for packing in ("none", "grouped", "packed"):
        config = configured(packing, seq_len=512, micro_batch_size=4)
        epochs = [epoch(lengths, lengths - 1, config, seed=seed) for seed in range(20)]
        assert len({whole.largest for whole in epochs}) == 1
        assert all(whole.largest.tokens >= whole.padded.max() for whole in epochs)


def test_the_largest_micro_batch_holds_the_longest_rows() -> None:
    lengths = np.array([5, 60, 7, 50, 8, 40])

    whole = epoch(lengths, lengths - 1, configured(micro_batch_size=2), seed=0)

    assert sorted(lengths[whole.rows.documents[whole.largest_rows]]) == [50, 60]
    assert whole.largest == Shape(rows=2, width=60)


def test_under_compile_there_are_no_more_than_four_widths() -> None:
    lengths = _lengths(2000)
    for seq_len in (256, 250, 3):
        config = configured(seq_len=seq_len, micro_batch_size=2, compile=True)
        widths = set(epoch(lengths, lengths - 1, config, seed=0).widths.tolist())
        assert len(widths) <= 4
        assert max(widths) == seq_len


def test_a_row_that_is_cut_before_its_completion_is_left_out() -> None:
    # The second's completion begins behind the cut, the third's before it.
    lengths, completions = np.array([10, 40, 40, 12]), np.array([4, 5, 30, 2])

    whole = epoch(lengths, completions, configured(seq_len=20, micro_batch_size=1), seed=0)

    assert sorted(whole.rows.documents) == [0, 2, 3]
    assert whole.rows_left_out == 1
    assert whole.loss_tokens == 4 + 10 + 2


def test_a_plain_row_carries_one_loss_less_than_it_has_tokens() -> None:
    # However its loss-carrying tokens were counted, nothing comes before the first.
    for loss in ([5, 30], [4, 29]):
        kept, carrying = cut([5, 30], loss, 16)
        assert kept.tolist() == [5, 16]
        assert carrying.tolist() == [4, 15]


@pytest.mark.parametrize(
    ("lengths", "values", "words"),
    [
        ([1, 1], {}, "no row of the texts has a token that carries loss"),
        ([9, 9], {"micro_batch_size": 3}, "micro_batch_size is 3.*no more than 2 rows"),
    ],
)
def test_texts_that_make_no_micro_batch_are_refused(
    lengths: list[int], values: dict[str, int], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        epoch(lengths, lengths, configured(**values), seed=0)


def test_packed_texts_that_make_no_micro_batch_are_refused() -> None:
    with pytest.raises(InputError, match=r"1 rows \(4 texts, packed\)"):
        epoch([9] * 4, [8] * 4, configured("packed", micro_batch_size=2), seed=0)


def test_packing_wastes_less_than_grouping_and_grouping_less_than_nothing() -> None:
    lengths = _lengths(5000)
    waste = {}
    for packing in ("none", "grouped", "packed"):
        whole = epoch(lengths, lengths - 1, configured(packing, seq_len=1024), seed=0)
        waste[packing] = 1 - whole.tokens / whole.padded_tokens
    assert waste["packed"] < waste["grouped"] < waste["none"]


def test_no_packed_row_is_longer_than_it_may_be() -> None:
    lengths = _lengths(3000)
    rows = packed(lengths, 256)
    assert sorted(np.concatenate(rows)) == list(range(3000))
    assert max(np.minimum(lengths[row], 256).sum() for row in rows) == 256
