"""`sweep plan`: a question is resolved, answered, and printed as JSON or as one screen."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.costs import Bill
from qlora_sweep.search_spaces.errors import InputError, NothingFits
from qlora_sweep.search_spaces.feasibility import refuse_impossible
from qlora_sweep.search_spaces.gpus import GpuSpec
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.redaction import redacted
from qlora_sweep.search_spaces.rules import Setting, own_settings
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.sweep.data.choice import ReadTexts
from qlora_sweep.sweep.export.grpo import grpo_config
from qlora_sweep.sweep.paths import cache_directory, runs_directory, storage_url
from qlora_sweep.sweep.planning import documents
from qlora_sweep.sweep.planning.backwards import Cheapest, longest_rows, on_card, ranked
from qlora_sweep.sweep.planning.calibrating import lessons, lessons_document
from qlora_sweep.sweep.planning.candidates import Asked
from qlora_sweep.sweep.planning.plan import CardPlan, bill_offers, compare_cards, plan_card
from qlora_sweep.sweep.planning.question import (
    PlanRequest,
    Predictor,
    Question,
    StudyReader,
    read_configurations,
    resolve_request,
)
from qlora_sweep.sweep.planning.survey import Survey, survey
from qlora_sweep.sweep.predict.forecast import UNBUILDABLE, Forecast, Forecaster, Progress, silent
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor, TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import Tracer, TracingChildren
from qlora_sweep.sweep.terminal import plan_screen
from qlora_sweep.sweep.terminal.console import note, say_as_is, width_of, working
from qlora_sweep.sweep.terminal.dataset import prepared
from qlora_sweep.sweep.terminal.drawing import PLAIN_WIDTH, rendered
from qlora_sweep.sweep.terminal.plan_details import configurations

if TYPE_CHECKING:
    from qlora_sweep.sweep.running.device_info import Card


@dataclass(frozen=True)
class Answer:
    """What is printed, for a program or for a person."""

    fits: bool
    """Whether anything does."""
    documents: Sequence[Mapping[str, Any]] = ()
    """A line of JSON each, where JSON is asked for."""
    view: RenderableType = ""
    """What a person sees, where it is not."""


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


def stored_study(name: str, storage: str | None) -> StudySnapshot:
    """Return a study whose trials are asked about."""
    # Only a plan with --from needs Optuna, which takes longer to import than to answer.
    from qlora_sweep.storage.reading import read_study

    return read_study(name, url=storage_url(storage), home=runs_directory())


def _read_card() -> Card | None:
    # Only a plan without a GPU's name needs NVML.
    from qlora_sweep.sweep.running.device_info import read_card

    return read_card()


def plan(request: PlanRequest, **seams: Any) -> int:
    """Answer and print; return 0, or 1 where nothing fits. Takes and raises what `answer` does."""
    with working("predicting") as progress:
        read_texts = partial(prepared, progress=progress)
        found = answer(request, read_texts=read_texts, progress=progress, **seams)
    if request.as_json:
        say_as_is("\n".join(json.dumps(redacted(d), allow_nan=False) for d in found.documents))
    else:
        width = width_of(sys.stdout)
        say_as_is(rendered(found.view, is_terminal=width is not None, width=width or PLAIN_WIDTH))
    return 0 if found.fits else NothingFits.exit_code


def answer(
    request: PlanRequest,
    *,
    read_texts: ReadTexts,
    read_study: StudyReader = stored_study,
    progress: Progress = silent,
    predictor: Predictor | None = None,
    card: Callable[[], Card | None] = _read_card,
    tell: Callable[[str], None] = note,
) -> Answer:
    """Return what `plan` prints, in the form that is asked for.

    Args:
        request: what was typed.
        read_texts: reads and tokenizes a dataset.
        read_study: reads the study whose trials calibrate.
        progress: told how far it is.
        predictor: makes what predicts memory; by default it traces the model's own code, in
            children that serve all questions of this plan.
        card: reads the GPU in this machine, for where none is named.
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
        for line in dict.fromkeys(n for gpu in question.gpus for n in question.text_notes(gpu)):
            tell(line)
        found = _answered(question, progress)
    traced = (one for one in question.predictors.values() if isinstance(one, TracingPredictor))
    for others in {one.other_versions for one in traced} - {""}:
        tell(f"memory is predicted from profiles of {others}")
    return found


