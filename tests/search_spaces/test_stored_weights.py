"""What a config says that weights are stored in, and which configurations train those."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.checkpoints import SINGLE, check_weights
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.feasibility import refuse_impossible
from qlora_sweep.search_spaces.loading import load_space, parse_space, with_own_settings
from qlora_sweep.search_spaces.models import ModelSpec, checked_config, load_model_spec
from qlora_sweep.search_spaces.quantized import name_of_base
from qlora_sweep.search_spaces.rules import STORED, Setting, own_settings
from tests.search_spaces.small import SMALL, broken, small_model

SIZES: dict[str, Any] = {"model_type": "llama", **SMALL}
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_compute_dtype": "float16",
}
DOUBLE = {**NF4, "bnb_4bit_use_double_quant": True}
OTHERS: dict[str, dict[str, Any]] = {
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "quark": {"quant_method": "quark"},
    "4 bits": {"group_size": 64, "bits": 4},
}


def model(quantization: object, **config: Any) -> ModelSpec:
    return small_model(quantization_config=quantization, **config)


def reason(spec: ModelSpec, **settings: Any) -> str:
    found = broken(settings, spec, (9, 0))
    return "" if found is None else f"{found.rule}: {found.reason}"


@pytest.mark.parametrize(
    ("quantization", "asked"),
    [
        (NF4, {"quantization": "nf4", "double_quant": False}),
        (DOUBLE, {"quantization": "nf4", "double_quant": True}),
        # transformers' own defaults.
        ({"load_in_4bit": True}, {"quantization": "fp4", "double_quant": False}),
    ],
)
def test_four_bits_are_trained_as_they_are_stored_and_as_nothing_else(
    quantization: object, asked: dict[str, Any]
) -> None:
    spec = model(quantization)
    decided = {key: value for key, (value, _) in own_settings(spec).items()}
    assert decided == {**asked, "quantized_fraction": 1.0}
    assert reason(spec, **decided) == ""
    other = {"nf4": "fp4", "fp4": "nf4"}[asked["quantization"]]
    changes: list[dict[str, Any]] = [{"quantization": kind} for kind in (other, "none", "int8")]
    changes += [{"double_quant": not asked["double_quant"]}, {"quantized_fraction": 0.5}]
    changes += [{"sharding": "fsdp", "data_parallel": 2}]
    for change in changes:
        assert reason(spec, **{**decided, **change}).startswith(STORED), change


@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_what_is_stored_in_another_format_is_refused_by_its_name(kind: str) -> None:
    spec = replace(model(OTHERS[kind]), name="org/Model-7B-Instruct-GPTQ-Int4")
    own = parse_space("dimensions: {lora_rank: [8, 16]}", label="own.yaml")
    for asked in (TrialConfig(), own):
        with pytest.raises(InputError, match=kind) as caught:
            refuse_impossible(asked, Setting(spec, "cuda", (9, 0)))
        assert "Model-7B-Instruct" in str(caught.value).replace(spec.name, "")


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
    ],
)
def test_a_file_beside_the_config_says_it_too(tmp_path: Path, file: str, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    assert load_model_spec(str(tmp_path)).stored is None
    (tmp_path / file).write_text("{}")
    why = reason(load_model_spec(str(tmp_path)))
    assert kind in why
    assert file in why


@pytest.mark.parametrize(
    "quantization",
    [None, {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}],
)
def test_what_transformers_loads_in_16_bits_is_left_alone(quantization: object) -> None:
    spec = model(quantization)
    assert spec.stored is None
    assert reason(spec, quantization="fp4") == ""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bnb_4bit_quant_type", "nf5"),
        ("bnb_4bit_use_double_quant", "yes"),
        ("bnb_4bit_compute_dtype", "int8"),
        ("llm_int8_skip_modules", "lm_head"),
        ("llm_int8_skip_modules", ["model.(layers"]),
    ],
)
def test_a_key_that_cannot_be_read_is_named(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        model({**NF4, key: value})


def test_a_preset_takes_what_is_stored_and_a_space_of_ones_own_keeps_what_it_names() -> None:
    spec = model(NF4)
    offered = with_own_settings(load_space("a10"), spec, is_preset=True)
    assert offered.space.values_of("quantization") == ("nf4",)
    assert offered.space.values_of("double_quant") == (False,)
    assert offered.space.values_of("quantized_fraction") == (1.0,)
    assert reason(spec, **offered.space.baseline_config().model_dump()) == ""
    assert len(offered.notes) == 1
    own = parse_space(
        "dimensions: {quantization: [nf4, fp4], lora_rank: [8, 16]}", label="own.yaml"
    )
    kept = with_own_settings(own, spec, is_preset=False, fixed_settings={"double_quant"})
    assert kept.space.values_of("quantization") == ("nf4", "fp4")
    assert "double_quant" not in kept.space.fixed


def test_a_vision_language_checkpoint_says_it_of_its_decoder() -> None:
    whole = {
        "model_type": "gemma3",
        "text_config": {**SIZES, "model_type": "gemma3_text"},
        "quantization_config": {
            **DOUBLE,
            "llm_int8_skip_modules": [
                "lm_head",
                "vision_tower",
                "language_model.lm_head",
                "model.language_model.layers.1.mlp",
                "language_model.model.layers.0.self_attn",
            ],
        },
    }
    stored = ModelSpec("m", "directory", checked_config(whole, label="m")).stored
    assert stored is not None
    assert stored.kind == "nf4"
    assert stored.left is not None
    expected = {"lm_head", "model.layers.1.mlp", "model.layers.0.self_attn", "vision_tower"}
    assert set(stored.left) == expected


def test_the_base_of_a_quantized_copy_is_named_by_config_gpu_or_name(tmp_path: Path) -> None:
    assert name_of_base("unsloth/Llama-3.2-1B-Instruct-unsloth-bnb-4bit") == "Llama-3.2-1B-Instruct"
    assert name_of_base("org/Model-FP8-dynamic") == name_of_base("org/Model-AWQ") == "Model"
    assert name_of_base("org/model-4b") is None
    assert model(NF4, _name_or_path="org/base").unquantized_base == "org/base"
    config = {**SIZES, "quantization_config": OTHERS["awq"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_spec(str(tmp_path)).unquantized_base is None
    (tmp_path / "README.md").write_text("---\nlicense: mit\nbase_model:\n- org/own-7B\n---\n")
    assert load_model_spec(str(tmp_path)).unquantized_base == "org/own-7B"


@pytest.mark.parametrize(
    ("said", "tensors", "words"),
    [
        (NF4, ["weight", "weight.quant_state.bitsandbytes__fp4"], "bitsandbytes fp4"),
        (None, ["weight", "weight.quant_state.bitsandbytes__nf4"], "bitsandbytes nf4"),
        (None, ["q_proj.qweight", "q_proj.qzeros"], "gptq or awq"),
        (None, ["q_proj.weight", "q_proj.weight_scale_inv"], "fp8"),
    ],
)
def test_weights_that_are_stored_as_others_than_the_config_says_are_refused(
    tmp_path: Path, said: object, tensors: list[str], words: str
) -> None:
    numpy = pytest.importorskip("numpy")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "quantization_config": said}))
    save_file({name: numpy.zeros(4, "uint8") for name in tensors}, tmp_path / SINGLE)
    with pytest.raises(InputError, match=words):
        check_weights(load_model_spec(str(tmp_path)))
