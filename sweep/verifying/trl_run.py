"""TRL's own training on an exported file, as ``trl sft --config FILE`` runs it, with a clock.

Runs in a child, as it needs torch; its speed and peak are what TRL's own trainer reaches. Knows
nothing of what is verified.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from sweep.hugging_face import StepClock

WARMUP_STEPS = 3


def train_with_trl(
    file: Path, *, model: Path, texts: Path, output: Path, steps: int, tokens_per_step: int
) -> dict[str, Any]:
    """Train some steps as TRL's own script does, and return what was reached.

    Args:
        file: that was exported.
        model: the weights.
        texts: a JSONL file of texts.
        output: a directory that is TRL's to fill.
        steps: optimizer steps.
        tokens_per_step: full rows of an optimizer step.
    """
    from trl.scripts import sft

    clock = StepClock()
    trained: list[Any] = []
    arguments = sft.make_parser().parse_args_and_config(
        ["--config", str(_filled_in(file, model=model, texts=texts, output=output, steps=steps))],
        fail_with_unknown_args=True,
    )
    import trl

    own = trl.SFTTrainer

    def with_clock(*args: Any, **kwargs: Any) -> Any:
        trainer = own(*args, **kwargs, callbacks=[clock])
        trainer.save_model = lambda *_, **__: None
        trained.append(trainer)
        return trainer

    trl.SFTTrainer = with_clock
    try:
        sft.main(*arguments)
    finally:
        trl.SFTTrainer = own
    return _reached(clock, trained[0], tokens_per_step=tokens_per_step)


def _filled_in(file: Path, **values: Any) -> Path:
    """Write the file with what a person fills in, and return where."""
    options: Mapping[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    data = {"path": "json", "data_files": str(values["texts"]), "columns": ["text"]}
    filled = {
        **options,
        "model_name_or_path": str(values["model"]),
        "datasets": [data],
        "output_dir": str(values["output"]),
        "max_steps": values["steps"],
        "save_strategy": "no",
        "use_cpu": not torch.cuda.is_available(),
    }
    path = values["output"].parent / "trl.yaml"
    path.write_text(yaml.safe_dump(filled, sort_keys=False), encoding="utf-8")
    return Path(path)


def _reached(clock: StepClock, trainer: Any, *, tokens_per_step: int) -> dict[str, Any]:
    seconds = clock.seconds()
    median = statistics.median(seconds[WARMUP_STEPS:] or seconds)
    kinds = sorted({str(p.dtype) for p in trainer.model.parameters() if p.requires_grad})
    return {
        "steps": len(seconds),
        "step_seconds": median,
        "seconds": seconds,
        "tokens_per_second": tokens_per_step / median,
        "peak_allocated_bytes": clock.peak_allocated_bytes(),
        "adapter_dtypes": [kind.removeprefix("torch.") for kind in kinds],
    }
