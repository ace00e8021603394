"""A study's winner in the words of a script and of four trainers: nothing lost, nothing broken."""

from __future__ import annotations

import ast
import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.config import CONFIG_KEYS, TrialConfig, canonical
from search_spaces.errors import InputError, NothingFits
from search_spaces.models import ModelSpec
from sweep.export.formats import endings_of, export, exported, format_names
from tests.storage.builders import confirmed
from tests.sweep.export.studies import HOSTILE, MODEL, a_measurement, a_study, some_texts

TRAINERS = ("axolotl", "llama-factory", "trl")
BASE = TrialConfig(upcast_fp32=False, checkpoint_fraction=0.0)
OTHER: dict[str, Any] = {
    "lora_rank": 64,
    "lora_alpha": 24.5,
    "lora_dropout": 0.05,
    "target_modules": "all-linear",
    "micro_batch_size": 10,
    "seq_len": 2048,
    "effective_batch_size": 16,
    "compute_dtype": "fp16",
    "quantization": "fp4",
    "double_quant": False,
    "quantized_fraction": 0.5,
    "adapter_dtype": "bf16",
    "checkpoint_fraction": 0.3,
    "upcast_fp32": True,
    "kernels": "fused-loss",
    "attention": "flash_attention_2",
    "optimizer": "paged_adamw_8bit",
    "compile": True,
    "expandable_segments": True,
    "packing": "packed",
    "learning_rate": 1e-3,
    "data_parallel": 2,
    "sharding": "fsdp",
}
EIGHT_BITS: dict[str, Any] = {"compute_dtype": "fp8", "quantization": "fp8"}
CONFIGS = [
    TrialConfig(),
    TrialConfig(compute_dtype="int8", upcast_fp32=False),
    TrialConfig(**EIGHT_BITS),
    *(BASE.model_copy(update={key: value}) for key, value in OTHER.items()),
    TrialConfig(quantization="none", kernels="liger", compute_dtype="fp32", attention="eager"),
]


def read(text: str, *, format: str) -> dict[str, Any]:
    """Return what a file says, by the names it says it with."""
    if format in ("json", "peft"):
        return dict(json.loads(text))
    if format == "unsloth":
        compile(text, "unsloth.py", "exec")
        return {
            keyword.arg: ast.literal_eval(keyword.value)
            for call in ast.walk(ast.parse(text))
            if isinstance(call, ast.Call)
            for keyword in call.keywords
            if keyword.arg and isinstance(keyword.value, ast.Constant | ast.List | ast.Dict)
        }
    if format != "script":
        return dict(yaml.safe_load(text))
    return {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and statement.targets[0].id not in ("COMPUTE_DTYPE", "ADAPTER_DTYPE")
    }


def said(text: str) -> str:
    """Return the comment that a file opens with, as one line."""
    lines = text.splitlines()
    return " ".join(line.lstrip("#! ") for line in lines if line.startswith("#"))


@pytest.mark.parametrize("format", format_names())
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.changes_from(BASE)))
def test_every_configuration_makes_a_file_that_parses(config: TrialConfig, format: str) -> None:
    assert read(export(a_study(config), format=format), format=format)


