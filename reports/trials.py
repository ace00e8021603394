"""The section of all trials: which verdicts its table, which the page draws, is filtered by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reports.outcomes import VERDICT_LABELS, VERDICT_MEANINGS
from storage.definition import StudySnapshot
from storage.ranking import verdict_counts
from storage.records import Verdict


@dataclass(frozen=True)
class TrialsSection:
    """What there is to choose from."""

    total: int
    verdicts: Mapping[str, str]
    """Of the trials that there are, each with its words and their count."""
    meanings: Mapping[str, str]
    """What each of these means, by its words."""


def trials_of(snapshot: StudySnapshot) -> TrialsSection | None:
    """Return what the table of all trials may be filtered by; None where there are none."""
    if not snapshot.records:
        return None
    counts = verdict_counts(snapshot.records)
    ended = [verdict for verdict in Verdict if counts[verdict]]
    return TrialsSection(
        total=len(snapshot.records),
        verdicts={str(v): f"{VERDICT_LABELS[v]} ({counts[v]:,})" for v in ended},
        meanings={VERDICT_LABELS[v]: VERDICT_MEANINGS[v] for v in ended},
    )
