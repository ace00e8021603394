"""Experts in 4 and 8 bits on a GPU: their decoders, and what they train beside 16 bits."""

from __future__ import annotations

import copy
import dataclasses
import gc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import ModelSpec, checked_config
from qlora_sweep.sweep.training import grouped
from qlora_sweep.sweep.training.adapters import Attached, attached, compile_each
from qlora_sweep.sweep.training.eight_bit import TYPES, widened, widened_rows
from qlora_sweep.sweep.training.experts import (
    _parts,
    adapt_experts,
    dequantized,
    expert_modules,
    show_shapes,
    weight_names,
)
from qlora_sweep.sweep.training.model import build_base, decoder_layers
from qlora_sweep.sweep.training.step import TrainingLoop

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
    "gpt_oss": {"num_local_experts": 16, "num_experts_per_tok": 4},
}
ATTENTION = {"qwen3_moe": "sdpa", "gpt_oss": "eager"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("shape", [(5, 192, 64), (128, 1536, 2048)])
def test_decoding_is_bitsandbytes(
    shape: tuple[int, int, int], is_nested: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape, device="cuda", dtype=dtype)
    packed = bnb.nn.Params4bit(
        weight, requires_grad=False, compress_statistics=is_nested, quant_type="nf4"
    ).to("cuda")
    expected = bnb.functional.dequantize_4bit(packed.data, packed.quant_state)
    found = widened(_parts(types.SimpleNamespace(weight=packed), "weight"), dtype).view(shape)
    # A scale may be rounded otherwise where it is multiplied and offset at once.
    torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=0)
    assert bool(found.equal(expected)) or float((found != expected).float().mean()) < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(5, 192, 72), (32, 256, 1024), (3, 40, 8)])
def test_the_kernel_of_other_gpus_multiplies_as_a_loop(
    shape: tuple[int, int, int], is_transposed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    groups, width, _ = shape
    counts = torch.randint(0, 300, (groups,), device="cuda")
    counts[1] = 0
    ends = counts.cumsum(0).int()
    rows = torch.randn(int(ends[-1]), width, device="cuda", dtype=dtype)
    weight = torch.randn(shape, device="cuda", dtype=dtype)
    if is_transposed:
        weight = weight.transpose(-2, -1).contiguous().transpose(-2, -1)
    found = grouped._product_at_once(rows, weight, ends)
    torch.testing.assert_close(found, grouped._one_by_one(rows, weight, ends), rtol=0.02, atol=0.1)


@pytest.mark.parametrize("capability", [80, 86, 89, 120])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_the_kernel_is_compiled_for_other_gpus_tensor_cores(capability: int, kind: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(("rows", "weight", "out"), f"*{kind}")
    signature |= dict.fromkeys(("tile_groups", "tile_rows", "ends"), "*i32")
    signature |= dict.fromkeys(("weight_group", "weight_row", "weight_column"), "i32")
    sizes = {"width": 2048, "columns": 1536, "of_rows": 128, "of_columns": 128, "of_width": 32}
    signature |= dict.fromkeys(sizes, "constexpr")
    source = ASTSource(fn=grouped._multiply, signature=signature, constexprs=sizes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 8, "num_stages": 3})
    assert "mma.sync" in compiled.asm["ptx"]
    assert compiled.metadata.shared < 99 * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_of_columns", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_rows_of_8_bits_are_widened_as_on_a_cpu(
    kind: str, is_of_columns: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(5, 192, 72) * 50).to(TYPES[kind])
    scales = torch.rand((5, 1, 72) if is_of_columns else (5, 192, 1))
    found = widened_rows(weight.cuda(), scales.cuda(), dtype)
    assert found.cpu().equal(widened_rows(weight, scales, dtype))


@pytest.fixture(
    params=[
        "qwen3_moe bf16 nf4",
        "gpt_oss bf16 nf4",
        "qwen3_moe fp16 nf4",
        "qwen3_moe bf16 fp8",
        "gpt_oss bf16 int8",
    ]
)
def base(request: pytest.FixtureRequest) -> Iterator[Any]:
    kind, dtype, quantization = request.param.split()
    config = {"model_type": kind, **SIZES, **MIXTURES[kind]}
    spec = ModelSpec(kind, "directory", checked_config(config, label=kind))
    asked = TrialConfig(
        attention=ATTENTION[kind],
        compute_dtype=dtype,
        quantization=quantization,
        upcast_fp32=False,
    )
    device = torch.device("cuda")
    found = build_base(asked, spec=spec, weights="random", device=device, seed=0)
    yield found.model
    found.close()


def in_16_bits(model: Any) -> Any:
    """Return a copy of a model whose experts are transformers' own, of the packed values."""
    wide = copy.deepcopy(model)
    for _, experts in expert_modules(wide):
        for name in weight_names(experts):
            weight = dequantized(experts, name).clone()
            setattr(experts, name, torch.nn.Parameter(weight, requires_grad=False))
        del experts.forward
    wide.set_experts_implementation("eager")
    return wide


