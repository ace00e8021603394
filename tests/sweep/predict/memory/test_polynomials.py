"""Bytes as polynomials, and the primes that give them back from one observed number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.predict.memory.profiles import Symbols

MISTRAL = (32768, 4096, 14336, 32, 8, 128)


@given(
    width=st.sampled_from(MISTRAL),
    powers=st.tuples(*[st.integers(0, 2)] * 3),
    itemsize=st.sampled_from([1, 2, 4, 8]),
)
def test_a_product_of_dimensions_and_symbols_gives_its_polynomial_back(
    width: int, powers: tuple[int, int, int], itemsize: int
) -> None:
    symbols = Symbols(MISTRAL, longest=32768)
    b, r, s = powers
    size = width * itemsize * 512 * symbols.b**b * symbols.r**r * symbols.s**s
    assert symbols.polynomial(size) == {"b" * b + "r" * r + "s" * s: width * itemsize * 512}


@pytest.mark.parametrize("step", [1, -1])
def test_a_sequence_with_one_token_more_or_less_is_a_sum(step: int) -> None:
    symbols = Symbols(MISTRAL)
    size = symbols.b * (symbols.s + step) * 8
    assert symbols.polynomial(size) == {"bs": 8, "b": 8 * step}


def test_what_depends_on_no_symbol_is_rounded_as_the_allocator_rounds_it() -> None:
    symbols = Symbols(MISTRAL)
    assert symbols.polynomial(4) == {"": 512}
    assert symbols.polynomial(0) == {}


def test_the_length_stays_within_the_positions_and_on_its_side_of_the_window() -> None:
    assert Symbols(MISTRAL, longest=2048).s <= 2048
    assert Symbols(MISTRAL, longer_than=4096).s > 4096


def test_no_symbol_hides_in_a_dimension() -> None:
    symbols = Symbols([20011 * 4, 19997])
    primes = {symbols.b, symbols.s, symbols.r, symbols.c, symbols.p}
    assert {20011, 19997}.isdisjoint(primes)
    assert len(primes) == 5


def test_a_length_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no traceable length"):
        Symbols(MISTRAL, longest=64)
