"""The proof that every setting took effect: what the first steps left behind, held against what was
asked.

A compile that fell back to eager, an attention kernel that was not used, a checkpoint flag that did
nothing: the run does not count as that configuration. A setting without a proof is a mistake that a
test finds.
"""

from __future__ import annotations

import math
import pkgutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import bitsandbytes as bnb
import torch
from peft.tuners.lora import LoraLayer
from torch.utils._python_dispatch import TorchDispatchMode

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.errors import in_percent
from qlora_sweep.search_spaces.kinds import DEVICES
from qlora_sweep.search_spaces.linears import LEAST_QUANTIZED_SHARE
from qlora_sweep.storage.records import Ineffective
from qlora_sweep.sweep.data.batches import TrialBatches, trained_epoch
from qlora_sweep.sweep.data.collation import is_flattened
from qlora_sweep.sweep.training.adapters import first_trained, local
from qlora_sweep.sweep.training.eight_bit import TYPES as EIGHT_BIT_TYPES
from qlora_sweep.sweep.training.eight_bit import EightBitLinear
from qlora_sweep.sweep.training.experts import is_packed, packed_experts
from qlora_sweep.sweep.training.host_memory import SLOTS
from qlora_sweep.sweep.training.images import SeeingRows
from qlora_sweep.sweep.training.in_trl import InTrl
from qlora_sweep.sweep.training.model import DTYPES, compute_type, vision_modules
from qlora_sweep.sweep.training.preference import Preference
from qlora_sweep.sweep.training.process_group import Look
from qlora_sweep.sweep.training.recurrent import not_called
from qlora_sweep.sweep.training.step import TrainingLoop, rate_of