@pytest.mark.parametrize("format", format_names())
@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_no_knob_is_silently_dropped(key: str, format: str) -> None:
    texts = some_texts() if key == "packing" else None
    changed = BASE.model_copy(update={key: OTHER[key]})
    written = export(a_study(changed, texts=texts), format=format)
    assert written != export(a_study(BASE, texts=texts), format=format)


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        (
            "axolotl",
            {
                "adapter": "qlora",
                "load_in_4bit": True,
                "bnb_config_kwargs": {
                    "bnb_4bit_quant_type": "fp4",
                    "bnb_4bit_use_double_quant": False,
                },
                "lora_r": 64,
                "lora_alpha": 128,
                "lora_dropout": 0.05,
                "lora_target_modules": ["q_proj", "v_proj"],
                "sequence_len": 2048,
                "micro_batch_size": 2,
                "gradient_accumulation_steps": 8,
                "bf16": False,
                "fp16": True,
                "attn_implementation": "flash_attention_2",
                "sample_packing": True,
                "gradient_checkpointing": True,
                "optimizer": "paged_adamw_8bit",
                "liger_fused_linear_cross_entropy": True,
                "liger_rms_norm": True,
            },
        ),
        (
            "llama-factory",
            {
                "quantization_bit": 4,
                "quantization_type": "fp4",
                "double_quantization": False,
                "lora_rank": 64,
                "lora_alpha": 128,
                "lora_dropout": 0.05,
                "lora_target": "q_proj,v_proj",
                "cutoff_len": 2048,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 8,
                "bf16": False,
                "fp16": True,
                "flash_attn": "fa2",
                "disable_gradient_checkpointing": False,
                "optim": "paged_adamw_8bit",
                "enable_liger_kernel": True,
                "upcast_layernorm": False,
            },
        ),
        (
            "trl",
            {
                "load_in_4bit": True,
                "bnb_4bit_quant_type": "fp4",
                "use_bnb_nested_quant": False,
                "dtype": "float16",
                "lora_r": 64,
                "lora_alpha": 128,
                "lora_dropout": 0.05,
                "lora_target_modules": ["q_proj", "v_proj"],
                "max_length": 2048,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 8,
                "bf16": False,
                "fp16": True,
                "attn_implementation": "flash_attention_2",
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": False},
                "optim": "paged_adamw_8bit",
                "use_liger_kernel": True,
            },
        ),
        (
            "unsloth",
            {
                "load_in_4bit": True,
                "use_exact_model_name": True,
                "max_seq_length": 2048,
                "r": 64,
                "lora_alpha": 128,
                "lora_dropout": 0.05,
                "target_modules": ["q_proj", "v_proj"],
                "use_gradient_checkpointing": True,
                "max_length": 2048,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 8,
                "bf16": False,
                "fp16": True,
                "optim": "paged_adamw_8bit",
                "packing_strategy": "wrapped",
                "warmup_steps": 0,
            },
        ),
        (
            "script",
            {
                "LORA_RANK": 64,
                "LORA_ALPHA": 128,
                "LORA_DROPOUT": 0.05,
                "TARGET_MODULES": ["q_proj", "v_proj"],
                "MICRO_BATCH_SIZE": 2,
                "ACCUMULATION_STEPS": 8,
                "SEQ_LEN": 2048,
                "CHECKPOINT_FRACTION": 1.0,
                "MEASURED_TRAINABLE_PARAMETERS": 13_631_488,
                "MEASURED_TOKENS_PER_SECOND": 16_800.0,
            },
        ),
    ],
)
def test_what_a_format_can_express_is_what_was_measured(
    format: str, expected: dict[str, Any]
) -> None:
    config = TrialConfig(
        lora_rank=64,
        lora_dropout=0.05,
        target_modules="qv",
        micro_batch_size=2,
        effective_batch_size=16,
        seq_len=2048,
        compute_dtype="fp16",
        quantization="fp4",
        double_quant=False,
        upcast_fp32=False,
        kernels="liger",
        attention="flash_attention_2",
        optimizer="paged_adamw_8bit",
    )
    values = read(export(a_study(config), format=format), format=format)
    assert {key: values[key] for key in expected} == expected


def test_the_document_holds_the_configuration_and_the_measurement_whole() -> None:
    config = TrialConfig(lora_rank=64, target_modules=("q_proj", "up_proj"))
    document = json.loads(export(a_study(config), format="json"))
    resolved = canonical(config).model_copy(update={"target_modules": ("q_proj", "up_proj")})
    assert TrialConfig.model_validate(document["config"]) == resolved
    assert {**document["measurement"]} == a_measurement().model_dump(mode="json")
    assert document["gpu"]["emulated_on"] == "NVIDIA H200"


@pytest.mark.parametrize("format", ["script", *TRAINERS])
@pytest.mark.parametrize(
    ("emulated_on", "device"),
    [
        ("NVIDIA H200", "Measured on NVIDIA H200 with its memory capped to the budget of a10"),
        (None, "Measured on NVIDIA A10."),
    ],
)
def test_the_header_says_what_was_measured_and_on_what(
    format: str, emulated_on: str | None, device: str
) -> None:
    header = said(export(a_study(emulated_on=emulated_on), format=format))
    for fact in ("16,800 tokens/s", "20.00 GiB", "13,631,488", "trial 17", "torch 2.13.0", device):
        assert fact in header
    assert "trial 17, not confirmed: sweep confirm a10-mistral." in header
    assert "mistral-7b-v0.3, nf4 base, bf16 compute" in header


@pytest.mark.parametrize("format", ["script", *TRAINERS])
def test_the_header_says_that_a_winner_is_confirmed(format: str) -> None:
    study = a_study()
    again = replace(study, confirmations=confirmed(*study.records))
    assert "trial 17, confirmed (2 runs)." in said(export(again, format=format))
    assert json.loads(export(again, format="json"))["confirmed"] is True
    assert json.loads(export(study, format="json"))["confirmed"] is False


