"""A person uses the report in a real browser: chooses, pins, finds, sorts, copies and prints.

Driven through playwright by the Chromium that is here; nothing is fetched.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reports.page import write_report
from search_spaces.config import TrialConfig, parse_config
from search_spaces.loading import load_space
from storage.definition import StudySnapshot, TargetSpeed
from storage.records import Carried, Crashed
from tests.reports.synthetic import (
    DIMENSIONS,
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Reader:
    """One open page, with everything that went wrong on it."""

    def __init__(self, browser: Any, study: StudySnapshot, directory: Path, **context: Any) -> None:
        path = directory / "report.html"
        write_report(study, path)
        self.context = browser.new_context(
            **({"viewport": {"width": 1280, "height": 800}} | context)
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def come_to(self, figure: str) -> Any:
        """Scroll to a figure and return it, drawn."""
        found = self.page.locator(figure)
        found.scroll_into_view_if_needed()
        found.locator(".main-svg").first.wait_for()
        return found

    def numbers(self) -> list[int]:
        """Return the trials that the table lists, from the top."""
        cells = self.page.locator("#trials-table tbody td:first-child").all_inner_texts()
        return [int(text.strip().split()[-1]) for text in cells]

    def download(self, kind: str) -> str:
        with self.page.expect_download() as waiting:
            self.page.click(f"[data-download={kind}]")
        return Path(waiting.value.path()).read_text(encoding="utf-8")


def _study() -> StudySnapshot:
    study = plausible_study()
    long = record(len(study.records), Crashed(phase="build", detail=LONG))
    records = (*study.records, long)
    speeds = {
        r.number: TargetSpeed(m.tokens_per_second / 6, m.tokens_per_second / 7, None, "predicted")
        for r in records
        if (m := r.measurement)
    }
    return replace(study, records=records, target_speeds=speeds)


@pytest.fixture
def reader(browser: Any, tmp_path: Path) -> Iterator[Reader]:
    opened = Reader(browser, _study(), tmp_path)
    yield opened
    opened.context.close()
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("file:", "blob:"))] == []


def test_sorting_by_any_column_goes_both_ways_and_leaves_the_unknown_last(reader: Reader) -> None:
    by_number = "[data-sort=number]"
    reader.page.click(by_number)
    assert reader.numbers() == sorted(reader.numbers())
    reader.page.click(by_number)
    assert reader.numbers() == sorted(reader.numbers(), reverse=True)
    assert (
        reader.page.locator("th:has([data-sort=number])").get_attribute("aria-sort") == "descending"
    )
    reader.page.click("[data-sort=peak_allocated]")
    reader.page.click("[data-sort=peak_allocated]")
    reader.page.click("[data-sort=peak_allocated]")
    cells = reader.page.locator("#trials-table td[data-label^='peak allocated']").all_inner_texts()
    known = [float(text.split()[0]) for text in cells if text != "–"]
    assert known == sorted(known, reverse=True)
    assert cells == [*cells[: len(known)], *["–"] * (len(cells) - len(known))]


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
    configs = {r.number: r.config.model_dump(mode="json") for r in _study().records}
    for key in TrialConfig.model_fields:
        reader.page.click(f"[data-sort={key}]")
        arrow = reader.page.inner_text(f"[data-sort={key}]")[-1]
        values = [configs[number][key] for number in reader.numbers()]
        known = [value for value in values if value is not None]
        ordered = sorted(known) if key in DIMENSIONS else known
        assert known == (ordered[::-1] if arrow == "↓" else ordered), key
    reader.page.locator(".chooser label", has_text="micro-batch").locator("input").uncheck()
    assert "micro_batch_size" not in reader.page.evaluate(keys)


def _drag(reader: Reader, *, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw a box in the upper panel of the front, from one corner to another in its shares."""
    box = reader.come_to("#front").locator(".nsewdrag").first.bounding_box()
    corners = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in (start, end)]
    reader.page.mouse.move(*corners[0])
    reader.page.mouse.down()
    reader.page.mouse.move(*corners[1], steps=8)
    reader.page.mouse.up()


