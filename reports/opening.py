"""Owns what follows the decision: the winner whole, what to do next, and what was measured again.

Pure: a study's snapshot in, finished text out.
"""

from __future__ import annotations

from dataclasses import dataclass

from reports import tables
from reports.advice import advice_title, how_to_go_faster
from reports.confirmation import ConfirmationRow, confirmation_rows
from reports.summary import Summary, summary_of
from reports.tables import ConfigurationRow
from storage.definition import StudySnapshot


@dataclass(frozen=True)
class Opening:
    """What a report says of its winner."""

    answer: Summary
    advice_title: str
    advice: tuple[str, ...]
    value_columns: tuple[str, ...]
    front: tuple[ConfigurationRow, ...]
    """Of several objectives, what none of them beats, the knee first."""
    confirmations: tuple[ConfirmationRow, ...]


def opening_of(snapshot: StudySnapshot) -> Opening:
    """Return what a report says of its winner."""
    return Opening(
        answer=summary_of(snapshot),
        advice_title=advice_title(snapshot),
        advice=tuple(how_to_go_faster(snapshot)),
        value_columns=tables.value_columns(snapshot),
        front=tables.front_rows(snapshot),
        confirmations=confirmation_rows(snapshot),
    )