@pytest.mark.parametrize(
    ("format", "change", "named"),
    [
        ("axolotl", {"upcast_fp32": True}, "upcast_fp32"),
        ("axolotl", {"checkpoint_fraction": 0.5}, "checkpoint_fraction 0.5"),
        ("axolotl", {"compile": True}, "it may not fit"),
        ("axolotl", {"lora_alpha": 24.5}, "lora_alpha 24.5"),
        ("axolotl", {"attention": "sdpa"}, "attention kept inside each of them"),
        ("trl", {"kernels": "hf"}, "in chunks by a head of their own"),
        ("trl", {"kernels": "fused-loss"}, "kernels fused-loss"),
        ("trl", {"kernels": "liger"}, "it refuses Liger's fused loss"),
        ("llama-factory", {"upcast_fp32": True}, "upcast_fp32"),
        ("llama-factory", {"kernels": "fused-loss"}, "kernels fused-loss"),
        ("llama-factory", {"compute_dtype": "fp32"}, "compute_dtype fp32"),
        ("llama-factory", {"checkpoint_fraction": 0.5}, "checkpoint_fraction 0.5"),
        ("llama-factory", {"compile": True}, "it may not fit"),
        ("trl", {"upcast_fp32": True}, "upcast_fp32"),
        ("trl", {"quantization": "nf4"}, "keeps them in bf16"),
        ("trl", {"quantization": "none", "adapter_dtype": "bf16"}, "keeps them in fp32"),
        ("axolotl", {"adapter_dtype": "bf16"}, "adapter_dtype bf16"),
        ("llama-factory", {"adapter_dtype": "bf16"}, "adapter_dtype bf16"),
        ("trl", {"checkpoint_fraction": 0.3}, "checkpoint_fraction 0.3"),
        *((name, {"quantized_fraction": 0.5}, "quantized_fraction 0.5") for name in TRAINERS),
        ("trl", {"compile": True}, "it may not fit"),
        *((name, EIGHT_BITS, "no 8-bit products forward and backward") for name in TRAINERS),
        *((name, EIGHT_BITS, "LLM.int8() in place of") for name in TRAINERS),
        ("llama-factory", {"compute_dtype": "int8"}, "no 8-bit products forward and backward"),
        ("unsloth", EIGHT_BITS, "for the gradient it decodes the weights"),
        ("unsloth", {"compute_dtype": "int8"}, "no 8-bit products forward and backward"),
        ("unsloth", {"quantization": "int8"}, "LLM.int8() in place of"),
        ("unsloth", {"double_quant": False}, "double quantization alone"),
        ("unsloth", {"quantization": "fp4"}, "double quantization alone"),
        ("unsloth", {"kernels": "liger"}, "kernels liger"),
        ("unsloth", {"upcast_fp32": True}, "upcast_fp32"),
        ("unsloth", {"adapter_dtype": "bf16"}, "adapter_dtype bf16"),
        ("unsloth", {"checkpoint_fraction": 0.5}, "checkpoint_fraction 0.5"),
        ("unsloth", {"quantized_fraction": 0.5}, "quantized_fraction 0.5"),
    ],
)
def test_what_a_trainer_cannot_express_is_named(
    format: str, change: dict[str, Any], named: str
) -> None:
    assert named in said(export(a_study(BASE.model_copy(update=change)), format=format))


@pytest.mark.parametrize(
    ("quantization", "switch"),
    [
        ("nf4", "load_in_4bit"),
        ("fp8", "load_in_fp8"),
        ("int8", "load_in_8bit"),
        ("none", "load_in_16bit"),
    ],
)
def test_unsloth_loads_the_base_that_is_nearest(quantization: str, switch: str) -> None:
    config = BASE.model_copy(update={"quantization": quantization})
    values = read(export(a_study(config), format="unsloth"), format="unsloth")
    assert [key for key in values if key.startswith("load_in_") and values[key]] == [switch]
    # Asked for a name as it is, it would not make FP8 of it.
    assert values["use_exact_model_name"] is (quantization != "fp8")


