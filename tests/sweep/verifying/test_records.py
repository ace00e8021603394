"""What a verification is held against is in every export, whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.models import load_model_spec
from storage.definition import StudySnapshot
from sweep.export.formats import export
from sweep.export.recipe import recipe_of
from sweep.export.trainer_files import lost
from sweep.verifying.record import record_of_export, record_of_study
from sweep.verifying.runs import told_to_be_lost
from tests.sweep.export.studies import HOSTILE, a_measurement, a_study, some_texts

CONFIG = TrialConfig(lora_rank=64, kernels="fused-loss", upcast_fp32=False, micro_batch_size=8)
STUDY = a_study(CONFIG, model=load_model_spec("mistral-7b-v0.3"))


def exported(directory: Path, format: str, *, name: str = "winner") -> Path:
    suffix = {"script": "py", "unsloth": "py", "json": "json"}.get(format, "yaml")
    path = directory / f"{name}.{suffix}"
    path.write_text(export(STUDY, format=format), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("format", "kind"), [("script", "script"), ("trl", "trl"), ("json", "training")]
)
def test_an_export_promises_what_its_study_measured(format: str, kind: str, tmp_path: Path) -> None:
    found = record_of_export(str(exported(tmp_path, format)))
    study = record_of_study(STUDY)

    assert found.kind == kind
    for name in (
        *("model", "weights", "target", "tokens_per_second", "peak_allocated_bytes"),
        *("flags", "is_confirmed", "texts"),
    ):
        assert getattr(found, name) == getattr(study, name), name
    # With every default written out, as every export has it.
    assert found.config == TrialConfig(**recipe_of(STUDY).resolved)
    for key, value in found.environment.items():
        assert value == STUDY.environment.get(key), key
    assert study.kind == "training"


def test_an_export_holds_out_the_rows_that_its_study_held_out(tmp_path: Path) -> None:
    study = a_study(CONFIG, model=STUDY_MODEL, texts=some_texts())
    study = with_seed(study, 7)
    (tmp_path / "x.json").write_text(export(study, format="json"), encoding="utf-8")
    found, own = record_of_export(str(tmp_path / "x.json")), record_of_study(study)
    assert (found.eval_fraction, found.seed) == (own.eval_fraction, own.seed) == (0.05, 7)
    assert found.texts == own.texts


def with_seed(study: StudySnapshot, seed: int) -> StudySnapshot:
    space = study.definition.space.model_copy(update={"seed": seed})
    return replace(study, definition=study.definition.model_copy(update={"space": space}))


def test_a_study_of_any_name_has_its_record_in_one_line(tmp_path: Path) -> None:
    text = export(a_study(name=HOSTILE, model=STUDY_MODEL), format="script")
    (tmp_path / "winner.py").write_text(text, encoding="utf-8")
    assert HOSTILE.encode("unicode_escape").decode()[:3] in text
    found = record_of_export(str(tmp_path / "winner.py"))
    assert found.tokens_per_second == a_measurement().tokens_per_second


STUDY_MODEL = load_model_spec("tinyllama-1.1b")


def test_what_trl_cannot_do_is_read_from_its_file(tmp_path: Path) -> None:
    found = list(told_to_be_lost(exported(tmp_path, "trl").read_text(encoding="utf-8")))
    recipe = recipe_of(STUDY)
    assert found == [f"TRL: {sentence}" for sentence in lost(recipe, "trl")]
    assert found
    assert list(told_to_be_lost("# nothing\na: 1\n")) == []


def test_a_directory_is_the_export_in_it(tmp_path: Path) -> None:
    exported(tmp_path, "script")
    (tmp_path / "notes.yaml").write_text("a: 1\n")
    assert record_of_export(str(tmp_path)).path == (tmp_path / "winner.py").resolve()
    exported(tmp_path, "trl", name="another")
    with pytest.raises(InputError, match=r"2 exports: another\.yaml, winner\.py in it"):
        record_of_export(str(tmp_path))


@pytest.mark.parametrize("format", ["axolotl", "llama-factory", "unsloth"])
def test_a_trainer_that_is_not_run_here_is_said(format: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="verify the study"):
        record_of_export(str(exported(tmp_path, format)))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", "print(1)\n", "no record of what was measured in it"),
        ("a.json", "{}", "no record of what was measured in it"),
        (
            "a.py",
            '# record: {"study": "a"}\n',
            r"not whole \(number: Field required\): exp",
        ),
        ("a.py", "# record: {\n", "its record"),
        ("a.json", "nonsense", "a.json"),
    ],
)
def test_a_file_without_a_whole_record_is_refused(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        record_of_export(str(tmp_path / name))


def test_a_script_that_was_broken_by_an_edit_is_told_by_its_line(tmp_path: Path) -> None:
    path = exported(tmp_path, "script")
    path.write_text(path.read_text().replace("def load_model(name):", "def load_model(name:"))
    with pytest.raises(InputError, match=r"winner\.py: line \d+: "):
        record_of_export(str(path))


def test_a_record_in_yaml_trains_by_us(tmp_path: Path) -> None:
    values = json.loads(export(STUDY, format="json"))
    (tmp_path / "winner.yaml").write_text(f"# a comment\n{yaml.safe_dump(values)}")
    found = record_of_export(str(tmp_path / "winner.yaml"))
    assert (found.kind, found.config.lora_rank) == ("training", 64)
    (tmp_path / "winner.yaml").write_text("a: [1")
    with pytest.raises(InputError, match=r"winner\.yaml: no YAML"):
        record_of_export(str(tmp_path / "winner.yaml"))


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("config", "kernels", "magic"),
        ("measurement", "tokens_per_second", 0),
        ("measurement", "tokens_per_second", float("nan")),
        ("measurement", "peak_allocated_bytes", -1),
        ("gpu", "budget_bytes", 0),
        ("provenance", "texts", {"eval_fraction": 1.5}),
    ],
    ids=str,
)
def test_an_edited_value_that_cannot_be_is_refused_by_its_key(
    part: str, key: str, value: object, tmp_path: Path
) -> None:
    document = json.loads(export(STUDY, format="json"))
    document[part][key] = value
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=rf"the record in it is not whole \({part}\.{key}"):
        record_of_export(str(tmp_path / "a.json"))
