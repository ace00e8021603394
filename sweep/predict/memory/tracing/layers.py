"""What a model's decoder layers ask of a GPU, read off the operators of one pass in each direction.

The base alone is walked: frozen, in bf16, with nothing recomputed, on tensors without data. Every
operator that starts a kernel is noted with its shapes, by layer and pass; what adapters, 4-bit
weights and other types add is known by the shapes of the linear layers (`sweep.predict.speed`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from qlora_sweep.search_spaces.config import Attention, TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.recurrent import recurrent_kind
from qlora_sweep.sweep.predict.memory.profiles import Polynomial, Symbols, Untraceable
from qlora_sweep.sweep.predict.memory.tracing import recurrent
from qlora_sweep.sweep.predict.memory.tracing.profile import (
    build_base,
    check_recurrent,
    excerpt,
    line_of,
    module_at_fault,
    symbols_of,
)
from qlora_sweep.sweep.predict.memory.tracing.stand_ins import Cuda
from qlora_sweep.sweep.predict.memory.tracing.walk import PlainLoop, StorageCounter, boundaries
from qlora_sweep.sweep.training.adapters import with_adapters
from qlora_sweep.sweep.training.model import BaseModel, decoder_layers

_aten = torch.ops.aten
_GROUPED = _aten._grouped_mm.default
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _GROUPED,
    }
)
_WITH_SUMMAND = frozenset({_aten.addmm.default, _aten.baddbmm.default})
"""Products whose first argument is added."""
_NO_KERNEL = frozenset(
    {
        _aten.empty,
        _aten.empty_like,
        _aten.empty_strided,
        _aten.new_empty,
        _aten.new_empty_strided,
        _aten._local_scalar_dense,
        _aten.detach,
    }
)
"""Operators that start none, beside those that return a view."""
_PICKING = frozenset(
    {_aten.index, _aten.index_select, _aten.gather, _aten.embedding, _aten.take_along_dim}
)
"""Operators that read as much of their first argument as they return."""
_TOKEN = "bs"
_SCORE = "bss"


@dataclass
class _Pass:
    """What one pass through a decoder layer does."""

    linears: list[tuple[str, int, int]] = field(default_factory=list)
    """Name within the layer, input and output features, of those that take each token once."""
    norms: list[int] = field(default_factory=list)
    """Elements of each token that a norm takes."""
    products: list[tuple[float, int, int, int, bool]] = field(default_factory=list)
    """Others with a frozen matrix: rows for each token, the matrix's two widths, how many such
    matrices share the rows, and whether each row is sent to one of them."""
    attention: list[tuple[int, int, int]] = field(default_factory=list)
    """Heads, width of all of them, and width of the keys' heads, each a mean of what is scored and
    what is summed."""
    recurrent: list[tuple[int, int, int]] = field(default_factory=list)
    """Heads of linear attention, and the widths of a key and of a value."""
    score_flops: float = 0.0
    """Of products that are not of a frozen matrix, for each pair of tokens."""
    score_bytes: float = 0.0
    """Moved by what works on pairs of tokens, for each pair."""
    score_launches: int = 0
    bytes: float = 0.0
    """Moved by all else, for each token."""
    launches: int = 0
    linears_before_scores: int = 0
    """Linear layers before the first attention."""
    since_linear: list[str] = field(default_factory=list)
    """Operators after the last linear layer."""


class Recorder(StorageCounter):
    """Notes each operator of a step as well; see `_Pass`."""

    def __init__(self, symbols: Symbols, base: torch.nn.Module, *, layers: int) -> None:
        super().__init__(
            ignored=list(itertools.chain(base.parameters(), base.buffers())),
            layers=layers,
            is_odd=symbols.is_unexplained,
        )
        self._symbols = symbols
        self._linear: str | None = None
        self._is_inside_attention = False
        self._now = _Pass()
        self.passes: dict[str, _Pass] = {}

    def mark(self, name: str) -> None:
        """Set a boundary: what happens from here on belongs to ``name``."""
        super().mark(name)
        self._now = self.passes.setdefault(name, _Pass())

    @contextlib.contextmanager
    def watching(self, layers: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Know which operators are a linear layer's, and how many norms there are."""
        with contextlib.ExitStack() as hooks:
            for layer in layers:
                for name, module in layer.named_modules():
                    if "Norm" in type(module).__name__:
                        hooks.enter_context(module.register_forward_pre_hook(self._normalize))
                    if isinstance(module, torch.nn.Linear | Conv1D):
                        enter = partial(self._enter, name)
                        hooks.enter_context(module.register_forward_pre_hook(enter))
                        hooks.enter_context(module.register_forward_hook(self._leave))
            yield

    def _enter(self, name: str, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, Conv1D):
            columns = module.nf
        else:
            columns = module.out_features
        inputs = args[0].shape[-1]
        rows = self._per_token(args[0].numel() // inputs)
        is_new = name not in map(itemgetter(0), self._now.linears)
        if rows == 1.0 and is_new:
            self._now.linears.append((name, inputs, columns))
            self._linear = name
        self._now.since_linear.clear()

    def _normalize(self, _module: Any, args: tuple[torch.Tensor, ...]) -> None:
        self._now.norms.append(int(self._per_token(args[0].numel())))

    def _leave(self, *_: Any) -> None:
        self._linear = None

    @contextlib.contextmanager
    def attending(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[None]:
        """Note one call of a fused attention; its own operators are not."""
        heads = q.shape[1]
        groups = k.shape[1]
        width = (q.shape[-1] + v.shape[-1]) // 2
        self._begin_scores()
        self._now.attention.append((heads, heads * width, groups * width))
        self._is_inside_attention = True
        try:
            yield
        finally:
            self._is_inside_attention = False

    @contextlib.contextmanager
    def recurring(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[None]:
        """Note one call of linear attention's kernels; what they take is not."""
        self._begin_scores()
        self._now.recurrent.append((v.shape[2], k.shape[3], v.shape[3]))
        yield

    def has_run(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Note what an operator does."""
        if self._is_inside_attention:
            return
        if func in _PRODUCTS:
            self._note_product(func, args[func in _WITH_SUMMAND :])
            return
        returned = [t for t in _tensors(result) if t.is_meta]
        if func.overloadpacket in _NO_KERNEL or not returned or _is_view(func, args, returned):
            return
        read = list(_tensors(args))
        if func.overloadpacket in _PICKING:
            read[0] = returned[0]
        moved = [self._symbols.polynomial(_size(tensor)) for tensor in read + returned]
        self._now.since_linear.append(str(func.overloadpacket))
        per_score = sum(size.get(_SCORE, 0) for size in moved)
        if per_score:
            self._now.score_bytes += per_score
            self._now.score_launches += 1
            return
        self._now.bytes += sum(map(_of_token, moved))
        self._now.launches += 1

    def _note_product(self, func: Any, args: tuple[Any, ...]) -> None:
        left = args[0]
        right = args[1]
        rows, inner = left.shape[-2:]
        columns = right.shape[-1]
        groups = 1
        if right.ndim != 2:
            groups = right.shape[0]
        # Each row of a grouped product goes by one of the matrices, of a batched one by its own.
        all_rows = rows
        if left.ndim != 2:
            all_rows *= groups
        flops = self._symbols.polynomial(2 * all_rows * inner * columns)
        if _SCORE in flops:
            self._begin_scores()
            self._now.score_flops += flops[_SCORE]
            written = all_rows * columns * left.element_size()
            for size in (_size(left), _size(right), written):
                self._now.score_bytes += self._symbols.polynomial(size).get(_SCORE, 0)
            self._now.score_launches += 1
        elif self._linear is None:
            self._now.since_linear.append(str(func.overloadpacket))
            if per_token := self._per_token(all_rows):
                is_routed = func is _GROUPED
                self._now.products.append((per_token, inner, columns, groups, is_routed))

    def _begin_scores(self) -> None:
        has_begun = self._now.attention or self._now.recurrent
        if not self._now.score_launches and not has_begun:
            self._now.linears_before_scores = len(self._now.linears)

    def _per_token(self, count: int) -> float:
        return _of_token(self._symbols.polynomial(count))


def _of_token(size: Polynomial) -> float:
    return float(size.get(_TOKEN, 0))


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; what is repeated by its strides is read once."""
    size = tensor.numel() * tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0 and length:
            size //= length
    return size


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _is_view(func: Any, args: tuple[Any, ...], returned: Sequence[torch.Tensor]) -> bool:
    """Whether an operator returns what it was given, and writes nothing."""
    if func._schema.is_mutable:
        return False
    given = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
    return all(tensor.untyped_storage()._cdata in given for tensor in returned)


def trace_layers(spec: ModelSpec, *, attention: Attention) -> list[dict[str, Any]]:
    """Return the kinds of a model's decoder layers as `sweep.predict.speed.layers.from_json` reads
    them.

    Args:
        spec: the model.
        attention: with which it is walked.

    Raises:
        Untraceable: the model's code cannot be walked without data.
        InputError: the config cannot be built.
    """
    plain = TrialConfig(
        quantization="none",
        double_quant=False,
        upcast_fp32=False,
        checkpoint_fraction=0.0,
        attention=attention,
    )
    check_recurrent(spec)
    try:
        part = excerpt(spec)
        symbols = symbols_of(part)
        base = build_base(plain, part.spec).model
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"it cannot be built: {line_of(error)}") from error
    layers = decoder_layers(base)
    recorder = Recorder(symbols, base, layers=len(layers))
    kind_of_recurrent = recurrent_kind(spec)
    linear_attention = recurrent.kernels(
        base, kind_of_recurrent, chunks=symbols.n, on_call=recorder.recurring
    )
    try:
        with linear_attention:
            _walk(base, layers, recorder, symbols)
    except PlainLoop as error:
        raise Untraceable(f"{module_at_fault(error, base)} {error}") from error
    except Exception as error:
        raise Untraceable(f"{module_at_fault(error, base)}: {line_of(error)}") from error
    has_all_linear = _has_all_linear(base, spec)
    kinds: list[dict[str, Any]] = []
    places: list[list[int]] = []
    for layer, position in enumerate(part.positions):
        forward = recorder.passes[f"forward {position}"]
        backward = recorder.passes[f"backward {position}"]
        kind = _kind(forward, backward)
        kind["hidden"] = spec.hidden_size
        kind["has_all_linear"] = has_all_linear
        if kind not in kinds:
            kinds.append(kind)
            places.append([])
        places[kinds.index(kind)].append(layer)
    for kind, layers_of_kind in zip(kinds, places, strict=True):
        kind["layers"] = len(layers_of_kind)
        if kind_of_recurrent is None:
            del kind["recurrent"]
        else:
            kind["places"] = layers_of_kind
    return kinds


def _walk(base: PreTrainedModel, layers: list[Any], recorder: Recorder, symbols: Symbols) -> None:
    """Run both passes, with a gradient for the input of the first layer as for all others'."""
    cuda = Cuda(
        torch.bfloat16, padded_length=symbols.p, has_flash=True, on_attention=recorder.attending
    )
    base.enable_input_require_grads()
    tokens = torch.empty(symbols.b, symbols.s, dtype=torch.int64, device="meta")
    with recorder, boundaries(layers, recorder), recorder.watching(layers):
        recorder.mark("embed")
        with cuda.region():
            logits = base(input_ids=tokens, use_cache=False).logits
        recorder.mark("head")
        torch.autograd.backward(logits.sum())


def _has_all_linear(base: PreTrainedModel, spec: ModelSpec) -> bool:
    """Whether ``all-linear`` puts adapters on linear layers alone, and not on experts as well.

    False too where PEFT can put none on all of them.
    """
    config = TrialConfig(target_modules="all-linear", quantization="none", double_quant=False)
    wrapped = BaseModel(config, spec, base, contextlib.ExitStack())
    try:
        with torch.device("meta"):
            model = with_adapters(wrapped, config, init_lora_weights=False)
    except (InputError, ValueError, RuntimeError, TypeError):
        return False
    return not any(type(module).__name__ == "ParamWrapper" for module in model.modules())


def _kind(forward: _Pass, backward: _Pass) -> dict[str, Any]:
    """Return what both passes through a layer come to."""
    heads = 0
    queries: float = 0
    keys = 0
    for call_heads, call_queries, call_keys in forward.attention:
        heads += call_heads
        queries += call_queries
        keys += call_keys
    score_bytes = None
    score_launches = None
    if not forward.attention and not forward.recurrent:
        # Attention is written out.
        queries = forward.score_flops / 4.0
        score_bytes = [forward.score_bytes, backward.score_bytes]
        score_launches = [forward.score_launches, backward.score_launches]
    linears = {name: [rows, columns] for name, rows, columns in forward.linears}
    names = list(linears)
    attending = {name.partition(".")[0] for name in names[: forward.linears_before_scores]}
    # What only is added to the stream is not kept for the backward pass.
    last = None
    if names and all("add" in name for name in forward.since_linear):
        last = names[-1]
    return {
        "linears": linears,
        "attention": sorted(attending),
        "norms": forward.norms,
        "products": forward.products,
        "recurrent": forward.recurrent,
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "score_bytes": score_bytes,
        "score_launches": score_launches,
        "bytes": [forward.bytes, backward.bytes],
        "launches": [forward.launches, backward.launches],
        "last": last,
    }
