"""Rows are read from every kind of file, and what cannot be read is named by its line."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetInfo, Features, Image, Value
from datasets.table import InMemoryTable

from search_spaces.errors import InputError
from sweep.data import formats, sources
from sweep.data.files import is_on_hub, text_files
from sweep.data.kinds import Broken
from sweep.data.request import Place
from sweep.data.sources import Files, Hub

LINES = b'{"text": "a"}\n{"text": "b"}\n'


def read(path: Path) -> list[tuple[int, dict[str, Any] | str]]:
    """Return lines with values, or with the reason why there are none."""
    return [
        (place.line, values.reason if isinstance(values, Broken) else values)
        for place, values in Files(str(path)).rows()
    ]


def written(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl", bytes),
        ("a.ndjson", bytes),
        ("a.json", bytes),
        ("A.JSONL", bytes),
        ("a.jsonl.gz", gzip.compress),
        ("a.json.bz2", bz2.compress),
        ("a.jsonl.xz", lzma.compress),
    ],
)
def test_json_lines_are_read_packed_or_not(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    path = written(tmp_path / name, pack(LINES))
    assert read(path) == [(1, {"text": "a"}), (2, {"text": "b"})]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_json_array_is_read_item_by_item(tmp_path: Path, name: str) -> None:
    text = json.dumps([{"text": "a"}, {"text": "[b, \\]"}, 3, {"text": "ü" * 700_000}], indent=1)
    data = ("\ufeff\n " + text).encode()
    path = written(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    first, second, third, fourth = read(path)
    assert (first, second) == ((3, {"text": "a"}), (6, {"text": "[b, \\]"}))
    assert third == (9, "no JSON object, but 3")
    assert fourth == (10, {"text": "ü" * 700_000})


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('[{"a": 1},\n{"a": ', 2, "not JSON, so what follows is not read either"),
        ('[{"a": 1},\n{"a" 1},\n{"a": 1}]', 2, "not JSON, so what follows is not read either"),
        ('[{"a": 1},\n', 2, "not JSON: the array has no end"),
        ('[{"a": 1}]\n[{"a": 2}]', 2, "not JSON: what follows the array is not read"),
    ],
)
def test_an_array_that_breaks_off_is_read_up_to_there(
    tmp_path: Path, text: str, line: int, reason: str
) -> None:
    first, last = read(written(tmp_path / "a.json", text))
    assert first == (1, {"a": 1})
    assert last[0] == line
    assert str(last[1]).startswith(reason)


def test_lines_that_are_no_rows_are_named(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "\xff"}\n[1]\nnull\n{"text"}\n' + b"[" * 9**5
    assert read(written(tmp_path / "a.jsonl", data)) == [
        (1, {"text": "a"}),
        (3, "not UTF-8: byte 11 of the line is wrong"),
        (4, "no JSON object, but [1]"),
        (5, "no JSON object, but null"),
        (6, "not JSON: Expecting ':' delimiter at column 8"),
        (
            7,
            "not JSON: maximum recursion depth exceeded while decoding a JSON array "
            "from a unicode string",
        ),
    ]


def test_rows_of_csv_have_the_lines_on_which_they_begin(tmp_path: Path) -> None:
    data = b'text,label\n"two\nlines",1\nshort\n"a ""word""",2\n' + b"caf\xe9,3\nlast,4"
    assert read(written(tmp_path / "a.csv", data)) == [
        (2, {"text": "two\nlines", "label": "1"}),
        (4, "1 cells, where the first line names 2 columns"),
        (5, {"text": 'a "word"', "label": "2"}),
        (6, "not UTF-8"),
        (7, {"text": "last", "label": "4"}),
    ]
    assert read(written(tmp_path / "b.tsv", "text\tn\na,b\t1\n")) == [
        (2, {"text": "a,b", "n": "1"})
    ]
    assert read(written(tmp_path / "c.csv", 'text\n"no end\n')) == [
        (2, "not CSV: a quote is never closed, so that nothing behind it is read")
    ]


