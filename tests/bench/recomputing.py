"""Compiled layers that are computed once more in the backward pass: torch's way beside another.

    python -m tests.bench.recomputing [--model NAME] [--layers N] [--config JSON] [-o OUT.jsonl]

`torch.utils.checkpoint` that is not reentrant, which trainings use, sends each tensor that a layer
keeps through Python twice. A compiled layer of a base in 4 bits keeps some fifty, parts of weights
among them, which takes the host milliseconds a layer. Here a layer may be one node of the graph,
which keeps its input alone. Both train the same configuration on a GPU in turns, in one process: a
row a turn has seconds a step and the peak, and the last row the ratio of the seconds. On a
machine without a GPU layers of a small network are timed instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from qlora_sweep.search_spaces.config import parse_config
from qlora_sweep.sweep.training.adapters import attached
from qlora_sweep.sweep.training.model import build_base
from qlora_sweep.sweep.training.step import TrainingLoop
from tests.bench.harness import Row, stamp, write
from tests.bench.unsloth_beside import FAST, model_of

Recompute = Callable[..., Any]
ROUNDS = 3
STEPS = 10


def recomputed(run: Callable[..., Any], *inputs: Any) -> Any:
    """Return what a layer makes of its inputs, and compute it once more for the backward pass.

    It takes the place of a layer's `_gradient_checkpointing_func` where nothing is dropped at
    random. What cannot be one node goes through torch's own function: a layer whose input needs no
    gradient, though its adapters do, or with several that need one.

    Args:
        run: the layer's forward pass, with its other arguments bound to it.
        inputs: the hidden states (batch, tokens, width), and what else is given by position.
    """
    by_name = run.keywords if isinstance(run, partial) else {}
    given = tree_leaves((inputs, by_name))
    trained = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    if len(trained) == 1 and trained[0] is inputs[0]:
        return _Recomputed.apply(partial(_of_first, run, inputs[1:]), inputs[0])
    return checkpoint(run, *inputs, use_reentrant=False)


def _of_first(run: Callable[..., Any], others: tuple[Any, ...], first: torch.Tensor) -> Any:
    return run(first, *others)


class _Recomputed(torch.autograd.Function):
    """A layer, of which nothing is kept but its input."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Any:
        ctx.run = run
        ctx.autocast = {
            "device_type": x.device.type,
            "dtype": torch.get_autocast_dtype(x.device.type),
            "enabled": torch.is_autocast_enabled(x.device.type),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        ctx.save_for_backward(x)
        # As the second time, or the compiler would have another program for it.
        with torch.enable_grad():
            output = run(x)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            # Of its result nothing is needed but where its gradient goes.
            edge = get_gradient_edge(ctx.run(x))
        torch.autograd.backward((edge,), gradients)
        return None, x.grad


WAYS: dict[str, Recompute] = {
    "torch": partial(checkpoint, use_reentrant=False),
    "one node": recomputed,
}


def on_gpu(typed: argparse.Namespace) -> Iterator[Row]:
    """Yield a row a turn of a training."""
    config = parse_config(FAST | {"checkpoint_fraction": 1.0} | typed.config)
    device = torch.device("cuda")
    model = model_of(typed.model, typed.layers)
    base = build_base(config, spec=model, weights="random", device=device, seed=0)
    with attached(base, config) as attachment:
        for turn in range(1 + ROUNDS):
            for way, function in WAYS.items():
                for layer in attachment.layers:
                    layer._gradient_checkpointing_func = function
                loop = TrainingLoop(attachment, config, seed=0)
                loop.step()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                began = time.perf_counter()
                for _ in range(STEPS):
                    loop.step()
                torch.cuda.synchronize()
                seconds = (time.perf_counter() - began) / STEPS
                peak = torch.cuda.max_memory_allocated()
                row = {"way": way, "turn": turn, "seconds": seconds, "peak_allocated_bytes": peak}
                # The first turn compiles.
                if turn:
                    yield row


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
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for row in turns:
        write(row, typed.output)
        seconds[row["way"]].append(row["seconds"])
    means = {way: statistics.fmean(found) for way, found in seconds.items()}
    write({"seconds": means, "times": means["torch"] / means["one node"]}, typed.output)


if __name__ == "__main__":
    main()
