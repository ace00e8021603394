"""Micro-batches of prepared texts are what an epoch says, in a trial as in a training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.dataset_choice import DatasetChoice
from qlora_sweep.sweep.data import epoch as epochs
from qlora_sweep.sweep.data.batches import (
    TokenizedDataset,
    epoch_of,
    open_tokens,
    training_rows,
    trial_batches,
)
from qlora_sweep.sweep.data.collation import IGNORED, Collator
from qlora_sweep.sweep.data.study_epochs import StudyEpochs
from tests.sweep.data.prepared import configured, prepared

PACKINGS = ("none", "grouped", "packed")


@pytest.fixture(scope="module", params=["dataset", "completions"])
def either(request: pytest.FixtureRequest) -> Path:
    """Rows that are supervised as a whole, and rows that end with an answer."""
    return Path(request.getfixturevalue(request.param))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 0.8, 400).astype(int), 2, 400)
    return prepared(tmp_path_factory.mktemp("plain"), lengths)


@pytest.fixture(scope="module")
def completions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(1)
    lengths = np.clip(random.lognormal(3, 0.8, 400).astype(int), 3, 400)
    answers = random.integers(1, lengths - 1)
    return prepared(tmp_path_factory.mktemp("completions"), lengths, completions=answers)


def carrying(batch: dict[str, Any]) -> int:
    """Return the labels that a causal model predicts: those behind the shift."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_round_is_what_the_epoch_says_of_it(either: Path, packing: str, attention: str) -> None:
    config = configured(packing, seq_len=64, effective_batch_size=12, attention=attention)

    batches = trial_batches(TokenizedDataset(either, eval_fraction=0.05, seed=0), config)

    # Two steps of three micro-batches hold four strata; of packed rows one step may be enough.
    assert len(batches.round) == 6 or (packing == "packed" and len(batches.round) == 3)
    assert batches.loss_tokens == sum(map(carrying, batches.round)) > 0
    assert batches.padded_tokens == sum(batch["input_ids"].numel() for batch in batches.round)
    assert batches.loss_tokens < batches.padded_tokens
    assert all("attention_mask" not in batch for batch in batches.round + batches.largest)
    largest = batches.epoch.largest
    shapes = {tuple(batch["input_ids"].shape) for batch in batches.largest}
    assert shapes == {(largest.rows, largest.width)}
    if packing == "packed":
        for batch in batches.round:
            begins = batch["position_ids"] == 0
            assert begins.sum() > len(begins)
            assert (batch["labels"][begins] == IGNORED).all(), "nothing comes before a text"


def test_packing_is_trls(dataset: Path) -> None:
    from trl import pack_dataset

    lengths = np.load(dataset / "lengths.npy")
    theirs = pack_dataset(open_tokens(dataset), 64, strategy="bfd")["seq_lengths"]
    ours = [np.minimum(lengths[row], 64).tolist() for row in epochs.packed(lengths, 64)]
    assert [list(row) for row in theirs] == ours


@pytest.mark.parametrize("batch", [4, 64, 1003, 5000])
def test_grouping_is_transformers(batch: int) -> None:
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    lengths = np.random.default_rng(0).integers(2, 99, 1003)
    generator = torch.Generator().manual_seed(5)
    theirs = get_length_grouped_indices(lengths.tolist(), batch, generator=generator)
    order = torch.randperm(1003, generator=torch.Generator().manual_seed(5)).numpy()
    assert epochs._grouped(order, lengths, batch).tolist() == theirs


def study_epochs(directory: Path) -> StudyEpochs:
    known: Any = SimpleNamespace(
        summary=SimpleNamespace(are_pairs=False),
        directory=directory,
        lengths=lambda: np.load(directory / "lengths.npy"),
        loss_lengths=lambda: np.load(directory / "loss_lengths.npy"),
    )
    return StudyEpochs.of(known, DatasetChoice(texts="chats", eval_fraction=0.0), seed=0)


@pytest.mark.parametrize("seq_len", [1, 16, 4096])
def test_where_answers_are_last_their_count_says_what_a_cut_leaves(
    either: Path, seq_len: int
) -> None:
    lengths = np.load(either / "lengths.npy")
    loss = np.load(either / "loss_lengths.npy")
    counted = epochs.cut_exactly(either, lengths, loss, seq_len)
    assert np.array_equal(counted, epochs.cut(lengths, loss, seq_len))


@pytest.mark.parametrize("packing", PACKINGS)
def test_under_compile_the_last_micro_batch_has_the_shape_of_another(
    dataset: Path, packing: str
) -> None:
    config = configured(packing, seq_len=64, micro_batch_size=9, compile=True)
    rows = training_rows(dataset, config, indices=np.arange(203), seed=0)
    count = len(rows) % 9
    few = [rows[index] for index in range(len(rows) - count, len(rows))]
    last = Collator(config, pad_token_id=3)(few)
    assert count
    assert last["input_ids"].shape[0] == 9
    assert last["input_ids"].shape[1] in {16, 32, 48, 64}
    assert (last["input_ids"][count:] == 3).all()
    assert (last["labels"][count:] == IGNORED).all()
    plain = Collator(config.model_copy(update={"compile": False}), pad_token_id=3)(few)
    assert plain["input_ids"].shape[0] == count
    assert carrying(last) == carrying(plain)
    whole = epoch_of(dataset, config, indices=np.arange(203), seed=0)
    assert whole.padded[-1] == 9 * whole.widths[-1]


def test_an_epoch_says_what_is_cut_off_and_what_is_left_out(tmp_path: Path) -> None:
    """Of a chat with two answers a cut that leaves the first one leaves something to learn."""
    late, early, short = [0] * 8 + [1] * 2, [0, 1, 1] + [0] * 5 + [1] * 2, [0, 1, 1]
    masks = [late] * 4 + [early] * 3 + [short] * 3
    epochs = study_epochs(prepared(tmp_path, [len(mask) for mask in masks], masks=masks))
    config = configured(seq_len=4, micro_batch_size=3)
    record = epochs.record(config)
    assert record is not None
    assert (record.rows, record.rows_cut, record.rows_left_out) == (6, 3, 4)
    assert (record.tokens, record.loss_tokens) == (3 * 4 + 3 * 3, 6 * 2)
    assert record.tokens_cut == pytest.approx(3 * 6 / 79)
    assert record.tokens_left_out == pytest.approx(4 * 10 / 79)
    assert epochs.refusal(config) is None
    assert "make 6 rows" in str(epochs.refusal(configured(seq_len=4, micro_batch_size=7)))
    assert epochs.refusal(configured(seq_len=4, micro_batch_size=6)) is None
