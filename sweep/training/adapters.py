"""What is put on the resident base for one trial and taken off again: adapters, checkpointing,
layers compiled for the shape at hand.

Compiling the whole PEFT model compiles nothing, so each layer is compiled, and one graph serves all
that are alike. Shapes are static: that costs some seconds a shape where a graph for any shape costs
a minute, and trains as fast (tests/bench/results/compile_cost.json). Graphs stay for later trials
of the process, on other bases too, and on disk for later processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import bitsandbytes as bnb
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch._dynamo.callback import callback_handler
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError, did_you_mean
from qlora_sweep.search_spaces.linears import resolve_targets
from qlora_sweep.sweep.training import eight_bit, experts, grouped, int8_products, offload
from qlora_sweep.sweep.training.eight_bit import changed
from qlora_sweep.sweep.training.experts import (
    adapt_experts,
    expert_modules,
    show_shapes,
    weight_names,
)
from qlora_sweep.sweep.training.host_memory import HostMemoryError
from qlora_sweep.sweep.training.model import (
    DTYPES,
    LINEAR,
    BaseModel,
    Unavailable,
    decoder_layers,
    vision_modules,
    vision_pattern,
)
from qlora_sweep.sweep.training.offload import WeightsOnHost
from qlora_sweep.sweep.training.process_group import GatheredWeights, build_shares
from qlora_sweep.sweep.training.recomputing import CheckpointsOnHost, as_nodes

_SHAPES_MAX = 1_000_000
"""Graphs of one layer that are kept; torch keeps eight, and would not compile what comes after."""

Graph = Callable[..., Any]


@dataclass
class Compilation:
    """What the compiler did since it was put on some layers."""

    calls: int = 0
    """Times that a compiled layer ran forward, as a recomputed one does twice."""
    seconds: float = 0.0
    """Spent on compiling, or on fetching from the disk what was compiled before."""
    _begun: float = 0.0

    def start(self, _: Any) -> None:
        """Note that the compiler begins."""
        self._begun = time.perf_counter()

    def end(self, _: Any) -> None:
        """Note that it is done."""
        self.seconds += time.perf_counter() - self._begun


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
    layers_left: frozenset[int] = frozenset()
    """Numbers of the layers that the base is stored with in 16 bits."""
    offloaded: WeightsOnHost | None = None
    """The experts' weights that lie on the host; None where none do."""
    host: CheckpointsOnHost | None = None
    """Where inputs of recomputed layers wait; None where they stay on the device."""
    recomputed: set[int] = field(default_factory=set)
    """Layers that really went through checkpointing."""
    gathered: GatheredWeights | None = None
    """What was seen of a packed weight that is put together from shares."""
    compilation: Compilation | None = None
    """What the compiler did; None where nothing is compiled."""
    seen: int = 0
    """States that what sees has returned."""

    def note_seen(self, _module: Any, _inputs: Any, output: Any) -> None:
        """Count what a forward pass of the tower returns."""
        self.seen += output.last_hidden_state[..., 0].numel()

    def trainable_parameters(self) -> list[torch.nn.Parameter]:
        """Return the adapters' parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]


@contextlib.contextmanager
def attached(base: BaseModel, config: TrialConfig) -> Iterator[Attached]:
    """Attach the configuration's adapters to the base; on exit the base is as it was.

    A base that is to be sharded has no weights until then, and is of no further use afterwards.

    Args:
        base: has none yet.
        config: whose adapters.

    Raises:
        InputError: the architecture has no such target modules.
    """
    with contextlib.ExitStack() as undo:
        model = with_adapters(base, config, is_on_meta=config.is_sharded)
        layers = decoder_layers(base.model)
        chosen = config.checkpointed_layers(len(layers))
        result = Attached(
            model, layers, chosen, base.quantized_share, base.layers_left, base.offloaded
        )
        if base.offloaded is not None:
            base.offloaded.copies = 0
        if config.is_sharded:
            result.gathered = build_shares(model, base, config, layers=layers)
        else:
            undo.callback(model.unload)
        model.train()
        if chosen:
            result.host = undo.enter_context(_checkpoints(base, config, len(chosen)))
            undo.enter_context(recomputed(base.model, layers, chosen))
            if config.recomputes_as_nodes:
                as_nodes(layers, result.host)
            for index, layer in enumerate(layers):
                _note_recomputing(layer, result.recomputed, index)
        if config.image_size is not None:
            tower, *_ = vision_modules(base.model)
            undo.callback(tower.register_forward_hook(result.note_seen).remove)
        if config.compile:
            compiling = compiled(layers, is_sharded=config.is_sharded)
            result.compilation = undo.enter_context(compiling)
        yield result


def with_adapters(
    base: BaseModel, config: TrialConfig, *, is_on_meta: bool = False, **options: Any
) -> PeftModel:
    """Return the base with the configuration's adapters on it, in training mode or not as it was.

    Args:
        base: has none yet.
        config: their rank, scale, dropout, targets and type.
        is_on_meta: whether they get no values yet.
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
        target_parameters=target_parameters(base, config),
        exclude_modules=vision_pattern(base.model),
        **options,
    )
    asked = lora.target_modules
    show_shapes(base.model)
    model = get_peft_model(base.model, lora, low_cpu_mem_usage=is_on_meta)
    adapt_experts(model)
    put: Any = model.peft_config["default"].target_modules
    if isinstance(asked, set) and asked != set(put):
        model.unload()
        others = ", ".join(sorted(asked - set(put)))
        raise InputError(
            f"target_modules: of this model type PEFT puts adapters on experts in the place of "
            f"{others}: leave those out, or name gate_up_proj for the experts"
        )
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
    sees = set(vision_modules(base.model))
    names = [
        name
        for name, module in base.model.named_modules()
        if isinstance(module, LINEAR) and module not in sees
    ]
    of_experts = _expert_weights(base.model)
    suffixes = sorted({name.rpartition(".")[2] for name in names} | of_experts)
    found = []
    for target in wanted:
        if any(name == target or name.endswith("." + target) for name in names):
            found.append(target)
        elif target not in of_experts:
            nearest = did_you_mean(target, suffixes)
            raise InputError(
                f"target_modules: the model has no linear layer '{target}'{nearest} "
                "(target_modules all-linear takes every one of them)"
            )
    return found


