"""What steps need and take that no prediction was fitted to: configurations drawn at random.

    python -m tests.bench.drawn pairs|sharded|grpo [--model NAME] [-o OUT.jsonl]

A row a configuration, as `tests/data/pairs_h100.jsonl` keeps them: on pairs of completions; of a
model that two GPUs share; of TRL's `GRPOTrainer`, whose completions are made up.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.learning_rates import learning_rate_of
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.rules import Setting, broken_rules
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.records import Measured
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import TrialRequest
from tests.bench.harness import Row, stamp, word_tokenizer, write

Drawn = dict[str, list[Any]]
DRAWN: Drawn = {
    "double_quant": [False],
    "lora_rank": [8, 16, 64],
    "target_modules": ["qv", "attention", "all-linear"],
    "micro_batch_size": [1, 2, 3, 4, 6],
    "seq_len": [384, 512, 1024, 2048],
    "compute_dtype": ["bf16", "fp16"],
    "quantization": ["nf4", "none"],
    "checkpoint_fraction": [0.0, 0.25, 0.5, 1.0],
    "kernels": ["hf", "liger"],
    "upcast_fp32": [True, False],
    "adapter_dtype": ["fp32", "bf16"],
    "optimizer": ["adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"],
}
ON_PAIRS: Drawn = {
    "method": ["dpo"],
    "reference": ["adapter_off", "precomputed"],
    "loss_type": ["sigmoid", "ipo"],
}
LEAN: Drawn = {"upcast_fp32": [False], "kernels": ["hf"], "optimizer": ["adamw_torch_fused"]}
COMPILED: Drawn = {**LEAN, "compile": [True], "lora_rank": [16], "target_modules": ["attention"]}
SHARED: Drawn = {
    **LEAN,
    "data_parallel": [2],
    "sharding": ["fsdp"],
    "micro_batch_size": [2, 4, 8],
    "kernels": ["hf", "fused-loss", "liger"],
    "adapter_dtype": ["fp32"],
}
OF_COMPLETIONS: Drawn = {
    **LEAN,
    "method": ["grpo"],
    "micro_batch_size": [2, 4, 8],
    "checkpoint_fraction": [0.0, 1.0],
    "kernels": ["hf", "liger"],
    "optimizer": ["adamw_torch_fused", "paged_adamw_8bit"],
}
IN_4_BITS: Drawn = {"quantization": ["nf4"], "adapter_dtype": ["bf16"]}
"""TRL keeps the adapters of a quantized base in bf16, and others in fp32."""
IN_16_BITS: Drawn = {"quantization": ["none"], "adapter_dtype": ["fp32"]}
CASES: dict[str, dict[str, list[tuple[int, Drawn]]]] = {
    "pairs": {
        "mistral-7b-v0.3": [
            (10, ON_PAIRS),
            (4, {**ON_PAIRS, **COMPILED, "checkpoint_fraction": [0.0, 0.5]}),
            (
                2,
                {**ON_PAIRS, **LEAN, "compute_dtype": ["int8"], "quantization": ["nf4", "int8"]},
            ),
        ],
        "llama-3.2-3b": [(6, ON_PAIRS)],
        "qwen2.5-7b": [(5, ON_PAIRS)],
    },
    "sharded": {
        "mistral-7b-v0.3": [
            (6, {**SHARED, **COMPILED, "kernels": ["hf", "fused-loss"], "quantization": ["nf4"]}),
            (2, {**SHARED, "quantization": ["none"]}),
        ],
        "llama-3.2-3b": [(2, {**SHARED, "compile": [True], "kernels": ["fused-loss"]})],
    },
    "grpo": {
        "mistral-7b-v0.3": [
            (4, {**OF_COMPLETIONS, **IN_4_BITS}),
            (2, {**OF_COMPLETIONS, **IN_16_BITS}),
        ],
        "llama-3.2-3b": [
            (3, {**OF_COMPLETIONS, **IN_4_BITS}),
            (1, {**OF_COMPLETIONS, **IN_16_BITS}),
        ],
    },
}
"""How many of each model, and what is drawn of them instead."""
STEPS = StepBudget(warmup_min=2, warmup_max=4, measured_min=4, measured_max=12, seconds_max=6)
TOKENS = 8192
"""Rows times length at most, so that an 80 GB GPU holds most of them."""


def drawn(model: ModelSpec, count: int, values: Drawn) -> list[TrialConfig]:
    """Return so many configurations that no rule forbids and that hold at most `TOKENS`."""
    chance, found = random.Random(f"{model.name} {values}"), list[TrialConfig]()
    setting = Setting(model, device="cuda", compute_capability=(9, 0))
    while len(found) < count:
        settings = {name: chance.choice(choices) for name, choices in (DRAWN | values).items()}
        config = parse_config(settings)
        rows = config.rows_per_sample * config.micro_batch_size
        is_small = rows * config.seq_len <= TOKENS
        if config not in found and is_small and not any(broken_rules(config, setting)):
            found.append(config)
    return found


def measured(runner: SupervisedRunner, config: TrialConfig) -> Row:
    """Return what a trial measured."""
    outcome = runner.run(TrialRequest(config=config, steps=STEPS))
    if not isinstance(outcome, Measured):
        return {"failure": str(outcome)[:500]}
    found = outcome.measurement
    kept = ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds", "step_seconds_ci95")
    more = ("steps_measured", "samples_per_second", "sm_clock_mhz", "compile_seconds")
    return {**{name: getattr(found, name) for name in (*kept, *more)}, "flags": found.flags}


def of_completions(spec: ModelSpec, config: TrialConfig) -> Row:
    """Return the peaks of two of GRPOTrainer's steps, as it trains a model that it quantizes."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from qlora_sweep.sweep.export.grpo import grpo_config
    from qlora_sweep.sweep.training.adapters import attached
    from qlora_sweep.sweep.training.model import build_base

    rows, half = config.micro_batch_size, config.seq_len // 2
    asked = {"num_generations": rows, "beta": 0.0, "max_completion_length": half}
    rate = learning_rate_of(config, spec.config)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    # What TRL does by itself is left to it.
    bare = config.model_copy(update={"kernels": "hf", "checkpoint_fraction": 0.0})
    base = build_base(bare, spec=spec, weights="random", device=device, seed=0)
    with attached(base, bare) as attachment, tempfile.TemporaryDirectory() as directory:
        # Trainer would ask what transformers quantized it with.
        base.model.is_quantized = False
        trainer = GRPOTrainer(
            model=attachment.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=directory,
                max_steps=2,
                report_to="none",
                save_strategy="no",
                use_cpu=not cuda,
                **grpo_config(config, asked, learning_rate=rate.value),
            ),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 2 * config.samples_per_step),
            processing_class=word_tokenizer(8),
        )
        ids = torch.randint(0, spec.vocab_size, (rows, 2 * half), device=device)
        whole = torch.ones_like(ids)
        batch = {
            "prompt_ids": ids[:, :half],
            "prompt_mask": whole[:, :half],
            "completion_ids": ids[:, half:],
            "completion_mask": whole[:, half:],
            "advantages": torch.randn(rows, device=device),
            "num_items_in_batch": torch.tensor(rows * half * config.accumulation_steps),
        }
        trainer._prepare_inputs = lambda _: batch
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }


def main() -> None:
    """Measure, and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=CASES)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--model")
    asked = parser.parse_args()
    write(stamp(), asked.output)
    budget = int(0.97 * torch.cuda.get_device_properties(0).total_memory)
    target = Target(gpu="drawn", device="cuda", budget_bytes=budget)
    # Liger changes classes of transformers for good: each of TRL's steps has a process of its own.
    processes = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1)
    with tempfile.TemporaryDirectory() as directory, processes:
        for name, groups in CASES[asked.kind].items():
            if asked.model not in (None, name):
                continue
            model = load_model_spec(name)
            log = Path(directory, f"{name}.log")
            with SupervisedRunner(model, target=target, log_path=log) as runner:
                for config in (c for count, values in groups for c in drawn(model, count, values)):
                    found = (
                        processes.submit(of_completions, model, config).result()
                        if config.method == "grpo"
                        else measured(runner, config)
                    )
                    row = {"model": name, "config": config.model_dump(mode="json"), **found}
                    write(row, asked.output)


if __name__ == "__main__":
    main()
