"""Owns reducing a walk to what predictions need of each segment: its accounts and its tape.

A segment is the stretch of a step between two marks: a layer's forward or backward pass, or one of
the parts that happen once. A traced layer's segments stand for those of every layer of its kind, so
neither accounts nor tapes may name one storage of the walk:

- Accounts are sums (what a segment keeps, how high it can rise above where it begins), which are
  the same for every such layer.
- A tape has the order of births and deaths. A storage that dies in the segment it was born in is a
  temporary. Any other is known by its path: the kinds of segment it is born and dies in, how many
  layers lie between, and its rank among those of the same path. So a layer that was not traced
  finds what its neighbours left.

Knows nothing of models.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from sweep.predict.memory.polynomials import Polynomial, Symbols, add_to, is_covered
from sweep.predict.memory.profiles import BIRTH, DEATH, FETCH, FETCH_ALL, LEAVE, Account, Entry
from sweep.predict.memory.tracing.ledger import Ledger

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
