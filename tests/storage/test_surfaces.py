from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError, NothingFits
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.storage.records import Carried, Crashed, OutOfMemory
from qlora_sweep.storage.surfaces import read_surface, surface_text
from tests.storage.builders import changed
from tests.sweep.imagined_study import TRIALS, a_record, a_snapshot
from tests.sweep.prepared_dataset import a_summary

MODEL = load_model_spec("mistral-7b-v0.3")
HEADER: dict[str, Any] = {
    "surface": 1,
    "model": "mistral-7b-v0.3",
    "model_config": MODEL.config,
    "gpu": "h200",
    "measured_on": "NVIDIA H200",
}
ROW: dict[str, Any] = {
    "config": {"micro_batch_size": 8},
    "verdict": "fits",
    "tokens_per_second": 8000.0,
    "step_seconds": 0.5,
    "peak_allocated_bytes": 8 * GIB,
    "peak_reserved_bytes": 9 * GIB,
    "device_seconds": 6.0,
}
NO_NUMBERS = dict.fromkeys(
    ("tokens_per_second", "step_seconds", "peak_allocated_bytes", "peak_reserved_bytes"), None
)
OOM = ROW | NO_NUMBERS | {"verdict": "oom"}


def a_file(directory: Path, *lines: Any) -> str:
    path = directory / "s.jsonl"
    dataset = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(dataset) + "\n", encoding="utf-8")
    return str(path)


def test_a_surface_says_what_was_measured_and_a_key_left_out_takes_its_default(
    tmp_path: Path,
) -> None:
    longer = OOM | {"config": {"micro_batch_size": 64, "packing": "none"}, "comment": "ignored"}
    # Rows that agree count once, however the configuration is written.
    same = ROW | {"config": {"micro_batch_size": 8, "lora_alpha": 32}, "tokens_per_second": 8100.0}
    header = HEADER | {"gpu": "NVIDIA H200"}
    surface = read_surface(a_file(tmp_path, header, ROW, "", same, longer))
    assert surface.model.config["hidden_size"] == 4096
    assert (surface.gpu, surface.measured_on.name, surface.repeated) == ("h200", "h200", 1)
    fits, oom = surface.rows
    assert fits.config == TrialConfig(micro_batch_size=8)
    assert oom.config == TrialConfig(micro_batch_size=64)
    assert fits.fits(8 * GIB)
    assert not fits.fits(8 * GIB - 1)
    assert not oom.fits(1000 * GIB)

    assert surface.fitting(8 * GIB) == (fits,)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file is empty"),
        ([HEADER], "no trial in it"),
        ([ROW], "line 1: surface is missing"),
        ([HEADER | {"surface": 2}, ROW], "line 1: surface is of version 2"),
        ([HEADER | {"gpu": "h2000"}, ROW], "line 1: gpu: unknown GPU 'h2000'; did you mean 'h200'"),
        ([HEADER, {"config": {}, "verdict": "fits"}], "line 2: tokens_per_second must be a number"),
        ([HEADER, ROW | {"peak_allocated_bytes": 10**400}], "line 2: peak_allocated_bytes"),
        ([HEADER, ROW | {"config": {"micro_batch": 8}}], "line 2: unknown key 'micro_batch'"),
        ([HEADER, ROW | {"config": {"packing": "packed"}}], "line 2: config packing"),
        ([HEADER, "{"], "line 2: not valid JSON"),
        ([HEADER, ROW, ROW | {"tokens_per_second": 9000.0}], "9000.0 contradicts line 2"),
        ([HEADER, ROW, OOM], "line 3: verdict 'oom' contradicts line 2"),
    ],
)
def test_a_bad_surface_is_refused_naming_file_line_and_key(
    tmp_path: Path, lines: list[Any], message: str
) -> None:
    name = a_file(tmp_path, *lines)
    with pytest.raises(InputError) as caught:
        read_surface(name)
    assert str(caught.value).startswith(name)
    assert message in str(caught.value)


def test_a_study_is_a_surface_of_what_was_measured(tmp_path: Path) -> None:
    oom = a_record(10, TrialConfig(micro_batch_size=64), outcome=OutOfMemory(stage="forward"))
    crashed = a_record(11, TrialConfig(micro_batch_size=32), outcome=Crashed(phase="attach"))
    again = a_record(12, TRIALS[0].config, device_seconds=2.5)
    snapshot = a_snapshot(*TRIALS, oom, crashed, again, emulated_on="NVIDIA H200")
    surface = read_surface(a_file(tmp_path, surface_text(snapshot)))
    assert surface.measured_on.name == "h200"
    assert surface.gpu == "a10"
    assert {row.config for row in surface.rows} == {r.config for r in (*TRIALS, oom)}
    by_config = {row.config: row for row in surface.rows}
    assert by_config[oom.config].verdict == "oom"
    row = by_config[again.config]
    assert row.tokens_per_second == again.measurement.tokens_per_second
    assert row.device_seconds == 2.5


def test_what_another_study_ran_took_what_its_measurement_says(tmp_path: Path) -> None:
    mark = Carried(study="narrow", identity="i", number=1)
    fit = a_record(0, TrialConfig(), carried=mark, device_seconds=0.0, wall_seconds=0.0)
    longer = TrialConfig(micro_batch_size=64)
    oom = changed(fit, number=1, config=longer, outcome=OutOfMemory(stage="forward"))
    text = surface_text(a_snapshot(fit, oom))
    surface = read_surface(a_file(tmp_path, *text.splitlines()))
    assert [row.device_seconds for row in surface.rows] == [2.0, None]


def test_a_study_of_nothing_on_a_dataset_or_on_an_unknown_gpu_is_no_surface() -> None:
    with pytest.raises(NothingFits, match="has nothing to export"):
        surface_text(a_snapshot())
    with pytest.raises(InputError, match="a surface is of a GPU of the catalogue"):
        surface_text(a_snapshot(*TRIALS, emulated_on="Voodoo 2"))
    plain = a_snapshot(*TRIALS, emulated_on="NVIDIA H200")
    of_dataset = changed(plain.definition, texts=a_summary(source="mine.jsonl"))
    with pytest.raises(InputError, match=r"full rows, and its trials trained on mine\.jsonl"):
        surface_text(replace(plain, definition=of_dataset))
