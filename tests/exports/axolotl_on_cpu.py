"""Trains two steps of each axolotl file on the CPU, in axolotl's own environment.

Prints a JSON object a line: the file, steps and loss, keys that axolotl's schema does not know, or
the error. It imports nothing of this project.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import transformers.training_args
import yaml

# Texts are prepared in this process. Asked for one process, datasets forks one, and beside the
# threads of tokenizers and torch what is forked may wait for a lock that nobody gives back.
os.environ["AXOLOTL_DATASET_NUM_PROC"] = "0"

# A CPU does bf16, and axolotl has no option by which Trainer would be told to use one.
transformers.training_args.is_torch_bf16_gpu_available = lambda: True

from axolotl.cli.args import TrainerCliArgs  # noqa: E402
from axolotl.cli.config import load_cfg  # noqa: E402
from axolotl.common.datasets import load_datasets, load_preference_datasets  # noqa: E402
from axolotl.integrations.liger.args import LigerArgs  # noqa: E402
from axolotl.train import train  # noqa: E402
from axolotl.utils.schemas.config import AxolotlInputConfig  # noqa: E402
from axolotl.utils.schemas.datasets import SFTDataset, UserDefinedPrompterType  # noqa: E402
from on_cpu import main  # noqa: E402
from transformers import BitsAndBytesConfig  # noqa: E402
from transformers.trainer_pt_utils import AcceleratorConfig  # noqa: E402


def known_keys() -> dict[str, list[str]]:
    schemas = {
        "config": AxolotlInputConfig,
        "liger": LigerArgs,
        "dataset": SFTDataset,
        "dataset.type": UserDefinedPrompterType,
    }
    # What it hands on to others, who leave out some of what they do not know.
    others = {
        "bnb_config_kwargs": inspect.signature(BitsAndBytesConfig).parameters,
        "accelerator_config": [field.name for field in dataclasses.fields(AcceleratorConfig)],
    }
    own = {name: schema.model_fields for name, schema in schemas.items()}
    return {name: sorted(keys) for name, keys in (own | others).items()}


def two_steps(file: str) -> dict[str, Any]:
    written = yaml.safe_load(Path(file).read_text())
    with tempfile.TemporaryDirectory() as directory:
        places = {"output_dir": directory, "dataset_prepared_path": f"{directory}/prepared"}
        cfg = load_cfg(file, **places, max_steps=2, dataset_num_proc=0)
        kept = kept_of(written, cfg)
        load = load_preference_datasets if cfg.rl else load_datasets
        data = load(cfg=cfg, cli_args=TrainerCliArgs())
        _, _, trainer = train(cfg=cfg, dataset_meta=data)
        return {
            "adapter": json.loads(Path(directory, "adapter_config.json").read_text()),
            "trainable": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            "steps": trainer.state.global_step,
            "loss": next(
                log["train_loss"] for log in trainer.state.log_history if "train_loss" in log
            ),
            "changed": {
                key: [written[key], value]
                for key, value in json.loads(json.dumps(kept, default=str)).items()
                if key not in places and value != written[key]
            },
        }


def kept_of(written: Any, read: Any) -> Any:
    """Return what axolotl has of what was written: what it adds of its own is left out."""
    if isinstance(written, dict):
        return {key: kept_of(value, (read or {}).get(key)) for key, value in written.items()}
    if isinstance(written, list) and isinstance(read, list):
        return [kept_of(*pair) for pair in zip(written, read, strict=True)]
    return read


if __name__ == "__main__":
    main(keys=known_keys, train=two_steps)
