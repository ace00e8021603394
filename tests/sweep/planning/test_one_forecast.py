"""Plans, the driver of a study, `best` and the report say one speed and one memory of a
configuration: of a study on a dataset, for a GPU that another stands in for."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.storage.records import Outcome
from qlora_sweep.sweep.data.prepared_dataset import dataset_directory
from qlora_sweep.sweep.planning.evidence import with_target_speeds
from qlora_sweep.sweep.predict import building
from qlora_sweep.sweep.predict.building import shapes_of_study
from qlora_sweep.sweep.request import RunRequest
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.study.prepared import prepare
from qlora_sweep.sweep.terminal.commands import read_for_report
from tests.sweep.simulated_device import at_speed
from tests.sweep.study.test_session import a_gpu, read, run
from tests.sweep.typed import Sweep

SPACE = """
gpu: a10
model: demo
data: {dataset}
confirm: null
sampler: random
trials: 4
dimensions:
  micro_batch_size: [2, 8]
  packing: [none, packed]
fixed: {{seq_len: 512, lora_rank: 8}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nobody's studies, prices and caches, on a machine that shows no GPU, for all tests here."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWEEP_HOME", str(home))
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield home


@pytest.fixture(scope="module")
def dataset(home: Path) -> Path:
    """A dataset whose examples are far shorter than the sequences are allowed to be."""
    path, draw = home / "mine.jsonl", random.Random(0)
    lines = [
        json.dumps({"text": " ".join(f"word{draw.randrange(50)}" for _ in range(size))})
        for size in (draw.randrange(5, 60) for _ in range(400))
    ]
    path.write_text("\n".join(lines))
    (home / "own.yaml").write_text(SPACE.format(dataset=path))
    return path


def answer(config: TrialConfig) -> Outcome:
    return at_speed(config, 100.0 * config.micro_batch_size)


@pytest.fixture(scope="module")
def url(home: Path, dataset: Path) -> str:
    """Where a study on that dataset is, which an H200 ran for an A10."""
    url = f"sqlite:///{home}/runs/sweep.db"
    what = prepare(RunRequest(space=str(home / "own.yaml")), read_gpu=lambda: a_gpu("h200"))
    run(what, url, new_runner=lambda _: ReplayRunner(otherwise=answer))
    return url


def planned(sweep: Sweep, dataset: Path, config: Any, *, gpu: str) -> Any:
    (dataset.parent / "one.jsonl").write_text(json.dumps(config))
    asked = ("--from-file", dataset.parent / "one.jsonl", "--gpu", gpu, "--model", "demo")
    return json.loads(sweep("plan", *asked, "--data", dataset, "--json").out)


def test_best_says_the_plans_speed(url: str, dataset: Path, sweep: Sweep) -> None:
    best = json.loads(sweep("best", "own", "--json").out)
    plan = planned(sweep, dataset, best["best"]["config"], gpu="a10")
    found = best["target_tokens_per_second"]
    # What was measured is about what is predicted, and so corrects it by next to nothing.
    assert found["value"] == pytest.approx(plan["tokens_per_second"], rel=1e-4)
    ends = [found["low"], found["high"]]
    assert ends == pytest.approx(plan["tokens_per_second_range"], rel=1e-2)


def test_the_report_and_the_driver_say_the_plans_memory(
    url: str, dataset: Path, sweep: Sweep
) -> None:
    snapshot = read_for_report("own", url=url)
    assert len(snapshot.records) == 4
    for record in snapshot.records:
        # Peaks are of the GPU that runs, whose libraries take more than the target's.
        plan = planned(sweep, dataset, record.config.model_dump(mode="json"), gpu="h200")
        known = snapshot.memory_forecasts[record.config]
        assert known.peak_allocated_bytes == plan["peak_allocated_bytes"]
        assert record.prediction.peak_allocated_bytes == plan["peak_allocated_bytes"]
        assert record.prediction.tokens_per_second > 0


@pytest.fixture
def gone(url: str) -> Iterator[None]:
    """Have the study's dataset away for a while."""
    away = dataset_directory().with_name("away")
    dataset_directory().rename(away)
    building._shapes_in.cache_clear()
    yield
    shutil.rmtree(dataset_directory(), ignore_errors=True)
    away.rename(dataset_directory())
    building._shapes_in.cache_clear()


@pytest.mark.usefixtures("gone")
def test_where_the_dataset_is_gone_nothing_is_said_and_nothing_wrong(
    url: str, sweep: Sweep
) -> None:
    definition = read(url, "own").definition
    with pytest.raises(EnvironmentFault):
        shapes_of_study(definition)
    best = json.loads(sweep("best", "own", "--json").out)
    assert best["target_tokens_per_second"] is None
    assert any("mine.jsonl" in text for text in with_target_speeds(read(url, "own")).warnings)
    assert dict(read_for_report("own", url=url).memory_forecasts) == {}
