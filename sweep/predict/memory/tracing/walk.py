"""Walking one training step of a model without data, and reducing it to accounts and tapes.

A segment is the stretch of a step between two marks: a layer's forward or backward pass, or one of
the parts that happen once. A traced layer's segments stand for those of every layer of its kind, so
neither accounts nor tapes may name one storage of the walk:

- Accounts are sums (what a segment keeps, how high it can rise above where it begins), which are
  the same for every such layer.
- A tape has the order of births and deaths. A storage that dies in the segment it was born in is a
  temporary. Any other is known by its path: the kinds of segment it is born and dies in, how many
  layers lie between, and its rank among those of the same path. So a layer that was not traced
  finds what its neighbours left.

The optimizer is not walked: its states and its update are known by number of elements.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils

from sweep.predict.memory.polynomials import Polynomial, Symbols, add_to, is_covered
from sweep.predict.memory.profiles import BIRTH, DEATH, FETCH, FETCH_ALL, LEAVE, Account, Entry
from sweep.predict.memory.tracing.cuda import Cuda
from sweep.predict.memory.tracing.ledger import Ledger
from sweep.predict.memory.tracing.model import Traceable
from sweep.training.compiling import changed


@dataclass(frozen=True)
class Walk:
    """What a step came to."""

    ledger: Ledger
    tells_halves_apart: bool
    """Whether it would be another one in the other 16-bit type."""


def walk(
    target: Traceable,
    *,
    symbols: Symbols,
    autocast_dtype: torch.dtype | None,
    has_flash: bool,
    is_checkpointed: bool,
    is_packed: bool = False,
) -> Walk:
    """Run forward and backward once and return what was counted, with a mark at each boundary.

    Marks in order: ``embed``, ``forward 0..n-1``, ``head``, ``head_backward``, ``backward n-1..0``.
    """
    cuda = Cuda(autocast_dtype, padded_length=symbols.p, has_flash=has_flash)
    if is_checkpointed:
        _checkpoint(target, cuda)
    ledger = Ledger(
        ignored=[*target.model.parameters(), *target.model.buffers()],
        layers=len(target.layers),
        is_odd=symbols.is_unexplained,
    )
    with ledger, _boundaries(target.layers, ledger), _texts_in_rows(is_packed):
        ledger.mark("embed")
        tokens = torch.empty(symbols.b, symbols.s, dtype=torch.int64, device="meta")
        batch = {"input_ids": tokens, "labels": torch.empty_like(tokens)}
        if is_packed:
            batch["position_ids"] = torch.empty_like(tokens)
        loss = _forward(target, cuda, batch, widens=autocast_dtype is not None)
        ledger.mark("head_backward")
        torch.autograd.backward(loss)
    return Walk(ledger, tells_halves_apart=cuda.tells_halves_apart)


def _forward(
    target: Traceable, cuda: Cuda, batch: dict[str, torch.Tensor], *, widens: bool
) -> torch.Tensor:
    """As accelerate runs it: under autocast, its 16-bit outputs then widened to fp32."""
    with cuda.region():
        output = target.model(**batch)
    if widens:
        wide = {name: _widened(value) for name, value in output.items()}
        return wide["loss"]
    return output.loss


def _widened(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


def _checkpoint(target: Traceable, cuda: Cuda) -> None:
    """Recompute every layer, and enter autocast again for that, as torch does."""
    target.base.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={
            "use_reentrant": False,
            "context_fn": lambda: (contextlib.nullcontext(), cuda.region()),
        }
    )
    for layer in target.layers:
        layer.gradient_checkpointing = True


def _texts_in_rows(is_packed: bool) -> contextlib.AbstractContextManager[None]:
    """Let transformers find several texts in a packed row: its positions have no values to say."""
    found = (masking_utils, "find_packed_sequence_indices", _texts_of_tokens)
    return changed([found] if is_packed else [])


def _texts_of_tokens(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the text of each token as transformers' function of that place does, by the same
    operators; but for its question whether there is one alone, which has no answer without data."""
    before_first = position_ids[:, :1] - 1
    steps = torch.diff(position_ids, prepend=before_first, dim=-1)
    return (steps != 1).cumsum(-1)


@contextlib.contextmanager
def _boundaries(layers: list[torch.nn.Module], ledger: Ledger) -> Iterator[None]:
    """Mark where each layer's forward and backward pass begin."""
    is_done = [False]
    hooks = []
    for index, layer in enumerate(layers):
        is_last = index == len(layers) - 1
        hooks.append(layer.register_forward_pre_hook(_entering(ledger, index, is_done)))
        hooks.append(layer.register_forward_hook(_leaving(ledger, index, is_last, is_done)))
    yield
    for hook in hooks:
        hook.remove()