@pytest.mark.parametrize("kind", ["text", "messages", "prompt-completion"])
def test_unsloth_trains_on_the_texts_of_a_study(kind: Any) -> None:
    study = a_study(TrialConfig(packing="packed"), texts=some_texts(kind, completions_only=True))
    text = export(study, format="unsloth")
    values = read(text, format="unsloth")
    assert values["packing_strategy"] == "bfd"
    assert 'load_dataset("json", data_files=typed.data, split="train")' in text
    assert ("apply_chat_template" in text) is (kind == "messages")
    assert ("tokenizer.eos_token" in text) is (kind == "text")
    assert values.get("completion_only_loss") is (True if kind == "prompt-completion" else None)
    assert ("every token carries loss" in said(text)) is (kind == "messages")


@pytest.mark.parametrize(("gpu", "dtype"), [("a10", "bf16"), ("t4", "fp16")])
@pytest.mark.parametrize("format", [*TRAINERS, "unsloth"])
def test_what_is_not_in_8_bits_is_in_the_types_that_the_gpu_has(
    gpu: str, dtype: str, format: str
) -> None:
    study = a_study(TrialConfig(compute_dtype="int8", upcast_fp32=False))
    target = study.definition.target.model_copy(update={"gpu": gpu})
    study = replace(study, definition=study.definition.model_copy(update={"target": target}))
    values = read(export(study, format=format), format=format)
    assert (values["bf16"], values["fp16"]) == (dtype == "bf16", dtype == "fp16")


@pytest.mark.parametrize(
    ("format", "is_expandable", "command"),
    [
        ("axolotl", True, "PYTORCH_ALLOC_CONF=expandable_segments:True axolotl train FILE"),
        # Where nothing is said, it makes them expandable by itself.
        ("axolotl", False, "PYTORCH_ALLOC_CONF=expandable_segments:False axolotl train FILE"),
        ("trl", True, "PYTORCH_ALLOC_CONF=expandable_segments:True trl sft --config FILE"),
        ("trl", False, "For TRL: trl sft --config FILE"),
        ("llama-factory", True, "expandable_segments:True llamafactory-cli train FILE"),
        ("llama-factory", False, "For LLaMA-Factory: llamafactory-cli train FILE"),
    ],
)
def test_a_trainer_is_started_with_the_measured_allocator(
    format: str, is_expandable: bool, command: str
) -> None:
    config = BASE.model_copy(update={"expandable_segments": is_expandable})
    assert command in said(export(a_study(config), format=format))


@pytest.mark.parametrize("is_expandable", [True, False])
def test_the_script_sets_the_allocator_before_it_imports_torch(is_expandable: bool) -> None:
    config = BASE.model_copy(update={"expandable_segments": is_expandable})
    text = export(a_study(config), format="script")
    line = f'os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:{is_expandable}"'
    assert 0 < text.index(line) < text.index("\nimport torch\n")


@pytest.mark.parametrize(("kernels", "is_on"), [("liger", "True"), ("fused-loss", "False")])
def test_the_script_names_every_kernel_that_was_switched(kernels: str, is_on: str) -> None:
    # One that is not named is on by default: Gemma's GEGLU would be patched.
    text = export(a_study(BASE.model_copy(update={"kernels": kernels})), format="script")
    for kernel in ("rms_norm", "swiglu", "geglu", "rope"):
        assert f'"{kernel}": {is_on},' in text


@pytest.mark.parametrize("format", TRAINERS)
def test_an_exported_step_waits_for_the_card_no_more_than_the_measured_one(format: str) -> None:
    values = read(export(a_study(), format=format), format=format)
    assert values["accelerator_config"] == {"non_blocking": True}
    assert values["logging_steps"] > 1
    # axolotl has no such option.
    assert format == "axolotl" or values["logging_nan_inf_filter"] is False


def test_a_trainer_that_has_every_knob_is_said_to_have_it() -> None:
    assert "nothing known" in said(export(a_study(BASE), format="llama-factory"))


@pytest.mark.parametrize(
    ("fraction", "every"), [(1.0, None), (0.5, 2), (0.25, 4), (1 / 32, 32), (0.3, None)]
)
def test_trl_recomputes_the_measured_layers_where_they_are_every_nth(
    fraction: float, every: int | None
) -> None:
    config = BASE.model_copy(update={"checkpoint_fraction": fraction})
    values = read(export(a_study(config), format="trl"), format="trl")
    assert values["gradient_checkpointing"] is True
    assert values["gradient_checkpointing_kwargs"].get("every_n_layers") == every


@pytest.mark.parametrize(
    ("format", "key", "value"),
    [
        ("axolotl", "gradient_checkpointing", False),
        ("llama-factory", "disable_gradient_checkpointing", True),
        ("trl", "gradient_checkpointing", False),
    ],
)
def test_a_share_too_small_for_one_layer_recomputes_none(
    format: str, key: str, value: bool
) -> None:
    config = BASE.model_copy(update={"checkpoint_fraction": 0.01})
    assert read(export(a_study(config), format=format), format=format)[key] is value


