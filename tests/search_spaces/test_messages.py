"""Messages quote what was typed, never Python's objects or the names of its classes."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import InputError, quote, words_of
from search_spaces.loading import parse_space

ROOT = Path(__file__).parents[2]
PYTHON = re.compile(r"\b(None|True|False|datetime|Error|Exception)\b|Errno|<.* object|\bfunction\b")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (datetime.date(2026, 1, 1), "2026-01-01"),
        (datetime.datetime(2026, 1, 1, 12, 30), "2026-01-01 12:30:00"),
        ("soon", "'soon'"),
        ("two\nlines", r"'two\nlines'"),
        (1e-4, "0.0001"),
        ([1, None, "a"], "[1, null, 'a']"),
        ({"low": 1, "log": False}, "{low: 1, log: false}"),
        ((1, 2), "[1, 2]"),
        (b"\x00\x01", "2 bytes of binary data"),
        ({datetime.date(2026, 1, 1)}, "[2026-01-01]"),
        pytest.param(10**5000, "a number too long to show", id="huge"),
    ],
)
def test_a_value_is_quoted_as_it_was_typed(value: object, text: str) -> None:
    assert quote(value) == text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (KeyError("foo"), "'foo' is missing"),
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied"),
        (OSError(24, "Too many open files"), "Too many open files"),
        (ValueError("not so\nat all"), "not so"),
        (MemoryError(), "memory error"),
        (NotImplementedError(), "not implemented error"),
    ],
)
def test_an_exception_is_told_by_what_it_says(error: Exception, words: str) -> None:
    assert words_of(error) == words


SMALL = "dimensions: {lora_rank: [8, 16]}\n"


@pytest.mark.parametrize(
    "text",
    [
        "gpu: 2026-01-01\n" + SMALL,
        "gpu: null\n" + SMALL,
        "name: true\n" + SMALL,
        "trials: 2026-01-01\n" + SMALL,
        "trials: null\n" + SMALL,
        "trials: [1]\n" + SMALL,
        "budget_gib: yes\n" + SMALL,
        "seed: 2026-01-01 10:00:00\n" + SMALL,
        "objectives: [null]\n" + SMALL,
        "objectives: {a: true}\n" + SMALL,
        "sampler: off\n" + SMALL,
        "steps: 2026-01-01\n" + SMALL,
        "steps: {warmup_min: null}\n" + SMALL,
        "time_budget: null\n" + SMALL,
        "time_budget: 2026-01-01\n" + SMALL,
        "fixed: {target_modules: null}\n" + SMALL,
        "fixed: {compile: 2026-01-01}\n" + SMALL,
        "fixed: {kernels: !!binary aGk=}\n" + SMALL,
        "fixed: {lora_alpha: true}\n" + SMALL,
        "fixed: [null]\n" + SMALL,
        "baseline: 2026-01-01\n" + SMALL,
        "dimensions: {seq_len: 2026-01-01}\n",
        "dimensions: {seq_len: [null]}\n",
        "dimensions: {seq_len: {low: null, high: true}}\n",
        "dimensions: {seq_len: {choices: null}}\n",
        "dimensions: {kernels: {low: 1, high: 2026-01-01}}\n",
        "dimensions: {2026-01-01: [1]}\n",
        "? [a]\n: 1\n",
        "- null\n",
    ],
)
def test_no_python_is_in_a_message_about_a_space(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_space(text, label="mine.yaml")
    assert not PYTHON.search(str(caught.value)), caught.value


def test_no_message_is_made_of_a_class_name() -> None:
    """By hand is where it comes back: `words_of` says what an exception says."""
    offending: list[Any] = []
    for package in ("search_spaces", "storage", "reports", "sweep"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            offending += [
                (path.name, hit) for hit in re.findall(r"\{type\(e\w*\)\.__name__\}", text)
            ]
    assert offending == [], "use search_spaces.errors.words_of"
