"""Walking one training step of a model without data, and reducing it to tapes.

A segment is the stretch of a step between two marks: a layer's forward or backward pass, or one of
the parts that happen once. A traced layer's segments stand for those of every layer of its kind, so
a tape, which has its births and deaths in order, may name no storage of the walk but those that die
in the segment they were born in. Any other is known by its path: the kinds of segment it is born
and dies in, how many layers lie between, and its rank among those of the same path. So a layer that
was not traced finds what its neighbours left.

The optimizer is not walked: its states and its update are known by number of elements.

Counted are the birth and death of every tensor storage while real model code runs on no data.
What stands for the GPU is torch's meta device; tensors elsewhere are not counted. A storage is born
when an operator returns it and dies when nothing refers to it any more, exactly as on a device:
torch counts references, so a tensor on a GPU is freed at the same moment as one without data. What
a kernel takes and gives back inside one operator is not seen, but for what `_SCRATCH` lists.

Storages are counted rather than tensors, as a view or an operator in place takes nothing. They are
told apart by the address of their C++ object, which is free again once one dies: its watch removes
it before another can be born there.

What an operator returns is worked out once for arguments of a kind: most of torch's operators work
out the shape of a result in Python, which takes a tenth of a millisecond, and a walk asks a
thousand times, mostly for what the layer before, or another structure of the same model, has asked
already.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from inspect import unwrap
from types import ModuleType
from typing import Any

import torch
from peft import PeftModel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, masking_utils

from qlora_sweep.search_spaces.config import TRL_TILE
from qlora_sweep.sweep.predict.memory.profiles import (
    ACTIVATIONS,
    GRADIENTS,
    LOSS,
    Change,
    Polynomial,
    Structure,
    Symbols,
    TapeEntry,
)
from qlora_sweep.sweep.predict.memory.tracing.stand_ins import Cuda
from qlora_sweep.sweep.predict.memory.tracing.vision import image_inputs
from qlora_sweep.sweep.training import preference
from qlora_sweep.sweep.training.adapters import keep_nothing_before
from qlora_sweep.sweep.training.eight_bit import changed
from qlora_sweep.sweep.training.host_memory import Slots
from qlora_sweep.sweep.training.model import compute_type
from qlora_sweep.sweep.training.recomputing import (
    CheckpointsOnHost,
    Recomputing,
    Waiting,
    as_nodes,
)

Event = tuple[int, bool]
"""A storage's number, and whether it was born (or died)."""

_READ = torch.ops.aten._local_scalar_dense.default
_TRUTHS = {
    torch.ops.aten.all: True,
    torch.ops.aten._is_all_true: True,
    torch.ops.aten.any: False,
}
"""What model code finds when it asks a full batch's mask: all of it counts, nothing is odd."""

_SCRATCH = frozenset({torch.ops.aten._softmax_backward_data.default})
"""Operators that, on CUDA, hold one more tensor like their first argument next to their result.

Softmax multiplies gradient and output before it sums (torch's ``SoftMax.cu``).
"""

_MOST_STORAGES = 10_000
_MOST_STORAGES_OF_A_LAYER = 3_000
"""More than these are taken for a loop over the tokens.

A decoder layer makes some hundreds, forward, recomputed and backward.
"""

LOOPS = (
    " in plain PyTorch, and what kernels would take in its place is not modelled: a trial measures "
    "it"
)
"""Why layers are not predicted that transformers runs by a loop, and what to do."""


class PlainLoop(Exception):  # noqa: N818 - the name says what was met
    """The model's code takes the sequence apart; the message says how and what follows."""