def _said(
    question: Question,
    documents: Callable[[], Sequence[Mapping[str, Any]]],
    view: Callable[[], RenderableType],
    *,
    fits: bool,
) -> Answer:
    """Return an answer in the form that is asked for; the other would take as long again."""
    if question.request.as_json:
        return Answer(fits, documents())
    return Answer(fits, view=view())


def _answered(question: Question, progress: Progress) -> Answer:
    request = question.request
    if request.from_file is not None:
        return _of_file(question, request.from_file, progress)
    if request.is_longest:
        return _longest(question, progress)
    if request.is_cheapest:
        return _cheapest(question, progress)
    if request.devices is not None:
        return _ways(question, progress)
    return _of_each_gpu(question, progress)


def _of_each_gpu(question: Question, progress: Progress) -> Answer:
    """Return the plan of each GPU, and their comparison."""
    request = question.request
    if request.is_calibrating:
        return _calibrating(question, partial(_surveyed, progress=progress))
    look = partial(_look, progress=progress)
    plans = [_planned(question, gpu, progress) for gpu in question.gpus]
    is_detailed = request.is_detailed
    fits = any(plan.fits for plan in plans)
    if len(plans) == 1:
        return _said(
            question,
            lambda: [documents.card_document(plans[0]) | _for_trl(plans[0])],
            lambda: plan_screen.one_gpu(plans[0], is_detailed=is_detailed),
            fits=fits,
        )
    comparison = compare_cards(plans, work=request.work, offers=question.offers, look=look)
    return _said(
        question,
        lambda: [documents.comparison_document(plans, comparison)],
        lambda: plan_screen.several_gpus(plans, comparison, is_detailed=is_detailed),
        fits=fits,
    )


def _for_trl(plan: CardPlan) -> dict[str, Any]:
    """Return what GRPO's trainer is told, and what is missing; nothing under other methods."""
    if not plan.asked.grpo or plan.shown is None:
        return {}
    notes = [*plan.notes, f"generation {plan_screen.GENERATION}"]
    rate = plan.shown.learning_rate.value
    told = grpo_config(plan.shown.config, plan.asked.grpo, learning_rate=rate)
    return {"grpo_config": told, "notes": notes}


def _surveyed(space: SearchSpace, forecaster: Forecaster, *, progress: Progress) -> Survey:
    return survey(space, forecaster, directory=cache_directory() / "surveys", progress=progress)


def _planned(question: Question, gpu: GpuSpec, progress: Progress) -> CardPlan:
    about, forecaster = question.about(gpu), question.forecaster(gpu)
    is_one = isinstance(about, TrialConfig)
    return plan_card(
        forecaster.forecast([about], progress=progress)[0]
        if isinstance(about, TrialConfig)
        else _surveyed(about, forecaster, progress=progress),
        work=question.request.work,
        offers=question.offers.get(gpu.name, ()),
        asked=Asked(grpo=question.grpo) if is_one else question.asked(gpu),
        progress=progress,
    )


def _look(
    forecaster: Forecaster, about: SearchSpace | TrialConfig, *, progress: Progress
) -> Forecast | None:
    if isinstance(about, TrialConfig):
        return forecaster.expect(about)
    return _surveyed(about, forecaster, progress=progress).recommended


def _ways(question: Question, progress: Progress) -> Answer:
    """Return what one GPU of a host, all of them and shards come to.

    Raises:
        InputError: none of it is possible.
    """
    (gpu,), plans, refused = question.gpus, [], {}
    for way, asked in question.ways(gpu):
        try:
            plans.append(replace(_planned(asked, gpu, progress), way=way))
        except InputError as error:
            refused[way] = str(error)
    if not plans:
        raise InputError(next(iter(refused.values())))
    look = partial(_look, progress=progress)
    comparison = compare_cards(plans, work=question.request.work, offers={}, look=look)
    return _said(
        question,
        lambda: [documents.ways_document(plans, comparison, refused)],
        lambda: plan_screen.ways(
            plans,
            comparison,
            refused,
            devices=question.request.devices or 1,
            is_detailed=question.request.is_detailed,
        ),
        fits=any(plan.fits for plan in plans),
    )


