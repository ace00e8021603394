"""The report is one file that stands alone, trusts no text it is given, and is whole or absent."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
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
from tests.storage.builders import changed, confirmed

FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)
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
    dataset = re.findall(r"<[^>]*>", json.dumps(list(figures.values()), ensure_ascii=False))
    assert {text.lower() for text in dataset} <= {"<br>", "<b>", "</b>", "<extra>", "</extra>"}


def test_nothing_is_loaded_from_anywhere() -> None:
    page = Page(render(hostile_study()))
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
    base = fits(2, 8_000.0)
    won = fits(1, 16_800.0, FAST)
    runs = [changed(run, confirms=1 if run.confirms == 1 else None) for run in confirmed(won, base)]
    study = snapshot([won], confirmations=tuple(runs))
    page = Page(render(study))
    assert "2.1x" in page.visible
    assert "fits (2)" in page.visible
    assert '"baseline"' in page.scripts[0]
    assert effects_of(document_of(view_of(study))) is not None


def test_the_answer_comes_first_with_its_warnings() -> None:
    trials = (fits(0, 8_000.0), fits(1, 16_800.0, FAST, peak_allocated_bytes=20 * GIB))
    study = snapshot(
        trials,
        confirmations=confirmed(*trials),
        warnings=("run `sweep confirm a10 <x>` again",),
        holder="host:1",
        name="mine",
    )
    html = render(study)
    assert "<title>Mistral-7B-v0.3 on an A10: 2 trials</title>" in html
    assert "run <code>sweep confirm a10 &lt;x&gt;</code> again" in html
    text = Page(html).visible
    opening = text[: text.index("The configuration")]
    for words in ("study mine", "is running", "sweep confirm a10 <x>", "trial 1", "2.07–2.13x"):
        assert words in opening


@pytest.mark.parametrize(
    "records",
    [(), one_of_each()[2:5], one_of_each()[1:2], (fits(0, 8_000.0),), (record(0, Lost()),)],
    ids=["empty", "all out of memory", "only slow", "one", "interrupted"],
)
def test_any_study_has_a_report(records: Sequence[TrialRecord]) -> None:
    page = Page(render(snapshot(records)))
    assert ("is trial 0" in page.visible) is any(r.verdict == "fits" for r in records)
    assert "NaN" not in page.scripts[0]


def test_a_report_replaces_the_one_before_and_its_directory_is_made(tmp_path: Path) -> None:
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


def calls(study: StudySnapshot) -> int:
    """Return how many functions are called to make its page, Python's own included."""
    known = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal known
        known += event in ("call", "c_call")

    canonical.cache_clear()
    sys.setprofile(count)
    try:
        render(study)
    finally:
        sys.setprofile(None)
    return known


def test_twice_the_trials_take_at_most_a_little_more_than_twice_the_work() -> None:
    render(plausible_study(trials=20))  # What is imported and read once is no work of a trial's.
    assert calls(plausible_study(trials=100)) < 2.4 * calls(plausible_study(trials=50))


# Colours and the copy of plotly

CSS = (files("qlora_sweep.reports") / "templates" / "report.css").read_text(encoding="utf-8")
VENDOR = files("qlora_sweep.reports") / "vendor"


LIGHT, DARK = re.findall(r":root \{([^}]*--ink[^}]*)\}", CSS)[:2]


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("theme", "block"), [("light", LIGHT), ("dark", DARK)])
def test_marks_and_letters_stand_out_from_the_paper(theme: str, block: str) -> None:
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    paper = colours["paper"]
    named = (figures.GREEN, figures.ORANGE, figures.AMBER, figures.FADED)
    marks = [mark.colour for mark in figures.MARKS.values()]
    for colour in (*named, *marks, colours["accent"], colours["edge"]):
        assert contrast(colour, paper) >= 3.0, colour
    for letters in ("ink", "soft"):
        for behind in ("paper", "panel"):
            assert contrast(colours[letters], colours[behind]) >= 4.5, (letters, behind)
    assert contrast(colours["warn-ink"], colours["warn"]) >= 4.5
    assert contrast(figures.themes()[theme]["layout"]["font"]["color"], paper) >= 4.5


def test_the_copy_of_plotly_reads_the_figures_that_the_pinned_plotly_makes() -> None:
    head = (VENDOR / "plotly-cartesian.min.js").read_text(encoding="utf-8")[:400]
    (vendored,) = re.findall(r"plotly\.js \(cartesian - minified\) v([\d.]+)", head)
    installed = get_plotlyjs_version()
    assert vendored.split(".")[0] == installed.split(".")[0]
    pins = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    assert vendored == installed or f"plotly=={version('plotly')}" not in pins
    assert "MIT License" in (VENDOR / "plotly-LICENSE").read_text(encoding="utf-8")
