"""A real browser draws the report without an error and without offering to send it anywhere."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from datetime import date
from pathlib import Path

import pytest

from reports.comparison import compare, of_study
from reports.page import render, render_comparison
from search_spaces.costs import AskedWork
from search_spaces.prices import Offer
from tests.reports.synthetic import (
    HOSTILE,
    definition,
    fits,
    plausible_study,
    snapshot,
)

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
    "--dump-dom",
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


def _shown(page: str, directory: Path, *, then: str = "") -> tuple[str, list[str]]:
    """Return a page as the browser left it, after a script that does what a reader does."""
    digest = base64.b64encode(hashlib.sha256(then.encode()).digest()).decode()
    allowed = page.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    path = directory / "report.html"
    ending = f"<script>{then}</script></body>"
    path.write_text(allowed.replace("</body>", ending), encoding="utf-8", errors="replace")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={directory / 'profile'}", path.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return ended.stdout, re.findall(r".*:CONSOLE.*", ended.stderr)


def test_a_cell_of_the_wall_pins_its_trial_by_click_and_by_enter(tmp_path: Path) -> None:
    study = plausible_study()
    find = 'const cell = document.querySelector(".wall td.fits");'
    for act in (
        "cell.click()",
        'cell.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", bubbles: true}))',
    ):
        page, console = _shown(render(study), tmp_path, then=f"{find}{act}")
        assert console == []
        (cell,) = re.findall(r'<td class="cell fits pinned"[^>]*data-trial="(\d+)"', page)
        pinned = page[page.index('id="pinned"') :]
        assert f"Trial {cell}<" in pinned[:4000]


def test_the_page_of_several_gpus_is_drawn_without_an_error(tmp_path: Path) -> None:
    offer = Offer(gpu="a10", provider="x", usd_per_hour=3.6, date=date(2026, 7, 1), source="y")
    about = definition(emulated_on=None)
    gpus = [
        of_study(snapshot((fits(0, speed),), name=name, offer=offer, definition=about))
        for name, speed in (("one", 8_000.0), (HOSTILE, 9_000.0))
    ]
    page = render_comparison(compare(gpus, work=AskedWork()))
    page, console = _shown(page, tmp_path, then='dispatchEvent(new Event("beforeprint"))')
    assert console == []
    element = page[page.index('id="prices"') :]
    assert element.index("<svg") < element.index("</section>")
    assert not re.search(r"<img[^>]*onerror", page[: page.index('id="page-data"')])
