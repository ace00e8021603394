"""Owns how a recipe is written for a trainer: a YAML file under a comment that hides nothing.

A trainer's module says the options and the differences; this one knows no trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from search_spaces.knobs import KNOBS
from search_spaces.trainers import Trainer
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


TRAINING_ARGUMENTS: Mapping[str, Any] = {
    "learning_rate": LEARNING_RATE,
    "weight_decay": WEIGHT_DECAY,
    "max_grad_norm": MAX_GRAD_NORM,
    "lr_scheduler_type": SCHEDULE,
    "num_train_epochs": 1.0,
    "logging_steps": 10,
    "report_to": "none",
    "output_dir": OUTPUT_DIRECTORY,
}
"""What was not searched, for trainers that use the names of transformers' `TrainingArguments`."""


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


def spelled(recipe: Recipe, *, trainer: Trainer) -> dict[str, Any]:
    """Return the options of a trainer that say what was measured, knob by knob."""
    options: dict[str, Any] = {}
    for key, knob in KNOBS.items():
        match knob.options.get(trainer):
            case None:
                continue
            case str(option):
                options[option] = getattr(recipe.config, key)
            case spell:
                options |= spell(recipe)
    return options


def lost(recipe: Recipe, *, trainer: Trainer) -> Iterator[str]:
    """Yield what a trainer cannot express of what was measured, and what its file does instead."""
    sentences = (knob.lost[trainer](recipe) for knob in KNOBS.values() if trainer in knob.lost)
    return (sentence for sentence in sentences if sentence is not None)
