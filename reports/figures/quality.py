"""Owns the section on what configurations learned: held-out loss against speed and against rank.

Pure: a study's snapshot in, a value out whose drawings refer to the page's trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports import units, words
from reports.document import document_of
from reports.figures.figure import DataTable, PageFigure, trace_of
from reports.figures.style import MARKS, WINNER_COLOUR, framed, whiskers
from reports.sentences import rank_claim
from storage.definition import StudySnapshot
from storage.ranking import Ranking, measured_of, rank_study
from storage.records import TrialRecord, Verdict

LOSS = "eval_loss"


@dataclass(frozen=True)
class QualitySection:
    """What was learned, as the page shows it."""

    claim: str
    how: str
    figures: tuple[PageFigure, ...]


def quality_of(snapshot: StudySnapshot) -> QualitySection | None:
    """Return the section on held-out losses; None of a study that did not ask for them, or has none
    yet."""
    ranking = rank_study(snapshot)
    judged = [r for r in ranking.ranked if measured_of(r).quality is not None]
    if LOSS not in ranking.objectives or not judged:
        return None
    rows = _rows(snapshot, judged)
    speed = _figure(
        "loss-speed",
        "Held-out loss against speed",
        _drawing(rows, snapshot, x="@tokens_per_second", title="tokens/s that carry loss"),
        _table(judged),
    )
    ranks = [record.config.lora_rank for record in judged]
    rank = _figure(
        "loss-rank",
        "Held-out loss against rank",
        _drawing(rows, snapshot, x=ranks, title="LoRA rank", log=True),
        None,
    )
    return QualitySection(rank_claim(ranking), _how(ranking, judged[0]), (speed, rank))


def _rows(snapshot: StudySnapshot, judged: Sequence[TrialRecord]) -> list[int]:
    places = {t["number"]: row for row, t in enumerate(document_of(snapshot)["trials"])}
    return [places[record.number] for record in judged]


def _how(ranking: Ranking, record: TrialRecord) -> str:
    quality = measured_of(record).quality
    assert quality is not None, "a judged trial has a loss"
    return (
        f"Every trial that fits and is at least half as fast as the fastest trained on "
        f"{quality.train_tokens:,} tokens that carry loss, in the same order. The loss is the "
        f"mean over {quality.eval_tokens:,} held-out tokens, cut at {quality.eval_seq_len:,} a "
        "text. The few that the choice is between were trained with several seeds; their interval "
        "is Student's, at 95 %, of the mean over those."
    )


def _figure(
    name: str, title: str, drawing: Mapping[str, Any], table: DataTable | None
) -> PageFigure:
    caption = (
        "Each mark is a trial that trained; lower is better. Whiskers are 95 % intervals over "
        "seeds, where there are several."
    )
    return PageFigure(name, title, caption, drawing, table)


def _drawing(
    rows: Sequence[int], snapshot: StudySnapshot, *, x: Any, title: str, log: bool = False
) -> dict[str, Any]:
    trials = document_of(snapshot)["trials"]
    winner = set(document_of(snapshot)["named"]["winner"])
    mark = MARKS[Verdict.FITS]
    is_winner = [trials[row]["number"] in winner for row in rows]
    marker = {
        "color": [WINNER_COLOUR if wins else mark.colour for wins in is_winner],
        "symbol": ["star" if wins else mark.symbol for wins in is_winner],
        "size": 10,
    }
    losses = [trials[row][LOSS] for row in rows]
    low, high = f"{LOSS}_low", f"{LOSS}_high"
    ends = [
        (trials[row].get(low, at), trials[row].get(high, at))
        for row, at in zip(rows, losses, strict=True)
    ]
    look = {"marker": marker, "showlegend": False, "error_y": whiskers(losses, ends)}
    trace = trace_of("trained", rows, x, f"@{LOSS}", **look)
    across: dict[str, Any] = {"title": {"text": title}}
    if log:
        values = sorted(set(x))
        across |= {"type": "log", "tickmode": "array", "tickvals": values}
    else:
        across |= {"tickformat": ",~r"}
    up = {"title": {"text": "held-out loss (nats a token)"}}
    return {"data": [trace], "layout": framed(360) | {"xaxis": across, "yaxis": up}}


def _table(judged: Sequence[TrialRecord]) -> DataTable:
    rows = (
        (
            str(record.number),
            str(record.config.lora_rank),
            f"{record.config.learning_rate:g}",
            words.loss(measured_of(record)),
            units.rate(measured_of(record).tokens_per_second),
        )
        for record in judged
    )
    heads = ("trial", "rank", "learning rate", "held-out loss", "tokens/s")
    return DataTable(heads, tuple(rows))
