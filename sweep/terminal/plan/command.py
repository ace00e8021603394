"""`sweep plan` once its options are read: resolve the question, answer it, print."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import RenderableType

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.feasibility import refuse_impossible
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from search_spaces.redaction import redacted
from search_spaces.space import SearchSpace
from storage.definition import StudySnapshot
from sweep.data.choice import ReadTexts
from sweep.data.texts import PreparedTexts, TextsRequest, prepare_texts
from sweep.paths import cache_directory, runs_directory, storage_url
from sweep.planning.backwards import Cheapest, longest_rows, on_card, ranked
from sweep.planning.candidates import NOT_ASKED
from sweep.planning.documents import (
    card_document,
    cheapest_document,
    comparison_document,
    epoch_document,
    forecast_document,
    longest_document,
)
from sweep.planning.plan import (
    CardPlan,
    bill_offers,
    compare_cards,
    plan_card,
)
from sweep.planning.question import (
    PlanRequest,
    Predictor,
    Question,
    StudyReader,
    read_configurations,
    resolve_request,
)
from sweep.planning.survey import Survey, survey
from sweep.predict.forecast import UNBUILDABLE, Forecast, Forecaster, Progress, silent
from sweep.predict.memory.predictor import MemoryPredictor, TracingPredictor
from sweep.predict.memory.profile_store import Tracer, TracingChildren
from sweep.running.device_info import Card, read_card
from sweep.terminal.console import note, say_as_is
from sweep.terminal.plan.backwards import cheapest_view, longest_views
from sweep.terminal.plan.forecast import configurations_view
from sweep.terminal.plan.layout import rendered
from sweep.terminal.plan.view import plan_view, plans_view
from sweep.terminal.texts import tell_notes
from sweep.terminal.working import working

DONE, NOTHING_FITS = 0, 1


def tracing(children: Tracer) -> Predictor:
    """Return what makes predictors that trace the model's own code, and keep what was traced."""

    def traced(model: ModelSpec, gpu: GpuSpec) -> MemoryPredictor:
        return TracingPredictor(
            model,
            cache_dir=cache_directory() / "memory",
            compute_capability=gpu.compute_capability,
            tracer=children,
        )

    return traced


def _read_study(name: str, storage: str | None) -> StudySnapshot:
    # Of all plans only one with --from needs Optuna, which takes longer to import than to answer.
    from storage.reading import read_study

    return read_study(name, url=storage_url(storage), home=runs_directory())


def plan(request: PlanRequest, **seams: Any) -> int:
    """Answer and print; return 0, or 1 where nothing fits. Takes and raises what `answer` does."""
    with working("predicting") as progress:
        read_texts = partial(_read_texts, progress=progress)
        found = answer(request, read_texts=read_texts, progress=progress, **seams)
    lines = "\n".join(json.dumps(redacted(d), allow_nan=False) for d in found.documents)
    say_as_is(lines if request.as_json else _text(found.view))
    return DONE if found.fits else NOTHING_FITS


def answer(
    request: PlanRequest,
    *,
    read_texts: ReadTexts,
    read_study: StudyReader = _read_study,
    progress: Progress = silent,
    predictor: Predictor | None = None,
    card: Callable[[], Card | None] = read_card,
    tell: Callable[[str], None] = note,
) -> Answer:
    """Return what `plan` prints, for a program and for a person.

    Args:
        request: what was typed.
        read_texts: reads and tokenizes a dataset.
        read_study: reads the study whose trials calibrate.
        progress: told how far it is.
        predictor: makes what predicts memory; by default it traces the model's own code, in
            children that serve all questions of this plan.
        GPU: reads the GPU in this machine, for where none is named.
        tell: told what the dataset made of the space.

    Raises:
        InputError: something that was typed, written or named is not right.
        EnvironmentFault: a file, the hub, the database or the tracing process is not to be had.
    """
    with closing(TracingChildren(outlive=True)) as children:
        question = resolve_request(
            request,
            predictor=predictor or tracing(children),
            card=card,
            read_study=read_study,
            read_texts=read_texts,
        )
        for line in _text_notes(question):
            tell(line)
        return _answered(question, progress)


def _read_texts(request: TextsRequest, *, progress: Progress) -> PreparedTexts:
    texts = prepare_texts(request, on_progress=lambda what, done, of: progress(what)(done, of))
    tell_notes(texts, request.model)
    return texts


def _text_notes(question: Question) -> tuple[str, ...]:
    """Return what texts made of the GPUs' spaces, each once."""
    notes = (line for gpu in question.gpus for line in question.text_notes(gpu))
    return tuple(dict.fromkeys(notes))


@dataclass(frozen=True)
class Answer:
    """What is printed, for a program and for a person."""

    documents: Sequence[Mapping[str, Any]]
    """A line of JSON each."""
    view: RenderableType
    fits: bool
    """Whether anything does."""


