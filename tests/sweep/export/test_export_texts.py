"""A study on texts as a script: rows, loss and packing as `sweep.data` has them."""

from __future__ import annotations

import ast
import bz2
import gzip
import json
import lzma
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.space import SearchSpace
from storage.definition import StudySnapshot
from sweep.data.split import split
from sweep.export.formats import export, exported, format_names
from tests.sweep.export.studies import HOSTILE, a_study, imported, some_texts
from tests.sweep.export.test_export_keys import dataset_info
from tests.sweep.export.weights import a_row, saved_model, written_texts
from tests.sweep.training.tiny import tiny_config

KINDS = ("text", "instruction", "prompt-completion", "messages", "conversations")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: ModelSpec) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(model.path))


def script_of(
    directory: Path, kind: Any, config: TrialConfig, model: ModelSpec, *, only: bool = False
) -> ModuleType:
    """Return the script of a study on texts of a kind, as a module."""
    source = written_texts(directory / "texts.jsonl", kind)
    texts = some_texts(kind, completions_only=only, source=str(source))
    script = export(a_study(config, model=model, texts=texts), format="script")
    return imported(script, directory / "exported_texts.py")


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_script_reads_rows_as_they_were_measured(
    kind: Any, only: bool, model: ModelSpec, tokenizer: Any, tmp_path: Path
) -> None:
    from sweep.data.kinds import Broken, parsed
    from sweep.data.rendering import Rendered, renderer
    from sweep.data.tokenizing import Tokenizing

    script = script_of(tmp_path, kind, tiny_config(packing="none"), model, only=only)
    is_chat = kind in ("messages", "conversations")
    is_told = only and kind != "text"
    render = renderer(tokenizer, name="mine", is_chat=is_chat, completions_only=is_told)
    for index in range(6):
        row = a_row(kind, index)
        read = parsed(row, kind, text_column=None)
        assert not isinstance(read, Broken)
        rendered = render(read)
        assert isinstance(rendered, Rendered)
        (expected,) = Tokenizing(tokenizer)([rendered])
        found = script.tokens_of(row, tokenizer)
        assert found["input_ids"] == expected.ids.tolist()
        assert found["completion_mask"] == expected.mask.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_script_leaves_out_what_is_broken(
    kind: Any, model: ModelSpec, tokenizer: Any, tmp_path: Path
) -> None:
    script = script_of(tmp_path, kind, tiny_config(), model)
    assert script.tokens_of({}, tokenizer) is None
    assert script.tokens_of(dict.fromkeys(a_row(kind, 0)), tokenizer) is None


