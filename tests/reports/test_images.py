"""A figure becomes a picture by plotly's image engine, or says what is missing."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from reports.images import picture_of, write_image
from search_spaces.errors import EnvironmentFault, InputError
from storage.definition import StudySnapshot
from tests.reports.synthetic import fits, plausible_study, recorded_study, snapshot


def test_a_picture_has_the_values_of_the_trials_and_says_what_it_is_of() -> None:
    picture = picture_of(plausible_study(), "front")
    drawn = [trace for trace in picture.data if trace.meta == "front"]
    assert all(isinstance(x, float) for x in drawn[0].x)
    assert "Mistral-7B-v0.3 on an A10: 40 trials" in picture.layout.title.text
    assert "study a10-mistral" in picture.layout.title.text
    assert picture.layout.paper_bgcolor == "#ffffff"


LONG = replace(
    recorded_study(budget_gib=21.5), name="a10-lora_rank-16-target_modules-attention-" * 6
)


@pytest.mark.skipif(
    importlib.util.find_spec("kaleido") is None, reason="plotly's image engine is not installed"
)
@pytest.mark.parametrize("figure", ["front", "history", "slice"])
@pytest.mark.parametrize(
    "study", [plausible_study(), LONG, plausible_study(trials=5)], ids=["usual", "long", "few"]
)
def test_every_letter_of_a_picture_is_whole_and_on_no_other(
    study: StudySnapshot, figure: str, tmp_path: Path
) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or pytest.skip("no Chromium on this machine")
    path = tmp_path / "picture.svg"
    write_image(study, path, figure=figure)
    boxes = """texts => texts.map((t) => {
      const { left, right, top, bottom } = t.getBoundingClientRect();
      return [t.textContent, left, right, top, bottom];
    })"""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 2000})
        page.goto(path.as_uri())
        found = page.locator("text").evaluate_all(boxes)
        height = page.evaluate("document.documentElement.getBoundingClientRect().height")
        browser.close()
    # Arrows and question marks are marks of trials.
    texts = [box for box in found if box[0].strip() not in ("", "→", "?")]
    assert len(texts) > 10
    for text, left, right, top, bottom in texts:
        assert min(left, top, 1100 - right, height - bottom) > -1, text
    # A pixel of two boxes may meet where no letter is.
    for (one, *a), (other, *b) in itertools.combinations(texts, 2):
        across, along = min(a[1], b[1]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[2], b[2])
        assert across < 2 or along < 4, (one, other)


def test_a_figure_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"figure 'pie' is not in .* there are: .*front"):
        picture_of(plausible_study(), "pie")


def test_without_the_engine_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Only the engine: what plotly itself looks up on the way stays there.
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "kaleido" else found(name, package),
    )
    with pytest.raises(EnvironmentFault, match=r"pip install 'qlora-sweep\[images\]'"):
        write_image(snapshot([fits(0, 8_000.0)]), tmp_path / "front.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    importlib.util.find_spec("kaleido") is None, reason="plotly's image engine is not installed"
)
@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<svg")])
def test_a_picture_is_written_where_the_engine_is(
    suffix: str, begins: bytes, tmp_path: Path
) -> None:
    path = tmp_path / f"front{suffix}"
    write_image(plausible_study(), path)
    assert path.read_bytes().startswith(begins)
