"""What is drawn with rich: grids, facts and sections, without secrets or control characters."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from qlora_sweep.search_spaces.redaction import shown

Fact = tuple[str, str]
"""What something is about, in a word or two, and what is said of it."""
PLAIN_WIDTH = 100
"""Columns of a pipe or a file."""


@dataclass(frozen=True)
class Shown:
    """Content whose every text is as it may be shown; colours and cursor moves stay."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            if segment.control:
                yield segment
            else:
                yield Segment(shown(segment.text), segment.style)


def rendered(content: RenderableType, *, is_terminal: bool, width: int = PLAIN_WIDTH) -> str:
    """Return content as text of so many columns: coloured for a terminal, or plain."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=width, highlight=False)
    with console.capture() as captured:
        # A command to copy may be wider than the terminal.
        console.print(Shown(content), crop=False)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def grid(headers: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a borderless table; a header that begins with ``>`` is that of a column of numbers."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        is_number = header.startswith(">")
        # Where it is narrow, words are folded; numbers and what a row is of are not.
        drawn.add_column(
            header.removeprefix(">"),
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number or not drawn.columns,
        )
    for row in rows:
        drawn.add_row(*row)
    return drawn


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, width: int | None = None) -> str:
    """Return a grid as plain text of so many columns; None for no limit."""
    # Shown before it is folded: a secret over two lines would not be recognised.
    cells: list[list[str | Text]] = []
    for row in rows:
        cells.append([Text(shown(cell)) for cell in row])
    return rendered(grid(header, cells), is_terminal=False, width=width or 10_000)


def facts(rows: Iterable[Fact]) -> Table:
    """Return what is said, each behind the word for what it is about."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for about, words in rows:
        table.add_row(about, Text(words))
    return table


def section(title: str, *content: RenderableType) -> Iterator[RenderableType]:
    """Yield a title and what is under it, indented."""
    yield Text(f"\n{title}", style="bold")
    parts: list[RenderableType] = []
    for part in content:
        # Of plain text rich would read markup.
        parts.append(Text(part) if isinstance(part, str) else part)
    yield Padding(Group(*parts), (0, 0, 0, 2))
