"""What an epoch of prepared texts is to each configuration of a study, worked out once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.dataset_choice import CUT_MAX, DatasetChoice
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.records import EpochRecord
from qlora_sweep.sweep.data.collation import Truncation, percent, split
from qlora_sweep.sweep.data.epoch import Epoch, cut, cut_exactly, epoch, packed, too_few
from qlora_sweep.sweep.data.prepared_dataset import PreparedDataset

Lengths = NDArray[np.int64]
CutAt = Callable[[int], tuple[Lengths, Lengths]]


def batch_key(config: TrialConfig) -> Hashable:
    """Return the settings that decide how examples become micro-batches."""
    return (
        config.seq_len,
        config.packing,
        config.micro_batch_size,
        config.samples_per_step,
        config.compile,
        config.attention == "flash_attention_2",
    )


@dataclass(frozen=True)
class TruncatedDataset:
    """What a sequence length cuts off a dataset's examples: those that are trained on, and those
    that are held out."""

    trained: Truncation
    held_out: Truncation

    @property
    def whole(self) -> Truncation:
        """Of all examples."""
        return self.trained + self.held_out

    @property
    def is_much(self) -> bool:
        """Whether so much is cut that a training has to be confirmed."""
        return self.whole.supervised_share > CUT_MAX

    def words(self, noun: str = "example") -> str:
        """Return it as sentences, with what each share is of."""
        said = self.whole.words(noun)
        if not self.whole.examples_cut or not self.held_out.examples:
            return said
        return (
            f"{said}. Of the {self.trained.examples:,} that are trained on it cuts "
            f"{_shares(self.trained)}, of the {self.held_out.examples:,} held out "
            f"{_shares(self.held_out)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return what `training.json` says of it; shares are of that set of examples."""
        document: dict[str, Any] = {"seq_len": self.whole.seq_len}
        parts = {"dataset": self.whole, "trained": self.trained, "held_out": self.held_out}
        for name, part in parts.items():
            counts = asdict(part)
            del counts["seq_len"]
            shares = {
                "examples_cut_share": part.examples_share,
                "supervised_tokens_cut_share": part.supervised_share,
            }
            document[name] = counts | shares
        return document


def _shares(cut_off: Truncation) -> str:
    return f"{percent(cut_off.examples_share)} and {percent(cut_off.supervised_share)}"


