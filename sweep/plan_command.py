"""Owns what `sweep plan` does once its options are read: settle the question, answer it, print.

Needs no GPU and no network. Knows nothing of how options are spelled.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from search_spaces.config import TrialConfig, parse_config
from search_spaces.errors import InputError, did_you_mean
from search_spaces.gpus import GIB, GpuSpec, find_gpu, gpu_catalogue, match_product
from search_spaces.loading import load_space, preset_names
from search_spaces.model_files import load_model_spec
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer, load_prices
from search_spaces.space import SearchSpace
from sweep.cards import Card, read_card
from sweep.console import say
from sweep.places import cache_directory, default_storage, runs_directory
from sweep.plan_cache import kept_survey
from sweep.plan_file import read_configurations
from sweep.plan_view import configurations_view, plan_view, plans_view, rendered
from sweep.planning.cost import AskedWork, bills
from sweep.planning.documents import card_document, comparison_document, forecast_document
from sweep.planning.evidence import NO_EVIDENCE, Evidence, evidence_from
from sweep.planning.forecast import Forecaster, MemoryPredictor
from sweep.planning.plan import (
    CardPlan,
    compare_cards,
    plan_configuration,
    plan_space,
    recipe_space,
)
from sweep.predict import memory

DONE, NOTHING_FITS = 0, 1
DEFAULT_MODEL = "mistral-7b-v0.3"


@dataclass(frozen=True)
class PlanRequest:
    """What was typed."""

    space: str | None = None
    """A preset, a YAML file, or a card."""
    gpus: tuple[str, ...] = ()
    model: str | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """Keys of one configuration; empty where none was asked about."""
    from_file: str | None = None
    work: AskedWork = field(default_factory=AskedWork)
    prices: Path | None = None
    study: str | None = None
    storage: str | None = None
    as_json: bool = False


Predictor = Callable[[ModelSpec, GpuSpec], MemoryPredictor]
"""Makes what predicts the memory of a model on a card."""


def traced(model: ModelSpec, gpu: GpuSpec) -> MemoryPredictor:
    """Return the predictor that traces the model's own code, and keeps what it traced."""
    return memory.MemoryPredictor(
        model,
        cache_dir=cache_directory() / "memory",
        compute_capability=gpu.compute_capability,
    )


def plan(
    request: PlanRequest,
    *,
    predictor: Predictor = traced,
    card: Callable[[], Card | None] = read_card,
) -> int:
    """Answer and print; return 0, or 1 where nothing fits.

    Args:
        request: what was typed.
        predictor: makes what predicts memory.
        card: reads the card in this machine, for where none is named.

    Raises:
        InputError: something that was typed, written or named is not right.
        EnvironmentFault: a file, the hub, the database or the tracing process is not to be had.
    """
    question = _settle(request, predictor=predictor, card=card)
    with _working(request):
        if request.from_file is not None:
            text, fits = _many(question, request.from_file)
        else:
            text, fits = _cards(question)
    say(text)
    return DONE if fits else NOTHING_FITS


@dataclass(frozen=True)
class Question:
    """What was asked, with every name looked up."""

    request: PlanRequest
    space: SearchSpace | None
    """None where no space was named."""
    model: ModelSpec
    gpus: tuple[GpuSpec, ...]
    offers: Mapping[str, tuple[Offer, ...]]
    """By card."""
    predictor: Predictor

    @cached_property
    def configuration(self) -> TrialConfig | None:
        """The one configuration that is asked about, if one is."""
        values = self.request.configuration
        return parse_config(values, where="options") if values else None

    def forecaster(self, gpu: GpuSpec) -> Forecaster:
        """Return what answers for one card."""
        return Forecaster(
            model=self.model,
            gpu=gpu,
            budget_bytes=_budget(self.space, gpu),
            memory=self.predictor(self.model, gpu),
            evidence=_evidence(self.request, self.model, gpu),
        )


def _settle(
    request: PlanRequest,
    *,
    predictor: Predictor,
    card: Callable[[], Card | None],
) -> Question:
    _check(request)
    space, named = _space(request.space)
    if named is not None and request.gpus:
        raise InputError(f"'{request.space}' is a card and --gpu names another: use --gpu alone")
    inner = named.name if named is not None else "auto" if space is None else space.gpu
    found = [_gpu(name, card) for name in request.gpus or (inner,)]
    gpus = tuple({gpu.name: gpu for gpu in found}.values())
    if request.from_file is not None and len(gpus) > 1:
        raise InputError(f"--from-file answers for one card, got {len(gpus)}: name one --gpu")
    model = load_model_spec(request.model or (space.model if space else DEFAULT_MODEL))
    return Question(
        request=request,
        space=space,
        model=model,
        gpus=gpus,
        offers=load_prices(request.prices or _own_prices()),
        predictor=predictor,
    )