_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "does f"}}
_ASKED = {"role": "user", "content": "hi"}
_ANSWER = [{"role": "assistant", "content": "ho"}]
_TURNS = [_ASKED, *_ANSWER]
ODD_ROWS: dict[str, list[dict[str, Any]]] = {
    "instruction": [
        {"instruction": "a", "input": 7, "output": "b"},
        {"instruction": "a", "input": " x ", "output": "b"},
        {"instruction": " ", "output": "b"},
        {"instruction": "a", "output": ["b"]},
    ],
    "prompt-completion": [
        {"prompt": "", "completion": "b"},
        {"prompt": " ", "completion": "b"},
        {"prompt": "a", "completion": " "},
        {"prompt": 1, "completion": "b"},
        {"prompt": [_ASKED], "completion": _ANSWER},
        {"prompt": [*_TURNS, _ASKED], "completion": _ANSWER},
        {"prompt": [*_TURNS, _ASKED], "completion": [*_ANSWER, _ASKED, *_ANSWER]},
        # What prompts for an answer is no beginning of this: the turns' own words tell where.
        {"prompt": [_ASKED], "completion": [{"role": "tool", "content": "7"}, *_ANSWER]},
        {"prompt": [*_TURNS, *_ANSWER], "completion": _ANSWER},
        {"prompt": [_ASKED, {"from": "gpt", "value": "retell"}, _ASKED], "completion": _ANSWER},
        {"prompt": [_ASKED], "completion": _ANSWER, "tools": json.dumps([_TOOL])},
        {"prompt": [_ASKED], "completion": _ANSWER, "chat_template_kwargs": {"aside": "psst"}},
        {"prompt": [_ASKED], "completion": _ANSWER, "tools": "7"},
        {"prompt": [_ASKED], "completion": [{"role": "assistant", "content": "refuse"}]},
        {"prompt": [_ASKED], "completion": [_ASKED]},
        {"prompt": [], "completion": _ANSWER},
        {"prompt": [_ASKED], "completion": []},
        {"prompt": [{"role": "narrator", "content": "so"}], "completion": _ANSWER},
        {"prompt": [_ASKED], "completion": "ho"},
        {"prompt": json.dumps([_ASKED]), "completion": json.dumps(_ANSWER)},
    ],
    "messages": [
        {"messages": json.dumps(_TURNS)},
        {"messages": "no turns"},
        {"messages": []},
        {"messages": ["hi"]},
        {"messages": [_ASKED]},
        {"messages": [*_TURNS, {"role": "narrator", "content": "so"}]},
        {"messages": [_ASKED, {"role": "assistant", "content": " "}]},
        {"messages": [{"role": "system", "content": ""}, *_TURNS]},
        {"messages": [_ASKED, {"role": "assistant"}]},
        {
            "messages": [
                {**_ASKED, "content": [{"type": "text", "text": "h"}, {"text": "i"}]},
                *_TURNS,
            ]
        },
        {"messages": [{**_ASKED, "content": [{"type": "image"}]}, *_TURNS]},
        {"messages": [{**_ASKED, "from": "gpt"}, *_TURNS]},
        {"messages": [*_TURNS, {"from": "observation", "value": "42"}]},
        {"messages": [*_TURNS, {"from": "function_call", "value": "{}"}]},
        {"messages": [*_TURNS, {"role": ["user"], "content": "so"}]},
        {"messages": [{**_ASKED, "name": None}, *_TURNS]},
        {"messages": [*_TURNS, {"role": "assistant", "content": "", "tool_calls": [_CALL]}]},
        {"messages": _TURNS, "tools": [_TOOL]},
        {"messages": _TURNS, "tools": json.dumps([_TOOL])},
        {"messages": _TURNS, "tools": "7"},
        {"messages": _TURNS, "chat_template_kwargs": {"aside": "psst"}},
        {"messages": [_ASKED, {"role": "assistant", "content": "refuse"}]},
    ],
}


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("kind", ODD_ROWS)
def test_the_script_takes_and_leaves_odd_rows_as_the_study_did(
    kind: Any, only: bool, model: ModelSpec, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from sweep.data.kinds import Broken, parsed
    from sweep.data.rendering import Rendered, renderer
    from sweep.data.tokenizing import Tokenizing

    tokenizer = AutoTokenizer.from_pretrained(str(model.path))
    tokenizer.chat_template = (
        "{% if messages[-1].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
        "{% if messages | length > 1 and messages[1].content == 'retell' %}"
        "{{ messages | length }}{% endif %}"
        "{{ tools | tojson if tools else '' }}{{ aside }}"
    ) + tokenizer.chat_template.replace("{% generation %}", "{% generation -%}")
    script = script_of(tmp_path, kind, tiny_config(packing="none"), model, only=only)
    is_chat = kind == "messages"
    render = renderer(tokenizer, name="mine", is_chat=is_chat, completions_only=only)
    for row in ODD_ROWS[kind]:
        read = parsed(row, kind, text_column=None)
        rendered = read if isinstance(read, Broken) else render(read)
        found = script.tokens_of(row, tokenizer)
        if not isinstance(rendered, Rendered):
            assert found is None, row
            continue
        (expected,) = Tokenizing(tokenizer)([rendered])
        assert found is not None, row
        assert found["input_ids"] == expected.ids.tolist(), row
        assert found["completion_mask"] == expected.mask.tolist(), row


def test_only_the_completion_of_turns_carries_loss(
    model: ModelSpec, tokenizer: Any, tmp_path: Path
) -> None:
    script = script_of(tmp_path, "prompt-completion", tiny_config(), model, only=True)
    row = {"prompt": [*_TURNS, _ASKED], "completion": [*_ANSWER, _ASKED, *_ANSWER]}
    found = script.tokens_of(row, tokenizer)
    pairs = zip(found["input_ids"], found["completion_mask"], strict=True)
    learned = [token for token, carries in pairs if carries]
    assert tokenizer.decode(learned) == "ho</s>ho</s>"
    assert tokenizer.decode(found["input_ids"]).count("ho</s>") == 3


def test_a_mark_that_the_tokenizer_itself_puts_at_the_end_carries_loss(
    model: ModelSpec, tmp_path: Path
) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    from sweep.data.rendering import Rendered
    from sweep.data.tokenizing import Tokenizing

    tokenizer = AutoTokenizer.from_pretrained(str(model.path))
    marks = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=marks
    )
    script = script_of(tmp_path, "prompt-completion", tiny_config(), model, only=True)
    (expected,) = Tokenizing(tokenizer)([Rendered("ab", ((1, 2),), False)])
    found = script.tokens_of({"prompt": "a", "completion": "b"}, tokenizer)
    assert found["input_ids"] == expected.ids.tolist()
    assert found["completion_mask"] == expected.mask.tolist() == [0, 0, 1, 1]


