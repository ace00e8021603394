"""Owns a recipe in axolotl's words.

How axolotl spells each knob is declared with the knob (`search_spaces.trainers`).
"""

from __future__ import annotations

from collections.abc import Iterator

from search_spaces.config import TrialConfig
from sweep.export.document import (
    DATA_FILE,
    OUTPUT_DIRECTORY,
    lost,
    model_of,
    spelled,
    trainer_file,
)
from sweep.export.recipe import LEARNING_RATE, MAX_GRAD_NORM, SCHEDULE, WEIGHT_DECAY, Recipe


def axolotl(recipe: Recipe) -> str:
    """Return a recipe as an axolotl YAML file."""
    options = {
        "base_model": model_of(recipe),
        **spelled(recipe, trainer="axolotl"),
        # Left out, they may be switched on by themselves; they were not measured.
        "lora_mlp_kernel": False,
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
        "datasets": [{"path": DATA_FILE, "ds_type": "json", "type": "completion", "field": "text"}],
        "val_set_size": 0.0,
        "sample_packing": _packs(recipe.config),
        "pad_to_sequence_len": True,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_scheduler": SCHEDULE,
        "warmup_steps": 0,
        "num_epochs": 1,
        "logging_steps": 10,
        "output_dir": OUTPUT_DIRECTORY,
    }
    return trainer_file(
        recipe,
        trainer="axolotl",
        command="axolotl train FILE",
        edits=("datasets", "output_dir"),
        options=options,
        differences=_differences(recipe),
    )


def _packs(config: TrialConfig) -> bool:
    """Whether its packing works: it needs attention that keeps the texts of a row apart."""
    return config.attention == "flash_attention_2"


def _differences(recipe: Recipe) -> Iterator[str]:
    yield from lost(recipe, trainer="axolotl")
    if _packs(recipe.config):
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
