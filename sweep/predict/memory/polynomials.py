"""Owns bytes as a polynomial in what a configuration sets: batch, length, rank, what follows.

A polynomial maps a monomial to its coefficient; a monomial is its symbols' letters in order
(``bss`` is batch x length x length, the empty one is a constant). Plain values, so that it travels
as JSON. Knows nothing of what the bytes are for. The symbols:

    b   sequences in a micro-batch
    s   tokens in a sequence
    r   rank of the adapters
    c   tokens in a chunk of the fused loss
    p   tokens in a sequence, padded to the blocks of an attention kernel
"""

from __future__ import annotations

from collections.abc import Mapping

Polynomial = dict[str, int]
Values = Mapping[str, int]


def evaluate(polynomial: Polynomial, values: Values) -> int:
    """Return the value of a polynomial; ``values`` has one for each symbol in it."""
    total = 0
    for monomial, coefficient in polynomial.items():
        for symbol in monomial:
            coefficient *= values[symbol]
        total += coefficient
    return total


def add_to(total: Polynomial, term: Polynomial, sign: int = 1) -> None:
    """Add a polynomial in place, or take it off with ``sign=-1``; what cancels disappears."""
    for monomial, coefficient in term.items():
        value = total.get(monomial, 0) + sign * coefficient
        if value:
            total[monomial] = value
        else:
            total.pop(monomial, None)


def is_covered(smaller: Polynomial, larger: Polynomial) -> bool:
    """Whether ``larger`` is at least ``smaller`` wherever all symbols are positive."""
    return all(
        smaller.get(monomial, 0) <= larger.get(monomial, 0) for monomial in {*smaller, *larger}
    )
