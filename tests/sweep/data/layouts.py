"""How rows of each kind are read whose columns have the names of its fields."""

from __future__ import annotations

from qlora_sweep.sweep.data.kinds import KINDS, Layout

_OPTIONAL = ("prompt", "input", "system", "history", "tools", "chat_template_kwargs")


def layout_of(kind: str) -> Layout:
    return Layout(kind, {name: name for name in (*_OPTIONAL, *KINDS[kind])})
