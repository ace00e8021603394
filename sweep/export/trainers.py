"""How other trainers are told of a record, and what they cannot do of it, by ``trainers.yaml``.

How they are told of a dataset is in `rows`, by ``datasets.yaml``.
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
from qlora_sweep.sweep.export.record import Record, Trainer
from qlora_sweep.sweep.export.rows import dataset_options, filled, lost_rows, table


def trainers() -> Mapping[Trainer, Mapping[str, Any]]:
    """Return what is known of each trainer: its name, versions, command and options."""
    known: Mapping[Trainer, Mapping[str, Any]] = table("trainers")["trainers"]
    return known


def command(record: Record, trainer: Trainer) -> str:
    """Return how to start a trainer, with the variables that it has to find."""
    known, config = trainers()[trainer], record.config
    # Fixed segments are what torch has where nothing is said; axolotl sets expandable ones itself.
    is_said = config.expandable_segments or trainer == "axolotl"
    variables = allocator_settings(config.expandable_segments) if is_said else {}
    line = known["command" if config.data_parallel == 1 else "command_of_several"]
    line = line.format(gpus=config.data_parallel, method=config.method)
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), line])


def options(record: Record, trainer: Trainer) -> dict[str, Any]:
    """Return what a trainer's file says."""
    found = spelled(record, trainer) | dataset_options(record, trainer)
    return found | {"output_dir": record.output_dir}


def spelled(record: Record, trainer: Trainer) -> dict[str, Any]:
    """Return what a trainer is told of a configuration, wherever its dataset is."""
    known, cases = trainers()[trainer], cases_of(record)
    told = dict(known["options"])
    for setting, options in known["when"].items():
        told |= options.get(cases[setting], {})
    found: dict[str, Any] = filled(told, _values(record))
    is_of_transformers = trainer in ("script", "trl", "llama-factory")
    return found | training_arguments(record) if is_of_transformers else found


def training_arguments(record: Record) -> dict[str, Any]:
    """Return what was not searched, in the names of transformers' `TrainingArguments`."""
    parallel = {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}
    return {
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_scheduler_type": SCHEDULE,
        "warmup_steps": SCHEDULE_WARMUP_STEPS,
        "logging_steps": 10,
        # Nothing in a measured step waits for the GPU: neither a look at each loss nor a batch.
        "logging_nan_inf_filter": False,
        "accelerator_config": {"non_blocking": True},
        "report_to": "none",
        # Every adapter has a gradient in every step, and no buffer ever changes.
        **(parallel if record.config.data_parallel > 1 else {}),
    }


def _values(record: Record) -> dict[str, Any]:
    """Return what options can be told of a record, by the names in the table."""
    config, names = record.config, record.target_modules
    patterns = list(names or ["all-linear"])
    if names is not None and len(names) == 1:
        # TRL makes a text of a list of one, which PEFT takes for a pattern of the whole path.
        patterns = [rf"(.*\.)?{re.escape(names[0])}"]
    recomputed = {"use_reentrant": False} if record.recomputed else None
    nth = every_nth(config.checkpoint_fraction, record.layers)
    layers = config.kernels_kind.in_liger or {}
    return {
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
        "target_names": None if names is None else list(names),
        "target_patterns": patterns,
        "target_text": ",".join(names or ["all"]),
        "is_recomputed": bool(record.recomputed),
        "is_not_recomputed": not record.recomputed,
        "recomputed": recomputed,
        "recomputed_layers": recomputed
        and {**recomputed, **({"every_n_layers": nth} if nth else {})},
        "eval_batch_size": config.micro_batch_size if record.texts else None,
        "is_evaluated": True if record.texts else None,
        "is_precomputed": config.reference == "precomputed" or None,
        "keeps_dropout": False if config.lora_dropout else None,
        "off_in_parallel": None if config.data_parallel == 1 else False,
        "liger": layers,
        "liger_layers": config.kernels_kind.fuses_layers,
        "liger_without_loss": {**layers, "fused_linear_cross_entropy": False},
    }


