"""Behaviour of `sweep data`, from what is typed to what is printed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from search_spaces.models import load_model_spec
from sweep.cli import main
from sweep.data.texts import TextsRequest

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "dataset.jsonl"
Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def typed(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """Runs `sweep data`; texts that were prepared once stay for the next test."""
    monkeypatch.setenv("SWEEP_HOME", str(home))
    monkeypatch.chdir(home)
    lines = EXAMPLE.read_bytes() + b'{"messages": []}\n{"messages": "\xff"}\n'
    (home / "dataset.jsonl").write_bytes(lines)

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["data", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def document(typed: Typed, *words: str) -> dict[str, Any]:
    code, out, _ = typed("dataset.jsonl", "--model", "demo", "--json", *words)
    assert code == 0
    return dict(json.loads(out))


def test_json_holds_what_the_interface_promises(typed: Typed) -> None:
    found = document(typed)
    assert found["rows"] == 200
    assert found["kind"] == "messages"
    assert found["broken"] == [
        {"file": "dataset.jsonl", "line": 201, "reason": "messages is empty"},
        {"file": "dataset.jsonl", "line": 202, "reason": "not UTF-8: byte 15 of the line is wrong"},
    ]
    assert found["broken_rows"] == 2
    assert found["tokens"] - found["loss_tokens"] == 200
    assert list(found["quantiles"]) == ["p50", "p90", "p95", "p99", "max"]
    assert sum(bin["rows"] for bin in found["histogram"]) == 200
    shares = ("rows_cut", "tokens_cut", "padding_waste", "grouped_waste", "packed_waste")
    for length in found["lengths"]:
        assert all(0 <= length[share] <= 1 for share in shares)
        assert length["is_worth_searching"] == (length["seq_len"] in found["worthwhile_lengths"])
    assert [length["seq_len"] for length in found["lengths"]][-1] == found["max_positions"] == 1024
    assert found["worthwhile_lengths"] == [256, 320, 384, 448]


def test_padding_wastes_more_in_larger_micro_batches(typed: Typed) -> None:
    few, many = (document(typed, "--set", f"micro_batch_size={size}") for size in ("1", "16"))
    assert (few["micro_batch_size"], many["micro_batch_size"]) == (1, 16)
    for one, other in zip(few["lengths"], many["lengths"], strict=True):
        assert one["padding_waste"] == 0 < other["padding_waste"]
        assert one["packed_waste"] == other["packed_waste"]


def test_a_person_sees_kind_lengths_and_what_is_worth_searching(typed: Typed) -> None:
    code, out, err = typed("dataset.jsonl", "--model", "demo")
    assert code == 0
    assert "200 examples, and 2 broken: chats" in out
    assert "(messages, recognised by its columns)" in out
    assert "seq_len: [256, 320, 384, 448]" in out
    assert len(re.findall(r"^ *\d+–\d+ +\d+  [█#]+$", out, flags=re.MULTILINE)) == 12
    # A slow machine says before how long it has been reading.
    assert (
        "warning: dataset.jsonl: 2 of 202 rows are broken and left out: "
        "line 201: messages is empty; line 202: not UTF-8"
    ) in err


def test_run_and_plan_say_which_rows_are_left_out_too(
    typed: Typed, capsys: pytest.CaptureFixture[str]
) -> None:
    from sweep.terminal import dataset as command
    from sweep.terminal import driving

    document(typed)
    quiet = partial(command.prepared, progress=lambda _: lambda _done, _of: None)
    for read in (driving.read_texts, quiet):
        texts = read(TextsRequest("dataset.jsonl", load_model_spec("demo")))
        assert texts.summary.broken == 2
        assert "line 201: messages is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["none.jsonl", "--model", "demo"], 2, "'none.jsonl': no such file or directory"),
        (["empty", "--model", "demo"], 2, "no file in this directory ends in .jsonl"),
        (["pipe.jsonl", "--model", "demo"], 2, "is a pipe or a device, not a file"),
        (["dataset.jsonl"], 2, "--model or --set data.tokenizer=NAME"),
        (["dataset.jsonl", "--model", "a10"], 2, "unknown model 'a10'"),
        (
            ["dataset.jsonl", "--model", "mistral-7b-v0.3"],
            2,
            "--model or --set data.tokenizer=NAME",
        ),
        (["dataset.jsonl", "--set", "data.tokenizer="], 2, "write it as data.tokenizer=VALUE"),
        (["dataset.jsonl", "--set", "data.tokenizer=empty"], 2, "'empty' has no tokenizer"),
        (
            ["dataset.jsonl", "--model", "demo", "--set", "data.format=chat"],
            2,
            "--set data.format must be one of",
        ),
        (
            ["dataset.jsonl", "--model", "demo", "--set", "micro_batch_size=0"],
            2,
            "must be at least 1, got 0",
        ),
        (
            ["dataset.jsonl", "--model", "demo", "--set", "micro_batch_size=x"],
            2,
            "must be a whole number",
        ),
    ],
)
def test_what_is_not_right_is_one_message(
    typed: Typed, home: Path, words: list[str], code: int, said: str
) -> None:
    (home / "empty").mkdir(exist_ok=True)
    if not (home / "pipe.jsonl").exists():
        os.mkfifo(home / "pipe.jsonl")
    ended, out, err = typed(*words)
    assert (ended, out) == (code, "")
    assert said in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
