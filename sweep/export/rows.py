"""How each trainer is told of a study's texts: where they are, what their rows hold, what carries
loss, what is held out.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sweep.data.rows import ROLES_OF_OTHERS, ending
from sweep.export.record import Record as Recipe
from sweep.export.record import RecordedTexts as RecipeTexts
from sweep.export.record import Trainer

DATA_FILE = "data.jsonl"
"""Stands for texts where a study had none, one ``{"text": "..."}`` a line."""
DATASET = "texts"
"""What LLaMA-Factory's `dataset_info.json` calls them."""
_INSTRUCTIONS = ("instruction", "input", "output")


def builder_of(source: str) -> str | None:
    """Return what `datasets` reads a file with; None of a directory or a hub id."""
    end = ending(Path(source))
    if end is None or Path(source).is_dir():
        return None
    return {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}.get(end, "json")


def _has_tabs(source: str) -> bool:
    return builder_of(source) == "csv" and ".tsv" in Path(source).name.lower()


def dataset_options(recipe: Recipe, trainer: Trainer) -> dict[str, Any]:
    """Return the options that say what to train on."""
    return _OPTIONS[trainer](recipe)


def lost_rows(recipe: Recipe, trainer: Trainer) -> tuple[str, ...]:
    """Return what a trainer cannot say of the texts, and what its file does instead."""
    texts = recipe.texts
    if texts is None:
        return ()
    told = _LOST[trainer].get(texts.summary.kind)
    sentences = [*([] if told is None else [told(texts)]), *_lost_file(texts, trainer)]
    if texts.tokenizer is not None and trainer != "axolotl":
        sentences.append(
            f"Tokenizer: it takes the model's own; the texts were measured with {texts.tokenizer}. "
            "Put that one's files beside the weights."
        )
    if texts.summary.broken:
        sentences.append(
            f"Broken rows: the study left {texts.summary.broken:,} out. `datasets` reads the texts "
            "here, and may refuse a file that has any, or train on them: `sweep data` names them, "
            "take them out."
        )
    if texts.eval_fraction:
        sentences.append(
            "Held-out rows: it chooses as many by a seed of its own, so others than the study's."
        )
    return tuple(sentences)


_REWRITE = "Write the texts as JSON lines."
_LLAMA_FACTORY_READS = (".json", ".jsonl", ".csv", ".parquet")


def _lost_file(texts: RecipeTexts, trainer: Trainer) -> Iterator[str]:
    """Yield what a trainer does not read as the study did, as it leaves reading to `datasets`."""
    path, builder = Path(texts.source), builder_of(texts.source)
    if builder is None:
        if path.is_absolute():
            yield (
                "A directory: `datasets` reads the files of one ending in it, the most frequent, "
                "and of the split train alone."
            )
        return
    if trainer == "llama-factory" and path.suffix not in _LLAMA_FACTORY_READS:
        known = ", ".join(_LLAMA_FACTORY_READS)
        yield f"{path.name}: it refuses a file that does not end in {known}. {_REWRITE}"
    elif trainer == "axolotl" and _has_tabs(texts.source):
        yield f"{path.name}: it reads CSV with commas alone, not with tabs. {_REWRITE}"
    if glob.has_magic(texts.source):
        yield f"{texts.source}: `datasets` takes *, ? and [ for a pattern. Rename it."
    if builder == "csv" and texts.summary.kind in ("messages", "conversations"):
        yield f"Chats in CSV: it does not look for JSON in a cell. {_REWRITE}"
    elif builder == "csv":
        marks = "tabs" if _has_tabs(texts.source) else "commas"
        yield (
            f"CSV: `datasets` expects {marks} between cells, and takes a column of numbers for "
            "numbers, and NA, null or an empty cell for nothing; measured were the cells' texts, "
            "whatever is between them."
        )


# TRL


def _trl(recipe: Recipe) -> dict[str, Any]:
    texts = recipe.texts
    if texts is None:
        return {"datasets": [{"path": "json", "data_files": DATA_FILE, "columns": ["text"]}]}
    return {
        "datasets": [{**_loaded(texts.source), "columns": list(_trl_columns(texts))}],
        **_trl_loss(texts),
        **_held_out_by_trainer(recipe, "test_split_size"),
    }