_BEYOND_A_CPUS_KERNEL = (
    "attention_dropout",
    "attn_pdrop",
    "attn_dropout",
    "attention_dropout_prob",
    "attention_probs_dropout_prob",
    "v_head_dim",
)
"""What architectures call the share of attention scores that training drops, and the width of
values that have their own."""
_FAST_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention")
_FLASH_ATTN = "flash_attn"
"""What flash-attn's own operators are called, and no operator of torch is."""
_PRODUCTS = {
    "mm": 0,
    "_grouped_mm": 0,
    "addmm": 1,
    "gemm_4bit": 0,
    "_scaled_mm": 0,
    "_int_mm": 0,
    "int8_product": 0,
    "int8_product_in_chunks": 0,
}
"""Operators that multiply by matrices of weights, and which argument is the left one. Those that
multiply batches are of attention, which without a fused kernel is in fp32, and of rotary angles."""
_COMPILED_INT8_PRODUCT = "_int8_product"
"""Beginning of what the compiler calls the Triton kernel of the first of those."""
_PROFILED_TYPES = {"c10::Float8_e4m3fn": torch.float8_e4m3fn, "signed char": torch.int8}
"""What torch's profiler calls 8-bit types."""
_LEAST_8_BIT_SHARE = 0.6
"""Of the frozen layers' products: those of a step forward are half, and layers before the first
adapter have none for their input's gradient."""
_DROPOUTS = ("native_dropout", "bernoulli_")
_ADAPTER = "default"
_SHARE_SLACK = 0.05
"""Of a share of the weights: rows that the GPUs do not divide into go to the first of them."""


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
        self.has_solved = False
        """Whether triangular systems were solved, as by linear attention in plain PyTorch."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Run the operator and note it."""
        result = func(*args, **(kwargs or {}))
        name = func.name() if hasattr(func, "name") else ""
        operator = name.partition("::")[2].partition(".")[0]
        if "attention" in name or _FLASH_ATTN in name:
            self.attention.add(name)
        elif operator in _PRODUCTS:
            left = args[_PRODUCTS[operator]]
            self.product_work[left.dtype] += result.numel() * left.shape[-1]
        elif operator in _DROPOUTS:
            self.dropouts += 1
        elif operator == "linalg_solve_triangular":
            self.has_solved = True
        elif operator in ("_softmax", "_safe_softmax"):
            # The router of a mixture of experts and the loss are softmaxes of two dimensions.
            self.has_scores = self.has_scores or args[0].dim() > 2
        return result


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
            self._note(event.name(), event.dtypes(), event.shapes())

    def _note(self, name: str, dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Note what ran, by its name and its arguments' types and shapes."""
        operator = name.partition("::")[2].partition(".")[0]
        if name.startswith(_COMPILED_INT8_PRODUCT):
            operator = "int8_product"
        left = _PRODUCTS.get(operator)
        # Its chunks are noted by themselves.
        if left is None or operator == "int8_product_in_chunks":
            return
        columns = shapes[left + 1][-1]
        if operator == "int8_product":
            # Of the transpose.
            columns = shapes[left + 1][0]
        kind = _PROFILED_TYPES.get(dtypes[left])
        self.product_work[kind] += math.prod(shapes[left]) * columns


Module = TypeVar("Module")


@dataclass(frozen=True)
class StepEvidence:
    """What the first steps of a configuration left behind."""

    loop: TrainingLoop
    watch: KernelWatch | ProductWatch | None = None
    """None where nothing watched."""
    looks: Sequence[Look] = ()
    """What each GPU showed."""
    batches: TrialBatches | None = None
    """What it trained on; None for random tokens."""

    @property
    def kernels(self) -> KernelWatch | None:
        """What was seen of kernels; None where nothing could see them, as in a compiled graph."""
        if isinstance(self.watch, KernelWatch):
            return self.watch
        return None

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The decoder layers."""
        return self.loop.attached.layers

    @property
    def base(self) -> Any:
        """The base, adapters in it."""
        return self.loop.attached.model.get_base_model()

    @property
    def epoch(self) -> Any:
        """Of the texts; None where rows are random tokens."""
        return self.batches and self.batches.epoch

    @property
    def pairs(self) -> Preference | None:
        """What trained on pairs; None where nothing did."""
        if isinstance(self.loop.trained, Preference):
            return self.loop.trained
        return None

    @property
    def rows(self) -> int:
        """Of a micro-batch; packed rows may go through as one long row."""
        if self.epoch is not None and is_flattened(self.epoch.config):
            return int(self.epoch.config.micro_batch_size)
        return len(self.loop.newest)

    def modules(self, kind: type[Module]) -> list[Module]:
        """Return the model's modules of a kind."""
        return [m for m in self.loop.attached.model.modules() if isinstance(m, kind)]

    def of_adapters(self, name: str) -> Iterator[Any]:
        """Yield what each layer with adapters has under a name."""
        for layer in self.modules(LoraLayer):
            yield getattr(layer, name)[_ADAPTER]

    def four_bit_states(self) -> list[Any]:
        """Return the constants of each 4-bit weight."""
        # A share of a weight has lost its own, which the layer keeps beside it.
        layers = self.modules(bnb.nn.Linear4bit)
        states: list[Any] = []
        for layer in layers:
            states.append(getattr(layer.weight, "quant_state", None) or layer.quant_state)
        for parameter in self.base.parameters():
            if is_packed(parameter) and hasattr(parameter, "quant_state"):
                states.append(parameter.quant_state)
        return states

    def states(self, *, from_elements: int) -> list[tuple[torch.nn.Parameter, dict[str, Any]]]:
        """Return the optimizer's state of each trained tensor of so many elements or more."""
        states = self.loop.optimizer.state.items()
        return [(p, state) for p, state in states if p.numel() >= from_elements]


def ineffective(config: TrialConfig, seen: StepEvidence) -> Ineffective | None:
    """Return the first setting without effect in the steps done so far; None where all had one."""
    for setting, proof in PROOFS.items():
        detail = proof(config, seen)
        if detail is not None:
            return Ineffective(setting=setting, detail=detail)
    return None


def _other(asked: Any, found: Iterable[Any]) -> str | None:
    """Return words about the first that is found and was not asked for; None where all were."""
    for value in found:
        if value != asked:
            return f"{value}, not {asked}".replace("torch.", "")
    return None


def _rank(config: TrialConfig, seen: StepEvidence) -> str | None:
    """Each adapter has the rank; one on gate and up of experts, which are one tensor, has that of
    two, as PEFT makes it of adapters on ``all-linear``."""
    peft_config: Any = seen.loop.attached.model.peft_config[_ADAPTER]
    fused = set(peft_config.rank_pattern.values())
    return _other(config.lora_rank, (r for r in seen.of_adapters("r") if r not in fused))


def _quantization(config: TrialConfig, seen: StepEvidence) -> str | None:
    kinds = {getattr(state, "quant_type", None) for state in seen.four_bit_states()}
    kinds |= set(map(attrgetter("kind"), seen.modules(EightBitLinear)))
    for experts in packed_experts(seen.base):
        if hasattr(experts, "kind"):
            kinds.add(experts.kind)
    if not config.is_quantized and not kinds:
        return None
    if not config.is_quantized:
        return "quantized layers are left"
    if not kinds:
        return f"no layer is in {config.weight_bits} bits: use quantization none"
    if kinds != {config.quantization}:
        return f"a layer is not {config.quantization}"
    share = seen.loop.attached.quantized_share
    if share is not None and share < LEAST_QUANTIZED_SHARE:
        return (
            f"only {in_percent(share)} of the matrices' weights are in {config.weight_bits} bits, "
            "the others in 16: use quantization none"
        )
    return None


def _layers(asked: Collection[int], found: Collection[int]) -> str | None:
    if found == asked:
        return None
    return f"{len(found)} of {len(asked)} layers, or others than those"


def _quantized_layers(config: TrialConfig, seen: StepEvidence) -> str | None:
    """Each layer that is to be quantized has such a matrix, and none of the others has one."""
    kinds = bnb.nn.Linear4bit | EightBitLinear
    quantized = set()
    for index, layer in enumerate(seen.layers):
        if any(isinstance(module, kinds) for module in layer.modules()):
            quantized.add(index)
    asked = config.quantized_layers(len(seen.layers)) - seen.loop.attached.layers_left
    return _layers(asked, quantized)


def _loss_of_pairs(config: TrialConfig, seen: StepEvidence) -> str | None:
    """The newest loss is what its log-probabilities come to."""
    if seen.pairs is None or seen.pairs.newest is None or seen.pairs.loss is None:
        return None
    asked = float(seen.pairs.newest.losses(config).mean())
    loss = float(seen.pairs.loss)
    if math.isclose(asked, loss, rel_tol=1e-5):
        return None
    return f"a loss is {loss}, not {asked}"


def _reference(config: TrialConfig, seen: StepEvidence) -> str | None:
    """Each micro-batch has its own pass of the reference, or none has."""
    if seen.pairs is None:
        return None
    done = seen.pairs.references
    asked = config.references * seen.loop.micro_step
    if done == asked:
        return None
    return f"{done} of {asked} passes of the reference"


def _length(config: TrialConfig, seen: StepEvidence) -> str | None:
    """Rows of texts are as wide as the longest of the epoch, and no wider than what is asked."""
    shape = tuple(seen.loop.newest.shape)
    epoch = seen.epoch
    if epoch is None:
        return _other(config.seq_len, [shape[1]])
    other = _other(config.seq_len, [epoch.config.seq_len])
    return other or _other((epoch.largest.rows, epoch.largest.width), [shape])


def _images(config: TrialConfig, seen: StepEvidence) -> str | None:
    """The tower saw an image of each row, in every micro-batch."""
    done = seen.loop.attached.seen
    asked = 0
    if config.image_size is not None:
        rows = SeeingRows(config.image_size, seen.base.config)
        asked = rows.returned * config.micro_batch_size * seen.loop.micro_step
    if done == asked:
        return None
    return f"{done:,} of {asked:,} states came of the vision tower"


def _accumulation(config: TrialConfig, seen: StepEvidence) -> str | None:
    """Of a long accumulation the first micro-steps alone are run, and at least two of them."""
    loop = seen.loop
    if (loop.micro_steps > 1) != (config.accumulation_steps > 1):
        return f"an update takes {loop.micro_steps} micro-batches"
    # The most of any tensor: a layer that a step drops, or an expert that it asks nothing of, has
    # no gradient in it.
    updates = 0
    for _, state in seen.states(from_elements=1):
        updates = max(updates, int(state["step"]))
    # fp16 skips its first updates while the loss scale settles.
    if compute_type(config) != torch.float16 and updates != loop.micro_step // loop.micro_steps:
        return f"{loop.micro_step} micro-batches made {updates} updates"
    return None


def _kernels(config: TrialConfig, seen: StepEvidence) -> str | None:
    """Liger's fused loss is the forward of the whole model, its other kernels are of its parts."""
    of_whole, *of_parts = map(_is_ligers, seen.base.modules())
    ran = "hf"
    if any(of_parts):
        ran = "liger"
    elif of_whole:
        ran = "fused-loss"
    asked = canonical(config)
    has_fused_loss = asked.kernels_kind.fuses_loss and not config.has_head_of_trl
    return _other(asked.kernels, [ran]) or _other(has_fused_loss, [of_whole])


def _is_ligers(module: torch.nn.Module) -> bool:
    """Whether a module's forward is one of Liger's."""
    forward = getattr(module, "forward", None)
    return str(getattr(forward, "__module__", "")).startswith("liger_kernel")


def _optimizer(config: TrialConfig, seen: StepEvidence) -> str | None:
    """8-bit states are bytes, but for tensors under 4,096 elements, which stay in 32 bits; paged
    ones are in managed memory, but for those under 100,000 elements and on the CPU."""
    kind = config.optimizer_kind
    made = seen.loop.optimizer.optimizer
    other = _other(pkgutil.resolve_name(kind.built_by).__name__, [type(made).__name__])
    for key, value in kind.arguments.items():
        other = other or _other(value, map(itemgetter(key), made.param_groups))
    if other is not None:
        return other
    are_8bit = set()
    are_paged = set()
    for parameter, states in seen.states(from_elements=4096):
        state = states.get("state1")
        are_8bit.add(getattr(state, "dtype", None) == torch.uint8)
        if parameter.is_cuda and parameter.numel() >= 100_000:
            are_paged.add(getattr(state, "is_paged", False))
    for words, is_asked, found in (
        ("8-bit", kind.has_8_bit_moments, are_8bit),
        ("paged", config.is_paged, are_paged),
    ):
        if found and any(found) != is_asked:
            return f"its state is not {words}" if is_asked else f"its state is {words}"
    return None


def _compile(config: TrialConfig, seen: StepEvidence) -> str | None:
    """Each layer ran as one compiled graph in each micro-step, whenever that was compiled."""
    done = seen.loop.attached.compilation
    if not config.compile:
        return "layers are compiled" if done else None
    calls = done.calls if done else 0
    asked = seen.loop.micro_step * len(seen.layers)
    if calls >= asked:
        return None
    return f"{calls} of {asked} calls of layers were compiled"


def _segments(config: TrialConfig, seen: StepEvidence) -> str | None:
    """The segments that the weights lie in tell.

    A fixed segment that a library holds a part of may serve a growing base too, but not most of it.
    """
    parameters = [local(p) for p in seen.loop.attached.model.parameters() if p.is_cuda]
    share = 0.0
    if parameters:
        share = expandable_share(parameters, torch.cuda.memory_snapshot())
    if config.expandable_segments:
        has_effect = share > 0.5
    else:
        has_effect = share == 0
    if has_effect:
        return None
    return f"{in_percent(share)} of the weights are in expandable segments"


def expandable_share(
    tensors: Sequence[torch.Tensor], segments: Iterable[Mapping[str, Any]]
) -> float:
    """Return how much of the tensors' bytes lies in segments that can grow.

    Args:
        tensors: on the GPU.
        segments: as `torch.cuda.memory_snapshot` tells them.
    """
    growing = []
    for segment in segments:
        if segment.get("is_expandable"):
            address = segment["address"]
            growing.append(range(address, address + segment["total_size"]))
    whole = 0
    inside = 0
    for tensor in tensors:
        whole += tensor.nbytes
        if any(tensor.data_ptr() in places for places in growing):
            inside += tensor.nbytes
    return inside / (whole or 1)


def _upcast(config: TrialConfig, seen: StepEvidence) -> str | None:
    """The norms and the embeddings tell: they are fp32 with the upcast, and not all without.

    What sees is always in 16 bits.
    """
    if config.compute_kind.bits == 32:
        return None
    kept = [seen.base.get_input_embeddings().weight]
    tower = set(vision_modules(seen.base))
    for module in seen.base.modules():
        if not isinstance(module, torch.nn.Linear) and module not in tower:
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 1 and not parameter.requires_grad:
                    kept.append(parameter)
    is_wide = all(p.dtype == torch.float32 for p in kept if p.is_floating_point())
    if is_wide == config.upcast_fp32:
        return None
    if is_wide:
        return "norms and embeddings are in fp32"
    return "norms and embeddings are not in fp32"


def _packing(config: TrialConfig, seen: StepEvidence) -> str | None:
    """Packed rows hold several texts; grouped ones have fewer pads than rows in random order."""
    epoch = seen.epoch
    ran = "none"
    if epoch is not None:
        ran = epoch.config.packing
    if ran != config.packing and config.packing != "none":
        return f"rows are not {config.packing}"
    if ran != config.packing:
        return f"rows are {ran}"
    if config.packing == "packed" and epoch.rows.counts().max() < 2:
        return "no row holds more than one text: use packing none"
    if config.packing == "grouped" and _padded(seen, "grouped") >= _padded(seen, "none"):
        return "micro-batches have no fewer pads than in random order: use packing none"
    return None


def _padded(seen: StepEvidence, packing: str) -> int:
    """Return the tokens of an epoch of the same texts, pads among them: to the longest row of the
    micro-batches of all ranks, which wait for one another."""
    made = seen.batches
    assert made is not None
    config = made.epoch.config
    rows = config.micro_batch_size * config.data_parallel
    together = config.changed(packing=packing, micro_batch_size=rows, data_parallel=1)
    return trained_epoch(made.dataset, together).padded_tokens


def _dropout(config: TrialConfig, seen: StepEvidence) -> str | None:
    asked = config.lora_dropout
    watch = seen.kernels
    drops = seen.of_adapters("lora_dropout")
    other = _other(asked, (getattr(drop, "p", 0.0) for drop in drops))
    if other is not None:
        return other
    # Torch leaves dropout of 0 and of 1 out; a model may have dropouts of its own.
    if watch is not None and 0.0 < asked < 1.0 and not watch.dropouts:
        return "nothing was dropped"
    return None


def _targets(config: TrialConfig, seen: StepEvidence) -> str | None:
    """For every target some adapter has moved: its second matrix was zero.

    Said of nothing that need not move: fp16 skips its first updates while the loss scale settles,
    and a dropout of 1 leaves nothing to learn from. Where all linear layers are asked for, PEFT
    asks for a router's weight that a type may not have.
    """
    is_still = compute_type(config) == torch.float16 or config.lora_dropout == 1
    if is_still or not seen.loop.optimizer.state:
        return None
    model = seen.loop.attached.model
    peft_config: Any = model.peft_config[_ADAPTER]
    adapters: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            # One on a parameter is named as its module, or as another one on that.
            adapters[f"{name} {getattr(module, 'parameter_name', '')}".strip()] = module
    is_pefts_choice = config.target_modules == "all-linear"
    targets = list(peft_config.target_modules)
    targets += (name.rpartition(".")[2] for name in peft_config.target_parameters or ())
    for target in targets:
        weights = []
        for name, adapter in adapters.items():
            if name == target or name.endswith((f".{target}", f" {target}")):
                weights.append(local(adapter.lora_B[_ADAPTER].weight).detach())
        if not weights and not is_pefts_choice:
            return f"{target} has no adapter"
        highest = [weight.abs().amax() for weight in weights if weight.numel()]
        if highest and not bool(torch.stack(highest).any()):
            return f"no adapter of {target} learned"
    return None


def _compute_dtype(config: TrialConfig, seen: StepEvidence) -> str | None:
    """Most of the multiplying is in the compute type; rotary angles and the like are not."""
    if seen.watch is None:
        return None
    work: Counter[Any] = seen.watch.product_work
    if not work:
        return "no matrix was multiplied"
    if not config.is_8bit_compute:
        [(mostly, _)] = work.most_common(1)
        return _other(compute_type(config), [mostly])
    # How much of the frozen layers' products was in 8 bits, forward and backward. On a CPU the
    # reference multiplies in float what was rounded to 8 bits.
    kind = torch.float32
    if DEVICES[seen.base.device.type].is_gpu:
        kind = EIGHT_BIT_TYPES[config.compute_dtype]
    weights = 0
    for layer in seen.base.modules():
        # Those of too few features for 8 bits count among what is not in them.
        if isinstance(layer, bnb.nn.Linear4bit | EightBitLinear):
            weights += layer.in_features * layer.out_features
    tokens = seen.loop.newest.numel() * seen.loop.micro_steps
    share = work.get(kind, 0) / (2 * weights * tokens)
    if share > _LEAST_8_BIT_SHARE:
        return None
    return f"{in_percent(share)} of the products are in 8 bits"


def _attention(config: TrialConfig, seen: StepEvidence) -> str | None:
    """Each implementation leaves its own operators.

    `sdpa` must reach a fused kernel: its fallback materializes the scores as `eager` does. In fp32
    with grouped-query heads torch has no fused kernel at all, nor on a CPU for a model that drops
    scores or whose values have a width of their own, so there the fallback is what people get.
    `flash_attention_2` is flash-attn's own operator, which no kernel of torch stands in for. Linear
    attention calls its kernels where they are installed.
    """
    watch = seen.kernels
    looping = not_called(seen.base, has_solved=watch is not None and watch.has_solved)
    if looping is not None:
        return looping
    if watch is None:
        return None
    operators = sorted(watch.attention)
    fused = [name for name in operators if any(kind in name for kind in _FAST_ATTENTION)]
    flash = [name for name in operators if _FLASH_ATTN in name]
    reasons = [getattr(seen.base.config, name, None) for name in _BEYOND_A_CPUS_KERNEL]
    is_beyond_a_cpus = seen.base.device.type == "cpu" and any(reasons)
    has_none = config.compute_kind.bits == 32 or is_beyond_a_cpus
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


def _parallel(config: TrialConfig, seen: StepEvidence) -> str | None:
    """GPUs that trained on different rows have the same adapters, to the last bit; the longest rows
    of texts come first on each."""
    asked = config.data_parallel
    looks = seen.looks
    if max(1, len(looks)) != asked:
        return f"{max(1, len(looks))} of {asked} GPUs trained"
    if asked == 1:
        return None
    sizes = set(map(attrgetter("size"), looks))
    if sizes != {asked}:
        return f"a GPU trained with {min(sizes) - 1} others"
    if seen.batches is None and len(set(map(attrgetter("tokens"), looks))) < asked:
        return "two GPUs had the same rows"
    for look in looks:
        if look.adapters != looks[0].adapters and not config.is_sharded:
            return f"the adapters of GPU {look.rank} are others than the first one's"
    return None


def _sharding(config: TrialConfig, seen: StepEvidence) -> str | None:
    """A GPU holds its share of the decoder layers' weights, or all of them, and a weight comes out
    of its shares as it was put into them."""
    attached = seen.loop.attached
    if attached.gathered is not None and not attached.gathered.is_whole:
        return "4-bit weights are gathered as others than they were shared out as"
    asked = 1.0
    if config.is_sharded:
        asked = 1 / config.data_parallel
    for look in seen.looks:
        if abs(look.held_share - asked) > _SHARE_SLACK:
            share = in_percent(look.held_share)
            return f"a GPU holds {share} of the layers' weights, not {in_percent(asked)}"
    return None


def _offload(config: TrialConfig, seen: StepEvidence) -> str | None:
    """The experts of the chosen layers lie on the host, and came from there for each pass of a
    micro-step, but for those that were there from the one before; with no gradient to go back to
    the first layers the way back is shorter."""
    packed = list(packed_experts(seen.base))
    on_host = {layer for layer, experts in enumerate(packed) if experts.is_on_host}
    asked = config.offloaded_layers(len(packed))
    if on_host != asked:
        return f"the experts of {len(on_host)} layers are on the host, not of {len(asked)}"
    host = seen.loop.attached.offloaded
    copies = 0 if host is None else host.copies
    passes = 1 if first_trained(seen.layers) else 2
    least = seen.loop.micro_step * passes * max(0, len(asked) - SLOTS)
    if copies < least:
        return f"experts came from the host {copies} times, not {least}"
    return None


def _on_host(config: TrialConfig, seen: StepEvidence) -> str | None:
    """The inputs of the recomputed layers came back from the host in each micro-step, or none are
    there."""
    host = seen.loop.attached.host
    if not config.waits_on_host:
        return None if host is None else "checkpoints were to stay on the GPU"
    if host is None:
        return "checkpoints stayed on the GPU"
    layers = config.checkpointed_count(len(seen.layers)) - first_trained(seen.layers)
    least = seen.loop.micro_step * max(0, layers)
    if host.copies < least:
        return f"checkpoints came from the host {host.copies} times, not {least}"
    return None


PROOFS: dict[str, Callable[[TrialConfig, StepEvidence], str | None]] = {
    "quantization": _quantization,
    "quantized_fraction": _quantized_layers,
    "offload_fraction": _offload,
    "double_quant": lambda config, seen: _other(
        config.double_quant, map(attrgetter("nested"), seen.four_bit_states())
    ),
    "method": lambda config, seen: _other(config.is_on_pairs, [seen.pairs is not None]),
    "loss_type": _loss_of_pairs,
    "dpo_beta": _loss_of_pairs,
    "reference": _reference,
    "micro_batch_size": lambda config, seen: _other(
        config.micro_batch_size, [seen.rows / config.rows_per_sample]
    ),
    "seq_len": _length,
    "image_size": _images,
    "effective_batch_size": _accumulation,
    "checkpoint_fraction": lambda config, seen: _layers(
        config.checkpointed_layers(len(seen.layers)), seen.loop.attached.recomputed
    ),
    "checkpoint_offload": _on_host,
    "kernels": _kernels,
    "optimizer": _optimizer,
    "compile": _compile,
    "expandable_segments": _segments,
    "upcast_fp32": _upcast,
    "lora_rank": _rank,
    "lora_alpha": lambda config, seen: _other(
        config.alpha / config.lora_rank, seen.of_adapters("scaling")
    ),
    "learning_rate": lambda config, seen: _other(
        # The schedule keeps its highest rate beside the one of the moment.
        rate_of(config, seen.loop.attached.model),
        map(itemgetter("initial_lr"), seen.loop.optimizer.param_groups),
    ),
    "packing": _packing,
    "lora_dropout": _dropout,
    "adapter_dtype": lambda config, seen: _other(
        DTYPES[config.adapter_dtype],
        map(attrgetter("dtype"), seen.loop.attached.trainable_parameters()),
    ),
    "target_modules": _targets,
    "compute_dtype": _compute_dtype,
    "attention": _attention,
    "data_parallel": _parallel,
    "sharding": _sharding,
    "trainer": lambda config, seen: _other(
        config.has_head_of_trl, [isinstance(seen.loop.trained, InTrl)]
    ),
}
"""By the key of each setting what returns a contradiction to its value, or None."""