def _answered(question: Question, progress: Progress) -> Answer:
    request = question.request
    if request.from_file is not None:
        return _many(question, request.from_file, progress)
    if request.is_longest:
        return _longest(question, progress)
    if request.is_cheapest:
        return _cheapest(question, progress)
    return _of_each_card(question, progress)


def _of_each_card(question: Question, progress: Progress) -> Answer:
    """Return the plan of each GPU and their comparison."""
    work, offers = question.request.work, question.offers
    is_detailed = question.request.is_detailed
    plans = [_card_plan(question, question.forecaster(gpu), progress) for gpu in question.gpus]
    fits = any(plan.fits for plan in plans)
    if len(plans) == 1:
        view = plan_view(plans[0], is_detailed=is_detailed)
        return Answer([card_document(plans[0])], view, fits)

    def look(forecaster: Forecaster, about: SearchSpace | TrialConfig) -> Forecast | None:
        if isinstance(about, TrialConfig):
            return forecaster.expect(about)
        return _surveyed(about, forecaster, progress).recommended

    comparison = compare_cards(plans, work=work, offers=offers, look=look)
    view = plans_view(plans, comparison, is_detailed=is_detailed)
    return Answer([comparison_document(plans, comparison)], view, fits)


def _card_plan(question: Question, forecaster: Forecaster, progress: Progress) -> CardPlan:
    work, offers = question.request.work, question.offers.get(forecaster.gpu.name, ())
    about, asked = question.about(forecaster.gpu), NOT_ASKED
    if isinstance(about, TrialConfig):
        looked_at: Survey | Forecast = forecaster.forecast([about], progress=progress)[0]
    else:
        looked_at = _surveyed(about, forecaster, progress)
        asked = question.asked(forecaster.gpu)
    return plan_card(looked_at, work=work, offers=offers, asked=asked, progress=progress)


def _surveyed(space: SearchSpace, forecaster: Forecaster, progress: Progress) -> Survey:
    directory = cache_directory() / "surveys"
    return survey(space, forecaster, directory=directory, progress=progress)


def _longest(question: Question, progress: Progress) -> Answer:
    """Return the longest sequences on each GPU."""
    answers = [
        longest_rows(
            question.about(gpu),
            question.forecaster(gpu),
            asked=question.asked(gpu),
            progress=progress,
        )
        for gpu in question.gpus
    ]
    fits = any(answer.best is not None for answer in answers)
    documents = [longest_document(answer) for answer in answers]
    document = documents[0] if len(documents) == 1 else {"plans": documents}
    view = longest_views(answers, is_detailed=question.request.is_detailed)
    return Answer([document], view, fits)


def _cheapest(question: Question, progress: Progress) -> Answer:
    """Return what a job costs on each GPU."""
    tell, cards = progress("GPUs looked at"), []
    for done, gpu in enumerate(question.gpus):
        tell(done, len(question.gpus))
        cards.append(
            on_card(
                question.about(gpu),
                question.forecaster(gpu),
                work=question.request.work,
                offers=question.offers.get(gpu.name, ()),
                deadline_seconds=question.request.within_seconds,
                progress=progress,
            )
        )
    tell(len(cards), len(cards))
    bills = [bill for card in cards for bill in card.bills]
    answer = Cheapest(
        model=question.model,
        workload=bills[0].workload if bills else None,
        held=question.held,
        deadline_seconds=question.request.within_seconds,
        cards=ranked(cards),
    )
    view = cheapest_view(answer, is_detailed=question.request.is_detailed)
    return Answer([cheapest_document(answer)], view, answer.cheapest is not None)


def _many(question: Question, name: str, progress: Progress) -> Answer:
    """Return the answer for each configuration of a file."""
    (gpu,) = question.gpus
    forecaster, offers = question.forecaster(gpu), question.offers.get(gpu.name, ())
    lines = read_configurations(name)
    for where, config in lines:
        try:
            refuse_impossible(config, model=question.model)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    known = forecaster.forecast([config for _, config in lines], progress=progress)
    known.replay(progress)
    forecasts = [_forecast_line(where, known[at]) for at, (where, _) in enumerate(lines)]
    bills = [
        bill_offers(forecast, work=question.request.work, offers=offers) for forecast in forecasts
    ]
    documents = [
        forecast_document(f, bills=b) | epoch_document(f, b)
        for f, b in zip(forecasts, bills, strict=True)
    ]
    view = configurations_view(forecasts, [b[0] if b else None for b in bills])
    return Answer(documents, view, any(forecast.fits for forecast in forecasts))


def _forecast_line(where: str, forecast: Forecast) -> Forecast:
    """Return the forecast of a line of a file.

    Raises:
        InputError: it names modules that the model does not have, which is a mistake in the file
            and no answer about memory.
    """
    if forecast.broken is not None and forecast.broken.rule == UNBUILDABLE:
        raise InputError(f"{where}: {forecast.broken.reason}")
    return forecast


def _text(view: Any) -> str:
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    return rendered(view, is_terminal=is_terminal, width=width)