def test_a_cell_may_be_a_book(tmp_path: Path) -> None:
    book = "word " * 100_000
    assert read(written(tmp_path / "a.csv", f"text\n{book}\n")) == [(2, {"text": book})]


def test_rows_of_parquet_are_numbered(tmp_path: Path) -> None:
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


def test_a_directory_is_its_files_in_order_without_what_is_hidden(tmp_path: Path) -> None:
    for name in ("b.csv", "a.jsonl", "sub/c.jsonl", ".hidden/d.jsonl", ".e.jsonl"):
        written(tmp_path / "d" / name, "text\nb\n" if name.endswith("csv") else '{"text": "a"}\n')
    written(tmp_path / "d" / "README.md", "no texts")
    places = [place for place, _ in Files(str(tmp_path / "d")).rows()]
    names = [str(tmp_path / "d" / name) for name in ("a.jsonl", "b.csv", "sub/c.jsonl")]
    assert places == [Place(names[0], 1), Place(names[1], 2), Place(names[2], 1)]


def test_files_of_a_directory_are_named_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "d" / "a.jsonl", LINES)
    for name in ("d", "d/", "./d"):
        assert [label for label, _ in text_files(name)] == [f"{name.rstrip('/')}/a.jsonl"]


def test_rows_of_the_hub_are_numbered_and_nothing_beside_them_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = {"text": ["a", "b"], "picture": [{"bytes": b"no picture", "path": None}] * 2}
    features = Features({"text": Value("string"), "picture": Image()})
    table = InMemoryTable(pa.table(rows, schema=features.arrow_schema))
    data = Dataset(table, info=DatasetInfo(features=features))
    monkeypatch.setattr(sources, "_loaded", lambda _: data)
    hub = Hub("org/texts")
    found = list(hub.rows())
    assert [place for place, _ in found] == [Place("org/texts", 1), Place("org/texts", 2)]
    assert [values["text"] for _, values in found if isinstance(values, dict)] == ["a", "b"]
    assert (hub.done, hub.total) == (2, 2)


def test_of_a_directory_with_splits_the_training_split_is_read(tmp_path: Path) -> None:
    for name in ("train-a.jsonl", "train-b.jsonl", "test.jsonl"):
        written(tmp_path / name, f'{{"text": "{name}"}}\n')
    files = Files(str(tmp_path))
    assert [values["text"] for _, values in files.rows() if isinstance(values, dict)] == [
        "train-a.jsonl",
        "train-b.jsonl",
    ]
    assert files.notes == ("its split train is read; 1 of its 3 files are left out (test)",)


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_csv_of_other_marks_than_commas_is_told_by_its_first_line(
    tmp_path: Path, mark: str
) -> None:
    text = f'"text, all"{mark}id\n"a{mark} b\nc"{mark}1\n"d, e"{mark}2\n'
    found = read(written(tmp_path / "a.csv", text))
    assert [line for line, _ in found] == [2, 4]
    assert [values for _, values in found] == [
        {"text, all": f"a{mark} b\nc", "id": "1"},
        {"text, all": "d, e", "id": "2"},
    ]


def test_a_quote_that_is_never_closed_is_told(tmp_path: Path) -> None:
    found = read(written(tmp_path / "a.csv", 'text,id\na,1\n"b,2\nc,3\n'))
    reason = "not CSV: a quote is never closed, so that nothing behind it is read"
    assert found == [(2, {"text": "a", "id": "1"}), (3, reason)]


def test_a_line_without_end_is_named_and_what_follows_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_LINE_MAX", 64)
    text = LINES + json.dumps({"text": "x" * 99}).encode() + b"\n" + LINES
    found = read(written(tmp_path / "a.jsonl", text))
    assert found[2] == (3, "a line of more than 64 bytes")
    assert [line for line, _ in found] == [1, 2, 3, 4, 5]


class Counted(io.BytesIO):
    """Bytes of which it is known how many were read."""

    count = 0

    def readinto(self, buffer: Any) -> int:
        self.count += len(buffer)
        return super().readinto(buffer)

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.count += len(data)
        return data