class StorageCounter(TorchDispatchMode):
    """Counts storages while it is entered.

    Args:
        ignored: tensors that were there before.
        layers: decoder layers that are walked; many more storages than those make are a loop.
        is_odd: whether a storage of so many bytes follows from no length that the walk knows.

    Attributes:
        events: births and deaths in order.
        sizes: bytes of each storage, by its number.
        marks: name and position in ``events`` of each boundary that `mark` set.
    """

    def __init__(
        self,
        *,
        ignored: Iterable[torch.Tensor] = (),
        layers: int = 1,
        is_odd: Callable[[int], bool] = lambda _: False,
    ) -> None:
        super().__init__()
        self._is_odd = is_odd
        self._most = max(_MOST_STORAGES, layers * _MOST_STORAGES_OF_A_LAYER)
        self.events: list[Event] = []
        self.sizes: list[int] = []
        self.marks: list[tuple[str, int]] = []
        # Held, so that nothing new is ever born at the address of one of them.
        self._ignored = [tensor.untyped_storage() for tensor in ignored]
        self.live: dict[int, int] = {storage._cdata: -1 for storage in self._ignored}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._next_mark: str | None = None
        self._truths: dict[int, bool] = {}

    def mark(self, name: str) -> None:
        """Set a boundary: what happens from here on belongs to ``name``."""
        self.marks.append((name, len(self.events)))

    def mark_next(self, name: str) -> None:
        """Set a boundary at the next operator: what dies before it belongs to what went before."""
        self._next_mark = name

    def segments(self) -> list[tuple[str, list[Event]]]:
        """Return each boundary's name and the events from there to the next one."""
        segments: list[tuple[str, list[Event]]] = []
        end = len(self.events)
        for name, start in reversed(self.marks):
            segments.append((name, self.events[start:end]))
            end = start
        segments.reverse()
        return segments

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and note the storages that it returned."""
        if self._next_mark is not None:
            self.mark(self._next_mark)
            self._next_mark = None
        if func is _READ and (truth := self._truths.get(_key(args[0]))) is not None:
            return truth
        result = run(func, args, kwargs or {})
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and value.is_meta:
                self._note(value)
        if func in _SCRATCH:
            self._note(torch.empty_like(args[0]))
        if func.overloadpacket in _TRUTHS:
            self._truths[_key(result)] = _TRUTHS[func.overloadpacket]
        self.has_run(func, args, result)
        return result

    def has_run(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Hear of an operator that was run; of no use here."""

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            return
        number = len(self.sizes)
        if number == self._most:
            raise PlainLoop(f"loops over the tokens{LOOPS}")
        if self._is_odd(storage.nbytes()):
            raise PlainLoop(f"works in chunks of the sequence{LOOPS}")
        self.sizes.append(storage.nbytes())
        self.events.append((number, True))

        def died(_: object) -> None:
            del self.live[key], self._watches[number]
            self._truths.pop(key, None)
            self.events.append((number, False))

        self.live[key] = number
        self._watches[number] = weakref.ref(storage, died)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_known: dict[Any, tuple[Any, ...] | None] = {}
"""By operator and arguments, the shape, strides and type of what it returns: all that there is to a
tensor without data. None where it has to be run."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator returns: a new tensor laid out as it would, where that is known."""
    if not _makes_new(func):
        return func(*args, **kwargs)
    key = func, _kind(args), _kind(tuple(kwargs.items()))
    if key not in _known:
        result = func(*args, **kwargs)
        layout = result.shape, result.stride(), result.dtype
        # An operator may return a view all the same, or a part of what it took.
        is_new = not any(isinstance(a, torch.Tensor) and _key(a) == _key(result) for a in args)
        is_whole = result.untyped_storage().nbytes() == _made(*layout).untyped_storage().nbytes()
        _known[key] = None
        if result.is_meta and is_new and is_whole:
            _known[key] = layout
        return result
    known = _known[key]
    if known is None:
        return func(*args, **kwargs)
    return _made(*known)


@cache
def _makes_new(func: Any) -> bool:
    """Whether an operator returns a tensor that shares nothing with those it was given."""
    schema = func._schema
    values = itertools.chain(schema.arguments, schema.returns)
    takes_tensors = any("Tensor" in str(value.type) for value in schema.arguments)
    is_one = [str(value.type) for value in schema.returns] == ["Tensor"]
    return takes_tensors and is_one and not any(value.alias_info for value in values)


