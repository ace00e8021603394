"""The proof that every setting took effect: what the first steps left behind, held against what was
asked.

A compile that fell back to eager, an attention kernel that was not used, a checkpoint flag that did
nothing: the run does not count as that configuration. Each proof is registered by the key of its
setting, and a setting without one is a mistake that a test finds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import bitsandbytes as bnb
import torch
from peft.tuners.lora import LoraLayer
from torch.utils._python_dispatch import TorchDispatchMode

from search_spaces.config import TrialConfig
from search_spaces.errors import in_percent
from search_spaces.experts import LEAST_QUANTIZED_SHARE
from storage.records import Ineffective
from sweep.data.epoch import is_flattened
from sweep.training.adapters import Attached, held_share, local
from sweep.training.eight_bit import TYPES as EIGHT_BIT_TYPES
from sweep.training.eight_bit import EightBitLinear
from sweep.training.model import DTYPES, compute_type
from sweep.training.step import TrainingLoop
from sweep.training.team import Look, fingerprint, group_size

_SCORE_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_dropout_prob")
"""What architectures call the share of attention scores that training drops."""
_FAST_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention")
_FLASH_ATTN = "flash_attn"
"""What flash-attn's own operators are called, and no operator of torch is."""
_PRODUCTS = {
    "mm": 0,
    "bmm": 0,
    "addmm": 1,
    "baddbmm": 1,
    "gemm_4bit": 0,
    "_scaled_mm": 0,
    "_int_mm": 0,
}
"""Operators that multiply matrices, and which argument is the left one."""
_PROFILED_TYPES = {"c10::Float8_e4m3fn": torch.float8_e4m3fn, "signed char": torch.int8}
"""What torch's profiler calls 8-bit types."""
_LEAST_8_BIT_SHARE = 0.6
"""Of the frozen layers' products: those of a step forward are half, and layers before the first
adapter have none for their input's gradient."""
_DROPOUTS = ("native_dropout", "bernoulli_")
_ADAPTER = "default"
_SHARE_SLACK = 0.05
"""Of a share of the weights: rows that the cards do not divide into go to the first of them."""


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


class ProductWatch:
    """Notes the matrix products of a step where layers are compiled, by torch's profiler."""

    def __init__(self) -> None:
        self.product_work: Counter[torch.dtype | None] = Counter()
        """Multiplications by the 8-bit type of what was multiplied; of None in all others."""
        cpu = torch.profiler.ProfilerActivity.CPU
        self._profile: Any = torch.profiler.profile(activities=[cpu], record_shapes=True)

    def __enter__(self) -> None:
        self._profile.__enter__()

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        for event in self._profile.profiler.kineto_results.events():
            left = _PRODUCTS.get(event.name().partition("::")[2].partition(".")[0])
            if left is not None:
                kind, shapes = _PROFILED_TYPES.get(event.dtypes()[left]), event.shapes()
                self.product_work[kind] += math.prod(shapes[left]) * shapes[left + 1][-1]


Module = TypeVar("Module")


@dataclass(frozen=True)
class StepEvidence:
    """What the first steps of a configuration left behind."""

    attached: Attached
    loop: TrainingLoop
    watch: KernelWatch | ProductWatch | None
    """None where nothing watched."""
    others: Sequence[Look] = ()
    """What each of the other GPUs showed, where several train together."""

    @property
    def kernels(self) -> KernelWatch | None:
        """What was seen of kernels; None where nothing could see them, as in a compiled graph."""
        return self.watch if isinstance(self.watch, KernelWatch) else None

    def modules(self, kind: type[Module]) -> list[Module]:
        """Return the model's modules of a kind."""
        return [m for m in self.attached.model.modules() if isinstance(m, kind)]

    def states(self, *, from_elements: int) -> Iterator[tuple[torch.nn.Parameter, dict[str, Any]]]:
        """Yield the optimizer's state of each trained tensor of so many elements or more."""
        states = self.loop.optimizer.state.items()
        return ((p, state) for p, state in states if p.numel() >= from_elements)


Proof = Callable[[TrialConfig, StepEvidence], str | None]
"""Returns what contradicts a setting's value, or None."""

