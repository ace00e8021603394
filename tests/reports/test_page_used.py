"""A person uses the report in a real browser: chooses, pins, finds, sorts, copies and prints.

Driven through playwright by the Chromium that is here; nothing is fetched.
"""

from __future__ import annotations

import csv
import importlib.util
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.reports.comparison import compare, of_study
from qlora_sweep.reports.images import picture_of, write_image
from qlora_sweep.reports.page import render, render_comparison
from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.costs import AskedWork
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError
from qlora_sweep.search_spaces.loading import load_space
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.storage.definition import StudySnapshot, TargetSpeed
from qlora_sweep.storage.records import Crashed
from qlora_sweep.sweep.study.recorded import recorded_study
from tests.reports.synthetic import (
    DIMENSIONS,
    HOSTILE,
    SURFACES,
    definition,
    fits,
    hostile_study,
    one_of_each,
    plausible_study,
    record,
    snapshot,
)

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

LONG = "RuntimeError: " + "the worker said a great deal before it ended, line by line. " * 20
NARROW = {"width": 390, "height": 800}
BOXES = """texts => texts.map((t) => {
  const { left, right, top, bottom } = t.getBoundingClientRect();
  return [t.textContent, left, right, top, bottom];
})"""


def usual_study() -> StudySnapshot:
    study = plausible_study()
    long = record(len(study.records), Crashed(phase="build", detail=LONG))
    records = (*study.records, long)
    speeds = {
        r.number: TargetSpeed(m.tokens_per_second / 6, m.tokens_per_second / 7, None, "predicted")
        for r in records
        if (m := r.measurement)
    }
    return replace(study, records=records, target_speeds=speeds)


def several_gpus() -> str:
    offer = Offer(gpu="a10", provider="x", usd_per_hour=3.6, date=date(2026, 7, 1), source="y")
    about = definition(emulated_on=None)
    gpus = [
        of_study(snapshot((fits(0, speed),), name=name, offer=offer, definition=about))
        for name, speed in (("one", 8_000.0), (HOSTILE, 9_000.0))
    ]
    return render_comparison(compare(gpus, work=AskedWork()))


