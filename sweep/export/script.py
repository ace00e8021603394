"""The training script of a recipe, which does what `sweep.training` measured in Trainer's words."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from search_spaces.config import (
    EIGHT_BIT,
    MAX_GRAD_NORM,
    SCHEDULE,
    TORCH_DTYPES,
    WEIGHT_DECAY,
    allocator_settings,
    liger_kernels,
)
from storage.files import WRITTEN_BY
from sweep.export.documents import (
    comment,
    plain_number,
    targets,
)
from sweep.export.record import Record, facts
from sweep.export.spelling import lost_sharding

ROWS = "rows.py"
"""What lies beside every script, and makes rows of a dataset."""
KERNELS = "eight_bit.py"
"""What lies beside a script that stores or computes in 8 bits."""
_OF_THE_BASE = ("quantization", "double_quant", "quantized_fraction")
TRIED = "Tried with transformers 5.10.1 to 5.17.0, PEFT 0.19 to 0.21.2 and TRL 1.15 to 1.16."


def script(recipe: Record) -> str:
    """Return the training script of a recipe, ready to run."""
    config, texts = recipe.config, recipe.texts
    imports = ["LoraConfig", "get_peft_model"]
    is_whole = config.quantized_count(recipe.layers) == recipe.layers
    if config.upcast_fp32 and is_whole:
        imports.append("prepare_model_for_kbit_training")
    return template("script.py.j2").render(
        header=comment((*facts(recipe), TRIED, *script_lost(recipe))),
        eight_bit=bool(kernels_beside(recipe)),
        config=config,
        base=recipe.config.model_dump(mode="json", include=set(_OF_THE_BASE)),
        measurement=recipe.measurement,
        weights=recipe.model.weights,
        alpha=plain_number(config.alpha),
        target_modules=targets(recipe),
        dtype=TORCH_DTYPES[recipe.dtype],
        adapter_dtype=TORCH_DTYPES[config.adapter_dtype],
        is_quantized_whole=is_whole,
        peft_imports=", ".join(imports),
        liger=liger_kernels(config.kernels),
        environment=allocator_settings(config.expandable_segments),
        needs=("" if config.kernels == "hf" else ", liger-kernel") + (", trl" if texts else ""),
        texts=texts,
        output=recipe.output_dir,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        schedule=SCHEDULE,
    )


def imported_beside(recipe: Record) -> dict[str, str]:
    """Return the files that a recipe's script imports from its directory, by their names."""
    rows = {ROWS: _copied("sweep.data", ROWS)}
    return {**rows, **kernels_beside(recipe)}


def kernels_beside(recipe: Record) -> dict[str, str]:
    """Return the file of 8-bit kernels that a recipe's script imports, by its name."""
    if not {recipe.config.compute_dtype, recipe.config.quantization} & set(EIGHT_BIT):
        return {}
    return {KERNELS: _copied("sweep.training", KERNELS)}


def _copied(package: str, name: str) -> str:
    source = (files(package) / name).read_text(encoding="utf-8")
    return f"# {WRITTEN_BY}, for the scripts beside it.\n{source}"


def script_lost(recipe: Record) -> tuple[str, ...]:
    """Return what the script cannot do as it was measured."""
    sharding = lost_sharding(recipe)
    if sharding is not None:
        return (sharding.replace("the file does not", "the script does not"),)
    return ()


@cache
def template(name: str) -> Template:
    """Return a template of a script."""
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
    return environment.get_template(name)


def _literal(value: object) -> str:
    """Return a value as Python, in double quotes where nothing in it needs care."""
    text = repr(value)
    return text if '"' in text or "\\" in text else text.replace("'", '"')
