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
from qlora_sweep.storage.study import open_study
from qlora_sweep.sweep.planning.question import PlanRequest
from qlora_sweep.sweep.predict.speed.contributed import NAME, directory
from qlora_sweep.sweep.sampling.samplers import make_sampler
from qlora_sweep.sweep.terminal.plan import plan
from qlora_sweep.sweep.terminal.sharing import calibrate
from tests.sweep.imagined_memory import ImaginedMemory, ImaginedPredictor
from tests.sweep.imagined_study import MISTRAL, TRIALS, a_record, a_snapshot
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
DAY = "2026-11-21"


def stored(home: Path, *records: TrialRecord, **target: Any) -> str:
    """Keep a study of these trials, and return its name."""
    named = MISTRAL.to_json() | {"name": f"/home/{PLANTED}/model", "path": f"/home/{PLANTED}"}
    named["config"] = named["config"] | {"_name_or_path": PLANTED, PLANTED: 7}
    values = a_snapshot(**target).definition
    definition = values.model_copy(update={"model": named})
    with open_study(
        PLANTED,
        url=f"sqlite:///{home}/runs/sweep.db",
        definition=definition,
        sampler=make_sampler("random", definition.space, seed=0),
        environment=ENVIRONMENT,
        home=home / "runs",
    ) as study:
        for record in records:
            trial = study.ask({}, params=None)
            begun = study.begin(trial, record.config, f"{DAY}T12:34:56+00:00")
            told = {"number": trial.number, "attempt_id": begun.id, "started_at": begun.started_at}
            study.tell(trial, record.model_copy(update=told))
    return PLANTED


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    return home


def test_what_a_study_measured_is_shown_and_written_without_a_name_in_it(
    here: Path, sweep: Sweep
) -> None:
    shared = TRIALS[1].model_dump()
    shared["outcome"]["measurement"]["flags"] = ("neighbour",)
    mark = Carried(study=PLANTED, identity="i", number=1)
    told = (TRIALS[0], *TRIALS[2:5], OOM)
    others = (TrialRecord.model_validate(shared), TRIALS[5].model_copy(update={"carried": mark}))
    # A larger GPU stood in: it is the one that was measured.
    study = stored(here, *told, *others, emulated_on="NVIDIA H200")
    shown = sweep("contribute", study, "--dry-run", "--json")
    document = json.loads(shown.out)
    assert (document["header"]["gpu"], document["trials"]) == ("h200", {"fits": 4, "oom": 1})
    assert sweep("contribute", study).code == 2  # Nobody is there to be asked.
    assert list(here.glob("*.jsonl")) == []

    written = sweep("contribute", study, "-y")
    (file,) = here.glob("*.jsonl")
    assert (written.code, written.out.strip()) == (0, file.name)
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines == [document["header"], *document["rows"]]
    for word in (PLANTED, "zebra", "12:34", "/home"):
        assert word not in text + file.name
    contribution = parse_contribution(text, "")
    assert {row.config for row in contribution.surface.rows} == {r.config for r in told}
    header = contribution.header
    assert header.versions == {"torch": "2.11.0+cu130"}
    assert (header.driver, header.date) == ("580.1", DAY)
    assert (header.power_limit_watts, header.gpu_memory_bytes) == (700.0, 150_000_000_000)


def test_a_file_that_others_own_is_not_replaced(here: Path, sweep: Sweep) -> None:
    study = stored(here, *TRIALS)
    (here / "mine.jsonl").write_text("mine")
    assert sweep("contribute", study, "-y", "-o", "mine.jsonl").code == 2
    assert (here / "mine.jsonl").read_text() == "mine"


class Known(ImaginedPredictor):
    """Predicts the peak that `a_record` has."""

    def predict(self, config: TrialConfig) -> ImaginedMemory:
        return replace(super().predict(config), peak_allocated_bytes=10 * GIB)


def known(*_: Any) -> Known:
    return Known()


