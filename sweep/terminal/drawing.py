"""Owns that what is drawn with rich shows no secret and nothing that works unseen.

Knows nothing of what is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from search_spaces.redaction import shown


@dataclass(frozen=True)
class Shown:
    """Content whose every text is as it may be shown; colours and the cursor's moves stay."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            text, style, control = segment
            yield segment if control else Segment(shown(text), style)
