"""How other trainers are told of a record, and what they cannot do of it, by ``trainers.yaml``.

How they are told of a dataset is in `datasets`, by ``datasets.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from qlora_sweep.search_spaces.config import (
    MAX_GRAD_NORM,
    SCHEDULE,
    SCHEDULE_WARMUP_STEPS,
    WEIGHT_DECAY,
    allocator_settings,
    canonical,
)
from qlora_sweep.search_spaces.kinds import COMPUTE_DTYPES
from qlora_sweep.search_spaces.models import PART_OF
from qlora_sweep.search_spaces.quantized import stored_quantization
from qlora_sweep.search_spaces.trainers import TRAINERS, every_nth
from qlora_sweep.sweep.export.datasets import dataset_options, filled, lost_of_dataset, table
from qlora_sweep.sweep.export.record import Record, Trainer


def trainers() -> Mapping[Trainer, Mapping[str, Any]]:
    """Return what is known of each trainer: its name, versions, command and options."""
    described: Mapping[Trainer, Mapping[str, Any]] = table("trainers")["trainers"]
    return described


def command(record: Record, trainer: Trainer) -> str:
    """Return how to start a trainer, with the variables that it has to find."""
    config = record.config
    key = "command"
    if config.data_parallel > 1:
        key = "command_of_several"
    line: str = trainers()[trainer][key]
    line = line.format(gpus=config.data_parallel, method=config.method)
    # torch's default is fixed segments; axolotl sets expandable ones itself.
    if config.expandable_segments or trainer == "axolotl":
        for name, value in allocator_settings(config.expandable_segments).items():
            line = f"{name}={value} {line}"
    return line


def options(record: Record, trainer: Trainer) -> dict[str, Any]:
    """Return what a trainer's file says."""
    dataset = dataset_options(record, trainer)
    return spelled(record, trainer) | dataset | {"output_dir": record.output_dir}


def spelled(record: Record, trainer: Trainer) -> dict[str, Any]:
    """Return what a trainer is told of a configuration, wherever its dataset is."""
    described = trainers()[trainer]
    cases = cases_of(record)
    templates = dict(described["options"])
    for setting, options_of_cases in described["when"].items():
        templates |= options_of_cases.get(cases[setting], {})
    spelled_options: dict[str, Any] = filled(templates, _values(record))
    if trainer in ("script", "trl", "llama-factory"):
        spelled_options |= training_arguments(record)
    return spelled_options


