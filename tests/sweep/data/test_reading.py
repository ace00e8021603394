"""Rows are read from every kind of file, and what cannot be read is named by its line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.sweep.data import files
from qlora_sweep.sweep.data.files import (
    Broken,
    DatasetSource,
    Place,
    RowsError,
    dataset_files,
    is_on_hub,
)
from tests.sweep.data.layouts import lines_of, written
from tests.tables import cases

LINES = b'{"text": "a"}\n{"text": "b"}\n'
ROWS = [{"text": "a"}, {"text": "b"}]


def read(path: Path) -> list[tuple[int, dict[str, Any] | str]]:
    """Return lines with values, or with the reason why there are none."""
    found: list[tuple[int, dict[str, Any] | str]] = []
    for line, fields in lines_of(path):
        if isinstance(fields, Broken):
            found.append((line, fields.reason))
        else:
            found.append((line, fields))
    return found


def texts_of(source: DatasetSource) -> list[str]:
    return [fields["text"] for _, fields in source if isinstance(fields, dict)]


ARRAY = json.dumps(ROWS, indent=1).encode()
TABLE = b"text,n\na,1\nb,2\n"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ('a b #\'{%}\u00e4: "x".jsonl', b"\xef\xbb\xbf" + LINES),
        ("A.TAB.NDJSON", LINES),
        ("a.jsonl.gz", gzip.compress(LINES)),
        ("a.json.bz2", bz2.compress(LINES)),
        ("a.jsonl.xz", lzma.compress(LINES)),
        ("b.json", b"\xef\xbb\xbf\n " + ARRAY),
        ("b.csv", b"\xef\xbb\xbf" + TABLE.replace(b"\n", b"\r\n")),
        ("c.csv", TABLE.replace(b",", b";")),
        ("b.tsv", TABLE.replace(b",", b"|")),
        ("a.tsv.gz", gzip.compress(TABLE.replace(b",", b"\t"))),
        # Compressed, and not called so.
        ("packed.json", lzma.compress(ARRAY)),
        ("packed.csv", bz2.compress(TABLE)),
    ],
)
def test_a_file_is_read_as_its_name_says(tmp_path: Path, name: str, data: bytes) -> None:
    found = read(written(tmp_path / name, data))
    assert [fields["text"] for _, fields in found if isinstance(fields, dict)] == ["a", "b"]
    assert [line for line, _ in found] == ([2, 3] if "sv" in Path(name).suffixes[0] else [1, 2])


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n\n{"text": "\xff"}\n[1]\nnull\n{"text"}\n' + b"[" * 9**5,
            {
                1: {"text": "a"},
                3: "byte 11",
                4: "[1]",
                5: "null",
                6: "column 8",
                7: "recursion depth",
            },
        ),
        ("a.json", b'[{"text": "[b, \\\\]"}, 3]', {1: {"text": "[b, \\]"}, 2: "no JSON object"}),
        (
            "a.csv",
            b'text,n\n"two\nlines",1\nshort\n"a ""word""",2\n\ncaf\xe9,3\nlast,4',
            {
                2: {"text": "two\nlines", "n": "1"},
                4: "1 cells",
                5: {"text": 'a "word"', "n": "2"},
                7: "not UTF-8",
                8: {"text": "last", "n": "4"},
            },
        ),
        # What other readers take for numbers, truth values or nothing.
        ("b.csv", b"text,n\nNA,True\n", {2: {"text": "NA", "n": "True"}}),
        ("c.csv", b'"text, all";n\n"a; b";1\n', {2: {"text, all": "a; b", "n": "1"}}),
        ("d.csv", b'text,n\na,1\n"b,2\nc,3\n', {2: {"text": "a", "n": "1"}, 3: "never closed"}),
        ("e.csv", b"text\n" + b"word " * 10**5, {2: {"text": "word " * 10**5}}),
    ],
)
def test_rows_that_cannot_be_read_are_named_by_their_line(
    tmp_path: Path, name: str, data: bytes, expected: dict[int, Any]
) -> None:
    found = read(written(tmp_path / name, data))
    assert [line for line, _ in found] == list(expected)
    for line, fields in found:
        if isinstance(fields, str):
            assert expected[line] in fields
        else:
            assert fields == expected[line]


def test_a_line_that_is_too_long_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LINE_BYTES_MAX", 4096)
    long = b'{"text": "' + b"a" * 4096 + b'"}\n{"text": "b"}\n'
    found = read(written(tmp_path / "f.jsonl.gz", gzip.compress(long)))
    assert found == [(1, "a line of more than 4,096 bytes"), (2, {"text": "b"})]


