"""Messages quote what was typed, never Python's objects or the names of its classes."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

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


NO_SPACES = """\
gpu: 2026-01-01
trials: null
seed: 2026-01-01 10:00:00
objectives: {a: true}
time_budget: 2026-01-01
fixed: {target_modules: null}
fixed: {kernels: !!binary aGk=}
fixed: [null]
dimensions: {seq_len: {low: null, high: true}}
dimensions: {kernels: {low: 1, high: 2026-01-01}}
dimensions: {2026-01-01: [1]}
- null
"""


@pytest.mark.parametrize("text", NO_SPACES.splitlines())
def test_no_python_is_in_a_message_about_a_space(text: str) -> None:
    small = "" if text[0] in "d-" else "\ndimensions: {lora_rank: [8, 16]}"
    with pytest.raises(InputError) as caught:
        parse_space(text + small, label="mine.yaml")
    assert not PYTHON.search(str(caught.value)), caught.value
