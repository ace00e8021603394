"""The frozen base, built from random weights or loaded, of the usual decoder and of others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.linears import unquantized
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.rules import Violation, violation
from qlora_sweep.storage.records import Ineffective, Measured
from tests.lazy import lazily
from tests.sweep.training.tiny import (
    BRIEF,
    LAYERS,
    TINY,
    outcome_of,
    tiny_base,
    tiny_config,
    trial_on,
)
from tests.sweep.vision_language import CONFIGS, make_checkpoint

torch = lazily("torch")
families = lazily("tests.families")
models = lazily("qlora_sweep.sweep.training.model")


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_the_decoder_of_a_vision_language_checkpoint_reads_as_the_whole_model_does(
    kind: str, tmp_path: Path
) -> None:
    whole, spec = make_checkpoint(tmp_path, kind), load_model_spec(str(tmp_path))
    rows = torch.arange(3, 50)[None]
    exact = tiny_config(quantization="none", compute_dtype="fp32", attention="eager")
    with tiny_base(exact, spec=spec, weights="pretrained") as base, torch.no_grad():
        found = base.model.eval()(input_ids=rows).logits
        torch.testing.assert_close(found, whole(input_ids=rows).logits)
    with tiny_base(tiny_config(), spec=spec, weights="pretrained") as base:
        assert base.quantized_share == 1.0


def test_a_vision_language_checkpoint_that_lacks_a_tensor_of_its_decoder_is_refused(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint(tmp_path, "llava")
    file = tmp_path / "model.safetensors"
    tensors = {name: t for name, t in load_file(file).items() if "layers.1.mlp.up" not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with (
        pytest.raises(InputError, match=r"'model.layers.1.mlp.up_proj.weight' is not in it"),
        tiny_base(tiny_config(), spec=load_model_spec(str(tmp_path)), weights="pretrained"),
    ):
        pass


@pytest.mark.parametrize(
    ("quantization", "double_quant", "upcast"),
    [("nf4", False, True), ("fp4", True, False), ("none", False, True)],
)
def test_every_matrix_but_the_head_is_in_four_bits_and_the_upcast_widens_all_but_matrices(
    quantization: str, double_quant: bool, upcast: bool
) -> None:
    import bitsandbytes as bnb

    config = tiny_config(quantization=quantization, double_quant=double_quant, upcast_fp32=upcast)
    with tiny_base(config) as base:
        model: Any = base.model
        layers: list[Any] = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
        matrix = model.model.layers[0].self_attn.q_proj.weight.dtype
        if quantization == "none":
            assert (layers, matrix) == ([], torch.bfloat16)
        else:
            assert len(layers) == LAYERS * 7
            assert {layer.weight.dtype for layer in layers} == {matrix} == {torch.uint8}
            for layer in layers:
                state = layer.weight.quant_state
                assert (state.quant_type, state.nested) == (quantization, double_quant)
        wide = torch.float32 if upcast else torch.bfloat16
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        assert type(head) is torch.nn.Linear
        assert {m.weight.dtype for m in (head, embeddings, model.model.norm)} == {wide}


def test_a_share_of_the_layers_is_in_four_bits_and_the_others_in_the_compute_dtype() -> None:
    # Twelve layers: the name of layer 1 is the start of that of layer 10.
    spec = dataclasses.replace(TINY, config={**TINY.config, "num_hidden_layers": 12})
    config = tiny_config(quantized_fraction=0.75)
    with tiny_base(config, spec=spec) as base:
        kinds = [layer.mlp.up_proj.weight.dtype for layer in models.decoder_layers(base.model)]
        assert base.quantized_share == 1.0
    packed = {index for index, kind in enumerate(kinds) if kind == torch.uint8}
    assert packed == config.quantized_layers(12) == {0, 1, 2, 4, 5, 6, 8, 9, 10}
    assert {kinds[index] for index in (3, 7, 11)} == {torch.bfloat16}


def tensors(model: Any) -> dict[str, Any]:
    return {name: (p.dtype, p.shape) for name, p in model.named_parameters()}


def test_a_base_of_random_weights_has_the_bytes_of_a_loaded_one_and_that_the_files_weights(
    tmp_path: Path,
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    source = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY.config))
    source.save_pretrained(tmp_path)
    saved = dataclasses.replace(TINY, source="directory", path=tmp_path)
    config = tiny_config(quantized_fraction=0.5)
    with (
        tiny_base(config, spec=saved, weights="pretrained") as loaded,
        tiny_base(config) as random,
    ):
        assert tensors(loaded.model) == tensors(random.model)
        found = [*random.model.parameters(), *random.model.buffers()]
        # Nothing is left on the meta device, and the rotary buffers are right.
        assert {tensor.device.type for tensor in found} == {"cpu"}
        rotary = random.model.model.rotary_emb.inv_freq
        assert torch.equal(rotary, source.model.rotary_emb.inv_freq)
    exact = tiny_config(quantization="none", double_quant=False, compute_dtype="fp32")
    with tiny_base(exact, spec=saved, weights="pretrained") as base:
        read = base.model.model.layers[1].mlp.up_proj.weight
        assert torch.equal(read, source.model.layers[1].mlp.up_proj.weight)


def skeleton_of(family: str, **changes: Any) -> tuple[ModelSpec, Any]:
    spec = families.spec_of(family)
    spec = ModelSpec(spec.name, spec.source, {**spec.config, **changes})
    return spec, models.skeleton(families.config_of(family, "attention"), spec=spec)


@pytest.mark.parametrize(
    ("family", "changes", "is_whole"),
    [
        ("llama4_text", {}, False),
        ("qwen2_moe", {"mlp_only_layers": [0]}, True),
        *((family, {}, True) for family in ("llama", "gpt2", "mixtral", "gpt_oss", "phimoe")),
    ],
)
def test_what_stays_in_16_bits_follows_from_the_config(
    family: str, changes: dict[str, Any], is_whole: bool
) -> None:
    spec, model = skeleton_of(family, **changes)
    assert (unquantized(spec) is None) is is_whole
    assert (models.quantized_share(model, TrialConfig()) >= 0.95) is is_whole


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_weight_that_the_models_own_code_reads_is_not_packed(quantization: str) -> None:
    """Gemma 3n's coefficients, which transformers clamps in training."""
    config = families.config_of("gemma3n_text", "all-linear", quantization)
    with tiny_base(config, spec=families.spec_of("gemma3n_text")) as base:
        altup: Any = base.model.model.layers[0].altup
        kept = {type(altup.prediction_coefs), type(altup.correction_coefs)}
        assert kept == {torch.nn.Linear}
        assert type(altup.modality_router) is not torch.nn.Linear
        assert isinstance(trial_on(base, config, steps=BRIEF).run(), Measured)


