"""Fifty drivers with twenty trials each at one server with its default of a hundred connections."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage import postgres, team

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

DRIVERS, TRIALS = 50, 20


def test_fifty_drivers_at_one_server_lose_and_double_nothing(
    cluster: postgres.Cluster, tmp_path: Path
) -> None:
    url = cluster.new_database()
    process = team.start(url, tmp_path, drivers=DRIVERS, trials=TRIALS)
    assert process.wait() == 0
    assert team.broken(url, tmp_path, drivers=DRIVERS, trials=TRIALS) == []


def test_fifty_drivers_outlast_a_server_that_is_restarted(
    cluster: postgres.Cluster, tmp_path: Path
) -> None:
    url = cluster.new_database()
    process = team.start(url, tmp_path, drivers=DRIVERS, trials=TRIALS)
    half = DRIVERS * TRIALS // 2
    while sum(team.said(tmp_path, number).get("ran", 0) for number in range(DRIVERS)) < half:
        assert process.poll() is None
    cluster.restart()
    assert process.wait() == 0
    options = {"drivers": DRIVERS, "trials": TRIALS, "was_cut_off": True}
    assert team.broken(url, tmp_path, **options) == []
