"""One shipped model for all of its type."""

from __future__ import annotations

from qlora_sweep.search_spaces.linears import is_tied
from qlora_sweep.search_spaces.models import ModelSpec, shipped_models


def one_of_each_type() -> list[ModelSpec]:
    """The shallowest shipped model of each type, with a head of its own and without."""
    found = {}
    for spec in sorted(shipped_models(), key=lambda spec: spec.hidden_layers, reverse=True):
        found[spec.model_type, is_tied(spec)] = spec
    return list(found.values())
