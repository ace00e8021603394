"""Modules that are imported with the first use of them, so that collecting tests imports none.

torch, transformers and what stands on them take seconds, which every worker of a run would pay.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class _Lazy:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("__", "pytest", "_pytest")):
            # What pytest asks of all that stands in a test module.
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


def lazily(name: str) -> Any:
    """Return what stands for a module, and imports it once something of it is asked for."""
    return _Lazy(name)
