"""The order in which the rows of a training come."""

from __future__ import annotations

import numpy as np
import pytest

WIDTHS = np.random.default_rng(0).integers(20, 400, 100).tolist()


def _order(*, is_grouped: bool, step: int, epoch: int = 0) -> list[int]:
    from qlora_sweep.sweep.finetuning.rows import Ordered

    rows = Ordered(range(len(WIDTHS)), step, 3, WIDTHS, is_grouped)
    rows.set_epoch(epoch)
    return [rows[index] for index in range(len(rows))]


@pytest.mark.parametrize("step", [1, 4, 16])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_the_widest_rows_come_before_and_beside_the_optimizers_state(
    is_grouped: bool, step: int
) -> None:
    """The first step has no state yet, so that its peak is not that of the epoch."""
    order = _order(is_grouped=is_grouped, step=step)
    assert sorted(order) == list(range(len(WIDTHS)))
    assert WIDTHS[order[0]] == max(WIDTHS)
    assert WIDTHS[order[step]] == max(WIDTHS[row] for row in order[step:])
    assert order == _order(is_grouped=is_grouped, step=step)
    assert order != _order(is_grouped=is_grouped, step=step, epoch=1)


@pytest.mark.parametrize("step", [100, 128])
def test_a_step_that_takes_the_whole_epoch_has_it_once(step: int) -> None:
    assert sorted(_order(is_grouped=False, step=step)) == list(range(len(WIDTHS)))
