"""The frozen base, built from random weights or loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from search_spaces.models import ModelSpec
from sweep.training.adapters import attached
from sweep.training.model import build_base, decoder_layers
from tests.sweep.training.tiny import LAYERS, TINY, tiny_base, tiny_config


@pytest.mark.parametrize("quantization", ["nf4", "fp4"])
@pytest.mark.parametrize("double_quant", [True, False])
def test_every_matrix_but_the_head_is_in_four_bits(quantization: str, double_quant: bool) -> None:
    with tiny_base(tiny_config(quantization=quantization, double_quant=double_quant)) as base:
        layers = [m for m in base.model.modules() if isinstance(m, bnb.nn.Linear4bit)]
        assert len(layers) == LAYERS * 7
        assert {layer.weight.dtype for layer in layers} == {torch.uint8}
        assert {layer.weight.quant_state.quant_type for layer in layers} == {quantization}
        assert {layer.weight.quant_state.nested for layer in layers} == {double_quant}
        assert type(base.model.get_output_embeddings()) is torch.nn.Linear


@pytest.mark.parametrize(
    ("quantization", "upcast", "head", "matrix"),
    [
        ("nf4", True, torch.float32, torch.uint8),
        ("nf4", False, torch.bfloat16, torch.uint8),
        ("none", True, torch.float32, torch.bfloat16),
        ("none", False, torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_upcast_widens_norms_embeddings_and_head_and_never_the_matrices(
    quantization: str, upcast: bool, head: torch.dtype, matrix: torch.dtype
) -> None:
    config = tiny_config(quantization=quantization, upcast_fp32=upcast, double_quant=False)
    with tiny_base(config) as base:
        model = base.model
        assert model.get_output_embeddings().weight.dtype is head
        assert model.get_input_embeddings().weight.dtype is head
        assert model.model.norm.weight.dtype is head
        assert model.model.layers[0].self_attn.q_proj.weight.dtype is matrix


@pytest.mark.parametrize("upcast", [True, False])
def test_a_share_of_the_layers_is_in_four_bits_and_the_others_in_the_compute_dtype(
    upcast: bool,
) -> None:
    # Twelve layers: the name of layer 1 is the start of that of layer 10.
    spec = dataclasses.replace(TINY, config={**TINY.config, "num_hidden_layers": 12})
    config = tiny_config(quantized_fraction=0.75, upcast_fp32=upcast)
    base = build_base(config, spec=spec, weights="random", device=torch.device("cpu"), seed=0)
    layers = decoder_layers(base.model)
    packed = {i for i, layer in enumerate(layers) if layer.mlp.up_proj.weight.dtype == torch.uint8}
    assert packed == config.quantized_layers(12) == {0, 1, 2, 4, 5, 6, 8, 9, 10}
    assert {layers[i].mlp.up_proj.weight.dtype for i in (3, 7, 11)} == {torch.bfloat16}
    assert base.model.get_output_embeddings().weight.dtype is (
        torch.float32 if upcast else torch.bfloat16
    )
    assert base.quantized_share == 1.0
    base.close()


def test_nothing_is_left_on_the_meta_device_and_the_rotary_buffers_are_right() -> None:
    with tiny_base(tiny_config()) as base:
        tensors = [*base.model.parameters(), *base.model.buffers()]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        real = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY.config))
        rotary = base.model.model.rotary_emb.inv_freq
        assert torch.equal(rotary, real.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_base_built_from_random_weights_has_the_bytes_of_a_loaded_one(
    fraction: float, tmp_path: Path
) -> None:
    config = tiny_config(quantized_fraction=fraction)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY.config)).save_pretrained(tmp_path)
    saved = dataclasses.replace(TINY, source="directory", path=tmp_path)
    key, cpu = config, torch.device("cpu")
    loaded = build_base(key, spec=saved, weights="pretrained", device=cpu, seed=0)
    random = build_base(key, spec=TINY, weights="random", device=cpu, seed=0)
    assert _tensors(loaded.model) == _tensors(random.model)
    with attached(loaded, config) as attachment:
        assert attachment.trainable_parameters()


def _tensors(model: torch.nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (p.dtype, p.shape) for name, p in model.named_parameters()}


def test_loaded_weights_are_the_files_own(tmp_path: Path) -> None:
    source = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY.config))
    source.save_pretrained(tmp_path)
    saved = dataclasses.replace(TINY, source="directory", path=tmp_path)
    key = tiny_config(quantization="none", double_quant=False, compute_dtype="fp32")
    base = build_base(key, spec=saved, weights="pretrained", device=torch.device("cpu"), seed=0)
    wanted = source.model.layers[1].mlp.up_proj.weight
    assert torch.equal(base.model.model.layers[1].mlp.up_proj.weight, wanted)


def test_decoder_layers_are_found_in_other_families() -> None:
    spec = ModelSpec(
        name="gpt2",
        source="shipped",
        config={"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": 128},
    )
    key = tiny_config(attention="sdpa")
    base = build_base(key, spec=spec, weights="random", device=torch.device("cpu"), seed=0)
    assert len(decoder_layers(base.model)) == 3
