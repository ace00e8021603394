"""How the search went: its history, and what trials reached by each setting."""

from __future__ import annotations

from qlora_sweep.reports.document import TrialTable
from qlora_sweep.reports.figures import Section
from qlora_sweep.reports.history import history_of
from qlora_sweep.reports.slices import slices_of
from qlora_sweep.storage.records import Verdict


def search_of(document: TrialTable) -> Section | None:
    """Return how a search went, by the first of its objectives; None where fewer than two trials
    fitted."""
    key: str = document.view.objectives[0]
    if key == "peak_memory":
        key = "peak_allocated"
    elif key == "tokens_per_second":
        key = document.speed_key
    column = document.columns.get(key)
    if column is None:
        return None
    of_space = {record.number for record in document.view.of_space}
    rows = []
    fitting = []
    for row, record in enumerate(document.records):
        if column.values[row] is None or record.number not in of_space:
            continue
        rows.append(row)
        if record.verdict is Verdict.FITS:
            fitting.append(row)
    if len(fitting) < 2:
        return None
    figures = [history_of(document, key, rows)]
    slices = slices_of(document, key, fitting)
    if slices is not None:
        figures.append(slices)
    return Section(figures=figures)
