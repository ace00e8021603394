"""Experts whose weights are held in 4 or 8 bits, and products by them over each expert's tokens.

transformers keeps all experts of a layer in one parameter (experts, out, in), which bitsandbytes
leaves in 16 bits. Here it is packed as bitsandbytes packs the weight of a linear layer, or held in
FP8 or INT8 with a scale for each output feature of each expert. Each pass decodes it for as long as
its product takes, in 16 bits, and keeps nothing decoded. An exported script carries
this file beside it: it needs torch, transformers, bitsandbytes,
PEFT, `eight_bit`, `grouped` and `offload` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from types import MethodType
from typing import Any

import bitsandbytes as bnb
import torch
from peft.tuners.lora.layer import ParamWrapper
from torch.nn.functional import pad
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from qlora_sweep.sweep.training import grouped
from qlora_sweep.sweep.training.eight_bit import (
    TYPES,
    Parts,
    check_finite,
    rounded,
    widened,
    widened_rows,
)
from qlora_sweep.sweep.training.offload import WeightsOnHost, widened_from_host

_MARKS = ("_apply_gate", "is_transposed")
"""What `use_experts_implementation` of transformers gives a class of experts that multiply as its
own functions do (``integrations/moe.py``)."""
_RANK_MULTIPLE = 8
"""torch's `grouped_mm` wants rows of 16 bytes or multiples of that: so many 16-bit values."""


Choice = Callable[[int], Collection[int]]
"""Returns some of so many layers, by their numbers."""


def nothing(_: int) -> Collection[int]:
    """Return no layer."""
    return ()


