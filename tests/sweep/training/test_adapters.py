"""What is put on the base for one trial, and taken off again."""

from __future__ import annotations

import pytest
import torch

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from sweep.training.adapters import attached
from tests.sweep.training.tiny import LAYERS, tiny_base, tiny_config


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
    with tiny_base(config) as base:
        before = {name: (p.shape, p.dtype) for name, p in base.model.named_parameters()}
        names = [name for name, _ in base.model.named_modules()]
        with attached(base, config) as attachment:
            assert attachment.trainable_parameters()
        after = {name: (p.shape, p.dtype) for name, p in base.model.named_parameters()}
        assert [name for name, _ in base.model.named_modules()] == names
        assert after == before
        assert not base.model.is_gradient_checkpointing
        assert not any(p.requires_grad for p in base.model.parameters())


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        ("qv", {"q_proj", "v_proj"}),
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (
            "all-linear",
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ),
        (("up_proj",), {"up_proj"}),
    ],
)
def test_adapters_go_where_the_configuration_says(targets: object, adapted: set[str]) -> None:
    config = tiny_config(target_modules=targets)
    with tiny_base(config) as base, attached(base, config) as attachment:
        found = {
            name.split(".lora_A")[0].rpartition(".")[2]
            for name, _ in attachment.model.named_parameters()
            if ".lora_A" in name
        }
    assert found == adapted


def test_a_module_the_architecture_lacks_is_refused_with_the_nearest_name() -> None:
    config = tiny_config(target_modules=["q_porj"])
    with (
        tiny_base(config) as base,
        pytest.raises(InputError, match=r"'q_porj'; did you mean 'q_proj'"),
        attached(base, config),
    ):
        pass


def test_the_number_of_trainable_parameters_is_what_the_ranks_say() -> None:
    config = tiny_config(lora_rank=8, target_modules=["q_proj"])
    with tiny_base(config) as base, attached(base, config) as attachment:
        count = sum(p.numel() for p in attachment.trainable_parameters())
    assert count == LAYERS * 8 * (128 + 128)


def test_dropout_and_scale_reach_the_adapters() -> None:
    config = tiny_config(lora_dropout=0.1, lora_rank=8, lora_alpha=4.0)
    with tiny_base(config) as base, attached(base, config) as attachment:
        layer = next(m for m in attachment.model.modules() if hasattr(m, "lora_dropout"))
        dropout = layer.lora_dropout["default"]
        assert isinstance(dropout, torch.nn.Dropout)
        assert dropout.p == 0.1
        assert layer.scaling["default"] == 0.5
