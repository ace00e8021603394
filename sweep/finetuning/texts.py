"""Owns the rows of a training on prepared texts: trained on, held out, left out.

Apart from `rows`, as it imports `datasets`. Knows nothing of Trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from sweep.data.batches import LENGTH, training_rows
from sweep.data.collating import Collator
from sweep.data.epoch import cut
from sweep.data.split import split
from sweep.finetuning.rows import Rows
from sweep.finetuning.wire import TrainingJob

_PAD_TOKEN = 0
"""Any token of the model: pads carry no loss, and no token looks at them."""


def text_rows(job: TrainingJob) -> Rows:
    """Return what a job trains on and holds out of its texts.

    Raises:
        InputError: they make no micro-batch of the configuration's.
    """
    assert job.texts is not None
    directory, config = Path(job.texts), job.config
    lengths = np.load(directory / "lengths.npy", mmap_mode="r")
    trained, held = split(len(lengths), job.eval_fraction, job.seed)
    training = training_rows(directory, config, indices=trained, seed=job.seed)
    _, loss = cut(
        lengths[trained], np.load(directory / "loss_lengths.npy")[trained], config.seq_len
    )
    alone = text_by_text(config)
    return Rows(
        training=training,
        held_out=_held_out(directory, alone, held, seed=job.seed),
        collate_held_out=Collator(config=alone, pad_token_id=_PAD_TOKEN),
        collate=Collator(config=config, pad_token_id=_PAD_TOKEN),
        widths=training[LENGTH] if LENGTH in training.column_names else None,
        left_out=int(np.count_nonzero(loss == 0)),
    )


def text_by_text(config: TrialConfig) -> TrialConfig:
    """Return the configuration that evaluates rows: a text each, however few there are."""
    changes = {"micro_batch_size": 1, "effective_batch_size": None, "packing": "none"}
    return config.model_copy(update=changes)


def _held_out(directory: Path, config: TrialConfig, held: Any, *, seed: int) -> Any | None:
    """Return the held-out rows; None where none of them can be evaluated."""
    try:
        return training_rows(directory, config, indices=held, seed=seed) if len(held) else None
    except InputError:
        return None
