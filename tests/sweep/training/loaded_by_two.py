"""One of two processes that train a model from a file: prints the loss of each step with the whole
model on each, sharded, and sharded with compiled layers, and how often a compiled layer ran.

On a CPU the compiler stops before it would need a C++ compiler.

Run as ``python -m tests.sweep.training.loaded_by_two RANK FILE DEVICE``, where FILE is in a
directory with the model's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._dynamo.backends.debugging import aot_eager

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.sweep.training import adapters
from qlora_sweep.sweep.training.model import build_base
from qlora_sweep.sweep.training.step import TrainingLoop
from tests.sweep.training.tiny import TINY
from tests.sweep.training.two_processes import tell_as_one_of_two

STEPS = 3
WHOLE = TrialConfig(
    data_parallel=2,
    micro_batch_size=2,
    seq_len=32,
    learning_rate=1e-2,
    upcast_fp32=False,
    optimizer="adamw_torch_fused",
)
SHARDED = WHOLE.model_copy(update={"sharding": "fsdp"})


def losses(
    config: TrialConfig, directory: Path, device: torch.device, *, compiles: bool
) -> Iterator[float]:
    """Yield the loss of each step, then how often a compiled layer ran."""
    spec = dataclasses.replace(TINY, source="directory", path=directory)
    base = build_base(config, spec=spec, weights="pretrained", device=device, seed=0)
    torch.manual_seed(0)
    with adapters.attached(base, config) as attachment:
        calls = adapters.Compilation()
        if compiles:
            backend = adapters.CountingCompiler(lambda graph, given: aot_eager(graph, given))
            calls = backend.counted
            adapters.compile_each(attachment.layers, backend=backend, is_sharded=True)
        loop = TrainingLoop(attachment, config, seed=0)
        yield from [float(loop.step()) for _ in range(STEPS)]
        yield calls.calls


def words(device: torch.device, directory: Path) -> Iterator[float]:
    for config, compiles in ((WHOLE, False), (SHARDED, False), (SHARDED, True)):
        yield from losses(config, directory / "model", device, compiles=compiles)


if __name__ == "__main__":
    tell_as_one_of_two(words)