def training_arguments(record: Record) -> dict[str, Any]:
    """Return what was not searched, in the names of transformers' `TrainingArguments`."""
    arguments: dict[str, Any] = {
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_scheduler_type": SCHEDULE,
        "warmup_steps": SCHEDULE_WARMUP_STEPS,
        "logging_steps": 10,
        # Nothing in a measured step waits for the GPU: neither a look at each loss nor a batch.
        "logging_nan_inf_filter": False,
        "accelerator_config": {"non_blocking": True},
        "report_to": "none",
    }
    if record.config.data_parallel > 1:
        # Every adapter has a gradient in every step, and no buffer ever changes.
        arguments |= {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
    return arguments


def _values(record: Record) -> dict[str, Any]:
    """Return what options can be told of a record, by the names in the table."""
    config = record.config
    liger = config.kernels_kind.in_liger or {}
    values: dict[str, Any] = {
        **config.model_dump(),
        **training_arguments(record),
        "learning_rate": record.learning_rate.value,
        "model": record.model.weights or f"path/or/hub-id/of/{record.model.name}",
        "prepared_path": f"{record.output_dir}/prepared",
        "torch_dtype": COMPUTE_DTYPES[record.dtype].torch_name,
        "bf16": record.dtype == "bf16",
        "fp16": record.dtype == "fp16",
        "whole_alpha": _whole_alpha(record),
        "accumulation_steps": config.accumulation_steps,
        "target_names": None,
        "target_patterns": ["all-linear"],
        "target_text": "all",
        "is_recomputed": bool(record.recomputed),
        "is_not_recomputed": not record.recomputed,
        "recomputed": None,
        "recomputed_layers": None,
        "eval_batch_size": None,
        "is_evaluated": None,
        "is_precomputed": config.reference == "precomputed" or None,
        "keeps_dropout": None,
        "off_in_parallel": None,
        "liger": liger,
        "liger_layers": config.kernels_kind.fuses_layers,
        "liger_without_loss": liger | {"fused_linear_cross_entropy": False},
    }
    names = record.target_modules
    if names is not None:
        values["target_names"] = list(names)
        values["target_patterns"] = list(names)
        values["target_text"] = ",".join(names)
        if len(names) == 1:
            # TRL makes a text of a list of one, which PEFT takes for a pattern of the whole path.
            values["target_patterns"] = [rf"(.*\.)?{re.escape(names[0])}"]
    if record.recomputed:
        values["recomputed"] = {"use_reentrant": False}
        values["recomputed_layers"] = {"use_reentrant": False}
        nth = every_nth(config.checkpoint_fraction, record.layers)
        if nth:
            values["recomputed_layers"] = {"use_reentrant": False, "every_n_layers": nth}
    if record.texts is not None:
        values["eval_batch_size"] = config.micro_batch_size
        values["is_evaluated"] = True
    if config.lora_dropout:
        values["keeps_dropout"] = False
    if config.data_parallel > 1:
        values["off_in_parallel"] = False
    return values


def cases_of(record: Record) -> dict[str, str]:
    """Return which case of each setting of the table a record is."""
    config = record.config
    cases: dict[str, str] = {
        "lora_alpha": "",
        "targets": "named",
        "compute_dtype": config.compute_dtype,
        "quantization": config.quantization,
        "bits": str(config.weight_bits),
        "quantized_fraction": "all",
        "adapter_dtype": f"{config.adapter_dtype} on quantized",
        "checkpoint_fraction": "all or none",
        "checkpoint_offload": str(config.waits_on_host),
        "upcast_fp32": str(config.upcast_fp32),
        "trainer": "",
        "image_size": "",
        "model": "whole",
        "method": config.method,
        "loss_type": "sigmoid",
        "reference": config.reference,
        "lora_dropout": "",
        "stored": "as measured",
        "kernels": config.kernels,
        "attention": config.attention,
        "compile": str(config.compile),
        "sharding": config.sharding,
        **_dataset_cases(record),
    }
    if config.alpha != _whole_alpha(record):
        cases["lora_alpha"] = "fraction"
    if record.target_modules is None:
        cases["targets"] = "every"
    if config.is_8bit_compute:
        cases["compute_dtype"] = "8-bit"
    # Unsloth has one kind of 4 bits.
    in_unsloth = TRAINERS["unsloth"].runs
    is_in_unsloth = config.quantization in in_unsloth["quantization"]
    is_in_unsloth = is_in_unsloth and config.double_quant in in_unsloth["double_quant"]
    if config.is_4bit and not is_in_unsloth:
        cases["quantization"] = "another 4 bits"
    if config.is_quantized and config.quantized_count(record.layers) < record.layers:
        cases["quantized_fraction"] = "part"
    if config.weight_bits == 16:
        cases["adapter_dtype"] = f"{config.adapter_dtype} on 16-bit"
    if 0 < len(record.recomputed) < record.layers:
        cases["checkpoint_fraction"] = "part"
        if every_nth(config.checkpoint_fraction, record.layers):
            cases["checkpoint_fraction"] = "each n-th"
    if config.has_head_of_trl:
        cases["trainer"] = "in TRL"
    if config.image_size is not None:
        cases["image_size"] = "images"
    if PART_OF in record.model.config:
        cases["model"] = "part"
    elif config.is_quantized and record.model.has_experts:
        cases["model"] = "experts"
    elif record.has_named_experts:
        cases["model"] = "named experts"
    if canonical(config).loss_type != "sigmoid":
        cases["loss_type"] = "not sigmoid"
    if config.is_on_pairs:
        cases["kernels"] = f"{canonical(config).kernels} on pairs"
        if config.lora_dropout:
            cases["lora_dropout"] = "of pairs"
    # No trainer is told the type that a stored base computes in.
    stored = stored_quantization(record.model.config)
    if stored is not None and stored.compute_dtype != COMPUTE_DTYPES[record.dtype].torch_name:
        cases["stored"] = "in another type"
    return cases


def _dataset_cases(record: Record) -> dict[str, str]:
    """Return the cases that depend on the dataset too: what a sequence holds, and its padding."""
    config = record.config
    packing = "padded"
    if config.packing == "packed":
        packing = "packed"
        if config.attention == "flash_attention_2" or config.micro_batch_size == 1:
            packing = "packed apart"
    if config.is_on_pairs:
        if config.packing == "grouped":
            packing = "pairs grouped"
        return {"rows": "pairs", "packing": packing}
    if record.texts is None:
        return {"rows": "full", "packing": "full"}
    match config.packing:
        case "packed" if record.dataset_kind == "text":
            return {"rows": "packed texts", "packing": packing}
        case "none":
            return {"rows": "padded", "packing": packing}
        case other:
            return {"rows": other, "packing": packing}


def _whole_alpha(record: Record) -> int:
    return max(1, round(record.config.alpha))


def _differs_all_the_same(key: str, record: Record) -> bool:
    """Whether a trainer may do something else of a setting than what was measured, or predicted,
    for that trainer: scales are whole numbers, and sequences are packed by a rule of its own."""
    is_packed = record.config.packing == "packed" and record.config.trainer != "trl"
    return key in ("lora_alpha", "stored") or (key == "packing" and is_packed)


def lost(record: Record, trainer: Trainer) -> tuple[str, ...]:
    """Return what a trainer cannot do of what was measured, and what its file does instead."""
    return tuple(unsupported(record, trainer).values()) + lost_of_dataset(record, trainer)


def unsupported(
    record: Record, trainer: str, *, section: Literal["unsupported", "refused"] = "unsupported"
) -> dict[str, str]:
    """Return that of the configuration, by its settings; ``refused``: why there is no file."""
    cases = cases_of(record)
    is_as_measured = section == "unsupported" and record.config.trainer == trainer
    of_settings = {}
    for key, sentences_of_cases in table("trainers")[section].items():
        if is_as_measured and not _differs_all_the_same(key, record):
            continue
        sentences = sentences_of_cases.get(cases[key], {})
        sentence = sentences.get(trainer, sentences.get("others"))
        if sentence:
            of_settings[key] = sentence.format(
                config=record.config,
                whole_alpha=_whole_alpha(record),
                stored=stored_quantization(record.model.config),
                dtype=COMPUTE_DTYPES[record.dtype].torch_name,
                basis=record.basis,
            )
    return of_settings
