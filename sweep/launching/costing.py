"""Owns how long a study would take on a rented GPU, as the planner foresees it.

Knows no provider and no price.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from search_spaces.config import TrialConfig
from search_spaces.costs import checkpoint_bytes
from search_spaces.errors import InputError, NothingFits
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from search_spaces.space import ConfirmBudget, SearchSpace
from storage.confirmations import RUNS_TO_CONFIRM
from sweep.planning.question import Question
from sweep.planning.survey import (
    COMPILE_SECONDS,
    START_SECONDS,
    STEPS_OVER_FEWEST,
    TRIAL_SECONDS,
    Survey,
    survey,
)
from sweep.predict.forecast import Progress

LIMITS = ("trials", "time_budget_seconds")
"""Of a search, by the keys of a space."""


@dataclass(frozen=True)
class Course:
    """How a study goes on one GPU."""

    seconds: tuple[float, float] | None
    """Of the search, the least and the most; None where speed has no prediction."""
    least_seconds: float
    """Of the start and one trial."""
    download_bytes: float
    confirming: tuple[float, float] = (0.0, 0.0)
    """Of measuring the winner again and of its soak, on one GPU, the least and the most."""
    note: str | None = None
    """Why nothing is predicted."""


def foreseen(
    question: Question,
    gpu: GpuSpec,
    *,
    typed: SearchSpace,
    cache: Path,
    progress: Progress,
) -> Course:
    """Return how long the study takes that `sweep run` would make of a space.

    Args:
        question: the space, its model and texts, and the settings that are held.
        gpu: the GPU that is rented.
        typed: the space as it was typed, which has its limits and how its winner is confirmed.
        cache: directory of what was foreseen before.
        progress: told of what takes its time.

    Raises:
        NothingFits: by the prediction no configuration fits the GPU.
        InputError: what is held makes no space.
        EnvironmentFault: the tracing process does not answer.
    """
    # The space is run as it is: another GPU's own does not take its place.
    question = replace(question, has_own_spaces=False)
    space = question.about(gpu)
    assert isinstance(space, SearchSpace | TrialConfig)
    if isinstance(space, TrialConfig):
        raise InputError(
            "what is typed leaves nothing to search: rent for a study, and leave one setting open"
        )
    space = space.model_copy(update={key: getattr(typed, key) for key in LIMITS})
    bytes_ = _download_bytes(space, question.model)
    try:
        found = survey(space, question.forecaster(gpu), directory=cache, progress=progress)
    except InputError as error:
        return Course(None, START_SECONDS + TRIAL_SECONDS, bytes_, note=str(error))
    if not found.found.fit + found.found.uncertain:
        raise NothingFits(
            f"space '{space.name}': nothing of it is predicted to fit {gpu.name}, so none is "
            f"rented: sweep plan {space.name} --gpu {gpu.name} says by how much"
        )
    again = _confirming(found, typed.confirm)
    return Course(found.study_seconds(), _least(found), bytes_, confirming=again)


def _confirming(survey: Survey, budget: ConfirmBudget | None) -> tuple[float, float]:
    """Return what follows the search: the runs of the winner and its rivals, and the soak.

    The winner and what its gain is stated over are measured whatever that takes, and what was begun
    when the budget's time is over ends first.
    """
    step, error = survey.found.step_seconds, min(survey.found.step_uncertainty, 0.9)
    if budget is None or step is None:
        return 0.0, 0.0
    steps = survey.space.steps
    fewest = steps.warmup_min + steps.measured_min
    fast, slow = step * (1.0 - error), step * (1.0 + error)
    most = TRIAL_SECONDS + STEPS_OVER_FEWEST * fewest * slow
    runs = 2 * RUNS_TO_CONFIRM
    low = runs * (TRIAL_SECONDS + fewest * fast) + _soak(budget, fast)
    high = max(runs * most, budget.seconds + most) + _soak(budget, slow)
    return low, high


def _soak(budget: ConfirmBudget, step_seconds: float) -> float:
    if not budget.soak_seconds:
        return 0.0
    return TRIAL_SECONDS + min(budget.soak_seconds, budget.soak_steps * step_seconds)


def _least(survey: Survey) -> float:
    """Return what the start and one trial take, as fast a trial as may be."""
    budget = survey.space.steps
    steps = (budget.warmup_min + budget.measured_min) * (survey.found.step_seconds or 0.0)
    compiling = survey.found.compiled_share * COMPILE_SECONDS
    return START_SECONDS + TRIAL_SECONDS + compiling + steps


def _download_bytes(space: SearchSpace, model: ModelSpec) -> float:
    """Return the size of weights that have to be fetched from the hub."""
    if space.weights != "pretrained" or model.source != "hub":
        return 0.0
    return checkpoint_bytes(model)
