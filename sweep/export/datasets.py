"""How other trainers are told of a dataset, and what they do with it otherwise, by
``datasets.yaml``.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from qlora_sweep.search_spaces.dataset_choice import DatasetSummary
from qlora_sweep.sweep.data.files import ending, is_saved
from qlora_sweep.sweep.data.kinds import CHATS
from qlora_sweep.sweep.export.record import Record, Trainer

TEMPLATE_FILE = "trl_chat_template.jinja"
"""Lies beside TRL's file where it needs a chat template that marks the assistant's turns."""
DATA_FILE = "data.jsonl"
"""Stands for a dataset where a study had none, one ``{"text": "..."}`` a line."""


_NEEDED = ("text", "prompt", "completion", "instruction", "output", *CHATS)
_OPTIONAL = ("input", "system", "history")
"""Fields of examples, by which a trainer is told of their columns."""
_OF_TRL = ("prompt-completion", "preference", "messages", "conversations")
_BY_NAME = {
    "trl": _OF_TRL,
    "unsloth": _OF_TRL,
    "axolotl": ("instruction", "preference"),
    "llama-factory": (),
}
"""Kinds of examples whose columns a trainer takes by their names alone."""


@cache
def table(name: str) -> Mapping[str, Any]:
    """Return one of this package's tables: ``trainers`` or ``datasets``."""
    text = (files("qlora_sweep.sweep.export") / f"{name}.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Return options with values in place of their names, without those that are null."""
    match value:
        case dict():
            options = {}
            for key, template in value.items():
                option = filled(template, values)
                if option is not None:
                    options[key] = option
            return options
        case list():
            return [filled(template, values) for template in value]
        case str() if value.startswith("$"):
            return values[value[1:]]
    return value


def dataset_options(record: Record, reader: str) -> dict[str, Any]:
    """Return the options that say a trainer, or ``dataset_info``, what to train on."""
    options = table("datasets")["options"][reader]
    dataset = record.texts
    if dataset is None:
        kind = "full"
        if record.config.is_on_pairs:
            kind = "full pairs"
        return dict(filled(options[kind], {"data_file": DATA_FILE}))
    summary = dataset.summary
    source = dataset.source
    values: dict[str, Any] = {
        "source": source,
        "trl_path": source,
        "pair_columns": [c for c in ("prompt", "chosen", "rejected") if c in summary.columns],
        "only": summary.completions_only,
        "everything": not summary.completions_only,
        "tokenizer": dataset.tokenizer,
        "eval_fraction": dataset.eval_fraction,
    }
    for field in _NEEDED:
        values[f"{field}_column"] = dataset.column(field) or field
    for field in _OPTIONAL:
        values[f"{field}_column"] = dataset.column(field)
    # What a case below does not give is null, and its option is left out.
    values |= dict.fromkeys(("builder", "trl_files", "file", "no_file", "template_file"))
    values |= dict.fromkeys(("held_out", "evaluations", "each_epoch", "eval_batch"))
    builder = _builder(source)
    if builder is None:
        values["no_file"] = source
    else:
        values |= {"file": source, "builder": builder, "trl_path": builder, "trl_files": source}
        if _has_tabs(source):
            # Of a file in a directory datasets sees by its ending that it has tabs.
            values |= {"trl_path": str(Path(source).parent), "trl_files": Path(source).name}
    if summary.marked_template:
        values["template_file"] = TEMPLATE_FILE
    if dataset.eval_fraction:
        values |= {"held_out": dataset.eval_fraction, "evaluations": 1, "each_epoch": "epoch"}
        values["eval_batch"] = record.config.micro_batch_size
    return dict(filled(options["every"] | options[summary.kind], values))


def _renamed(summary: DatasetSummary) -> str:
    """Return what columns are to be called, where that is something else than they are."""
    if "messages" in summary.columns_read and summary.kind == "prompt-completion":
        return ""
    columns = summary.columns_read.items()
    return ", ".join(f"{column} to {name}" for name, column in columns if name != column)


def _builder(source: str) -> str | None:
    """Return what `datasets` reads a file with; None of a directory or a hub id."""
    end = ending(Path(source))
    if end is None or Path(source).is_dir():
        return None
    return {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}.get(end, "json")


def _has_tabs(source: str) -> bool:
    return _builder(source) == "csv" and ".tsv" in Path(source).name.lower()


def lost_of_dataset(record: Record, trainer: Trainer) -> tuple[str, ...]:
    """Return what a trainer cannot say of a dataset, and what its file does instead."""
    dataset = record.texts
    if dataset is None:
        return ()
    path = Path(dataset.source)
    builder = _builder(dataset.source)
    kind = dataset.summary.kind
    is_chat = kind in CHATS
    is_of_disk = is_saved(dataset.source)
    has_tabs = _has_tabs(dataset.source)
    renamed = _renamed(dataset.summary)
    reads = (".json", ".jsonl", ".csv", ".parquet")
    applies = {
        "directory": builder is None and path.is_absolute() and not is_of_disk,
        "saved": is_of_disk and trainer != "axolotl",
        "ending": builder and trainer == "llama-factory" and path.suffix not in reads,
        "tabs": trainer == "axolotl" and has_tabs,
        "pattern": builder and glob.has_magic(dataset.source),
        "chats": builder == "csv" and is_chat,
        "csv": builder == "csv" and not is_chat,
        "tokenizer": dataset.tokenizer is not None and trainer != "axolotl",
        "unmarked": trainer == "trl" and kind == "messages" and dataset.summary.marked_template,
        "broken": dataset.summary.broken,
        "held_out": dataset.eval_fraction,
        "silenced": dataset.summary.silenced,
        "inputs": kind == "prompt-completion" and "messages" in dataset.summary.columns_read,
        "renamed": kind in _BY_NAME[trainer] and renamed,
    }
    described = table("datasets")
    sentences = []
    if kind in described["kinds"][trainer]:
        sentences.append(described["kinds"][trainer][kind])
    for key, does_apply in applies.items():
        if does_apply:
            sentences.append(described["files"][key])
    marks = "commas"
    if has_tabs:
        marks = "tabs"
    values = {
        "name": path.name,
        "source": dataset.source,
        "marks": marks,
        "tokenizer": dataset.tokenizer,
        "template": TEMPLATE_FILE,
        "broken": dataset.summary.broken,
        "renamed": renamed,
        "silenced": dataset.summary.silenced,
        "basis": record.basis,
    }
    return tuple(sentence.format(**values) for sentence in sentences)
