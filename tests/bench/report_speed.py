"""How large a report is, how long it takes to make, and how long a browser takes to draw it.

    python -m tests.bench.report_speed [-o OUT.jsonl]       needs playwright and a Chromium

The seconds in the browser are from the page's first script to the drawn table and figures, by its
own clock; those of the command leave out the start of Python. Studies are `plausible_study`'s.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from qlora_sweep.reports.page import render, write_page
from qlora_sweep.storage.definition import StudySnapshot
from tests.bench.harness import Row, asked, middle, write
from tests.reports.synthetic import plausible_study

SIZES = (1, 40, 1_000, 5_000)
ROUNDS = 5
# From the moment that the scripts may run to the end of the last of them, which draws everything.
CLOCK = """() => {
  const began = performance.now();
  Object.keys(report.figures).forEach(report.draw);
  return [performance.getEntriesByType('navigation')[0].domInteractive, performance.now() - began];
}"""


def study_of(trials: int) -> StudySnapshot:
    """Return a study of so many trials: large ones repeat a thousand under other numbers."""
    base = plausible_study(2, trials=min(trials, 1_000))
    copies = [
        record.model_copy(update={"number": record.number + copy * len(base.records)})
        for copy in range(-(-trials // len(base.records)))
        for record in base.records
    ]
    return replace(base, records=tuple(copies[:trials]))


def measured(browser: Any, trials: int, directory: Path) -> Row:
    """Return bytes and seconds of one report, the median of a few rounds of drawing."""
    study, path = study_of(trials), directory / f"{trials}.html"
    began = time.perf_counter()
    write_page(render(study), path)
    made = time.perf_counter() - began
    drawn = []
    for _ in range(ROUNDS):
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(path.as_uri())
        drawn.append([milliseconds / 1000 for milliseconds in page.evaluate(CLOCK)])
        page.close()
    loads, draws = zip(*drawn, strict=True)
    return {
        "trials": trials,
        "bytes": path.stat().st_size,
        "made_seconds": round(made, 3),
        "loaded_and_drawn_seconds": middle(loads),
        "figures_drawn_again_seconds": middle(draws),
    }


def main() -> None:
    """Print what each size comes to."""
    from playwright.sync_api import sync_playwright

    output = asked(__doc__).output
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as directory:
        options = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
        browser = driver.chromium.launch(**options)
        for trials in SIZES:
            write(measured(browser, trials, Path(directory)), output)
        browser.close()


if __name__ == "__main__":
    main()