def test_a_box_in_the_front_lists_its_trials_alone_and_says_how_to_see_all(reader: Reader) -> None:
    everything = reader.page.inner_text("#trials-count")
    _drag(reader, start=(0.02, 0.02), end=(0.45, 0.6))
    notes = reader.page.locator(".boxed:visible")
    notes.first.wait_for()
    assert notes.count() == 2
    inside = reader.numbers()
    assert reader.page.inner_text("#trials-count").startswith(f"{len(inside)} of ")
    assert 0 < len(inside) < len(_study().target_speeds)
    assert {trial["number"] for trial in json.loads(reader.download("json"))} == set(inside)
    # A pinned trial is ringed, and the box stays.
    reader.page.locator("#trials-table tbody tr").first.click()
    assert reader.numbers() == inside
    reader.page.keyboard.press("Escape")
    reader.page.locator("#trials .boxed button").click()
    assert reader.page.inner_text("#trials-count") == everything
    assert reader.page.locator(".boxed:visible").count() == 0
    assert reader.page.locator("#front .selectionlayer path").count() == 0


def test_other_axes_take_the_box_away(reader: Reader) -> None:
    everything = reader.page.inner_text("#trials-count")
    _drag(reader, start=(0.02, 0.02), end=(0.45, 0.6))
    reader.page.locator(".boxed:visible").first.wait_for()
    reader.page.select_option("#front-controls [name=x]", "trainable_parameters")
    assert reader.page.inner_text("#trials-count") == everything


def test_one_panel_of_the_boundary_is_open_and_another_can_be_opened(reader: Reader) -> None:
    panels = reader.page.locator("details[name=boundary]")
    assert panels.count() > 2
    for panel in panels.all():
        if panel.get_attribute("open") is None:
            panel.locator("summary").click()
        assert reader.page.locator("table.wall:visible").count() == 1
        assert panel.locator("table.wall").is_visible()


@pytest.mark.parametrize(
    "study",
    [plausible_study(), plausible_study(trials=5), snapshot(one_of_each()), hostile_study()],
    ids=["plausible", "five", "each", "hostile"],
)
def test_every_figure_is_drawn_when_a_reader_comes_to_it(
    browser: Any, study: StudySnapshot, tmp_path: Path
) -> None:
    opened = Reader(browser, study, tmp_path)
    assert opened.page.locator("#timeline .main-svg").count() == 0
    opened.page.click("#trust summary")
    for figure in opened.page.locator(".figure").all():
        opened.come_to(f"#{figure.get_attribute('id')}")
    titles = "[...document.querySelectorAll('[data-title]')].map((button) => button.dataset.title)"
    buttons = set(opened.page.evaluate(titles))
    opened.context.close()
    assert "Reset axes" in buttons
    assert not any("hare" in button for button in buttons)
    assert opened.complaints == []


def test_trials_are_found_by_text_verdict_and_setting(reader: Reader) -> None:
    everything = len(reader.numbers())
    reader.page.fill("[name=text]", "kernels: liger, fits")
    assert 0 < len(reader.numbers()) < everything
    reader.page.fill("[name=text]", "")
    reader.page.select_option("#trials-controls [name=verdict]", "crashed")
    assert "of" in reader.page.inner_text("#trials-count")
    assert everything - 1 in reader.numbers()


def test_the_whole_text_of_an_error_can_be_read(reader: Reader) -> None:
    reader.page.fill("[name=text]", "great deal")
    reader.page.locator("#trials-table tbody tr").first.click()
    shown = reader.page.locator("#pinned dd").all_inner_texts()
    assert " ".join(LONG.split()) in {" ".join(text.split()) for text in shown}


def test_a_click_on_a_mark_pins_its_trial_and_selects_its_row(reader: Reader) -> None:
    mark = reader.page.locator("#front .scatterlayer .trace .points path").first
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    reader.page.mouse.move(x - 3, y)
    reader.page.mouse.move(x, y)
    assert "trial " in reader.page.locator("#front .hoverlayer").inner_html()
    reader.page.mouse.click(x, y)
    title = reader.page.inner_text("#pinned h3")
    selected = reader.page.locator("tr[aria-selected=true]")
    assert selected.count() == 1
    number = re.search(r"Trial (\d+)", title)
    assert number is not None
    assert selected.locator("td").first.inner_text().split()[-1] == number[1]
    reader.page.keyboard.press("Escape")
    assert reader.page.locator("#pinned").is_hidden()


def test_enter_pins_from_the_table_and_unpins(reader: Reader) -> None:
    row = reader.page.locator("#trials-table tbody tr").nth(2)
    row.focus()
    reader.page.keyboard.press("ArrowDown")
    reader.page.keyboard.press("Enter")
    assert reader.page.locator("tr[aria-selected=true]").count() == 1
    assert reader.page.locator("#pinned").is_visible()
    reader.page.keyboard.press("Enter")
    assert reader.page.locator("#pinned").is_hidden()


