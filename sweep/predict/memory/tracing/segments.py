"""Owns reducing a walk to a few polynomials a segment: what it keeps, and how high it can rise.

Knows nothing of models.
"""

from __future__ import annotations

import itertools
from typing import Any

from sweep.predict.memory.polynomials import Polynomial, add_to, is_covered
from sweep.predict.memory.tracing.ledger import Ledger
from sweep.predict.memory.tracing.symbols import Symbols

Account = dict[str, Polynomial]
"""Polynomial by what the bytes are for: ``activations``, ``gradients`` or ``loss``.

In the segments that happen once, ``activations 2`` is what each layer that the traced layer 2
stands for adds.
"""

_ONCE = ("embed", "head", "head_backward")
_LOSS = ("head", "head_backward")


def segments(ledger: Ledger, symbols: Symbols, *, gradients: frozenset[int]) -> dict[str, Any]:
    """Return each marked segment's ``kept`` account and its ``humps``, relative to where it begins.

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
    humps: list[Account] = []
    for (key, size, is_birth), following in itertools.zip_longest(entries, entries[1:]):
        add_to(running.setdefault(key, {}), size, 1 if is_birth else -1)
        if is_birth and (following is None or not following[2]):
            humps.append({purpose: dict(part) for purpose, part in running.items()})
    return {"kept": running, "humps": _highest(humps)}


def _highest(humps: list[Account]) -> list[Account]:
    """Return the humps that no other covers at every batch, length, rank and number of layers."""
    totals = [_total(hump) for hump in humps]
    kept: list[int] = []
    for index, total in enumerate(totals):
        if any(is_covered(total, totals[other]) for other in kept):
            continue
        kept = [other for other in kept if not is_covered(totals[other], total)]
        kept.append(index)
    return [humps[index] for index in kept]


def _total(account: Account) -> Polynomial:
    """Return the sum of an account; what each layer repeats stays apart, as by another symbol."""
    total: Polynomial = {}
    for purpose, part in account.items():
        layer = purpose.partition(" ")[2]
        add_to(total, {monomial + layer: coefficient for monomial, coefficient in part.items()})
    return total
