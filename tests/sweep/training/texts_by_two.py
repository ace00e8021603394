"""One of two processes that train on texts, or on pairs, together: prints the loss of each step,
and what the adapters came to.

Run as ``python -m tests.sweep.training.texts_by_two RANK FILE DEVICE``, where FILE is in a
directory of prepared texts and of prepared pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.sweep.data.batches import QualityBatches, TokenizedDataset, trial_batches
from qlora_sweep.sweep.training.adapters import attached
from qlora_sweep.sweep.training.model import build_base
from qlora_sweep.sweep.training.process_group import rank, world_size
from qlora_sweep.sweep.training.step import TrainingLoop
from tests.sweep.training.tiny import TINY
from tests.sweep.training.two_processes import tell_as_one_of_two

STEPS = 4
KINDS = ("none", "grouped", "packed", "dpo")


def config_of(kind: str, ranks: int) -> TrialConfig:
    """Return a configuration whose optimizer step is of four micro-batches, on all ranks."""
    is_on_pairs = kind == "dpo"
    return TrialConfig(
        method="dpo" if is_on_pairs else "sft",
        packing="none" if is_on_pairs else kind,
        attention="eager",
        micro_batch_size=2,
        effective_batch_size=8,
        data_parallel=ranks,
        seq_len=32,
        learning_rate=1e-2,
        compute_dtype="fp32",
        quantization="none",
        optimizer="adamw_torch_fused",
    )


def told_by(kind: str, directory: Path, device: torch.device, *, is_lesson: bool) -> list[float]:
    """Return the mean loss of each step over all ranks, and the mean size of the adapters' own."""
    config = config_of(kind, world_size())
    dataset = TokenizedDataset(
        directory / ("pairs" if kind == "dpo" else "texts"), eval_fraction=0.0, seed=0
    )
    base = build_base(config, spec=TINY, weights="random", device=device, seed=0)
    torch.manual_seed(0)
    with attached(base, config) as attachment:
        # What one rank trains on is put together from what two do: rounds differ in length.
        of_two = [trial_batches(dataset, config_of(kind, 2), rank=rank) for rank in range(2)]
        mine = slice(rank(), None, world_size())
        every = list(chain(*zip(*(made.round for made in of_two), strict=True)))
        batches = [of_two[0].largest, every[mine]]
        if is_lesson:
            lesson = QualityBatches(dataset, config, tokens=900, seed=3, rank=rank())
            batches = [[lesson[index] for index in range(len(lesson))]]
        loop = TrainingLoop(attachment, config, seed=0, batches=batches)
        loop.leave_largest()
        found = [loop.step() for _ in range(STEPS)]
        size = sum(float(p.detach().abs().sum()) for p in attachment.trainable_parameters())
    base.close()
    losses = torch.tensor([float(loss) for loss in found])
    if world_size() > 1:
        torch.distributed.all_reduce(losses)
    return [*(losses / world_size()).tolist(), size]


def words(device: torch.device, directory: Path) -> Iterator[float]:
    for kind in KINDS:
        yield from told_by(kind, directory, device, is_lesson=False)
    yield from told_by("none", directory, device, is_lesson=True)


if __name__ == "__main__":
    tell_as_one_of_two(words)
