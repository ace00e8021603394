"""`sweep contribute` and `sweep calibrate`, from a study to another machine's plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from storage.contributions import parse_contribution
from storage.records import Carried, OutOfMemory, TrialRecord
from storage.study import open_study
from sweep.sampling.samplers import make_sampler
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
    noisy = TRIALS[1].model_dump()
    noisy["outcome"]["measurement"]["flags"] = ("noisy",)
    mark = Carried(study=PLANTED, identity="i", number=1)
    told = (TRIALS[0], *TRIALS[2:5], OOM)
    others = (TrialRecord.model_validate(noisy), TRIALS[5].model_copy(update={"carried": mark}))
    # A larger GPU stood in: it is the one that was measured.
    study = stored(here, *told, *others, emulated_on="NVIDIA H200")
    shown = sweep("contribute", study, "--dry-run", "--json")
    document = json.loads(shown.out)
    assert (document["gpu"], document["trials"]) == ("h200", {"fits": 4, "oom": 1})
    assert sweep("contribute", study).code == 2  # Nobody is there to be asked.
    assert list(here.glob("*.jsonl")) == []

    written = sweep("contribute", study, "-y")
    (file,) = here.glob("*.jsonl")
    assert (written.code, written.out.strip()) == (0, file.name)
    text = file.read_text()
    assert [json.loads(line) for line in text.splitlines()] == document["lines"]
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


@pytest.mark.parametrize(
    ("records", "target", "code", "words"),
    [
        (TRIALS, {"gpu": "cpu", "device": "cpu"}, 2, "ran on a CPU"),
        (TRIALS, {"gpu": "Voodoo 2"}, 2, "a GPU of the catalogue"),
        ([OOM], {}, 1, "no steadily measured trial"),
        ([], {}, 1, "nothing to export"),
    ],
)
def test_what_no_gpu_of_the_catalogue_measured_is_not_contributed(
    here: Path, sweep: Sweep, records: list[Any], target: dict[str, Any], code: int, words: str
) -> None:
    said = sweep("contribute", stored(here, *records, **target), "-y")
    assert (said.code, said.out) == (code, "")
    assert words in said.err.replace("\n  ", " ")
