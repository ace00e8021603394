"""Marks stand out three to one from the page, and text four and a half to one, in both themes."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import pytest

from reports import figures

CSS = (files("reports") / "templates" / "report.css").read_text(encoding="utf-8")


def _variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


def _themes() -> dict[str, dict[str, str]]:
    light, dark = (
        _variables(block) for block in re.findall(r":root \{([^}]*--ink[^}]*)\}", CSS)[:2]
    )
    return {"light": light, "dark": dark}


THEMES = _themes()
MARKS = {str(verdict): mark.colour for verdict, mark in figures.MARKS.items()} | {
    "front": figures.GREEN,
    "limit": figures.ORANGE,
    "winner": figures.AMBER,
    "faded": figures.FADED,
}


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_formula_is_the_standard_s() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize(("theme", "mark"), list(itertools.product(THEMES, MARKS)))
def test_a_mark_stands_out_from_the_page(theme: str, mark: str) -> None:
    assert contrast(MARKS[mark], THEMES[theme]["paper"]) >= 3.0


@pytest.mark.parametrize("theme", THEMES)
def test_text_can_be_read_on_the_page_and_on_panels(theme: str) -> None:
    colours = THEMES[theme]
    for letters, paper in itertools.product(("ink", "soft"), ("paper", "panel")):
        assert contrast(colours[letters], colours[paper]) >= 4.5, (letters, paper)
    assert contrast(colours["warn-ink"], colours["warn"]) >= 4.5
    assert contrast(colours["accent"], colours["paper"]) >= 3.0
    assert contrast(colours["edge"], colours["paper"]) >= 3.0


@pytest.mark.parametrize("theme", THEMES)
def test_letters_of_figures_can_be_read_on_the_page(theme: str) -> None:
    layout = figures.themes()[theme]["layout"]
    assert contrast(layout["font"]["color"], THEMES[theme]["paper"]) >= 4.5


def test_print_has_the_colours_of_the_light_theme() -> None:
    printed = _variables(CSS[CSS.index("@media print") :])
    assert printed.items() <= THEMES["light"].items()
    assert printed.keys() == THEMES["light"].keys()
