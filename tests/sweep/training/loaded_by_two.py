"""One of two processes that train a model from a file: prints the loss of each step with the whole
model on each, sharded, and sharded with compiled layers, and how often a compiled layer ran.

On a CPU the compiler stops before it would need a C++ compiler.

Run as ``python -m tests.sweep.training.loaded_by_two RANK FILE DEVICE``, where FILE is in a
directory with the model's.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._dynamo.backends.debugging import aot_eager

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.sweep.training import adapters
from qlora_sweep.sweep.training.model import build_base
from qlora_sweep.sweep.training.step import TrainingLoop
from qlora_sweep.sweep.training.team import join, leave
from tests.sweep.training.tiny import TINY

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


def main(rank: int, meeting: Path, kind: str) -> None:
    device = torch.device(kind, rank if kind == "cuda" else None)  # type: ignore[call-overload]
    if kind == "cuda":
        torch.cuda.set_device(rank)
    join(rank, 2, meeting=meeting, device=device)
    directory = meeting.parent / "model"
    told = [
        *losses(WHOLE, directory, device, compiles=False),
        *losses(SHARDED, directory, device, compiles=False),
        *losses(SHARDED, directory, device, compiles=True),
    ]
    print(*told)
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
