"""A model of which each process holds a share: made layer by layer, so that no GPU ever holds all
of it, and taken through FSDP2 as accelerate does.

4-bit weights are stored in the compute dtype, as bitsandbytes documents it: FSDP moves what is of a
floating type. What is sharded stays so: a base serves one configuration.
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
from transformers import PreTrainedModel

from search_spaces.config import TrialConfig
from sweep.training.model import BaseModel, give_weights
from sweep.training.team import fingerprint

_ADAPTER = "default"


def forget_sharding() -> None:
    """Let the next accelerator be one that was never asked to shard."""
    # The next configuration may have other wishes.
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ.pop(name, None)


def build_shares(
    model: PeftModel,
    base: BaseModel,
    config: TrialConfig,
    *,
    layers: Iterable[torch.nn.Module],
    device: torch.device,
    seed: int,
) -> Gathered | None:
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

    Returns:
        What is seen of the first packed weight; None of a model that has none.

    Raises:
        torch.OutOfMemoryError: what is to be held of it passes the budget.
    """
    torch.manual_seed(seed)
    built: set[torch.nn.Module] = set()
    gathered: Gathered | None = None
    for layer in layers:
        _build(layer, base, config, device=device, built=built)
        packed = [m for m in layer.modules() if isinstance(m, bnb.nn.Linear4bit)]
        if gathered is None and packed:
            gathered = Gathered(packed[0])
        fully_shard(layer, reshard_after_forward=True, mp_policy=AS_STORED)
    _build(model, base, config, device=device, built=built)
    base.model.tie_weights()
    if config.kernels != "hf":
        share_head(model, base.model)
    return gathered


def share_head(model: torch.nn.Module, base: PreTrainedModel) -> None:
    """Shard a head of which a fused loss reads the weight and never calls the module.

    FSDP gathers what a module holds when the module is called. This one is gathered when the
    decoder is done and given up again with the loss: a fused loss has its gradient by then. Tied to
    the embedding it is needed at both ends of a pass, and stays with what is gathered throughout.

    Args:
        model: all of it, its decoder layers sharded.
        base: the model with the head.
    """
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if head.weight is embedding.weight:
        fully_shard(model, mp_policy=AS_STORED)
        return
    fully_shard(head, mp_policy=AS_STORED)
    base.get_decoder().register_forward_hook(lambda *_: head.unshard())
    base.register_forward_hook(lambda *_: head.reshard())


def _build(
    whole: torch.nn.Module,
    base: BaseModel,
    config: TrialConfig,
    *,
    device: torch.device,
    built: set[torch.nn.Module],
) -> None:
    """Give every module of ``whole`` its weights that has none yet, and adapters theirs."""
    module: Any
    for module in whole.modules():
        if module not in built:
            built.add(module)
            give_weights(module, base.model, config, device=device)
    for module in whole.modules():
        is_adapter = isinstance(module, LoraLayer)
        if is_adapter and not any(hasattr(p, "placements") for p in module.parameters()):
            module.reset_lora_parameters(_ADAPTER, init_lora_weights=True)


AS_STORED = MixedPrecisionPolicy()
"""Nothing is cast on its way; autocast gives products the compute type, as where nothing is shared.

What accelerate would ask for, adapters gathered in the compute type, makes a layer's tensors all of
one type. FSDP then copies them as numbers, and every pattern of packed 4-bit weights that is no
number in bf16 comes out as one and the same: wrong weights without a word (bitsandbytes issue 1945,
seen on a GPU here). Tensors of several types, as fp32 adapters beside bf16, it copies as bytes.
"""


class Gathered:
    """Whether a packed weight comes whole out of its shares, seen the first time it is used."""

    def __init__(self, layer: bnb.nn.Linear4bit) -> None:
        self._before = fingerprint([layer.weight])
        self._after: str | None = None
        self._hook = layer.register_forward_pre_hook(self._look)

    def _look(self, layer: torch.nn.Module, _: Any) -> None:
        self._after = fingerprint([layer.weight])  # type: ignore[list-item]
        self._hook.remove()

    @property
    def is_whole(self) -> bool:
        """Whether every bit was as it had been; also before anybody looked."""
        return self._after in (None, self._before)


def fsdp_plugin(layers: Iterable[torch.nn.Module]) -> FullyShardedDataParallelPlugin:
    """Return what tells accelerate to shard the rest as it does: embedding, and norm with head."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        mixed_precision_policy=AS_STORED,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted({type(layer).__name__ for layer in layers}),
        cpu_ram_efficient_loading=False,
    )


def shard_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Have accelerate shard on a CPU, for which it has no word of its own."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
