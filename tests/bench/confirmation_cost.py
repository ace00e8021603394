"""Say where the time of a study's confirmation went, from what the study stored.

Run after a study: ``python -m tests.bench.confirmation_cost STUDY [STORAGE]``, with `SWEEP_HOME` as
it was for the study. Prints one JSON object a line: each run with when it ended after the search
and what it took, then the whole.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from storage.definition import StudySnapshot
from storage.ranking import rank_study
from storage.reading import read_study
from storage.records import TrialRecord
from sweep.paths import runs_directory, storage_url


def ended(record: TrialRecord) -> datetime:
    assert record.started_at is not None
    return datetime.fromisoformat(record.started_at) + timedelta(seconds=record.wall_seconds)


def costs(snapshot: StudySnapshot) -> Iterator[dict[str, Any]]:
    """Yield a line for each run of the newest confirmation, then one for all of it."""
    searched = max(map(ended, snapshot.records))
    newest = max((record.series for record in snapshot.confirmations), default=0)
    runs = [record for record in snapshot.confirmations if record.series == newest]
    for record in runs:
        measured = record.measurement
        inside = None if measured is None else measured.setup_seconds + measured.measured_seconds
        yield {
            "purpose": record.purpose,
            "trial": record.confirms,
            "verdict": str(record.verdict),
            "ended_after_search_s": round((ended(record) - searched).total_seconds(), 2),
            "device_s": round(record.device_seconds, 2),
            "worker_start_s": None if inside is None else round(record.device_seconds - inside, 2),
            "tokens_per_second": None if measured is None else round(measured.tokens_per_second, 1),
        }
    ranking = rank_study(snapshot)
    yield {
        "confirmed": ranking.is_confirmed,
        "runs": ranking.runs,
        "tied": list(ranking.tied),
        "seconds_after_search": round((max(map(ended, runs)) - searched).total_seconds(), 2)
        if runs
        else None,
    }


if __name__ == "__main__":
    study, *storage = sys.argv[1:]
    url = storage_url(storage[0] if storage else None)
    for line in costs(read_study(study, url=url, home=runs_directory())):
        print(json.dumps(line))
