"""Tracing children that several commands ask: each would start its own, which import torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.predict.memory.profile_store import TracingChildren
from qlora_sweep.sweep.predict.memory.profiles import Structure


def trace(children: TracingChildren, model: ModelSpec, structure: Structure) -> dict[str, Any]:
    """Return the profile of one structure, or raise why it has none."""
    ((_, traced),) = children.trace_all(model, [structure])
    if isinstance(traced, dict):
        return traced
    raise traced


@contextmanager
def asked_of(children: TracingChildren) -> Iterator[None]:
    """Have commands in this process ask children that outlive them."""
    kept = SimpleNamespace(trace_all=children.trace_all, close=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        for asking in (
            "qlora_sweep.sweep.predict.memory.predictor",
            "qlora_sweep.sweep.terminal.exporting",
            "qlora_sweep.sweep.terminal.plan",
        ):
            patch.setattr(f"{asking}.TracingChildren", lambda **_: kept)
        yield
