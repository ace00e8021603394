"""Owns what `sweep plan` does once its options are read: resolve the question, answer it, print.

Needs no GPU and no network. Knows nothing of how options are spelled.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any

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
from sweep.planning.cache import cached_survey
from sweep.planning.cheapest import Cheapest, JobCard, on_card, ranked
from sweep.planning.comparison import compare_cards
from sweep.planning.documents import (
    card_document,
    cheapest_document,
    comparison_document,
    epoch_document,
    forecast_document,
    longest_document,
)
from sweep.planning.forecast import UNBUILDABLE, Forecast, Forecaster, Progress, silent
from sweep.planning.longest import longest_rows
from sweep.planning.plan import (
    CardPlan,
    bill_offers,
    epoch_of,
    plan_configuration,
    plan_space,
)
from sweep.planning.question import (
    PlanRequest,
    Predictor,
    Question,
    StudyReader,
    read_configurations,
    resolve_request,
)
from sweep.planning.survey import Survey
from sweep.predict.memory.predictor import MemoryPredictor, TracingPredictor
from sweep.predict.memory.tracing_children import Tracer, TracingChildren
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
    # Of all plans only one with --study needs Optuna, which takes longer to import than to answer.
    from storage.reading import read_study

    return read_study(name, url=storage_url(storage), home=runs_directory())


def plan(request: PlanRequest, **seams: Any) -> int:
    """Answer and print; return 0, or 1 where nothing fits. Takes and raises what `answer` does."""
    with working("predicting") as progress:
        read_texts = partial(_read_texts, progress=progress)
        text, fits = answer(request, read_texts=read_texts, progress=progress, **seams)
    say_as_is(text)
    return DONE if fits else NOTHING_FITS


def answer(
    request: PlanRequest,
    *,
    read_texts: ReadTexts,
    read_study: StudyReader = _read_study,
    progress: Progress = silent,
    predictor: Predictor | None = None,
    card: Callable[[], Card | None] = read_card,
    tell: Callable[[str], None] = note,
) -> tuple[str, bool]:
    """Return what `plan` prints, and whether anything fits.

    Args:
        request: what was typed.
        read_texts: reads and tokenizes a dataset.
        read_study: reads the study whose trials calibrate.
        progress: told how far it is.
        predictor: makes what predicts memory; by default it traces the model's own code, in
            children that serve all questions of this plan.
        card: reads the card in this machine, for where none is named.
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
    """Return what texts made of the cards' spaces, each once."""
    notes = (line for gpu in question.gpus for line in question.text_notes(gpu))
    return tuple(dict.fromkeys(notes))


def _answered(question: Question, progress: Progress) -> tuple[str, bool]:
    """Return what is printed, and whether anything fits."""
    request = question.request
    if request.from_file is not None:
        return _many(question, request.from_file, progress)
    if request.is_longest:
        return _longest(question, progress)
    if request.is_cheapest:
        return _cheapest(question, progress)
    return _of_each_card(question, progress)


def _of_each_card(question: Question, progress: Progress) -> tuple[str, bool]:
    """Return the plan of each card and their comparison, and whether anything fits."""
    work, offers = question.request.work, question.offers
    forecasters = {gpu.name: question.forecaster(gpu) for gpu in question.gpus}
    plans = [_card_plan(question, forecasters[gpu.name], progress) for gpu in question.gpus]
    fits = any(plan.fits for plan in plans)
    if len(plans) == 1:
        (only,) = plans
        document, view = card_document(only), plan_view(only)
    else:

        def look(plan: CardPlan, about: SearchSpace | TrialConfig) -> Forecast | None:
            return _preferred(about, forecasters[plan.gpu.name], progress)

        comparison = compare_cards(plans, work=work, offers=offers, look=look)
        document = comparison_document(plans, comparison)
        view = plans_view(plans, comparison)
    return (_json(document) if question.request.as_json else _text(view)), fits


def _card_plan(question: Question, forecaster: Forecaster, progress: Progress) -> CardPlan:
    work = question.request.work
    offers = question.offers.get(forecaster.gpu.name, ())
    about = question.about(forecaster.gpu)
    refuse_impossible(about, model=question.model, has_texts=question.texts is not None)
    if isinstance(about, TrialConfig):
        return plan_configuration(
            about, forecaster=forecaster, work=work, offers=offers, progress=progress
        )
    return plan_space(
        _surveyed(about, forecaster, progress),
        forecaster=forecaster,
        work=work,
        offers=offers,
        asked=question.asked(forecaster.gpu),
        progress=progress,
    )


