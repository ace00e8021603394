"""A figure as a picture for slides: PNG or SVG by plotly's image engine, where that is.

The picture is the page's figure in its light theme, with a title that says what it is of.
"""

from __future__ import annotations

import importlib.util
import struct
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from reports.document import document_of, title_of
from reports.figures.figure import PageFigure, resolved
from reports.figures.style import themes
from reports.page import figures_of
from search_spaces.errors import EnvironmentFault, InputError, install_extra, listed
from storage.definition import StudySnapshot
from storage.files import WRITTEN_BY, write_output

SUFFIXES = (".png", ".svg")
FRONT = "front-figure"
_PIXELS = 1100
_PNG_HEADER_BYTES = 33
"""Signature and first chunk."""
_TITLE_LETTERS, _WORDS_LETTERS = 80, 140
"""What one line of a title, and of what stands below it or below the figure, has room for."""
_TITLE_PIXELS, _LINE_PIXELS = 28, 18


def write_image(snapshot: StudySnapshot, path: Path, *, figure: str | None = None) -> None:
    """Write a figure of a study's report as a picture, whole or not at all.

    Args:
        snapshot: the study.
        path: ends in ``.png`` or ``.svg``.
        figure: identifier of the figure; the front where nothing is said.

    Raises:
        InputError: the study's report has no such figure.
        EnvironmentFault: the image engine is not installed, finds no browser, or the file cannot be
            written.
    """
    drawn = picture_of(snapshot, figure or FRONT)
    if importlib.util.find_spec("kaleido") is None:
        raise EnvironmentFault(
            f"a picture needs plotly's image engine: {install_extra('images')}. "
            "It draws with the Chrome or Chromium that is installed."
        )
    suffix = path.suffix.lower()
    try:
        data = drawn.to_image(format=suffix[1:], scale=2 if suffix == ".png" else 1)
    except (RuntimeError, ValueError, OSError) as error:
        raise EnvironmentFault(f"plotly's image engine failed: {error}") from error
    write_output(path, _marked(data))


def _marked(data: bytes) -> bytes:
    """Return a picture that says who wrote it, so that it may be replaced."""
    if data.startswith(b"<svg"):
        return data.replace(b">", f"><!-- {WRITTEN_BY} -->".encode(), 1)
    text = b"tEXtSoftware\0qlora-sweep"
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    return data[:_PNG_HEADER_BYTES] + chunk + data[_PNG_HEADER_BYTES:]


def picture_of(snapshot: StudySnapshot, name: str) -> go.Figure:
    """Return a figure of a study's report, complete and in the light theme.

    Raises:
        InputError: there is none of that name.
    """
    figure = _named(figures_of(snapshot), name)
    picture = go.Figure(resolved(figure.plain, document_of(snapshot)["trials"]))
    title = wrap(title_of(snapshot), _TITLE_LETTERS)
    about = wrap(f"{figure.title} · study {snapshot.name}", _WORDS_LETTERS)
    key = [part for mark in figure.names for part in wrap(mark.words, _WORDS_LETTERS)]
    top, bottom, height = picture.layout.margin.t, picture.layout.margin.b, picture.layout.height
    above = _TITLE_PIXELS * (len(title) + 0.5) + _LINE_PIXELS * len(about)
    below = _LINE_PIXELS * (len(key) + 0.5)
    picture.update_layout(
        template=themes()["light"],
        width=_PIXELS,
        height=height + above + below,
        margin={"t": top + above, "b": bottom + below},
        paper_bgcolor="#ffffff",
    )
    edge: dict[str, Any] = {"x": 0, "xref": "paper", "yref": "paper", "xanchor": "left"}
    edge |= {"showarrow": False, "align": "left"}
    over = {**edge, "y": 1, "yanchor": "bottom"}
    picture.add_annotation(
        text=_markup(title),
        yshift=top + _LINE_PIXELS * len(about) + 4,
        font={"size": 20},
        **over,
    )
    picture.add_annotation(text=_markup(about), yshift=top, **over)
    picture.add_annotation(text=_markup(key), y=0, yanchor="top", yshift=-bottom, **edge)
    for mark in figure.names:
        beside = {"xanchor": "right", "yanchor": "bottom", "xshift": -8, "yshift": 2}
        picture.add_annotation(
            x=mark.x, y=mark.y, text=escape(mark.name), showarrow=False, **beside
        )
    return picture


def _markup(lines: Sequence[str]) -> str:
    """Return lines as plotly reads them."""
    return "<br>".join(map(escape, lines))


def _named(figures: Sequence[PageFigure], name: str) -> PageFigure:
    known = {figure.id: figure for figure in figures}
    # The front is called so on the command line too, whatever its element on the page is called.
    found = known.get(name) or known.get(f"{name}-figure")
    if found is None:
        names = listed([id.removesuffix("-figure") for id in known]) if known else "none"
        raise InputError(f"figure '{name}' is not in this study's report; there are: {names}")
    return found
