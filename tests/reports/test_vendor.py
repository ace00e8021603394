"""The page's copy of plotly.js is the bundle of flat figures of the version that is tested."""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs_version

VENDOR = files("reports") / "vendor"
PINNED = dict(
    line.split("==")
    for line in Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    if "==" in line
)


def _vendored() -> str:
    head = (VENDOR / "plotly-cartesian.min.js").read_text(encoding="utf-8")[:400]
    found = re.search(r"plotly\.js \(cartesian - minified\) v([\d.]+)", head)
    assert found is not None
    return found[1]


@pytest.mark.skipif(version("plotly") != PINNED["plotly"], reason="another plotly than the pinned")
def test_it_is_the_version_that_the_pinned_plotly_draws_with() -> None:
    assert _vendored() == get_plotlyjs_version()


def test_it_reads_the_figures_that_the_installed_plotly_makes() -> None:
    assert _vendored().split(".")[0] == get_plotlyjs_version().split(".")[0]


def test_its_licence_is_beside_it() -> None:
    assert "MIT License" in (VENDOR / "plotly-LICENSE").read_text(encoding="utf-8")
    assert (VENDOR / "plotly-cartesian.min.js").stat().st_size < 1_600_000  # type: ignore[attr-defined]
