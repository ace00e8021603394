"""Which rows of texts are held out of training."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def split(rows: int, eval_fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Return the rows that are trained on and those that are held out, each in rising order.

    The same rows, share and seed give the same split on every machine. Of two rows and more at
    least one is trained on, and at least one is held out unless ``eval_fraction`` is 0.

    Args:
        rows: how many there are.
        eval_fraction: share that is held out, at least 0 and less than 1.
        seed: of the choice.
    """
    held = round(rows * eval_fraction)
    if eval_fraction > 0.0 and rows > 1:
        held = min(max(held, 1), rows - 1)
    held = min(held, max(rows - 1, 0))
    # PCG64's stream is fixed by NumPy's policy; `permutation` has not changed with it so far.
    order = np.random.Generator(np.random.PCG64(seed)).permutation(rows)
    return np.sort(order[held:]), np.sort(order[:held])
