"""`sweep contribute` and `sweep calibrate`, from a study to another machine's plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.storage.contributions import parse_contribution
from qlora_sweep.storage.records import Carried, OutOfMemory, TrialRecord
from qlora_sweep.sweep.planning.question import PlanRequest
from qlora_sweep.sweep.predict.contributions import directory
from qlora_sweep.sweep.terminal.plan import plan
from tests.storage.builders import changed
from tests.sweep.imagined_memory import ImaginedMemory, ImaginedPredictor
from tests.sweep.imagined_study import MISTRAL, TRIALS, a_record, a_snapshot
from tests.sweep.terminal.kept_study import DAY, keep_study
from tests.sweep.typed import Sweep

pytestmark = pytest.mark.usefixtures("home")
PLANTED = "zebra-7f3a"
"""Stands wherever a study has room for a name, a path or a text of somebody's."""
OOM = a_record(
    6,
    TrialConfig(micro_batch_size=64),
    outcome=OutOfMemory(stage="forward", detail=f"at /home/{PLANTED}"),
)
ENVIRONMENT: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "gpu_memory_bytes": 150_000_000_000,
    "power_limit_watts": 700.0,
    "os": PLANTED,
    "cpu": PLANTED,
    "commit": PLANTED,
    "versions": {"torch": f"2.11.0+cu130.{PLANTED}", "peft": None, PLANTED: "1.0"},
}


def stored(home: Path, *records: TrialRecord, **target: Any) -> str:
    """Keep a study of these trials, and return its name."""
    named = MISTRAL.to_json() | {"name": f"/home/{PLANTED}/model", "path": f"/home/{PLANTED}"}
    named["config"] = named["config"] | {"_name_or_path": PLANTED}
    values = a_snapshot(**target).definition
    definition = changed(values, model=named)
    keep_study(home, definition, records, name=PLANTED, environment=ENVIRONMENT)
    return PLANTED


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    return home


def test_what_a_study_measured_is_written_without_a_name_in_it(here: Path, sweep: Sweep) -> None:
    shared = TRIALS[1].model_dump()
    shared["outcome"]["measurement"]["flags"] = ("neighbour",)
    mark = Carried(study=PLANTED, identity="i", number=1)
    told = (TRIALS[0], *TRIALS[2:5], OOM)
    others = (TrialRecord.model_validate(shared), changed(TRIALS[5], carried=mark))
    # A larger GPU stood in: it is the one that was measured.
    study = stored(here, *told, *others, emulated_on="NVIDIA H200")
    written = sweep("contribute", study, "--json")
    document = json.loads(written.out)
    assert (document["header"]["gpu"], document["trials"]) == ("h200", {"fits": 4, "oom": 1})
    (file,) = here.glob("*.jsonl")
    assert (written.code, document["file"]) == (0, file.name)
    text = file.read_text()
    for word in (PLANTED, "zebra", "12:34", "/home"):
        assert word not in text + file.name
    contribution = parse_contribution(text, "")
    assert {row.config for row in contribution.surface.rows} == {r.config for r in told}
    header = document["header"]
    assert (header["versions"], header["date"]) == ({"torch": "2.11.0+cu130"}, DAY)


def test_a_file_that_others_own_is_not_replaced(here: Path, sweep: Sweep) -> None:
    study = stored(here, *TRIALS)
    (here / "mine.jsonl").write_text("mine")
    assert sweep("contribute", study, "-o", "mine.jsonl").code == 2
    assert (here / "mine.jsonl").read_text() == "mine"


class Known(ImaginedPredictor):
    """Predicts the peak that `a_record` has."""

    def predict(self, config: TrialConfig) -> ImaginedMemory:
        return replace(super().predict(config), peak_allocated_bytes=10 * GIB)


def planned(capsys: pytest.CaptureFixture[str], *, is_detailed: bool = False) -> str:
    capsys.readouterr()
    request = PlanRequest(space="small.yaml", as_json=not is_detailed, is_detailed=is_detailed)
    plan(request, predictor=lambda *_: Known(), read_gpu=lambda: None)
    return capsys.readouterr().out


def recommended(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return dict(json.loads(planned(capsys))["recommended"])


def slow_a10(here: Path, sweep: Sweep) -> None:
    """Write what trials on an A10 contribute that is 1.2 times as slow, and a space to plan."""
    slow = [a_record(r.number, r.config, off=1.2) for r in TRIALS]
    assert sweep("contribute", stored(here, *slow), "-o", "a10.jsonl").code == 0
    (here / "small.yaml").write_text("gpu: a10\ndimensions:\n  micro_batch_size: [2, 6]\n")


def test_what_one_contributes_makes_anothers_plan_surer_until_it_is_removed(
    here: Path, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_a10(here, sweep)
    before = recommended(capsys)
    assert "speed_contributed" not in before["basis"]

    found = sweep("calibrate", "a10.jsonl", "--json")
    document = json.loads(found.out)
    (file,) = document["files"]
    assert (found.code, file["refused"]) == (0, None)
    assert document["gpus"] == {"a10": {"files": 1, "trials": 6}}

    after = recommended(capsys)
    assert after["basis"]["speed_contributed"] == {"files": 1, "trials": 6}
    low, high = after["tokens_per_second_range"]
    least, most = before["tokens_per_second_range"]
    assert low < before["tokens_per_second"] / 1.2 < high
    assert high / low < min(1.5, (most / least) ** 0.75)
    shown = " ".join(planned(capsys, is_detailed=True).split())
    assert "and 6 trials of 1 contribution" in shown

    # The same file once more is the same.
    assert json.loads(sweep("calibrate", "a10.jsonl", "--json").out) == document
    (kept,) = directory().glob("*.jsonl")
    kept.unlink()
    assert recommended(capsys) == before


def test_a_kept_file_that_cannot_be_read_any_more_says_nothing(
    here: Path, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_a10(here, sweep)
    before = recommended(capsys)
    sweep("calibrate", "a10.jsonl")
    after = recommended(capsys)
    (directory() / "a10.0.jsonl").write_text('{"contribution": 0}')
    assert recommended(capsys) == after
    for kept in directory().glob("*.jsonl"):
        kept.write_text("{")
    assert recommended(capsys) == before


def test_bad_files_are_refused_each_with_its_reason_and_the_rest_is_kept(
    here: Path, sweep: Sweep
) -> None:
    assert sweep("contribute", stored(here, *TRIALS), "-o", "a.jsonl").code == 0
    (here / "b.jsonl").write_text("{")
    (here / "c.jsonl").symlink_to("c.jsonl")
    found = sweep("calibrate", "a.jsonl", "b.jsonl", "nowhere", "--json")
    files = json.loads(found.out)["files"]
    assert found.code == 0
    assert [file["refused"] is None for file in files] == [True, False, False]
    assert "nowhere" in files[2]["refused"]
    assert sweep("calibrate", "b.jsonl").code == 2
    assert sweep("calibrate", "c.jsonl").code in (2, 3)
    assert "empty text" in sweep("calibrate", "").err


@pytest.mark.parametrize(
    ("records", "target", "code"),
    [
        (TRIALS[:1], {"gpu": "cpu", "device": "cpu"}, 2),
        (TRIALS[:1], {"gpu": "Voodoo 2"}, 2),
        ([OOM], {}, 1),
        ([], {}, 1),
    ],
)
def test_what_no_gpu_of_the_catalogue_measured_is_not_contributed(
    here: Path, sweep: Sweep, records: list[Any], target: dict[str, Any], code: int
) -> None:
    said = sweep("contribute", stored(here, *records, **target))
    assert (said.code, said.out) == (code, "")