PAGES: dict[str, Callable[[], str]] = {
    "usual": lambda: render(usual_study()),
    "each": lambda: render(snapshot(one_of_each())),
    "hostile": lambda: render(hostile_study()),
    "empty": lambda: render(snapshot()),
    "several GPUs": several_gpus,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Reader:
    """One open page, with everything that went wrong on it."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        values = {"viewport": {"width": 1280, "height": 800}} | context
        self.context = browser.new_context(**values)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(("file:", "blob:"))] == []

    def come_to(self, figure: str) -> Any:
        """Scroll to a figure and return it, drawn."""
        found = self.page.locator(figure)
        found.scroll_into_view_if_needed()
        found.locator(".main-svg").first.wait_for()
        return found

    def numbers(self) -> list[int]:
        """Return the trials that the table lists, from the top."""
        cells = self.page.locator("#trials-table tbody td:nth-child(2)").all_inner_texts()
        return [int(text.strip().split()[-1]) for text in cells]

    def download(self, kind: str) -> str:
        with self.page.expect_download() as waiting:
            self.page.click(f"[data-download={kind}]")
        return Path(waiting.value.path()).read_text(encoding="utf-8")


Opening = Callable[..., Reader]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the file of a page, which is made once."""
    directory = tmp_path_factory.mktemp("pages")

    def file_of(name: str) -> Path:
        path = directory / f"{name}.html"
        if not path.exists():
            path.write_text(PAGES[name](), encoding="utf-8", errors="replace")
        return path

    return file_of


@pytest.fixture
def opened(browser: Any, made: Callable[[str], Path]) -> Iterator[Opening]:
    """Open a page as somebody does, and see that nothing was complained of."""
    readers: list[Reader] = []

    def open_page(name: str = "usual", **context: Any) -> Reader:
        readers.append(Reader(browser, made(name), **context))
        return readers[-1]

    yield open_page
    for reader in readers:
        reader.close()


@pytest.fixture
def reader(opened: Opening) -> Reader:
    return opened()


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_is_drawn_and_a_narrow_screen_never_scrolls_sideways(
    opened: Opening, name: str
) -> None:
    page = opened(name).page
    for summary in page.locator("#trust summary").all():
        summary.click()
    for figure in page.locator(".figure").all():
        figure.scroll_into_view_if_needed()
        figure.locator(".main-svg").first.wait_for()
    titles = "[...document.querySelectorAll('[data-title]')].map((button) => button.dataset.title)"
    buttons = page.evaluate(titles)
    assert "Reset axes" in buttons or name == "empty"
    assert not any("hare" in button for button in buttons), "nothing is sent anywhere"
    assert page.locator("img").count() == 0
    page.set_viewport_size(NARROW)
    page.wait_for_function("document.documentElement.scrollWidth === 390")


def test_sorting_by_any_column_goes_both_ways_and_leaves_the_unknown_last(reader: Reader) -> None:
    by_number = "[data-sort=number]"
    reader.page.click(by_number)
    assert reader.numbers() == sorted(reader.numbers())
    reader.page.click(by_number)
    assert reader.numbers() == sorted(reader.numbers(), reverse=True)
    head = reader.page.locator("th:has([data-sort=number])")
    assert head.get_attribute("aria-sort") == "descending"
    for _ in range(3):
        reader.page.click("[data-sort=peak_allocated]")
    cells = reader.page.locator("#trials-table td[data-label^='peak allocated']").all_inner_texts()
    known = [float(text.split()[0]) for text in cells if text != "–"]
    assert known == sorted(known, reverse=True)
    assert cells == [*cells[: len(known)], *["–"] * (len(cells) - len(known))]
    reader.page.set_viewport_size(NARROW)
    reader.page.select_option("#trials-controls .narrow select", "number")
    assert reader.numbers() == sorted(reader.numbers())
    reader.page.click("#trials-controls .narrow button")
    assert reader.numbers() == sorted(reader.numbers(), reverse=True)


def test_every_setting_is_a_column_that_sorts_and_those_that_vary_are_there_at_first(
    reader: Reader,
) -> None:
    keys = "[...document.querySelectorAll('[data-sort]')].map((head) => head.dataset.sort)"
    shown = set(reader.page.evaluate(keys)) & set(TrialConfig.model_fields)
    assert shown == set(DIMENSIONS)
    reader.page.click(".chooser summary")
    for choice in reader.page.locator(".chooser input").all():
        choice.check()
    columns = reader.page.evaluate(keys)
    assert set(TrialConfig.model_fields) | {"changes"} <= set(columns)
    configs = {r.number: r.config for r in usual_study().records}
    reader.page.click("[data-sort=kernels]")
    kernels = [configs[number].kernels for number in reader.numbers()]
    assert kernels in (sorted(kernels), sorted(kernels, reverse=True))
    reader.page.locator(".chooser label", has_text="micro-batch").locator("input").uncheck()
    assert "micro_batch_size" not in reader.page.evaluate(keys)


def draw_box(reader: Reader) -> None:
    """Draw a box in the upper panel of the front."""
    box = reader.come_to("#front").locator(".nsewdrag").first.bounding_box()
    x, y = box["x"], box["y"]
    width, height = box["width"], box["height"]
    reader.page.mouse.move(x + 0.02 * width, y + 0.02 * height)
    reader.page.mouse.down()
    reader.page.mouse.move(x + 0.45 * width, y + 0.6 * height, steps=8)
    reader.page.mouse.up()
    reader.page.locator(".boxed:visible").first.wait_for()


def test_a_box_in_the_front_lists_its_trials_alone(reader: Reader) -> None:
    everything = reader.page.inner_text("#trials-count")
    draw_box(reader)
    inside = reader.numbers()
    assert reader.page.inner_text("#trials-count").startswith(f"{len(inside)} of ")
    assert 0 < len(inside) < len(usual_study().target_speeds)
    assert {trial["number"] for trial in json.loads(reader.download("json"))} == set(inside)
    # The box stays while a trial is pinned.
    reader.page.locator("#trials-table tbody tr").first.click()
    assert reader.numbers() == inside
    reader.page.keyboard.press("Escape")
    reader.page.locator("#trials .boxed button").click()
    assert reader.page.inner_text("#trials-count") == everything
    assert reader.page.locator("#front .selectionlayer path").count() == 0


def test_other_axes_take_a_box_away_and_never_show_one_number_twice(reader: Reader) -> None:
    everything = reader.page.inner_text("#trials-count")
    draw_box(reader)
    reader.page.select_option("#front-controls [name=x]", "trainable_parameters")
    assert reader.page.inner_text("#trials-count") == everything
    assert "trainable" in reader.page.text_content("#front .xtitle")
    reader.page.select_option("#front-controls [name=x]", "target_tokens_per_second")
    chosen = [reader.page.input_value(f"#front-controls [name={axis}]") for axis in "xy"]
    assert len(set(chosen)) == 2


def test_trials_are_found_by_text_and_verdict_and_the_whole_text_of_an_error_can_be_read(
    reader: Reader,
) -> None:
    everything = len(reader.numbers())
    reader.page.fill("[name=text]", "kernels: liger, fits")
    assert 0 < len(reader.numbers()) < everything
    reader.page.fill("[name=text]", "")
    reader.page.select_option("#trials-controls [name=verdict]", "crashed")
    assert "of" in reader.page.inner_text("#trials-count")
    assert everything - 1 in reader.numbers()
    reader.page.fill("[name=text]", "great deal")
    reader.page.locator("#trials-table tbody tr").first.click()
    shown = reader.page.locator("#pinned dd").all_inner_texts()
    assert " ".join(LONG.split()) in {" ".join(text.split()) for text in shown}


def test_a_click_on_a_mark_or_a_cell_pins_its_trial_and_selects_its_row(reader: Reader) -> None:
    def pinned() -> str:
        (number,) = re.findall(r"Trial (\d+)", reader.page.inner_text("#pinned h3"))
        (row,) = reader.page.locator("tr[aria-selected=true]").all()
        assert row.locator("td").nth(1).inner_text().split()[-1] == number
        reader.page.keyboard.press("Escape")
        assert reader.page.locator("#pinned").is_hidden()
        return str(number)

    mark = reader.page.locator("#front .scatterlayer .trace .points path").first
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    reader.page.mouse.move(x - 3, y)
    reader.page.mouse.move(x, y)
    assert "trial " in reader.page.locator("#front .hoverlayer").inner_html()
    reader.page.mouse.click(x, y)
    pinned()
    # Of the panels of the memory table one is open at a time.
    panels = reader.page.locator("details[name=boundary]")
    assert panels.count() > 2
    for panel in panels.all():
        if panel.get_attribute("open") is None:
            panel.locator("summary").click()
        assert reader.page.locator("table.wall:visible").count() == 1
        assert panel.locator("table.wall").is_visible()
    cell = reader.page.locator(".wall td.fits:visible").first
    for act in (cell.click, lambda: cell.press("Enter")):
        act()
        assert pinned() == cell.get_attribute("data-trial")


def test_all_of_it_is_reached_by_keyboard(reader: Reader) -> None:
    page = reader.page
    row = page.locator("#trials-table tbody tr").nth(1)
    row.focus()
    number = row.locator("td").first.inner_text()
    page.keyboard.press("Enter")
    assert page.locator("tr[aria-selected=true]").count() == 1
    assert page.evaluate("document.activeElement.closest('#pinned') !== null")
    page.keyboard.press("Escape")
    assert page.locator("#pinned").is_hidden()
    focused = "document.activeElement.querySelector('td').textContent"
    assert page.evaluate(focused) == number
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) != number
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.locator("#pinned").is_hidden(), "a second Enter unpins"
    # Tab passes a table in one step, and an arrow goes on within it.
    stops = "document.querySelectorAll('#trials-table tr[tabindex=\"0\"]').length"
    assert page.evaluate(stops) == 1
    cell = page.locator(".wall td[tabindex='0']:visible")
    trial = cell.get_attribute("data-trial")
    cell.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.trial") != trial


