"""A base in several shards and an adapter on it, as they are on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def make_base(directory: Path, config: dict[str, Any], *, shard: str = "400KB") -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    kind = values.pop("model_type")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **values), dtype=torch.bfloat16
    )
    model.save_pretrained(directory, max_shard_size=shard)
    return directory


def make_adapter(directory: Path, base: Path, **options: Any) -> Path:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    options.setdefault("target_modules", ["q_proj", "v_proj"])
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=24, **options)
    peft = get_peft_model(model, lora)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    peft.save_pretrained(directory)
    return directory
