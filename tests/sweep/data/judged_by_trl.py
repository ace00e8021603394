"""What TRL's trainers make of rows: the judge of what ours make of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def supervised_rows(
    tokenizer: Any, given: Any, directory: Path, **options: Any
) -> list[tuple[list[int], list[int]]]:
    """Return ids and labels that the real SFT trainer prepares of a dataset."""
    trl = pytest.importorskip("trl")
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 2048}
    trainer = trl.SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(**size, **heads)),
        args=trl.SFTConfig(
            output_dir=str(directory),
            max_length=None,
            use_cpu=True,
            bf16=False,
            report_to="none",
            **options,
        ),
        train_dataset=given,
        processing_class=tokenizer,
    )
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


def preference_rows(tokenizer: Any, given: Any) -> list[tuple[list[int], list[int]]]:
    """Return ids and labels that the DPO trainer prepares of pairs: the chosen row, then the
    rejected one."""
    trl = pytest.importorskip("trl")
    trainer = object.__new__(trl.DPOTrainer)
    trainer._tokenizer = tokenizer
    arguments = trl.DPOConfig(max_length=None, bf16=False, use_cpu=True)
    found = []
    for row in trainer._prepare_dataset(given, tokenizer, arguments, "train"):
        for name in ("chosen_ids", "rejected_ids"):
            labels = [-100] * len(row["prompt_ids"]) + row[name]
            found.append((row["prompt_ids"] + row[name], labels))
    return found


def labelled(ids: Sequence[int], mask: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return tokens with their labels, as the trainers have them."""
    labels = [token if carries else -100 for token, carries in zip(ids, mask, strict=True)]
    return list(ids), labels


def template_named(name: str) -> str:
    """Return a chat template that TRL ships."""
    from trl import chat_template_utils

    return str(getattr(chat_template_utils, f"{name}_chat_template"))
