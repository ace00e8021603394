"""Trains two steps of each LLaMA-Factory file on the CPU, in LLaMA-Factory's own environment.

Prints a JSON object a line: the file, steps and loss, or the error. The dataset's description is
read from the file's comment, where a person would take it from. It imports nothing of this project.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import yaml
from llamafactory.train.tuner import run_exp


def dataset_info(text: str) -> dict[str, Any]:
    lines = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    described = " ".join(lines).partition("dataset_info.json of ")[2]
    return dict(json.JSONDecoder().raw_decode(described)[0])


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
    return {"steps": state["global_step"], "loss": state["log_history"][-1].get("train_loss")}


if __name__ == "__main__":
    os.environ.setdefault("DISABLE_VERSION_CHECK", "0")
    for name in sys.argv[1:]:
        try:
            found = two_steps(name)
        except (Exception, SystemExit):  # noqa: BLE001
            found = {"error": traceback.format_exc()[-3000:]}
        print("\n" + json.dumps({"file": name, **found}), flush=True)
