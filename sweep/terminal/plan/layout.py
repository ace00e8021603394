"""How parts of a plan are laid out: sections, facts, tables, text for a terminal or a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sweep.terminal.drawing import Shown

Fact = tuple[str, str]
"""What something is about, in a word or two, and what is said of it."""
PLAIN_WIDTH = 100
"""Columns where the width is nobody's: a pipe or a file."""


def rendered(content: RenderableType, *, is_terminal: bool, width: int | None = None) -> str:
    """Return what ``content`` looks like: coloured and as wide as the terminal, or plain."""
    console = Console(
        file=io.StringIO(),
        force_terminal=is_terminal,
        width=width if is_terminal else PLAIN_WIDTH,
        highlight=False,
    )
    with console.capture() as captured:
        console.print(Shown(content))
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def section(title: str, *content: RenderableType) -> Iterator[RenderableType]:
    """Yield a title and what is under it, indented."""
    yield Text(f"\n{title}", style="bold")
    yield Padding(Group(*content), (0, 0, 0, 2))


def lines(texts: Iterable[str]) -> RenderableType:
    """Return texts under each other."""
    return Group(*map(Text, texts))


def empty_grid(*headers: str, right: Sequence[str] = ()) -> Table:
    """Return a borderless table without rows, some of its columns to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        is_number = header in right
        # Where it is narrow, words give way: half a number is none.
        table.add_column(header, justify="right" if is_number else "left", no_wrap=is_number)
    return table


def facts(rows: Iterable[Fact]) -> RenderableType:
    """Return what is said, each line behind the word for what it is about."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for about, words in rows:
        grid.add_row(about, Text(words))
    return grid
