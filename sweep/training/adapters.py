"""What is put on the resident base for one trial and taken off again: adapters, checkpointing,
compiled layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, did_you_mean
from search_spaces.linears import resolve_targets
from sweep.training.compiling import Compilation, compiled
from sweep.training.matrices import LINEAR
from sweep.training.model import DTYPES, BaseModel, decoder_layers
from sweep.training.sharding import Gathered, build_shares


@dataclass
class Attached:
    """A base with adapters on it, ready to train."""

    model: PeftModel
    layers: list[torch.nn.Module]
    """The decoder layers."""
    checkpointed: frozenset[int]
    """Layers whose activations are recomputed."""
    quantized_share: float | None = None
    """Of the base's matrices, how many weights are in 4 bits; None for a 16-bit base."""
    checkpoint_calls: dict[int, int] = field(default_factory=dict)
    """Times that each layer really went through checkpointing."""
    gathered: Gathered | None = None
    """What was seen of a packed weight that is put together from shares."""
    compilation: Compilation | None = None
    """What the compiler did; None where nothing is compiled."""

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """Return the adapters' parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]


@contextlib.contextmanager
def attached(
    base: BaseModel,
    config: TrialConfig,
    *,
    device: torch.device | None = None,
    seed: int = 0,
) -> Iterator[Attached]:
    """Attach the configuration's adapters to the base; on exit the base is as it was.

    A base that is to be sharded has no weights until then, and is of no further use afterwards.

    Args:
        base: has none yet.
        config: whose adapters.
        device: of this process, for a base that is to be sharded.
        seed: of such a base's weights.

    Raises:
        InputError: the architecture has no such target modules.
    """
    with contextlib.ExitStack() as undo:
        options = {"low_cpu_mem_usage": True} if config.is_sharded else {}
        model = with_adapters(base, config, placing=options)
        layers = decoder_layers(base.model)
        chosen = config.checkpointed_layers(len(layers))
        result = Attached(model, layers, chosen, base.quantized_share)
        if config.is_sharded:
            assert device is not None, "what is sharded has a device"
            result.gathered = build_shares(
                model, base, config, layers=layers, device=device, seed=seed
            )
        else:
            undo.callback(model.unload)
        model.train()
        if chosen:
            undo.enter_context(_checkpointing(base, result))
        if config.compile:
            result.compilation = undo.enter_context(compiled(layers))
        yield result


def with_adapters(
    base: BaseModel,
    config: TrialConfig,
    *,
    placing: Mapping[str, Any] | None = None,
    **options: Any,
) -> PeftModel:
    """Return the base with the configuration's adapters on it, in training mode or not as it was.

    Args:
        base: has none yet.
        config: their rank, scale, dropout, targets and type.
        placing: how PEFT puts them there, where not on the base's device at once.
        options: further ones of PEFT's `LoraConfig`.

    Raises:
        InputError: the architecture has no such target modules.
    """
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_rank,
        lora_alpha=config.alpha,
        lora_dropout=config.lora_dropout,
        target_modules=target_modules(base, config),
        **options,
    )
    model = get_peft_model(base.model, lora, **(placing or {}))
    # PEFT makes them fp32 whatever the base is, and has no word for another type on a 4-bit base.
    dtype = DTYPES[config.adapter_dtype]
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    return model


def target_modules(base: BaseModel, config: TrialConfig) -> str | list[str]:
    """Return what PEFT calls the configuration's target modules.

    Raises:
        InputError: a name that no linear layer of the model ends in.
    """
    wanted = resolve_targets(config, base.spec)
    if wanted == ("all-linear",):
        return "all-linear"
    names = [name for name, module in base.model.named_modules() if isinstance(module, LINEAR)]
    suffixes = sorted({name.rpartition(".")[2] for name in names})
    for target in wanted:
        if not any(name == target or name.endswith("." + target) for name in names):
            nearest = did_you_mean(target, suffixes)
            raise InputError(
                f"target_modules: the model has no linear layer '{target}'{nearest} "
                "(target_modules all-linear takes every one of them)"
            )
    return list(wanted)


@contextlib.contextmanager
def _checkpointing(base: BaseModel, attachment: Attached) -> Iterator[None]:
    """Recompute the chosen layers only, and count each time that one really does."""

    def counted(checkpoint: Callable[..., Any], index: int) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            calls = attachment.checkpoint_calls
            calls[index] = calls.get(index, 0) + 1
            return checkpoint(*args, **kwargs)

        return counting

    layer: Any
    with recomputed(base.model, attachment.layers, attachment.checkpointed):
        for index, layer in enumerate(attachment.layers):
            layer._gradient_checkpointing_func = counted(layer._gradient_checkpointing_func, index)
        yield


@contextlib.contextmanager
def recomputed(
    model: PreTrainedModel, layers: Sequence[torch.nn.Module], chosen: Collection[int]
) -> Iterator[None]:
    """Recompute the activations of the chosen layers for a while."""
    # Hooks that were there would never be taken off again.
    model.disable_input_require_grads()
    recompute(model, layers, chosen)
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()


def recompute(
    model: PreTrainedModel, layers: Sequence[torch.nn.Module], chosen: Collection[int]
) -> None:
    """Recompute the activations of the chosen layers in the backward pass, and of no other."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layer: Any
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen


def held_share(attachment: Attached) -> float:
    """Return how much of the decoder layers' weights this process holds: all, where nothing is
    sharded."""
    parameters = [p for layer in attachment.layers for p in layer.parameters()]
    whole = sum(p.numel() for p in parameters)
    return sum(local(p).numel() for p in parameters) / whole if whole else 1.0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor: itself, or its share of one that is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
