"""Experts in 4 and 8 bits beside transformers' own of the values that those stand for."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from qlora_sweep.storage.records import Invalid, Measured
from qlora_sweep.sweep.training.experts import (
    ExpertsAdapter,
    adapt_experts,
    dequantized,
    expert_modules,
    give_8_bits,
    is_packed,
    quantized,
    shape_of,
    show_shapes,
    weight_names,
)
from tests import families
from tests.sweep.training.tiny import BRIEF, measured, outcome_of, tiny_base, tiny_loop

pytestmark = pytest.mark.filterwarnings("default")
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h")
TARGETS: Any = {
    "target_modules": ["o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


def widened(model: Any) -> Any:
    """Return a copy of a model whose experts are transformers' own, of the packed values."""
    wide = copy.deepcopy(model)
    for _, experts in expert_modules(wide):
        for name in weight_names(experts):
            setattr(experts, name, torch.nn.Parameter(dequantized(experts, name).clone()))
        del experts.forward
    return wide


@pytest.fixture(params=[*FAMILIES, "qwen3_moe fp8", "gpt_oss int8"])
def base(request: pytest.FixtureRequest) -> Iterator[Any]:
    kind, _, quantization = request.param.partition(" ")
    config = families.config_of(kind, "attention", quantization or "nf4")
    with tiny_base(config.changed(compute_dtype="fp32"), spec=families.spec_of(kind)) as found:
        for parameter in found.model.parameters():
            if parameter.is_floating_point():
                torch.nn.init.normal_(parameter, std=0.2)
        for _, experts in expert_modules(found.model):
            for name in weight_names(experts):
                packed = getattr(experts, name)
                wide = torch.randn(shape_of(packed)) * 0.3
                if quantization:
                    give_8_bits(experts, name, wide)
                else:
                    setattr(experts, name, quantized(wide, packed, wide.device))
        yield found.model


def loss_and_gradient(model: Any) -> tuple[float, torch.Tensor]:
    tokens = torch.arange(60).reshape(2, 30)
    embedded = model.get_input_embeddings()(tokens).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, labels=tokens).loss
    loss.backward()
    assert embedded.grad is not None
    return float(loss.detach()), embedded.grad


def test_they_train_as_16_bit_experts_of_the_same_values(base: Any) -> None:
    loss, gradient = loss_and_gradient(base)
    wide_loss, wide_gradient = loss_and_gradient(widened(base))
    assert loss == pytest.approx(wide_loss, rel=1e-5)
    torch.testing.assert_close(gradient, wide_gradient, rtol=1e-3, atol=1e-6)


def test_nothing_decoded_is_kept(base: Any) -> None:
    weights = {id(p): p for p in base.parameters() if is_packed(p)}
    least = min(shape_of(weight).numel() for weight in weights.values())
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss_and_gradient(base)
    floating = [tensor for tensor in kept if tensor.is_floating_point() and tensor.itemsize > 1]
    assert weights
    assert max(tensor.numel() for tensor in floating if tensor.ndim != 2) < least


def adapted(model: Any) -> Any:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **TARGETS)
    return get_peft_model(model, config)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    loss_and_gradient(model)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_adapters_on_them_are_pefts(base: Any, tmp_path: Path) -> None:
    wide = widened(base)
    show_shapes(base)
    ours = adapted(base)
    adapt_experts(ours)
    assert any(isinstance(module, ExpertsAdapter) for module in ours.modules())
    ours.save_pretrained(tmp_path)
    theirs: Any = PeftModel.from_pretrained(wide, tmp_path, is_trainable=True)
    found = gradients(ours)
    expected = gradients(theirs)
    assert set(found) == set(expected)
    assert any("experts" in name for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)
    ours.unload()
    bare, _ = loss_and_gradient(base)
    assert bare == pytest.approx(loss_and_gradient(theirs.unload())[0], rel=1e-5)


