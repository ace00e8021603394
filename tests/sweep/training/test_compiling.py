"""Compiled layers: one graph for all, kept from trial to trial, never a silent fall-back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from tests.lazy import lazily
from tests.sweep.training.tiny import LAYERS, tiny_base, tiny_config

torch = lazily("torch")
adapters = lazily("sweep.training.adapters")
pytestmark = pytest.mark.usefixtures("dynamo")
# bitsandbytes compiles its 8-bit optimizers on a CPU.
CONFIG = tiny_config(optimizer="adamw_torch_fused", checkpoint_fraction=0.0)


class Graphs:
    """A compiler that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        self.compiler = adapters.CountingCompiler(self._compile)

    def _compile(self, graph: Any, inputs: Sequence[Any]) -> Any:
        self.count += 1
        return graph.forward


def trained(base: Any, config: TrialConfig, graphs: Graphs, *, steps: int = 1) -> Any:
    from sweep.training.step import TrainingLoop

    with adapters.attached(base, config) as attachment:
        with adapters.compiled(attachment.layers, compiler=graphs.compiler) as compilation:
            loop = TrainingLoop(attachment, config, seed=0)
            for _ in range(steps):
                loop.step()
        assert all(layer._compiled_call_impl is None for layer in attachment.layers)
    return compilation


def test_a_shape_is_compiled_once_for_all_layers_and_all_trials_on_a_base() -> None:
    graphs = Graphs()
    with tiny_base(CONFIG) as base:
        first = trained(base, CONFIG, graphs, steps=2)
        # The first layer's input wants no gradient.
        assert (graphs.count, first.calls) == (2, 2 * LAYERS)
        assert first.seconds > 0
        again = trained(base, CONFIG, graphs)
        assert (again.calls, again.seconds, graphs.count) == (LAYERS, 0.0, 2)
        wider = trained(base, CONFIG.model_copy(update={"micro_batch_size": 3}), graphs)
        assert wider.calls == LAYERS
        assert wider.seconds > 0
        assert trained(base, CONFIG, graphs).seconds == 0.0


def test_a_recomputed_layer_runs_its_graph_again() -> None:
    half = {"checkpoint_fraction": 0.5, "effective_batch_size": 4}
    config = CONFIG.model_copy(update=half)
    with tiny_base(config) as base:
        assert trained(base, config, Graphs()).calls == 2 * (LAYERS + LAYERS // 2)


def adding(*, breaks: bool) -> Any:
    class Adding(torch.nn.Module):  # type: ignore[name-defined,misc]
        def forward(self, x: Any) -> Any:
            if breaks:
                torch._dynamo.graph_break()
            return x + 1

    return Adding()


def test_no_number_of_shapes_makes_a_layer_fall_back_and_none_that_is_no_single_graph_runs() -> (
    None
):
    graphs, layer = Graphs(), adding(breaks=False)
    with adapters.compiled([layer], compiler=graphs.compiler) as compilation:
        for rows in range(2, 22):
            layer(torch.ones(rows, 2))
    assert (graphs.count, compilation.calls) == (20, 20)
    broken = adding(breaks=True)
    with (
        adapters.compiled([broken], compiler=Graphs().compiler),
        pytest.raises(torch._dynamo.exc.TorchDynamoException),
    ):
        broken(torch.ones(1))
    assert float(broken(torch.ones(1))) == 2.0
