"""What the programs here do without a GPU."""

from __future__ import annotations

from pathlib import Path

from qlora_sweep.storage.reading import read_study
from tests.bench import harness, overhead
from tests.storage import long_studies


def test_a_study_stored_in_bulk_is_what_its_driver_goes_on_with(tmp_path: Path) -> None:
    space, url = long_studies.a_space(), f"sqlite:///{tmp_path}/sweep.db"
    known = list(long_studies.records(space, 16))
    long_studies.store(url, tmp_path, space, known)
    assert read_study(long_studies.NAME, url=url, home=tmp_path).records == tuple(known)
    took = overhead.of_driver(known, "random", more=2)
    assert min(took["open_seconds"], took["median_trial_seconds"]) > 0


def test_a_command_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    took = harness.sweep(["presets", "--json"], home=tmp_path)
    assert "a10" in took["printed"]
    assert 0 < took["cpu_seconds"] < 60
    assert harness.stamp().keys() >= {"command", "measured_on", "driver", "versions", "date"}