def _calibrating(
    question: Question, surveyed: Callable[[SearchSpace, Forecaster], Survey]
) -> Answer:
    """Return the trials that would teach most of each GPU's speed.

    Raises:
        InputError: trials of several GPUs are asked for, which nobody contributes.
        NothingFits: on none is there anything to measure.
    """
    found = []
    for gpu in question.gpus:
        about = question.about(gpu)
        assert isinstance(about, SearchSpace), "one configuration is refused before"
        of_gpu = surveyed(about, question.forecaster(gpu))
        found.append(lessons(of_gpu, offers=question.offers.get(gpu.name, ())))
    answers = [answer for answer in found if answer is not None]
    if not answers:
        raise NothingFits("nothing surely fits whose speed is predicted, so no trial is worth it")
    if any(answer.answer.config.data_parallel > 1 for answer in answers):
        raise InputError("--calibrate: a contribution is of one GPU: leave data_parallel out")
    return _said(
        question,
        lambda: _of_gpus(map(lessons_document, answers)),
        lambda: plan_screen.calibrating(answers),
        fits=True,
    )


def _of_gpus(documents: Iterable[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the document of one GPU, or what holds those of several."""
    of_each = list(documents)
    return of_each if len(of_each) == 1 else [{"plans": of_each}]


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
    return _said(
        question,
        lambda: _of_gpus(map(documents.longest_document, answers)),
        lambda: plan_screen.longest(answers, is_detailed=question.request.is_detailed),
        fits=any(answer.best is not None for answer in answers),
    )


def _cheapest(question: Question, progress: Progress) -> Answer:
    """Return what a job costs on each GPU."""
    request, tell, cards = question.request, progress("GPUs looked at"), []
    for done, gpu in enumerate(question.gpus):
        tell(done, len(question.gpus))
        cards.append(
            on_card(
                question.about(gpu),
                question.forecaster(gpu),
                work=request.work,
                offers=question.offers.get(gpu.name, ()),
                deadline_seconds=request.within_seconds,
                progress=progress,
            )
        )
    faults = [card.fault for card in cards if card.fault is not None]
    if len(faults) == len(cards):
        raise faults[0]
    answer = Cheapest(
        model=question.model,
        workload=next((bill.workload for card in cards for bill in card.bills), None),
        held=question.held,
        deadline_seconds=request.within_seconds,
        cards=ranked(cards),
    )
    return _said(
        question,
        lambda: [documents.cheapest_document(answer)],
        lambda: plan_screen.cheapest(answer, is_detailed=request.is_detailed),
        fits=answer.cheapest is not None,
    )


def _of_file(question: Question, name: str, progress: Progress) -> Answer:
    """Return the answer for each configuration of a file.

    Raises:
        InputError: a line is impossible, or names modules that the model does not have.
    """
    (gpu,) = question.gpus
    forecaster, offers = question.forecaster(gpu), question.offers.get(gpu.name, ())
    own = {key: value for key, (value, _) in own_settings(question.model).items()}
    own["trainer"] = question.request.configuration.get("trainer", "sweep")
    lines = read_configurations(name, own=own)
    for where, config in lines:
        try:
            refuse_impossible(config, Setting(question.model, "cuda", None))
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    known = forecaster.forecast([config for _, config in lines], progress=progress)
    forecasts = [known[at] for at in range(len(lines))]
    for (where, _), forecast in zip(lines, forecasts, strict=True):
        if forecast.violation is not None and forecast.violation.rule == UNBUILDABLE:
            raise InputError(f"{where}: {forecast.violation.reason}")
    bills: dict[int, tuple[Bill, ...]] = {}
    found: dict[int, Mapping[str, Any]] = {}
    for at in known.replay(progress):
        one = forecasts[at]
        bills[at] = of = bill_offers(one, work=question.request.work, offers=offers)
        if question.request.as_json:
            epoch = documents.epoch_document(one, of)
            found[at] = documents.forecast_document(one, bills=of) | epoch
    return _said(
        question,
        lambda: [found[at] for at in range(len(lines))],
        lambda: configurations(forecasts, [next(iter(bills[at]), None) for at in sorted(bills)]),
        fits=any(forecast.fits for forecast in forecasts),
    )
