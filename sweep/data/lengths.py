"""Owns what the lengths of texts say before anything is trained: which sequence lengths are worth
searching. Knows nothing of texts or tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SHARES = (0.90, 0.95, 0.99)
"""Of the rows that a length worth searching leaves whole."""
_OUTLIER = 2.0
"""A longest row that is more than so many times as long as 99 in 100 of them sets no length."""
_FINE, _COARSE, _COARSE_FROM = 64, 128, 1024
"""Multiples that lengths are rounded up to, the coarser from 1,024 tokens on."""


def rounded_up(length: int) -> int:
    """Return a length as kernels like it: a multiple of 64, of 128 from 1,024 on."""
    step = _FINE if length <= _COARSE_FROM else _COARSE
    return -(-length // step) * step


def worthwhile_lengths(
    lengths: NDArray[np.int32], *, max_positions: int | None = None
) -> tuple[int, ...]:
    """Return the sequence lengths worth searching for rows of these lengths, in rising order.

    They leave 90, 95, 99 and all of 100 rows whole, rounded up; the last only where the longest
    row is no outlier. Shorter ones would be faster in tokens a second for throwing away what is
    there to be learned; longer ones pad.

    Args:
        lengths: tokens of each row, at least one.
        max_positions: of the model, which no length passes; None where nobody says.
    """
    quantiles = np.quantile(lengths, _SHARES, method="inverted_cdf")
    longest = int(np.max(lengths))
    wanted = [int(value) for value in quantiles]
    if longest <= _OUTLIER * wanted[-1]:
        wanted.append(longest)
    limit = max_positions or rounded_up(longest)
    return tuple(sorted({min(rounded_up(value), limit) for value in wanted}))