def target_parameters(base: BaseModel, config: TrialConfig) -> list[str] | None:
    """Return what PEFT calls the weights of experts that the configuration names; None for none."""
    weights = _expert_weights(base.model)
    named = [f"experts.{name}" for name in resolve_targets(config, base.spec) if name in weights]
    return named or None


def _expert_weights(model: torch.nn.Module) -> set[str]:
    """Return what the model calls the weights of its experts."""
    names = set[str]()
    for _, module in expert_modules(model):
        names.update(weight_names(module))
    return names


@contextlib.contextmanager
def _checkpoints(
    base: BaseModel, config: TrialConfig, count: int
) -> Iterator[CheckpointsOnHost | None]:
    """Give the host's memory for the inputs of so many recomputed layers; None where they stay on
    the device.

    Raises:
        Unavailable: the host has too little.
    """
    if not config.waits_on_host:
        yield None
        return
    width = base.model.config.get_text_config().hidden_size
    size = config.hidden_bytes(width)
    host: CheckpointsOnHost | None = None
    try:
        host = CheckpointsOnHost(base.device)
        host.reserve(size, count=count)
        yield host
    except HostMemoryError as error:
        raise Unavailable("checkpoint_offload", str(error)) from error
    finally:
        if host is not None:
            host.close()


def _note_recomputing(layer: Any, seen: set[int], index: int) -> None:
    """Have a layer note its index when it really is recomputed."""
    checkpoint = layer._gradient_checkpointing_func

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.add(index)
        return checkpoint(*args, **kwargs)

    layer._gradient_checkpointing_func = noting


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
    """Recompute the activations of the chosen layers in the backward pass, and of no other.

    Layers before the first adapter have no backward pass then either: what is not reentrant needs
    no gradient of the embedding's output, which transformers asks for.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    keep_nothing_before(model, layers)
    layer: Any
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index in chosen


def keep_nothing_before(model: PreTrainedModel, layers: Sequence[torch.nn.Module]) -> None:
    """Let nothing be kept for the backward pass of what is before the first adapter.

    Of a model that sees, transformers asks for the gradient of the patches too, by which the frozen
    tower would keep all that it computes, or compute it twice.
    """
    if first_trained(layers) or vision_pattern(model) is not None:
        model.disable_input_require_grads()
    module: Any
    for module in vision_modules(model):
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = False


def first_trained(layers: Sequence[torch.nn.Module]) -> int:
    """Return the number of the first decoder layer with an adapter; 0 where none has one."""
    for index, layer in enumerate(layers):
        if any(parameter.requires_grad for parameter in layer.parameters()):
            return index
    return 0


def held_share(attachment: Attached) -> float:
    """Return how much of the decoder layers' weights this process holds: all, where nothing is
    sharded."""
    whole = 0
    held = 0
    for layer in attachment.layers:
        for parameter in layer.parameters():
            whole += parameter.numel()
            held += local(parameter).numel()
    return held / whole if whole else 1.0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor: itself, or its share of one that is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class CountingCompiler:
    """A compiler whose graphs tell when they run.

    There is one for the whole process: a graph is found again by who compiled it.
    """

    def __init__(self, compiler: Callable[[torch.fx.GraphModule, Sequence[Any]], Graph]) -> None:
        self._compiler = compiler
        self.counted = Compilation()

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Graph:
        """Compile a graph; called by torch."""
        run = self._compiler(graph, inputs)

        def counting(*args: Any) -> Any:
            self.counted.calls += 1
            return run(*args)

        return counting


def _inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Graph:
    """Compile a graph as torch does where nothing else is asked for."""
    # Imported at the first graph: it wants Triton on a GPU.
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs)  # type: ignore[return-value]


INDUCTOR = CountingCompiler(_inductor)


@contextlib.contextmanager
def compiled(
    layers: Sequence[torch.nn.Module],
    *,
    compiler: CountingCompiler = INDUCTOR,
    is_sharded: bool = False,
) -> Iterator[Compilation]:
    """Compile each layer when it is first called; on exit they are as they were, but for those that
    are sharded.

    A layer is one graph or fails: what fell back to eager would not be what was asked for.
    """
    counted = compiler.counted = Compilation()
    callback_handler.register_start_callback(counted.start)
    callback_handler.register_end_callback(counted.end)
    compile_each(layers, backend=compiler, is_sharded=is_sharded)
    try:
        yield counted
    finally:
        for layer in layers:
            layer._compiled_call_impl = None
        callback_handler.remove_start_callback(counted.start)
        callback_handler.remove_end_callback(counted.end)


def compile_each(
    layers: Sequence[torch.nn.Module], *, backend: Any = "inductor", is_sharded: bool = False
) -> None:
    """Have each layer compiled when it is first called, for the shapes that it gets; of one that is
    sharded what comes once it is gathered."""
    torch._dynamo.config.recompile_limit = _SHAPES_MAX
    torch._dynamo.config.accumulated_recompile_limit = _SHAPES_MAX
    # Where several GPUs train together it would cut each layer's graph up for what they send.
    torch._dynamo.config.optimize_ddp = False
    # Without it no layer's joint graph is kept on the disk whose products are 8-bit or fused, and
    # it is half of what a later process waits for. What torch's key does not hold is in the tag.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    torch.compiler.config.cache_key_tag = _operators_digest()
    how: dict[str, Any] = {"backend": backend, "dynamic": False, "fullgraph": True}
    for layer in layers:
        if is_sharded:
            layer.forward = torch.compile(layer.forward, **how)
            layer.register_forward_pre_hook(_find_constants)
        else:
            layer.compile(**how)


def _find_constants(layer: torch.nn.Module, _: Any) -> None:
    """Give the gathered 4-bit weights of a layer their constants back, which a compiler cannot."""
    for module in layer.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            bnb.nn.modules.fix_4bit_weight_quant_state_from_module(module)


@cache
def _operators_digest() -> str:
    """Return a digest of the code of operators that a graph names and does not hold."""
    parts = bnb.__version__
    for module in (eight_bit, experts, grouped, int8_products, offload):
        parts += inspect.getsource(module)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def eager(layers: Sequence[torch.nn.Module]) -> contextlib.AbstractContextManager[None]:
    """Run layers as they are without the compiler, which would take seconds for each new shape."""
    return changed((layer, "_compiled_call_impl", None) for layer in layers)


def forget_compiled() -> None:
    """Drop every graph, and with it whatever it refers to; the files on the disk stay."""
    torch._dynamo.reset()


def import_compiler() -> None:
    """Import what the first compilation would wait for."""
    with contextlib.suppress(ImportError):
        import torch._inductor.compile_fx  # noqa: F401


def start_compiler_processes() -> None:
    """Begin with what the first compilation would wait for: processes that import torch too."""
    with contextlib.suppress(ImportError, OSError):
        # Without Triton there is no compiler: a trial that wants one says so. Where no process can
        # be started, the first graph is compiled without.
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