PROOFS: dict[str, Proof] = {}
"""The proof of each setting, by its key."""


def proves(knob: str) -> Callable[[Proof], Proof]:
    """Register a proof."""

    def register(proof: Proof) -> Proof:
        PROOFS[knob] = proof
        return proof

    return register


def ineffective(
    config: TrialConfig,
    *,
    attached: Attached,
    loop: TrainingLoop,
    watch: KernelWatch | ProductWatch | None,
    others: Sequence[Look] = (),
) -> Ineffective | None:
    """Return the first setting without effect in the steps done so far; None where all had one."""
    evidence = StepEvidence(attached, loop, watch, others)
    for knob, proof in PROOFS.items():
        detail = proof(config, evidence)
        if detail is not None:
            return Ineffective(knob=knob, detail=detail)
    return None


def _four_bit_states(evidence: StepEvidence) -> list[Any]:
    # A share of a weight has lost its constants, which the layer keeps beside it.
    layers = evidence.modules(bnb.nn.Linear4bit)
    return [getattr(layer.weight, "quant_state", None) or layer.quant_state for layer in layers]


@proves("quantization")
def _quantization(config: TrialConfig, evidence: StepEvidence) -> str | None:
    kinds = {getattr(state, "quant_type", None) for state in _four_bit_states(evidence)}
    kinds |= {layer.kind for layer in evidence.modules(EightBitLinear)}
    if not config.is_quantized:
        return "quantized layers are left" if kinds else None
    if not kinds:
        return f"no layer is in {config.weight_bits} bits: use quantization none"
    if kinds != {config.quantization}:
        return f"a layer is not {config.quantization}"
    share = evidence.attached.quantized_share
    if share is not None and share < LEAST_QUANTIZED_SHARE:
        return (
            f"only {in_percent(share)} of the matrices' weights are in {config.weight_bits} bits, "
            "the others in 16: use quantization none"
        )
    return None


