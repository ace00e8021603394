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

from qlora_sweep.search_spaces.texts import TextsSummary
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
_BY_NAME = {
    "trl": ("prompt-completion", "preference", *CHATS),
    "unsloth": ("prompt-completion", "preference", *CHATS),
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
            found = {key: filled(each, values) for key, each in value.items()}
            return {key: each for key, each in found.items() if each is not None}
        case list():
            return [filled(each, values) for each in value]
        case str() if value.startswith("$"):
            return values[value[1:]]
    return value


def dataset_options(record: Record, whom: str) -> dict[str, Any]:
    """Return the options that say a trainer, or ``dataset_info``, what to train on."""
    options, texts = table("datasets")["options"][whom], record.texts
    if texts is None:
        kind = "full pairs" if record.config.is_on_pairs else "full"
        return dict(filled(options[kind], {"data_file": DATA_FILE}))
    summary, builder, source = texts.summary, _builder(texts.source), texts.source
    # Of a file in a directory datasets sees by its ending that it has tabs.
    trl = (str(Path(source).parent), Path(source).name) if _has_tabs(source) else (builder, source)
    columns, share = summary.columns, texts.eval_fraction
    values = {
        "source": source,
        "builder": builder,
        "trl_path": trl[0] or source,
        "trl_files": trl[1] if builder else None,
        "file": source if builder else None,
        "no_file": None if builder else source,
        "pair_columns": [c for c in ("prompt", "chosen", "rejected") if c in columns],
        **{f"{field}_column": texts.column(field) or field for field in _NEEDED},
        **{f"{field}_column": texts.column(field) for field in _OPTIONAL},
        "only": summary.completions_only,
        "everything": not summary.completions_only,
        "template_file": TEMPLATE_FILE if summary.marked_template else None,
        "tokenizer": texts.tokenizer,
        "eval_fraction": share,
        "held_out": share or None,
        "evaluations": 1 if share else None,
        "each_epoch": "epoch" if share else None,
        "eval_batch": record.config.micro_batch_size if share else None,
    }
    return dict(filled(options["every"] | options[summary.kind], values))


def _renamed(summary: TextsSummary) -> str:
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


def lost_rows(record: Record, trainer: Trainer) -> tuple[str, ...]:
    """Return what a trainer cannot say of a dataset, and what its file does instead."""
    texts = record.texts
    if texts is None:
        return ()
    path, builder, kind = Path(texts.source), _builder(texts.source), texts.summary.kind
    reads = (".json", ".jsonl", ".csv", ".parquet")
    is_chat, is_of_disk = kind in ("messages", "conversations"), is_saved(texts.source)
    told = {
        "directory": builder is None and path.is_absolute() and not is_of_disk,
        "saved": is_of_disk and trainer != "axolotl",
        "ending": builder and trainer == "llama-factory" and path.suffix not in reads,
        "tabs": trainer == "axolotl" and _has_tabs(texts.source),
        "pattern": builder and glob.has_magic(texts.source),
        "chats": builder == "csv" and is_chat,
        "csv": builder == "csv" and not is_chat,
        "tokenizer": texts.tokenizer is not None and trainer != "axolotl",
        "unmarked": trainer == "trl" and kind == "messages" and texts.summary.marked_template,
        "broken": texts.summary.broken,
        "held_out": texts.eval_fraction,
        "silenced": texts.summary.silenced,
        "inputs": kind == "prompt-completion" and "messages" in texts.summary.columns_read,
        "renamed": kind in _BY_NAME[trainer] and _renamed(texts.summary),
    }
    of_kind = table("datasets")["kinds"][trainer].get(kind)
    sentences = [table("datasets")["files"][key] for key, is_told in told.items() if is_told]
    if of_kind is not None:
        sentences.insert(0, of_kind)
    values = {
        "name": path.name,
        "source": texts.source,
        "marks": "tabs" if _has_tabs(texts.source) else "commas",
        "tokenizer": texts.tokenizer,
        "template": TEMPLATE_FILE,
        "broken": texts.summary.broken,
        "renamed": _renamed(texts.summary),
        "silenced": texts.summary.silenced,
        "basis": record.basis,
    }
    return tuple(sentence.format(**values) for sentence in sentences)