def _preferred(
    about: SearchSpace | TrialConfig, forecaster: Forecaster, progress: Progress
) -> Forecast | None:
    if isinstance(about, TrialConfig):
        return forecaster.forecast(about)
    return _surveyed(about, forecaster, progress).recommended


def _surveyed(space: SearchSpace, forecaster: Forecaster, progress: Progress) -> Survey:
    directory = cache_directory() / "surveys"
    return cached_survey(space, forecaster, directory=directory, progress=progress)


def _longest(question: Question, progress: Progress) -> tuple[str, bool]:
    """Return the longest rows on each card, and whether any row fits."""
    answers = []
    for gpu in question.gpus:
        about = question.about(gpu)
        refuse_impossible(about, model=question.model, has_texts=question.texts is not None)
        forecaster, asked = question.forecaster(gpu), question.asked(gpu)
        answers.append(longest_rows(about, forecaster, asked=asked, progress=progress))
    fits = any(answer.best is not None for answer in answers)
    documents = [longest_document(answer) for answer in answers]
    document = documents[0] if len(documents) == 1 else {"plans": documents}
    return (_json(document) if question.request.as_json else _text(longest_views(answers))), fits


def _cheapest(question: Question, progress: Progress) -> tuple[str, bool]:
    """Return what a job costs on each card, and whether any does it by the deadline."""
    tell, cards = progress("cards looked at"), []
    for done, gpu in enumerate(question.gpus):
        tell(done, len(question.gpus))
        cards.append(_job_card(question, gpu, progress))
    tell(len(cards), len(cards))
    bills = [bill for card in cards for bill in card.bills]
    answer = Cheapest(
        model=question.model,
        workload=bills[0].workload if bills else None,
        held=question.held,
        deadline_seconds=question.request.within_seconds,
        cards=ranked(cards),
    )
    text = (
        _json(cheapest_document(answer))
        if question.request.as_json
        else _text(cheapest_view(answer))
    )
    return text, answer.cheapest is not None


def _job_card(question: Question, gpu: GpuSpec, progress: Progress) -> JobCard:
    about = question.about(gpu)
    if isinstance(about, TrialConfig):
        refuse_impossible(about, model=question.model, has_texts=question.texts is not None)
    return on_card(
        about,
        question.forecaster(gpu),
        work=question.request.work,
        offers=question.offers.get(gpu.name, ()),
        deadline_seconds=question.request.within_seconds,
        progress=progress,
    )


def _many(question: Question, name: str, progress: Progress) -> tuple[str, bool]:
    """Return the answer for each configuration of a file, and whether any of them fits."""
    (gpu,) = question.gpus
    forecaster, offers = question.forecaster(gpu), question.offers.get(gpu.name, ())
    lines = read_configurations(name)
    for where, config in lines:
        _refuse_impossible(where, config, forecaster)
    forecaster.foresee([config for _, config in lines], progress=progress, one_by_one=True)
    forecasts = [_forecast_line(where, config, forecaster) for where, config in lines]
    bills = [
        bill_offers(
            forecast,
            work=question.request.work,
            offers=offers,
            model=question.model,
            shapes=question.shapes,
        )
        for forecast in forecasts
    ]
    fits = any(forecast.fits for forecast in forecasts)
    if question.request.as_json:
        documents = zip(forecasts, bills, strict=True)
        lines_out = (
            forecast_document(f, bills=b)
            | epoch_document(epoch_of(f, question.shapes), f, b[0].offer if b else None)
            for f, b in documents
        )
        return "\n".join(map(_json, lines_out)), fits
    return _text(configurations_view(forecasts, [b[0] if b else None for b in bills])), fits


def _refuse_impossible(where: str, config: TrialConfig, forecaster: Forecaster) -> None:
    try:
        refuse_impossible(config, model=forecaster.model)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _forecast_line(where: str, config: TrialConfig, forecaster: Forecaster) -> Forecast:
    """Return the forecast of a line of a file.

    Raises:
        InputError: it names modules that the model does not have, which is a mistake in the file
            and no answer about memory.
    """
    forecast = forecaster.forecast(config)
    if forecast.broken is not None and forecast.broken.rule == UNBUILDABLE:
        raise InputError(f"{where}: {forecast.broken.reason}")
    return forecast


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(redacted(document), allow_nan=False)


def _text(view: Any) -> str:
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    return rendered(view, is_terminal=is_terminal, width=width)
