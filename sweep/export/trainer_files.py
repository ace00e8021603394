"""Owns a recipe as each trainer's file: YAML under a comment that hides nothing.

How a trainer spells each knob is declared with the knob (`search_spaces.trainers`); here is what
is not searched. Knows nothing of studies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml

from search_spaces.config import TrialConfig
from search_spaces.knobs import KNOBS
from search_spaces.trainers import Trainer
from sweep.export.recipe import (
    MAX_GRAD_NORM,
    SCHEDULE,
    WEIGHT_DECAY,
    Recipe,
    comment,
)
from sweep.export.record import record_line

_DATA_FILE = "data.jsonl"
"""Stands for the user's texts, one ``{"text": "..."}`` a line."""
_OUTPUT_DIRECTORY = "outputs"

_NON_BLOCKING: Mapping[str, Any] = {"accelerator_config": {"non_blocking": True}}
_WITHOUT_WAITING: Mapping[str, Any] = {"logging_nan_inf_filter": False, **_NON_BLOCKING}
"""Nothing in a measured step waits for the card: neither a look at each loss nor a batch."""

_TRAINING_ARGUMENTS: Mapping[str, Any] = {
    "weight_decay": WEIGHT_DECAY,
    "max_grad_norm": MAX_GRAD_NORM,
    "lr_scheduler_type": SCHEDULE,
    "num_train_epochs": 1.0,
    "logging_steps": 10,
    **_WITHOUT_WAITING,
    "report_to": "none",
    "output_dir": _OUTPUT_DIRECTORY,
}
"""What was not searched, for trainers that use the names of transformers' `TrainingArguments`."""


def trl(recipe: Recipe) -> str:
    """Return a recipe as a configuration file of TRL's command line."""
    options = {
        "model_name_or_path": _model(recipe),
        "use_peft": True,
        **_spelled(recipe, trainer="trl"),
        "datasets": [{"path": "json", "data_files": _DATA_FILE, "columns": ["text"]}],
        # Left out, it may be computed in chunks: less memory, and not what was measured.
        "loss_type": "nll",
        **_TRAINING_ARGUMENTS,
    }
    return _file(
        recipe,
        trainer="TRL",
        command=_command(recipe, "trl sft --config FILE", trainer="trl"),
        edits=("datasets", "output_dir"),
        options=options,
        differences=_lost(recipe, trainer="trl"),
    )


def axolotl(recipe: Recipe) -> str:
    """Return a recipe as an axolotl YAML file."""
    options = {
        "base_model": _model(recipe),
        **_spelled(recipe, trainer="axolotl"),
        # Left out, they may be switched on by themselves; they were not measured.
        "lora_mlp_kernel": False,
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
        "datasets": [
            {"path": _DATA_FILE, "ds_type": "json", "type": "completion", "field": "text"}
        ],
        "val_set_size": 0.0,
        "sample_packing": _axolotl_packs(recipe.config),
        "pad_to_sequence_len": recipe.config.packing != "grouped",
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_scheduler": SCHEDULE,
        "warmup_steps": 0,
        "num_epochs": 1,
        "logging_steps": 10,
        **_NON_BLOCKING,
        "output_dir": _OUTPUT_DIRECTORY,
    }
    return _file(
        recipe,
        trainer="axolotl",
        command=_command(recipe, "axolotl train FILE", trainer="axolotl"),
        edits=("datasets", "output_dir"),
        options=options,
        differences=_axolotl_differences(recipe),
    )


def _axolotl_packs(config: TrialConfig) -> bool:
    """Whether its packing works: it needs attention that keeps the texts of a row apart."""
    if config.packing == "grouped":
        return False
    return config.attention == "flash_attention_2"


def _axolotl_differences(recipe: Recipe) -> Iterator[str]:
    yield from _lost(recipe, trainer="axolotl")
    if _axolotl_packs(recipe.config):
        yield (
            "Rows: it packs texts with attention kept inside each of them; measured were full rows "
            "with attention over the whole row."
        )
    else:
        yield (
            f"Rows: it does not pack with attention {recipe.config.attention}, so each text is a "
            "row of its own, padded to sequence_len. Padding takes time and carries no loss: fewer "
            "useful tokens/s than measured."
        )
    yield (
        "Older releases have no attn_implementation: they want flash_attention, sdp_attention or "
        "eager_attention true in its place."
    )


_DATASET = "texts"
_DATASET_INFO = (
    f'{{"{_DATASET}": {{"file_name": "{_DATA_FILE}", "columns": {{"prompt": "text"}}}}}}'
)


def llama_factory(recipe: Recipe) -> str:
    """Return a recipe as a LLaMA-Factory YAML file."""
    options = {
        "model_name_or_path": _model(recipe),
        # Stage pt joins the texts and cuts them into rows of cutoff_len: every token carries loss.
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "lora",
        **_spelled(recipe, trainer="llama-factory"),
        "dataset": _DATASET,
        "dataset_dir": "data",
        **_TRAINING_ARGUMENTS,
    }
    return _file(
        recipe,
        trainer="LLaMA-Factory",
        command=_command(recipe, "llamafactory-cli train FILE", trainer="llama-factory"),
        edits=(
            f"dataset_dir, with your {_DATA_FILE} and a dataset_info.json of {_DATASET_INFO}",
            "output_dir",
        ),
        options=options,
        differences=_lost(recipe, trainer="llama-factory"),
    )


def _file(
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
        "Schedule and epochs were not searched. To fill in:",
        *_items((*missing, *edits)),
        "",
        f"Where {trainer} cannot do what was measured:",
        *_items(tuple(differences) or ("nothing known: every knob is below",)),
    )
    body = yaml.safe_dump(dict(options), sort_keys=False, default_flow_style=False)
    return f"{comment(paragraphs)}\n{record_line(recipe)}\n\n{body}"


def _items(texts: Iterable[str]) -> Iterator[str]:
    return (f"- {text}" for text in texts)


def _model(recipe: Recipe) -> str:
    """Return where a trainer finds the weights, or what to put there."""
    return recipe.weights or f"path/or/hub-id/of/{recipe.model.name}"


def _spelled(recipe: Recipe, *, trainer: Trainer) -> dict[str, Any]:
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


def _command(recipe: Recipe, command: str, *, trainer: Trainer) -> str:
    """Return how to start a trainer, with the variables that it has to find."""
    spelled = [knob.environment[trainer] for knob in KNOBS.values() if trainer in knob.environment]
    variables = {name: value for spell in spelled for name, value in spell(recipe).items()}
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), command])


def _lost(recipe: Recipe, *, trainer: Trainer) -> Iterator[str]:
    """Yield what a trainer cannot express of what was measured, and what its file does instead."""
    sentences = (knob.lost[trainer](recipe) for knob in KNOBS.values() if trainer in knob.lost)
    return (sentence for sentence in sentences if sentence is not None)