def _loaded(source: str) -> dict[str, Any]:
    builder, path = builder_of(source), Path(source)
    if builder is None:
        return {"path": source}
    if _has_tabs(source):
        # Of a file in a directory datasets sees by its ending that it has tabs.
        return {"path": str(path.parent), "data_files": path.name}
    return {"path": builder, "data_files": source}


def _trl_columns(texts: RecipeTexts) -> tuple[str, ...]:
    match texts.summary.kind:
        case "text":
            return (texts.column,)
        case "instruction" | "prompt-completion":
            return ("prompt", "completion")
        case kind:
            return (kind,)


def _trl_loss(texts: RecipeTexts) -> dict[str, Any]:
    only = texts.summary.completions_only
    match texts.summary.kind:
        case "text":
            return {"dataset_text_field": texts.column}
        case "instruction" | "prompt-completion":
            return {"completion_only_loss": only}
        case "messages":
            return {"assistant_only_loss": only}
        case _:
            # Asked of anything but messages, it refuses.
            return {"assistant_only_loss": False}


def _lost_instruction(texts: RecipeTexts) -> str:
    return (
        "instruction: it reads no such columns. Write each row as prompt (the instruction in "
        "Alpaca's words) and completion."
    )


def _unsloth_lost_chats(texts: RecipeTexts) -> str:
    loss = ", and every token carries loss" if texts.summary.completions_only else ""
    return f"Chats: it takes messages with the roles user, assistant and tool alone{loss}."


def _trl_lost_conversations(texts: RecipeTexts) -> str:
    loss = " and loss on every token" if texts.summary.completions_only else ""
    return (
        "conversations: it renames from and value alone, so the chat template sees the roles "
        f"human, gpt and observation{loss}. Write them as messages with the roles user, assistant "
        "and tool."
    )


# axolotl


def _axolotl(recipe: Recipe) -> dict[str, Any]:
    texts = recipe.texts
    if texts is None:
        rows = {"path": DATA_FILE, "ds_type": "json", "type": "completion", "field": "text"}
        return {"datasets": [rows], "val_set_size": 0.0}
    builder = builder_of(texts.source)
    where = {"path": texts.source, **({"ds_type": builder} if builder else {}), "split": "train"}
    return {
        "datasets": [{**where, **_axolotl_rows(texts)}],
        **({"tokenizer_config": texts.tokenizer} if texts.tokenizer else {}),
        "train_on_inputs": not texts.summary.completions_only,
        # Left out, it drops what is longer.
        "excess_length_strategy": "truncate",
        "val_set_size": texts.eval_fraction,
        **({"evals_per_epoch": 1} if texts.eval_fraction else {}),
    }


def _axolotl_rows(texts: RecipeTexts) -> dict[str, Any]:
    match texts.summary.kind:
        case "text":
            return {"type": "completion", "field": texts.column}
        case "instruction":
            return {"type": "alpaca"}
        case "prompt-completion":
            prompt = {"format": "{instruction}", "no_input_format": "{instruction}"}
            fields = {"field_instruction": "prompt", "field_output": "completion"}
            return {"type": {**fields, **prompt}}
        case kind:
            names = ("from", "value") if kind == "conversations" else ("role", "content")
            roles = {role: [other] for other, role in ROLES_OF_OTHERS.items()}
            return {
                "type": "chat_template",
                "field_messages": kind,
                "message_property_mappings": dict(zip(("role", "content"), names, strict=True)),
                # Of ShareGPT's it knows human and gpt alone.
                **({"roles": roles} if kind == "conversations" else {}),
            }


def _axolotl_lost_text(texts: RecipeTexts) -> str:
    return (
        "Long texts: it cuts one that is longer than sequence_len into several rows; measured was "
        "its beginning alone."
    )


# LLaMA-Factory


