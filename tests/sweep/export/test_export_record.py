"""The record of a trial: written as JSON, alone or beside a file that runs, and read whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import InputError
from search_spaces.models import load_model_spec
from sweep.export.formats import exported
from sweep.export.record import Record, parse_record, read_record, record_of
from tests.sweep.export.studies import HOSTILE, a_study, some_texts

CONFIG = TrialConfig(lora_rank=64, kernels="fused-loss", upcast_fp32=False, micro_batch_size=8)
MODEL = load_model_spec("mistral-7b-v0.3")
STUDY = a_study(CONFIG, model=MODEL)
ENDINGS = {"script": "py", "unsloth": "py", "json": "json"}


def written(directory: Path, format: str, *, name: str = "winner") -> Path:
    """Write an export as `sweep export -o` does."""
    path = directory / f"{name}.{ENDINGS.get(format, 'yaml')}"
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
    same = {"format": "json", "unsupported": ()}
    assert record.model_copy(update=same) == record_of(STUDY)
    assert record.model.spec == MODEL
    assert record.environment["versions"] == STUDY.environment["versions"]
    layers = {"target_modules": ("k_proj", "o_proj", "q_proj", "v_proj")}
    assert record.config == canonical(CONFIG).model_copy(update=layers)


def test_a_record_says_what_its_file_cannot_do(tmp_path: Path) -> None:
    record, _ = read_record(str(written(tmp_path, "trl")))
    assert record.unsupported == exported(STUDY, format="trl").lost != ()


def test_it_holds_out_the_examples_that_its_study_held_out() -> None:
    study = a_study(CONFIG, model=MODEL, texts=some_texts())
    space = study.definition.space.model_copy(update={"seed": 7})
    study = replace(study, definition=study.definition.model_copy(update={"space": space}))
    texts = parse_record(json.loads(record_of(study).to_json()), where="x").texts
    assert texts is not None
    assert (texts.summary, texts.eval_fraction, texts.seed) == (some_texts(), 0.05, 7)


def test_a_study_of_any_name_has_a_record() -> None:
    record = record_of(a_study(name=HOSTILE, model=MODEL))
    assert parse_record(json.loads(record.to_json()), where="x") == record


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


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", "print(1)\n", "no record of what was measured"),
        ("a.json", "{}", "no record of what was measured"),
        ("a.json", '{"config": {}, "measurement": {}}', "the record in it is not whole"),
        ("a.json", "nonsense", "a.json"),
        ("a.yaml", "a: [1", "no YAML"),
    ],
)
def test_a_file_without_a_whole_record_is_refused(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        read_record(str(tmp_path / name))


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("config", "kernels", "magic"),
        ("measurement", "tokens_per_second", 0),
        ("measurement", "tokens_per_second", float("nan")),
        ("measurement", "peak_allocated_bytes", -1),
        ("gpu", "budget_bytes", 0),
        ("texts", "eval_fraction", 1.5),
    ],
    ids=str,
)
def test_an_edited_value_that_cannot_be_is_refused_by_its_key(
    part: str, key: str, value: object, tmp_path: Path
) -> None:
    document = json.loads(record_of(a_study(CONFIG, texts=some_texts())).to_json())
    document[part][key] = value
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=rf"the record in it is not whole \({part}\.{key}"):
        read_record(str(tmp_path / "a.json"))


def test_yaml_says_what_json_says() -> None:
    found = yaml.safe_load(exported(STUDY, format="yaml").text)
    assert Record.model_validate({**found, "format": "json"}) == record_of(STUDY)
