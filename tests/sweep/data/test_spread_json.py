"""JSON files that are not one object a line are read as `datasets` reads them; what broke off is
told by its line, and no inner line is taken for a row."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.sweep.data import files
from qlora_sweep.sweep.data.files import Broken, RowsError, Source

TURNS = [{"role": "user", "content": "a {\n} b"}, {"role": "assistant", "content": "c"}]
CHAT = {"messages": TURNS, "tools": [], "text": "x"}
PRETTY = json.dumps(CHAT, indent=2)
COMPACT_INSIDE = '{"messages": [\n{"role": "user", "content": "a"},\n{"text": "c"}\n]}'


def read(path: Path) -> list[tuple[int, Any]]:
    return [
        (place.line, f"broken: {fields.reason}" if isinstance(fields, Broken) else fields)
        for place, fields in Source(str(path))
    ]


def written(directory: Path, text: str, name: str = "a.jsonl") -> Path:
    path = directory / name
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


LINES = PRETTY.count("\n") + 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson", "a.json.gz"])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (PRETTY, [1]),
        (f"\n{PRETTY}\n\n{PRETTY}\n", [2, LINES + 3]),
        (f"{PRETTY}{PRETTY}", [1, LINES]),
        (f"{json.dumps(CHAT)}{json.dumps(CHAT)} {json.dumps(CHAT)}\n{PRETTY}", [1, 1, 1, 2]),
        (f"{json.dumps(CHAT)}\n{PRETTY}\n{json.dumps(CHAT)}", [1, 2, LINES + 2]),
        ("\ufeff" + PRETTY.replace("\n", "\r\n"), [1]),
        (json.dumps(CHAT, indent=0), [1]),
        (json.dumps(CHAT, indent="\t").replace("[\n", "[\n\n"), [1]),
    ],
)
def test_objects_over_several_lines_and_several_in_one_are_read(
    text: str, lines: list[int], name: str, tmp_path: Path
) -> None:
    found = read(written(tmp_path, text, name))
    assert [fields for _, fields in found] == [CHAT] * len(lines)
    assert [line for line, _ in found] == lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Lines that broke off, of which the next is a row of its own.
        ('{"text": "a"\n{"text": "b"}\n', [(1, "Expecting ',' del"), (2, "b")]),
        ('{"text": "a\n{"text": "b"}\n', [(1, "Invalid control character at column 12"), (2, "b")]),
        ('{"x": [{"y": 1},\n{"text": "b"}\n{"text": "c"}', [(1, "Expecting"), (2, "b"), (3, "c")]),
        ('{"text": "a"}\n{"text": "b"', [(1, "a"), (2, "Expecting ',' del")]),
        ('{"text": "a"}\n{"x": [\n{"text": "b"}', [(1, "a"), (2, "Expecting"), (3, "b")]),
        ('{"text"\n\n\n{"text": "b"}', [(1, "Expecting ':' del"), (4, "b")]),
        # Of an object over several lines that is not right nothing else is a row.
        (
            '{\n  "a": [\n    {"text": "inner"}\n    {"text": "inner"}\n  ]\n}\n{"text": "b"}\n',
            [(1, "line 4, column 5"), (7, "b")],
        ),
        ('{\n  "text": "a",\n}\n{\n  "text": "b"\n}', [(1, "column"), (4, "b")]),
        # Neither several objects nor one.
        ('{"text": "a"},\n{"text": "b"}', [(1, "Extra data at column 14"), (2, "b")]),
        (
            '{"text": "a"} x\n[1]\n7 8\n',
            [(1, "Extra"), (2, "no JSON obj"), (3, "no JSON"), (3, "8")],
        ),
    ],
)
def test_what_broke_is_told_by_its_line(
    text: str, expected: list[tuple[int, str]], tmp_path: Path
) -> None:
    found = read(written(tmp_path, text))
    assert [line for line, _ in found] == [line for line, _ in expected]
    for (_, fields), (_, words) in zip(found, expected, strict=True):
        if isinstance(fields, dict):
            assert fields == {"text": words}
        else:
            assert words in fields


def test_many_objects_over_lines_take_time_by_their_number(tmp_path: Path) -> None:
    rows = [{"text": f"a {n}", "list": list(range(40))} for n in range(3000)]
    path = written(tmp_path, "\n".join(json.dumps(row, indent=1) for row in rows))
    assert [fields for _, fields in read(path)] == rows


def test_a_list_of_texts_and_a_list_on_many_lines_are_arrays(tmp_path: Path) -> None:
    assert read(written(tmp_path, '["a", "b"]', "a.json")) == [
        (1, {"text": "a"}),
        (2, {"text": "b"}),
    ]
    for name in ("a.json", "a.jsonl"):
        assert read(written(tmp_path, json.dumps([CHAT, CHAT], indent=1), name)) == [
            (1, CHAT),
            (2, CHAT),
        ]
    assert read(written(tmp_path, f"[1]\n{json.dumps(CHAT)}\n"))[1] == (2, CHAT)


def test_one_object_that_is_too_large_to_be_read_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ARRAY_BYTES_MAX", 4096)
    text = json.dumps({"data": [{"text": "x" * 40}] * 200}, indent=1)
    with pytest.raises(RowsError, match="line 1: a JSON object of more than 0 MiB"):
        read(written(tmp_path, text, "a.json"))
