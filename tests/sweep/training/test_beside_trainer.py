"""A step of a trial gives the device the work that transformers' Trainer gives it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.training.tiny import TINY, tiny_config, tiny_loop

WARMUP = 2
STEPS = 2
CONFIG = tiny_config(optimizer="adamw_torch_fused", effective_batch_size=4, micro_batch_size=2)
WORKED_OUT = (
    *("aten::mm", "aten::bmm", "aten::addmm", "aten::linear", "aten::matmul", "aten::embedding"),
    *("aten::_fused_adamw_", "aten::_foreach_norm", "aten::_foreach_mul_", "aten::silu"),
    *("aten::log_softmax", "aten::nll_loss_nd", "aten::scaled_dot_product_attention"),
    "bitsandbytes::dequantize_4bit",
)
"""Where a step's time goes."""


def watching() -> Any:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU])


def ops(watch: Any) -> Counter[str]:
    names = (event.name for event in watch.events() or ())
    return Counter(name for name in names if name.startswith(("aten::", "bitsandbytes::")))


def of_a_trial() -> Counter[str]:
    with tiny_loop(CONFIG) as loop:
        for _ in range(WARMUP):
            loop.step()
        with watching() as watch:
            for _ in range(STEPS):
                loop.step()
    return ops(watch)


def of_trainer(output: Path) -> Counter[str]:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from qlora_sweep.sweep.training.model import name_quantizer

    class Watching(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARMUP:
                watch.start()
            if state.global_step == WARMUP + STEPS:
                watch.stop()

    def stacked(rows: list[Any]) -> dict[str, Any]:
        tokens = torch.stack(rows)
        return {"input_ids": tokens, "labels": tokens.clone()}

    watch = watching()
    # Beside its steps it counts tokens and adds up losses: that is the rest of the total.
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=WARMUP + STEPS + 2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        remove_unused_columns=False,
        bf16=True,
        optim="adamw_torch_fused",
        weight_decay=0.01,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    rows = list(torch.randint(0, TINY.vocab_size, (64, CONFIG.seq_len)))
    with tiny_loop(CONFIG) as loop:
        model = loop.attached.model
        name_quantizer(model)
        given = {"args": arguments, "train_dataset": rows, "data_collator": stacked}
        Trainer(model=model, **given, callbacks=[Watching()]).train()
    return ops(watch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trials_step_is_trainers(tmp_path: Path) -> None:
    trial, trainer = of_a_trial(), of_trainer(tmp_path)
    for name in WORKED_OUT:
        assert trial[name] == trainer[name], name
    assert trial["aten::mm"] > 0
    assert abs(trainer.total() - trial.total()) < 0.02 * trial.total()