@pytest.fixture(scope="module")
def reader(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    directory = tmp_path_factory.mktemp("reader")
    return script_of(directory, "prompt-completion", tiny_config(), model)


ROWS = [a_row("prompt-completion", index) for index in range(4)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()
TABLE = "".join(f"{row['prompt']},{row['completion']}\n" for row in ROWS)
CSV = f"prompt,completion\n{TABLE}".encode()
FILES: dict[str, bytes] = {
    "texts.jsonl": LINES,
    "TEXTS.JSONL": LINES,
    "texts.csv.jsonl": LINES,
    'a b #\'{{%}}\u00e4: "x".ndjson': LINES,
    "texts.jsonl.gz": gzip.compress(LINES),
    "texts.jsonl.bz2": bz2.compress(LINES),
    "texts.jsonl.xz": lzma.compress(LINES),
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "lines.json": LINES,
    "array.json": json.dumps(ROWS).encode(),
    "indented.json": b"\xef\xbb\xbf" + json.dumps(ROWS, indent=1).encode(),
    "array.json.gz": gzip.compress(json.dumps([*ROWS, 7]).encode()),
    "texts.csv": CSV,
    "texts.tsv": CSV.replace(b",", b"\t"),
    "semicolons.csv": CSV.replace(b",", b";"),
    "commas-within.csv": b"prompt;completion\nhello, you;world\n",
    "bars.tsv": CSV.replace(b",", b"|"),
    "texts.tsv.gz": gzip.compress(CSV.replace(b",", b"\t")),
    "bom.csv": b"\xef\xbb\xbf" + CSV.replace(b"\n", b"\r\n"),
    # What datasets takes for numbers, truth values, nothing, dates or another column.
    "numbers.csv": b"prompt,completion\na,1\nb,0\n",
    "truths.csv": b"prompt,completion\na,True\nb,False\n",
    "nothing.csv": b"prompt,completion\na,NA\nb,null\nc,None\nd,\n",
    "quoted.csv": b'prompt,completion\n"a ""x"", b","one\ntwo"\n',
    "ragged.csv": b"prompt,completion\na,b,c\nd\n\ne,f\n",
    "bytes.csv": b"prompt,completion\na,\xff\nb,c\n",
    "dates.jsonl": b'{"prompt": "a", "completion": "1999-01-02"}\n' * 2,
    "broken.jsonl": b'{oops\n\n7\n\xff\n{"prompt": "a", "completion": 7, "more": null}\n' + LINES,
}


@pytest.mark.parametrize("name", FILES)
def test_the_script_reads_files_as_the_study_did(
    name: str, reader: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert_read_alike(tmp_path / name, reader)


@pytest.mark.parametrize(
    "names",
    [
        ("b.jsonl", "a/x.csv", "z.json", ".hidden.jsonl", "__old/y.jsonl", "README.md"),
        ("train.jsonl", "test.jsonl"),
        ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "test/x.jsonl"),
        ("test.jsonl",),
        ("x.tsv", "y.jsonl.gz"),
    ],
    ids=" ".join,
)
def test_the_script_reads_a_directory_as_the_study_did(
    names: tuple[str, ...], reader: ModuleType, tmp_path: Path
) -> None:
    contents = {".csv": "texts.csv", ".tsv": "texts.tsv", ".gz": "texts.jsonl.gz"}
    for number, name in enumerate(names):
        file = tmp_path / "texts.json" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        made = FILES[contents.get(file.suffix, "texts.jsonl")]
        other = made.replace(b"quick", f"quick{number}".encode())
        file.write_bytes(made if file.suffix == ".gz" else other)
    assert_read_alike(tmp_path / "texts.json", reader)


def test_the_script_reads_parquet_as_the_study_did(reader: ModuleType, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [*ROWS, {"prompt": "a", "completion": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "texts.parquet")
    assert_read_alike(tmp_path / "texts.parquet", reader)


def assert_read_alike(source: Path, reader: ModuleType) -> None:
    """Check that the script has the rows of the study, in its order; None where one is broken."""
    from sweep.data.kinds import Broken
    from sweep.data.sources import Files

    read = [None if isinstance(row, Broken) else row for _, row in Files(str(source)).rows()]
    assert any(read)
    assert list(reader.read_texts(str(source))) == read


def test_the_script_leaves_broken_rows_out_and_counts_them(
    reader: ModuleType, tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "broken.jsonl"
    source.write_bytes(FILES["broken.jsonl"])
    assert len(reader.tokenized(reader.read_texts(str(source)), tokenizer)) == len(ROWS)
    assert "4 rows are broken and left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("missing.jsonl", "is no file that ends in .jsonl"),
        ("notes.txt", "is no file that ends in .jsonl"),
        ("empty", "has no file that ends in .jsonl"),
        ("bad.json", "is not JSON"),
        ("other.jsonl", "no row can be trained on; columns are x, y"),
    ],
)
def test_the_script_says_what_it_cannot_read(
    name: str, complaint: str, reader: ModuleType, tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("[{")
    (tmp_path / "other.jsonl").write_text('{"x": 1}\n{"y": 1}\n')
    with pytest.raises(SystemExit, match=complaint):
        reader.tokenized(reader.read_texts(str(tmp_path / name)), tokenizer)


ODD_PATHS = (
    f"/{'a long name/' * 20}x.jsonl",
    '/a  b/it\'s "x" # {{ 7 }}: {% raw %}.jsonl',
    "/back\\slash/new\nline\r\u2028/\U0001f600\u00e4/%s.jsonl",
    f"/{HOSTILE[:-1]}.jsonl",
)


@pytest.mark.parametrize("index", range(len(ODD_PATHS)))
def test_a_path_of_any_letters_is_the_same_path_in_every_format(index: int) -> None:
    path = ODD_PATHS[index]
    summary = some_texts("text", source=path).model_copy(update={"text_column": path})
    study = a_study(texts=summary)
    data = {"texts": path, "text_column": path, "tokenizer": path}
    space = SearchSpace.model_validate(study.definition.space.model_dump() | {"data": data})
    study = replace(study, definition=study.definition.model_copy(update={"space": space}))
    texts = {format: export(study, format=format) for format in format_names()}
    trl = yaml.safe_load(texts["trl"])
    assert trl["datasets"] == [{"path": "json", "data_files": path, "columns": [path]}]
    assert trl["dataset_text_field"] == path
    axolotl = yaml.safe_load(texts["axolotl"])
    assert (axolotl["datasets"][0]["path"], axolotl["datasets"][0]["field"]) == (path, path)
    assert axolotl["tokenizer_config"] == path
    info = dataset_info(texts["llama-factory"])
    assert info == {"texts": {"file_name": path, "columns": {"prompt": path}}}
    yaml.safe_load(texts["llama-factory"])
    constants = [
        n.value for n in ast.walk(ast.parse(texts["script"])) if isinstance(n, ast.Constant)
    ]
    assert constants.count(path) == 3, "texts, column and tokenizer"
    assert json.loads(texts["json"])["texts"]["source"] == path
    assert yaml.safe_load(texts["yaml"])["texts"]["source"] == path
    known = json.loads(texts["peft"])["auto_mapping"]["provenance"]["texts"]
    assert (known["source"], known["summary"]["text_column"]) == (path, path)


def on_texts(tokenizer: str | None = None, broken: int = 0) -> StudySnapshot:
    """Return a study whose texts had a tokenizer of their own, or broken rows."""
    texts = some_texts("text").model_copy(update={"broken": broken})
    study = a_study(texts=texts)
    data = {"texts": texts.source, "tokenizer": tokenizer}
    space = SearchSpace.model_validate(study.definition.space.model_dump() | {"data": data})
    return replace(study, definition=study.definition.model_copy(update={"space": space}))


def test_a_tokenizer_that_was_named_is_that_of_every_export() -> None:
    study = on_texts(tokenizer="/my/tokenizer")
    assert 'default="/my/tokenizer"' in export(study, format="script")
    axolotl = yaml.safe_load(export(study, format="axolotl"))
    assert axolotl["tokenizer_config"] == "/my/tokenizer"
    for format in ("trl", "llama-factory"):
        assert any("/my/tokenizer" in lost for lost in exported(study, format=format).lost)
    for format in ("script", "axolotl", "trl", "llama-factory"):
        assert "/my/tokenizer" not in export(on_texts(), format=format)


def test_a_shipped_tokenizer_is_where_trainers_find_it() -> None:
    place = str(load_model_spec("demo").tokenizer_path)
    study = on_texts(tokenizer="demo")
    assert yaml.safe_load(export(study, format="axolotl"))["tokenizer_config"] == place
    assert f'default="{place}"' in export(study, format="script")


def test_a_tokenizers_directory_comes_before_what_is_shipped_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where texts are tokenized; and not all that is shipped has a tokenizer."""
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "mistral-7b-v0.3"):
        (tmp_path / name).mkdir()
        assert f'default="{name}"' in export(on_texts(tokenizer=name), format="script")


@pytest.mark.parametrize("format", ["axolotl", "trl", "llama-factory"])
def test_rows_that_the_study_left_out_are_said(format: str) -> None:
    assert any("left 3 out" in lost for lost in exported(on_texts(broken=3), format=format).lost)
    assert not any("Broken rows" in lost for lost in exported(on_texts(), format=format).lost)


@pytest.mark.parametrize(
    ("name", "format", "kind", "told"),
    [
        ("x.tsv", "axolotl", "text", "commas alone"),
        ("x.tsv.gz", "axolotl", "text", "commas alone"),
        ("x.csv.gz", "axolotl", "text", "NA, null or an empty cell"),
        ("x.jsonl.gz", "axolotl", "text", None),
        ("X.JSONL", "axolotl", "text", None),
        ("x[1].jsonl", "axolotl", "text", "for a pattern"),
        ("x.csv", "axolotl", "messages", "does not look for JSON in a cell"),
        ("texts", "axolotl", "text", "the most frequent"),
        ("x.csv", "llama-factory", "text", "NA, null or an empty cell"),
        ("x.parquet", "llama-factory", "messages", None),
        ("x.json", "llama-factory", "messages", None),
        *((name, "llama-factory", "text", "it refuses a file") for name in ("x.tsv", "x.ndjson")),
        *((name, "llama-factory", "text", "it refuses a file") for name in ("x.csv.gz", "X.JSON")),
        ("x[1].jsonl", "llama-factory", "text", "for a pattern"),
        ("texts", "llama-factory", "text", "the most frequent"),
        ("x.tsv", "trl", "text", "NA, null or an empty cell"),
        ("x.tsv", "trl", "conversations", "does not look for JSON in a cell"),
        ("x[1].jsonl", "trl", "text", "for a pattern"),
        ("texts", "trl", "text", "the most frequent"),
        *(("org/texts", format, "text", None) for format in ("axolotl", "trl", "llama-factory")),
    ],
)
def test_what_a_trainer_does_not_read_is_said(
    name: str, format: str, kind: Any, told: str | None, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    source = name if "/" in name else str(tmp_path / name)
    lost = exported(a_study(texts=some_texts(kind, source=source)), format=format).lost
    of_files = [
        sentence for sentence in lost if "`datasets`" in sentence or "Write the" in sentence
    ]
    if told is None:
        assert of_files == []
    else:
        assert any(told in sentence for sentence in of_files)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith(("texts", "a b"))])
def test_trl_reads_files_as_the_study_did(name: str, tmp_path: Path) -> None:
    from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig, get_dataset

    # Each cell of these is a text, in datasets' eyes too.
    source = tmp_path / name
    source.write_bytes(FILES[name])
    texts = some_texts("prompt-completion", source=str(source))
    options = yaml.safe_load(export(a_study(texts=texts), format="trl"))["datasets"]
    mixture = DatasetMixtureConfig(datasets=[DatasetConfig(**entry) for entry in options])
    assert list(get_dataset(mixture)["train"]) == ROWS


def test_the_script_holds_out_the_rows_that_the_study_held_out(
    model: ModelSpec, tmp_path: Path
) -> None:
    script = script_of(tmp_path, "text", tiny_config(), model)
    for rows in (1, 2, 19, 60):
        trained, held = script.split(list(range(rows)))
        expected = split(rows, script.EVAL_FRACTION, script.SEED)
        assert (trained, held) == tuple(indices.tolist() for indices in expected)


HALF = "\ud83d"
NO_TEXTS: dict[str, list[dict[str, Any]]] = {
    "prompt-completion": [
        {"prompt": "a", "completion": HALF},
        {"prompt": HALF, "completion": "a"},
        # What is to be learned is cut off.
        {"prompt": "p" * 300, "completion": "late"},
    ],
    "messages": [
        {"messages": [{"role": "user", "content": HALF}, {"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": "a"}]},
    ],
    "text": [{"text": HALF}, {"text": " "}],
}


@pytest.mark.parametrize("packing", ["none", "packed", "grouped"])
@pytest.mark.parametrize("kind", NO_TEXTS)
def test_the_script_trains_on_the_rows_of_our_own_training(
    kind: Any, packing: str, model: ModelSpec, tokenizer: Any, tmp_path: Path
) -> None:
    from sweep.data.batches import training_rows
    from sweep.data.collating import Collator
    from sweep.data.files import text_files
    from sweep.data.preparing import prepare
    from sweep.data.request import Question, content_of

    config, only = tiny_config(packing=packing, seq_len=128, micro_batch_size=4), kind != "text"
    script = script_of(tmp_path, kind, config, model, only=only)
    source = tmp_path / "odd.jsonl"
    # One longer than a row, and a token that nothing comes before.
    plain = [a_row(kind, index) for index in range(40)]
    rows = [*plain, *NO_TEXTS[kind], a_row(kind, 4), *plain, *([{"text": "a"}] if not only else [])]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    content = content_of(text_files(str(source)), on_progress=lambda *_, **__: None)
    place, home = str(model.path), str(tmp_path / "prepared")
    question = Question(str(source), "auto", None, only, place, place, "digest", home, content)
    prepared = prepare(question, on_progress=lambda *_, **__: None)
    read = script.tokenized(script.read_texts(str(source)), tokenizer)
    count = len(np.load(prepared / "lengths.npy"))
    assert len(read) == count
    trained, _ = split(count, script.EVAL_FRACTION, script.SEED)
    expected = training_rows(prepared, config, indices=trained, seed=script.SEED)
    found = script.as_measured(script.split(read)[0])
    assert len(found) == len(expected)
    collate = script.Collator(tokenizer)
    measured = Collator(config, collate.pad_token_id)
    for first in range(0, len(found) - 3, 4):
        batch = collate([found[first + i] for i in range(4)])
        same = measured([expected[first + i] for i in range(4)])
        assert set(batch) == set(same)
        assert all(np.array_equal(batch[key], same[key]) for key in same)


@pytest.mark.parametrize("packing", ["none", "packed", "grouped"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_script_makes_the_micro_batches_that_were_measured(
    packing: str, compiled: bool, model: ModelSpec, tokenizer: Any, tmp_path: Path
) -> None:
    from sweep.data.collating import Collator

    config = tiny_config(packing=packing, compile=compiled, seq_len=128)
    script = script_of(tmp_path, "prompt-completion", config, model, only=True)
    rows = [script.tokens_of(a_row("prompt-completion", i), tokenizer) for i in range(12)]
    made = script.as_measured(rows)
    collate = script.Collator(tokenizer)
    few = [made[index] for index in range(2)]
    batch, expected = collate(few), Collator(config, collate.pad_token_id)(few)
    assert set(batch) == set(expected)
    assert all(np.array_equal(batch[key], expected[key]) for key in expected)
    assert collate.loss_tokens == [int((expected["labels"] != -100).sum())]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "packing"), [("messages", "packed"), ("text", "grouped")])
def test_the_script_trains_on_texts_and_says_what_it_reached(
    kind: str,
    packing: str,
    model: ModelSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # So many that the rows held out do not fill a micro-batch.
    config = tiny_config(packing=packing, seq_len=128, micro_batch_size=4)
    script = script_of(tmp_path, kind, config, model, only=kind == "messages")
    typed = ["--max-steps", "5", "--output", "out", "--metrics", "metrics.json"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *typed])
    script.main()
    reached = json.loads((tmp_path / "metrics.json").read_text())
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    assert reached["steps"] == 5
    assert 5.0 < reached["eval_loss"] < 7.0
    most = config.tokens_per_step / reached["step_seconds"]
    assert 0 < reached["tokens_per_second"] < most, "only what carries loss counts"
    assert "held-out rows" in capsys.readouterr().out
