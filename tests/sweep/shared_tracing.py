"""Tracing children that several commands ask: each would start its own, which import torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from sweep.predict.memory.profile_store import TracingChildren


@contextmanager
def asked_of(children: TracingChildren) -> Iterator[None]:
    """Have commands in this process ask children that outlive them."""
    kept = SimpleNamespace(trace=children.trace, trace_all=children.trace_all, close=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        for asking in ("sweep.predict.memory.predictor", "sweep.terminal.plan.command"):
            patch.setattr(f"{asking}.TracingChildren", lambda **_: kept)
        yield
