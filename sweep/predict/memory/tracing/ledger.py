"""Counting the birth and death of every tensor storage while real model code runs on no data.

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

import itertools
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Event = tuple[int, bool]
"""A storage's number, and whether it was born (or died)."""

_READ = torch.ops.aten._local_scalar_dense.default
_TRUTHS = {torch.ops.aten.all: True, torch.ops.aten.any: False}
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
    " in plain PyTorch, which stands in for the kernels of flash-linear-attention, causal-conv1d "
    "and mamba-ssm; what those take is not modelled, so memory is not predicted (a trial measures "
    "it; install those kernels, or it is slow)"
)
"""Why linear attention and state-space layers are not predicted, and what to do."""


class PlainLoop(Exception):  # noqa: N818 - the name says what was met
    """The model's code takes the sequence apart; the message says how and what follows."""


class Ledger(TorchDispatchMode):
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
        self._live: dict[int, int] = {storage._cdata: -1 for storage in self._ignored}
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
        bounds = [*(start for _, start in self.marks), len(self.events)]
        pairs = zip(self.marks, itertools.pairwise(bounds), strict=True)
        return [(name, self.events[start:end]) for (name, _), (start, end) in pairs]

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of a tensor's storage; None where it is not counted."""
        number = self._live.get(_key(tensor), -1)
        return None if number < 0 else number

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
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        number = len(self.sizes)
        if number == self._most:
            raise PlainLoop(f"loops over the tokens{LOOPS}")
        if self._is_odd(storage.nbytes()):
            raise PlainLoop(f"works in chunks of the sequence{LOOPS}")
        self.sizes.append(storage.nbytes())
        self.events.append((number, True))

        def died(_: object) -> None:
            del self._live[key], self._watches[number]
            self._truths.pop(key, None)
            self.events.append((number, False))

        self._live[key] = number
        self._watches[number] = weakref.ref(storage, died)


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and type: all that there is to a tensor without data."""

_known: dict[Any, list[_Layout | None] | None] = {}
"""By operator and arguments, the layouts of what it returns; None where it has to be run."""


class _Unknown(Exception):  # noqa: N818 - it never leaves this module
    """An argument on which a result may depend in ways that its kind does not tell."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator returns: new tensors laid out as it would, where that is known."""
    if not _makes_new(func):
        return func(*args, **kwargs)
    try:
        key = (func, _kinds(args), _kinds(kwargs.items()) if kwargs else ())
    except _Unknown:
        return func(*args, **kwargs)
    if key not in _known:
        result = func(*args, **kwargs)
        _known[key] = _layouts(result, args)
        return result
    layouts = _known[key]
    if layouts is None:
        return func(*args, **kwargs)
    made = tuple(None if layout is None else _made(layout) for layout in layouts)
    return made if len(func._schema.returns) > 1 else made[0]


@cache
def _makes_new(func: Any) -> bool:
    """Whether an operator returns tensors that share nothing with those it was given."""
    schema = func._schema
    values = [*schema.arguments, *schema.returns]
    returned = {str(value.type) for value in schema.returns}
    takes_tensors = any("Tensor" in str(value.type) for value in schema.arguments)
    return takes_tensors and returned == {"Tensor"} and not any(v.alias_info for v in values)


def _kinds(values: Any) -> tuple[Any, ...]:
    return tuple(map(_kind, values))


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            raise _Unknown
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return _kinds(value)
    # 1, 1.0 and True are equal, and make results of other types.
    return type(value), value


def _layouts(result: Any, args: tuple[Any, ...]) -> list[_Layout | None] | None:
    """Return how the results are laid out; None where new tensors would not be the same."""
    results = result if isinstance(result, tuple | list) else (result,)
    taken = {_key(a) for a in args if isinstance(a, torch.Tensor)}
    layouts: list[_Layout | None] = []
    for tensor in results:
        if tensor is None:
            layouts.append(None)
            continue
        layout = (tensor.shape, tensor.stride(), tensor.dtype)
        is_whole = tensor.untyped_storage().nbytes() == _made(layout).untyped_storage().nbytes()
        if not tensor.is_meta or not is_whole or _key(tensor) in taken:
            return None
        taken.add(_key(tensor))
        layouts.append(layout)
    return layouts


def _made(layout: _Layout) -> torch.Tensor:
    shape, strides, dtype = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
