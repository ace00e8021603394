"""Of words, golden answers keep the numbers."""

from __future__ import annotations

import pytest

from tests.golden.frozen import without_words
from tests.tables import cases


@pytest.mark.parametrize(
    ("said", "kept"),
    cases(
        """
        8,128 (7,973–8,285, measured again) | [7973.0, 8128.0, 8285.0]
        1.61x on an H100, 16-bit, rank 16. | [1.61, 16.0]
        40% of 21.5 GiB at 1e-4; -3 of torch 2.13.0 | [-3.0, 0.0001, 21.5, 40.0]
        nothing fits | []
        nf4 | nf4
        {at: [a sentence, null, 0.5]} | {at: [[], null, 0.5]}
        """
    ),
)
def test_of_words_the_numbers_are_kept(said: object, kept: object) -> None:
    assert without_words(said) == kept
