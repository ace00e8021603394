"""Owns settling what a plan is asked about: each name that was typed becomes what it names.

Knows nothing of how options are spelled, nor of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig, parse_config
from search_spaces.errors import InputError, did_you_mean
from search_spaces.gpus import GIB, GpuSpec, find_gpu, gpu_names, match_product
from search_spaces.loading import load_space, preset_name, shipped_presets
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.prices import Offer, load_prices
from search_spaces.space import SearchSpace
from sweep.paths import own_price_file, runs_directory, storage_url
from sweep.planning.cost import AskedWork
from sweep.planning.evidence import NO_EVIDENCE, Evidence, evidence_from
from sweep.planning.forecast import Forecaster, MemoryPredictor
from sweep.planning.narrowing import narrowed
from sweep.planning.plan import Asked, SpaceKind, recipe_space
from sweep.running.device_info import Card

DEFAULT_MODEL = "mistral-7b-v0.3"

Predictor = Callable[[ModelSpec, GpuSpec], MemoryPredictor]
"""Makes what predicts the memory of a model on a card."""


@dataclass(frozen=True)
class PlanRequest:
    """What was typed."""

    space: str | None = None
    """A preset, a YAML file, or a card."""
    gpus: tuple[str, ...] = ()
    model: str | None = None
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a configuration: held fixed while the rest of the space is searched."""
    is_exact: bool = False
    """Whether one configuration is asked about: what is not typed is the standard recipe's."""
    from_file: str | None = None
    work: AskedWork = field(default_factory=AskedWork)
    prices: Path | None = None
    study: str | None = None
    storage: str | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Question:
    """What was asked, with every name looked up."""

    request: PlanRequest
    space: SearchSpace | None
    """None where no space was named."""
    kind: SpaceKind
    """Where the space comes from."""
    model: ModelSpec
    gpus: tuple[GpuSpec, ...]
    offers: Mapping[str, tuple[Offer, ...]]
    """By card."""
    predictor: Predictor

    def about(self, gpu: GpuSpec) -> SearchSpace | TrialConfig:
        """Return what is asked of a card: a space, or one configuration.

        Raises:
            InputError: what was typed is no configuration, or does not go with the space.
        """
        typed = self.request.configuration
        if self.request.is_exact:
            return parse_config(typed, where="options")
        space = self.space or recipe_space(gpu, self.model)
        return narrowed(space, typed) if typed else space

    def asked(self) -> Asked:
        """Return what was asked, for the answer to say."""
        return Asked(kind=self.kind, held=self.request.configuration)

    def forecaster(self, gpu: GpuSpec) -> Forecaster:
        """Return what answers for one card."""
        return Forecaster(
            model=self.model,
            gpu=gpu,
            budget_bytes=_budget(self.space, gpu),
            memory=self.predictor(self.model, gpu),
            evidence=_evidence(self.request, self.model, gpu),
        )


def settle_question(
    request: PlanRequest, *, predictor: Predictor, card: Callable[[], Card | None]
) -> Question:
    """Look up every name that was typed.

    Args:
        request: what was typed.
        predictor: makes what predicts memory.
        card: reads the card in this machine, for where none is named.

    Raises:
        InputError: something that was typed or named is not right.
        EnvironmentFault: a file or the hub is not to be had.
    """
    _check(request)
    kind, space, named = _space(request.space)
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
        kind=kind,
        model=model,
        gpus=gpus,
        offers=load_prices(request.prices or own_price_file()),
        predictor=predictor,
    )


def _check(request: PlanRequest) -> None:
    if request.configuration and request.from_file is not None:
        key = next(iter(request.configuration))
        raise InputError(f"{key} and --from-file are both given: keep one")
    if request.storage is not None and request.study is None:
        raise InputError("--storage needs --study: which study to calibrate from")


def _space(name: str | None) -> tuple[SpaceKind, SearchSpace | None, GpuSpec | None]:
    """Return the space that was named and what it is, or the card where it is no space.

    A card by any of its names is the preset that is called like it, if one is: how a name is
    written changes no answer.
    """
    if name is None:
        return "standard", None, None
    cards = gpu_names()
    card = cards.get(name.strip().lower())
    preset = preset_name(name) or (preset_name(card.name) if card is not None else None)
    if preset is not None:
        return "preset", load_space(preset), None
    if card is not None and not Path(name).exists():
        return "standard", None, card
    try:
        return "file", load_space(name), None
    except InputError:
        if "/" in name or Path(name).suffix or Path(name).exists():
            raise
        known = [*cards, *(preset.name for preset in shipped_presets())]
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

    url = storage_url(request.storage)
    snapshot = read_study(request.study, url=url, home=runs_directory())
    return evidence_from(snapshot, model=model, gpu=gpu)