class StudyEpochs:
    """Epochs of the rows that are trained on; those held out are none of them.

    Args:
        lengths: tokens of each row.
        loss_lengths: those that carry loss.
        seed: of the order.
        cut_at: says what a sequence length leaves of each row, and how much of that carries loss;
            None where the tokens that carry loss are a row's last.
        held_out: the rows that are held out.
        rows_per_sample: two where they are pairs.
    """

    def __init__(
        self,
        lengths: Lengths,
        loss_lengths: Lengths,
        *,
        seed: int,
        cut_at: CutAt | None = None,
        held_out: StudyEpochs | None = None,
        rows_per_sample: int = 1,
    ) -> None:
        self.rows_per_sample = rows_per_sample
        self.lengths = lengths
        self.loss_lengths = loss_lengths
        self._seed = seed
        self._tokens = int(lengths.sum())
        self._epochs: dict[Hashable, Epoch] = {}
        self._rows: dict[Hashable, int] = {}
        self._cut_at: CutAt = cache(cut_at or partial(cut, lengths, loss_lengths))
        self._held_out = held_out

    @classmethod
    def of(cls, dataset: PreparedDataset, choice: DatasetChoice, *, seed: int) -> StudyEpochs:
        """Return the epochs of a choice of texts."""
        whole = cls.of_all(dataset, seed=seed)
        train, held = split(len(whole.lengths), choice.eval_fraction, seed, whole.rows_per_sample)
        return whole.of_rows(train, held_out=whole.of_rows(held))

    @classmethod
    def of_all(cls, dataset: PreparedDataset, *, seed: int = 0) -> StudyEpochs:
        """Return the epochs of all rows, where none is held out."""
        lengths = np.asarray(dataset.lengths(), dtype=np.int64)
        loss = np.asarray(dataset.loss_lengths(), dtype=np.int64)
        exact = partial(cut_exactly, dataset.directory, lengths, loss)
        rows_per_sample = 1
        if dataset.summary.are_pairs:
            rows_per_sample = 2
        return cls(lengths, loss, seed=seed, cut_at=exact, rows_per_sample=rows_per_sample)

    def of_rows(self, rows: Lengths, *, held_out: StudyEpochs | None = None) -> StudyEpochs:
        """Return the epochs of some of the rows, by their place."""

        def cut_at(seq_len: int) -> tuple[Lengths, Lengths]:
            kept, loss = self._cut_at(seq_len)
            return kept[rows], loss[rows]

        return StudyEpochs(
            self.lengths[rows],
            self.loss_lengths[rows],
            seed=self._seed,
            cut_at=cut_at,
            held_out=held_out,
            rows_per_sample=self.rows_per_sample,
        )

    def truncation(self, seq_len: int) -> Truncation:
        """Return what a length cuts off these rows."""
        _, left = self._cut_at(seq_len)
        return Truncation.of(
            seq_len,
            lengths=self.lengths,
            supervised=self.loss_lengths,
            left=left,
            rows_per_sample=self.rows_per_sample,
        )

    def truncated_dataset(self, seq_len: int) -> TruncatedDataset:
        """Return the same with what it cuts off the rows that are held out."""
        held_out = self._held_out or self.of_rows(np.array([], dtype=np.int64))
        return TruncatedDataset(self.truncation(seq_len), held_out.truncation(seq_len))

    @property
    def longest(self) -> int:
        """Tokens of the longest row, held out or not."""
        longest = int(self.lengths.max(initial=0))
        if self._held_out is None:
            return longest
        return max(longest, self._held_out.longest)

    def held_out_loss_tokens(self, seq_len: int) -> int:
        """Return the tokens that carry loss of the rows that are held out, each cut to a length."""
        if self._held_out is None:
            return 0
        _, loss = self._held_out._cut_at(seq_len)
        return int(loss.sum())

    @cached_property
    def digest(self) -> str:
        """Tell these rows, in their order, from any others."""
        hashed = hashlib.sha256(np.ascontiguousarray(self.lengths).tobytes())
        hashed.update(np.ascontiguousarray(self.loss_lengths).tobytes())
        return f"{hashed.hexdigest()[:32]}-{self._seed}"

    def refusal(self, config: TrialConfig) -> str | None:
        """Return why a configuration cannot train on these texts; None where it can.

        Quick: it is asked of a whole space.
        """
        return too_few(self._rows_of(config), config)

    def epoch(self, config: TrialConfig) -> Epoch:
        """Return one epoch of a configuration.

        Raises:
            InputError: it has no row that carries loss, or fewer than a micro-batch takes.
        """
        key = batch_key(config)
        if key not in self._epochs:
            self._epochs[key] = self.fresh(config)
        return self._epochs[key]

    def fresh(self, config: TrialConfig) -> Epoch:
        """Return the same without keeping it. Raises what `epoch` raises."""
        _, loss = self._cut_at(config.seq_len)
        return epoch(self.lengths, loss, config, seed=self._seed)

    def record(self, config: TrialConfig) -> EpochRecord | None:
        """Return what a trial's record keeps of its epoch; None where there is none."""
        try:
            whole = self.epoch(config)
        except InputError:
            return None
        trained = int(self.lengths[whole.rows.documents].sum())
        lost = self.truncation(config.seq_len)
        return EpochRecord(
            rows=len(self.lengths) // self.rows_per_sample - whole.rows_left_out,
            rows_cut=whole.rows_cut,
            rows_left_out=whole.rows_left_out,
            tokens=whole.tokens,
            tokens_cut=(trained - whole.tokens) / self._tokens,
            tokens_left_out=1.0 - trained / self._tokens,
            supervised_tokens_cut=lost.supervised_share,
            padded_tokens=whole.padded_tokens,
            loss_tokens=whole.loss_tokens,
            steps=whole.optimizer_steps,
        )

    def _rows_of(self, config: TrialConfig) -> int:
        is_packed = config.packing == "packed"
        key = (config.seq_len, is_packed)
        if key not in self._rows:
            kept, loss = self._cut_at(config.seq_len)
            each = self.rows_per_sample
            chosen = kept[::each][(loss.reshape(-1, each) > 0).all(1)]
            self._rows[key] = len(chosen)
            if is_packed:
                self._rows[key] = len(packed(chosen, config.seq_len))
        return self._rows[key]


def refuse_too_few(space: SearchSpace, epochs: StudyEpochs) -> None:
    """Refuse texts of which no configuration of a space can make a micro-batch.

    Raises:
        InputError: says what the smallest would take.
    """
    smallest = TrialConfig(
        micro_batch_size=min(space.values_of("micro_batch_size"), default=1),
        method=space.values_of("method")[0],
    )
    refusal = None
    for seq_len in space.values_of("seq_len"):
        for packing in space.values_of("packing"):
            refusal = epochs.refusal(smallest.changed(seq_len=seq_len, packing=packing))
            if refusal is None:
                return
    if refusal is not None:
        raise InputError(f"space '{space.name}': {refusal}")
