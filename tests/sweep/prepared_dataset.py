"""Prepared texts of which only the lengths are there: enough for all that the parent decides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qlora_sweep.search_spaces.dataset_choice import DatasetSummary, LengthQuantiles
from qlora_sweep.sweep.data.prepared_dataset import DatasetRequest, PreparedDataset

LENGTHS = tuple(range(10, 410, 2))
"""Tokens of two hundred rows, 10 to 408."""


def a_summary(lengths: Sequence[int] = LENGTHS, **changes: Any) -> DatasetSummary:
    rows = np.asarray(lengths)
    quantiles = {
        f"p{share}": int(np.quantile(rows, share / 100, method="inverted_cdf"))
        for share in (50, 90, 95, 99)
    }
    values = {
        "source": "mine.jsonl",
        "kind": "text",
        "format": "auto",
        "fingerprint": "cafe",
        "tokenizer": "demo",
        "completions_only": False,
        "rows": len(rows),
        "broken": 0,
        "tokens": int(rows.sum()),
        "loss_tokens": int((rows - 1).sum()),
        "longest": int(rows.max()),
        "quantiles": LengthQuantiles(**quantiles, max=int(rows.max())),
    }
    return DatasetSummary.model_validate(values | changes)


def prepared_dataset(
    directory: Path, lengths: Sequence[int] = LENGTHS, **changes: Any
) -> PreparedDataset:
    """Write the lengths of rows, of which every token but the first carries loss."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = np.asarray(lengths, dtype=np.int32)
    np.save(directory / "lengths.npy", rows)
    np.save(directory / "loss_lengths.npy", np.maximum(rows - 1, 0))
    summary = a_summary(lengths, **changes)
    (directory / "texts.json").write_text(summary.model_dump_json())
    return PreparedDataset(directory, summary, summary.source)


class Reader:
    """Reads texts as `prepare_dataset` does, from nowhere, and remembers what it was asked."""

    def __init__(self, dataset: PreparedDataset) -> None:
        self.dataset = dataset
        self.asked: list[DatasetRequest] = []

    def __call__(self, request: DatasetRequest) -> PreparedDataset:
        self.asked.append(request)
        return self.dataset