def test_rows_of_parquet_are_numbered(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    bad = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff\xfe", b"c"]).buffers())
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [
        (1, {"text": "a"}),
        (2, "not UTF-8"),
        (3, {"text": "c"}),
    ]
    turns = [[{"role": "user", "content": "a"}]]
    pq.write_table(pa.table({"messages": turns}), tmp_path / "b.parquet")
    assert read(tmp_path / "b.parquet") == [(1, {"messages": turns[0]})]
    data = bytearray((tmp_path / "b.parquet").read_bytes())
    data[8:40] = bytes([255]) * 32
    with pytest.raises(RowsError, match="not Parquet that can be read"):
        read(written(tmp_path / "b.parquet", bytes(data)))


def test_a_directory_is_its_files_in_order_without_what_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.json", "a.jsonl", "sub/c.jsonl", ".hidden/d.jsonl", ".e.jsonl", "__f/g.jsonl"):
        written(Path("d", name), '{"text": "a"}\n')
    written(Path("d", "README.md"), "no texts")
    for name in ("d", "d/", "./d"):
        places = [place for place, _ in DatasetSource(name)]
        named = [f"{name.rstrip('/')}/{file}" for file in ("a.jsonl", "b.json", "sub/c.jsonl")]
        assert places == [Place(each, 1) for each in named]


@pytest.mark.parametrize(
    ("train", "other"),
    cases(
        """
        [data/train-00000-of-00002.jsonl, data/train-00001-of-00002.jsonl]
            | [data/test-00000-of-00001.jsonl]
        [test.jsonl] | []
        [x.JSONL, y.ndjson, z.json] | []
        """
    ),
)
def test_of_a_directory_with_splits_the_training_split_is_read(
    tmp_path: Path, train: list[str], other: list[str]
) -> None:
    directory = tmp_path / "data[1]"
    for name in (*train, *other):
        written(directory / name, f'{{"text": "{name}"}}\n')
    source = DatasetSource(str(directory))
    assert texts_of(source) == train
    assert len(source.notes) == bool(other)
    if other:
        assert "1 of its 3 files are left out (test)" in source.notes[0]


CONFIGS = "---\nconfigs:\n- config_name: a\n  data_files: {}\n---\n# A dataset\n"


@pytest.mark.parametrize(
    ("readme", "others"),
    [
        # As cloned from the hub: its README says what is read.
        (
            CONFIGS.format("[{split: train, path: read/*}, {split: test, path: raw/*}]"),
            ["raw/b.jsonl"],
        ),
        ("---\nconfigs:\n- {config_name: a, data_dir: read}\n---\n", ["raw/b.jsonl"]),
        # The same rows once more, in another format.
        ("---\nlicense: mit\n---\n", ["read/a.csv"]),
        # What older versions of datasets left.
        (None, ["dataset_infos.json", "config.json"]),
    ],
)
def test_of_a_directory_the_files_that_datasets_reads_are_read(
    tmp_path: Path, readme: str | None, others: list[str]
) -> None:
    from datasets import load_dataset

    directory = tmp_path / "set"
    written(directory / "read/a.jsonl", '{"text": "a"}\n{"text": "b"}\n')
    for name in others:
        written(directory / name, "text\na\n" if name.endswith(".csv") else '{"text": {}}\n')
    if readme is not None:
        written(directory / "README.md", readme)
    source = DatasetSource(str(directory))
    theirs = load_dataset(str(directory), split="train", cache_dir=str(tmp_path / "cache"))
    assert texts_of(source) == list(theirs["text"]) == ["a", "b"]
    (note,) = source.notes
    assert f"{len(others)} of its {1 + len(others)} files are left out" in note


@pytest.mark.parametrize(
    ("readme", "words"),
    [
        (CONFIGS.format("https://example.invalid/a.jsonl"), "names no file"),
        ("---\nconfigs:\n- {config_name: a, data_dir: gone}\n---\n", "not here"),
        (CONFIGS.format("[{split: test, path: a.jsonl}]"), "names no file of a split train"),
        ("---\nconfigs: [1\n---\n", "cannot be read"),
        ("---\nconfigs: 5\n---\n", "cannot be read"),
        (
            "---\nconfigs:\n- {config_name: a, data_files: a.jsonl}\n"
            "- {config_name: b, data_files: b.jsonl}\n---\n",
            r"\(a, b\): name a file",
        ),
    ],
)
def test_a_readme_that_does_not_say_what_is_read_is_refused(
    tmp_path: Path, readme: str, words: str
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        written(tmp_path / name, '{"text": "a"}\n')
    written(tmp_path / "README.md", readme)
    with pytest.raises(RowsError, match=words):
        DatasetSource(str(tmp_path))


def test_what_save_to_disk_left_is_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "one")
    assert read(tmp_path / "one") == [(1, ROWS[0]), (2, ROWS[1])]
    DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "splits")
    source = DatasetSource(str(tmp_path / "splits"))
    assert [fields for _, fields in source] == ROWS
    assert source.notes == ("its split train is read; left out: test",)
    assert (source.done, source.total) == (2, 2)
    DatasetDict({"test": data}).save_to_disk(tmp_path / "test")
    with pytest.raises(RowsError, match="no split train, but test"):
        DatasetSource(str(tmp_path / "test"))
    (tmp_path / "one" / "state.json").write_text("{}")
    with pytest.raises(RowsError, match="datasets cannot load it"):
        DatasetSource(str(tmp_path / "one"))


