"""Prepared texts of random tokens, in the shape in which the child leaves them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.sweep.running.wire import DatasetSettings

VOCABULARY = 97


def prepared(
    directory: Path,
    lengths: ArrayLike,
    *,
    completions: ArrayLike | None = None,
    masks: Sequence[ArrayLike] | None = None,
    texts: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> Path:
    """Write rows of so many random tokens, or ``texts``: all of them carry loss, the last
    ``completions`` do, or those that ``masks`` say."""
    from datasets import Dataset, Features, List, Value

    random = np.random.default_rng(seed)
    counts = np.asarray(lengths, dtype=np.int32)
    texts = texts or [random.integers(1, VOCABULARY, count) for count in counts]
    rows: dict[str, Any] = {"input_ids": texts}
    features = {"input_ids": List(Value("int32")), "completion_mask": List(Value("int8"))}
    masks = [np.ones(count) for count in counts] if masks is None else masks
    if completions is not None:
        last = zip(counts, np.asarray(completions), strict=True)
        masks = [np.arange(count) >= count - answer for count, answer in last]
    loss = np.array([np.sum(np.asarray(mask)[1:]) for mask in masks])
    rows["completion_mask"] = [np.asarray(mask, dtype=np.int8) for mask in masks]
    Dataset.from_dict(rows, features=Features(features)).save_to_disk(directory / "tokens")
    np.save(directory / "lengths.npy", counts)
    np.save(directory / "loss_lengths.npy", loss.astype(np.int32))
    return directory


def configured(packing: str = "none", **values: Any) -> TrialConfig:
    """Return a configuration with a packing."""
    return TrialConfig(packing=packing, **values)


def prepared_settings(
    directory: Path, lengths: ArrayLike, *, eval_fraction: float = 0.2
) -> DatasetSettings:
    """Write rows of so many random tokens, and return them as a worker is told of them."""
    prepared(directory, lengths)
    (directory / "texts.json").write_text('{"fingerprint": "abc"}', encoding="utf-8")
    return DatasetSettings(directory=str(directory), fingerprint="abc", eval_fraction=eval_fraction)


def prepared_pairs(directory: Path, *, count: int) -> Path:
    """Write pairs of a prompt of three tokens: what is chosen repeats one token, what is rejected
    another, over lengths that differ."""
    from qlora_sweep.sweep.data.epoch import DIFFERENCES

    lengths = np.array([3 + 4 + (row * 5) % 9 for row in range(2 * count)])
    prepared(directory, lengths, completions=lengths - 3)
    from datasets import load_from_disk

    tokens = load_from_disk(str(directory / "tokens"), keep_in_memory=True)

    def told(row: dict[str, Any], index: int) -> dict[str, Any]:
        prompt = [1 + index // 2, 5, 6]
        return {"input_ids": [*prompt, *([70, 80][index % 2],) * (len(row["input_ids"]) - 3)]}

    changed = tokens.map(told, with_indices=True, features=tokens.features)
    changed.save_to_disk(str(directory / "paired"))
    shutil.rmtree(directory / "tokens")
    (directory / "paired").rename(directory / "tokens")
    np.save(directory / DIFFERENCES, np.full(count, 3, np.int32))
    return directory