def cases_of(record: Record) -> dict[str, str]:
    """Return which case of each setting of the table a record is."""
    config, layers = record.config, record.layers
    quantized, recomputed = config.quantized_count(layers), len(record.recomputed)
    quantization: str = config.quantization
    # Unsloth has one kind of 4 bits.
    known = TRAINERS["unsloth"].runs
    is_known = quantization in known["quantization"]
    if config.is_4bit and not (is_known and config.double_quant in known["double_quant"]):
        quantization = "another 4 bits"
    is_apart = config.attention == "flash_attention_2" or config.micro_batch_size == 1
    rows = {"none": "padded"}.get(config.packing, config.packing)
    packing = ("packed apart" if is_apart else "packed") if rows == "packed" else "padded"
    kernels: str = config.kernels
    if config.is_on_pairs:
        kernels = f"{canonical(config).kernels} on pairs"
        packing = "pairs grouped" if rows == "grouped" else packing
        rows = "pairs"
    elif record.texts is None:
        rows = packing = "full"
    elif rows == "packed" and record.texts_kind == "text":
        rows = "packed texts"
    parts = "each n-th" if every_nth(config.checkpoint_fraction, layers) else "part"
    bits = str(config.weight_bits)
    return {
        "lora_alpha": "" if config.alpha == _whole_alpha(record) else "fraction",
        "targets": "every" if record.target_modules is None else "named",
        "compute_dtype": "8-bit" if config.is_8bit_compute else config.compute_dtype,
        "quantization": quantization,
        "bits": bits,
        "quantized_fraction": "part" if config.is_quantized and quantized < layers else "all",
        "adapter_dtype": f"{config.adapter_dtype} on {'16-bit' if bits == '16' else 'quantized'}",
        "checkpoint_fraction": parts if 0 < recomputed < layers else "all or none",
        "upcast_fp32": str(config.upcast_fp32),
        "trainer": "in TRL" if config.has_head_of_trl else "",
        "model": "part" if PART_OF in record.model.config else "whole",
        "method": config.method,
        "loss_type": "sigmoid" if canonical(config).loss_type == "sigmoid" else "not sigmoid",
        "reference": config.reference,
        "lora_dropout": "of pairs" if config.is_on_pairs and config.lora_dropout else "",
        "stored": _stored_case(record),
        "kernels": kernels,
        "attention": config.attention,
        "compile": str(config.compile),
        "rows": rows,
        "packing": packing,
        "sharding": config.sharding,
    }


def _stored_case(record: Record) -> str:
    """Return whether a stored base computes in another type than was measured, where nobody sets
    that."""
    stored = stored_quantization(record.model.config)
    if stored is None or stored.compute_dtype == COMPUTE_DTYPES[record.dtype].torch_name:
        return "as measured"
    return "in another type"


def _whole_alpha(record: Record) -> int:
    return max(1, round(record.config.alpha))


def _differs_all_the_same(key: str, record: Record) -> bool:
    """Whether a trainer may do something else of a setting than what was measured, or predicted,
    for that trainer: scales are whole numbers, and rows are filled by a rule of its own."""
    is_packed = record.config.packing == "packed" and record.config.trainer != "trl"
    return key in ("lora_alpha", "stored") or (key == "packing" and is_packed)


def lost(record: Record, trainer: Trainer) -> tuple[str, ...]:
    """Return what a trainer cannot do of what was measured, and what its file does instead."""
    return (*unsupported(record, trainer).values(), *lost_rows(record, trainer))


def unsupported(
    record: Record, trainer: str, *, section: Literal["unsupported", "refused"] = "unsupported"
) -> dict[str, str]:
    """Return that of the configuration, by its settings; ``refused``: why there is no file."""
    found, cases = {}, cases_of(record)
    is_as_measured = section == "unsupported" and record.config.trainer == trainer
    for key, known in table("trainers")[section].items():
        if is_as_measured and not _differs_all_the_same(key, record):
            continue
        sentences = known.get(cases[key], {})
        if sentence := sentences.get(trainer, sentences.get("others")):
            found[key] = sentence.format(
                config=record.config,
                whole_alpha=_whole_alpha(record),
                stored=stored_quantization(record.model.config),
                dtype=COMPUTE_DTYPES[record.dtype].torch_name,
                basis=record.basis,
            )
    return found
