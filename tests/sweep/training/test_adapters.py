"""What is put on the base for one trial, and taken off again."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from tests.lazy import lazily
from tests.sweep.training.tiny import LAYERS, tiny_base, tiny_config, tiny_loop

attaching = lazily("sweep.training.adapters")


@pytest.mark.parametrize(
    ("fraction", "layers", "expected"),
    [
        (0.0, 4, set()),
        (1.0, 4, {0, 1, 2, 3}),
        (0.5, 4, {0, 2}),
        (0.25, 8, {0, 4}),
        (0.75, 4, {0, 1, 2}),
        (0.1, 4, set()),
    ],
)
def test_checkpointed_layers_are_evenly_spread(
    fraction: float, layers: int, expected: set[int]
) -> None:
    assert TrialConfig(checkpoint_fraction=fraction).checkpointed_layers(layers) == expected


def test_detaching_leaves_the_base_as_it_was() -> None:
    config = tiny_config(checkpoint_fraction=0.5, target_modules="all-linear")

    def state(model: Any) -> Any:
        tensors = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
        return tensors, [name for name, _ in model.named_modules()]

    with tiny_base(config) as base:
        before = state(base.model)
        with attaching.attached(base, config) as attachment:
            assert attachment.trainable_parameters()
        assert state(base.model) == before
        assert not base.model.is_gradient_checkpointing
        assert not any(p.requires_grad for p in base.model.parameters())


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        ("qv", {"q_proj", "v_proj"}),
        ("attention", ATTENTION),
        ("all-linear", {*ATTENTION, "gate_proj", "up_proj", "down_proj"}),
        (("up_proj",), {"up_proj"}),
    ],
)
def test_adapters_go_where_the_configuration_says(targets: object, adapted: set[str]) -> None:
    settings = {"lora_rank": 8, "lora_alpha": 4.0, "lora_dropout": 0.1}
    with tiny_loop(tiny_config(target_modules=targets, **settings)) as loop:
        layers = {n: m for n, m in loop.attached.model.named_modules() if hasattr(m, "lora_A")}
        trained = sum(p.numel() for p in loop.attached.trainable_parameters())
    assert {name.rpartition(".")[2] for name in layers} == adapted
    sizes = [layer.in_features + layer.out_features for layer in layers.values()]
    assert (trained, len(sizes)) == (8 * sum(sizes), LAYERS * len(adapted))
    for layer in layers.values():
        assert (layer.lora_dropout["default"].p, layer.scaling["default"]) == (0.1, 0.5)


def test_a_module_the_architecture_lacks_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"'q_porj'; did you mean 'q_proj'"):
        tiny_loop(tiny_config(target_modules=["q_porj"])).__enter__()
