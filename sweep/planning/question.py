"""Owns what a plan is asked about: each name that was typed becomes what it names.

Also the file of configurations that may be named, one JSON object a line. Knows nothing of how
options are read, nor of answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from search_spaces.config import TrialConfig, parse_config
from search_spaces.documents import parse_object, read_text
from search_spaces.errors import InputError, did_you_mean
from search_spaces.gpus import GIB, GpuSpec, find_gpu, gpu_names, match_product
from search_spaces.loading import load_space, preset_name, shipped_presets, with_fixed
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.prices import Offer, load_prices
from search_spaces.space import DEFAULT_MODEL, SearchSpace
from storage.definition import StudySnapshot
from sweep.paths import own_price_file
from sweep.planning.evidence import NO_EVIDENCE, Evidence, evidence_from
from sweep.planning.forecast import Forecaster
from sweep.planning.plan import Asked, AskedWork, SpaceKind
from sweep.planning.spaces import standard_space
from sweep.predict.memory.predictor import MemoryPredictor
from sweep.running.device_info import Card

STDIN = "-"
"""Name of standard input."""

Predictor = Callable[[ModelSpec, GpuSpec], MemoryPredictor]
"""Makes what predicts the memory of a model on a card."""
StudyReader = Callable[[str, str | None], StudySnapshot]
"""Reads a study by its name and the storage that was typed.

Handed in, as it needs Optuna, which takes longer to import than most plans take to make.
"""


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
    read_study: StudyReader

    def about(self, gpu: GpuSpec) -> SearchSpace | TrialConfig:
        """Return what is asked of a card: a space, or one configuration.

        Raises:
            InputError: what was typed is no configuration, or does not go with the space.
        """
        typed = self.request.configuration
        if self.request.is_exact:
            return parse_config(typed, where="options")
        space = self.space or standard_space(gpu, self.model)
        return with_fixed(space, typed) if typed else space

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
            evidence=self._evidence(gpu),
        )

    def _evidence(self, gpu: GpuSpec) -> Evidence:
        if self.request.study is None:
            return NO_EVIDENCE
        snapshot = self.read_study(self.request.study, self.request.storage)
        return evidence_from(snapshot, model=self.model, gpu=gpu)


def resolve_request(
    request: PlanRequest,
    *,
    predictor: Predictor,
    card: Callable[[], Card | None],
    read_study: StudyReader,
) -> Question:
    """Look up every name that was typed.

    Args:
        request: what was typed.
        predictor: makes what predicts memory.
        card: reads the card in this machine, for where none is named.
        read_study: reads the study whose trials calibrate, for where one is named.

    Raises:
        InputError: something that was typed or named is not right.
        EnvironmentFault: a file or the hub is not to be had.
    """
    _check(request)
    kind, space, named = _space(request.space)
    if named is not None and request.gpus:
        raise InputError(f"'{request.space}' is a card and --gpu names another: use --gpu alone")
    inner = named.name if named is not None else "auto" if space is None else space.gpu
    named_gpus = [_gpu(name, card) for name in request.gpus or (inner,)]
    gpus = tuple({gpu.name: gpu for gpu in named_gpus}.values())
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
        read_study=read_study,
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


def read_configurations(
    name: str, *, stdin: BinaryIO | None = None
) -> list[tuple[str, TrialConfig]]:
    """Return each line's configuration, with where it stands for messages.

    Blank lines are skipped, missing keys take the recipe's defaults.

    Args:
        name: a file, or ``-`` for standard input.
        stdin: read for ``-``; the process's own by default.

    Raises:
        InputError: the file is missing or empty, or a line is no configuration; names file, line
            and key.
        EnvironmentFault: the file is there and cannot be read.
    """
    label, text = _text(name, stdin or sys.stdin.buffer)
    configurations = [
        (where, parse_config(parse_object(line, where=where), where=where))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
        for where in [f"{label}: line {number}"]
    ]
    if not configurations:
        raise InputError(f"{label}: no configuration in it; give one JSON object a line")
    return configurations


def _text(name: str, stdin: BinaryIO) -> tuple[str, str]:
    if name != STDIN:
        return name, read_text(Path(name), label=name)
    try:
        return "stdin", stdin.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"stdin: not UTF-8 text, byte {error.start} is wrong") from error
