"""A recipe as each trainer's file: options or a script under a comment that hides nothing.

How a trainer spells each setting is in `spelling`, how it is told of a dataset in `rows`; here is
what is not searched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from search_spaces.config import (
    KNOBS,
    MAX_GRAD_NORM,
    SCHEDULE,
    SCHEDULE_WARMUP_STEPS,
    TORCH_DTYPES,
    WEIGHT_DECAY,
)
from sweep.export.documents import comment, lora_options
from sweep.export.record import Record, facts
from sweep.export.rows import DATA_FILE, dataset_info, dataset_options, lost_rows
from sweep.export.script import template
from sweep.export.spelling import (
    SPELLED,
    Trainer,
    lost_settings,
    unsloth_loading,
    variables,
)

_NON_BLOCKING: Mapping[str, Any] = {"accelerator_config": {"non_blocking": True}}
_WITHOUT_WAITING: Mapping[str, Any] = {"logging_nan_inf_filter": False, **_NON_BLOCKING}
"""Nothing in a measured step waits for the GPU: neither a look at each loss nor a batch."""

_TRAINING_ARGUMENTS: Mapping[str, Any] = {
    "weight_decay": WEIGHT_DECAY,
    "max_grad_norm": MAX_GRAD_NORM,
    "lr_scheduler_type": SCHEDULE,
    "num_train_epochs": 1.0,
    "logging_steps": 10,
    **_WITHOUT_WAITING,
    "report_to": "none",
}
"""What was not searched, for trainers that use the names of transformers' `TrainingArguments`."""


@dataclass(frozen=True)
class TriedWith:
    """A trainer as its files were tried: built, and two steps trained."""

    name: str
    """As it writes itself."""
    versions: str
    pins: str
    """What those versions want of others, by their own metadata."""
    how: str = "Tried with"

    def __str__(self) -> str:
        return f"{self.how} {self.name} {self.versions}, {self.pins}."


TRIED: Mapping[Trainer, TriedWith] = {
    "trl": TriedWith(
        "TRL",
        "1.15.0 and 1.16.0",
        "which want transformers 4.56.2 or newer; earlier ones compute the loss in another way",
    ),
    "axolotl": TriedWith(
        "axolotl",
        "0.19.0",
        "which pins transformers 5.16.1, peft 0.20.0, trl 1.9.0, accelerate 1.13.0 and "
        "liger-kernel 0.8.1",
    ),
    "llama-factory": TriedWith(
        "LLaMA-Factory",
        "0.9.5",
        "which wants transformers up to 5.6.0, peft 0.18.0 to 0.18.1, accelerate up to 1.11.0 and "
        "trl up to 0.24.0",
    ),
    "unsloth": TriedWith(
        "Unsloth", "2026.8 to 2026.10", "which no test runs, as it needs a GPU", how="Written for"
    ),
}


def trl(recipe: Record) -> str:
    """Return a recipe as a configuration file of TRL's command line."""
    options = {
        "model_name_or_path": _model(recipe),
        "use_peft": True,
        **trl_options(recipe),
        "output_dir": recipe.output_dir,
    }
    cards = recipe.config.data_parallel
    command = "trl sft --config FILE" + (f" --num_processes {cards}" if cards > 1 else "")
    return _file(recipe, trainer="trl", command=command, options=options)


def trl_options(recipe: Record) -> dict[str, Any]:
    """Return what TRL's configuration classes are told of a recipe, wherever its model is."""
    return {
        **_spelled(recipe, trainer="trl"),
        **dataset_options(recipe, "trl"),
        "loss_type": "nll",
        **_TRAINING_ARGUMENTS,
    }


def axolotl(recipe: Record) -> str:
    """Return a recipe as an axolotl YAML file."""
    options = {
        "base_model": _model(recipe),
        **_spelled(recipe, trainer="axolotl"),
        # Left out, they may be switched on by themselves; they were not measured.
        "lora_mlp_kernel": False,
        "lora_qkv_kernel": False,
        "lora_o_kernel": False,
        **dataset_options(recipe, "axolotl"),
        "dataset_prepared_path": f"{recipe.output_dir}/prepared",
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_scheduler": SCHEDULE,
        "warmup_steps": SCHEDULE_WARMUP_STEPS,
        "num_epochs": 1,
        "logging_steps": 10,
        **_NON_BLOCKING,
        "output_dir": recipe.output_dir,
    }
    cards = recipe.config.data_parallel
    several = f"accelerate launch --num_processes {cards} -m axolotl.cli.train FILE"
    command = "axolotl train FILE" if cards == 1 else several
    return _file(recipe, trainer="axolotl", command=command, options=options)


