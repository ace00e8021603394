"""Owns the training script of a recipe, which needs transformers, PEFT and bitsandbytes alone.

Knows nothing of studies. The script does what `sweep.training` measured, in Trainer's words.
"""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from search_spaces.config import TrialConfig
from search_spaces.trainers import TORCH_DTYPES, allocator_settings, liger_kernels
from sweep.export.recipe import (
    MAX_GRAD_NORM,
    SCHEDULE,
    WEIGHT_DECAY,
    Recipe,
    comment,
)
from sweep.export.record import record_line


def script(recipe: Recipe) -> str:
    """Return the training script of a recipe, ready to run."""
    config, names = recipe.config, recipe.target_modules
    imports = ["LoraConfig", "get_peft_model"]
    is_whole = config.quantized_count(recipe.layers) == recipe.layers
    if config.upcast_fp32 and is_whole:
        imports.append("prepare_model_for_kbit_training")
    return _template().render(
        header=f"{comment((*recipe.facts(), *_rows(config)))}\n{record_line(recipe)}",
        config=config,
        measurement=recipe.measurement,
        weights=recipe.weights,
        alpha=plain_number(config.alpha),
        target_modules="all-linear" if names is None else list(names),
        dtype=TORCH_DTYPES[config.compute_dtype],
        adapter_dtype=TORCH_DTYPES[config.adapter_dtype],
        is_quantized=config.is_quantized,
        is_quantized_whole=is_whole,
        peft_imports=", ".join(imports),
        liger=liger_kernels(config.kernels),
        environment=allocator_settings(config.expandable_segments),
        needs="" if config.kernels == "hf" else ", liger-kernel",
        learning_rate=config.learning_rate,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        schedule=SCHEDULE,
    )


def _rows(config: TrialConfig) -> tuple[str, ...]:
    """Return what to know where other rows were measured than the script makes."""
    if config.packing == "none":
        return ()
    return (
        "",
        f"Rows: measured with packing {config.packing}; this script joins texts and cuts them into "
        "full rows.",
    )


def plain_number(value: float) -> float | int:
    """Return a whole number without its decimal point."""
    return int(value) if value == int(value) else value


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("sweep.export"),
        # What it writes is Python, not markup; every text of people's goes through `python`.
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["python"] = _literal
    return environment.get_template("script.py.j2")


def _literal(value: object) -> str:
    """Return a value as Python, in double quotes where nothing in it needs care."""
    text = repr(value)
    return text if '"' in text or "\\" in text else text.replace("'", '"')
