"""Write down step times and peaks of finished studies: every trial that was measured to the end.

One JSON document per line: model, configuration, median step with its 95 % interval, peaks, flags.
``tests/data/study_steps_*.jsonl`` are made by it, from two studies of one space:

    sweep run tests/bench/a10_rank16.yaml --study steps-0 --seed 0
    sweep run tests/bench/a10_rank16.yaml --study steps-1 --seed 1
    python tests/bench/study_steps.py OUT.jsonl steps-0 steps-1 [--storage URL]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from storage.definition import StudySnapshot
from storage.reading import read_study
from storage.records import Verdict
from sweep.paths import runs_directory, storage_url


def step_rows(snapshot: StudySnapshot) -> Iterator[dict[str, Any]]:
    """Yield a row for each trial of a study that was measured to the end, in their order."""
    for record in snapshot.records:
        if record.verdict is Verdict.FITS and record.measurement is not None:
            yield {
                "model": snapshot.definition.model["name"],
                "config": record.config.model_dump(mode="json"),
                "step_seconds": record.measurement.step_seconds,
                "step_seconds_ci95": list(record.measurement.step_seconds_ci95),
                "peak_allocated_bytes": record.measurement.peak_allocated_bytes,
                "peak_reserved_bytes": record.measurement.peak_reserved_bytes,
                "flags": list(record.measurement.flags),
            }


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("studies", nargs="+")
    arguments.add_argument("--storage")
    options = arguments.parse_args()
    url = storage_url(options.storage)
    studies = [read_study(name, url=url, home=runs_directory()) for name in options.studies]
    lines = [json.dumps(row) for study in studies for row in step_rows(study)]
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} trials of {len(studies)} studies", flush=True)


if __name__ == "__main__":
    main()