@pytest.mark.parametrize(
    ("format", "key", "every"),
    [
        ("axolotl", "lora_target_linear", True),
        ("llama-factory", "lora_target", "all"),
        ("trl", "lora_target_modules", ["all-linear"]),
        ("peft", "target_modules", "all-linear"),
        ("script", "TARGET_MODULES", "all-linear"),
    ],
)
def test_all_linear_layers_are_named_or_left_to_peft_where_nobody_knows_them(
    format: str, key: str, every: Any
) -> None:
    config = TrialConfig(target_modules="all-linear")
    known = read(export(a_study(config), format=format), format=format)
    names = known[key.replace("_linear", "_modules")]
    layers = names.split(",") if isinstance(names, str) else names
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    assert set(layers) == {*attention, *mlp}
    odd = replace(MODEL, config={**MODEL.config, "model_type": "odd"})
    assert read(export(a_study(config, model=odd), format=format), format=format)[key] == every


@pytest.mark.parametrize("format", format_names())
def test_names_that_try_to_break_out_stay_data(format: str) -> None:
    model = dataclasses.replace(MODEL, name=HOSTILE, source="directory", path=Path(HOSTILE))
    config = TrialConfig(target_modules=(HOSTILE, "q_proj"))
    study = a_study(
        config,
        measurement=a_measurement(flags=(HOSTILE,)),
        name=HOSTILE,
        model=model,
        emulated_on=HOSTILE,
    )
    text = export(study, format=format)
    text.encode("utf-8")
    values = read(text, format=format)
    modules = {
        "script": lambda: values["TARGET_MODULES"],
        "json": lambda: values["config"]["target_modules"],
        "yaml": lambda: values["config"]["target_modules"],
        "peft": lambda: values["target_modules"],
        "axolotl": lambda: values["lora_target_modules"],
        "llama-factory": lambda: [values["lora_target"].removeprefix("q_proj,"), "q_proj"],
        "trl": lambda: values["lora_target_modules"],
        "unsloth": lambda: values["target_modules"],
    }[format]()
    assert set(modules) == {HOSTILE, "q_proj"}
    if format in ("script", "unsloth"):
        nodes = list(ast.walk(ast.parse(text)))
        assert HOSTILE in [node.value for node in nodes if isinstance(node, ast.Constant)]
        assert "__import__" not in [node.id for node in nodes if isinstance(node, ast.Name)]


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        (MODEL, "path/or/hub-id/of/mistral-7b-v0.3"),
        (ModelSpec("org/model", "hub", MODEL.config, Path("/cache/x")), "org/model"),
        (ModelSpec("mine", "directory", MODEL.config, Path("/data/mine")), "/data/mine"),
    ],
)
def test_a_file_names_the_weights_as_far_as_they_are_known(model: ModelSpec, weights: str) -> None:
    for format, key in (("axolotl", "base_model"), ("trl", "model_name_or_path")):
        assert read(export(a_study(model=model), format=format), format=format)[key] == weights


@pytest.mark.parametrize("format", format_names())
def test_a_study_where_nothing_fits_has_nothing_to_export(format: str) -> None:
    study = dataclasses.replace(a_study(), records=())
    with pytest.raises(NothingFits, match="has nothing to export: no trial") as caught:
        export(study, format=format)
    assert caught.value.exit_code == 1


def test_of_an_unknown_format_all_that_there_are_are_named() -> None:
    with pytest.raises(InputError, match="unknown format 'zzz'; known are") as refused:
        endings_of("zzz")
    assert all(name in str(refused.value) for name in (*format_names(), "surface"))


PROVENANCE = ("a10-mistral", "17", "2026-11-21", "580.65.06", "0.1.0", "0123abcd", "2.13.0", "A10")


@pytest.mark.parametrize("format", format_names())
def test_every_file_says_where_it_comes_from(format: str) -> None:
    text = export(a_study(emulated_on=None), format=format)
    assert [fact for fact in PROVENANCE if fact not in text] == []


