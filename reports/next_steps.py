"""Owns what there is to do next: the winner whole, its commands, and what would beat it.

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
class NextSteps:
    """What a report says of its winner once it is decided for."""

    answer: Summary
    advice_title: str
    advice: tuple[str, ...]
    value_columns: tuple[str, ...]
    front: tuple[ConfigurationRow, ...]
    """Of several objectives, what none of them beats, the knee first."""
    confirmations: tuple[ConfirmationRow, ...]


def next_steps_of(snapshot: StudySnapshot) -> NextSteps | None:
    """Return what is to be done with a winner; None without one, as the decision says it then."""
    answer = summary_of(snapshot)
    if not answer.configuration:
        return None
    return NextSteps(
        answer=answer,
        advice_title=advice_title(snapshot),
        advice=tuple(how_to_go_faster(snapshot)),
        value_columns=tables.value_columns(snapshot),
        front=tables.front_rows(snapshot),
        confirmations=confirmation_rows(snapshot),
    )
