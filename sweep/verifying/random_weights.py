"""Random weights in a directory, for scripts that load an architecture with `from_pretrained`.

Speed and memory do not depend on what the weights are. Runs in a child, as it needs torch. Knows
nothing of what is verified.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from search_spaces.models import ModelSpec

_SHARD_BYTES_MAX = 3 * 10**9
_STD = 0.02


def write_random_weights(
    spec: ModelSpec,
    directory: Path,
    *,
    tokenizer: Path,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Write bf16 weights with config and tokenizer, one shard in memory at a time.

    Matrices of one shape are equal: what they are is of no consequence, and drawing billions of
    numbers takes a minute.

    Args:
        spec: the architecture.
        directory: is made.
        tokenizer: whose files are put beside the weights.
        on_progress: called with shards written, of how many.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model = _skeleton(spec)
    # Tied weights are one parameter, and are stored once.
    tensors: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=_SHARD_BYTES_MAX)
    drawn: dict[tuple[int, ...], torch.Tensor] = {}
    torch.manual_seed(0)
    for index, (file, names) in enumerate(split.filename_to_tensors.items()):
        on_progress(index, len(split.filename_to_tensors))
        # Each has memory of its own: safetensors refuses those that share it.
        shard = {name: _values(tensors[name], drawn, name).clone() for name in names}
        save_file(shard, directory / file, metadata={"format": "pt"})
    if split.is_sharded:
        index_of: dict[str, Any] = {
            "metadata": split.metadata,
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index_of)
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    model.config.save_pretrained(directory)
    for path in tokenizer.iterdir():
        if path.is_file() and path.name != "config.json":
            shutil.copyfile(path, directory / path.name)


def _skeleton(spec: ModelSpec) -> Any:
    values = dict(spec.config)
    values.pop("quantization_config", None)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )


def _values(
    parameter: torch.Tensor, drawn: dict[tuple[int, ...], torch.Tensor], name: str
) -> torch.Tensor:
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        make = torch.zeros if name.endswith("bias") else torch.ones
        return make(shape, dtype=torch.bfloat16)
    if shape not in drawn:
        drawn[shape] = torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, _STD)
    return drawn[shape]
