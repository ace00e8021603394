"""Owns writing a walk down as tapes, from which more layers than were traced can be replayed.

A storage that dies in the segment it was born in is a temporary. Any other is known by its path:
the kinds of segment it is born and dies in, how many layers lie between, and its rank among those
of the same path. So a layer that was not traced finds what its neighbours left. Knows nothing of
models.
"""

from __future__ import annotations

from collections import Counter

from sweep.predict.memory.polynomials import Polynomial
from sweep.predict.memory.profiles import BIRTH, DEATH, FETCH, FETCH_ALL, LEAVE, Entry
from sweep.predict.memory.tracing.ledger import Ledger
from sweep.predict.memory.tracing.symbols import Symbols

_LAYERED = ("forward", "backward")
_NEVER = "end"


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
