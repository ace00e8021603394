"""Tracing children that several commands ask: each would start its own, which import torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    with pytest.MonkeyPatch.context() as patch:
        ask = children.trace_all
        patch.setattr(TracingChildren, "trace_all", lambda _, *question: ask(*question))
        yield
