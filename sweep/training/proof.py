"""Owns the proof that every knob took effect: what the first steps left behind, compared with what
was asked.

A compile that fell back to eager, an attention kernel that was not used, a checkpoint flag that did
nothing: the run
does not count as that configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import bitsandbytes as bnb
import torch
from peft.tuners.lora import LoraLayer
from torch.utils._python_dispatch import TorchDispatchMode

from search_spaces.config import TrialConfig
from search_spaces.experts import LEAST_QUANTIZED_SHARE
from storage.records import Ineffective
from sweep.training.adapters import Attached
from sweep.training.model import DTYPES
from sweep.training.step import TrainingLoop

_SCORE_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_dropout_prob")
"""What architectures call the share of attention scores that training drops."""
_FAST_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention")
_FLASH_ATTN = "flash_attn"
"""What flash-attn's own operators are called, and no operator of torch is."""
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "gemm_4bit": 0}
"""Operators that multiply matrices, and which argument is the left one."""
_DROPOUTS = ("native_dropout", "bernoulli_")
_ADAPTER = "default"


class KernelWatch(TorchDispatchMode):
    """Notes what a step really runs: attention's operators, matrix products by type, dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: set[str] = set()
        self.has_scores = False
        """Whether a softmax went over scores that exist as a tensor, as in unfused attention."""
        self.product_work: Counter[torch.dtype] = Counter()
        """Multiplications by the type of what was multiplied."""
        self.dropouts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Run the operator and note it."""
        result = func(*args, **(kwargs or {}))
        self._note(func.name() if hasattr(func, "name") else "", args, result)
        return result

    def _note(self, name: str, args: Sequence[Any], result: Any) -> None:
        operator = name.partition("::")[2].partition(".")[0]
        if "attention" in name or _FLASH_ATTN in name:
            self.attention.add(name)
        elif operator in _PRODUCTS:
            left = args[_PRODUCTS[operator]]
            self.product_work[left.dtype] += result.numel() * left.shape[-1]
        elif operator in _DROPOUTS:
            self.dropouts += 1
        elif operator in ("_softmax", "_safe_softmax"):
            # The router of a mixture of experts and the loss are softmaxes of two dimensions.
            self.has_scores = self.has_scores or args[0].dim() > 2


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
        _upcast(config, attached),
        _adapters(config, attached),
        _training(config, attached, loop),
        *(() if watch is None else _watched(config, attached, watch)),
    )
    return next((fault for fault in checks if fault is not None), None)


def _quantization(config: TrialConfig, attached: Attached) -> Ineffective | None:
    states = [
        m.weight.quant_state for m in attached.model.modules() if isinstance(m, bnb.nn.Linear4bit)
    ]
    if config.quantization == "none":
        return Ineffective(knob="quantization", detail="4-bit layers are left") if states else None
    if not states:
        return Ineffective(
            knob="quantization", detail="no layer is in 4 bits: use quantization none"
        )
    if any(s is None or s.quant_type != config.quantization for s in states):
        return Ineffective(knob="quantization", detail=f"a layer is not {config.quantization}")
    if any(s.nested != config.double_quant for s in states):
        return Ineffective(knob="double_quant", detail="the constants are stored otherwise")
    share = attached.quantized_share
    if share is not None and share < LEAST_QUANTIZED_SHARE:
        return Ineffective(
            knob="quantization",
            detail=f"only {share:.1%} of the matrices' weights are in 4 bits, the others in 16: "
            "use quantization none",
        )
    return None