def _llama_factory(recipe: Recipe) -> dict[str, Any]:
    texts = recipe.texts
    if texts is None:
        # Stage pt joins the texts and cuts them into rows of cutoff_len: every token carries loss.
        return {"stage": "pt", "dataset": DATASET, "dataset_dir": "data"}
    where = {"dataset": DATASET, "dataset_dir": "data"}
    held = _held_out_by_trainer(recipe, "val_size")
    if texts.summary.kind == "text":
        return {"stage": "pt", **where, **held}
    template = _LLAMA_FACTORY_TEMPLATES.get(texts.summary.kind)
    return {
        "stage": "sft",
        # Left out, it is made of the tokenizer's own.
        **({"template": template} if template else {}),
        **where,
        "train_on_prompt": not texts.summary.completions_only,
        **held,
    }


_LLAMA_FACTORY_TEMPLATES = {"instruction": "alpaca", "prompt-completion": "empty"}


def dataset_info(recipe: Recipe) -> dict[str, Any]:
    """Return the content of LLaMA-Factory's ``dataset_info.json``."""
    texts = recipe.texts
    if texts is None:
        return {DATASET: {"file_name": DATA_FILE, "columns": {"prompt": "text"}}}
    # Of a directory it would take every file, also what is no text; datasets chooses.
    where = "file_name" if builder_of(texts.source) else "hf_hub_url"
    return {DATASET: {where: texts.source, **_llama_factory_rows(texts)}}


def _llama_factory_rows(texts: RecipeTexts) -> dict[str, Any]:
    match texts.summary.kind:
        case "text":
            return {"columns": {"prompt": texts.column}}
        case "instruction":
            names = ("prompt", "query", "response")
            columns = dict(zip(names, _INSTRUCTIONS, strict=True))
            has_input = not texts.summary.columns or "input" in texts.summary.columns
            return {"columns": columns if has_input else {**columns, "query": None}}
        case "prompt-completion":
            return {"columns": {"prompt": "prompt", "response": "completion"}}
        case "conversations":
            return {"formatting": "sharegpt", "columns": {"messages": "conversations"}}
        case _:
            tagged = ("role", "content", "user", "assistant", "system")
            tags = {f"{name}_tag": name for name in tagged}
            return {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}


def _llama_factory_lost_pairs(texts: RecipeTexts) -> str:
    return (
        "Long rows: it cuts prompt and answer both, each to its share; measured were rows cut at "
        "their end."
    )


def _llama_factory_lost_instruction(texts: RecipeTexts) -> str:
    return (
        "instruction: its alpaca template puts the input behind the instruction without a heading "
        f"of its own. {_llama_factory_lost_pairs(texts)}"
    )


def _llama_factory_lost_chats(texts: RecipeTexts) -> str:
    return (
        "Chats: it makes a template of its own of the tokenizer's, which may differ, and leaves "
        f"out those that do not alternate. {_llama_factory_lost_pairs(texts)}"
    )


def _held_out_by_trainer(recipe: Recipe, option: str) -> dict[str, Any]:
    """Return the options of transformers' that evaluate once an epoch on a share of the rows."""
    if recipe.texts is None or not recipe.texts.eval_fraction:
        return {}
    return {
        option: recipe.texts.eval_fraction,
        "eval_strategy": "epoch",
        "per_device_eval_batch_size": recipe.config.micro_batch_size,
    }


_OPTIONS: Mapping[Trainer, Callable[[Recipe], dict[str, Any]]] = {
    "trl": _trl,
    "axolotl": _axolotl,
    "llama-factory": _llama_factory,
}
_LOST: Mapping[Trainer, Mapping[str, Callable[[RecipeTexts], str]]] = {
    "trl": {
        "instruction": _lost_instruction,
        "conversations": _trl_lost_conversations,
    },
    "unsloth": {
        **dict.fromkeys(("messages", "conversations"), _unsloth_lost_chats),
        "instruction": _lost_instruction,
    },
    "axolotl": {"text": _axolotl_lost_text},
    "llama-factory": {
        "instruction": _llama_factory_lost_instruction,
        "prompt-completion": _llama_factory_lost_pairs,
        "messages": _llama_factory_lost_chats,
        "conversations": _llama_factory_lost_chats,
    },
}
