"""How long a study takes of a GPU whose steps are as uneven as real ones."""

from __future__ import annotations

import math
from pathlib import Path

from qlora_sweep.reports.view import view_of
from qlora_sweep.storage.ranking import rank_study
from tests.storage.builders import read_it
from tests.sweep.simulated_device import BUDGET, peak_bytes, tokens_per_second
from tests.sweep.study.test_stopping import run
from tests.sweep.study.timed_device import TimedRunner


def test_a_7b_is_searched_confirmed_and_soaked_in_a_minute_and_a_half(tmp_path: Path) -> None:
    """On a GPU that gets slower by a twentieth of a percent a second."""
    runner = TimedRunner(
        lambda c: c.tokens_per_step / tokens_per_second(c) if peak_bytes(c) <= BUDGET else None,
        peak_bytes,
        pace=lambda seconds: math.exp(0.0005 * seconds),
    )
    run(tmp_path, runner, confirm={})
    assert runner.seconds < 90.0
    found = read_it(f"sqlite:///{tmp_path}/sweep.db", tmp_path)
    ranking = rank_study(found)
    assert ranking.is_confirmed
    best, over = ranking.winner.config, ranking.baseline.config
    gain = view_of(found).document()["gain"]
    assert gain["low"] < tokens_per_second(best) / tokens_per_second(over) < gain["high"]
