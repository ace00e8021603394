"""One of two processes that shard a 4-bit layer: prints whether it computes as it did when whole.

Run as ``python -m tests.sweep.training.gathered_bits RANK FILE DEVICE``. Packed weights hold every
pattern of bits, those that are no number among them: any of them that FSDP changed would show.
"""

from __future__ import annotations

import sys
from pathlib import Path

import bitsandbytes as bnb
import torch
from torch.distributed.fsdp import fully_shard

from search_spaces.config import TrialConfig
from sweep.training.model import quantize_random
from sweep.training.team import AS_STORED, join, leave

SHARDED = TrialConfig(
    data_parallel=2, sharding="fsdp", upcast_fp32=False, optimizer="adamw_torch_fused"
)
FEATURES = 1024


class Layer(torch.nn.Module):
    def __init__(self, base: bnb.nn.Linear4bit) -> None:
        super().__init__()
        self.base, self.adapter = base, torch.nn.Linear(FEATURES, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.base(rows)


def main(rank: int, meeting: Path, kind: str) -> None:
    device = torch.device(kind, rank if kind == "cuda" else None)  # type: ignore[call-overload]
    if kind == "cuda":
        torch.cuda.set_device(rank)
    join(rank, 2, meeting=meeting, device=device)
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(
        FEATURES, FEATURES, bias=False, compute_dtype=torch.bfloat16, quant_storage=torch.bfloat16
    )
    quantize_random(layer, config=SHARDED, device=device)
    # Beside an adapter in fp32, as every layer of a model has one.
    whole_layer = Layer(layer).to(device)
    rows = torch.randn(4, FEATURES, device=device, dtype=torch.bfloat16)
    whole = layer.weight.detach().clone().view(torch.int16)
    no_numbers = int(torch.isnan(layer.weight.detach().float()).sum())
    before = layer(rows)
    fully_shard(whole_layer, mp_policy=AS_STORED, reshard_after_forward=False)
    after = whole_layer(rows)
    gathered = layer.weight.detach().view(torch.int16)
    print(no_numbers, bool((gathered == whole).all()), bool((before == after).all()))
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