def test_a_checkpoint_is_read_as_it_would_be_quantized(tmp_path: Path) -> None:
    import dataclasses

    from transformers import AutoConfig, AutoModelForCausalLM

    spec = families.spec_of("qwen3_moe")
    source = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.config))
    source.save_pretrained(tmp_path)
    saved = dataclasses.replace(spec, source="directory", path=tmp_path)
    config = families.config_of("qwen3_moe", "attention", "nf4").changed(quantized_fraction=0.5)
    with tiny_base(config, spec=saved, weights="pretrained") as base:
        assert base.quantized_share == 1.0
        kinds = []
        for (_, experts), (_, wide) in zip(
            expert_modules(base.model), expert_modules(source), strict=True
        ):
            kinds.append(is_packed(experts.down_proj))
            found = dequantized(experts, "down_proj").float()
            assert torch.nn.functional.cosine_similarity(
                found.flatten(), wide.down_proj.flatten(), dim=0
            ) > (0.99 if kinds[-1] else 0.9999)
    assert set(kinds) == {True, False}


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_checkpoint_is_rounded_to_8_bits(tmp_path: Path, kind: str, quantization: str) -> None:
    import dataclasses

    from transformers import AutoConfig, AutoModelForCausalLM

    spec = families.spec_of(kind)
    source: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.config))
    for _, experts in expert_modules(source):
        # Output features of very different sizes: each has its scale.
        features = 2 if experts.is_transposed else 1
        outputs = experts.down_proj.data.movedim(features, -1)
        outputs *= torch.logspace(-3, 1, outputs.shape[-1])
    source.save_pretrained(tmp_path)
    saved = dataclasses.replace(spec, source="directory", path=tmp_path)
    config = families.config_of(kind, "attention", quantization)
    with tiny_base(config, spec=saved, weights="pretrained") as base:
        assert base.quantized_share == 1.0
        for (_, experts), (_, wide) in zip(
            expert_modules(base.model), expert_modules(source), strict=True
        ):
            found = dequantized(experts, "down_proj").float()
            features = 2 if wide.is_transposed else 1
            rows = wide.down_proj.movedim(features, 1).float()  # (experts, out, in)
            errors = (found.movedim(features, 1) - rows).abs().amax(-1) / rows.abs().amax(-1)
            assert float(errors.max()) < 0.045


def test_all_linear_trains_experts_too() -> None:
    config = families.config_of("qwen3_moe", "all-linear", "nf4")
    with tiny_loop(config, spec=families.spec_of("qwen3_moe")) as loop:
        loop.step()
        names = [n for n, p in loop.attached.model.named_parameters() if p.requires_grad]
    assert any(".experts." in name for name in names)


def test_experts_that_are_named_get_adapters_of_the_rank_and_compile() -> None:
    targets = ("q_proj", "gate_up_proj", "down_proj")
    config = families.config_of("gpt_oss", "attention", "nf4")
    config = config.changed(target_modules=targets, lora_rank=4)
    with tiny_loop(config, spec=families.spec_of("gpt_oss")) as loop:
        for layer in loop.attached.layers:
            layer.compile(backend="eager", fullgraph=True)
        loop.step()
        trained = [n for n, p in loop.attached.model.named_parameters() if p.requires_grad]
    layers = 4
    of_experts = [name for name in trained if ".experts." in name]
    assert len(of_experts) == 4 * layers
    assert len(trained) == 6 * layers


@pytest.mark.usefixtures("dynamo")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_compiler_leaves_an_adapters_factors_as_products_take_them() -> None:
    config = families.config_of("qwen3_moe", "attention", "nf4")
    config = config.changed(target_modules=("q_proj", "gate_up_proj", "down_proj"), lora_rank=16)
    with tiny_loop(config, spec=families.spec_of("qwen3_moe")) as loop:
        modules = loop.attached.model.modules()
        adapter = next(module for module in modules if isinstance(module, ExpertsAdapter))
        every = adapter.num_experts
        rows = torch.randn(8 * every, adapter.in_features, dtype=torch.bfloat16)
        ends = torch.arange(8, 8 * every + 1, 8, dtype=torch.int32)
        torch.nn.init.normal_(adapter.lora_B["default"].weight)
        compiled = torch.compile(adapter.product, backend="inductor")(rows, ends)
        assert torch.equal(compiled, adapter.product(rows, ends))


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_trial_proves_experts_in_8_bits(kind: str, quantization: str) -> None:
    config = families.config_of(kind, "attention", quantization)
    found = measured(outcome_of(config, spec=families.spec_of(kind), steps=BRIEF))
    assert found.final_loss == pytest.approx(6.24, abs=0.15)


def test_a_trial_proves_adapters_on_experts() -> None:
    config = families.config_of("gpt_oss", "attention", "nf4")
    config = config.changed(target_modules=("o_proj", "gate_up_proj"))
    outcome = outcome_of(config, spec=families.spec_of("gpt_oss"), steps=BRIEF)
    assert isinstance(outcome, Measured), outcome


def test_a_target_that_peft_would_put_on_experts_is_refused() -> None:
    config = families.config_of("deepseek_v3", "attention", "nf4")
    config = config.changed(target_modules=("o_proj", "gate_proj", "up_proj", "down_proj"))
    outcome = outcome_of(config, spec=families.spec_of("deepseek_v3"), steps=BRIEF)
    assert isinstance(outcome, Invalid)
    assert "in the place of" in str(outcome)


def test_packed_weights_take_no_adapter(base: Any) -> None:
    show_shapes(base)
    model = adapted(base)
    adapt_experts(model)
    adapters = [module for module in model.modules() if isinstance(module, ExpertsAdapter)]
    assert adapters
    for adapter in adapters:
        with pytest.raises(ValueError, match="sweep merge"):
            adapter.merge()
