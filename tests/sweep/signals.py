"""Signals that stop a command, handled in tests as is said, whoever started the suite."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qlora_sweep.sweep.processes import STOP_SIGNALS


@contextmanager
def handled_by(handler: Any) -> Iterator[dict[signal.Signals, Any]]:
    """Have one handler for all of them; yields it for each."""
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield dict.fromkeys(STOP_SIGNALS, handler)
    finally:
        for number, known in before.items():
            signal.signal(number, known)
