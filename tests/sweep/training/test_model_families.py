"""Decoders of other families than the usual: where their layers are, and what is in 4 bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.linears import unquantized
from search_spaces.models import ModelSpec
from search_spaces.rules import WITHOUT_SDPA, Violation, violation
from storage.records import Ineffective, Measured
from sweep.training.model import BaseModel, build_base, decoder_layers, quantized_share, skeleton
from tests.bench.try_models import config_of, spec_of
from tests.sweep.training.tiny import BRIEF, trial_on

CPU = torch.device("cpu")


@contextlib.contextmanager
def base_of(spec: ModelSpec, config: TrialConfig) -> Iterator[BaseModel]:
    base = build_base(config, spec=spec, weights="random", device=CPU, seed=0)
    try:
        yield base
    finally:
        base.close()


def skeleton_of(family: str, **changes: Any) -> tuple[ModelSpec, Any]:
    spec = spec_of(family)
    spec = ModelSpec(spec.name, spec.source, {**spec.config, **changes})
    key = config_of(family, "attention")
    return spec, skeleton(key, spec=spec)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", {"LlamaDecoderLayer"}),
        ("gpt2", {"GPT2Block"}),
        ("gpt_neox", {"GPTNeoXLayer"}),
        ("mixtral", {"MixtralDecoderLayer"}),
        ("opt", {"OPTDecoderLayer"}),
        # A hybrid has layers of two kinds in one list.
        ("jamba", {"JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"}),
    ],
)
def test_decoder_layers_are_found_whatever_they_are(family: str, kinds: set[str]) -> None:
    changes = {"attn_layer_period": 2, "attn_layer_offset": 1} if family == "jamba" else {}
    _, model = skeleton_of(family, **changes)
    layers = decoder_layers(model)
    assert len(layers) == 4
    assert {type(layer).__name__ for layer in layers} == kinds


def test_a_longer_list_of_experts_is_not_taken_for_the_layers() -> None:
    _, model = skeleton_of("llama")
    model.model.layers[0].mlp.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(9))
    assert len(decoder_layers(model)) == 4


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {}),
        ("qwen2_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {}),
        ("olmoe", {}),
        ("gpt_oss", {}),
        ("granitemoe", {}),
        ("phimoe", {}),
    ],
)
def test_experts_that_stay_in_16_bits_follow_from_the_config(
    family: str, changes: dict[str, Any]
) -> None:
    spec, model = skeleton_of(family, **changes)
    assert unquantized(spec) is not None
    assert quantized_share(model, TrialConfig()) < 0.95


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "phi3", "falcon_h1"])
def test_a_decoder_of_linear_layers_is_in_4_bits(family: str) -> None:
    spec, model = skeleton_of(family)
    assert unquantized(spec) is None
    assert quantized_share(model, TrialConfig()) >= 0.95


def test_a_base_that_stays_in_16_bits_is_not_a_4_bit_one() -> None:
    """As for a model type that no rule knows: the worker finds out."""
    config = config_of("mixtral", "attention")
    with base_of(spec_of("mixtral"), config) as base:
        outcome = trial_on(base, config, steps=BRIEF).run()
    assert isinstance(outcome, Ineffective)
    assert outcome.knob == "quantization"
    assert outcome.detail.startswith("only 11.1 % of the matrices' weights are in 4 bits")


def test_a_measurement_keeps_the_share_in_4_bits() -> None:
    for quantization, share in (("nf4", 1.0), ("none", None)):
        config = config_of("llama", "attention", quantization)
        with base_of(spec_of("llama"), config) as base:
            outcome = trial_on(base, config, steps=BRIEF).run()
        assert isinstance(outcome, Measured)
        assert outcome.measurement.quantized_share == share


def test_the_upcast_leaves_experts_in_16_bits() -> None:
    config = config_of("mixtral", "attention", "none")
    with base_of(spec_of("mixtral"), config) as base:
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
    config = config_of(family, "attention", "none")
    with base_of(spec_of(family), config) as base:
        left = [n for n, p in base.model.state_dict().items() if not torch.isfinite(p).all()]
    assert left == []


def test_a_config_of_several_models_is_refused_by_the_name_of_its_decoder() -> None:
    spec = ModelSpec("m", "directory", {**spec_of("llama").config, "model_type": "gemma3"})
    with pytest.raises(InputError, match="model_type 'gemma3_text'"):
        skeleton(TrialConfig(), spec=spec)


def trained(family: str, targets: str) -> object:
    quantization = "none" if unquantized(spec_of(family)) is not None else "nf4"
    config = config_of(family, targets, quantization)
    assert config.attention == ("eager" if family in WITHOUT_SDPA else "sdpa")
    broken = violation(config, model=spec_of(family), compute_capability=None, device="cpu")
    if broken is not None:
        return broken
    with base_of(spec_of(family), config) as base:
        return trial_on(base, config, steps=BRIEF).run()


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "phi", "opt", "mixtral"])
def test_families_with_other_names_train_on_the_default_targets(family: str) -> None:
    assert isinstance(trained(family, "attention"), Measured)


def test_a_family_whose_sdpa_is_no_fused_kernel_is_told_so() -> None:
    """Falcon's one head of keys and values is none that torch's fused kernels take."""
    outcome = trained("falcon", "attention")
    assert isinstance(outcome, Ineffective)
    assert "use attention eager" in outcome.detail


# PEFT and torch warn of what fused experts and scripted functions bring with them.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("targets", ["attention", "all-linear"])
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "glm4_moe", "gpt_bigcode", "jamba", "olmoe", "qwen3_next"]
)
def test_a_family_trains_or_is_refused_by_a_rule(family: str, targets: str) -> None:
    """The rest of the families, which take minutes, are ``tests/bench/try_models.py``'s."""
    outcome = trained(family, targets)
    assert isinstance(outcome, Measured | Violation | Ineffective)
