"""The report is one file that stands alone, trusts no text it is given, and is whole or absent."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs_version

from qlora_sweep.reports import figures
from qlora_sweep.reports.document import document_of
from qlora_sweep.reports.effects import effects_of
from qlora_sweep.reports.page import render, write_page
from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.records import Lost, PredictedOutOfMemory, TrialRecord
from tests.reports.synthetic import (
    HOSTILE,
    definition,
    fits,
    hostile_study,
    one_of_each,
    plausible_study,
    record,
    snapshot,
)
from tests.storage.builders import confirmed

LOADING = {"src", "href", "srcset", "data", "action", "formaction", "poster", "background"}


class Page(HTMLParser):
    """What a browser would make of a page: its elements, its text, and each script's text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        match self._inside:
            case "script":
                self.scripts[-1] += data
            case "style":
                self.styles.append(data)
            case _:
                self.text.append(data)

    @property
    def visible(self) -> str:
        """All text outside scripts and styles, on one line."""
        return " ".join(" ".join(self.text).split())


def test_hostile_text_is_no_markup_and_comes_back_as_it_was() -> None:
    harmless, hostile = Page(render(snapshot(one_of_each()))), Page(render(hostile_study()))
    assert {tag for tag, _ in hostile.elements} <= {tag for tag, _ in harmless.elements} - {"img"}
    names = {name for _, attributes in hostile.elements for name in attributes}
    assert not any(name.startswith("on") for name in names)
    assert HOSTILE.rstrip("\u2028") in "".join(hostile.text)
    data, plotly, *own = hostile.scripts
    assert not {"<", ">"} & set(data)
    assert len(plotly) > 1_000_000
    assert any("Plotly.react" in script for script in own)
    # Nor is it any to plotly.
    figures = json.loads(data)["figures"]
    assert {"front", "timeline"} <= set(figures)
    texts = re.findall(r"<[^>]*>", json.dumps(list(figures.values()), ensure_ascii=False))
    assert {text.lower() for text in texts} <= {"<br>", "<b>", "</b>", "<extra>", "</extra>"}


@pytest.mark.parametrize("study", [plausible_study, hostile_study])
def test_nothing_is_loaded_from_anywhere(study: Callable[[], StudySnapshot]) -> None:
    page = Page(render(study()))
    assert not any(LOADING & set(attributes) for _, attributes in page.elements)
    assert not any(tag in {"link", "iframe", "object", "embed"} for tag, _ in page.elements)
    assert not any("@import" in style or "url(" in style for style in page.styles)
    (policy,) = [
        attributes["content"] or ""
        for tag, attributes in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == len(page.scripts) - 1
    assert "connect-src" not in policy
    assert "script-src 'unsafe" not in policy


def test_a_study_of_mebibytes_has_no_size_in_gibibytes_on_its_page() -> None:
    trials = []
    for n, mib in enumerate((16, 20, 29, 40)):
        config, peak = TrialConfig(micro_batch_size=4 * n + 4), mib * 2**20
        small = {"peak_reserved_bytes": 3 * peak, "peak_device_bytes": None}
        trials.append(fits(n, 900.0 + n, config, peak_allocated_bytes=peak, **small))
    larger = TrialConfig(micro_batch_size=32)
    trials.append(record(4, PredictedOutOfMemory(predicted_bytes=150 * 2**20), larger))
    about = definition(gpu="cpu", device="cpu", budget_bytes=2**26)
    page = Page(render(snapshot(trials, definition=about)))
    assert "GiB" not in page.visible
    assert "GiB" not in page.scripts[0]
    assert "needs 150.00 MiB" in page.scripts[0]


def test_a_baseline_that_the_confirmation_alone_measured_is_drawn_beside_the_trials() -> None:
    fast = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)
    base, won = fits(2, 8_000.0), fits(1, 16_800.0, fast)
    runs = confirmed(won, base)
    runs = tuple(r.model_copy(update={"confirms": {1: 1}.get(r.confirms)}) for r in runs)
    page = Page(render(snapshot([won], confirmations=runs)))
    assert "2.1x" in page.visible
    assert '"baseline"' in page.scripts[0]
    # It counts in the table's filters and in what the settings do, too.
    assert "fits (2)" in page.visible
    study = snapshot([won], confirmations=runs)
    effects = effects_of(document_of(view_of(study)))
    assert effects is not None


