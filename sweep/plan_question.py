"""Owns settling what a plan is asked about: each name that was typed becomes what it names.

Knows nothing of how options are spelled, nor of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from search_spaces.config import TrialConfig, parse_config
from search_spaces.errors import InputError, did_you_mean
from search_spaces.gpus import GIB, GpuSpec, find_gpu, gpu_catalogue, match_product
from search_spaces.loading import load_space, preset_names
from search_spaces.model_files import load_model_spec
from search_spaces.models import ModelSpec
from search_spaces.prices import Offer, load_prices
from search_spaces.space import SearchSpace
from sweep.cards import Card
from sweep.places import runs_directory, storage_url
from sweep.planning.cost import AskedWork
from sweep.planning.evidence import NO_EVIDENCE, Evidence, evidence_from
from sweep.planning.forecast import Forecaster, MemoryPredictor

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
    """Keys of one configuration; empty where none was asked about."""
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

    url = storage_url(request.storage)
    snapshot = read_study(request.study, url=url, home=runs_directory())
    return evidence_from(snapshot, model=model, gpu=gpu)
