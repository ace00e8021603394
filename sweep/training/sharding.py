"""Owns a model of which each process holds a share: made layer by layer, so that no card ever holds
all of it, and taken through FSDP2 as accelerate does.

4-bit weights are stored in the compute dtype, as bitsandbytes documents it: FSDP moves what is of a
floating type, and no byte of it is changed on the way. What is sharded stays so: a base serves one
configuration. Knows nothing of steps, trials or commands.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import bitsandbytes as bnb
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from search_spaces.config import TrialConfig
from sweep.training.model import DTYPES, BaseModel, fill_module, quantize_random

_LEFT_BY_ACCELERATE = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
"""Variables that it sets for the whole process: the next configuration may have other wishes."""
_ADAPTER = "default"


def forget_sharding() -> None:
    """Let the next accelerator be one that was never asked to shard."""
    for name in _LEFT_BY_ACCELERATE:
        os.environ.pop(name, None)


def build_shares(
    model: PeftModel,
    base: BaseModel,
    config: TrialConfig,
    *,
    layers: Iterable[torch.nn.Module],
    device: torch.device,
    seed: int,
) -> None:
    """Give a model on the meta device its weights, and keep this process's share of them.

    Every process makes the same weights by the same seed, one decoder layer at a time, of which it
    then gives all but its share away. What is in no layer stays whole until accelerate shards it.

    Args:
        model: the base with adapters, of shapes alone.
        base: whose it is.
        config: what it is made for.
        layers: the decoder layers.
        device: of this process.
        seed: of all weights.

    Raises:
        torch.OutOfMemoryError: what is to be held of it passes the budget.
    """
    torch.manual_seed(seed)
    built: set[int] = set()
    for layer in layers:
        _build(layer, base, config, device=device, built=built)
        fully_shard(layer, reshard_after_forward=True, mp_policy=precision(config))
    _build(model, base, config, device=device, built=built)
    base.model.tie_weights()


def _build(
    whole: torch.nn.Module,
    base: BaseModel,
    config: TrialConfig,
    *,
    device: torch.device,
    built: set[int],
) -> None:
    """Give every module of ``whole`` its weights that has none yet, and adapters theirs."""
    for module in whole.modules():
        if id(module) in built:
            continue
        built.add(id(module))
        if isinstance(module, bnb.nn.Linear4bit):
            quantize_random(module, config=config, device=device)
        elif _has_tensors(module):
            module.to_empty(device=device, recurse=False)
            fill_module(base.model, module)
    adapters = [module for module in whole.modules() if isinstance(module, LoraLayer)]
    for adapter in adapters:
        if not any(_is_sharded(parameter) for parameter in adapter.parameters()):
            adapter.reset_lora_parameters(_ADAPTER, init_lora_weights=True)


def _has_tensors(module: torch.nn.Module) -> bool:
    return bool(list(module.parameters(recurse=False)) or list(module.buffers(recurse=False)))


def _is_sharded(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "placements")


def precision(config: TrialConfig) -> MixedPrecisionPolicy:
    """Return the precision that accelerate asks for under the same mixed precision."""
    dtype = DTYPES[config.compute_dtype]
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)


def fsdp_plugin(layers: Iterable[torch.nn.Module]) -> FullyShardedDataParallelPlugin:
    """Return what tells accelerate to shard the rest as it does: embedding, and norm with head."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted({type(layer).__name__ for layer in layers}),
        cpu_ram_efficient_loading=False,
    )


def shard_on_cpu(accelerator: Accelerator, plugin: Any, config: TrialConfig) -> None:
    """Have accelerate shard on a CPU, for which it has no word of its own."""
    accelerator.state.distributed_type = DistributedType.FSDP
    plugin.mixed_precision_policy = precision(config)
    accelerator.state.fsdp_plugin = plugin
