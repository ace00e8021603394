"""Owns how the keys of a configuration are spelled as options of a command.

Imports nothing heavy: the terminal's help is built from it. The values' ranges are the
configuration's own business.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import typer

TARGET_SETS = ("qv", "attention", "all-linear")


@dataclass(frozen=True)
class ConfigOption:
    """One key of a configuration on the command line."""

    key: str
    optional: Any
    """Type of the value, or None where it was not typed."""
    help: str
    aliases: tuple[str, ...] = ()
    """Other spellings, shown before the key's own."""

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return every spelling; a truth value has its opposite beside it."""
        name = self.key.replace("_", "-")
        own = f"--{name}/--no-{name}" if self.optional == bool | None else f"--{name}"
        return (*self.aliases, own)


CONFIG_OPTIONS = (
    ConfigOption("micro_batch_size", int | None, "Sequences in one pass.", ("--batch-size",)),
    ConfigOption("seq_len", int | None, "Tokens in a sequence."),
    ConfigOption("lora_rank", int | None, "Rank of the adapters.", ("--rank",)),
    ConfigOption(
        "lora_alpha", float | None, "Scale of the adapters; twice the rank.", ("--alpha",)
    ),
    ConfigOption("lora_dropout", float | None, "Dropout of the adapters' input.", ("--dropout",)),
    ConfigOption("target_modules", str | None, "qv, attention, all-linear, or names with commas."),
    ConfigOption("effective_batch_size", int | None, "Sequences per optimizer step."),
    ConfigOption("compute_dtype", str | None, "bf16, fp16 or fp32."),
    ConfigOption("quantization", str | None, "nf4, fp4 or none."),
    ConfigOption("double_quant", bool | None, "Quantize the quantization constants too."),
    ConfigOption("checkpoint_fraction", float | None, "Share of layers recomputed, 0 to 1."),
    ConfigOption("upcast_fp32", bool | None, "Keep norms, embeddings and head in fp32."),
    ConfigOption("kernels", str | None, "hf, fused-loss or liger."),
    ConfigOption("attention", str | None, "sdpa, flash_attention_2 or eager."),
    ConfigOption("optimizer", str | None, "adamw_8bit, paged_adamw_8bit or adamw_torch_fused."),
    ConfigOption("compile", bool | None, "Compile each decoder layer."),
)
"""An option for each key; those that were not typed are left to the recipe."""


def with_config_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command an option for each key of a configuration.

    What was typed arrives as the command's argument ``configuration``, by key.
    """
    declared = inspect.signature(command, eval_str=True)
    own = [p for p in declared.parameters.values() if p.name != "configuration"]

    @wraps(command)
    def called(**values: Any) -> int:
        typed = {option.key: values.pop(option.key) for option in CONFIG_OPTIONS}
        return command(**values, configuration=given(typed))

    parameters = [*own, *map(_parameter, CONFIG_OPTIONS)]
    called.__signature__ = declared.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called


def _parameter(option: ConfigOption) -> inspect.Parameter:
    described = typer.Option(*option.spellings, help=option.help, show_default=False)
    return inspect.Parameter(
        option.key,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[option.optional, described],
    )


def given(typed: dict[str, Any]) -> dict[str, Any]:
    """Return what was typed of a configuration, as it reads it; keys not typed are left out."""
    values = {key: value for key, value in typed.items() if value is not None}
    targets = values.get("target_modules")
    # Any other word is a set misspelt, and the message about sets is the better one.
    if targets is not None and targets not in TARGET_SETS and ("," in targets or "_" in targets):
        values["target_modules"] = [name.strip() for name in targets.split(",") if name.strip()]
    return values
