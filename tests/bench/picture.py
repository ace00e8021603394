"""docs/images/report.png: the first screen of a real study's report, as a browser draws it.

Run as ``python -m tests.bench.picture STUDY``; the study is looked up as by `sweep report`
(``SWEEP_HOME``, ``--storage``). It needs Chromium, and nothing of a GPU.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from qlora_sweep.sweep.cli import main as sweep

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "report.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--window-size=1280,1300", "--virtual-time-budget=5000"),
)


def take(page: Path, picture: Path) -> None:
    """Draw a page in a browser of its own and keep what is to be seen first.

    Raises:
        RuntimeError: no browser is here, or it left no picture.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise RuntimeError(f"none of {', '.join(BROWSERS)} is installed")
    with tempfile.TemporaryDirectory() as profile:
        own = (f"--user-data-dir={profile}", f"--screenshot={picture.absolute()}")
        command = [browser, *FLAGS, *own, page.absolute().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    if not picture.is_file():
        raise RuntimeError(f"{browser} left no picture: {done.stderr[-500:]}")


def main() -> None:
    """Write the report of the study that was named into a directory of its own, and picture it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study")
    parser.add_argument("--storage")
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    asked = parser.parse_args()
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "report.html"
        storage = [] if asked.storage is None else ["--storage", asked.storage]
        if sweep(["report", asked.study, "-o", str(page), *storage]):
            raise SystemExit(f"no report of {asked.study}")
        take(page, asked.output)
    print(f"{asked.output}: {asked.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
