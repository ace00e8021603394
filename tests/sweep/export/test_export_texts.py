"""A study on texts as a script with `rows.py` beside it, and as other trainers' files."""

from __future__ import annotations

import ast
import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.dataset_choice import DatasetSummary
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.sweep.data import collation
from qlora_sweep.sweep.export.formats import exported
from tests.sweep.export.studies import HOSTILE, a_study, export, imported, some_dataset
from tests.sweep.export.test_export_formats import dataset_info
from tests.sweep.export.weights import a_row, prepared_by_sweep, written_dataset
from tests.sweep.training.tiny import tiny_config
from tests.tables import cases


def script_of(
    directory: Path, kind: Any, config: TrialConfig, model: ModelSpec, *, only: bool = False
) -> ModuleType:
    """Return the script of a study on texts of a kind, as a module."""
    source = written_dataset(directory / "texts.jsonl", kind)
    dataset = some_dataset(kind, completions_only=only, source=str(source))
    script = export(a_study(config, model=model, dataset=dataset), format="script")
    return imported(script, directory / "exported_texts.py")


@pytest.mark.parametrize(
    ("kind", "packing", "compiled"),
    [("text", "packed", False), ("messages", "grouped", True), ("prompt-completion", "none", True)],
)
def test_the_script_trains_on_the_micro_batches_of_our_own_training(
    kind: Any, packing: str, compiled: bool, model: ModelSpec, tmp_path: Path
) -> None:
    import numpy as np
    from transformers import AutoTokenizer

    from qlora_sweep.sweep.data.batches import epoch_of, training_rows
    from qlora_sweep.sweep.data.prepared_dataset import open_prepared

    config = tiny_config(packing=packing, compile=compiled, seq_len=128, micro_batch_size=4)
    only, place = kind != "text", str(model.path)
    script = script_of(tmp_path, kind, config, model, only=only)
    source = tmp_path / "odd.jsonl"
    odd = [{"prompt": "p" * 300, "completion": "cut off"}, {"text": "a"}, a_row(kind, 4)]
    plain = [a_row(kind, index) for index in range(40)]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in (*plain, *odd, *plain)))
    directory = prepared_by_sweep(source, kind, tokenizer=place, completions_only=only)
    count = len(open_prepared(directory).lengths())
    read = script.read(str(source), AutoTokenizer.from_pretrained(place))
    assert len(read) == count
    trained, _ = script.split(count, script.EVAL_FRACTION, script.SEED)
    expected = training_rows(directory, config, indices=trained, seed=script.SEED)
    found = script.cut(read, trained)
    assert len(found) == len(expected)
    assert len(expected) == len(epoch_of(directory, config, indices=trained, seed=0).rows)
    collate, measured = script.Collator(script.ROWS), collation.Collator(config)
    for first in range(0, len(found) - 3, 4):
        batch = collate([found[first + i] for i in range(4)])
        same = measured([expected[first + i] for i in range(4)])
        assert set(batch) == set(same)
        assert all(np.array_equal(batch[key], same[key]) for key in same)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("[{", "not JSON"), ('[{"x": 1}]', "no column 'text'"), ('[{"text": 1}]', "is broken")],
)
def test_the_script_says_what_it_cannot_read(
    text: str, complaint: str, model: ModelSpec, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    script = script_of(tmp_path, "text", tiny_config(), model)
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(SystemExit, match=complaint):
        script.read(str(tmp_path / "other.json"), AutoTokenizer.from_pretrained(str(model.path)))


LONG = "a long name/" * 20


@pytest.mark.parametrize(
    "path",
    [f'/{LONG}/a  b/back\\slash/"x" # {{{{ 7 }}}}: {{% raw %}}/\U0001f600/%s{HOSTILE[:-1]}.jsonl'],
)
def test_a_path_of_any_letters_is_the_same_path_in_every_format(path: str) -> None:
    dataset = some_dataset("text", source=path, text_column=path)
    study = on_dataset(dataset, text_column=path, tokenizer=path)
    trl = yaml.safe_load(export(study, format="trl"))
    assert trl["datasets"] == [{"path": "json", "data_files": path, "columns": [path]}]
    assert trl["dataset_text_field"] == path
    axolotl = yaml.safe_load(export(study, format="axolotl"))
    assert (axolotl["datasets"][0]["path"], axolotl["datasets"][0]["field"]) == (path, path)
    assert axolotl["tokenizer_config"] == path
    llama_factory = export(study, format="llama-factory")
    assert yaml.safe_load(llama_factory)
    columns = {"file_name": path, "columns": {"prompt": path}}
    assert dataset_info(llama_factory) == {"texts": columns}
    nodes = ast.walk(ast.parse(export(study, format="script")))
    constants = [node.value for node in nodes if isinstance(node, ast.Constant)]
    assert constants.count(path) == 3, "texts, column and tokenizer"
    assert json.loads(export(study, format="json"))["texts"]["source"] == path
    assert yaml.safe_load(export(study, format="yaml"))["texts"]["source"] == path
    peft = json.loads(export(study, format="peft"))["auto_mapping"]["provenance"]["texts"]
    assert (peft["source"], peft["summary"]["text_column"]) == (path, path)


def on_dataset(dataset: DatasetSummary, **data: Any) -> StudySnapshot:
    """Return a study whose space says more of its dataset than where it is."""
    study = a_study(dataset=dataset)
    space = study.definition.space.model_dump() | {"data": {"texts": dataset.source, **data}}
    changes = {"space": SearchSpace.model_validate(space)}
    return replace(study, definition=study.definition.model_copy(update=changes))


def lost(format: str, kind: Any = "text", **changes: Any) -> str:
    """Return what a study on a dataset loses in a format."""
    return " ".join(exported(a_study(dataset=some_dataset(kind, **changes)), format=format).lost)


def test_a_tokenizer_that_was_named_is_that_of_every_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = str(load_model_spec("demo").tokenizer_path)
    for named, place in (("/my/tokenizer", "/my/tokenizer"), ("demo", shipped)):
        study = on_dataset(some_dataset("text"), tokenizer=named)
        assert f'default="{place}"' in export(study, format="script")
        assert yaml.safe_load(export(study, format="axolotl"))["tokenizer_config"] == place
        for format in ("trl", "llama-factory"):
            assert place in " ".join(exported(study, format=format).lost)
    # A directory comes before what is shipped under its name, as where texts are tokenized.
    (tmp_path / "demo").mkdir()
    assert 'default="demo"' in export(
        on_dataset(some_dataset("text"), tokenizer="demo"), format="script"
    )


@pytest.mark.parametrize(
    ("name", "format", "kind", "told"),
    cases(
        """
        x.tsv.gz | axolotl | text | commas alone
        x.csv.gz | axolotl | text | NA, null or an empty cell
        x[1].jsonl | axolotl | text | for a pattern
        x.tsv | trl | conversations | does not look for JSON in a cell
        texts | trl | text | the most frequent
        saved | trl | text | what save_to_disk left
        saved | axolotl | text
        x.ndjson | llama-factory | text | it refuses a file
        """
    ),
)
def test_what_a_trainer_does_not_read_is_said(
    name: str, format: str, kind: Any, told: str | None, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").touch()
    found = lost(format, kind, source=str(tmp_path / name))
    if told is None:
        assert "`datasets`" not in found
        assert "Write the" not in found
    else:
        assert told in found


READ = {
    "prompt-completion": {"prompt": "question", "completion": "answer"},
    "instruction": {
        "instruction": "ask",
        "output": "response",
        "input": "more",
        "system": "system",
    },
    "messages": {"messages": "conversation"},
    "preference": {"prompt": "question", "chosen": "chosen", "rejected": "rejected"},
}


@pytest.mark.parametrize("kind", READ)
def test_a_trainer_is_told_of_columns_or_how_to_rename_them(kind: Any) -> None:
    read = READ[kind]
    dataset = some_dataset(kind, columns=tuple(read.values()), columns_read=read)
    study = a_study(dataset=dataset)
    found = exported(study, format="llama-factory")
    assert set(dataset_info(found.text)["texts"]["columns"].values()) == set(read.values())
    assert "Rename" not in " ".join(found.lost)
    found = exported(study, format="axolotl")
    (axolotl,) = yaml.safe_load(found.text)["datasets"]
    if kind == "prompt-completion":
        told = (axolotl["type"]["field_instruction"], axolotl["type"]["field_output"])
        assert told == ("question", "answer")
    elif kind == "messages":
        assert axolotl["field_messages"] == "conversation"
    else:
        assert "Rename" in " ".join(found.lost)
    if kind != "instruction":
        renamed = [f"{column} to {name}" for name, column in read.items() if name != column]
        assert f"Rename {', '.join(renamed)}." in " ".join(exported(study, format="trl").lost)


OF_TURNS = {"columns": ("conversation",), "columns_read": {"messages": "conversation"}}


@pytest.mark.parametrize("format", ["trl", "axolotl", "llama-factory"])
@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("text", {"broken": 3}, "left 3 out"),
        ("messages", {"silenced": 7}, "7 examples have such turns"),
        ("prompt-completion", OF_TURNS, "Turns of input and output"),
    ],
)
def test_what_of_the_dataset_a_trainer_does_not_heed_is_said(
    format: str, kind: Any, changes: dict[str, Any], words: str
) -> None:
    assert words in lost(format, kind, **changes)
    assert words not in lost(format, kind)


