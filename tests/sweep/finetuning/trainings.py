"""Small trainings on the CPU, in this process: what a child does, without its imports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.records import INTERRUPTED
from qlora_sweep.sweep.finetuning import checkpoints
from qlora_sweep.sweep.finetuning.protocol import (
    Event,
    Saved,
    TrainingJob,
    TrainingOutcome,
    TrainingResult,
)
from qlora_sweep.sweep.finetuning.training import follow
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


def finished(end: TrainingOutcome) -> TrainingResult:
    """Return what a training came to that was not to go wrong."""
    assert isinstance(end, TrainingResult), end
    return end


def ended(begun: TrainingJob) -> TrainingResult:
    """Train in this process, in one go, to what it comes to."""
    return finished(run(begun)[0])


def stopped_and_resumed(
    begun: TrainingJob, *, stop_after: int
) -> tuple[TrainingResult, list[BaseModel]]:
    """Stop a training behind the checkpoint of a step; return how it ends once it is resumed."""
    stopped, _ = run(begun.model_copy(update={"checkpoint_steps": 1}), stop_after=stop_after)
    assert stopped == INTERRUPTED
    # Nothing is evaluated on the way now: that must make no difference either.
    changes = {"resume_from": str(checkpoints.newest(Path(begun.output))), "checkpoint_steps": 1000}
    resumed, said = run(begun.model_copy(update=changes))
    return finished(resumed), said


def interrupted_and_resumed(begun: TrainingJob, *, at: int) -> tuple[Path, TrainingResult]:
    """Interrupt a training in processes of its own behind the checkpoint of a step; return the
    newest checkpoint, and how it ends once it is resumed."""

    def stop(event: Event) -> None:
        if isinstance(event, Saved) and event.step == at:
            raise KeyboardInterrupt

    assert follow(begun, observe=stop) == INTERRUPTED
    newest = checkpoints.newest(Path(begun.output))
    assert newest is not None
    resumed = follow(begun.model_copy(update={"resume_from": str(newest)}))
    return newest, finished(resumed)


def adapter(end: TrainingResult) -> dict[str, torch.Tensor]:
    """Return the tensors of what a training came to."""
    from safetensors.torch import load_file

    return load_file(f"{end.checkpoint}/adapter_model.safetensors")


def assert_same(resumed: TrainingResult, whole: TrainingResult) -> None:
    """Check that two trainings came to the same, to the bit."""
    tensors = adapter(whole)
    others = adapter(resumed)
    assert tensors.keys() == others.keys()
    assert all(others[name].equal(tensor) for name, tensor in tensors.items())
    for key in ("train_loss", "eval_loss", "tokens", "steps", "eight_bit"):
        assert getattr(resumed, key) == getattr(whole, key)
