"""Trains two steps of each LLaMA-Factory file on the CPU, in LLaMA-Factory's own environment.

Prints a JSON object a line: the file, steps and loss, or the error. The dataset's description is
read from the file's comment, where a person would take it from. It imports nothing of this project.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml
from llamafactory.data.parser import DatasetAttr
from llamafactory.hparams.parser import _TRAIN_ARGS
from llamafactory.train.tuner import run_exp
from on_cpu import main
from safetensors.torch import load_file


class Asked(dict[str, Any]):
    """A dictionary that knows what it was asked for."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.keys_asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)


def known_keys() -> dict[str, list[str]]:
    config = {field.name for schema in _TRAIN_ARGS for field in dataclasses.fields(schema)}
    columns, tags = Asked(), Asked()
    dataset = Asked(columns=columns, tags=tags)
    DatasetAttr("file", dataset_name="texts").join(dataset)
    # What it looks for to know where the rows are has no list.
    places = {"file_name", "hf_hub_url", "columns", "tags"}
    return {
        "config": sorted(config),
        "dataset": sorted(dataset.keys_asked | places),
        "columns": sorted(columns.keys_asked),
        "tags": sorted(tags.keys_asked),
    }


def dataset_info(text: str) -> dict[str, Any]:
    begins = "# dataset_info.json: "
    (line,) = (line for line in text.splitlines() if line.startswith(begins))
    return dict(json.loads(line.removeprefix(begins)))


def two_steps(file: str) -> dict[str, Any]:
    text = Path(file).read_text()
    options = yaml.safe_load(text)
    with tempfile.TemporaryDirectory() as directory:
        info = dataset_info(text)
        for dataset in info.values():
            if "file_name" in dataset:
                dataset["file_name"] = str(Path(file).resolve().parent / dataset["file_name"])
        Path(directory, "dataset_info.json").write_text(json.dumps(info))
        here = {"dataset_dir": directory, "output_dir": directory, "overwrite_cache": True}
        run_exp({**options, **here, "max_steps": 2, "save_strategy": "no", "use_cpu": True})
        state = json.loads(Path(directory, "trainer_state.json").read_text())
        adapter = json.loads(Path(directory, "adapter_config.json").read_text())
        tensors = load_file(Path(directory, "adapter_model.safetensors"))
    return {
        "steps": state["global_step"],
        "loss": state["log_history"][-1].get("train_loss"),
        "adapter": adapter,
        "trainable": sum(tensor.numel() for tensor in tensors.values()),
    }


if __name__ == "__main__":
    os.environ.setdefault("DISABLE_VERSION_CHECK", "0")
    main(keys=known_keys, train=two_steps)
