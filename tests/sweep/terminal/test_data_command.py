"""Behaviour of `sweep data`, from what is typed to what is printed."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.data.prepared_dataset import DatasetRequest
from tests.sweep.typed import Sweep

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "dataset.jsonl"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with texts; what was prepared of them once stays for the next test."""
    home = tmp_path_factory.mktemp("home")
    lines = EXAMPLE.read_bytes() + b'{"messages": []}\n{"messages": "\xff"}\n'
    (home / "dataset.jsonl").write_bytes(lines)
    (home / "empty").mkdir()
    os.mkfifo(home / "pipe.jsonl")
    return home


@pytest.fixture(autouse=True)
def home(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(kept))
    monkeypatch.chdir(kept)


def document(sweep: Sweep, *words: str) -> dict[str, Any]:
    said = sweep("data", "dataset.jsonl", "--model", "demo", "--json", *words)
    assert said.code == 0
    return dict(json.loads(said.out))


def test_json_holds_what_the_interface_promises(sweep: Sweep) -> None:
    found = document(sweep)
    assert (found["rows"], found["kind"], found["broken_rows"]) == (200, "messages", 2)
    first, second = found["broken"]
    assert (first["file"], first["line"]) == ("dataset.jsonl", 201)
    assert "not UTF-8" in second["reason"]
    assert found["tokens"] - found["loss_tokens"] == 200
    assert list(found["quantiles"]) == ["p50", "p90", "p95", "p99", "max"]
    assert sum(bin["rows"] for bin in found["histogram"]) == 200
    shares = ("rows_cut", "tokens_cut", "padding_waste", "grouped_waste", "packed_waste")
    for length in found["lengths"]:
        assert all(0 <= length[share] <= 1 for share in shares)
        assert length["is_worth_searching"] == (length["seq_len"] in found["worthwhile_lengths"])
    assert found["lengths"][-1]["seq_len"] == found["max_positions"] == 1024
    assert found["worthwhile_lengths"] == [256, 320, 384, 448]
    refused = sweep("data", "dataset.jsonl", "--model", "demo", "--method", "dpo")
    assert (refused.code, "dpo" in refused.err) == (2, True)


def test_padding_wastes_more_in_larger_micro_batches(sweep: Sweep) -> None:
    few, many = (document(sweep, "--set", f"micro_batch_size={size}") for size in ("1", "16"))
    assert (few["micro_batch_size"], many["micro_batch_size"]) == (1, 16)
    for one, other in zip(few["lengths"], many["lengths"], strict=True):
        assert one["padding_waste"] == 0 < other["padding_waste"]
        assert one["packed_waste"] == other["packed_waste"]


def test_of_pairs_a_micro_batch_counts_pairs_and_nothing_is_packed(
    sweep: Sweep, kept: Path
) -> None:
    pair = {"prompt": "Why? ", "chosen": "because it is so, and was before", "rejected": "no"}
    lines = [json.dumps({**pair, "prompt": f"Why {i}? "}) for i in range(10)]
    (kept / "pairs.jsonl").write_text("\n".join(lines), "utf-8")
    words = ("data", "pairs.jsonl", "--model", "demo", "--set", "micro_batch_size=1")
    for length in json.loads(sweep(*words, "--json").out)["lengths"]:
        assert length["padding_waste"] > 0.2
        assert length["packed_waste"] is None
    assert "1 random pairs" in " ".join(sweep(*words).out.split())


def test_a_person_sees_kind_lengths_and_what_is_worth_searching(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    from qlora_sweep.sweep.terminal import dataset as command
    from qlora_sweep.sweep.terminal import driving

    code, out, err = sweep("data", "dataset.jsonl", "--model", "demo")
    assert code == 0
    assert "200 examples, and 2 broken: chats" in out
    assert "seq_len: [256, 320, 384, 448]" in out
    assert len(re.findall(r"^ *\d+–\d+ +\d+  [█#]+$", out, flags=re.MULTILINE)) == 12
    assert "2 of 202 rows" in err
    # Run and plan say it too.
    quiet = partial(command.prepared, progress=lambda _: lambda _done, _of: None)
    for read in (driving.read_dataset, quiet):
        dataset = read(DatasetRequest("dataset.jsonl", load_model_spec("demo")))
        assert dataset.summary.broken == 2
        assert "line 201: messages is empty" in capsys.readouterr().err


WRONG = """
none.jsonl --model demo                                | 'none.jsonl': no such file or directory
empty --model demo                                     | no file in this directory ends in .jsonl
pipe.jsonl --model demo                                | is a pipe or a device, not a file
dataset.jsonl                                          | --model or --set data.tokenizer=NAME
dataset.jsonl --model a10                              | unknown model 'a10'
dataset.jsonl --model mistral-7b-v0.3                  | --model or --set data.tokenizer=NAME
dataset.jsonl --set data.tokenizer=                    | write it as data.tokenizer=VALUE
dataset.jsonl --set data.tokenizer=empty               | 'empty' has no tokenizer
dataset.jsonl --model demo --set data.format=chat      | --set data.format must be one of
dataset.jsonl --model demo --set micro_batch_size=0    | must be at least 1, got 0
"""


@pytest.mark.parametrize(
    ("words", "said"), [line.split(" | ") for line in WRONG.strip().splitlines()]
)
def test_what_is_not_right_is_one_message(sweep: Sweep, words: str, said: str) -> None:
    code, out, err = sweep("data", *words.split())
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