def test_a_script_reads_the_columns_that_were_named(model: ModelSpec, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    named = {"prompt_column": "frage", "completion_column": "antwort"}
    dataset = some_dataset("prompt-completion", completions_only=True, **named)
    script = export(a_study(tiny_config(), model=model, dataset=dataset), format="script")
    module = imported(script, tmp_path / "exported_named.py")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"frage": "Wo? ", "antwort": "Da.", "text": "x"}))
    tokenizer = AutoTokenizer.from_pretrained(str(model.path))
    (row,) = module.read(str(path), tokenizer)
    assert "Wo? Da." in tokenizer.decode(row["input_ids"])


# datasets 4.7 leaves CSV files open.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_trl_reads_files_as_the_study_did(tmp_path: Path) -> None:
    from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig, get_dataset

    made = [a_row("prompt-completion", index) for index in range(4)]
    lines = "".join(f"{json.dumps(row)}\n" for row in made).encode()
    table = "".join(f"{row['prompt']},{row['completion']}\n" for row in made)
    cells = f"prompt,completion\n{table}".encode()
    files = {"texts.jsonl": lines, 'a b #\'{%}: "x".ndjson': lines, "texts.csv": cells}
    files |= {"texts.jsonl.gz": gzip.compress(lines), "texts.tsv": cells.replace(b",", b"\t")}
    for name, data in files.items():
        source = tmp_path / name
        source.write_bytes(data)
        dataset = some_dataset("prompt-completion", source=str(source))
        options = yaml.safe_load(export(a_study(dataset=dataset), format="trl"))["datasets"]
        mixture = DatasetMixtureConfig(datasets=[DatasetConfig(**entry) for entry in options])
        assert list(get_dataset(mixture)["train"]) == made


@pytest.mark.filterwarnings("ignore")
def test_the_script_trains_on_texts_and_says_what_it_reached(
    model: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # So many that the rows held out do not fill a micro-batch.
    config = tiny_config(packing="packed", seq_len=128, micro_batch_size=4)
    script = script_of(tmp_path, "messages", config, model, only=True)
    typed = ["--max-steps", "3", "--output", "out", "--metrics", "metrics.json"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *typed])
    script.main()
    reached = json.loads((tmp_path / "metrics.json").read_text())
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert reached["steps"] == 3
    assert 5.0 < reached["eval_loss"] < 7.0
    most = config.tokens_per_step / reached["step_seconds"]
    assert 0 < reached["tokens_per_second"] < most, "only what carries loss counts"
    said = capsys.readouterr().out
    assert "trained on: Length 128 cuts " in said
    assert "held out: Length 128 cuts " in said
