"""Owns a recipe in TRL's words: a file for ``trl sft --config``.

How TRL spells each knob is declared with the knob (`search_spaces.trainers`).
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


def trl(recipe: Recipe) -> str:
    """Return a recipe as a configuration file of TRL's command line."""
    options = {
        "model_name_or_path": model_of(recipe),
        "use_peft": True,
        **spelled(recipe, trainer="trl"),
        "datasets": [{"path": "json", "data_files": DATA_FILE, "columns": ["text"]}],
        "packing": True,
        # Texts joined and cut at max_length, as measured: every token carries loss.
        "packing_strategy": "wrapped",
        # Left out, it may be computed in chunks: less memory, and not what was measured.
        "loss_type": "nll",
        **TRAINING_ARGUMENTS,
    }
    return trainer_file(
        recipe,
        trainer="TRL",
        command="trl sft --config FILE",
        edits=("datasets", "output_dir"),
        options=options,
        differences=lost(recipe, trainer="trl"),
    )
