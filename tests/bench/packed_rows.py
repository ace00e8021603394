"""Measure packed rows beside full ones: what keeping texts apart costs in memory and in time.

    python -m tests.bench.packed_rows OUT.jsonl [--seconds 240] [--model mistral-7b-v0.3]...

One row per configuration, of texts that fill each row of a micro-batch to its last token, so that
what is predicted of packed rows is what was measured; ``full`` is the same configuration on
full-length random rows of one text each. What an earlier call measured is kept; it exits with
`OUT_OF_TIME` where some are left.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from search_spaces.config import TrialConfig, parse_config
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from storage.records import Measured
from sweep.data.batches import Texts
from sweep.training.device import Device, open_device
from sweep.training.meter import CardReader
from sweep.training.model import BaseModel, build_base
from sweep.training.trial import Trial
from tests.bench.stamp import OUT_OF_TIME, stamp
from tests.sweep.data.prepared import prepared

STEPS = StepBudget(warmup_min=2, warmup_max=3, measured_min=6, measured_max=12, seconds_max=2.0)
ROWS = 64
"""Of the length, so that any micro-batch of them is whole."""
NUMBERS = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "step_seconds",
    "step_seconds_ci95",
    "tokens_per_second",
    "loss_tokens_per_step",
    "documents_apart",
    "batch_wait_share",
    "flags",
)
LEAN = {"upcast_fp32": False, "kernels": "liger", "checkpoint_fraction": 0.0}
FAST = {**LEAN, "kernels": "fused-loss", "compile": True}

Row = dict[str, Any]


def _sized(batch: int, length: int, **knobs: Any) -> Row:
    return {"micro_batch_size": batch, "seq_len": length, **knobs}


THOROUGH = [
    _sized(8, 512),
    _sized(2, 2048),
    _sized(1, 4096, kernels="liger"),
    _sized(8, 512, **LEAN),
    _sized(2, 2048, **LEAN),
    _sized(8, 512, kernels="fused-loss", checkpoint_fraction=0.5),
    _sized(4, 512, attention="eager", checkpoint_fraction=0.0),
    _sized(8, 512, compute_dtype="fp16", kernels="liger"),
    _sized(4, 1024, lora_rank=64, target_modules="all-linear", optimizer="adamw_torch_fused"),
    _sized(8, 512, **FAST),
    _sized(2, 2048, **FAST),
    _sized(4, 1024, **{**FAST, "checkpoint_fraction": 1.0}),
]
BRIEF = [
    _sized(4, 512),
    _sized(1, 2048, **LEAN),
    _sized(4, 1024, kernels="fused-loss", checkpoint_fraction=0.5, target_modules="all-linear"),
    _sized(4, 512, **FAST),
]
MODELS = {
    "mistral-7b-v0.3": THOROUGH,
    "tinyllama-1.1b": BRIEF,
    "qwen3-8b": BRIEF,
    "gemma-3-4b": BRIEF,
    "phi-4-mini": BRIEF,
    "demo": [_sized(2, 64), _sized(1, 128, checkpoint_fraction=0.5, upcast_fp32=False)],
}
"""The last one is for trying this without a GPU."""


def texts_of(length: int, home: Path) -> Texts:
    """Return texts of which two fill a row of a length: packed, none of it is a pad."""
    directory = home / str(length)
    if not directory.exists():
        half, third = length // 2, length // 3
        prepared(directory, [half, length - half, third, length - third] * (ROWS // 2))
    return Texts(directory, eval_fraction=0.0, seed=0)


def figures(base: BaseModel, config: TrialConfig, device: Device, texts: Texts | None) -> Row:
    """Return what a trial came to, or why it came to nothing."""
    outcome = Trial(
        base=base,
        config=config,
        steps=STEPS,
        device=device,
        card=CardReader(None),
        texts=texts,
    ).run()
    if not isinstance(outcome, Measured):
        return {"failure": outcome.model_dump(mode="json")}
    measurement = outcome.measurement.model_dump(mode="json")
    return {key: measurement[key] for key in NUMBERS}


def rows(model: str, configs: list[TrialConfig], device: Device, home: Path) -> Iterator[Row]:
    """Yield a model's rows, those of one base after another."""
    base: BaseModel | None = None
    for config in sorted(configs, key=lambda c: (c.compile, c.base().key())):
        if base is None or base.config != config.base():
            if base is not None:
                base.close()
                device.release()
            place, spec = device.torch_device, load_model_spec(model)
            base = build_base(config, spec=spec, weights="random", device=place, seed=0)
        packed = config.model_copy(update={"packing": "packed"})
        yield {
            "model": model,
            "config": packed.model_dump(mode="json"),
            **figures(base, packed, device, texts_of(config.seq_len, home)),
            "full": figures(base, config, device, None),
        }
    if base is not None:
        base.close()
        device.release()


def _known(path: Path) -> set[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return {(row["model"], parse_config(row["config"]).key()) for row in found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--model", action="append", choices=MODELS)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    device = open_device("cuda" if torch.cuda.is_available() else "cpu")
    device.warm_up()
    known = _known(options.out)
    meta = options.out.with_suffix(".meta.json")
    meta.write_text(json.dumps(stamp(), indent=1) + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as home, options.out.open("a", encoding="utf-8") as out:
        for model in options.model or [name for name in MODELS if name != "demo"]:
            configs = [parse_config({**values, "packing": "packed"}) for values in MODELS[model]]
            left = [c for c in configs if (model, c.key()) not in known]
            plain = [config.model_copy(update={"packing": "none"}) for config in left]
            for row in rows(model, plain, device, Path(home)):
                print(json.dumps(row), file=out, flush=True)
                if time.monotonic() > deadline:
                    raise SystemExit(OUT_OF_TIME)


if __name__ == "__main__":
    main()
