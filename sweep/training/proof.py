"""Owns the proof that every knob took effect: what the first steps left behind, compared with what
was asked.

A compile that fell back to eager, an attention kernel that was not used, a checkpoint flag that did
nothing: the run
does not count as that configuration.
"""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from search_spaces.config import TrialConfig
from storage.records import Ineffective
from sweep.training.adapters import Attached
from sweep.training.step import TrainingLoop

_FAST_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention")


class KernelWatch(TorchDispatchMode):
    """Collects the names of the attention operators that a step really calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Note the operator and run it."""
        name = func.name() if hasattr(func, "name") else ""
        if "attention" in name:
            self.attention.add(name)
        return func(*args, **(kwargs or {}))


def ineffective(
    config: TrialConfig, *, attached: Attached, loop: TrainingLoop, watch: KernelWatch | None
) -> Ineffective | None:
    """Return the first knob that had no effect in the steps done so far; None where all had."""
    checks = (
        _quantization(config, attached),
        _checkpointing(config, attached),
        _kernels(config, attached),
        _optimizer(config, loop),
        _compile(config),
        None if watch is None else _attention(config, watch),
    )
    return next((fault for fault in checks if fault is not None), None)


def _quantization(config: TrialConfig, attached: Attached) -> Ineffective | None:
    states = [
        m.weight.quant_state for m in attached.model.modules() if isinstance(m, bnb.nn.Linear4bit)
    ]
    if config.quantization == "none":
        return Ineffective(knob="quantization", detail="4-bit layers are left") if states else None
    if not states:
        return Ineffective(knob="quantization", detail="no layer is in 4 bits")
    if any(s is None or s.quant_type != config.quantization for s in states):
        return Ineffective(knob="quantization", detail=f"a layer is not {config.quantization}")
    if any(s.nested != config.double_quant for s in states):
        return Ineffective(knob="double_quant", detail="the constants are stored otherwise")
    return None


def _checkpointing(config: TrialConfig, attached: Attached) -> Ineffective | None:
    went_through = {index for index, calls in attached.checkpoint_calls.items() if calls}
    if went_through == attached.checkpointed:
        return None
    return Ineffective(
        knob="checkpoint_fraction",
        detail=f"{len(went_through)} of {len(attached.checkpointed)} layers were recomputed",
    )


def _kernels(config: TrialConfig, attached: Attached) -> Ineffective | None:
    base = attached.model.get_base_model()
    has_fused_loss = _is_from_liger(base.forward)
    if has_fused_loss != (config.kernels != "hf"):
        return Ineffective(
            knob="kernels", detail=f"fused loss is {'on' if has_fused_loss else 'off'}"
        )
    has_liger_layers = any(
        _is_from_liger(getattr(m, "forward", None)) for m in base.modules() if m is not base
    )
    if has_liger_layers != (config.kernels == "liger"):
        return Ineffective(
            knob="kernels", detail=f"layers are {'' if has_liger_layers else 'not '}Liger's"
        )
    return None


def _is_from_liger(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("liger_kernel")


def _optimizer(config: TrialConfig, loop: TrainingLoop) -> Ineffective | None:
    """8-bit states are bytes, but for tensors under 4,096 elements, which stay in 32 bits."""
    states = [s for p, s in loop.optimizer.state.items() if p.numel() >= 4096]
    is_8bit = any(getattr(s.get("state1"), "dtype", None) == torch.uint8 for s in states)
    if states and is_8bit != config.optimizer.endswith("8bit"):
        return Ineffective(
            knob="optimizer", detail=f"its state is {'' if is_8bit else 'not '}8-bit"
        )
    return None


def _compile(config: TrialConfig) -> Ineffective | None:
    if not config.compile:
        return None
    counters = torch._dynamo.utils.counters
    if not counters["stats"].get("unique_graphs"):
        return Ineffective(knob="compile", detail="nothing was compiled")
    if counters["graph_break"]:
        reason = next(iter(counters["graph_break"])).splitlines()[0]
        return Ineffective(knob="compile", detail=f"graph break: {reason}")
    return None


def is_from_the_compiler(error: Exception) -> bool:
    """Whether an exception says that `torch.compile` could not compile a layer.

    Dynamo also raises what the traced code raised, and then names the lines it was tracing.
    """
    is_dynamos_own = isinstance(error, torch._dynamo.exc.TorchDynamoException)
    return is_dynamos_own or "from user code:" in str(error)


def _attention(config: TrialConfig, watch: KernelWatch) -> Ineffective | None:
    """`sdpa` must reach a fused kernel: its fallback materialises the scores as `eager` does.

    In fp32 with grouped-query heads torch has no fused kernel at all, so there the fallback is what
    people get.
    """
    is_fused = any(kind in name for name in watch.attention for kind in _FAST_ATTENTION)
    if config.attention == "sdpa" and config.compute_dtype != "fp32" and not is_fused:
        return Ineffective(knob="attention", detail="sdpa fell back to the unfused kernel")
    return None