def test_the_answer_comes_first_and_warnings_before_it() -> None:
    fast = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)
    trials = (fits(0, 8_000.0), fits(1, 16_800.0, fast, peak_allocated_bytes=20 * GIB))
    warnings = ("run `sweep confirm a10 <x>` again",)
    study = snapshot(
        trials, confirmations=confirmed(*trials), warnings=warnings, holder="host:1", name="mine"
    )
    html = render(study)
    assert "<title>Mistral-7B-v0.3 on an A10: 2 trials</title>" in html
    assert "run <code>sweep confirm a10 &lt;x&gt;</code> again" in html
    text = Page(html).visible
    assert "`" not in text
    opening = text[: text.index("The configuration")]
    for said in (
        *("study mine", "The study is running", "sweep confirm a10 <x>", "trial 1", "2.1x"),
        *("16,800 tokens/s measured on NVIDIA H200", "confirmed (2 runs)", "2.07–2.13x"),
        *("20.00 GiB of 21.50 GiB (93 %)", "the fit is real; where it says measured, the speed"),
    ):
        assert said in opening
    assert '"micro_batch_size": 10' in text
    assert "sweep best mine --json" in text
    itself = snapshot([fits(0, 8_000.0)], definition=definition(emulated_on=None))
    assert "the fit is real" not in Page(render(itself)).visible


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ((), "No trial has finished yet."),
        (one_of_each()[2:5], "Nothing that was tried was measured to fit in 21.50 GiB."),
        (one_of_each()[1:2], "Nothing that was tried was measured to fit in 21.50 GiB."),
        ((fits(0, 8_000.0),), "the baseline itself"),
        ((record(0, Lost()),), "No trial has come to a conclusion yet"),
    ],
    ids=["empty", "all out of memory", "only slow", "one", "interrupted"],
)
def test_any_study_has_a_report(records: Sequence[TrialRecord], said: str) -> None:
    page = Page(render(snapshot(records)))
    assert said in page.visible
    assert "NaN" not in page.scripts[0]


def test_a_report_is_written_where_no_directory_is_and_replaces_the_one_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / "runs" / "demo" / "report.html"
    write_page(render(snapshot()), path)
    write_page(render(snapshot([fits(0, 8_000.0)], name="ünï\ud800")), path)
    assert r"ünï\ud800" in path.read_text(encoding="utf-8")
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_written_is_the_environments_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    (tmp_path / "report.html").mkdir()
    for path in (tmp_path / "file" / "report.html", tmp_path / "report.html"):
        with pytest.raises(EnvironmentFault, match=r"cannot write the report .*report\.html"):
            write_page(render(snapshot()), path)
    assert sorted(os.listdir(tmp_path)) == ["file", "report.html"]


# How much work a page is


def calls(action: Callable[[], object]) -> int:
    """Return how many functions were called meanwhile, Python's own included."""
    known = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal known
        known += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return known


@pytest.mark.parametrize("made", [view_of, render])
def test_twice_the_trials_take_at_most_a_little_more_than_twice_the_work(
    made: Callable[[StudySnapshot], object],
) -> None:
    made(plausible_study(trials=20))  # what is imported and read once is no work of a trial's
    taken = []
    for trials in (75, 150):
        study = plausible_study(trials=trials)
        canonical.cache_clear()
        taken.append(calls(lambda study=study: made(study)))
    assert taken[1] < 2.4 * taken[0]


# Colours and the copy of plotly

CSS = (files("qlora_sweep.reports") / "templates" / "report.css").read_text(encoding="utf-8")
VENDOR = files("qlora_sweep.reports") / "vendor"


def _variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


THEMES = dict(
    zip(
        ("light", "dark"),
        map(_variables, re.findall(r":root \{([^}]*--ink[^}]*)\}", CSS)[:2]),
        strict=True,
    )
)
MARKS = {str(verdict): mark.colour for verdict, mark in figures.MARKS.items()} | {
    name: getattr(figures, name) for name in ("GREEN", "ORANGE", "AMBER", "FADED")
}


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_marks_stand_out_three_to_one_and_text_four_and_a_half_to_one(theme: str) -> None:
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    colours = THEMES[theme]
    for name, mark in MARKS.items():
        assert contrast(mark, colours["paper"]) >= 3.0, name
    pairs = [(letters, paper) for letters in ("ink", "soft") for paper in ("paper", "panel")]
    for letters, paper in (*pairs, ("warn-ink", "warn")):
        assert contrast(colours[letters], colours[paper]) >= 4.5, (letters, paper)
    for line in ("accent", "edge"):
        assert contrast(colours[line], colours["paper"]) >= 3.0
    letters_of_figures = figures.themes()[theme]["layout"]["font"]["color"]
    assert contrast(letters_of_figures, colours["paper"]) >= 4.5


def test_the_copy_of_plotly_reads_the_figures_that_the_pinned_plotly_makes() -> None:
    head = (VENDOR / "plotly-cartesian.min.js").read_text(encoding="utf-8")[:400]
    (vendored,) = re.findall(r"plotly\.js \(cartesian - minified\) v([\d.]+)", head)
    installed = get_plotlyjs_version()
    assert vendored.split(".")[0] == installed.split(".")[0]
    pins = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    assert vendored == installed or f"plotly=={version('plotly')}" not in pins
    assert "MIT License" in (VENDOR / "plotly-LICENSE").read_text(encoding="utf-8")
