"""Fifty drivers with twenty trials each at one server with its default of a hundred connections."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.directory import Spool
from storage.reading import read_study
from tests.storage import driver, postgres

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

DRIVERS, TRIALS = 50, 20


def test_fifty_drivers_at_one_server_lose_and_double_nothing(
    cluster: postgres.Cluster, tmp_path: Path
) -> None:
    url = cluster.new_database()
    names = [f"study-{n}" for n in range(DRIVERS)]
    team = [driver.start(url, tmp_path, study=name, trials=TRIALS) for name in names]
    for one, name in zip(team, names, strict=True):
        said, code = one.end()
        assert code == 0, (name, said)
        study = read_study(name, url=url, home=tmp_path)
        assert [record.number for record in study.records] == list(range(TRIALS))
        told = {(r.number, r.measurement.tokens_per_second) for r in study.records if r.measurement}
        heard = (line.split()[1:] for line in said if line.startswith("told"))
        assert told == {(int(number), float(speed)) for number, speed in heard}
        kept = Spool(tmp_path / name / "spool.jsonl", study.identity).read().records
        assert kept == study.records
        assert (study.running, study.warnings, study.holder) == ((), (), None)
