"""What a report is decided by: the answer, what to take instead for memory or money, and how sure
that is.

Speeds are those on the target GPU, and money follows from them. Which trial is the fastest goes by
them as well.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

import yaml

from qlora_sweep.reports import answer, words
from qlora_sweep.reports import format as units
from qlora_sweep.reports.advice import how_to_go_faster
from qlora_sweep.reports.comparison_words import training_words
from qlora_sweep.reports.view import StudyView
from qlora_sweep.search_spaces.costs import AskedWork
from qlora_sweep.storage.ranking import RankedTrial

SPEED_LOSS = 0.10
"""Share of the best speed that may be given up for memory."""


@dataclass(frozen=True)
class Choice:
    """The configuration to take, as text."""

    number: int
    what: str
    """The configuration in words, and what was odd about its measurement."""
    facts: tuple[tuple[str, str], ...]
    """Names and sentences, the terminal's own."""
    memory_share: float
    """Of the budget, 0 to 1."""
    recipes: tuple[tuple[str, str], ...]
    """What there is to copy: a label and the text."""


@dataclass(frozen=True)
class Decision:
    """The first screen of a report."""

    headline: str
    command: str
    """What to type to be surer; empty where nothing would help."""
    choice: Choice | None
    """None where nothing fits."""
    alternatives: tuple[tuple[str, str], ...]
    """What to take instead: for what, and that."""
    price_source: str
    notes: tuple[str, ...]
    advice: tuple[str, ...]
    """What it would take to have an answer; empty where there is one."""


def decision_of(view: StudyView, work: AskedWork | None = None) -> Decision:
    """Return what a report is decided by.

    Args:
        view: the study.
        work: the training that is to be priced; an epoch of the dataset where nothing is asked.
    """
    command = ""
    choice = None
    advice = []
    price_source = ""
    if view.winner is None:
        advice = how_to_go_faster(view)
    else:
        choice = _choice(view, view.winner, work or AskedWork())
        if not view.is_settled:
            command = answer.commands(view)[0]
    if view.offer is not None:
        price_source = view.offer.source
    return Decision(
        headline=answer.headline(view),
        command=command,
        choice=choice,
        alternatives=tuple(_alternatives(view)),
        price_source=price_source,
        notes=tuple(answer.notes(view)),
        advice=tuple(advice),
    )


def _choice(view: StudyView, winner: RankedTrial, work: AskedWork) -> Choice:
    measured = winner.measurement
    what = answer.in_words(winner.config, view.baseline_config)
    flags = words.flags_in_words(measured)
    if flags:
        what += f"; {flags}"
    facts = list(answer.winner_facts(view, winner))
    if not work.is_asked and winner.epoch is not None:
        work = AskedWork(tokens=winner.epoch.loss_tokens)
    training = training_words(view.snapshot, winner.number, work)
    if training:
        facts.append(("training", training))
    return Choice(
        number=winner.number,
        what=what,
        facts=tuple(facts),
        memory_share=min(1.0, measured.peak_allocated_bytes / view.gpu.budget_bytes),
        recipes=tuple(_recipes(view, winner)),
    )


def _recipes(view: StudyView, trial: RankedTrial) -> Iterator[tuple[str, str]]:
    """Yield what there is to copy: the command that writes a script of it, and its values."""
    if answer.commands(view):
        script = f"sweep export {shlex.quote(view.study)} --format script"
        yield "command", f"{script} --trial {trial.number}"
    values = trial.config.model_dump(mode="json")
    yield "JSON", json.dumps(values, indent=2)
    yield "YAML", yaml.safe_dump(values, sort_keys=False)


def _alternatives(view: StudyView) -> Iterator[tuple[str, str]]:
    """Yield what answers another question than the study's, where that is another trial."""
    if view.winner is None:
        return
    titles: dict[int, list[str]] = {}
    answers: dict[int, RankedTrial] = {}
    for title, trial in _other_questions(view, view.winner):
        if trial is not None and trial.number != view.winner.number:
            answers[trial.number] = trial
            titles.setdefault(trial.number, []).append(title)
    for number, trial in answers.items():
        parts = (
            answer.speed_on_target(view, trial),
            units.gib(trial.measurement.peak_allocated_bytes),
            f"gain {answer.gain_clause(view, trial)}",
            answer.in_words(trial.config, view.baseline_config),
        )
        yield "; ".join(titles[number]), f"trial {number}: {'; '.join(parts)}"


def _other_questions(
    view: StudyView, winner: RankedTrial
) -> Iterator[tuple[str, RankedTrial | None]]:
    """Yield what else may be asked of what fits, with the trial that answers it; None for none."""
    numbers = {trial.number for trial in view.ranked}
    fitting = [trial for trial in view.ranking.by_speed if trial.number in numbers]
    if not view.ratio(fitting[0], winner).is_open:
        yield "Fastest", fitting[0]
    of_class = view.fastest_of_baselines_class or view.measured_baseline
    yield f"Fastest at {words.capacity(view.baseline_config)}, as the baseline", of_class
    yield "Cheapest per token", _surely_cheapest(view, winner, fitting)
    if view.is_for_speed_alone:
        fitting = [trial for trial in fitting if view.ranking.is_asked(trial.config)]
    least = (1.0 - SPEED_LOSS) * max(map(attrgetter("estimate.value"), fitting))
    fast = (trial for trial in fitting if trial.estimate.value >= least)
    yield (
        f"Most memory left, at most {units.percent(SPEED_LOSS)} slower than the fastest",
        min(fast, key=lambda trial: trial.measurement.peak_allocated_bytes),
    )


def _surely_cheapest(
    view: StudyView, winner: RankedTrial, fitting: Iterable[RankedTrial]
) -> RankedTrial | None:
    """Return the cheapest trial of those that surely cost less than the winner; None for none."""
    of_winner = view.usd_interval(winner)
    if of_winner is None:
        return None
    costs = {}
    cheaper = []
    for trial in fitting:
        ends = view.usd_interval(trial)
        if ends is not None and ends[1] < of_winner[0]:
            costs[trial.number] = sum(ends)
            cheaper.append(trial)
    return min(cheaper, key=lambda trial: costs[trial.number], default=None)