def test_rows_of_the_hub_are_numbered_and_nothing_beside_them_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pyarrow as pa
    from datasets import Dataset, DatasetInfo, Features, Image, Value
    from datasets.table import InMemoryTable

    made = {"text": ["a", "b"], "picture": [{"bytes": b"no picture", "path": None}] * 2}
    features = Features({"text": Value("string"), "picture": Image()})
    table = InMemoryTable(pa.table(made, schema=features.arrow_schema))
    data = Dataset(table, info=DatasetInfo(features=features))
    monkeypatch.setattr(files, "_of_hub", lambda _: data)
    found = list(DatasetSource("org/texts"))
    assert [place for place, _ in found] == [Place("org/texts", 1), Place("org/texts", 2)]
    assert [fields["text"] for _, fields in found] == ["a", "b"]  # type: ignore[index]


def test_progress_ends_with_all_that_there_is(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 100_000}) + "\n"
    source = DatasetSource(str(written(tmp_path / "a.jsonl", line * 30)))
    seen = [source.done for _ in source]
    assert seen == sorted(seen)
    assert (source.done, source.total) == (3, 3)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("none.jsonl", None, "no such file or directory"),
        ("a.parquet.gz", b"", "its name must end in .jsonl"),
        ("a.parquet", b"hello", "not Parquet that can be read"),
        ("a.jsonl.gz", b"hello", "cannot be unpacked"),
        ("a.jsonl.gz", gzip.compress(LINES)[:10] + b"\xff" * 30, "cannot be unpacked"),
        ("a.jsonl.bz2", bz2.compress(LINES * 99)[:40], "cannot be unpacked"),
        ("a.csv", b'"text\na\n', "line 1: not CSV"),
        ("a.csv", b"text,text\n1,2\n", "column 'text' is there twice"),
        ("a.csv", "text\na\n".encode("utf-16"), "save it as UTF-8"),
        ("a.json", '[{"text": "a"}]'.encode("utf-16"), "save it as UTF-8"),
        ("a.json", b'[{"a": 1},\n{"a": ', "line 2 column 7"),
        ("b.json", b'[{"a": "' + b"x" * 5000 + b'"}]', "write it as JSON lines"),
    ],
)
def test_what_is_no_dataset_is_refused(
    tmp_path: Path, name: str, data: bytes | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ARRAY_BYTES_MAX", 4096)
    if data is not None:
        written(tmp_path / name, data)
    with pytest.raises(RowsError) as refused:
        list(DatasetSource(str(tmp_path / name)))
    assert words in str(refused.value)
    assert name in str(refused.value)


def pipe(directory: Path) -> None:
    os.mkfifo(directory / "a.jsonl")


def dead_link(directory: Path) -> None:
    (directory / "a.jsonl").symlink_to(directory / "gone.jsonl")


def odd_name(directory: Path) -> None:
    written(Path(os.fsdecode(os.fsencode(directory) + b"/caf\xe9.jsonl")), LINES)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: None, "no file in this directory"),
        (pipe, "a.jsonl: is a pipe"),
        (dead_link, "a.jsonl: is a link"),
        (odd_name, "rename it"),
    ],
)
def test_a_directory_with_what_cannot_be_read_is_refused(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    make(tmp_path)
    with pytest.raises(RowsError, match=words):
        dataset_files(str(tmp_path))


def test_a_name_is_the_hubs_only_where_nothing_here_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "here" / "texts" / "a.jsonl", LINES)
    known = {"org/texts": True, "org/texts-v1.5": True, "here/texts": False, "here/missing": False}
    known |= {"org/missing.jsonl": False, "org/missing.txt": False, "texts": False, "a/b/c": False}
    assert {name: is_on_hub(name) for name in known} == known
    with pytest.raises(RowsError, match="no such file or directory in 'here'; for the hub's"):
        dataset_files("here/missing")