def test_tab_never_stops_where_nothing_is_to_be_seen(reader: Reader) -> None:
    hidden = """() => {
      const at = document.activeElement;
      const faint = (e) => e && (getComputedStyle(e).opacity === "0" || faint(e.parentElement));
      return at === document.body ? null : faint(at) || !at.getClientRects().length
        || getComputedStyle(at).outlineStyle === "none";
    }"""
    stops = []
    while len(stops) < 100:
        reader.page.keyboard.press("Tab")
        seen = reader.page.evaluate(hidden)
        if seen is None:
            break
        stops.append(seen)
    assert 10 < len(stops) < 100
    assert not any(stops)


def test_no_label_of_the_front_stands_on_a_mark(reader: Reader) -> None:
    reader.come_to("#front")
    labels = reader.page.locator("#front .textpoint text").evaluate_all(BOXES)
    marks = reader.page.locator("#front .xy .points path").evaluate_all(BOXES)
    assert len(labels) > 2
    assert len(marks) > 10
    for (_, left, right, top, bottom), (_, x0, x1, y0, y1) in itertools.product(labels, marks):
        assert not (left < (x0 + x1) / 2 < right and top < (y0 + y1) / 2 < bottom)


def test_without_scripts_the_decision_and_the_tables_are_there(opened: Opening) -> None:
    bare = opened(java_script_enabled=False).page
    assert "need JavaScript" in bare.inner_text("body")
    assert bare.locator("#front-section details.data tbody tr").count() > 2
    assert not bare.locator(".copies").first.is_visible()