def test_who_pins_by_keyboard_is_led_into_the_panel_and_back(reader: Reader) -> None:
    row = reader.page.locator("#trials-table tbody tr").nth(1)
    row.focus()
    number = row.locator("td").first.inner_text()
    reader.page.keyboard.press("Enter")
    assert reader.page.evaluate("document.activeElement.closest('#pinned') !== null")
    reader.page.keyboard.press("Escape")
    focused = "document.activeElement.querySelector('td').textContent"
    assert reader.page.evaluate(focused) == number


def test_tab_passes_the_tables_in_one_step_each(reader: Reader) -> None:
    stops = "document.querySelectorAll('#trials-table tr[tabindex=\"0\"]').length"
    assert len(reader.numbers()) > 1
    assert reader.page.evaluate(stops) == 1
    reader.page.locator("#trials-table tbody tr").first.focus()
    reader.page.keyboard.press("ArrowDown")
    assert reader.page.evaluate(stops) == 1
    assert reader.page.locator(".wall td[tabindex='0']:visible").count() == 1


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


def test_an_arrow_goes_on_within_a_panel_of_the_wall(reader: Reader) -> None:
    first = reader.page.locator(".wall td[tabindex='0']:visible")
    trial = first.get_attribute("data-trial")
    first.focus()
    reader.page.keyboard.press("ArrowRight")
    assert reader.page.evaluate("document.activeElement.dataset.trial") != trial


def test_a_narrow_screen_sorts_by_a_list_both_ways(browser: Any, tmp_path: Path) -> None:
    narrow = Reader(browser, _study(), tmp_path, viewport={"width": 390, "height": 800})
    narrow.page.select_option("#trials-controls .narrow select", "number")
    rising = narrow.numbers()
    narrow.page.click("#trials-controls .narrow button")
    falling = narrow.numbers()
    narrow.context.close()
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert narrow.complaints == []


def test_no_label_of_the_front_stands_on_a_mark(reader: Reader) -> None:
    boxes = """(selector) => [...document.querySelectorAll(selector)].map((e) => {
      const { left, right, top, bottom } = e.getBoundingClientRect();
      return [left, right, top, bottom];
    })"""
    reader.come_to("#front")
    labels = reader.page.evaluate(boxes, "#front .textpoint text")
    marks = reader.page.evaluate(boxes, "#front .xy .points path")
    assert len(labels) > 2
    assert len(marks) > 10
    for left, right, top, bottom in labels:
        for x0, x1, y0, y1 in marks:
            x, y = (x0 + x1) / 2, (y0 + y1) / 2
            assert not (left < x < right and top < y < bottom)


def test_without_scripts_the_decision_and_the_tables_are_there(
    browser: Any, tmp_path: Path
) -> None:
    bare = Reader(browser, _study(), tmp_path, java_script_enabled=False)
    text = bare.page.inner_text("body")
    front = bare.page.locator("#front-section details.data tbody tr").count()
    copies = bare.page.locator(".copies").first.is_visible()
    bare.context.close()
    assert "need JavaScript" in text
    assert front > 2
    assert not copies


def test_print_keeps_the_heads_of_the_columns(reader: Reader) -> None:
    reader.page.emulate_media(media="print")
    assert reader.page.locator("#trials-table .sort").first.is_visible()
    assert not reader.page.locator("#trials-downloads").is_visible()


def test_a_trial_that_was_carried_over_says_so(browser: Any, tmp_path: Path) -> None:
    study = _study()
    mark = Carried(study="before", identity="1", number=7)
    records = (study.records[0], study.records[1].model_copy(update={"carried": mark}))
    page = Reader(browser, replace(study, records=records), tmp_path)
    marked = page.page.locator("#trials-table tr", has_text="carried over from before").count()
    page.context.close()
    assert marked == 1


def test_the_axes_can_be_chosen_and_never_show_one_number_twice(reader: Reader) -> None:
    title = ".xtitle"
    reader.come_to("#front")
    assert "memory" in reader.page.text_content(f"#front {title}")
    reader.page.select_option("#front-controls [name=x]", "trainable_parameters")
    assert "trainable" in reader.page.text_content(f"#front {title}")
    reader.page.select_option("#front-controls [name=x]", "target_tokens_per_second")
    chosen = [reader.page.input_value(f"#front-controls [name={axis}]") for axis in "xy"]
    assert len(set(chosen)) == 2


