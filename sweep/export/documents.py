"""A recipe as documents for programs: JSON, YAML, and PEFT's own configuration of an adapter.

Values are resolved: no default is left out and no set of layers stands for its names.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from sweep.export.recipe import Recipe, comment, plain_number

_RECORD = "# record: "
PEFT_LOST = (
    "adapter_config.json holds the adapters alone: rank, alpha, dropout and layers. What was "
    "measured depends on the rest too, which formats json and script hold.",
)


def json_document(recipe: Recipe) -> str:
    """Return configuration, measurement and provenance as JSON."""
    return json.dumps(document(recipe), indent=2) + "\n"


def yaml_document(recipe: Recipe) -> str:
    """Return the same as YAML, under a comment in words."""
    body = yaml.safe_dump(
        json.loads(json_document(recipe)), sort_keys=False, default_flow_style=False
    )
    return f"{comment(recipe.facts())}\n\n{body}"


def peft(recipe: Recipe) -> str:
    """Return the ``adapter_config.json`` of a recipe, which `peft.PeftConfig` loads.

    PEFT warns of keys that it does not know. ``auto_mapping`` takes any, is kept when an adapter is
    saved, and is not looked at where a task type is given: what is known of the recipe is in there.
    """
    values = {
        "peft_type": "LORA",
        # Of a shipped architecture nobody knows where the weights are; PEFT notes it when it loads.
        "base_model_name_or_path": recipe.weights,
        "inference_mode": False,
        **lora_options(recipe),
        "auto_mapping": {"provenance": recipe.provenance() | {"config": recipe.resolved}},
    }
    return json.dumps(values, indent=2) + "\n"


def lora_options(recipe: Recipe) -> dict[str, Any]:
    """Return what PEFT's `LoraConfig` is told of a recipe."""
    config = recipe.config
    return {
        "task_type": "CAUSAL_LM",
        "r": config.lora_rank,
        "lora_alpha": plain_number(config.alpha),
        "lora_dropout": config.lora_dropout,
        "target_modules": recipe.targets,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
    }


def record_line(recipe: Recipe) -> str:
    """Return the document in a comment of one line, as the head of every other export has it.

    So a run of a file can be held against what was measured wherever the file is.
    """
    # ASCII alone, so that nothing in it can end the line.
    return _RECORD + json.dumps(document(recipe))


def recorded(text: str) -> str | None:
    """Return the JSON of the document that an export has in its head; None where it has none."""
    lines = (line for line in text.splitlines() if line.startswith(_RECORD))
    return next((line.removeprefix(_RECORD) for line in lines), None)


def document(recipe: Recipe) -> dict[str, Any]:
    """Return configuration, measurement and provenance in plain JSON values."""
    return {
        "study": recipe.study,
        "number": recipe.number,
        "model": {"name": recipe.model.name, "weights": recipe.weights},
        "gpu": {
            "name": recipe.target.gpu,
            "budget_bytes": recipe.target.budget_bytes,
            "emulated_on": recipe.target.emulated_on,
        },
        "config": recipe.resolved,
        "gradient_accumulation_steps": recipe.config.accumulation_steps,
        "output_dir": recipe.output_directory("json"),
        "measurement": recipe.measurement.model_dump(mode="json", exclude={"soak"}),
        "confirmed": recipe.is_confirmed,
        "versions": recipe.environment.get("versions"),
        "texts": None if recipe.texts is None else recipe.texts.summary.model_dump(mode="json"),
        "provenance": recipe.provenance(),
    }
