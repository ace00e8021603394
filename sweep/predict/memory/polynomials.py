"""Bytes as a polynomial in what a configuration sets, and finding that polynomial back.

A polynomial maps a monomial to its coefficient; a monomial is its symbols' letters in order
(``bss`` is batch x length x length, the empty one is a constant). Plain values, so that it travels
as JSON. The symbols:

    b   sequences in a micro-batch
    s   tokens in a sequence
    r   rank of the adapters
    c   tokens in a chunk of the fused loss
    p   tokens in a sequence, padded to the blocks of an attention kernel

One trace holds for every batch, length and rank because it is made with a prime for each of them
(`Symbols`). A tensor's bytes are a product of the model's own dimensions, of which no prime that is
used is a factor, and of powers of the primes. The factors of a number are unique, so those that are
a symbol's prime say how often the symbol is in the product, and what is left is the coefficient. To
the model's code a prime is a number like any other: it compares, pads and slices as in a training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from typing import Any

Polynomial = dict[str, int]
Values = Mapping[str, Any]
"""A whole number for each symbol, or an array with one for each configuration."""

_BLOCK_BYTES = 512
"""The caching allocator's granularity; what depends on no symbol is rounded to it here."""
_SMALLEST_PRIME = 101
"""Smaller primes are factors of too many dimensions: heads, experts, element sizes."""
_LARGEST_PRIME = 20011
_LENGTH_CHOICES = 100
"""Primes next to the length's limit, of which the one that is told apart best is taken."""
_NEIGHBOURS = (1, -1)
"""A shifted or padded sequence has one token more or less."""
_ROW_BYTES = 16
"""Bytes a token, from which a tensor of a row is taken to be as long as the sequence."""


def evaluate(polynomial: Polynomial, values: Values) -> Any:
    """Return the value of a polynomial; ``values`` has one for each symbol in it.

    A number where those are numbers, and an array where they are arrays.
    """
    total: Any = 0
    for monomial, coefficient in polynomial.items():
        term: Any = coefficient
        for symbol in monomial:
            term = term * values[symbol]
        total = total + term
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
    for monomial, coefficient in smaller.items():
        if coefficient > larger.get(monomial, 0):
            return False
    return all(coefficient >= 0 for m, coefficient in larger.items() if m not in smaller)


class Symbols:
    """A prime for each symbol.

    Args:
        dimensions: the model's own sizes, which must not hide a symbol's prime.
        longest: length that the traced sequence must not exceed; None where any will do.
        longer_than: length that the traced sequence must exceed.
    """

    def __init__(
        self, dimensions: Iterable[int], *, longest: int | None = None, longer_than: int = 0
    ) -> None:
        sizes = {abs(size) for size in dimensions if size}
        usable = [p for p in _primes() if not any(size % p == 0 for size in sizes)]
        top = min(longest or _LARGEST_PRIME, _LARGEST_PRIME)
        lengths = [p for p in usable if longer_than < p <= top]
        if not lengths:
            raise ValueError(f"no traceable length above {longer_than} and up to {top}")
        # Any prime does for batch and rank. A length has to stay on its side of the attention
        # window and within the positions that the model knows: beyond, its code goes another way.
        near = lengths[:_LENGTH_CHOICES] if longer_than else lengths[-_LENGTH_CHOICES:]
        # Large prime factors tell a sequence with one token more or less.
        self.s = max(near, key=lambda p: min(_largest_factor(p + step) for step in _NEIGHBOURS))
        # The largest ones: a product of dimensions is the less likely to have one as its factor.
        others = [p for p in reversed(usable) if p != self.s]
        self.b, self.r, self.c, self.p = others[:4]
        self._known: dict[int, Polynomial] = {}

    @cached_property
    def primes(self) -> dict[str, int]:
        """The prime of each symbol, in the order that monomials are written in."""
        return {"b": self.b, "c": self.c, "p": self.p, "r": self.r, "s": self.s}

    def polynomial(self, size: int) -> Polynomial:
        """Return the polynomial that has this value where each symbol is its prime."""
        if size not in self._known:
            self._known[size] = self._factor(size)
        return self._known[size]

    def is_unexplained(self, size: int) -> bool:
        """Whether so many bytes are of a length that no symbol gives.

        They grow with the batch and are more than a row of the model's own sizes could be, but
        nothing of the sequence divides them: padded to whole chunks they would be taken for as
        large at every length.
        """
        if size % self.b or size // self.b < _ROW_BYTES * self.s:
            return False
        lengths = (self.s, *(self.s + step for step in _NEIGHBOURS), self.c, self.p)
        return all(size % length for length in lengths)

    def _factor(self, size: int) -> Polynomial:
        if size == 0:
            return {}
        monomial = ""
        for symbol, prime in self.primes.items():
            while size % prime == 0:
                size //= prime
                monomial += symbol
        # (s + 1) times so many bytes is a sum of two monomials. The neighbour is not a prime, so a
        # length was chosen whose neighbours have a large prime factor: that a product of dimensions
        # has it as well is as unlikely as with a prime of that size.
        for step in _NEIGHBOURS:
            if size % (self.s + step) == 0:
                per_token = size // (self.s + step)
                longer = "".join(sorted(monomial + "s"))
                return {longer: per_token, monomial: step * per_token}
        if not monomial:
            # A constant's block is known here; what a symbol scales is rounded when replayed.
            size = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        return {monomial: size}


@cache
def _largest_factor(number: int) -> int:
    largest, factor = 1, 2
    while number > 1:
        while number % factor == 0:
            number, largest = number // factor, factor
        factor += 1
    return largest


@cache
def _primes() -> tuple[int, ...]:
    sieve = bytearray([1]) * (_LARGEST_PRIME + 1)
    for number in range(2, int(_LARGEST_PRIME**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(sieve[number * number :: number]))
    return tuple(n for n in range(_SMALLEST_PRIME, _LARGEST_PRIME + 1) if sieve[n])