@pytest.mark.parametrize("format", ["json", "yaml", "peft"])
def test_provenance_is_a_value_of_its_own_in_documents(format: str) -> None:
    values = read(export(a_study(), format=format), format=format)
    provenance = values["auto_mapping"]["provenance"] if format == "peft" else values["provenance"]
    assert (provenance["study"], provenance["trial"]) == ("a10-mistral", 17)
    assert provenance["sweep"] == {"version": "0.1.0", "commit": "0123abcd"}
    assert (
        provenance["tokens_per_second_ci95"][0] < 16_800 < provenance["tokens_per_second_ci95"][1]
    )
    assert (provenance["gain"], provenance["baseline"]) == (None, None)


@pytest.mark.parametrize("format", ["script", "yaml", *TRAINERS])
def test_the_baseline_is_not_said_to_have_gained_over_itself(format: str) -> None:
    study = a_study()
    (record,) = study.records
    alone = replace(study, records=(record.model_copy(update={"is_baseline": True}),))
    assert "Baseline: this trial itself" in said(export(alone, format=format))
    assert "Baseline: none was measured" in said(export(study, format=format))


@pytest.mark.parametrize("format", format_names())
def test_what_nobody_recorded_is_said_to_be_unknown(format: str) -> None:
    # From a wheel there is no commit; earlier versions kept neither date nor driver.
    study = a_study(emulated_on=None)
    (record,) = study.records
    bare = replace(study, environment={}, records=(record.model_copy(update={"started_at": None}),))
    text = export(bare, format=format)
    if format in ("json", "peft"):
        values = read(text, format=format)
        known = (values.get("auto_mapping") or values)["provenance"]
        assert [known[key] for key in ("date", "driver", "python")] == [None] * 3
        assert known["sweep"] == {"version": None, "commit": None}
    else:
        for words in ("time that is not recorded", "no known version", "commit not recorded"):
            assert words in said(text)


def test_a_document_has_no_default_left_to_whoever_reads_it() -> None:
    config = TrialConfig(lora_rank=8, micro_batch_size=2, target_modules="qv", quantization="none")
    document = json.loads(export(a_study(config), format="json"))
    written = document["config"]
    assert (written["lora_alpha"], written["effective_batch_size"]) == (16.0, 2)
    assert written["target_modules"] == ["q_proj", "v_proj"]
    assert (written["double_quant"], document["gradient_accumulation_steps"]) == (False, 1)
    assert None not in written.values()
    assert yaml.safe_load(export(a_study(config), format="yaml"))["config"] == written


def test_no_two_exports_share_an_output_directory() -> None:
    studies = [a_study(name=name) for name in ("a", "a b", "a-b", "a/b", "../a", "")]
    places = {
        read(export(study, format=format), format=format)["output_dir"]
        for study in studies
        for format in (*TRAINERS, "json")
    }
    assert len(places) == len(studies) * 4
    assert all(Path(place).parts[0] == "outputs" and ".." not in place for place in places)


def test_peft_loads_the_configuration_of_the_adapters(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftConfig

    config = TrialConfig(lora_rank=8, lora_alpha=24.5, lora_dropout=0.1, target_modules="qv")
    (tmp_path / "adapter_config.json").write_text(export(a_study(config), format="peft"))
    # A key that PEFT does not know would be a warning, and so an error here.
    loaded = PeftConfig.from_pretrained(str(tmp_path))
    assert isinstance(loaded, LoraConfig)
    assert (loaded.r, loaded.lora_alpha, loaded.lora_dropout) == (8, 24.5, 0.1)
    assert set(loaded.target_modules) == {"q_proj", "v_proj"}
    loaded.save_pretrained(str(tmp_path / "again"))
    again = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert again["auto_mapping"]["provenance"]["study"] == "a10-mistral"


@pytest.mark.parametrize("format", TRAINERS)
def test_a_file_says_what_it_was_tried_with_and_what_that_pins(format: str) -> None:
    header = said(export(a_study(), format=format))
    pins = {
        "trl": ("1.15.0", "1.16.0", "transformers 4.56.2"),
        "axolotl": ("0.19.0", "transformers 5.16.1", "peft 0.20.0", "liger-kernel 0.8.1"),
        "llama-factory": ("0.9.5", "transformers up to 5.6.0", "peft 0.18.0 to 0.18.1"),
    }[format]
    assert [pin for pin in pins if pin not in header] == []


def test_what_a_format_cannot_say_is_at_hand_beside_its_text() -> None:
    for format in TRAINERS:
        found = exported(a_study(TrialConfig(compile=True)), format=format)
        assert any("compile true" in sentence for sentence in found.lost)
        header = said(found.text)
        assert [sentence for sentence in found.lost if sentence not in header] == []
    assert exported(a_study(), format="peft").lost
    assert exported(a_study(), format="json").lost == ()
