"""What TRL is told of a planned step of GRPO is what its configuration class takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.sweep.export.grpo import grpo_config

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS: dict[str, Any] = {"num_generations": 8, "beta": 0.04, "max_completion_length": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size": 8},
        {"micro_batch_size": 2, "kernels": "liger", "checkpoint_fraction": 0.0},
    ],
)
def test_trl_takes_every_key_and_forms_whole_groups(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    from trl import GRPOConfig

    config = TrialConfig(method="grpo", effective_batch_size=16, seq_len=128, **changes)
    told = grpo_config(config, SETTINGS, learning_rate=5e-6)
    found = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **{**told, "bf16": False})
    for key, value in told.items():
        assert key == "bf16" or getattr(found, key) == value
    assert found.generation_batch_size == 16
    assert found.max_completion_length == 64


def test_a_step_that_cuts_a_prompts_completions_is_refused_by_trl_and_here(tmp_path: Path) -> None:
    from trl import GRPOConfig

    config = TrialConfig(method="grpo", micro_batch_size=4, effective_batch_size=12)
    with pytest.raises(InputError, match="got 12 and 8"):
        grpo_config(config, SETTINGS, learning_rate=5e-6)
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    with pytest.raises(ValueError, match="must be divisible by num_generations"):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, num_generations=8, **sizes)
