"""The report is one file that stands alone, trusts no text it is given, and is whole or absent."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from reports.page import render, write_report
from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from search_spaces.gpus import GIB
from storage.definition import StudySnapshot
from storage.records import Lost, OutOfMemory, PredictedOutOfMemory, TrialRecord
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


def test_hostile_text_adds_no_element_and_no_attribute() -> None:
    harmless, hostile = Page(render(snapshot(one_of_each()))), Page(render(hostile_study()))
    assert {tag for tag, _ in hostile.elements} <= {tag for tag, _ in harmless.elements}
    assert not any(tag == "img" for tag, _ in hostile.elements)
    names = {name for _, attributes in hostile.elements for name in attributes}
    assert not any(name.startswith("on") for name in names)
    assert HOSTILE.rstrip("\u2028") in "".join(hostile.text)


def test_hostile_text_cannot_end_the_script_that_holds_it_and_comes_back_as_it_was() -> None:
    page = Page(render(hostile_study()))
    data, plotly, *own = page.scripts
    assert "<" not in data
    assert ">" not in data
    names = json.loads(data)["figures"]
    assert {"front", "timeline"} <= set(names)
    assert len(plotly) > 1_000_000
    assert any("Plotly.react" in script for script in own)


def test_hostile_text_is_no_markup_to_plotly_either() -> None:
    (data, *_) = Page(render(hostile_study())).scripts
    figures = json.loads(data)["figures"].values()
    texts = re.findall(r"<[^>]*>", json.dumps(list(figures), ensure_ascii=False))
    assert {text.lower() for text in texts} <= {"<br>", "<b>", "</b>", "<extra>", "</extra>"}


@pytest.mark.parametrize("study", [plausible_study(), hostile_study()], ids=["plain", "hostile"])
def test_nothing_is_loaded_from_anywhere(study: StudySnapshot) -> None:
    page = Page(render(study))
    assert not any(LOADING & set(attributes) for _, attributes in page.elements)
    assert not any(tag in {"link", "iframe", "object", "embed"} for tag, _ in page.elements)
    assert not any("@import" in style or "url(" in style for style in page.styles)


def test_the_policy_of_the_page_allows_its_own_scripts_alone_and_no_connection() -> None:
    (policy,) = [
        attributes["content"] or ""
        for tag, attributes in Page(render(plausible_study())).elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == len(Page(render(plausible_study())).scripts) - 1
    assert "connect-src" not in policy
    assert "script-src 'unsafe" not in policy


def test_a_study_of_mebibytes_has_no_size_in_gibibytes_on_its_page() -> None:
    sizes = ((0, 4, 16), (1, 8, 20), (2, 16, 29), (3, 24, 40))
    trials = [
        fits(
            n,
            900.0 + n,
            TrialConfig(micro_batch_size=batch),
            peak_allocated_bytes=peak * 2**20,
            peak_reserved_bytes=120 * 2**20,
            peak_device_bytes=None,
        )
        for n, batch, peak in sizes
    ]
    larger = TrialConfig(micro_batch_size=32)
    trials.append(record(4, PredictedOutOfMemory(predicted_bytes=150 * 2**20), larger))
    study = snapshot(trials, definition=definition(gpu="cpu", device="cpu", budget_bytes=2**26))
    page = Page(render(study))
    assert "GiB" not in page.visible
    assert "GiB" not in page.scripts[0]
    assert "needs 150.00 MiB" in page.scripts[0]


def test_what_stands_between_backticks_is_code_and_the_backticks_are_gone() -> None:
    study = snapshot([fits(0, 8_000.0)], warnings=("run `sweep confirm a10 <x>` again",))
    page = render(study)
    assert "run <code>sweep confirm a10 &lt;x&gt;</code> again" in page
    assert "`" not in Page(page).visible


def test_the_title_says_model_and_gpu_and_the_study_s_name_stands_beside_it() -> None:
    page = render(snapshot([fits(0, 8_000.0)], name="a10-lora_rank-16"))
    assert "<title>Mistral-7B-v0.3 on an A10: 1 trial</title>" in page
    assert "<h1>Mistral-7B-v0.3 on an A10: 1 trial</h1>" in page
    assert "study a10-lora_rank-16" in Page(page).visible


def test_the_answer_comes_first() -> None:
    trials = (
        fits(0, 8_000.0),
        fits(
            1,
            16_800.0,
            TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0),
            peak_allocated_bytes=20 * GIB,
        ),
    )
    study = snapshot(trials, confirmations=confirmed(*trials))
    text = Page(render(study)).visible
    opening = text[: text.index("The configuration")]
    for said in (
        "trial 1",
        "micro-batch 10, no checkpointing",
        "16,800 tokens/s measured on NVIDIA H200",
        "2.1x",
        "confirmed (2 runs)",
        "2.08–2.12x",
        "20.00 GiB of 21.50 GiB (93 %)",
        "the fit is real; where it says measured, the speed is that of NVIDIA H200",
    ):
        assert said in opening
    assert '"micro_batch_size": 10' in text
    assert "sweep best a10-mistral --json" in text
    assert "Not measured again yet" not in text


def test_a_gpu_that_ran_itself_has_no_note_on_emulation() -> None:
    study = snapshot([fits(0, 8_000.0)], definition=definition(emulated_on=None))
    assert "the fit is real" not in Page(render(study)).visible


def test_warnings_and_a_study_that_is_still_driven_are_said_at_the_top() -> None:
    study = snapshot([fits(0, 8_000.0)], warnings=("torch changed",), holder="host:1")
    text = Page(render(study)).visible
    assert "torch changed" in text[: text.index("The configuration")]
    assert "The study is running" in text


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ((), "No trial has finished yet."),
        (one_of_each()[2:5], "Nothing that was tried was measured to fit in 21.50 GiB."),
        (one_of_each()[1:2], "Nothing that was tried was measured to fit in 21.50 GiB."),
        ((fits(0, 8_000.0),), "the baseline itself"),
        ((fits(0, math.nan), fits(1, math.inf)), "Nothing that was tried"),
        ((fits(0, 8_000.0, final_loss=math.nan, flops_utilization=math.inf),), "8,000"),
        ((record(0, OutOfMemory(stage="load")),), "Nothing that was tried"),
        ((record(0, Lost()),), "No trial has come to a conclusion yet"),
    ],
    ids=[
        "empty",
        "all out of memory",
        "only slow",
        "one",
        "not finite",
        "loss",
        "unknown need",
        "interrupted",
    ],
)
def test_any_study_has_a_report(records: Sequence[TrialRecord], said: str) -> None:
    page = Page(render(snapshot(records)))
    assert said in page.visible
    assert all("NaN" not in script for script in page.scripts[:1])


def test_a_report_is_written_where_no_directory_is_and_replaces_the_one_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / "runs" / "demo" / "report.html"
    write_report(snapshot(), path)
    write_report(snapshot([fits(0, 8_000.0)], name="ünï\ud800"), path)
    assert r"ünï\ud800" in path.read_text(encoding="utf-8")
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_written_is_the_environment_s_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(EnvironmentFault, match=r"cannot write the report .*report\.html"):
        write_report(snapshot(), tmp_path / "file" / "report.html")


def test_a_directory_in_the_place_of_the_report_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.mkdir()
    with pytest.raises(EnvironmentFault, match="cannot write the report"):
        write_report(snapshot(), path)
    assert os.listdir(tmp_path) == ["report.html"]
