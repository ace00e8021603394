"""The ranks that train one configuration together, each on a GPU of its own: their process group,
what rank 0 decides for all, what each shows of itself, and a model of which each holds a share.

A single process is in no group, and is rank 0 of one.

What is sharded is made layer by layer, so that no GPU ever holds all of it, and taken through FSDP2
as accelerate does. 4-bit weights are stored in the compute dtype, as bitsandbytes documents it:
FSDP moves what is of a floating type. What is sharded stays so: a base serves one configuration.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.kinds import DEVICES
from qlora_sweep.sweep.training.device import Memory
from qlora_sweep.sweep.training.model import BaseModel, give_weights, take_weights

_DEFAULTS = {
    # All of them are on one host. The environment is not overruled.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    # Asked for by accelerate, and never used: they find each other by a file.
    "MASTER_PORT": "0",
}
AS_STORED = MixedPrecisionPolicy()
"""Nothing is cast on its way; autocast gives products the compute type, as where nothing is shared.

What accelerate would ask for, adapters gathered in the compute type, makes a layer's tensors all of
one type. FSDP then copies them as numbers, and every pattern of packed 4-bit weights that is no
number in bf16 comes out as one and the same: wrong weights without a word (bitsandbytes issue 1945,
seen on a GPU here). Tensors of several types, as fp32 adapters beside bf16, it copies as bytes.
"""
_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
T = TypeVar("T")
_control: dist.ProcessGroup | None = None
"""Of the same ranks, for what they agree on: no device waits for it. None for a single process."""


@dataclass(frozen=True)
class Look:
    """What one rank shows of itself and of its GPU."""

    rank: int
    size: int
    """Of the process group that it trains in."""
    adapters: str
    """Fingerprint of all that it trained; of what is sharded, of its own share."""
    tokens: str
    """Fingerprint of the newest micro-batch."""
    held_share: float
    """Of the weights of the decoder layers, how much is on its GPU."""
    memory: Memory
    loss: float = 0.0
    """Of the newest step."""


def join(rank: int, size: int, *, rendezvous: Path, device: torch.device) -> None:
    """Become one of a process group, and wait for the others.

    Args:
        rank: this process's, and the index of its GPU among those that can be seen.
        size: how many train together.
        rendezvous: a new file that the processes of this group alone have.
        device: what it trains on.
    """
    global _control
    leave()
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    for name in _OWN:
        os.environ[name] = str(size if "SIZE" in name else rank)
    kind = DEVICES[device.type]
    device_id = None
    if kind.is_gpu:
        device_id = device
    dist.init_process_group(
        kind.process_group,
        store=dist.FileStore(str(rendezvous), size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        device_id=device_id,
    )
    _control = dist.new_group(backend="gloo")


def leave() -> None:
    """Be a single process again, as at the start."""
    global _control
    if _control is not None:
        dist.destroy_process_group(_control)
        _control = None
    if dist.is_initialized() and dist.get_backend() == "nccl":
        # To destroy it is to wait for the others, who may be gone, or busy with something else.
        dist.distributed_c10d._abort_process_group()
    elif dist.is_initialized():
        dist.destroy_process_group()
    for name in _OWN:
        os.environ.pop(name, None)


def rank() -> int:
    """Return this process's rank among those that train together."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return how many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def agreed(value: bool) -> bool:
    """Return what rank 0 has for it: what clocks decide, one decides for all."""
    if _control is None:
        return value
    flag = torch.tensor([int(value)])
    dist.broadcast(flag, 0, group=_control)
    return bool(flag)


@dataclass(frozen=True)
class TimeLimit:
    """Until when a trial may train; rank 0's clock decides for all ranks."""

    stop_at: float | None = None
    """By the monotonic clock of the machine; None for no limit."""

    def is_over(self, *, ahead_seconds: float = 0.0) -> bool:
        """Return whether it will be over in so many seconds. Every rank has to ask."""
        if self.stop_at is None:
            return False
        return agreed(time.monotonic() + ahead_seconds >= self.stop_at)


NO_LIMIT = TimeLimit()


def all_gathered(value: T) -> list[T]:
    """Return what each rank has for it, once all of them do."""
    values = [value] * world_size()
    if _control is not None:
        dist.all_gather_object(values, value, group=_control)
    return values


def mean(value: torch.Tensor) -> torch.Tensor:
    """Return the mean over all ranks, on its way: nothing waits for it."""
    if world_size() > 1:
        value = value / world_size()
        dist.all_reduce(value)
    return value


def fingerprint(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of the tensors' bytes: another where any bit is."""
    digest = hashlib.sha256()
    for tensor in tensors:
        # A copy: what numpy has seen is not to be resized any more, as FSDP does.
        flat = tensor.detach().flatten().to("cpu", copy=True)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def build_shares(
    model: PeftModel,
    base: BaseModel,
    config: TrialConfig,
    *,
    layers: Iterable[torch.nn.Module],
) -> GatheredWeights | None:
    """Give a model on the meta device its weights, and keep this process's share of them.

    Every process makes the same weights by the same seed, or takes them from the host's memory, one
    decoder layer at a time, of which it then gives all but its share away. What is in no layer
    stays whole until accelerate shards it.

    Args:
        model: the base with adapters, of shapes alone.
        base: whose it is.
        config: what it is made for.
        layers: the decoder layers.

    Returns:
        What is seen of the first packed weight; None of a model that has none.

    Raises:
        torch.OutOfMemoryError: what is to be held of it passes the budget.
    """
    torch.manual_seed(base.seed)
    built: set[torch.nn.Module] = set()

    def build(whole: torch.nn.Module) -> None:
        """Give every module that has none yet its weights, and adapters theirs."""
        module: Any
        for module in whole.modules():
            if module not in built:
                built.add(module)
                if (whole_module := base.on_host.get(module)) is not None:
                    take_weights(module, whole_module, config, device=base.device)
                else:
                    give_weights(module, base.model, config, device=base.device)
        for module in whole.modules():
            is_adapter = isinstance(module, LoraLayer)
            if is_adapter and not any(hasattr(p, "placements") for p in module.parameters()):
                module.reset_lora_parameters("default", init_lora_weights=True)

    gathered: GatheredWeights | None = None
    for layer in layers:
        build(layer)
        packed = [m for m in layer.modules() if isinstance(m, bnb.nn.Linear4bit)]
        if gathered is None and packed:
            gathered = GatheredWeights(layer, packed[0])
        fully_shard(layer, reshard_after_forward=True, mp_policy=AS_STORED)
    build(model)
    base.on_host.clear()
    base.model.tie_weights()
    if config.kernels_kind.fuses_loss:
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
    head = base.get_output_embeddings()
    embedding = base.get_input_embeddings()
    if head.weight is embedding.weight:
        fully_shard(model, mp_policy=AS_STORED)
        return
    fully_shard(head, mp_policy=AS_STORED)
    base.get_decoder().register_forward_hook(lambda *_: head.unshard())
    base.register_forward_hook(lambda *_: head.reshard())


class GatheredWeights:
    """Whether a packed weight comes whole out of its shares, seen the first time that its decoder
    layer is called: within, a compiler would have to see it."""

    def __init__(self, layer: torch.nn.Module, packed: bnb.nn.Linear4bit) -> None:
        self._packed = packed
        self._before = fingerprint([packed.weight])
        self._after: str | None = None
        self._hook = layer.register_forward_pre_hook(self._look)

    def _look(self, *_: Any) -> None:
        self._after = fingerprint([self._packed.weight])
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