@proves("quantized_fraction")
def _quantized_layers(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """Each layer that is to be quantized has such a matrix, and none of the others has one."""
    layers = evidence.attached.layers
    is_packed = [
        any(isinstance(m, bnb.nn.Linear4bit | EightBitLinear) for m in layer.modules())
        for layer in layers
    ]
    quantized = {index for index, packed in enumerate(is_packed) if packed}
    asked = config.quantized_layers(len(layers))
    words = f"{len(quantized)} layers are quantized, not {len(asked)}, or others than those"
    return None if quantized == asked else words


@proves("double_quant")
def _double_quant(config: TrialConfig, evidence: StepEvidence) -> str | None:
    others = {state.nested for state in _four_bit_states(evidence)} - {config.double_quant}
    return "the constants are stored otherwise" if others else None


@proves("micro_batch_size")
def _micro_batch(config: TrialConfig, evidence: StepEvidence) -> str | None:
    rows, _ = evidence.loop.batch_shape
    texts = evidence.loop.texts
    if texts is not None and is_flattened(texts.config):
        # Packed rows that go through as one long row.
        rows = texts.config.micro_batch_size
    return None if rows == config.micro_batch_size else f"a micro-batch has {rows} rows"


@proves("seq_len")
def _length(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """Rows of texts are as wide as the longest of the epoch, and no wider than what is asked."""
    rows, tokens = evidence.loop.batch_shape
    texts = evidence.loop.texts
    if texts is None:
        return None if tokens == config.seq_len else f"a row has {tokens} tokens"
    largest = texts.batches.epoch.largest
    if texts.config.seq_len != config.seq_len:
        return f"rows are cut to {texts.config.seq_len} tokens"
    if (rows, tokens) == (largest.rows, largest.width):
        return None
    return f"the largest micro-batch is {rows} x {tokens}, not {largest.rows} x {largest.width}"


@proves("effective_batch_size")
def _accumulation(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """Of a long accumulation the first micro-steps alone are run, and at least two of them."""
    loop = evidence.loop
    if (loop.micro_steps > 1) != (config.accumulation_steps > 1):
        return f"an update takes {loop.micro_steps} micro-batches"
    # The most of any tensor: a layer that a step drops, or an expert that it asks nothing of, has
    # no gradient in it.
    updates = max((int(s["step"]) for _, s in evidence.states(from_elements=1)), default=0)
    # fp16 skips its first updates while the loss scale settles.
    if compute_type(config) != torch.float16 and updates != loop.micro_step // loop.micro_steps:
        return f"{loop.micro_step} micro-batches made {updates} updates"
    return None


@proves("checkpoint_fraction")
def _checkpointing(config: TrialConfig, evidence: StepEvidence) -> str | None:
    attached = evidence.attached
    asked = config.checkpointed_layers(len(attached.layers))
    done = attached.checkpoint_calls.keys()
    return None if done == asked else f"{len(done)} of {len(asked)} layers were recomputed"


@proves("kernels")
def _kernels(config: TrialConfig, evidence: StepEvidence) -> str | None:
    base = evidence.attached.model.get_base_model()
    has_fused_loss = _is_from_liger(base.forward)
    if has_fused_loss != (config.kernels != "hf"):
        return f"fused loss is {'on' if has_fused_loss else 'off'}"
    has_liger_layers = any(
        _is_from_liger(getattr(m, "forward", None)) for m in base.modules() if m is not base
    )
    if has_liger_layers != (config.kernels == "liger"):
        return f"layers are {'' if has_liger_layers else 'not '}Liger's"
    return None


def _is_from_liger(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith("liger_kernel")


@proves("optimizer")
def _optimizer(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """8-bit states are bytes, but for tensors under 4,096 elements, which stay in 32 bits; paged
    ones are in managed memory, but for those under 100,000 elements and on the CPU."""
    states = [state for _, state in evidence.states(from_elements=4096)]
    is_8bit = any(getattr(s.get("state1"), "dtype", None) == torch.uint8 for s in states)
    if states and is_8bit != config.optimizer.endswith("8bit"):
        return f"its state is {'' if is_8bit else 'not '}8-bit"
    large = [state for p, state in evidence.states(from_elements=100_000) if p.is_cuda]
    is_paged = any(getattr(state.get("state1"), "is_paged", False) for state in large)
    if large and is_paged != config.is_paged:
        return f"its state is {'' if is_paged else 'not '}paged"
    return None


@proves("compile")
def _compile(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """Each layer ran as one compiled graph in each micro-step, whenever that was compiled."""
    compilation = evidence.attached.compilation
    if not config.compile:
        return None if compilation is None else "layers are compiled"
    asked = evidence.loop.micro_step * len(evidence.attached.layers)
    calls = 0 if compilation is None else compilation.calls
    words = f"{calls} of {asked} calls of layers were compiled" if calls else "nothing was compiled"
    return None if calls >= asked else words


@proves("expandable_segments")
def _segments(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """The segments that the weights lie in tell.

    A fixed segment that a library holds a part of may serve a growing base too, but not most of it.
    """
    parameters = [local(p) for p in evidence.attached.model.parameters() if p.is_cuda]
    segments = torch.cuda.memory_snapshot() if parameters else []
    share = expandable_share(parameters, segments)
    if config.expandable_segments and share <= 0.5:
        return f"{in_percent(share)} of the weights are in expandable segments"
    if not config.expandable_segments and share > 0:
        return f"{in_percent(share)} of the weights are still in expandable segments"
    return None


def expandable_share(
    tensors: Iterable[torch.Tensor], segments: Iterable[Mapping[str, Any]]
) -> float:
    """Return how much of the tensors' bytes lies in segments that can grow.

    Args:
        tensors: on the GPU.
        segments: as `torch.cuda.memory_snapshot` tells them.
    """
    growing = sorted(
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in segments
        if segment.get("is_expandable")
    )
    total = inside = 0
    for tensor in tensors:
        index = bisect_right(growing, (tensor.data_ptr(), math.inf)) - 1
        total += tensor.nbytes
        if index >= 0 and tensor.data_ptr() < growing[index][1]:
            inside += tensor.nbytes
    return inside / total if total else 0.0


@proves("upcast_fp32")
def _upcast(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """The norms and the embeddings tell: they are fp32 with the upcast, and not all without."""
    if config.compute_dtype == "fp32":
        return None
    base = evidence.attached.model.get_base_model()
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
    return f"norms and embeddings are {'' if is_wide else 'not '}in fp32"


@proves("lora_rank")
def _rank(config: TrialConfig, evidence: StepEvidence) -> str | None:
    others = {layer.r[_ADAPTER] for layer in evidence.modules(LoraLayer)} - {config.lora_rank}
    return f"an adapter has {others.pop()}, not {config.lora_rank}" if others else None


@proves("lora_alpha")
def _scale(config: TrialConfig, evidence: StepEvidence) -> str | None:
    asked = config.alpha / config.lora_rank
    others = {layer.scaling[_ADAPTER] for layer in evidence.modules(LoraLayer)} - {asked}
    return f"an adapter has {others.pop():g} as scale, not {asked:g}" if others else None


@proves("learning_rate")
def _learning_rate(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """The schedule keeps its highest rate beside the one of the moment."""
    asked = config.learning_rate
    others = {group["initial_lr"] for group in evidence.loop.optimizer.param_groups} - {asked}
    return f"the schedule begins at {others.pop():g}, not {asked:g}" if others else None


@proves("packing")
def _packing(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """Packed rows hold several texts; grouped ones have fewer pads than rows in random order."""
    texts = evidence.loop.texts
    ran = "none" if texts is None else texts.config.packing
    if ran != config.packing:
        return f"rows are not {config.packing}" if config.packing != "none" else f"rows are {ran}"
    if texts is None:
        return None
    match config.packing:
        case "packed" if texts.batches.epoch.rows.counts().max() < 2:
            return "no row holds more than one text: use packing none"
        case "grouped" if texts.batches.epoch.padded_tokens >= texts.padded_in_random_order:
            return "micro-batches have no fewer pads than in random order: use packing none"
    return None


@proves("lora_dropout")
def _dropout(config: TrialConfig, evidence: StepEvidence) -> str | None:
    asked, watch = config.lora_dropout, evidence.kernels
    drops = (layer.lora_dropout[_ADAPTER] for layer in evidence.modules(LoraLayer))
    others = {getattr(drop, "p", 0.0) for drop in drops} - {asked}
    if others:
        return f"an adapter has {others.pop():g}, not {asked:g}"
    # Torch leaves dropout of 0 and of 1 out; a model may have dropouts of its own.
    is_unseen = watch is not None and 0.0 < asked < 1.0 and not watch.dropouts
    return "nothing was dropped" if is_unseen else None


@proves("adapter_dtype")
def _adapter_dtype(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """The type of what is trained, and of the optimizer states that are not in 8 bits."""
    others = {p.dtype for p in evidence.attached.trainable_parameters()}
    others -= {DTYPES[config.adapter_dtype]}
    return f"an adapter is in {_plain(others.pop())}" if others else None


@proves("target_modules")
def _targets(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """For every target some adapter has moved: its second matrix was zero.

    Said of nothing that need not move: fp16 skips its first updates while the loss scale settles,
    and a dropout of 1 leaves nothing to learn from.
    """
    if compute_type(config) == torch.float16 or config.lora_dropout == 1:
        return None
    if not evidence.loop.optimizer.state:
        return None
    model = evidence.attached.model
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    for target in model.peft_config[_ADAPTER].target_modules:
        adapters = [a for n, a in layers.items() if n == target or n.endswith(f".{target}")]
        if not adapters:
            return f"{target} has no adapter"
        own = [local(a.lora_B[_ADAPTER].weight).detach() for a in adapters]
        highest = [weight.abs().amax() for weight in own if weight.numel()]
        if highest and not bool(torch.stack(highest).any()):
            return f"no adapter of {target} learned"
    return None


@proves("compute_dtype")
def _compute_dtype(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """Most of the multiplying is in the compute type; rotary angles and the like are not."""
    if evidence.watch is None:
        return None
    work: Counter[Any] = evidence.watch.product_work
    if not work:
        return "no matrix was multiplied"
    if config.is_8bit_compute:
        share = _eight_bit_share(config, evidence, work)
        is_whole = share > _LEAST_8_BIT_SHARE
        return None if is_whole else f"{in_percent(share)} of the products are in 8 bits"
    [(mostly, _)] = work.most_common(1)
    return None if mostly == compute_type(config) else f"most products are in {_plain(mostly)}"


def _eight_bit_share(config: TrialConfig, evidence: StepEvidence, work: Mapping[Any, int]) -> float:
    """Return how much of the frozen layers' products was in 8 bits, forward and backward."""
    # On a CPU the reference multiplies in float what was rounded to 8 bits.
    is_on_gpu = evidence.attached.model.device.type == "cuda"
    kind = EIGHT_BIT_TYPES[config.compute_dtype] if is_on_gpu else torch.float32
    frozen = (m for m in evidence.attached.model.modules() if hasattr(m, "row_scales"))
    weights = sum(m.in_features * m.out_features for m in frozen)
    tokens = math.prod(evidence.loop.batch_shape) * evidence.loop.micro_steps
    return work.get(kind, 0) / (2 * weights * tokens)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@proves("attention")
def _attention(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """Each implementation leaves its own operators.

    `sdpa` must reach a fused kernel: its fallback materializes the scores as `eager` does. In fp32
    with grouped-query heads torch has no fused kernel at all, nor on a CPU for a model that drops
    scores or whose values have a width of their own, so there the fallback is what people get.
    `flash_attention_2` is flash-attn's own operator, which no kernel of torch stands in for.
    """
    watch = evidence.kernels
    if watch is None:
        return None
    fused = sorted(n for n in watch.attention if any(kind in n for kind in _FAST_ATTENTION))
    flash = sorted(n for n in watch.attention if _FLASH_ATTN in n)
    model = evidence.attached.model
    reasons = (getattr(model.config, name, None) for name in (*_SCORE_DROPOUTS, "v_head_dim"))
    is_beyond_a_cpus = model.device.type == "cpu" and any(reasons)
    has_none = config.compute_dtype == "fp32" or is_beyond_a_cpus
    match config.attention:
        case "sdpa" if not fused and not has_none:
            return "sdpa fell back to the unfused kernel: use attention eager"
        case "eager" if fused or flash:
            return f"a fused kernel ran: {(fused + flash)[0]}"
        case "eager" if not watch.has_scores:
            return "no scores were computed"
        case "flash_attention_2" if not flash:
            return f"flash-attn's kernel was not called, but {(fused or ['an unfused one'])[0]}"
    return None


@proves("data_parallel")
def _parallel(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """GPUs that trained on different rows have the same adapters, to the last bit."""
    looks = evidence.others
    if 1 + len(looks) != config.data_parallel:
        return f"{1 + len(looks)} of {config.data_parallel} cards trained"
    if config.data_parallel == 1:
        return None
    sizes = {group_size(), *(look.size for look in looks)}
    if sizes != {config.data_parallel}:
        return f"a card trained with {min(sizes) - 1} others"
    own = evidence.loop.newest
    rows = [look.tokens for look in looks] + ([] if own is None else [fingerprint([own])])
    if len(set(rows)) < config.data_parallel:
        return "two cards had the same rows"
    if config.is_sharded:
        return None
    trained = fingerprint(evidence.attached.trainable_parameters())
    apart = [look.rank for look in looks if look.adapters != trained]
    return f"the adapters of card {apart[0]} are others than the first one's" if apart else None


@proves("sharding")
def _sharding(config: TrialConfig, evidence: StepEvidence) -> str | None:
    """A GPU holds its share of the decoder layers' weights, or all of them, and a weight comes out
    of its shares as it was put into them."""
    gathered = evidence.attached.gathered
    if gathered is not None and not gathered.is_whole:
        return "4-bit weights are gathered as others than they were shared out as"
    held = [held_share(evidence.attached), *(look.held_share for look in evidence.others)]
    asked = 1 / config.data_parallel if config.is_sharded else 1.0
    wrong = [share for share in held if abs(share - asked) > _SHARE_SLACK]
    if not wrong:
        return None
    return f"a card holds {in_percent(wrong[0])} of the layers' weights, not {in_percent(asked)}"