def test_a_base_that_stays_in_16_bits_is_not_a_4_bit_one() -> None:
    """As for a model type that no rule knows: the worker finds out."""
    config = families.config_of("llama4_text", "attention")
    outcome = outcome_of(config, spec=families.spec_of("llama4_text"), steps=BRIEF)
    assert isinstance(outcome, Ineffective)
    assert outcome.setting == "quantization"
    assert "27.2 %" in outcome.detail


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_a_longer_list_of_experts_is_not_taken_for_the_decoder_layers(family: str) -> None:
    _, model = skeleton_of(family)
    layers = models.decoder_layers(model)
    layers[0].experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(9))
    assert models.decoder_layers(model) == layers
    assert len(layers) == 4


def test_the_upcast_leaves_experts_in_16_bits() -> None:
    config = families.config_of("mixtral", "attention", "none")
    with tiny_base(config, spec=families.spec_of("mixtral")) as base:
        layer: Any = base.model.model.layers[0]
        assert layer.mlp.experts.gate_up_proj.dtype is torch.bfloat16
        assert layer.input_layernorm.weight.dtype is torch.float32


@pytest.mark.parametrize("family", ["qwen3_next", "apertus", "falcon_h1"])
def test_weights_that_only_a_constructor_sets_are_finite(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.nn.Module.to_empty

    def of_other_programs(self: Any, *, device: Any, recurse: bool = True) -> Any:
        original(self, device=device, recurse=recurse)
        for tensor in (*self.parameters(recurse=recurse), *self.buffers(recurse=recurse)):
            if tensor.is_floating_point():
                tensor.data.fill_(float("nan"))
        return self

    monkeypatch.setattr(torch.nn.Module, "to_empty", of_other_programs)
    config = families.config_of(family, "attention", "none")
    with tiny_base(config, spec=families.spec_of(family)) as base:
        left = [n for n, p in base.model.state_dict().items() if not torch.isfinite(p).all()]
    assert left == []


# PEFT and torch warn of what fused experts and scripted functions bring with them.
WARNED = pytest.mark.filterwarnings("default")
RULED = Measured | Violation | Ineffective


@pytest.mark.parametrize(
    ("family", "targets", "expected"),
    [
        *((family, "attention", Measured) for family in ("gpt_neox", "gpt2", "mixtral")),
        # Falcon's one head of keys and values is none that torch's fused kernels take.
        ("falcon", "attention", Ineffective),
        pytest.param("deepseek_v3", "all-linear", RULED, marks=WARNED),
        pytest.param("gpt_bigcode", "all-linear", RULED, marks=WARNED),
        pytest.param("jamba", "all-linear", RULED, marks=[WARNED, pytest.mark.integration]),
        pytest.param("qwen3_next", "attention", RULED, marks=[WARNED, pytest.mark.integration]),
    ],
)
def test_a_family_trains_or_is_refused_by_a_rule(family: str, targets: str, expected: Any) -> None:
    """The rest of the families takes minutes: `docs/models.md` has what came of them."""
    spec = families.spec_of(family)
    quantization = "none" if unquantized(spec) is not None else "nf4"
    config = families.config_of(family, targets, quantization)
    broken = violation(config, model=spec, compute_capability=None, device="cpu")
    outcome = broken or outcome_of(config, spec=spec, steps=BRIEF)
    assert isinstance(outcome, expected)
    if family == "falcon":
        assert "use attention eager" in outcome.detail
