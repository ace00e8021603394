"""Compiled layers: one graph for all, kept from trial to trial, never a silent fall-back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from search_spaces.config import TrialConfig
from sweep.training.adapters import Compilation, CountingCompiler, attached, compiled
from sweep.training.model import BaseModel
from sweep.training.step import TrainingLoop
from tests.sweep.training.tiny import LAYERS, tiny_base, tiny_config

pytestmark = pytest.mark.usefixtures("dynamo")


def a_config(**knobs: Any) -> TrialConfig:
    # bitsandbytes compiles its 8-bit optimizers on a CPU.
    return tiny_config(optimizer="adamw_torch_fused", **knobs)


class Graphs:
    """A compiler that runs graphs as they are, and remembers what it was given."""

    def __init__(self) -> None:
        self.count = 0
        self.compiler = CountingCompiler(self._compile)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.count += 1
        return graph.forward


def trained(base: BaseModel, config: TrialConfig, graphs: Graphs, *, steps: int = 1) -> Compilation:
    with attached(base, config) as attachment:
        with compiled(attachment.layers, compiler=graphs.compiler) as compilation:
            loop = TrainingLoop(attachment, config, seed=0)
            for _ in range(steps):
                loop.step()
        assert all(layer._compiled_call_impl is None for layer in attachment.layers)
    return compilation


def test_a_shape_is_compiled_once_for_all_layers_and_all_trials_on_a_base() -> None:
    graphs, config = Graphs(), a_config(checkpoint_fraction=0.0)
    with tiny_base(config) as base:
        first = trained(base, config, graphs, steps=2)
        # The first layer's input wants no gradient.
        assert graphs.count == 2
        assert first.calls == 2 * LAYERS
        assert first.seconds > 0
        again = trained(base, config, graphs)
        assert (again.calls, again.seconds, graphs.count) == (LAYERS, 0.0, 2)
        wider = trained(base, config.model_copy(update={"micro_batch_size": 3}), graphs)
        assert wider.calls == LAYERS
        assert wider.seconds > 0
        assert trained(base, config, graphs).seconds == 0.0


def test_a_recomputed_layer_runs_its_graph_again() -> None:
    graphs, config = Graphs(), a_config(checkpoint_fraction=0.5, effective_batch_size=4)
    with tiny_base(config) as base:
        compilation = trained(base, config, graphs)
    assert compilation.calls == 2 * (LAYERS + LAYERS // 2)


def test_no_number_of_shapes_makes_a_layer_fall_back() -> None:
    class Adding(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    graphs, layer = Graphs(), Adding()
    with compiled([layer], compiler=graphs.compiler) as compilation:
        for rows in range(2, 22):
            layer(torch.ones(rows, 2))
    assert (graphs.count, compilation.calls) == (20, 20)


def test_a_layer_that_is_no_single_graph_fails() -> None:
    class Breaking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x + 1

    graphs, layer = Graphs(), Breaking()
    with (
        compiled([layer], compiler=graphs.compiler),
        pytest.raises(torch._dynamo.exc.TorchDynamoException),
    ):
        layer(torch.ones(1))
    assert float(layer(torch.ones(1))) == 2.0