def _kind(value: Any) -> Any:
    """Return the part of an argument that decides how a result is laid out."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            # A result may depend on its values in any way: it is like no other.
            return object()
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    # 1, 1.0 and True are equal, and make results of other types.
    return type(value), value


def _made(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


@dataclass
class Traceable:
    """A frozen base with adapters, ready for one step."""

    base: PreTrainedModel
    model: PeftModel
    layers: list[Any]
    """The decoder layers."""


@dataclass(frozen=True)
class Walk:
    """What a step came to."""

    ledger: StorageCounter
    gradients: Collection[int]
    """Numbers of the storages that ended as gradients of the adapters."""
    tells_halves_apart: bool
    """Whether it would be another one in the other 16-bit type."""


def walk(target: Traceable, symbols: Symbols, structure: Structure) -> Walk:
    """Run forward and backward once and return what was counted, with a mark at each boundary.

    Marks in order: ``embed``, ``forward 0..n-1``, ``head``, ``head_backward``, ``backward n-1..0``.
    """
    config = structure.config
    computed_in = compute_type(config)
    is_autocast = computed_in != torch.float32
    cuda = Cuda(
        computed_in if is_autocast else None,
        padded_length=symbols.p,
        has_flash=structure.has_flash,
    )
    # Flash attention is told where texts begin instead.
    is_packed = config.packing == "packed" and config.attention != "flash_attention_2"
    there = list(itertools.chain(target.model.parameters(), target.model.buffers()))
    rows = symbols.b * config.rows_per_sample
    if structure.is_checkpointed:
        host = None
        if config.checkpoint_offload:
            width = target.base.config.get_text_config().hidden_size
            host = _Nowhere(rows * symbols.s * width * config.hidden_value_bytes)
            there += host.slots.memory
        _checkpoint(target, cuda, host)
    ledger = StorageCounter(
        ignored=there,
        layers=len(target.layers),
        is_odd=lambda size: config.image_size is None and symbols.is_unexplained(size),
    )
    found: list[tuple[Any, str, Any]] = []
    for module in _asking(target.model):
        found.append((module, "maybe_autocast", cuda.maybe_autocast))
    if is_packed:
        # transformers is to find several texts in a row, whose positions have no values to say.
        found.append((masking_utils, "find_packed_sequence_indices", _texts_of_tokens))
    if config.is_on_pairs:
        # One chunk stands for all of them.
        found.append((preference, "chunks", lambda *_: [slice(0, symbols.c)]))
    with ledger, boundaries(target.layers, ledger), changed(found):
        ledger.mark("embed")
        tokens = torch.empty(rows, symbols.s, dtype=torch.int64, device="meta")
        batch = {"input_ids": tokens, "labels": torch.empty_like(tokens)}
        if is_packed:
            batch["position_ids"] = torch.empty_like(tokens)
        if config.image_size is not None:
            batch |= image_inputs(target.base, config.image_size, tokens)
        if config.is_on_pairs:
            # A pass that keeps nothing comes first, which at no point needs more than this one.
            batch[preference.REFERENCE] = torch.empty(rows, device="meta")
        # As accelerate runs it: under autocast, its 16-bit outputs then widened to fp32.
        tile = symbols.c, TRL_TILE[1]
        with cuda.region():
            if config.method_kind.generates:
                output = _policy_loss(target.model, batch, tile=tile)
            elif config.has_head_of_trl:
                output = _likelihood_in_trl(target.model, batch, tile=tile)
            else:
                output = preference.trained(target.model, config)(**batch)
        if is_autocast:
            output = {name: _widened(value) for name, value in output.items()}
        loss = output["loss"]
        del output
        ledger.mark("head_backward")
        torch.autograd.backward(loss)
    trained = [p.grad for p in target.model.parameters() if p.grad is not None]
    gradients = {ledger.live[_key(gradient)] for gradient in trained}
    return Walk(ledger, gradients, cuda.tells_halves_apart)


def _policy_loss(
    model: PeftModel, batch: dict[str, torch.Tensor], *, tile: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """Return GRPO's loss of completions, a row each, as TRL has it by default; of rows that are all
    completion."""
    base: Any = model.get_base_model()
    hidden = base.get_decoder()(batch["input_ids"], use_cache=False).last_hidden_state
    found = _Tiled.apply(hidden.flatten(0, 1).clone(), tile)
    ratios = torch.exp(found - found.detach())
    return {"loss": -torch.min(ratios, ratios.clamp(0.8, 1.2)).mean()}


def _likelihood_in_trl(
    model: PeftModel, batch: dict[str, torch.Tensor], *, tile: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """Return the loss of TRL's SFTTrainer, of rows each of whose tokens counts but the first."""
    base: Any = model.get_base_model()
    tokens, positions = batch["input_ids"], batch.get("position_ids")
    outputs = base.get_decoder()(tokens, position_ids=positions, use_cache=False)
    found = _Tiled.apply(_Supervised.apply(outputs.last_hidden_state[:, :-1]), tile)
    return {"loss": -found.sum() / tokens.shape[1]}


