"""The record of a trial: written as JSON, alone or beside a file that runs, and read whole."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.export.formats import endings_of, exported
from qlora_sweep.sweep.export.record import parse_record, read_record, record_of
from tests.sweep.export.studies import a_study, some_dataset

CONFIG = TrialConfig(lora_rank=64, kernels="fused-loss", upcast_fp32=False, micro_batch_size=8)
MODEL = load_model_spec("mistral-7b-v0.3")
STUDY = a_study(CONFIG, model=MODEL)


def written(directory: Path, format: str, *, name: str = "winner") -> Path:
    """Write an export as `sweep export -o` does."""
    path = directory / f"{name}{endings_of(format)[0]}"
    for each, text in exported(STUDY, format=format).files(path).items():
        each.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("format", "kind"),
    [("script", "script"), ("trl", "trl"), ("json", "training"), ("yaml", "training")],
)
def test_what_is_read_of_an_export_is_the_record_of_its_trial(
    format: str, kind: str, tmp_path: Path
) -> None:
    path = written(tmp_path, format)
    record, runs = read_record(str(path))
    assert (record.kind, runs) == (kind, path.resolve())
    assert record.unsupported == exported(STUDY, format=format).lost
    assert record.model_copy(update={"format": "json", "unsupported": ()}) == record_of(STUDY)
    assert (record.model.spec, record.environment) == (MODEL, STUDY.environment)
    layers = {"target_modules": ("k_proj", "o_proj", "q_proj", "v_proj")}
    assert record.config == canonical(CONFIG).model_copy(update=layers)


@pytest.mark.parametrize("format", ["json", "yaml"])
def test_a_record_may_be_in_a_file_without_an_ending(format: str, tmp_path: Path) -> None:
    path = written(tmp_path, format).rename(tmp_path / "winner")
    assert read_record(str(path))[0].number == record_of(STUDY).number


def test_it_holds_out_the_examples_that_its_study_held_out() -> None:
    study = a_study(CONFIG, model=MODEL, dataset=some_dataset())
    space = study.definition.space.model_copy(update={"seed": 7})
    study = replace(study, definition=study.definition.model_copy(update={"space": space}))
    dataset = parse_record(json.loads(record_of(study).to_json()), where="x").texts
    assert dataset is not None
    assert (dataset.summary, dataset.eval_fraction, dataset.seed) == (some_dataset(), 0.05, 7)


def test_what_best_prints_is_a_record_without_provenance() -> None:
    own = record_of(STUDY)
    told = json.loads(own.to_json())
    best = {key: told[key] for key in ("number", "config", "measurement")}
    document = {"study": "a", "gpu": told["gpu"], "model": MODEL.name, "best": best}
    found = parse_record(document, where="x")
    assert (found.number, found.config, found.measurement) == (17, own.config, own.measurement)
    assert (found.model.spec, found.device, found.environment) == (MODEL, "NVIDIA H200", {})


def test_a_directory_is_the_export_in_it(tmp_path: Path) -> None:
    path = written(tmp_path, "script")
    (tmp_path / "notes.yaml").write_text("a: 1\n")
    assert read_record(str(tmp_path))[1] == path.resolve()
    written(tmp_path, "trl", name="another")
    with pytest.raises(InputError, match=r"2 exports.*another\.yaml, winner\.py"):
        read_record(str(tmp_path))


@pytest.mark.parametrize("format", ["axolotl", "llama-factory", "unsloth"])
def test_a_file_for_a_trainer_that_is_not_run_here_has_no_record(
    format: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="no record of what was measured"):
        read_record(str(written(tmp_path, format)))


def broken(part: str, key: str, value: object) -> str:
    """Return a record with a value that was edited."""
    document = json.loads(record_of(a_study(CONFIG, dataset=some_dataset())).to_json())
    document[part][key] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", "print(1)\n", "no record of what was measured"),
        ("a.json", '{"config": {}, "measurement": {}}', "not whole"),
        ("a.json", "nonsense", "a.json"),
        ("a.yaml", "a: [1", "no YAML"),
        ("a.json", broken("config", "kernels", "magic"), r"not whole \(config\.kernels"),
        ("a.json", broken("measurement", "peak_allocated_bytes", math.nan), "peak_allocated_bytes"),
        ("a.json", broken("texts", "eval_fraction", 1.5), "texts.eval_fraction"),
    ],
)
def test_a_file_without_a_whole_record_is_refused(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        read_record(str(tmp_path / name))


def test_a_format_without_records_is_refused(tmp_path: Path) -> None:
    document = {**json.loads(broken("config", "lora_rank", 8)), "format": "axolotl"}
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="'axolotl' has no record"):
        read_record(str(tmp_path / "a.json"))
