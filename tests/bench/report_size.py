"""How large a report is, how long it takes to make, and how long a browser takes to draw it.

python tests/bench/report_size.py [-o FILE.json]    needs playwright and a Chromium

The seconds in the browser are from the page's first script to the drawn table and figures, by its
own clock; those of the command leave out the start of Python. Studies are `plausible_study`'s.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from reports.page import write_report
from storage.definition import StudySnapshot
from tests.reports.synthetic import plausible_study, snapshot

SIZES = (0, 1, 40, 1_000, 5_000)
ROUNDS = 5
# From the moment that the scripts may run to the end of the last of them, which draws everything.
CLOCK = """() => {
  const began = performance.now();
  Object.keys(report.figures).forEach(report.draw);
  return [performance.getEntriesByType('navigation')[0].domInteractive, performance.now() - began];
}"""


def study_of(trials: int) -> StudySnapshot:
    """Return a study of so many trials: large ones repeat a thousand under other numbers."""
    if trials == 0:
        return snapshot()
    base = plausible_study(2, trials=min(trials, 1_000))
    copies = [
        record.model_copy(update={"number": record.number + copy * len(base.records)})
        for copy in range(-(-trials // len(base.records)))
        for record in base.records
    ]
    return replace(base, records=tuple(copies[:trials]))


def measured(browser: Any, trials: int, directory: Path) -> dict[str, float]:
    """Return bytes and seconds of one report, the median of a few rounds of drawing."""
    study, path = study_of(trials), directory / f"{trials}.html"
    began = time.perf_counter()
    write_report(study, path)
    made = time.perf_counter() - began
    loads, draws = [], []
    for _ in range(ROUNDS):
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(path.as_uri())
        load, draw = page.evaluate(CLOCK)
        loads.append(load / 1000)
        draws.append(draw / 1000)
        page.close()
    return {
        "trials": trials,
        "bytes": path.stat().st_size,
        "made_seconds": round(made, 3),
        "loaded_and_drawn_seconds": round(sorted(loads)[ROUNDS // 2], 3),
        "figures_drawn_again_seconds": round(sorted(draws)[ROUNDS // 2], 3),
    }


def main() -> None:
    """Print or write what each size comes to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, tempfile.TemporaryDirectory() as directory:
        options = {"executable_path": shutil.which("chromium"), "args": ["--no-sandbox"]}
        browser = driver.chromium.launch(**options)
        rows = [measured(browser, trials, Path(directory)) for trials in SIZES]
        browser.close()
    text = "\n".join(json.dumps(row) for row in rows) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