def llama_factory(recipe: Record) -> str:
    """Return a recipe as a LLaMA-Factory YAML file."""
    options = {
        "model_name_or_path": _model(recipe),
        "do_train": True,
        "finetuning_type": "lora",
        **_spelled(recipe, trainer="llama-factory"),
        **dataset_options(recipe, "llama-factory"),
        **_TRAINING_ARGUMENTS,
        "output_dir": recipe.output_dir,
    }
    return _file(
        recipe, trainer="llama-factory", command="llamafactory-cli train FILE", options=options
    )


_NO_ARGUMENTS = (
    *("lora_", "load_in_", "bnb_", "use_bnb_", "dtype", "attn_", "use_liger_", "liger_"),
    *("gradient_checkpointing_kwargs", "datasets", "test_split_", "dataset_text_", "assistant_"),
)
"""What TRL's options begin with that are of the model, the examples, or not Unsloth's."""


def unsloth(recipe: Record) -> str:
    """Return a script that trains a recipe by Unsloth, with TRL's options for the rest."""
    options, lora = trl_options(recipe), lora_options(recipe)
    return template("unsloth.py.j2").render(
        header=_header(recipe, trainer="unsloth", command="python FILE"),
        recipe=recipe,
        data=options["datasets"][0],
        held_out=options.get("test_split_size"),
        dtype=TORCH_DTYPES[recipe.dtype],
        loading={"max_seq_length": recipe.config.seq_len, **unsloth_loading(recipe)},
        # The others Unsloth writes itself.
        adapters={key: lora[key] for key in lora if key not in ("task_type", "use_dora")},
        options={k: v for k, v in options.items() if not k.startswith(_NO_ARGUMENTS)},
    )


def lost(recipe: Record, trainer: Trainer) -> tuple[str, ...]:
    """Return what a trainer cannot express of what was measured, and what its file does instead."""
    known = (sentence for _, sentence in lost_settings(recipe, trainer))
    return (*known, *_OLDER.get(trainer, ()), *lost_rows(recipe, trainer))


_OLDER: Mapping[Trainer, tuple[str, ...]] = {
    "axolotl": (
        "Older releases have no attn_implementation: they want flash_attention, sdp_attention or "
        "eager_attention true in its place, and leave out what they do not know without a word.",
    )
}


def _to_fill_in(recipe: Record, trainer: Trainer) -> Iterator[str]:
    """Yield what of a file is the user's to do."""
    if not recipe.model.weights:
        yield "the model: its architecture alone was measured"
    if trainer == "llama-factory":
        beside = f" with your {DATA_FILE} and" if recipe.texts is None else " with"
        yield f"dataset_dir, a directory{beside} a dataset_info.json of what is below"
    elif recipe.texts is None:
        yield "datasets"


def _file(recipe: Record, *, trainer: Trainer, command: str, options: Mapping[str, Any]) -> str:
    """Return the text of a trainer's file, with these options in it."""
    body = yaml.safe_dump(dict(options), sort_keys=False, default_flow_style=False)
    return f"{_header(recipe, trainer=trainer, command=command)}\n\n{body}"


def _header(recipe: Record, *, trainer: Trainer, command: str) -> str:
    """Return the comment over a trainer's file; ``FILE`` stands for it in the command."""
    tried = TRIED[trainer]
    edits = tuple(_to_fill_in(recipe, trainer))
    paragraphs = (
        *facts(recipe),
        "",
        f"For {tried.name}: {_command(recipe, command, trainer=trainer)}",
        str(tried),
        "Schedule and epochs were not searched."
        + (" To fill in:" if edits else " Nothing is to be filled in."),
        *_items(edits),
        "",
        f"Where {tried.name} cannot do what was measured:",
        *_items(lost(recipe, trainer) or ("nothing known: every setting is below",)),
    )
    # A line each, to be taken as it is: in a paragraph a long path would be broken.
    info = f"{_INFO}{json.dumps(dataset_info(recipe))}\n" if trainer == "llama-factory" else ""
    return f"{comment(paragraphs)}\n{info}".rstrip()


_INFO = "# dataset_info.json: "


def _items(texts: Iterable[str]) -> Iterator[str]:
    return (f"- {text}" for text in texts)


def _model(recipe: Record) -> str:
    """Return where a trainer finds the weights, or what to put there."""
    return recipe.model.weights or f"path/or/hub-id/of/{recipe.model.name}"


def _spelled(recipe: Record, *, trainer: Trainer) -> dict[str, Any]:
    """Return the options of a trainer that say what was measured, setting by setting."""
    options: dict[str, Any] = {}
    for key in KNOBS:
        match SPELLED[trainer].get(key):
            case None:
                continue
            case str(option):
                options[option] = getattr(recipe.config, key)
            case spell:
                options |= spell(recipe)
    return options


def _command(recipe: Record, command: str, *, trainer: Trainer) -> str:
    """Return how to start a trainer, with the variables that it has to find."""
    given = variables(recipe, trainer).items()
    return " ".join([*(f"{name}={value}" for name, value in given), command])