@pytest.mark.parametrize("wrong", ['"text" "x"', '"text": "never closed'])
def test_of_an_array_not_much_is_read_behind_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr(formats, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(formats, "_LINE_MAX", 256)
    raw = Counted(('[{"text": "a"}, {' + wrong + "x" * 1_000_000).encode())
    (_, first), (_, second) = formats.array_rows(io.BufferedReader(raw, 64))  # type: ignore[arg-type]
    assert first == {"text": "a"}
    assert isinstance(second, Broken)
    assert second.reason.startswith("not JSON, so what follows is not read either")
    assert raw.count < 50_000


def test_progress_ends_with_all_that_there_is(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 100_000}) + "\n"
    files = Files(str(written(tmp_path / "a.jsonl", line * 30)))
    seen = [files.done for _ in files.rows()]
    assert seen == sorted(seen)
    assert (files.done, files.total) == (3, 3)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("none.jsonl", None, "no such file or directory"),
        ("a.txt", b"hello", "its name must end in .jsonl"),
        ("a.parquet.gz", b"", "its name must end in .jsonl"),
        ("a.parquet", b"hello", "not Parquet that can be read"),
        ("a.jsonl.gz", b"hello", "cannot be unpacked"),
        ("a.jsonl.bz2", bz2.compress(LINES * 99)[:40], "cannot be unpacked"),
        ("a.csv", b"text,text\n1,2\n", "line 1: column 'text' is there twice"),
        ("empty", b"", "its name must end in"),
        ("a.csv", "text\na\n".encode("utf-16"), "is UTF-16: save it as UTF-8"),
        ("a.json", '[{"text": "a"}]'.encode("utf-16"), "is UTF-16: save it as UTF-8"),
    ],
)
def test_what_is_no_file_of_texts_is_refused(
    tmp_path: Path, name: str, data: bytes | None, words: str
) -> None:
    if data is not None:
        written(tmp_path / name, data)
    with pytest.raises(InputError) as refused:
        list(Files(str(tmp_path / name)).rows())
    assert words in str(refused.value)
    assert name in str(refused.value)


def test_a_directory_of_nothing_and_a_pipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file in this directory ends in"):
        Files(str(tmp_path))
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match="is a named pipe, not a file"):
        list(Files(str(tmp_path / "a.jsonl")).rows())


def test_a_link_to_nothing_in_a_directory_is_bad_input_that_names_it(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl", LINES)
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(InputError, match=r"b\.jsonl: a link to what is not there"):
        Files(str(tmp_path))


def test_a_name_is_the_hubs_only_where_nothing_here_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "here" / "texts" / "a.jsonl", LINES)
    assert is_on_hub("org/texts")
    assert not is_on_hub("here/texts")
    assert is_on_hub("org/texts-v1.5")
    assert not is_on_hub("org/missing.jsonl")
    assert not is_on_hub("org/missing.txt")
    assert not is_on_hub("org/texts/missing")
    assert not is_on_hub("texts")


def test_what_is_missing_in_a_directory_is_no_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert not is_on_hub("here/missing")
    with pytest.raises(InputError) as refused:
        text_files("here/missing")
    assert str(refused.value) == (
        "'here/missing': no such file or directory in 'here'; for the hub's, run this where no "
        "directory has that name"
    )


def test_of_parquet_no_whole_group_of_rows_is_read(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{number} " * 200 for number in range(20_000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20_000, compression="none")
    raw = Counted((tmp_path / "a.parquet").read_bytes())
    rows = formats.parquet_rows(raw, "a")
    next(rows)
    assert raw.count < table.nbytes / 3
    assert sum(1 for _ in rows) == len(table) - 1


def test_parquet_that_is_broken_inside_is_a_mistake_in_the_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a b", "c d"]}), tmp_path / "a.parquet")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[8:40] = bytes([255]) * 32
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(InputError, match="not Parquet that can be read"):
        list(Files(str(tmp_path / "a.parquet")).rows())


def test_a_name_that_cannot_be_written_down_is_refused(tmp_path: Path) -> None:
    path = written(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")), LINES)
    with pytest.raises(InputError, match="the name is no UTF-8: rename it"):
        text_files(str(path))
