"""Contributions: what a study measured on a GPU, as a surface without a word of its owner's."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.documents import known_key, read_text
from qlora_sweep.search_spaces.errors import InputError, NothingFits, quote
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.linears import known_linear_modules
from qlora_sweep.search_spaces.models import ModelSpec, shipped_models
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.environment import PACKAGES
from qlora_sweep.storage.records import NEIGHBOUR, SPEED_REUSED, TrialRecord, Verdict
from qlora_sweep.storage.surfaces import (
    Header,
    Surface,
    SurfaceRow,
    parse_surface,
    surface_lines,
)

VERSION = 1

Package = Annotated[str, AfterValidator(partial(known_key, known=PACKAGES))]
_RELEASE = (
    r"\d{1,6}(\.\d{1,8}){0,4}((a|b|rc|\.post|\.dev)\d{1,8})?"
    r"(\+(cpu|(cu|rocm)\d{1,4}(\.\d{1,4}){0,2}))?"
)
"""A version without the local part that a build of one's own has."""
Release = Annotated[str, Field(pattern=rf"^{_RELEASE}$")]
Day = Annotated[str, AfterValidator(lambda text: str(date.fromisoformat(text)))]


class ContributionHeader(Header):
    """The first line of a contribution."""

    model_config = ConfigDict(extra="forbid")

    contribution: Literal[1]
    date: Day
    versions: dict[Package, Release]


class ContributedRow(SurfaceRow):
    """Any other line."""

    model_config = ConfigDict(extra="forbid")

    needed: ClassVar = ("tokens_per_second", "step_seconds", "peak_allocated_bytes")


@dataclass(frozen=True)
class Contribution:
    """A contribution as it was read."""

    surface: Surface
    text: str

    @property
    def digest(self) -> str:
        """Of the text: what it is called where it is kept."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    @property
    def measured(self) -> tuple[SurfaceRow, ...]:
        """The trials that ran to their end."""
        return tuple(row for row in self.surface.rows if row.verdict == "fits")


def contribution_of(snapshot: StudySnapshot) -> Contribution:
    """Return what a study measured as a contribution: of the GPU that ran, not of the target.

    Left out are trials that shared their GPU, that have no interval, that several GPUs ran, and
    those that another study measured. Raises `InputError`, or `NothingFits` for want of trials.
    """
    name = f"study '{snapshot.name}'"
    if not snapshot.definition.target.is_on_gpu:
        raise InputError(f"{name} ran on a CPU: only what a GPU measured is contributed")
    model = _shipped(ModelSpec.from_json(snapshot.definition.model), name)
    contributed = [record for record in snapshot.records if _is_contributed(record, model)]
    header, *rows = surface_lines(snapshot, contributed)
    if not any(record.verdict is Verdict.FITS for record in contributed):
        raise NothingFits(f"{name} has no trial of its own to contribute")
    gpu = find_gpu(header["measured_on"])
    header |= {
        "model": model.name,
        "model_config": model.config,
        "gpu": gpu.name,
        "measured_on": gpu.product,
        "contribution": VERSION,
        "versions": {},
    }
    installed = snapshot.environment.get("versions") or {}
    for package in PACKAGES:
        release = re.match(_RELEASE, str(installed.get(package) or ""))
        if release is not None:
            header["versions"][package] = release[0]
    for row in rows:
        row.pop("predicted_peak_allocated_bytes", None)
    lines = list(map(json.dumps, [header] + rows))
    text = "\n".join(lines) + "\n"
    return parse_contribution(text, name)


def _is_contributed(record: TrialRecord, model: ModelSpec) -> bool:
    measured = record.measurement
    if record.config.data_parallel > 1 or record.carried is not None:
        return False
    if measured is not None:
        is_disturbed = not {NEIGHBOUR, SPEED_REUSED}.isdisjoint(measured.flags)
        if is_disturbed or measured.step_seconds_ci95 is None:
            return False
    return _has_known_targets(record.config, model)


def _shipped(model: ModelSpec, where: str) -> ModelSpec:
    """Return the shipped architecture that a model is of."""
    for shipped in shipped_models():
        if shipped.fingerprint == model.fingerprint:
            return shipped
    raise InputError(f"{where}: its model is of no architecture that ships (`sweep models`)")


def read_contribution(path: Path) -> Contribution:
    """Read a contribution from a file. Raises what `read_text` and `parse_contribution` raise."""
    return parse_contribution(read_text(path, label=str(path)), str(path))


def parse_contribution(text: str, label: str) -> Contribution:
    """Return the contribution that a text is.

    Raises:
        InputError: it is none; the message names line and key after the label.
    """
    surface = parse_surface(text, label, header_type=ContributionHeader, row_type=ContributedRow)
    model = _shipped(surface.model, f"{label}: line 1")
    if surface.measured_on.name != surface.gpu:
        raise InputError(f"{label}: line 1: gpu and measured_on are two GPUs")
    for row in surface.rows:
        if not _has_known_targets(row.config, model):
            modules = quote(row.config.target_modules)
            raise InputError(f"{label}: target_modules {modules}: {model.name} has none such")
    return Contribution(replace(surface, model=model), text)


def _has_known_targets(config: TrialConfig, model: ModelSpec) -> bool:
    modules = config.target_modules
    return isinstance(modules, str) or set(modules) <= set(known_linear_modules(model) or ())
