"""A directory with the tiny model's random weights and the demo's tokenizer, which knows chats."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.sweep.data.kinds import ReadingOptions
from tests.sweep.training.tiny import TINY

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog")


def saved_model(directory: Path) -> ModelSpec:
    """Write weights and tokenizer, and return the model that is there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY.config)).save_pretrained(directory)
    with_tokenizer(directory)
    return dataclasses.replace(TINY, source="directory", path=directory)


def with_tokenizer(directory: Path) -> None:
    """Write the demo's tokenizer beside a model."""
    from transformers import AutoTokenizer

    tokenizer = load_model_spec("demo").tokenizer_path
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)


def a_row(kind: str, index: int) -> dict[str, Any]:
    """Return a row of a kind, of nine to forty-five words."""
    answer, question = " ".join(WORDS * (1 + index % 5)), f"what is {WORDS[index % 9]}"
    match kind:
        case "preference":
            chosen = f"In the hall {index}." * (1 + index % 4)
            return {"prompt": f"Where is {index}? ", "chosen": chosen, "rejected": "No."}
        case "text":
            return {"text": answer}
        case "instruction":
            given = {"input": "brown" if index % 2 else ""}
            return {"instruction": question, **given, "output": answer}
        case "prompt-completion":
            return {"prompt": f"{question} ", "completion": answer}
        case "messages":
            turns = (("user", question), ("assistant", answer))
            return {kind: [{"role": role, "content": content} for role, content in turns]}
        case _:
            turns = (("human", question), ("gpt", answer))
            return {kind: [{"from": role, "value": value} for role, value in turns]}


def prepared_by_sweep(source: Path, kind: Any, *, tokenizer: str, completions_only: bool) -> Path:
    """Return where a file's tokens are once they are prepared as for a study."""
    from qlora_sweep.sweep.data.prepared_dataset import PreparationRequest
    from qlora_sweep.sweep.data.preparing import prepare

    asked = ReadingOptions(format=kind)
    home = str(source.with_name("prepared"))
    question = PreparationRequest(
        str(source), asked, completions_only, tokenizer, tokenizer, "", home, "x"
    )
    return prepare(question, on_progress=lambda *_: None)


def written_dataset(path: Path, kind: str, *, rows: int = 60) -> Path:
    """Write rows of a kind as JSON lines."""
    lines = (json.dumps(a_row(kind, index)) for index in range(rows))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
