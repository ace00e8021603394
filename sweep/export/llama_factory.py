"""Owns a recipe in LLaMA-Factory's words.

How LLaMA-Factory spells each knob is declared with the knob (`search_spaces.trainers`).
"""

from __future__ import annotations

from sweep.export.document import (
    DATA_FILE,
    TRAINING_ARGUMENTS,
    lost,
    model_of,
    spelled,
    trainer_file,
)
from sweep.export.recipe import Recipe

_DATASET = "texts"
_DATASET_INFO = f'{{"{_DATASET}": {{"file_name": "{DATA_FILE}", "columns": {{"prompt": "text"}}}}}}'


def llama_factory(recipe: Recipe) -> str:
    """Return a recipe as a LLaMA-Factory YAML file."""
    options = {
        "model_name_or_path": model_of(recipe),
        # Stage pt joins the texts and cuts them into rows of cutoff_len: every token carries loss.
        "stage": "pt",
        "do_train": True,
        "finetuning_type": "lora",
        **spelled(recipe, trainer="llama-factory"),
        "dataset": _DATASET,
        "dataset_dir": "data",
        **TRAINING_ARGUMENTS,
    }
    return trainer_file(
        recipe,
        trainer="LLaMA-Factory",
        command="llamafactory-cli train FILE",
        edits=(
            f"dataset_dir, with your {DATA_FILE} and a dataset_info.json of {_DATASET_INFO}",
            "output_dir",
        ),
        options=options,
        differences=lost(recipe, trainer="llama-factory"),
    )
