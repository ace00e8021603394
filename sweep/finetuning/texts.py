"""The rows of a training on prepared texts: trained on, held out, left out, and whether the model
keeps apart what is packed into one.

Apart from `rows`, as it imports `datasets`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from sweep.data.batches import LENGTH, loss_left, training_rows
from sweep.data.collating import SEQ_LENGTHS, Collator
from sweep.data.probing import are_apart, check_is_causal, takes_positions
from sweep.data.split import split
from sweep.finetuning.rows import Rows
from sweep.finetuning.wire import TrainingJob


def text_rows(job: TrainingJob) -> Rows:
    """Return what a job trains on and holds out of its texts.

    Raises:
        InputError: they make no micro-batch of the configuration's.
    """
    assert job.texts is not None
    directory, config = Path(job.texts), job.config
    _, loss = loss_left(directory, config.seq_len)
    trained, held = split(len(loss), job.eval_fraction, job.seed)
    training = training_rows(directory, config, indices=trained, seed=job.seed)
    alone = text_by_text(config)
    left_out = int(np.count_nonzero(loss[trained] == 0))
    return Rows(
        training=training,
        held_out=_held_out(directory, alone, held, seed=job.seed),
        collate_held_out=Collator(alone),
        collate=Collator(config),
        widths=training[LENGTH] if LENGTH in training.column_names else None,
        texts=len(trained) - left_out,
        left_out=left_out,
    )


def is_keeping_apart(model: torch.nn.Module, training: Dataset, config: TrialConfig) -> bool | None:
    """Return whether the texts of a packed row do not see each other; None where no row has two.

    Nothing random is drawn by it, and a compiled layer runs as it is written.

    Args:
        model: the base with its adapters in it, as it trains.
        training: the rows.
        config: what trains on them.

    Raises:
        InputError: the model looks ahead, or is told no positions and so packs nothing.
    """
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    device = embeddings.weight.device
    check_is_causal(model)
    if config.packing != "packed":
        return None
    if not takes_positions(model):
        raise InputError("packing packed: the model is told no positions of tokens")
    row = _of_several(training)
    if row is None:
        return None
    # Compiled, a micro-batch would have all its rows, and this one is asked of one.
    eager = config.model_copy(update={"compile": False})
    batch = Collator(eager)([training[row]])
    on_device = {key: v.to(device) if hasattr(v, "to") else v for key, v in batch.items()}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return are_apart(model, on_device)


def _of_several(training: Dataset) -> int | None:
    """Return the first row in which a text of several tokens is behind another."""
    rows = training.select_columns([SEQ_LENGTHS])
    return next(
        (number for number, row in enumerate(rows) if np.count_nonzero(row[SEQ_LENGTHS] > 1) > 1),
        None,
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
