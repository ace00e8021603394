"""What is read from a worker is a message, or says why it is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from storage.records import Measured
from sweep.running.wire import Finished, UnreadableError, read_line, to_line, worker_message_adapter
from tests.sweep.simulated_device import a_measurement

CONFIG = TrialConfig()
DONE = Finished(
    run_id="1", config=CONFIG, outcome=Measured(measurement=a_measurement(CONFIG)), retire=None
)


def test_a_message_comes_back_as_it_was_sent() -> None:
    assert read_line(to_line(DONE), worker_message_adapter) == DONE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainable_parameters", 10**30),
        ("peak_allocated_bytes", 10**400),
        ("tokens_per_second", float("inf")),
        ("tokens_per_second", "NaN"),
    ],
)
def test_a_number_that_nothing_measures_is_refused(key: str, value: Any) -> None:
    said = json.loads(to_line(DONE))
    said["outcome"]["measurement"][key] = value
    with pytest.raises(UnreadableError, match=key):
        read_line(json.dumps(said).encode(), worker_message_adapter)


PROGRESS = b'{"kind":"progress","phase":"measure","step":'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (PROGRESS[:-7] + b'"tokens_per_second":NaN}', "finite"),
        (PROGRESS[:-7] + b'"tokens_per_second":1e999}', "finite"),
        (PROGRESS + b"1" + b"0" * 300 + b"}", "step: Input should be less than"),
        (PROGRESS + b"9" * 100_000 + b"}", "progress"),
        (PROGRESS + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}", "progress"),
        (b'{"kind":"progress","phase":"\xff\xfe"}', "utf-8"),
        (b"\0" * 1000, "no JSON"),
        (b"[1]", "a message"),
    ],
)
def test_what_is_no_message_is_told_in_a_few_printable_words(line: bytes, words: str) -> None:
    with pytest.raises(UnreadableError, match=words) as refused:
        read_line(line, worker_message_adapter)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500
