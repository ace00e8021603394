"""Owns the trick that lets one trace hold for every batch, length and rank: sizes that are primes.

A tensor's bytes are a product of the model's own dimensions, which these large primes do not
divide, and of powers of the primes; so factoring a number of bytes gives its polynomial back. Knows
nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from sweep.predict.memory.polynomials import Polynomial

_BLOCK_BYTES = 512
"""The caching allocator's granularity; what depends on no symbol is rounded to it here."""
_SMALLEST = 101
_LARGEST = 20011
_CHOICES = 100
_NEIGHBOURS = (1, -1)
"""A shifted or padded sequence has one token more or less."""
_ROW_BYTES = 16
"""Bytes a token, from which a tensor of a row is taken to be as long as the sequence."""


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
        top = min(longest or _LARGEST, _LARGEST)
        lengths = [p for p in usable if longer_than < p <= top]
        if not lengths:
            raise ValueError(f"no traceable length above {longer_than} and up to {top}")
        near = lengths[:_CHOICES] if longer_than else lengths[-_CHOICES:]
        self.s = max(near, key=_neighbours_largest_factor)
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
        for step in _NEIGHBOURS:
            if size % (self.s + step) == 0:
                per_token = size // (self.s + step)
                longer = "".join(sorted(monomial + "s"))
                return {longer: per_token, monomial: step * per_token}
        if not monomial:
            size = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        return {monomial: size}


def _neighbours_largest_factor(prime: int) -> int:
    """Return how large the prime factors are that tell a sequence with one token more or less."""
    return min(_largest_factor(prime + step) for step in _NEIGHBOURS)


def _largest_factor(number: int) -> int:
    largest, factor = 1, 2
    while number > 1:
        while number % factor == 0:
            number, largest = number // factor, factor
        factor += 1
    return largest


def _primes() -> list[int]:
    sieve = bytearray([1]) * (_LARGEST + 1)
    for number in range(2, int(_LARGEST**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(sieve[number * number :: number]))
    return [number for number in range(_SMALLEST, _LARGEST + 1) if sieve[number]]
