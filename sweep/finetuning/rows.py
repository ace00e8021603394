"""What a training trains on and holds out, and in which order: prepared texts, or full sequences of
random tokens where only speed and memory are wanted.

How an example becomes a row is `sweep.data.batches`' rule, for trials and trainings alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch.utils.data import Dataset, Subset
from transformers.trainer_pt_utils import get_length_grouped_indices

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.sweep.data.collation import INPUT, MASK, split
from qlora_sweep.sweep.finetuning.protocol import TrainingJob
from qlora_sweep.sweep.training.images import stacked
from qlora_sweep.sweep.training.preference import Collate, Paired, of_pairs
from qlora_sweep.sweep.training.step import full_rows_in_turn, random_rows


@dataclass(eq=False)
class Ordered(Dataset[Any]):
    """Rows in an order for each epoch: of its seed and number alone, so that a resumed training has
    it again.

    The longest row is in the first micro-batch, as Trainer's own order by length has it, and the
    next in the second optimizer step's first, which has the optimizer's state beside it: what does
    not fit shows at once and not after hours.

    Attributes:
        rows: anything with a length whose items the collator takes.
        batch_size: of them in an optimizer step.
        seed: of all epochs' orders.
        widths: tokens of each row; None where all are alike.
        is_grouped: whether micro-batches hold rows of like length.
        multiple: of rows, up to which an epoch is filled with one that carries no loss: all ranks
            have as many micro-batches, and their loss is that of the epoch's rows.
    """

    rows: Any
    batch_size: int
    seed: int
    widths: Sequence[int] | None = None
    is_grouped: bool = False
    multiple: int = 1

    def __post_init__(self) -> None:
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; accelerate calls it."""
        generator = torch.Generator().manual_seed((self.seed << 16) + epoch)
        count = len(self.rows)
        order = torch.randperm(count, generator=generator).numpy()
        if self.widths is not None and self.is_grouped:
            generator.manual_seed((self.seed << 16) + epoch)
            grouped = get_length_grouped_indices(
                list(self.widths), self.batch_size, generator=generator
            )
            order = np.asarray(grouped)
        if self.widths is not None:
            for first in {0, min(self.batch_size, count - 1)}:
                widest = first + int(np.argmax(np.asarray(self.widths)[order[first:]]))
                order[[first, widest]] = order[[widest, first]]
        self._order = order

    def __len__(self) -> int:
        return -(-len(self.rows) // self.multiple) * self.multiple

    def __getitem__(self, index: int) -> Any:
        if index < len(self.rows):
            return self.rows[int(self._order[index])]
        shortest = self.rows[0]
        if self.widths is not None:
            shortest = self.rows[int(np.argmin(self.widths))]
        return {**shortest, MASK: [0] * len(shortest[MASK])}


@dataclass(frozen=True)
class TrainingRows:
    """What a training trains on and what it holds out."""

    training: Ordered
    collate: Collate
    held_out: Any | None = None
    collate_held_out: Collate | None = None
    examples: int | None = None
    """Examples or pairs that are trained on, however they are packed; None for random tokens."""
    left_out: int = 0


def rows_of(job: TrainingJob, model: PeftModel) -> TrainingRows:
    """Return what a job trains a model on, and holds out.

    Raises:
        InputError: the texts make no micro-batch of the configuration's.
    """
    config = job.config
    if job.dataset is None:
        count = (job.max_steps or 1) * config.samples_per_step * config.rows_per_sample
        random = random_rows(config, model, seed=job.seed)
        if config.is_on_pairs:
            pairs = Paired([{INPUT: random[index % len(random)]} for index in range(count)])
            stacked_pairs = of_pairs(lambda rows: stacked([row[INPUT] for row in rows]))
            return TrainingRows(Ordered(pairs, config.samples_per_step, job.seed), stacked_pairs)
        repeated: Any = Subset(random, [index % len(random) for index in range(count)])  # type: ignore[arg-type]
        ordered = Ordered(repeated, config.samples_per_step, job.seed)
        return TrainingRows(ordered, full_rows_in_turn(config, model.config))
    # Only texts need `datasets`, which takes a second to import.
    from qlora_sweep.sweep.data.batches import loss_left, training_rows
    from qlora_sweep.sweep.data.collation import LENGTH, Collator

    directory = Path(job.dataset)
    _, loss = loss_left(directory, config.seq_len)
    rows_per_sample = config.rows_per_sample
    trained, held = split(len(loss), job.eval_fraction, job.seed, rows_per_sample)
    training: Any = training_rows(directory, config, indices=trained, seed=job.seed)
    left_out = int(np.count_nonzero((loss[trained].reshape(-1, rows_per_sample) == 0).any(1)))
    # Evaluated are single examples, however few there are.
    alone = config.changed(
        micro_batch_size=1, effective_batch_size=None, packing="none", data_parallel=1
    )
    held_out: Any = None
    if np.any(loss[held] > 0):
        held_out = training_rows(directory, alone, indices=held, seed=job.seed)
    widths = None
    if LENGTH in training.column_names:
        # At once: a column gives its rows one by one, which takes seconds of a hundred thousand.
        widths = training[LENGTH][:]
    multiple = 1
    collate: Collate = Collator(config)
    collate_alone: Collate = Collator(alone)
    if config.is_on_pairs:
        widths = np.asarray(widths).reshape(-1, rows_per_sample).max(1).tolist()
        training = Paired(training)
        if held_out is not None:
            held_out = Paired(held_out)
        collate = of_pairs(collate)
        collate_alone = of_pairs(collate_alone)
    elif config.data_parallel > 1:
        # The last pairs of an epoch are joined by its first, as accelerate does it.
        multiple = config.micro_batch_size * config.data_parallel
    return TrainingRows(
        training=Ordered(
            training,
            config.samples_per_step,
            job.seed,
            widths,
            is_grouped=config.packing == "grouped",
            multiple=multiple,
        ),
        collate=collate,
        held_out=held_out,
        collate_held_out=collate_alone,
        examples=len(trained) // rows_per_sample - left_out,
        left_out=left_out,
    )


def is_keeping_apart(model: Any, training: Any, config: TrialConfig) -> bool | None:
    """Return whether the examples of a packed row do not see each other; None where no row has two.

    Nothing random is drawn by it, and a compiled layer runs as it is written.

    Args:
        model: the base with its adapters in it, as it trains.
        training: the rows.
        config: what trains on them.

    Raises:
        InputError: the model looks ahead, or is told no positions and so packs nothing.
    """
    from qlora_sweep.sweep.data.collation import SEQ_LENGTHS, Collator
    from qlora_sweep.sweep.data.probing import are_apart, check_is_causal, takes_positions

    check_is_causal(model)
    if config.packing != "packed":
        return None
    if not takes_positions(model):
        raise InputError("packing packed: the model is told no positions of tokens")
    # The first in which an example of several tokens is behind another.
    lengths = training.select_columns([SEQ_LENGTHS])
    several = (n for n, row in enumerate(lengths) if np.count_nonzero(row[SEQ_LENGTHS] > 1) > 1)
    number = next(several, None)
    if number is None:
        return None
    # Compiled, a micro-batch would have all its rows, and this one is asked of one.
    batch = Collator(config.changed(compile=False))([training[number]])
    device = model.get_input_embeddings().weight.device
    on_device = {key: v.to(device) if hasattr(v, "to") else v for key, v in batch.items()}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return are_apart(model, on_device)