def _entering(ledger: Ledger, index: int, is_done: list[bool]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        if not is_done[0]:
            ledger.mark(f"forward {index}")

    return hook


def _leaving(ledger: Ledger, index: int, is_last: bool, is_done: list[bool]) -> Callable[..., None]:
    def hook(_module: Any, _args: Any, output: Any) -> None:
        if is_done[0]:
            return
        tensor = output[0] if isinstance(output, tuple) else output
        # The gradient of a layer's output arrives when its backward pass is about to begin.
        tensor.register_hook(lambda _grad: ledger.mark(f"backward {index}"))
        if is_last:
            # Hooks run again where a layer is recomputed in the backward pass; from here on its
            # gradients mark the boundaries.
            is_done[0] = True
            # What the layer's frame still holds dies after this hook, and is the layer's.
            ledger.mark_next("head")

    return hook


_ONCE = ("embed", "head", "head_backward")
_LOSS = ("head", "head_backward")
_LAYERED = ("forward", "backward")
_NEVER = "end"
"""Where a storage dies that outlives the walk: a gradient."""


def accounts(ledger: Ledger, symbols: Symbols, *, gradients: frozenset[int]) -> dict[str, Any]:
    """Return each marked segment's ``kept`` account and its ``peaks``, relative to where it begins.

    Args:
        ledger: what was counted; everything before the first mark is left out.
        symbols: what the sizes were traced with.
        gradients: numbers of the storages that ended as gradients of the adapters.
    """
    polynomials = [symbols.polynomial(size) for size in ledger.sizes]
    births: dict[int, str] = {}
    result = {}
    for name, events in ledger.segments():
        entries = []
        for storage, is_birth in events:
            birth = births.setdefault(storage, name)
            purpose = "gradients" if storage in gradients else _purpose(birth)
            entries.append((_repeated(purpose, birth, name), polynomials[storage], is_birth))
        result[name] = _segment(entries)
    return result


def _purpose(birth: str) -> str:
    return "loss" if birth in _LOSS else "activations"


def _repeated(purpose: str, birth: str, name: str) -> str:
    """Return the account's key for a death in segment ``name`` of what ``birth`` left.

    What the embedding leaves is let go by the first layer, recomputed or not, so it counts as that
    layer's.
    """
    if name not in _ONCE or birth in _LOSS or birth == name:
        return purpose
    return f"{purpose} {birth.partition(' ')[2] or 0}"


def _segment(entries: list[tuple[str, Polynomial, bool]]) -> dict[str, Any]:
    running: Account = {}
    peaks: list[Account] = []
    for (key, size, is_birth), following in itertools.zip_longest(entries, entries[1:]):
        add_to(running.setdefault(key, {}), size, 1 if is_birth else -1)
        if is_birth and (following is None or not following[2]):
            peaks.append({purpose: dict(part) for purpose, part in running.items()})
    return {"kept": running, "peaks": _highest(peaks)}


def _highest(peaks: list[Account]) -> list[Account]:
    """Return the peaks that no other covers at every batch, length, rank and number of layers."""
    totals = [_total(peak) for peak in peaks]
    kept: list[int] = []
    for index, total in enumerate(totals):
        if any(is_covered(total, totals[other]) for other in kept):
            continue
        kept = [other for other in kept if not is_covered(totals[other], total)]
        kept.append(index)
    return [peaks[index] for index in kept]


def _total(account: Account) -> Polynomial:
    """Return the sum of an account; what each layer repeats stays apart, as by another symbol."""
    total: Polynomial = {}
    for purpose, part in account.items():
        layer = purpose.partition(" ")[2]
        add_to(total, {monomial + layer: coefficient for monomial, coefficient in part.items()})
    return total


def tapes(ledger: Ledger, symbols: Symbols) -> tuple[list[Polynomial], dict[str, list[Entry]]]:
    """Return the distinct sizes, and each segment's tape, whose births name them by index."""
    paths = _paths(ledger)
    indices: dict[int, int] = {}
    result: dict[str, list[Entry]] = {}
    for name, events in ledger.segments():
        tape: list[Entry] = []
        for storage, is_birth in events:
            path, layers = paths.get(storage, (None, None))
            if is_birth:
                size = indices.setdefault(ledger.sizes[storage], len(indices))
                tape.append((BIRTH, storage, size) if path is None else (LEAVE, path, size))
            elif path is None:
                tape.append((DEATH, storage, 0))
            else:
                tape.append((FETCH_ALL, path, 0) if layers is None else (FETCH, path, layers))
        result[name] = tape
    return [symbols.polynomial(size) for size in indices], result


def _paths(ledger: Ledger) -> dict[int, tuple[str, int | None]]:
    """Return the path of each storage that outlives its segment, and through how many layers."""
    births: dict[int, str] = {}
    deaths: dict[int, str] = {}
    for name, events in ledger.segments():
        for storage, is_birth in events:
            (births if is_birth else deaths)[storage] = name
    ranks: Counter[tuple[str, str]] = Counter()
    paths = {}
    for storage, birth in births.items():
        death = deaths.get(storage, _NEVER)
        if birth == death:
            continue
        layers = _layers_between(birth, death)
        path = f"{birth.split()[0]}>{death.split()[0]}{'' if layers is None else layers}"
        paths[storage] = (f"{path}#{ranks[birth, path]}", layers)
        ranks[birth, path] += 1
    return paths


def _layers_between(birth: str, death: str) -> int | None:
    """Return how many layers further a storage dies; None where it is not from layer to layer."""
    (born, _, first), (dies, _, last) = birth.partition(" "), death.partition(" ")
    return int(last) - int(first) if born in _LAYERED and dies in _LAYERED else None
