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


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 0.8, 2500).astype(int), 2, 400)
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
@pytest.mark.parametrize("kind", ["texts", "completions"])
def test_a_round_is_what_the_epoch_says_of_it(
    kind: str, packing: str, attention: str, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(kind)
    config = configured(packing, seq_len=64, effective_batch_size=12, attention=attention)

    batches = trial_batches(TokenizedDataset(directory, eval_fraction=0.05, seed=0), config)

    # Two steps of three micro-batches hold four strata; of packed rows one step may be enough.
    assert len(batches.round) in ((3, 6) if packing == "packed" else (6,))
    assert batches.loss_tokens == sum(map(carrying, batches.round)) > 0
    assert batches.padded_tokens == sum(batch["input_ids"].numel() for batch in batches.round)
    assert batches.loss_tokens < batches.padded_tokens
    assert all("attention_mask" not in batch for batch in batches.round + batches.largest)
    largest = batches.epoch.largest
    shapes = {tuple(batch["input_ids"].shape) for batch in batches.largest}
    assert shapes == {(largest.rows, largest.width)}
    for batch in batches.round if packing == "packed" else ():
        begins = batch["position_ids"] == 0
        assert begins.sum() > len(begins)
        assert (batch["labels"][begins] == IGNORED).all(), "nothing comes before a text"


def test_what_is_held_out_is_in_no_micro_batch(texts: Path) -> None:
    rows = trial_batches(
        TokenizedDataset(texts, eval_fraction=0.5, seed=7), configured()
    ).epoch.rows
    assert len(rows) == 1250


def test_pads_are_on_the_right_and_neither_they_nor_a_prompt_carry_loss(
    texts: Path, completions: Path
) -> None:
    rows = open_tokens(texts).with_format("numpy")
    batch = Collator(configured(seq_len=64))([rows[0], rows[1], rows[2]])
    for index, tokens in enumerate(batch["input_ids"]):
        length = min(len(rows[index]["input_ids"]), 64)
        assert tokens[:length].tolist() == rows[index]["input_ids"][:64].tolist()
        assert not tokens[length:].any()
        assert batch["labels"][index, 1:length].tolist() == tokens[1:length].tolist()
        assert (batch["labels"][index, length:] == IGNORED).all()
    rows, loss = open_tokens(completions), np.load(completions / "loss_lengths.npy")
    for index in range(5):
        labels = Collator(configured(seq_len=4096))([rows[index]])["labels"][0]
        assert (labels != IGNORED).sum() == loss[index]
        assert (labels[-int(loss[index]) :] != IGNORED).all()


def test_packing_is_trls_and_grouping_transformers_own(texts: Path) -> None:
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices
    from trl import pack_dataset

    lengths = np.load(texts / "lengths.npy")
    theirs = pack_dataset(open_tokens(texts), 64, strategy="bfd")["seq_lengths"]
    ours = [np.minimum(lengths[row], 64).tolist() for row in epochs.packed(lengths, 64)]
    assert [list(row) for row in theirs] == ours
    few = np.random.default_rng(0).integers(2, 99, 1003)
    for batch in (4, 64, 1003, 5000):
        grouped = get_length_grouped_indices(
            few.tolist(), batch, generator=torch.Generator().manual_seed(5)
        )
        order = torch.randperm(1003, generator=torch.Generator().manual_seed(5)).numpy()
        assert epochs._grouped(order, few, batch).tolist() == grouped


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("kind", ["texts", "completions"])
def test_a_training_has_the_rows_of_the_epoch(
    kind: str, packing: str, request: pytest.FixtureRequest
) -> None:
    directory = request.getfixturevalue(kind)
    config = configured(packing, seq_len=64, micro_batch_size=5)
    indices = np.arange(0, len(np.load(directory / "lengths.npy")), 2)

    rows = training_rows(directory, config, indices=indices, seed=0)

    whole, collate = epoch_of(directory, config, indices=indices, seed=0), Collator(config)
    assert len(rows) == len(whole.rows)
    assert sum(carrying(collate([row])) for row in rows) == whole.loss_tokens
    if packing != "packed":
        cut = [min(len(row["input_ids"]), 64) for row in rows]
        assert [int(row["length"]) for row in rows] == cut


def study_epochs(directory: Path) -> StudyEpochs:
    known: Any = SimpleNamespace(
        summary=SimpleNamespace(are_pairs=False),
        directory=directory,
        lengths=lambda: np.load(directory / "lengths.npy"),
        loss_lengths=lambda: np.load(directory / "loss_lengths.npy"),
    )
    return StudyEpochs.of(known, DatasetChoice(texts="chats", eval_fraction=0.0), seed=0)


def test_of_a_chat_with_several_answers_a_cut_is_counted_to_the_token(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    lengths = random.integers(2, 90, 300)
    masks = [random.random(length) < random.random() for length in lengths]
    prepared(tmp_path, lengths, masks=masks)
    config, some = configured(seq_len=32, micro_batch_size=3), np.arange(0, 300, 3)

    whole = epoch_of(tmp_path, config, indices=some, seed=0)

    left = [int(mask[1:32].sum()) for mask in masks[::3]]
    of_study = study_epochs(tmp_path).of_rows(some).epoch(config)
    assert whole.loss_tokens == of_study.loss_tokens == sum(left)
    assert whole.rows_left_out == left.count(0) > 0
    rows, collate = training_rows(tmp_path, config, indices=some, seed=0), Collator(config)
    assert [carrying(collate([row])) for row in rows] == [count for count in left if count]


def test_where_answers_are_last_their_count_says_what_a_cut_leaves(
    completions: Path, texts: Path
) -> None:
    for directory in (completions, texts):
        lengths, loss = (np.load(directory / f"{n}.npy") for n in ("lengths", "loss_lengths"))
        for seq_len in (1, 16, 4096):
            counted = epochs.cut_exactly(directory, lengths, loss, seq_len)
            assert np.array_equal(counted, epochs.cut(lengths, loss, seq_len))


@pytest.mark.parametrize("packing", PACKINGS)
def test_under_compile_the_last_micro_batch_has_the_shape_of_another(
    texts: Path, packing: str
) -> None:
    config = configured(packing, seq_len=64, micro_batch_size=9, compile=True)
    rows = training_rows(texts, config, indices=np.arange(203), seed=0)
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
    whole = epoch_of(texts, config, indices=np.arange(203), seed=0)
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
