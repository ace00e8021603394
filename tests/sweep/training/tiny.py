"""A base model small enough that a training step takes milliseconds on a CPU.

torch is imported with the first use of it, not with this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.records import Measured, Measurement, Outcome

if TYPE_CHECKING:
    from qlora_sweep.sweep.training.model import BaseModel
    from qlora_sweep.sweep.training.step import TrainingLoop
    from qlora_sweep.sweep.training.trial import Trial

LAYERS = 2
"""So few that each is told from the other, and no test waits for more of the same."""
TINY = ModelSpec(
    name="tiny",
    source="shipped",
    config={
        "model_type": "mistral",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
UNIFORM_LOSS = 6.24
"""Of random tokens under a random head: near that of a uniform guess."""
QUICK = StepBudget(warmup_min=1, warmup_max=2, measured_min=6, measured_max=6)
BRIEF = StepBudget(warmup_min=1, warmup_max=2, measured_min=2, measured_max=2)
"""For what the first step shows, as the peak: on a CPU the warm-up alone is watched for it."""


def tiny_config(**settings: Any) -> TrialConfig:
    return TrialConfig(**{"micro_batch_size": 2, "seq_len": 32, **settings})


UNSUITED = "base_model.model.model.layers.1.mlp.down_proj"
"""The layer that `saved_with_outliers` can make unfit for INT8."""


def saved_with_outliers(directory: Path, *, has_unsuited: bool = False) -> ModelSpec:
    """Write a model that has what training leaves: a feature that is large, and hardly varies.

    Args:
        directory: gets weights and configuration.
        has_unsuited: whether a feature of one layer's input is large, varies, and has no part in
            the product: INT8 rounds all others as coarsely as that one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = {key: value for key, value in TINY.config.items() if key != "model_type"}
    config = AutoConfig.for_model(TINY.config["model_type"], **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[:, 7] = 20 * embeddings.std()
        for layer in model.model.layers:
            layer.mlp.up_proj.weight[3] *= 30
        if has_unsuited:
            layer.mlp.up_proj.weight[3] *= 100
            layer.mlp.down_proj.weight[:, 3] = 0
    model.to(torch.bfloat16).save_pretrained(directory)
    return load_model_spec(str(directory))


@contextlib.contextmanager
def tiny_base(
    config: TrialConfig, *, spec: ModelSpec = TINY, weights: str = "random"
) -> Iterator[BaseModel]:
    import torch

    from qlora_sweep.sweep.training.model import build_base

    base = build_base(config, spec=spec, weights=weights, device=torch.device("cpu"), seed=0)
    try:
        yield base
    finally:
        base.close()


@contextlib.contextmanager
def tiny_loop(config: TrialConfig, *, spec: ModelSpec = TINY) -> Iterator[TrainingLoop]:
    """Yield a training that has not begun, with adapters on a base of its own."""
    from qlora_sweep.sweep.training.adapters import attached
    from qlora_sweep.sweep.training.step import TrainingLoop

    with tiny_base(config, spec=spec) as base, attached(base, config) as attachment:
        yield TrainingLoop(attachment, config, seed=0)


def trial_on(base: BaseModel, config: TrialConfig, **changes: Any) -> Trial:
    from qlora_sweep.sweep.training.device import CpuDevice
    from qlora_sweep.sweep.training.meter import GpuReader
    from qlora_sweep.sweep.training.trial import Trial, TrialDevice, TrialTask

    of_device: dict[str, Any] = {"device": CpuDevice(), "gpu": GpuReader(None)}
    of_trial: dict[str, Any] = {}
    of_task: dict[str, Any] = {"steps": QUICK}
    for name, value in changes.items():
        if name in TrialDevice.__dataclass_fields__:
            of_device[name] = value
        elif name in TrialTask.__dataclass_fields__:
            of_task[name] = value
        else:
            of_trial[name] = value
    return Trial(base, TrialDevice(**of_device), TrialTask(config, **of_task), **of_trial)


def dataset_in(directory: Path, lengths: Any, *, eval_fraction: float = 0.0, **options: Any) -> Any:
    """Prepare texts of so many tokens each."""
    from qlora_sweep.sweep.data.batches import TokenizedDataset
    from tests.sweep.data.prepared import prepared

    prepared(directory, lengths, **options)
    return TokenizedDataset(directory, eval_fraction=eval_fraction, seed=0)


def outcome_of(config: TrialConfig, *, spec: ModelSpec = TINY, **changes: Any) -> Outcome:
    """Return what a trial of its own comes to."""
    with tiny_base(config, spec=spec) as base:
        return trial_on(base, config, **changes).run()


def measured(outcome: Outcome) -> Measurement:
    assert isinstance(outcome, Measured), outcome
    return outcome.measurement
