"""A record as documents for programs: YAML, and PEFT's own configuration of an adapter; and what
every exporter needs: fixed settings, comments."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from typing import Any

import yaml

from sweep.export.record import Record, facts

_COMMENT_WIDTH = 96
PEFT_LOST = (
    "adapter_config.json holds the adapters alone: rank, alpha, dropout and layers. What was "
    "measured depends on the rest too, which formats json and script hold.",
)


def yaml_document(recipe: Record) -> str:
    """Return the same as YAML, under a comment in words."""
    body = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, default_flow_style=False)
    return f"{comment(facts(recipe))}\n\n{body}"


def peft(recipe: Record) -> str:
    """Return the ``adapter_config.json`` of a recipe, which `peft.PeftConfig` loads.

    PEFT warns of keys that it does not know. ``auto_mapping`` takes any, is kept when an adapter is
    saved, and is not looked at where a task type is given: what is known of the recipe is in there.
    """
    values = recipe.model_dump(mode="json")
    options = {
        "peft_type": "LORA",
        # Of a shipped architecture nobody knows where the weights are; PEFT notes it when it loads.
        "base_model_name_or_path": recipe.model.weights,
        "inference_mode": False,
        **lora_options(recipe),
        "auto_mapping": {
            "provenance": values["provenance"]
            | {key: values[key] for key in ("config", "measurement", "texts")}
        },
    }
    return json.dumps(options, indent=2) + "\n"


def lora_options(recipe: Record) -> dict[str, Any]:
    """Return what PEFT's `LoraConfig` is told of a recipe."""
    config = recipe.config
    return {
        "task_type": "CAUSAL_LM",
        "r": config.lora_rank,
        "lora_alpha": plain_number(config.alpha),
        "lora_dropout": config.lora_dropout,
        "target_modules": targets(recipe),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
    }


def plain_number(value: float) -> float | int:
    """Return a whole number without its decimal point."""
    return int(value) if value == int(value) else value


def comment(paragraphs: Iterable[str]) -> str:
    """Return paragraphs as lines that begin with ``#``; nothing in them can end a line.

    A paragraph that begins with ``- `` is a list item.
    """
    wrapper = textwrap.TextWrapper(_COMMENT_WIDTH, break_on_hyphens=False)
    lines: list[str] = []
    for text in paragraphs:
        wrapper.subsequent_indent = "  " if text.startswith("- ") else ""
        lines += wrapper.wrap(printable(text)) or [""]
    return "\n".join(f"# {line}".rstrip() for line in lines)


def printable(text: str) -> str:
    """Return text with everything that does not print, line ends included, as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def targets(record: Record) -> str | list[str]:
    """Return the layers with an adapter, as PEFT takes them."""
    names = record.config.target_modules
    return names if isinstance(names, str) else list(names)