def _checkpointing(config: TrialConfig, attached: Attached) -> Ineffective | None:
    asked = config.checkpointed_layers(len(attached.layers))
    went_through = {index for index, calls in attached.checkpoint_calls.items() if calls}
    if went_through == asked:
        return None
    return Ineffective(
        knob="checkpoint_fraction",
        detail=f"{len(went_through)} of {len(asked)} layers were recomputed",
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
    return _paging(config, loop)


def _paging(config: TrialConfig, loop: TrainingLoop) -> Ineffective | None:
    """Paged states are in managed memory, but for tensors under 100,000 elements and on the CPU."""
    large = [(p, s) for p, s in loop.optimizer.state.items() if p.is_cuda and p.numel() >= 100_000]
    is_paged = any(getattr(s.get("state1"), "is_paged", False) for _, s in large)
    if large and is_paged != config.optimizer.startswith("paged"):
        return Ineffective(
            knob="optimizer", detail=f"its state is {'' if is_paged else 'not '}paged"
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


def _upcast(config: TrialConfig, attached: Attached) -> Ineffective | None:
    """The norms and the embeddings tell: they are fp32 with the upcast, and not all without."""
    if config.compute_dtype == "fp32":
        return None
    base = attached.model.get_base_model()
    norms = [
        parameter
        for module in base.modules()
        if not isinstance(module, torch.nn.Linear)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 1 and not parameter.requires_grad
    ]
    kept = [base.get_input_embeddings().weight, *norms]
    is_wide = all(p.dtype == torch.float32 for p in kept if p.is_floating_point())
    if is_wide == config.upcast_fp32:
        return None
    return Ineffective(
        knob="upcast_fp32", detail=f"norms and embeddings are {'' if is_wide else 'not '}in fp32"
    )


def _adapters(config: TrialConfig, attached: Attached) -> Ineffective | None:
    """Every adapter has the rank, the scale and the dropout that were asked for."""
    asked: dict[str, float] = {
        "lora_rank": config.lora_rank,
        "lora_alpha": config.alpha / config.lora_rank,
        "lora_dropout": config.lora_dropout,
    }
    for layer in lora_layers(attached).values():
        found: dict[str, float] = {
            "lora_rank": layer.r[_ADAPTER],
            "lora_alpha": layer.scaling[_ADAPTER],
            "lora_dropout": getattr(layer.lora_dropout[_ADAPTER], "p", 0.0),
        }
        for knob, value in asked.items():
            if abs(found[knob] - value) > 1e-9 * max(1.0, abs(value)):
                unit = " as scale" if knob == "lora_alpha" else ""
                return Ineffective(
                    knob=knob, detail=f"an adapter has {found[knob]:g}{unit}, not {value:g}"
                )
    return None


def lora_layers(attached: Attached) -> dict[str, Any]:
    """Return the layers that have an adapter, by name."""
    modules = attached.model.named_modules()
    return {name: module for name, module in modules if isinstance(module, LoraLayer)}


def _training(config: TrialConfig, attached: Attached, loop: TrainingLoop) -> Ineffective | None:
    """For every target some adapter has moved: its second matrix was zero.

    Said of nothing that need not move: fp16 skips its first updates while the loss scale settles,
    and a dropout of 1 leaves nothing to learn from.
    """
    if config.compute_dtype == "fp16" or config.lora_dropout == 1 or not loop.optimizer.state:
        return None
    layers = lora_layers(attached)
    for target in attached.model.peft_config[_ADAPTER].target_modules:
        adapters = [a for n, a in layers.items() if n == target or n.endswith(f".{target}")]
        if not adapters:
            return Ineffective(knob="target_modules", detail=f"{target} has no adapter")
        highest = [a.lora_B[_ADAPTER].weight.detach().abs().amax() for a in adapters]
        if not bool(torch.stack(highest).any()):
            return Ineffective(knob="target_modules", detail=f"no adapter of {target} learned")
    return None


def _watched(
    config: TrialConfig, attached: Attached, watch: KernelWatch
) -> tuple[Ineffective | None, ...]:
    return (
        _compute_dtype(config, watch),
        _attention(config, attached, watch),
        _dropout(config, watch),
    )


def _compute_dtype(config: TrialConfig, watch: KernelWatch) -> Ineffective | None:
    """Most of the multiplying is in the compute type; rotary angles and the like are not."""
    if not watch.product_work:
        return Ineffective(knob="compute_dtype", detail="no matrix was multiplied")
    ((mostly, _),) = watch.product_work.most_common(1)
    if mostly == DTYPES[config.compute_dtype]:
        return None
    return Ineffective(
        knob="compute_dtype", detail=f"most products are in {str(mostly).removeprefix('torch.')}"
    )


def _dropout(config: TrialConfig, watch: KernelWatch) -> Ineffective | None:
    """Torch leaves dropout of 0 and of 1 out; a model may have dropouts of its own."""
    if 0.0 < config.lora_dropout < 1.0 and not watch.dropouts:
        return Ineffective(knob="lora_dropout", detail="nothing was dropped")
    return None


def _attention(config: TrialConfig, attached: Attached, watch: KernelWatch) -> Ineffective | None:
    """Each implementation leaves its own operators.

    `sdpa` must reach a fused kernel: its fallback materializes the scores as `eager` does. In fp32
    with grouped-query heads torch has no fused kernel at all, nor on a CPU for a model that drops
    scores or whose values have a width of their own, so there the fallback is what people get.
    `flash_attention_2` is flash-attn's own operator, which no kernel of torch stands in for.
    """
    fused = sorted(n for n in watch.attention if any(kind in n for kind in _FAST_ATTENTION))
    flash = sorted(n for n in watch.attention if _FLASH_ATTN in n)
    has_none = config.compute_dtype == "fp32" or _is_beyond_a_cpus_kernel(attached)
    detail = None
    match config.attention:
        case "sdpa" if not fused and not has_none:
            detail = "sdpa fell back to the unfused kernel: use attention eager"
        case "eager" if fused or flash:
            detail = f"a fused kernel ran: {(fused + flash)[0]}"
        case "eager" if not watch.has_scores:
            detail = "no scores were computed"
        case "flash_attention_2" if not flash:
            detail = f"flash-attn's kernel was not called, but {(fused or ['an unfused one'])[0]}"
    return None if detail is None else Ineffective(knob="attention", detail=detail)


def _is_beyond_a_cpus_kernel(attached: Attached) -> bool:
    model = attached.model
    reasons = (getattr(model.config, name, None) for name in (*_SCORE_DROPOUTS, "v_head_dim"))
    return model.device.type == "cpu" and any(reasons)
