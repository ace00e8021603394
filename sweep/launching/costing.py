"""Owns how long a study would take on a rented card, as the planner foresees it.

Knows no provider and no price.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, NothingFits
from search_spaces.gpus import GpuSpec
from search_spaces.linears import parameters
from search_spaces.models import ModelSpec
from search_spaces.space import SearchSpace
from sweep.planning.cache import cached_survey
from sweep.planning.forecast import Progress
from sweep.planning.plan import CHECKPOINT_BYTES
from sweep.planning.question import Question
from sweep.planning.survey import COMPILE_SECONDS, START_SECONDS, TRIAL_SECONDS, Survey


@dataclass(frozen=True)
class Course:
    """How a study goes on one card."""

    seconds: tuple[float, float] | None
    """The least and the most; None where speed has no prediction."""
    least_seconds: float
    """Of the start and one trial."""
    download_bytes: float
    note: str | None = None
    """Why nothing is predicted."""


def foreseen(
    question: Question,
    gpu: GpuSpec,
    *,
    changes: Mapping[str, Any],
    cache: Path,
    progress: Progress,
) -> Course:
    """Return how long the study takes that `sweep run` would make of a space.

    Args:
        question: the space, its model and texts, and the knobs that are held.
        gpu: the card that is rented.
        changes: limits that were typed, by the keys of the space.
        cache: directory of what was foreseen before.
        progress: told of what takes its time.

    Raises:
        NothingFits: by the prediction no configuration fits the card.
        InputError: what is held makes no space.
        EnvironmentFault: the tracing process does not answer.
    """
    # The space is run as it is: another card has no preset of its own in its place.
    space = replace(question, own_card=None).about(gpu)
    assert isinstance(space, SearchSpace | TrialConfig)
    if isinstance(space, TrialConfig):
        raise InputError(
            "what is typed leaves nothing to search: rent for a study, and leave one knob open"
        )
    space = space.model_copy(update=dict(changes))
    bytes_ = _download_bytes(space, question.model)
    try:
        survey = cached_survey(space, question.forecaster(gpu), directory=cache, progress=progress)
    except InputError as error:
        return Course(None, START_SECONDS + TRIAL_SECONDS, bytes_, note=str(error))
    if not survey.counts.fit + survey.counts.uncertain:
        raise NothingFits(
            f"space '{space.name}': nothing of it is predicted to fit {gpu.name}, so none is "
            f"rented: sweep plan {space.name} --gpu {gpu.name} says by how much"
        )
    return Course(survey.study_seconds(), _least(survey), bytes_)


def _least(survey: Survey) -> float:
    """Return what the start and one trial take, as fast a trial as may be."""
    budget = survey.space.steps
    steps = (budget.warmup_min + budget.measured_min) * (survey.step_seconds or 0.0)
    compiling = survey.compiled_share * COMPILE_SECONDS
    return START_SECONDS + TRIAL_SECONDS + compiling + steps


def _download_bytes(space: SearchSpace, model: ModelSpec) -> float:
    """Return the size of weights that have to be fetched from the hub."""
    if space.weights != "pretrained" or model.source != "hub":
        return 0.0
    return float((parameters(model) or 0) * CHECKPOINT_BYTES)
