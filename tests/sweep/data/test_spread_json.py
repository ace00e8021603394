"""JSON files that are not one object a line are read as `datasets` reads them; what broke off is
told by its line, and no inner line is taken for a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.sweep.data import files
from qlora_sweep.sweep.data.files import Broken, RowsError
from tests.sweep.data.layouts import lines_of, written
from tests.tables import cases

TURNS = [{"role": "user", "content": "a {\n} b"}, {"role": "assistant", "content": "c"}]
CHAT = {"messages": TURNS, "tools": [], "text": "x"}
ON_ONE_LINE = json.dumps(CHAT)
PRETTY = json.dumps(CHAT, indent=2)
LINES = PRETTY.count("\n") + 1


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"\n{PRETTY}\n\n{PRETTY}\n", [2, LINES + 3]),
        (f"{PRETTY}{PRETTY}", [1, LINES]),
        (f"{ON_ONE_LINE}{ON_ONE_LINE} {ON_ONE_LINE}\n{PRETTY}", [1, 1, 1, 2]),
        (f"{ON_ONE_LINE}\n{PRETTY}\n{ON_ONE_LINE}", [1, 2, LINES + 2]),
        ("\ufeff" + PRETTY.replace("\n", "\r\n"), [1]),
        (json.dumps(CHAT, indent=0), [1]),
        (json.dumps(CHAT, indent="\t").replace("[\n", "[\n\n"), [1]),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_objects_over_several_lines_and_several_in_one_are_read(
    text: str, lines: list[int], name: str, tmp_path: Path
) -> None:
    assert lines_of(written(tmp_path / name, text)) == [(line, CHAT) for line in lines]


BROKEN = r"""
# Lines that broke off, of which the next is a row of its own.
'{"text": "a"\n{"text": "b"}\n' | [1] | {2: b}
'{"text": "a\n{"text": "b"}\n' | [1] | {2: b}
'{"x": [{"y": 1},\n{"text": "b"}\n{"text": "c"}' | [1] | {2: b, 3: c}
'{"text": "a"}\n{"text": "b"' | [2] | {1: a}
'{"text": "a"}\n{"x": [\n{"text": "b"}' | [2] | {1: a, 3: b}
'{"text"\n\n\n{"text": "b"}' | [1] | {4: b}
# Of an object over several lines that is not right nothing else is a row.
'{\n  "a": [\n    {"text": "inner"}\n    {"text": "inner"}\n  ]\n}\n{"text": "b"}\n' | [1] | {7: b}
'{\n  "text": "a",\n}\n{\n  "text": "b"\n}' | [1] | {4: b}
# Neither several objects nor one.
'{"text": "a"},\n{"text": "b"}' | [1] | {2: b}
'{"text": "a"} x\n[1]\n7 8\n' | [1, 2, 3, 3] | {}
"""


@pytest.mark.parametrize(("text", "broken", "rows"), cases(BROKEN))
def test_what_broke_is_told_by_its_line(
    text: str, broken: list[int], rows: dict[int, str], tmp_path: Path
) -> None:
    found = lines_of(written(tmp_path / "a.jsonl", text.replace("\\n", "\n")))
    assert [line for line, fields in found if isinstance(fields, Broken)] == broken
    whole = {line: fields for line, fields in found if not isinstance(fields, Broken)}
    assert whole == {line: {"text": words} for line, words in rows.items()}


def test_many_objects_over_lines_take_time_by_their_number(tmp_path: Path) -> None:
    rows = [{"text": f"a {n}", "list": list(range(40))} for n in range(3000)]
    path = written(tmp_path / "a.jsonl", "\n".join(json.dumps(row, indent=1) for row in rows))
    assert [fields for _, fields in lines_of(path)] == rows


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_list_on_many_lines_is_an_array(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, json.dumps([CHAT, CHAT], indent=1))
    assert lines_of(path) == [(1, CHAT), (2, CHAT)]


def test_a_list_of_texts_is_an_array_and_a_line_with_a_list_is_none(tmp_path: Path) -> None:
    dataset = lines_of(written(tmp_path / "a.json", '["a", "b"]'))
    assert dataset == [(1, {"text": "a"}), (2, {"text": "b"})]
    lines: list[Any] = lines_of(written(tmp_path / "a.jsonl", f"[1]\n{ON_ONE_LINE}\n"))
    assert lines[1] == (2, CHAT)


def test_one_object_that_is_too_large_to_be_read_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ARRAY_BYTES_MAX", 4096)
    text = json.dumps({"data": [{"text": "x" * 40}] * 200}, indent=1)
    with pytest.raises(RowsError, match="line 1: a JSON object of more than 0 MiB"):
        lines_of(written(tmp_path / "a.json", text))
