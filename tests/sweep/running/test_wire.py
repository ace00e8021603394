"""What is read from a worker is a message, or says why it is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from storage.records import Measured
from sweep.running.wire import Finished, UnreadableError, read_line, to_line, worker_message_adapter
from tests.sweep.export.studies import a_measurement

DONE = Finished(
    run_id="1", config=TrialConfig(), outcome=Measured(measurement=a_measurement()), retire=None
)


def test_a_message_comes_back_as_it_was_sent() -> None:
    assert read_line(to_line(DONE), worker_message_adapter) == DONE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainable_parameters", 10**30),
        ("peak_allocated_bytes", 10**400),
        ("tokens_per_second", float("inf")),
        ("final_loss", float("nan")),
        ("tokens_per_second", "NaN"),
    ],
)
def test_a_number_that_nothing_measures_is_refused(key: str, value: Any) -> None:
    said = json.loads(to_line(DONE))
    said["outcome"]["measurement"][key] = value
    with pytest.raises(UnreadableError, match=key):
        read_line(json.dumps(said).encode(), worker_message_adapter)