def trained(model: Any) -> tuple[float, torch.Tensor]:
    """Return the loss of some tokens, and the gradient of their embeddings."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 1024, (4, 256), device="cuda")
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, labels=tokens).loss
    loss.backward()
    assert embedded.grad is not None
    return float(loss.detach()), embedded.grad


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("is_compiled", [False, True])
def test_they_train_as_16_bit_experts_of_the_same_values(base: Any, is_compiled: bool) -> None:
    wide_loss, wide_gradient = trained(in_16_bits(base))
    if is_compiled:
        compile_each(decoder_layers(base))
    loss, gradient = trained(base)
    assert loss == pytest.approx(wide_loss, abs=2e-3)
    # Rounding to bf16 may send a token to another expert.
    assert error(gradient, wide_gradient) < 0.1


@pytest.mark.parametrize("is_compiled", [False, True])
def test_nothing_decoded_is_kept(base: Any, is_compiled: bool) -> None:
    layers = decoder_layers(base)
    if is_compiled:
        compile_each(layers)
    decoded = 2 * sum(
        dequantized(experts, name).numel()
        for _, experts in expert_modules(base)
        for name in weight_names(experts)
    )
    trained(base)
    shape = 1, 16, 512
    embedded = torch.zeros(shape, device="cuda", dtype=base.dtype, requires_grad=True)
    before = torch.cuda.memory_allocated()
    output = base(inputs_embeds=embedded).logits
    assert torch.cuda.memory_allocated() - before < decoded / 8
    output.sum().backward()


@pytest.mark.parametrize("rank", [4, 16])
def test_adapters_on_them_are_pefts(base: Any, rank: int, tmp_path: Any) -> None:
    wide = in_16_bits(base)
    show_shapes(base)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        init_lora_weights=False,
        target_modules=["o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    torch.manual_seed(2)
    ours = get_peft_model(base, config)
    for name, parameter in ours.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapt_experts(ours)
    ours.save_pretrained(tmp_path)
    theirs = PeftModel.from_pretrained(wide, tmp_path, is_trainable=True)
    losses = [trained(model)[0] for model in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    found = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            assert error(found[name].grad, parameter.grad) < 0.1, name


WHOLE = {**SIZES, "num_hidden_layers": 6}


@pytest.fixture
def spec() -> ModelSpec:
    config = {"model_type": "qwen3_moe", **WHOLE, **MIXTURES["qwen3_moe"]}
    return ModelSpec("qwen3_moe", "directory", checked_config(config, label="qwen3_moe"))


@pytest.mark.parametrize("targets", ["attention", ("q_proj", "gate_up_proj", "down_proj")])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("checkpoint_fraction", [0.0, 1.0])
def test_experts_on_the_host_train_as_if_they_were_here(
    spec: ModelSpec, checkpoint_fraction: float, is_compiled: bool, targets: Any
) -> None:
    found: list[tuple[list[float], torch.Tensor]] = []
    for share in (0.0, 0.5, 1.0):
        asked = TrialConfig(
            micro_batch_size=4,
            upcast_fp32=False,
            offload_fraction=share,
            target_modules=targets,
            checkpoint_fraction=checkpoint_fraction,
            compile=is_compiled,
        )
        device = torch.device("cuda")
        base = build_base(asked, spec=spec, weights="random", device=device, seed=0)
        with attached(base, asked) as attachment:
            gradients: list[torch.Tensor] = []

            def keep(kept: list[torch.Tensor] = gradients, of: Attached = attachment) -> None:
                kept[:] = [p.grad.flatten().clone() for p in of.trainable_parameters()]

            loop = TrainingLoop(attachment, asked, seed=0)
            losses = [loop.step(on_gradients=keep) for _ in range(6)]
            torch.cuda.synchronize()
            found.append((list(map(float, losses)), torch.cat(gradients)))
        base.close()
    for other_losses, other in found[1:]:
        assert other_losses == pytest.approx(found[0][0], abs=2e-3)
        assert error(other, found[0][1]) < 0.05


def test_a_checkpoints_experts_go_to_the_host(spec: ModelSpec, tmp_path: Path) -> None:
    source = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.config))
    source.to(torch.bfloat16).save_pretrained(tmp_path)
    saved = dataclasses.replace(spec, source="directory", path=tmp_path)
    held: list[int] = []
    weights: list[list[torch.Tensor]] = []
    for share in (0.0, 1.0):
        asked = TrialConfig(upcast_fp32=False, offload_fraction=share)
        device = torch.device("cuda")
        before = torch.cuda.memory_allocated()
        base = build_base(asked, spec=saved, weights="pretrained", device=device, seed=0)
        held.append(torch.cuda.memory_allocated() - before)
        found = []
        for _, one in expert_modules(base.model):
            found += [dequantized(one, name).cpu() for name in weight_names(one)]
        weights.append(found)
        if base.offloaded is not None:
            assert held[0] - held[1] == pytest.approx(base.offloaded.bytes * 4 / 6, rel=0.02)
        base.close()
        del base
        gc.collect()
    for one, other in zip(*weights, strict=True):
        assert bool(one.equal(other))
