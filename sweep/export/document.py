"""Owns how a recipe is written for a trainer: a YAML file under a comment that hides nothing.

A trainer's module says the options and the differences; this one knows no trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from search_spaces.config import TrialConfig
from sweep.export.recipe import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    SCHEDULE,
    WEIGHT_DECAY,
    Recipe,
    comment,
)

DATA_FILE = "data.jsonl"
"""Stands for the user's texts, one ``{"text": "..."}`` a line."""
OUTPUT_DIRECTORY = "outputs"


def transformers_options(config: TrialConfig) -> dict[str, Any]:
    """Return what trainers built on transformers' own call by `TrainingArguments`' names."""
    return {
        "optim": config.optimizer,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_scheduler_type": SCHEDULE,
        "num_train_epochs": 1.0,
        "logging_steps": 10,
        "report_to": "none",
        "output_dir": OUTPUT_DIRECTORY,
    }


def trainer_file(
    recipe: Recipe,
    *,
    trainer: str,
    command: str,
    edits: Iterable[str],
    options: Mapping[str, Any],
    differences: Iterable[str],
) -> str:
    """Return the text of a trainer's file.

    Args:
        recipe: what was measured.
        trainer: its name.
        command: how to start it; ``FILE`` stands for the file.
        edits: what is the user's to fill in.
        options: the file's content.
        differences: what the trainer cannot express, and what the file does instead.
    """
    missing = () if recipe.weights else ("the model: its architecture alone was measured",)
    paragraphs = (
        *recipe.facts(),
        "",
        f"For {trainer}: {command}",
        "Learning rate, schedule and epochs were not searched. To fill in:",
        *_items((*missing, *edits)),
        "",
        f"Where {trainer} cannot do what was measured:",
        *_items(tuple(differences) or ("nothing known: every knob is below",)),
    )
    body = yaml.safe_dump(dict(options), sort_keys=False, default_flow_style=False)
    return f"{comment(paragraphs)}\n\n{body}"


def _items(texts: Iterable[str]) -> Iterator[str]:
    return (f"- {text}" for text in texts)


def model_of(recipe: Recipe) -> str:
    """Return where a trainer finds the weights, or what to put there."""
    return recipe.weights or f"path/or/hub-id/of/{recipe.model.name}"


def mixed_precision(config: TrialConfig) -> Mapping[str, bool]:
    """Return the two switches that Trainer and all that build on it share."""
    return {"bf16": config.compute_dtype == "bf16", "fp16": config.compute_dtype == "fp16"}


def whole_alpha(config: TrialConfig) -> int:
    """Return alpha as the whole number that trainers take; `common_differences` tells."""
    return max(1, round(config.alpha))


def common_differences(recipe: Recipe, *, can_recompute_these: bool = False) -> Iterator[str]:
    """Yield what no trainer can express, and what its file does instead.

    Args:
        recipe: what was measured.
        can_recompute_these: whether the trainer can recompute the measured layers and no others.
    """
    config, layers = recipe.config, recipe.model.hidden_layers
    if whole_alpha(config) != config.alpha:
        yield (
            f"lora_alpha {config.alpha:g}: it takes whole numbers only, so {whole_alpha(config)} "
            "here. Neither memory nor speed depends on it."
        )
    if 0 < len(recipe.recomputed) < layers and not can_recompute_these:
        yield (
            f"checkpoint_fraction {config.checkpoint_fraction:g}: it recomputes all layers or "
            "none, so all here: less memory than measured, and slower."
        )
    if config.compile:
        yield (
            "compile true: each decoder layer was compiled by itself, and it compiles the model as "
            "a whole or not at all. Not at all here, so a step takes longer and needs MORE memory "
            "than measured: it may not fit. Format script compiles as measured."
        )
