"""The held-out losses of a study, against speed and rank."""

from __future__ import annotations

from plotly.subplots import make_subplots

from qlora_sweep.reports.document import TrialTable
from qlora_sweep.reports.figures import AMBER, BLUE, PageFigure, Section, digits, framed, whiskers
from qlora_sweep.reports.words import held_out
from qlora_sweep.storage.ranking import RankedTrial
from qlora_sweep.storage.records import QualityReport


def quality_of(document: TrialTable) -> Section | None:
    """Return the section on held-out losses; None of a study that has none."""
    view = document.view
    judged: list[RankedTrial] = []
    qualities: list[QualityReport] = []
    for trial in view.ranked:
        quality = trial.measurement.quality
        if quality is not None:
            judged.append(trial)
            qualities.append(quality)
    if "eval_loss" not in view.objectives or not judged:
        return None
    how = _how(qualities[0])
    figure = _figure(judged, qualities, view.winner)
    return Section(how=how, figures=[figure])


def _how(quality: QualityReport) -> str:
    """Return how losses were measured and compared."""
    counted = held_out(quality)
    if quality.eval_wins is None:
        counted = f"{quality.eval_tokens:,} tokens of {counted}"
    return (
        f"Every trial that fits and is at least half as fast as the fastest trained on "
        f"{quality.train_tokens:,} supervised tokens, in the same order. The loss is the "
        f"mean over {counted}, cut at "
        f"{quality.eval_seq_len:,} each. A loss that these do not tell from the lowest (paired "
        "bootstrap, 95 %) counts as the lowest. The few that the choice is between were trained "
        "with several seeds; their interval is Student's, at 95 %, of the mean over those."
    )


def _figure(
    judged: list[RankedTrial], qualities: list[QualityReport], winner: RankedTrial | None
) -> PageFigure:
    losses = []
    ends = []
    for quality in qualities:
        losses.append(quality.eval_loss)
        ends.append(quality.eval_loss_ci95 or (quality.eval_loss, quality.eval_loss))
    numbers = []
    ranks = []
    colours = []
    symbols = []
    for trial in judged:
        numbers.append(trial.number)
        ranks.append(trial.config.lora_rank)
        if trial is winner:
            colours.append(AMBER)
            symbols.append("star")
        else:
            colours.append(BLUE)
            symbols.append("circle")
    speeds = digits(trial.measurement.tokens_per_second for trial in judged)
    figure = make_subplots(1, 2, shared_yaxes=True)
    for at, x in enumerate((speeds, ranks), start=1):
        figure.add_scatter(
            x=x,
            y=losses,
            customdata=numbers,
            mode="markers",
            error_y=whiskers(losses, ends) | {"color": BLUE},
            marker={"color": colours, "symbol": symbols, "size": 10},
            hovertemplate="trial %{customdata}: %{y:.4f}<extra></extra>",
            row=1,
            col=at,
        )
    figure.update_layout(framed(360), showlegend=False)
    figure.update_xaxes(title="supervised tokens/s", tickformat=",~r", row=1, col=1)
    figure.update_xaxes(title="LoRA rank", type="log", tickvals=sorted(set(ranks)), row=1, col=2)
    figure.update_yaxes(title="held-out loss (nats a token)", row=1, col=1)
    return PageFigure(
        "loss",
        "Held-out loss against speed and rank",
        "Each mark is a trial that trained; lower is better. Whiskers are 95 % intervals over "
        "seeds, where there are several.",
        figure,
    )