def test_what_is_listed_can_be_copied_and_downloaded(reader: Reader, tmp_path: Path) -> None:
    reader.context.grant_permissions(["clipboard-read", "clipboard-write"])
    reader.page.locator("#trials-table tbody tr").first.click()
    reader.page.click("#pinned summary")
    reader.page.click("#pinned [data-copy]")
    reader.page.get_by_text("Copied").wait_for()
    assert "micro_batch_size: " in reader.page.evaluate("navigator.clipboard.readText()")
    # Several trials, and one alone.
    for text in ("kernels: liger", "great deal"):
        reader.page.fill("[name=text]", text)
        numbers = sorted(reader.numbers())
        rows = list(csv.DictReader(reader.download("csv").splitlines()))
        assert sorted(int(row["number"]) for row in rows) == numbers
        trials = json.loads(reader.download("json"))
        assert sorted(trial["number"] for trial in trials) == numbers
        file = tmp_path / "selection.yaml"
        file.write_text(reader.download("yaml"), encoding="utf-8")
        space = load_space(str(file))
        configs = [parse_config(trial["config"], where="download") for trial in trials]
        assert all(space.params_of(config) is not None for config in configs)


def test_a_dark_system_has_a_dark_page_and_paper_is_light_and_holds_every_figure(
    opened: Opening,
) -> None:
    page = opened(color_scheme="dark").page
    paper = "getComputedStyle(document.body).backgroundColor"
    letters = "document.querySelector('.xtitle').style.fill"

    def shades(expression: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", page.evaluate(expression))[:3]]

    page.locator("#front").scroll_into_view_if_needed()
    page.locator("#front .main-svg").first.wait_for()
    assert max(shades(paper)) < 60
    assert min(shades(letters)) > 180
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert min(shades(paper)) == 255
    assert max(shades(letters)) < 60
    widths = page.evaluate("[...document.querySelectorAll('.main-svg')].map(s => s.clientWidth)")
    assert max(widths) <= 703
    overlaps = """() => {
      const drawn = [...document.querySelectorAll('.js-plotly-plot .main-svg:first-child')];
      const boxes = drawn.map((e) => e.getBoundingClientRect()).filter((b) => b.width);
      const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
        && a.top < b.bottom - 1 && b.top < a.bottom - 1;
      return boxes.flatMap((a, n) => boxes.slice(n + 1).filter((b) => meet(a, b))).length;
    }"""
    assert page.evaluate(overlaps) == 0
    assert not page.locator("#trials-downloads").is_visible()


# Pictures of figures

NEEDS_THE_ENGINE = pytest.mark.skipif(
    importlib.util.find_spec("kaleido") is None, reason="plotly's image engine is not installed"
)


@NEEDS_THE_ENGINE
def test_no_text_of_a_picture_is_cut_or_overlaps_another(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    study = recorded_study(str(SURFACES / "mistral-7b-v0.3_h200.jsonl"))
    write_image(replace(study, name="a10-lora_rank-16-attention-" * 9), path, figure="front")
    page = browser.new_page(viewport={"width": 1100, "height": 2000})
    page.goto(path.as_uri())
    found = page.locator("text").evaluate_all(BOXES)
    height = page.evaluate("document.documentElement.getBoundingClientRect().height")
    page.close()
    # Arrows and question marks are marks of trials.
    dataset = [box for box in found if box[0].strip() not in ("", "→", "?")]
    assert len(dataset) > 10
    for text, left, right, top, bottom in dataset:
        assert min(left, top, 1100 - right, height - bottom) > -1, text
    # A pixel of two boxes may meet where no letter is.
    for (one, *a), (other, *b) in itertools.combinations(dataset, 2):
        across = min(a[1], b[1]) - max(a[0], b[0])
        along = min(a[3], b[3]) - max(a[2], b[2])
        assert across < 2 or along < 4, (one, other)


def test_a_picture_has_the_studys_title_and_an_unknown_one_is_refused() -> None:
    study = plausible_study()
    assert "Mistral-7B-v0.3 on an A10: 40 trials" in picture_of(study, "front").layout.title.text
    with pytest.raises(InputError, match=r"'pie'.*front"):
        picture_of(study, "pie")


def test_without_the_engine_a_picture_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Only the engine: what plotly itself looks up on the way stays there.
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "kaleido" else found(name)
    )
    with pytest.raises(EnvironmentFault, match=r"pip install 'qlora-sweep\[images\]'"):
        write_image(plausible_study(), tmp_path / "front.png")
    assert not list(tmp_path.iterdir())