def expert_modules(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield modules that hold all experts of a layer, as transformers has them, with their names.

    Others that do are of a class of their own (Llama 4's, DBRX's) and multiply in their own way.
    """
    for name, module in model.named_modules():
        if all(hasattr(module, mark) for mark in _MARKS):
            yield name, module


def weight_names(experts: Any) -> tuple[str, str]:
    """Return what an experts' module calls its two weights, in the order of the products."""
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


def pack_experts(
    model: torch.nn.Module,
    *,
    quant_type: str,
    double_quant: bool,
    left: Collection[str] = (),
    offloaded: Choice = nothing,
) -> None:
    """Have the experts of a model take their weights in 4 bits, and multiply by them so.

    Args:
        model: on the meta device.
        quant_type: ``nf4`` or ``fp4``.
        double_quant: whether scales are quantized too.
        left: patterns of modules that stay in 16 bits, as transformers matches names.
        offloaded: of so many layers with experts the numbers of those whose weights are to lie on
            the host.
    """
    all_experts = expert_modules(model)
    layers = [one for path, one in all_experts if should_convert_module(path, list(left))]
    chosen = offloaded(len(layers))
    for index, experts in enumerate(layers):
        _become_packed(experts)
        experts.is_on_host = index in chosen
        for name in weight_names(experts):
            weight = getattr(experts, name)
            packed = bnb.nn.Params4bit(
                weight.data,
                requires_grad=False,
                compress_statistics=double_quant,
                quant_type=quant_type,
            )
            setattr(experts, name, packed)


def _become_packed(experts: Any) -> None:
    experts.is_on_host = False
    experts.compute_dtype = getattr(experts, weight_names(experts)[0]).dtype
    experts.adapters = {}
    experts.forward = MethodType(_forward, experts)


def hold_in_8_bits(
    model: torch.nn.Module,
    kind: str,
    *,
    left: Collection[str] = (),
    device: torch.device | None = None,
) -> None:
    """Hold the experts of a model in 8 bits, one layer's after the other, and have them multiply
    by what that stands for.

    Args:
        model: its weights in 16 bits, wherever they are; on the meta device they get no values.
        kind: ``fp8`` or ``int8``.
        left: names of modules that stay as they are.
        device: where these weights are put, one at a time; None for where they are.

    Raises:
        UnfitWeightError: a weight that 8 bits cannot hold.
    """
    for path, experts in expert_modules(model):
        if path in left:
            continue
        _become_packed(experts)
        experts.kind = kind
        for name in weight_names(experts):
            wide = getattr(experts, name).data
            if wide.is_meta:
                narrow = torch.empty_like(wide, dtype=torch.int8)
                _put_8_bits(experts, name, narrow, _scales_like(experts, wide))
            else:
                give_8_bits(experts, name, wide.to(device))


def give_8_bits(experts: Any, name: str, wide: torch.Tensor) -> None:
    """Give experts that are held in 8 bits the values of a weight (experts, out, in), or
    (experts, in, out), on their device.

    Raises:
        UnfitWeightError: 8 bits cannot hold it.
    """
    scales = torch.empty_like(_scales_like(experts, wide))
    narrow = torch.empty_like(wide, dtype=TYPES[experts.kind])
    # One expert after another: of all there would be a copy, and one of its transpose.
    for index, matrix in enumerate(wide):
        if experts.is_transposed:
            values, row_scales = rounded(matrix.t().contiguous(), experts.kind)
            values = values.t()
            row_scales = row_scales.t()
        else:
            values, row_scales = rounded(matrix, experts.kind)
        narrow[index] = values
        scales[index] = row_scales
    check_finite(scales, name)
    _put_8_bits(experts, name, narrow.view(torch.int8), scales)


def _scales_like(experts: Any, wide: torch.Tensor) -> torch.Tensor:
    """Return a scale for each output feature of each expert, (experts, out, 1) or (experts, 1,
    out), without values."""
    if experts.is_transposed:
        of_features = wide[:, :1]
    else:
        of_features = wide[..., :1]
    return torch.empty_like(of_features, dtype=torch.float32, memory_format=torch.contiguous_format)


def _put_8_bits(experts: Any, name: str, narrow: torch.Tensor, scales: torch.Tensor) -> None:
    # As bytes, which is no type that adapters or norms could have.
    setattr(experts, name, torch.nn.Parameter(narrow, requires_grad=False))
    experts.register_buffer(f"{name}_scales", scales, persistent=False)


def packed_experts(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the experts' modules of a model whose weights are packed."""
    for _, experts in expert_modules(model):
        if hasattr(experts, "is_on_host"):
            yield experts


def device_of(experts: Any) -> torch.device:
    """Return the device on which packed experts multiply, wherever their weights lie."""
    device: torch.device = _parts(experts, weight_names(experts)[0])[-1].device
    return device


def hold_on_host(experts: Any, host: WeightsOnHost) -> None:
    """Move the weights of packed experts to the host, but for what is small of them.

    Args:
        experts: a module of `expert_modules`, the next one in a forward pass.
        host: whose device the small parts are on from there on.

    Raises:
        HostMemoryError: the host has too little memory.
    """
    weights = [getattr(experts, name) for name in weight_names(experts)]
    large: list[torch.Tensor] = []
    for weight in weights:
        large += [weight.data, weight.quant_state.absmax]
    placed = iter(host.add(large))
    for weight in weights:
        weight.data = next(placed)
        weight.quant_state.to(host.device)
        weight.quant_state.absmax = next(placed)
    experts._apply = MethodType(_stay, experts)


def _stay(self: Any, *_: Any, **__: Any) -> Any:
    """Move nothing: what puts a whole model on the device (accelerate, Trainer) asks each module
    to."""
    return self


def hold_all_on_host(model: torch.nn.Module, host: WeightsOnHost) -> None:
    """Move to the host what is to lie there of a model that was just loaded.

    Raises:
        HostMemoryError: the host has too little memory.
    """
    for experts in packed_experts(model):
        if experts.is_on_host:
            hold_on_host(experts, host)


def is_packed(weight: Any) -> bool:
    """Whether a parameter is that of experts in 4 or 8 bits, or is to be."""
    is_narrow = isinstance(weight, bnb.nn.Params4bit) or weight.dtype == torch.int8
    return is_narrow and len(shape_of(weight)) == 3


def shape_of(weight: Any) -> torch.Size:
    """Return the shape of what a parameter stands for, be it packed or not."""
    state = getattr(weight, "quant_state", None)
    shape: torch.Size = weight.shape if state is None else state.shape
    return shape


def quantized(weight: torch.Tensor, like: Any, device: torch.device) -> Any:
    """Return a weight of experts (experts, out, in), on whatever device it is, as a parameter in 4
    bits on another, of the kind of the one in whose place it comes."""
    return bnb.nn.Params4bit(
        weight,
        requires_grad=False,
        compress_statistics=like.compress_statistics,
        quant_type=like.quant_type,
    ).to(device)


class _Quantizer(Bnb4BitHfQuantizer):
    """bitsandbytes' quantizer of transformers, for experts too."""

    offloaded = staticmethod(nothing)

    def _process_model_before_weight_loading(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, *args, **kwargs)
        settings = self.quantization_config
        if self.pre_quantized:
            return
        pack_experts(
            model,
            quant_type=settings.bnb_4bit_quant_type,
            double_quant=settings.bnb_4bit_use_double_quant,
            left=self.modules_to_not_convert,
            offloaded=self.offloaded,
        )

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        is_linear: bool = super().param_needs_quantization(model, param_name, **kwargs)
        return is_linear or is_packed(model.get_parameter_or_buffer(param_name))

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        # transformers takes as much memory at once as all of them need on the device.
        if getattr(model.get_submodule(param_name.rpartition(".")[0]), "is_on_host", False):
            return 0.0
        size: float = super().param_element_size(model, param_name, param)
        return size

    def get_quantize_ops(self) -> Any:
        return _Quantize(self)


class _Quantize(Bnb4bitQuantize):
    def convert(self, input_dict: Any, model: Any = None, **kwargs: Any) -> Any:
        (name, value), *_ = input_dict.items()
        before = model.get_parameter_or_buffer(name)
        if not is_packed(before):
            return super().convert(input_dict, model=model, **kwargs)
        weight = value[0] if isinstance(value, list) else value
        packed = quantized(weight, before, weight.device)
        if model.get_submodule(name.rpartition(".")[0]).is_on_host:
            packed = packed.to("cpu")
        return {name: packed}


@contextlib.contextmanager
def packed_when_loaded(offloaded: Choice = nothing) -> Iterator[None]:
    """Have `from_pretrained` quantize experts as well, where it is told to load in 4 bits: each
    layer's as they are read.

    Args:
        offloaded: see `pack_experts`; `hold_all_on_host` pins what was loaded so.
    """
    before = AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"]
    settings = {"offloaded": staticmethod(offloaded)}
    AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = type("_Quantizer", (_Quantizer,), settings)
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = before


def dequantized(experts: Any, name: str) -> torch.Tensor:
    """Return a weight of experts as transformers has it, (experts, out, in) or transposed, in the
    type that they compute in."""
    weight = getattr(experts, name)
    if not is_packed(weight):
        return weight
    parts = _parts(experts, name)
    like = torch.empty(0, dtype=experts.compute_dtype, device=parts[-1].device)
    return _decoded(parts, like, experts.is_on_host).view(shape_of(weight))


def _decoded(
    parts: Parts, like: torch.Tensor, is_on_host: bool, *, is_again: bool = False
) -> torch.Tensor:
    """Return the values of a weight, those of a packed one in one row, on the device and of the
    type of another."""
    if len(parts) == _PARTS_IN_8_BITS:
        weight, scales = parts
        return widened_rows(weight, scales, like.dtype, is_again=is_again)
    if is_on_host:
        return widened_from_host(parts, like, is_again)
    return widened(parts, like.dtype, is_again=is_again)


_PARTS_IN_8_BITS = 2
"""Of a weight that is held so: its bytes and its scales."""


def _parts(experts: Any, name: str) -> Parts:
    """Return what a weight of experts is held as."""
    weight = getattr(experts, name)
    if weight.dtype == torch.int8:
        return [weight.data.view(TYPES[experts.kind]), getattr(experts, f"{name}_scales")]
    state = weight.quant_state
    parts = [weight.data.reshape(-1), state.absmax, state.code]
    if state.nested:
        parts += [state.state2.code, state.state2.absmax, state.offset]
    return parts


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum (tokens, hidden) of what the chosen experts make of each token.

    Args:
        self: an experts' module.
        hidden_states: (tokens, hidden).
        top_k_index: the experts of each token (tokens, chosen).
        top_k_weights: by how much each of them counts, alike.
    """
    chosen = top_k_index.shape[-1]
    expert_of_row, order = top_k_index.flatten().sort(stable=True)
    every = torch.arange(self.num_experts, device=order.device, dtype=order.dtype)
    # How many rows are of this expert or one before it (experts,).
    ends = torch.searchsorted(expert_of_row, every, right=True, out_int32=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)

    first, second = weight_names(self)
    rows = hidden_states.to(self.compute_dtype)  # (tokens, hidden)
    rows = _Dispatched.apply(rows, order, place, chosen)  # (tokens * chosen, hidden)
    rows = _projected(self, first, rows, ends)
    if self.has_bias:
        rows = rows + getattr(self, f"{first}_bias")[expert_of_row].to(rows.dtype)
    # Before the product, where a row is narrower than after it: what is kept is less.
    share = top_k_weights.flatten()[order, None].to(rows.dtype)
    rows = _activated(self, rows, share)
    rows = _projected(self, second, rows, ends)
    if self.has_bias:
        rows = rows + getattr(self, f"{second}_bias")[expert_of_row].to(rows.dtype) * share
    return _Combined.apply(rows, order, place, chosen).to(hidden_states.dtype)


def _activated(experts: Any, rows: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the activation (rows, inner) of the first product, times the shares (rows, 1)."""
    if experts.has_gate:
        rows = experts._apply_gate(rows)
    else:
        rows = experts.act_fn(rows)
    return rows * share


class _Dispatched(torch.autograd.Function):
    """Tokens (tokens, width) as rows (tokens * chosen, width), sorted by expert."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, order: torch.Tensor, place: torch.Tensor, chosen: int
    ) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.chosen = chosen
        return tokens[order // chosen]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (place,) = ctx.saved_tensors
        return grouped.summed(gradients[0], place, ctx.chosen), None, None, None


class _Combined(torch.autograd.Function):
    """Rows (tokens * chosen, width) that are sorted by expert, summed by token (tokens, width)."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, place: torch.Tensor, chosen: int
    ) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.chosen = chosen
        return grouped.summed(rows, place, chosen)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return gradients[0][order // ctx.chosen], None, None, None


def _projected(experts: Any, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the product (rows, out) of rows (rows, in) and the weight of each one's expert."""
    weight = getattr(experts, name)
    shape = tuple(shape_of(weight))
    how = (shape, experts.is_transposed, experts.is_on_host)
    product = _PackedProduct.apply(rows, ends, *how, *_parts(experts, name))
    adapter = experts.adapters.get(name)
    if adapter is not None:
        product = product + adapter.product(rows, ends)
    return product


def _inputs_first(weight: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Return a weight as (experts, in, out)."""
    return weight if is_transposed else weight.transpose(-2, -1)


class _PackedProduct(torch.autograd.Function):
    """Rows times the weights of their experts, which are decoded in each pass."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        ends: torch.Tensor,
        shape: tuple[int, int, int],
        is_transposed: bool,
        is_on_host: bool,
        *parts: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(ends, *parts)
        ctx.shape = shape
        ctx.is_transposed = is_transposed
        ctx.is_on_host = is_on_host
        weight = _decoded(list(parts), rows, is_on_host).view(shape)
        return grouped.product(rows, _inputs_first(weight, is_transposed), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ends, *parts = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        # By another operator than forward, or the compiler keeps what that decoded.
        weight = _decoded(parts, gradient, ctx.is_on_host, is_again=True).view(ctx.shape)
        outputs_first = _inputs_first(weight, not ctx.is_transposed)
        of_rows = grouped.product(gradient, outputs_first, ends)
        nothing = (None,) * (4 + len(parts))
        return of_rows, *nothing


def _in_rows(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight (experts, rank, out) whose rows lie one after the other.

    Of `contiguous` alone inductor makes whatever strides it likes, and `grouped_mm` refuses them.
    """
    weight = weight.contiguous()
    if not torch.compiler.is_compiling():
        return weight
    _, rank, width = weight.shape
    return weight.as_strided(weight.shape, (rank * width, width, 1))


class ExpertsAdapter(ParamWrapper):
    """PEFT's adapter on a parameter of experts, multiplied for the tokens of each expert.

    PEFT adds the adapter to the weight, which takes another weight in 16 bits in each pass. Here
    rows go through its two factors. It is saved and loaded as PEFT's, of whose class adapters are
    made before they become one.
    """

    lora_A: Any  # noqa: N815 - PEFT's name
    lora_B: Any  # noqa: N815 - PEFT's name

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what the experts make of tokens; they ask for `product` by themselves."""
        return self.base_layer(x, *args, **kwargs)

    def product(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor | float:
        """Return what the adapter adds (rows, out) to the product of rows (rows, in)."""
        if self.disable_adapters or self.merged:
            return 0.0
        total: torch.Tensor | float = 0.0
        for adapter in self.active_adapters:
            if adapter not in self.lora_A:
                continue
            down = self.lora_A[adapter].weight.to(rows.dtype)
            up = self.lora_B[adapter].weight.to(rows.dtype)
            # PEFT's are (experts * rank, in) and (out, rank * experts).
            down = down.view(self.num_experts, -1, down.shape[-1])  # (experts, rank, in)
            up = up.view(len(up), -1, self.num_experts).permute(2, 1, 0)  # (experts, rank, out)
            missing = -self.r[adapter] % _RANK_MULTIPLE
            if missing:
                down = pad(down, (0, 0, 0, missing))
                up = pad(up, (0, 0, 0, missing))
            inner = grouped.trained_product(rows, down.transpose(-2, -1), ends)
            outer = grouped.trained_product(inner, _in_rows(up), ends)
            total = total + outer * self.scaling[adapter]
        return total

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Refuse, as packed weights take no adapter.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "packed experts take no adapter into their weights: `sweep merge` adds it to the "
            "16-bit base"
        )

    def unload_and_optionally_merge_module(self, *args: Any, **kwargs: Any) -> Any:
        """Return the experts' module without adapters, as PEFT does."""
        experts = super().unload_and_optionally_merge_module(*args, **kwargs)
        experts.adapters = {}
        return experts


def show_shapes(model: torch.nn.Module) -> None:
    """Tell PEFT the shapes of packed experts, as DeepSpeed tells it those of parameters that it
    holds in another one."""
    weight: Any
    for weight in filter(is_packed, model.parameters()):
        weight.ds_shape = shape_of(weight)


def adapt_experts(model: torch.nn.Module) -> None:
    """Let PEFT's adapters on packed experts multiply for themselves."""
    module: Any
    for module in list(model.modules()):
        if type(module) is ParamWrapper and is_packed(module.get_param()):
            module.__class__ = ExpertsAdapter
            experts = module.get_base_layer()
            experts.adapters[module.parameter_name] = module
            if experts.is_on_host:
                # PEFT puts them where the weight is.
                module.lora_A.to(device_of(experts))
                module.lora_B.to(device_of(experts))
