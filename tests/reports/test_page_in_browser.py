"""A real browser draws the report without an error and without offering to send it anywhere."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from reports.page import render, write_report
from search_spaces.prices import Offer
from storage.definition import StudySnapshot
from tests.reports.synthetic import (
    definition,
    fits,
    hostile_study,
    one_of_each,
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


def _open(study: StudySnapshot, directory: Path) -> tuple[str, list[str]]:
    """Return the page as the browser left it, and what its console said."""
    path = directory / "report.html"
    write_report(study, path)
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={directory / 'profile'}", path.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return ended.stdout, re.findall(r".*:CONSOLE.*", ended.stderr)


@pytest.mark.parametrize(
    "study",
    [plausible_study(), snapshot(one_of_each()), hostile_study()],
    ids=["plausible", "every verdict", "hostile"],
)
def test_every_figure_is_drawn_and_the_console_is_silent(
    study: StudySnapshot, tmp_path: Path
) -> None:
    page, console = _open(study, tmp_path)
    assert console == []
    for figure in ("throughput", "shapes", "timeline", "effects"):
        element = page[page.index(f'id="{figure}"') :]
        assert element.index("<svg") < element.index("</section>")
    buttons = set(re.findall(r'data-title="([^"]+)"', page))
    assert "Reset axes" in buttons
    assert not any("hare" in button for button in buttons)


def test_what_a_training_costs_is_worked_out_in_the_page_as_it_is_in_the_report(
    tmp_path: Path,
) -> None:
    offer = Offer(gpu="a10", provider="x", usd_per_hour=3.6, date=date(2026, 7, 1), source="y")
    study = snapshot((fits(0, 8_000.0), fits(1, 16_000.0)), offer=offer)
    study = replace(study, definition=definition(emulated_on=None))
    asked = re.findall(r'<span class="job"[^>]*>([^<]+)<', render(replace(study, job_tokens=2e9)))
    path = tmp_path / "report.html"
    # Typed into the field, as a reader does.
    typed = (
        'const field = document.getElementById("job-tokens"); field.value = "2000000000";'
        'field.dispatchEvent(new Event("input"));'
    )
    digest = base64.b64encode(hashlib.sha256(typed.encode()).digest()).decode()
    page = render(study).replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    path.write_text(page.replace("</body>", f"<script>{typed}</script></body>"), encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    assert not re.findall(r".*:CONSOLE.*", ended.stderr)
    shown = re.findall(r'<span class="job"[^>]*>([^<]+)<', ended.stdout)
    assert shown == asked
    assert shown
    assert shown[0].startswith("$")
