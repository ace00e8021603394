"""Owns counting: the birth and death of every tensor storage while real model code runs on no data.

Knows nothing of models. What stands for the card is torch's meta device; tensors elsewhere are not
counted. A storage is born when an operator returns it and dies when nothing refers to it any more,
exactly as on a device: torch counts references, so a tensor on a card is freed at the same moment
as one without data. What a kernel takes and gives back inside one operator is not seen, but for
what `_SCRATCH` lists.

Storages are counted rather than tensors, as a view or an operator in place takes nothing. They are
told apart by the address of their C++ object, which is free again once one dies: its watch removes
it before another can be born there.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sweep.predict.memory.tracing.results import run

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
