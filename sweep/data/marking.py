"""A chat template that marks the assistant's turns, made of one that does not.

TRL learns from the assistant's turns alone only where the template marks them, and has marked ones
of its own for some models.
"""

from __future__ import annotations

from importlib.resources import files

_OWN = "THE TEMPLATE"
"""Where in ``marked.jinja`` the model's template stands."""


def marked(template: str) -> str:
    """Return a template that renders the same and marks the assistant's turns.

    A turn is marked from where the template's prompt for an answer ends to what closes it. One that
    is rendered otherwise once others follow is marked as far as it is rendered the same: a turn
    whose thoughts are then left out is not marked at all.

    Args:
        template: a chat template in Jinja, without marks.
    """
    around = (files("qlora_sweep.sweep.data") / "marked.jinja").read_text(encoding="utf-8")
    # Jinja drops a line end at the end of a template.
    return around.replace(_OWN, template.removesuffix("\n"))