def _check(request: PlanRequest) -> None:
    if request.configuration and request.from_file is not None:
        key = next(iter(request.configuration))
        raise InputError(f"{key} and --from-file are both given: keep one")
    if request.storage is not None and request.study is None:
        raise InputError("--storage needs --study: which study to calibrate from")


def _space(name: str | None) -> tuple[SearchSpace | None, GpuSpec | None]:
    """Return the space that was named, or the card where it is no space."""
    if name is None:
        return None, None
    try:
        return load_space(name), None
    except InputError:
        cards = {card for gpu in gpu_catalogue().values() for card in (gpu.name, *gpu.aliases)}
        if name.strip().lower() in cards:
            return None, find_gpu(name)
        if "/" in name or Path(name).suffix or Path(name).exists():
            raise
        known = cards | {preset.name for preset in preset_names()}
        raise InputError(
            f"'{name}' is no preset, no YAML file and no GPU{did_you_mean(name, known)}"
        ) from None


def _gpu(name: str, card: Callable[[], Card | None]) -> GpuSpec:
    """Return the card of that name; ``auto`` is the one in this machine."""
    if name == "cpu":
        raise InputError(
            "gpu is cpu, and what is predicted is a card's memory and speed: name a card with "
            "--gpu, or measure with `sweep run`"
        )
    if name != "auto":
        return find_gpu(name)
    here = card()
    if here is None:
        raise InputError("no GPU is named and none is here: name one with --gpu (`sweep gpus`)")
    spec = match_product(here.product)
    if spec is None:
        raise InputError(
            f"the catalogue does not have the {here.product} that is here: name a card with --gpu "
            "(`sweep gpus`)"
        )
    return spec


def _own_prices() -> Path | None:
    """Return the user's price file, if there is one."""
    path = runs_directory() / "prices.yaml"
    return path if path.exists() else None


def _budget(space: SearchSpace | None, gpu: GpuSpec) -> int:
    """Return what a training may take: the card's budget, or the tighter one of the space."""
    if space is None or space.budget_gib is None:
        return gpu.budget_bytes
    return min(gpu.budget_bytes, int(space.budget_gib * GIB))


def _evidence(request: PlanRequest, model: ModelSpec, gpu: GpuSpec) -> Evidence:
    if request.study is None:
        return NO_EVIDENCE
    # Only this needs Optuna, which takes longer to import than a plan takes to make.
    from storage.reading import read_study

    url = request.storage or default_storage()
    snapshot = read_study(request.study, url=url, home=runs_directory())
    return evidence_from(snapshot, model=model, gpu=gpu)


@contextmanager
def _working(request: PlanRequest) -> Iterator[None]:
    """Show on a terminal's stderr that a plan is being made: a new model takes seconds to trace."""
    if not sys.stderr.isatty() or request.as_json:
        yield
        return
    with Console(stderr=True).status("predicting; a model that is new here takes longer"):
        yield


def _cards(question: Question) -> tuple[str, bool]:
    """Return the plan of each card and their comparison, and whether anything fits."""
    plans = [_card_plan(question, gpu) for gpu in question.gpus]
    fits = any(one.fits for one in plans)
    if len(plans) == 1:
        (only,) = plans
        document, view = card_document(only), plan_view(only)
    else:
        comparison = compare_cards(plans, work=question.request.work, offers=question.offers)
        document = comparison_document(plans, comparison)
        view = plans_view(plans, comparison)
    return (_json(document) if question.request.as_json else _text(view)), fits


def _card_plan(question: Question, gpu: GpuSpec) -> CardPlan:
    forecaster = question.forecaster(gpu)
    offers = question.offers.get(gpu.name, ())
    work = question.request.work
    if question.configuration is not None:
        return plan_configuration(
            question.configuration, forecaster=forecaster, work=work, offers=offers
        )
    space = question.space or recipe_space(gpu, question.model)
    found = kept_survey(space, forecaster, directory=cache_directory() / "surveys")
    return plan_space(found, forecaster=forecaster, work=work, offers=offers)


def _many(question: Question, name: str) -> tuple[str, bool]:
    """Return the answer for each configuration of a file, and whether any of them fits."""
    (gpu,) = question.gpus
    forecaster, offers = question.forecaster(gpu), question.offers.get(gpu.name, ())
    forecasts = []
    for where, config in read_configurations(name):
        try:
            forecasts.append(forecaster.forecast(config))
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    every = [
        bills(one, work=question.request.work, offers=offers, model=question.model)
        for one in forecasts
    ]
    fits = any(one.fits for one in forecasts)
    if question.request.as_json:
        documents = zip(forecasts, every, strict=True)
        return "\n".join(_json(forecast_document(f, bills=b)) for f, b in documents), fits
    return _text(configurations_view(forecasts, [b[0] if b else None for b in every])), fits


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, allow_nan=False)


def _text(view: Any) -> str:
    is_terminal = sys.stdout.isatty()
    width = os.get_terminal_size().columns if is_terminal else None
    return rendered(view, is_terminal=is_terminal, width=width)
