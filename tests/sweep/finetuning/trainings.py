"""Small trainings on the CPU, in this process: what a child does, without its imports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.sweep.finetuning.protocol import (
    Saved,
    TrainingJob,
    TrainingOutcome,
    TrainingResult,
)
from tests.sweep.training.tiny import TINY

if TYPE_CHECKING:
    import torch


def job(
    output: Path, dataset: Path | None, *, packing: str = "none", **changes: Any
) -> TrainingJob:
    """Return a job of a few steps, with dropout and accumulation."""
    own = TrialConfig.model_fields.keys() & changes.keys()
    values: dict[str, Any] = {
        "micro_batch_size": 2,
        "effective_batch_size": 4,
        "seq_len": 32,
        "lora_rank": 8,
        "lora_dropout": 0.2,
        "learning_rate": 5e-3,
        "checkpoint_fraction": 0.5,
        "optimizer": "adamw_torch_fused",
        "packing": packing,
        **{key: changes.pop(key) for key in own},
    }
    return TrainingJob(
        **{
            "config": TrialConfig.model_validate(values),
            "model": TINY.to_json(),
            "dataset": None if dataset is None else str(dataset),
            "eval_fraction": 0.2,
            "device": "cpu",
            "output": str(output),
            **changes,
        }
    )


def run(
    job: TrainingJob, *, stop_after: int | None = None
) -> tuple[TrainingOutcome, list[BaseModel]]:
    """Train in this process, and return the end and all that was said on the way.

    Args:
        job: the training.
        stop_after: asked to stop once the checkpoint of this step is written.
    """
    from qlora_sweep.sweep.finetuning.run import Training

    Path(job.output).mkdir(parents=True, exist_ok=True)
    said: list[BaseModel] = []

    def send(message: BaseModel) -> None:
        said.append(message)
        if isinstance(message, Saved) and message.step == stop_after:
            training.stop.set()

    training = Training(job, send=send)
    training.prepare()
    return training.run(), said


def adapter(end: TrainingResult) -> dict[str, torch.Tensor]:
    """Return the tensors of what a training came to."""
    from safetensors.torch import load_file

    return load_file(f"{end.checkpoint}/adapter_model.safetensors")
