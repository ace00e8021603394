"""The rows of a training: tokens that are held out, packed, cut and collated.

A `Collator` makes micro-batches of rows. numpy is imported at once; TRL where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

INPUT = "input_ids"
"""The column of tokens."""
MASK = "completion_mask"
"""The column with 1 for each token that carries loss."""
LENGTH = "length"
"""The column with the tokens of a row that is not packed."""
SEQ_LENGTHS = "seq_lengths"
"""The column with the tokens of each example of a packed row."""
IGNORED = -100
"""The label of a token that carries no loss."""


def split(
    rows: int, eval_fraction: float, seed: int, rows_per_sample: int = 1
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows that are trained on and those that are held out, each in rising order; pairs
    stay together.

    The same rows, share and seed give the same split on every machine. Of two rows and more at
    least one is trained on, and at least one is held out unless ``eval_fraction`` is 0.
    """
    if rows_per_sample > 1:
        trained, held_out = split(rows // rows_per_sample, eval_fraction, seed)
        return rows_of_samples(trained, rows_per_sample), rows_of_samples(held_out, rows_per_sample)
    held = round(rows * eval_fraction)
    if eval_fraction > 0.0 and rows > 1:
        held = min(max(held, 1), rows - 1)
    held = min(held, max(rows - 1, 0))
    # PCG64's stream is fixed by NumPy's policy; `permutation` has not changed with it so far.
    order = np.random.Generator(np.random.PCG64(seed)).permutation(rows)
    return np.sort(order[held:]), np.sort(order[:held])


def rows_of_samples(samples: NDArray[Any], rows_per_sample: int) -> NDArray[Any]:
    """Return the rows of samples: of a pair the chosen one, then the rejected one."""
    return (samples[:, None] * rows_per_sample + np.arange(rows_per_sample)).ravel()


def training_rows(data: Any, lengths: ArrayLike, kept: Any, settings: Any) -> Any:
    """Return rows of a dataset of tokens as `Collator` takes them: packed, or each with its
    ``length`` as it is cut, by which transformers' sampler groups.

    Args:
        data: with the columns `INPUT` and `MASK`.
        lengths: tokens of each of its rows.
        kept: numbers of the rows to train on, each with a token that carries loss once it is cut.
        settings: a configuration: seq_len, micro_batch_size, packing, attention, compile.
    """
    if settings.packing == "packed":
        from trl import pack_dataset

        return pack_dataset(
            data.select(kept), settings.seq_len, strategy="bfd", map_kwargs={"batch_size": 1000}
        ).with_format("numpy")
    cut = np.minimum(lengths, settings.seq_len)
    return data.add_column(LENGTH, cut).select(kept).with_format("numpy")


@dataclass(frozen=True)
class Truncation:
    """What a sequence length cuts off examples. A pair is one example, and both its rows count."""

    seq_len: int
    examples: int
    examples_cut: int
    """Those that are longer."""
    examples_left_out: int
    """Of these, the ones that nothing trains on: no supervised token of them is left, or a pair's
    rows do not differ any more."""
    tokens: int
    tokens_cut: int
    """Beyond the length, or of examples that are left out."""
    supervised_tokens: int
    supervised_tokens_cut: int

    @classmethod
    def of(
        cls,
        seq_len: int,
        *,
        lengths: ArrayLike,
        supervised: ArrayLike,
        left: ArrayLike,
        rows_per_sample: int = 1,
    ) -> Truncation:
        """Return what is cut off rows.

        Args:
            seq_len: to which they are cut.
            lengths: tokens of each row.
            supervised: those of them that are supervised.
            left: supervised tokens of each row once it is cut, 0 where nothing trains on it.
            rows_per_sample: 2 where each two rows are a pair.
        """
        shape = (-1, rows_per_sample)
        whole = np.asarray(lengths, dtype=np.int64).reshape(shape)
        carrying = np.asarray(supervised, dtype=np.int64).reshape(shape)
        carrying_left = np.asarray(left, dtype=np.int64).reshape(shape)
        is_used = (carrying_left > 0).all(1)
        is_longer = (whole > seq_len).any(1)
        used_tokens = np.minimum(whole, seq_len)[is_used].sum()
        return cls(
            seq_len=seq_len,
            examples=len(whole),
            examples_cut=int(np.count_nonzero(is_longer | ~is_used)),
            examples_left_out=int(np.count_nonzero(~is_used)),
            tokens=int(whole.sum()),
            tokens_cut=int(whole.sum() - used_tokens),
            supervised_tokens=int(carrying.sum()),
            supervised_tokens_cut=int(carrying.sum() - carrying_left[is_used].sum()),
        )

    def __add__(self, other: Truncation) -> Truncation:
        """Return what the length cuts off both sets of examples."""
        counts = vars(other)
        both = {name: count + counts[name] for name, count in vars(self).items()}
        return Truncation(**{**both, "seq_len": self.seq_len})

    @property
    def examples_share(self) -> float:
        """Share of the examples that are cut, 0 to 1."""
        return self.examples_cut / max(1, self.examples)

    @property
    def supervised_share(self) -> float:
        """Share of their supervised tokens that are cut, 0 to 1."""
        return self.supervised_tokens_cut / max(1, self.supervised_tokens)

    def words(self, noun: str = "example") -> str:
        """Return it as a sentence."""
        length = f"Length {self.seq_len:,}"
        of = f"of the {self.examples:,} {noun}s"
        if not self.examples_cut:
            return f"{length} cuts none {of}"
        examples = f"{self.examples_cut:,} {of} ({percent(self.examples_share)})"
        tokens = f"{percent(self.supervised_share)} of their supervised tokens"
        said = f"{length} cuts {examples} and {tokens}"
        if self.examples_left_out:
            said += f"; {self.examples_left_out:,} {noun}s keep no supervised token"
        return said


def percent(share: float) -> str:
    """Return a share of 0 to 1 in percent, with three digits: ``51.4 %``, ``0.0123 %``."""
    return f"{100 * share:.3g} %"


def by_member(samples: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the rows of samples as a micro-batch has them: of pairs all that were chosen first."""
    return list(chain.from_iterable(zip(*samples, strict=True)))


def is_flattened(settings: Any) -> bool:
    """Whether packed rows go through as one long row: how flash attention is told of examples, and
    what TRL does whatever the attention."""
    is_joined = getattr(settings, "trainer", "sweep") == "trl"
    is_joined = is_joined or settings.attention == "flash_attention_2"
    return settings.packing == "packed" and is_joined


def padded_widths(longest: ArrayLike, settings: Any) -> NDArray[np.int64]:
    """Return the tokens to which the rows of micro-batches are padded.

    Under ``compile`` to a multiple of a quarter of all: four static shapes at most.

    Args:
        longest: tokens of each one's longest row, cut; flattened, the tokens of all its rows.
        settings: of the training.
    """
    lengths = np.asarray(longest, dtype=np.int64)
    most = settings.seq_len
    if is_flattened(settings):
        most *= settings.micro_batch_size
    elif settings.packing == "packed":
        return np.full_like(lengths, most)
    if not settings.compile:
        return lengths
    quarter = -(-most // 4)
    return np.minimum(most, -(-lengths // quarter) * quarter)


@dataclass(frozen=True)
class Collator:
    """Makes a micro-batch of rows that have `INPUT` and perhaps `MASK`, packed ones `SEQ_LENGTHS`
    too.

    Rows are cut and padded on the right, and no attention mask is passed, but for trainers that
    pass one: no token of a causal model sees the pads behind it, pads carry no loss, and flash and
    sdpa keep their fast kernels.
    Packed rows have ``position_ids`` that start again with each example, by which transformers
    keeps them apart. Padding, positions and the boundaries for flash attention are TRL's
    collator's. Under ``compile`` a micro-batch of texts has all its rows, of pads where there are
    too few.

    Returns int64 ``input_ids`` and ``labels`` of shape (rows, width).
    """

    settings: Any
    """A configuration: seq_len, micro_batch_size, packing, attention, compile, is_on_pairs,
    trainer, masks_padding."""
    pad_token_id: int = 0
    """Any token of the model."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the micro-batch."""
        from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

        settings = self.settings
        is_flat = is_flattened(settings)
        examples = [self._example(row) for row in rows]
        if settings.compile and not is_flat and not getattr(settings, "is_on_pairs", False):
            # The last micro-batch of an epoch would be compiled for its own number of rows.
            pads: dict[str, Any] = {INPUT: [self.pad_token_id], "labels": [IGNORED]}
            if SEQ_LENGTHS in examples[0]:
                pads[SEQ_LENGTHS] = [1]
            examples += [pads] * (settings.micro_batch_size - len(examples))
        lengths = [len(example[INPUT]) for example in examples]
        longest = max(lengths)
        if is_flat:
            longest = sum(lengths)
        collate = DataCollatorForLanguageModeling(
            pad_token_id=self.pad_token_id,
            padding_free=is_flat,
            return_position_ids=settings.packing == "packed",
            pad_to_multiple_of=int(padded_widths(longest, settings)),
        )
        batch: dict[str, Any] = collate(examples)
        if settings.packing == "packed" or not getattr(settings, "masks_padding", False):
            batch.pop("attention_mask", None)
        if "position_ids" in batch:
            # The first token of an example is not predicted from the example before it.
            batch["labels"][batch["position_ids"] == 0] = IGNORED
        return batch

    def _example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row as TRL's collator takes it."""
        tokens = np.asarray(row[INPUT][: self.settings.seq_len], dtype=np.int64)
        labels = tokens.copy()
        if MASK in row:
            labels[np.asarray(row[MASK][: self.settings.seq_len]) == 0] = IGNORED
        labels[0] = IGNORED
        example: dict[str, Any] = {INPUT: tokens, "labels": labels}
        if SEQ_LENGTHS in row:
            example[SEQ_LENGTHS] = list(map(int, row[SEQ_LENGTHS]))
        return example
