"""How long a micro-batch of texts takes to be read and collated, as a training's loader does it.

Run as ``python -m tests.bench.collating_speed OUT.json``. Rows of random tokens and of log-normal
lengths lie on the disk as texts do, mapped; one process reads and collates, as Trainer's loader
does by default. Beside the wall's milliseconds are the processor's, which a busy machine does not
stretch, and the share that those are of a micro-batch at the fastest that a 7B model can train on
an H200: 23,800 tokens/s. The device does not even wait for so long where the host is ahead of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from search_spaces.config import TrialConfig
from sweep.data.batches import training_rows
from sweep.data.rows import Collator
from tests.bench.stamp import stamp
from tests.sweep.data.prepared import prepared

ROWS, MICRO_BATCHES, SEED = 20_000, 100, 0
MICRO_BATCH_SIZE, SEQ_LEN = 16, 2048
FASTEST_TOKENS_PER_SECOND = 23_800
"""Of a 7B model on an H200, by the products alone."""


def measured(directory: Path, packing: str, *, micro_batches: int) -> dict[str, Any]:
    """Return the milliseconds of a micro-batch, of the wall and of the processor."""
    config = TrialConfig.model_validate(
        {"packing": packing, "micro_batch_size": MICRO_BATCH_SIZE, "seq_len": SEQ_LEN}
    )
    count = len(np.load(directory / "lengths.npy"))
    rows: Any = training_rows(directory, config, indices=np.arange(count), seed=SEED)
    loader = DataLoader(
        rows, batch_size=MICRO_BATCH_SIZE, shuffle=True, collate_fn=Collator(config, 0)
    )
    batches = iter(loader)
    next(batches)
    wall, processor, tokens = [], [], 0
    for _ in range(micro_batches):
        begun = time.perf_counter(), time.process_time()
        batch = next(batches)
        wall.append(time.perf_counter() - begun[0])
        processor.append(time.process_time() - begun[1])
        tokens += batch["input_ids"].numel()
    of_step = tokens / micro_batches / FASTEST_TOKENS_PER_SECOND
    return {
        "packing": packing,
        "rows": MICRO_BATCH_SIZE,
        "tokens": round(tokens / micro_batches),
        "wall_ms_median": round(1e3 * float(np.median(wall)), 3),
        "processor_ms_mean": round(1e3 * float(np.mean(processor)), 3),
        "share_of_step": round(float(np.mean(processor)) / of_step, 5),
    }


def main() -> None:
    """Write a document with a row for each packing, plain texts and completions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES)
    options = parser.parse_args()
    random = np.random.default_rng(SEED)
    lengths = np.clip(random.lognormal(7.0, 0.6, options.rows).astype(int), 8, 8192)
    answers = random.integers(1, lengths - 1)
    found = []
    with tempfile.TemporaryDirectory() as home:
        kinds = {
            "plain": prepared(Path(home) / "plain", lengths),
            "completions": prepared(Path(home) / "completions", lengths, completions=answers),
        }
        for (kind, directory), packing in itertools.product(
            kinds.items(), ("none", "grouped", "packed")
        ):
            row = measured(directory, packing, micro_batches=options.micro_batches)
            found.append({"texts": kind, **row})
            print(json.dumps(found[-1]), flush=True)
    document = {**stamp(), "collated": found}
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