def planned(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    request = PlanRequest(space="small.yaml", as_json=True)
    plan(request, predictor=known, card=lambda: None)
    return dict(json.loads(capsys.readouterr().out)["recommended"])


def calibrated(capsys: pytest.CaptureFixture[str], *files: str, **options: Any) -> dict[str, Any]:
    capsys.readouterr()
    asked: dict[str, Any] = {"forgotten": None, "catalogue": None} | options
    code = calibrate(files or None, **asked, as_json=True, predictor=known)
    document = json.loads(capsys.readouterr().out)
    return {"code": code, **document}


def slow_a10(here: Path, sweep: Sweep) -> None:
    """Write what trials on an A10 contribute that is 1.2 times as slow, and a space to plan."""
    slow = [a_record(r.number, r.config, off=1.2) for r in TRIALS]
    assert sweep("contribute", stored(here, *slow), "-y", "-o", "a10.jsonl").code == 0
    (here / "small.yaml").write_text("gpu: a10\ndimensions:\n  micro_batch_size: [2, 6]\n")


def test_what_one_contributes_makes_anothers_plan_surer_until_it_is_forgotten(
    here: Path, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_a10(here, sweep)
    before = planned(capsys)
    assert "speed_contributed" not in before["basis"]

    found = calibrated(capsys, "a10.jsonl")
    (file,), (one,) = found["files"], found["gpus"]["a10"]
    assert (found["code"], file["refused"], one["trials"]) == (0, None, 6)
    assert one["times_predicted_seconds"] == pytest.approx(1.2, abs=0.05)
    ends = [found[when]["a10"]["tokens_per_second_range"] for when in ("before", "after")]
    # What is recommended computes in 8 bits, of which these trials say less.
    assert ends[1][1] / ends[1][0] < 0.95 * ends[0][1] / ends[0][0]

    after = planned(capsys)
    assert after["basis"]["speed_contributed"] == {"files": 1, "trials": 6}
    (low, high), (least, most) = (of["tokens_per_second_range"] for of in (after, before))
    assert low < before["tokens_per_second"] / 1.2 < high
    assert high / low < min(1.5, (most / least) ** 0.75)
    assert "and 6 trials of 1 contribution" in grounds(capsys)

    # The same file once more is refused, and what is kept stays.
    again = calibrated(capsys, "a10.jsonl")
    assert (again["code"], again["gpus"], again["after"]) == (2, found["gpus"], {})
    assert calibrated(capsys)["gpus"] == found["gpus"]
    assert "no such file is kept" in sweep("calibrate", "--forget", "nonesuch").err
    forgotten = calibrated(capsys, forgotten=one["digest"])
    assert (forgotten["gpus"], forgotten["after"]) == ({}, found["before"])
    assert planned(capsys) == before


def test_a_plan_goes_by_what_it_can_read_of_what_is_kept(
    here: Path, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_a10(here, sweep)
    calibrated(capsys, "a10.jsonl")
    after = planned(capsys)
    older = directory() / "0.jsonl"
    older.write_text('{"contribution": 0}')
    for damaged in ("", "[]", '{"basis": "other rates"}'):
        (directory() / NAME).write_text(damaged)
        assert planned(capsys) == after
        assert len(list(directory().glob("*.jsonl"))) == 2
    assert "0.jsonl: line 1: contribution is of version 0" in sweep("calibrate").err


def grounds(capsys: pytest.CaptureFixture[str]) -> str:
    plan(PlanRequest(space="small.yaml", is_detailed=True), predictor=known, card=lambda: None)
    return " ".join(capsys.readouterr().out.split())


def test_of_a_folder_the_bad_files_are_refused_each_with_its_reason_and_the_rest_is_kept(
    here: Path, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "folder").mkdir()
    assert sweep("contribute", stored(here, *TRIALS), "-y", "-o", "folder/a.jsonl").code == 0
    (here / "folder" / "b.jsonl").write_text("{")
    (here / "folder" / "c.jsonl").symlink_to("c.jsonl")
    found = calibrated(capsys, "folder")
    assert found["code"] == 0
    assert [file["refused"] is None for file in found["files"]] == [True, False, False]
    assert "not valid JSON" in found["files"][1]["refused"]
    assert "a link that leads to itself" in found["files"][2]["refused"]
    assert "empty text" in sweep("calibrate", "").err
    assert "nowhere: no such file" in sweep("calibrate", "nowhere").err
    assert "name the files" in sweep("calibrate", "--catalogue", "out.json").err


def test_a_folder_becomes_a_catalogues_file_with_its_provenance(
    here: Path, sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep("contribute", stored(here, *TRIALS), "-y", "-o", "a.jsonl").code == 0
    calibrated(capsys, "a.jsonl", catalogue="out.json")
    entry = json.loads((here / "out.json").read_text())["gpus"]["a10"]
    (file,) = entry["files"]
    assert (file["date"], file["trials"], entry["trials"]) == (DAY, 6, 6)
    assert {"digest", "versions", "driver"} < file.keys()
    assert not directory().exists()


@pytest.mark.parametrize(
    ("records", "target", "code", "words"),
    [
        (TRIALS, {"gpu": "cpu", "device": "cpu"}, 2, "ran on a CPU"),
        (TRIALS, {"gpu": "Voodoo 2"}, 2, "a GPU of the catalogue"),
        ([OOM], {}, 1, "no trial of its own"),
        ([], {}, 1, "nothing to export"),
    ],
)
def test_what_no_gpu_of_the_catalogue_measured_is_not_contributed(
    here: Path, sweep: Sweep, records: list[Any], target: dict[str, Any], code: int, words: str
) -> None:
    said = sweep("contribute", stored(here, *records, **target), "-y")
    assert (said.code, said.out) == (code, "")
    assert words in said.err.replace("\n  ", " ")
