"""Compiled layers that are computed once more in the backward pass: torch's way beside another.

    python -m tests.bench.recomputing [--model NAME] [--layers N] [--config JSON] [-o OUT.jsonl]

`torch.utils.checkpoint` that is not reentrant, which trainings use, sends each tensor that a layer
keeps through Python twice. A compiled layer of a base in 4 bits keeps some fifty, parts of weights
among them, which takes the host milliseconds a layer. Here a layer may be one node of the graph,
which keeps its input alone, or on the host. All train the same configuration on a GPU in turns, in
one process: a row a turn has seconds a step and the peak, and the last row the ratios of the
seconds. On a machine without a GPU layers of a small network are timed instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from qlora_sweep.search_spaces.config import parse_config
from qlora_sweep.sweep.training.adapters import attached
from qlora_sweep.sweep.training.model import build_base
from qlora_sweep.sweep.training.recomputing import CheckpointsOnHost, Recomputing
from qlora_sweep.sweep.training.step import TrainingLoop
from tests.bench.harness import Row, stamp, write
from tests.bench.unsloth_beside import FAST, model_of

Recompute = Callable[..., Any]
ROUNDS = 3
STEPS = 10


WAYS: dict[str, Recompute] = {
    "torch": partial(checkpoint, use_reentrant=False),
    "one node": Recomputing(),
}
"""On a GPU one more has the inputs wait on the host."""


def on_gpu(typed: argparse.Namespace) -> Iterator[Row]:
    """Yield a row a turn of a training."""
    config = parse_config(FAST | {"checkpoint_fraction": 1.0} | typed.config)
    device = torch.device("cuda")
    model = model_of(typed.model, typed.layers)
    base = build_base(config, spec=model, weights="random", device=device, seed=0)
    with attached(base, config) as attachment:
        host = CheckpointsOnHost(device)
        ways = WAYS | {"on the host": Recomputing(host)}
        for turn in range(1 + ROUNDS):
            for way, function in ways.items():
                for layer in attachment.layers:
                    layer._gradient_checkpointing_func = function
                loop = TrainingLoop(attachment, config, seed=0)
                loop.step()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                for _ in range(STEPS):
                    loss = loop.step()
                torch.cuda.synchronize()
                seconds = (time.perf_counter() - began) / STEPS
                peak = torch.cuda.max_memory_allocated()
                row: Row = {"way": way, "turn": turn, "seconds": seconds, "loss": float(loss)}
                row["peak_allocated_bytes"] = peak
                # The first turn compiles.
                if turn:
                    yield row
        host.close()


class Layer(torch.nn.Module):
    """Some frozen products and an adapter, so small that the host's work is all of it."""

    def __init__(self, products: int = 40, width: int = 8) -> None:
        super().__init__()
        frozen = (torch.randn(width, width, requires_grad=False) for _ in range(products))
        self.frozen = torch.nn.ParameterList(
            torch.nn.Parameter(weight, requires_grad=False) for weight in frozen
        )
        self.adapter = torch.nn.Parameter(torch.zeros(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (tokens, width) of hidden states alike."""
        for weight in self.frozen:
            x = torch.relu(x @ weight * 0.1 + x)
        return x + x @ self.adapter


def on_host(layers: int = 24) -> Iterator[Row]:
    """Yield a row a turn of small layers on the CPU: seconds are of one layer."""
    torch.set_num_threads(1)
    network = [Layer() for _ in range(layers)]
    for layer in network:
        layer.compile(dynamic=False)
    for turn in range(1 + ROUNDS):
        for way, function in WAYS.items():
            began = time.perf_counter()
            for _ in range(STEPS):
                x = torch.ones(4, 8, requires_grad=True)
                for layer in network:
                    x = function(layer, x)
                x.sum().backward()
            seconds = (time.perf_counter() - began) / STEPS / layers
            if turn:
                yield {"way": way, "turn": turn, "seconds": seconds}


def main() -> None:
    """Measure both, and print a row a turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="how many of its layers")
    parser.add_argument("--config", type=json.loads, default={}, help="changes, as JSON")
    parser.add_argument("-o", "--output", type=Path)
    typed = parser.parse_args()
    about: Row = {"model": "small layers"}
    turns = on_host()
    if torch.cuda.is_available():
        about = {"model": typed.model, "layers": typed.layers}
        turns = on_gpu(typed)
    write(stamp() | about, typed.output)
    seconds: dict[str, list[float]] = defaultdict(list)
    for row in turns:
        write(row, typed.output)
        seconds[row["way"]].append(row["seconds"])
    means = {way: statistics.fmean(found) for way, found in seconds.items()}
    times = {way: means["torch"] / mean for way, mean in means.items()}
    write({"seconds": means, "times": times}, typed.output)


if __name__ == "__main__":
    main()
