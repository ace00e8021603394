"""A figure as a picture for slides: PNG or SVG by plotly's image engine, where that is."""

from __future__ import annotations

import importlib.util
import struct
import zlib
from html import escape
from pathlib import Path
from textwrap import wrap

import plotly.graph_objects as go

from qlora_sweep.reports.document import document_of
from qlora_sweep.reports.figures import themes
from qlora_sweep.reports.page import figures_of, sections, title_of
from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.costs import AskedWork
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, install_extra, listed
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.files import WRITTEN_BY, write_output

SUFFIXES = (".png", ".svg")
_PNG_HEADER_BYTES = 33
"""Signature and first chunk."""


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
    drawn = picture_of(snapshot, figure or "front")
    if importlib.util.find_spec("kaleido") is None:
        raise EnvironmentFault(
            f"a picture needs plotly's image engine: {install_extra('images')}. "
            "It draws with the Chrome or Chromium that is installed."
        )
    suffix = path.suffix.lower()
    scale = 1
    if suffix == ".png":
        scale = 2
    try:
        data = drawn.to_image(format=suffix[1:], scale=scale)
    except (RuntimeError, ValueError, OSError) as error:
        raise EnvironmentFault(f"plotly's image engine failed: {error}") from error
    # It says who wrote it, so that it may be replaced.
    if data.startswith(b"<svg"):
        data = data.replace(b">", f"><!-- {WRITTEN_BY} -->".encode(), 1)
    else:
        text = b"tEXtSoftware\0qlora-sweep"
        chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
        data = data[:_PNG_HEADER_BYTES] + chunk + data[_PNG_HEADER_BYTES:]
    write_output(path, data)


def picture_of(snapshot: StudySnapshot, name: str) -> go.Figure:
    """Return a figure of a study's report in the light theme, with what it is of as its title.

    Raises:
        InputError: there is none of that name.
    """
    made = sections(document_of(view_of(snapshot)), AskedWork())
    figures = {figure.id: figure for figure in figures_of(made)}
    if name not in figures:
        names = "none"
        if figures:
            names = listed(list(figures))
        raise InputError(f"figure '{name}' is not in this study's report; there are: {names}")
    lines = list(map(escape, wrap(title_of(snapshot), 90)))
    for line in wrap(f"{figures[name].title} · study {snapshot.name}", 120):
        lines.append(f"<sup>{escape(line)}</sup>")
    above = 24 * len(lines) + 30
    picture = go.Figure(figures[name].figure)
    top = picture.layout.margin.t
    height = picture.layout.height + above
    return picture.update_layout(
        template=themes()["light"],
        title={
            "text": "<br>".join(lines),
            "x": 0.02,
            "y": 1 - 24 / height,
            "yanchor": "top",
        },
        width=1100,
        height=height,
        margin={"t": top + above},
        paper_bgcolor="#ffffff",
    )
