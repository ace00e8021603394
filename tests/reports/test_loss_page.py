"""The page of a training's loss."""

from __future__ import annotations

import json
import re

from qlora_sweep.reports.loss import POINTS_MAX, loss_page


def test_a_long_training_is_drawn_in_as_many_points_as_can_be_seen() -> None:
    count = 3 * POINTS_MAX
    page = loss_page(
        title="<b>model</b>",
        losses=[1.0] * count,
        learning_rates=[1e-4 * (1 - step / count) for step in range(count)],
        evaluations=[(count // 2, 1.5)],
        final=(count, 1.25),
    )
    assert "<b>" not in page
    found = re.search(r'type="application/json">(.*?)</script>', page)
    data = json.loads(found[1])["figures"]["loss"]["data"]
    assert [len(trace["x"]) for trace in data] == [POINTS_MAX, 1, 1, POINTS_MAX]
    assert data[0]["x"][-1] == count
    rates = data[3]["y"]
    assert abs(rates[0] / 1e-4 - 1) < 1e-3, "the first is the whole rate"
    assert rates[-1] > 0, "no step is taken with 0"