def test_a_button_copies_the_configuration_of_the_pinned_trial(reader: Reader) -> None:
    reader.context.grant_permissions(["clipboard-read", "clipboard-write"])
    reader.page.locator("#trials-table tbody tr").first.click()
    reader.page.click("#pinned summary")
    reader.page.click("#pinned [data-copy]")
    reader.page.get_by_text("Copied").wait_for()
    assert "micro_batch_size: " in reader.page.evaluate("navigator.clipboard.readText()")


def test_the_trials_that_are_listed_can_be_downloaded(reader: Reader, tmp_path: Path) -> None:
    reader.page.fill("[name=text]", "kernels: liger")
    numbers = sorted(reader.numbers())
    rows = list(csv.DictReader(reader.download("csv").splitlines()))
    assert sorted(int(row["number"]) for row in rows) == numbers
    assert {row["kernels"] for row in rows} == {"liger"}
    trials = json.loads(reader.download("json"))
    configs = {parse_config(trial["config"], where="download") for trial in trials}
    assert sorted(trial["number"] for trial in trials) == numbers
    file = tmp_path / "selection.yaml"
    file.write_text(reader.download("yaml"), encoding="utf-8")
    space = load_space(str(file))
    assert all(space.params_of(config) is not None for config in configs)


def test_one_trial_is_downloaded_as_a_space_of_it_alone(reader: Reader, tmp_path: Path) -> None:
    reader.page.fill("[name=text]", "great deal")
    (trial,) = json.loads(reader.download("json"))
    file = tmp_path / "one.yaml"
    file.write_text(reader.download("yaml"), encoding="utf-8")
    space = load_space(str(file))
    assert space.params_of(parse_config(trial["config"], where="download")) is not None


@pytest.mark.parametrize(
    "study",
    [_study(), snapshot(one_of_each()), hostile_study(), snapshot()],
    ids=["plausible", "each", "hostile", "empty"],
)
def test_a_narrow_screen_never_scrolls_sideways(
    browser: Any, study: StudySnapshot, tmp_path: Path
) -> None:
    narrow = Reader(browser, study, tmp_path, viewport={"width": 390, "height": 800})
    width = narrow.page.evaluate("document.documentElement.scrollWidth")
    narrow.context.close()
    assert width == 390
    assert narrow.complaints == []


def test_a_dark_system_has_dark_paper_and_light_letters_in_figures_too(
    browser: Any, tmp_path: Path
) -> None:
    dark = Reader(browser, _study(), tmp_path, color_scheme="dark")
    paper = dark.page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark.come_to("#front")
    letters = dark.page.evaluate("document.querySelector('.xtitle').style.fill")
    dark.context.close()
    assert max(map(int, re.findall(r"\d+", paper)[:3])) < 60
    assert min(map(int, re.findall(r"\d+", letters)[:3])) > 180
    assert dark.complaints == []


def test_print_is_light_and_no_figure_is_wider_than_the_paper(browser: Any, tmp_path: Path) -> None:
    printed = Reader(browser, _study(), tmp_path, color_scheme="dark")
    pdf = printed.page.pdf(format="A4")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 2
    printed.page.emulate_media(media="print", color_scheme="dark")
    printed.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    paper = printed.page.evaluate("getComputedStyle(document.body).backgroundColor")
    sizes = "[...document.querySelectorAll('.main-svg')].map(s => s.clientWidth)"
    widths = printed.page.evaluate(sizes)
    overlaps = """() => {
      const drawn = [...document.querySelectorAll('.js-plotly-plot .main-svg:first-child')];
      const boxes = drawn.map((e) => e.getBoundingClientRect()).filter((b) => b.width);
      const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
        && a.top < b.bottom - 1 && b.top < a.bottom - 1;
      return boxes.flatMap((a, n) => boxes.slice(n + 1).filter((b) => meet(a, b))).length;
    }"""
    overlapping = printed.page.evaluate(overlaps)
    letters = printed.page.evaluate("document.querySelector('.xtitle').style.fill")
    printed.context.close()
    assert paper == "rgb(255, 255, 255)"
    assert overlapping == 0
    assert max(map(int, re.findall(r"\d+", letters)[:3])) < 60
    assert max(widths) <= 703
    assert printed.complaints == []
