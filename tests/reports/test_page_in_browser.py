"""A real browser draws the report without an error and without offering to send it anywhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from reports.page import write_report
from storage.definition import StudySnapshot
from tests.reports.synthetic import hostile_study, one_of_each, plausible_study, snapshot

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
    figures = re.findall(r'<div class="figure[^"]*" id="([^"]+)"', page)
    assert "throughput" in figures
    for figure in figures:
        element = page[page.index(f'id="{figure}"') :]
        assert element.index("<svg") < element.index("</section>")
    buttons = set(re.findall(r'data-title="([^"]+)"', page))
    assert "Reset axes" in buttons
    assert not any("hare" in button for button in buttons)