class _Supervised(torch.autograd.Function):
    """The states of supervised tokens, picked by a mask; all of them, and a copy all the same."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.shape = hidden.shape
        return hidden.new_empty(hidden.shape[0] * hidden.shape[1], hidden.shape[2])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].new_zeros(ctx.shape)


class _Tiled(torch.autograd.Function):
    """Tokens' log-probabilities as TRL's own head has them: a tile of logits at a time in each
    pass, and gradients added up in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.tile = tile
        _logits = hidden.new_empty(tile)
        return hidden.new_empty(len(hidden), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (hidden,) = ctx.saved_tensors
        given = torch.zeros_like(hidden, dtype=torch.float32)
        _logits = hidden.new_empty(ctx.tile)
        return given.to(hidden.dtype), None


def _widened(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    if is_half:
        return value.float()
    return value


def _checkpoint(target: Traceable, cuda: Cuda, host: CheckpointsOnHost | None) -> None:
    """Recompute every layer, and enter autocast again for that, as torch does; what layers are
    computed from may wait on the host."""
    target.base.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={
            "use_reentrant": False,
            "context_fn": lambda: (contextlib.nullcontext(), cuda.region()),
        }
    )
    keep_nothing_before(target.base, target.layers)
    for layer in target.layers:
        layer.gradient_checkpointing = True
    if host is not None:
        as_nodes(target.layers, host, again=cuda.region)


class _Nowhere(CheckpointsOnHost):
    """The host's memory, of what has no data: nothing is copied.

    Args:
        size: bytes of the largest input.
    """

    def __init__(self, size: int) -> None:
        super().__init__(torch.device("meta"))
        self.slots = Slots(self.device, size=size)

    def _send(self, x: torch.Tensor, waiting: Waiting) -> None:
        """Copy nothing."""

    def _bring(self, waiting: Waiting, *, slot: int) -> None:
        """Copy nothing."""
        self._held[slot] = waiting


def _asking(model: torch.nn.Module) -> list[ModuleType]:
    """Return the modules of Python of layers that have autocast left out for what they do.

    All rotary embeddings do, for a few numbers at the start of a step: those count as they are.
    """
    kinds = {type(layer) for layer in model.modules()}
    modules = {
        kind.__module__
        for kind in kinds
        if not kind.__name__.endswith("RotaryEmbedding")
        and "maybe_autocast" in unwrap(kind.forward).__code__.co_names
    }
    return [sys.modules[name] for name in modules]


def _texts_of_tokens(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the text of each token as transformers' function of that place does, by the same
    operators; but for its question whether there is one alone, which has no answer without data."""
    before_first = position_ids[:, :1] - 1
    steps = torch.diff(position_ids, prepend=before_first, dim=-1)
    return (steps != 1).cumsum(-1)


@contextlib.contextmanager
def boundaries(layers: list[torch.nn.Module], ledger: StorageCounter) -> Iterator[None]:
    """Mark where each layer's forward and backward pass begin."""
    done: set[int] = set()
    last = len(layers) - 1
    nodes: dict[Any, Recomputing] = {}
    for layer in layers:
        how = getattr(layer, "_gradient_checkpointing_func", None)
        if isinstance(how, Recomputing):
            nodes[layer] = how

    # Hooks run again where a layer is recomputed in the backward pass; from the end of the last one
    # on gradients mark the boundaries.
    def enter(index: int, *_: Any) -> None:
        if last not in done:
            ledger.mark(f"forward {index}")

    def leave(index: int, layer: Any, _args: Any, output: Any) -> None:
        if last not in done and layer not in nodes:
            returned(index, output)

    def returned(index: int, output: Any) -> None:
        done.add(index)
        tensor = output[0] if isinstance(output, tuple) else output
        # The gradient of a layer's output arrives when its backward pass is about to begin; before
        # the first adapter there is none.
        if tensor.requires_grad:
            tensor.register_hook(lambda _grad: ledger.mark(f"backward {index}"))
        if index == last:
            # What the layer's frame still holds dies after this hook, and is the layer's.
            ledger.mark_next("head")

    def through(index: int, how: Recomputing, *given: Any) -> Any:
        # What a layer saves that is one node dies before that returns, and its output is another.
        output = how(*given)
        returned(index, output)
        return output

    changes: list[tuple[Any, str, Any]] = []
    for index, layer in enumerate(layers):
        if layer in nodes:
            hooked = partial(through, index, nodes[layer])
            changes.append((layer, "_gradient_checkpointing_func", hooked))
    with contextlib.ExitStack() as hooks:
        for index, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_pre_hook(partial(enter, index)))
            hooks.enter_context(layer.register_forward_hook(partial(leave, index)))
        hooks.enter_context(changed(changes))
        yield


_LOSS = ("head", "head_backward")
_LAYERED = ("forward", "backward")
_NEVER = "end"
"""Where a storage dies that outlives the walk: a gradient."""


def tapes(
    ledger: StorageCounter, symbols: Symbols, *, gradients: Collection[int]
) -> tuple[list[Polynomial], dict[str, list[TapeEntry]]]:
    """Return the distinct sizes, and each marked segment's tape, as `profiles.Segment` has it.

    Args:
        ledger: what was counted.
        symbols: what the sizes were traced with.
        gradients: numbers of the storages that ended as gradients of the adapters.
    """
    paths = _paths(ledger)
    indices: dict[int, int] = {}
    births: dict[int, str] = {}
    result: dict[str, list[TapeEntry]] = {}
    for name, events in ledger.segments():
        tape: list[TapeEntry] = []
        for storage, is_birth in events:
            birth = births.setdefault(storage, name)
            path, layers = paths.get(storage, (storage, None))
            is_temporary = birth == name and path == storage
            lived = 0
            if is_birth:
                change = Change.BIRTH if is_temporary else Change.LEAVE
            elif is_temporary:
                change = Change.DEATH
            elif layers is not None:
                change = Change.FETCH
                lived = layers
            else:
                change = Change.FETCH_ALL
                lived = _left_by(birth, name)
            purpose = ACTIVATIONS
            if storage in gradients:
                purpose = GRADIENTS
            elif birth in _LOSS:
                purpose = LOSS
            size = indices.setdefault(ledger.sizes[storage], len(indices))
            tape.append(TapeEntry(change, path, size, purpose, lived))
        result[name] = tape
    return [symbols.polynomial(size) for size in indices], result


def _left_by(birth: str, name: str) -> int:
    """Return the layer by which something was left that dies in a segment which happens once.

    What the embedding leaves is let go by the first layer, recomputed or not, so it counts as that
    layer's.
    """
    is_of_layers = " " not in name and birth not in _LOSS
    if not is_of_layers:
        return -1
    return int(birth.partition(" ")[2] or 0)


def _paths(ledger: StorageCounter) -> dict[int, tuple[str, int | None]]:
    """Return the path of each storage that outlives its segment, and through how many layers."""
    births: dict[int, str] = {}
    deaths: dict[int, str] = {}
    for name, events in ledger.segments():
        for storage, is_birth in events:
            if is_birth:
                births[storage] = name
            else:
                deaths[storage] = name
    ranks: Counter[tuple[str, str]] = Counter()
    paths = {}
    for storage, birth in births.items():
        death = deaths.get(storage, _NEVER)
        if birth == death:
            continue
        layers = _layers_between(birth, death)
        path = f"{birth.split()[0]}>{death.split()[0]}"
        if layers is not None:
            path += str(layers)
        paths[storage] = (f"{path}#{ranks[birth, path]}", layers)
        ranks[birth, path] += 1
    return paths


def _layers_between(birth: str, death: str) -> int | None:
    """Return how many layers further a storage dies; None where it is not from layer to layer."""
    born, _, first = birth.partition(" ")
    dies, _, last = death.partition(" ")
    if born not in _LAYERED or dies not in _LAYERED:
        return None
    return int(last) - int(first)
