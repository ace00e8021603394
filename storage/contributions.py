"""Contributions: what a study measured on a real GPU, in a file that says nothing of its owner.

A contribution is a surface of the GPU that ran, with the machine's versions and limits. All its
text is from closed lists; other text is neither written nor read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict, Field

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.documents import known_key, parse_object, read_text
from qlora_sweep.search_spaces.errors import InputError, NothingFits, quote
from qlora_sweep.search_spaces.gpus import find_gpu, match_product
from qlora_sweep.search_spaces.linears import known_linear_modules
from qlora_sweep.search_spaces.models import ModelSpec, shipped_models
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.environment import PACKAGES
from qlora_sweep.storage.records import NEIGHBOUR, SPEED_REUSED, TrialRecord
from qlora_sweep.storage.surfaces import (
    Bytes,
    Header,
    Number,
    Surface,
    SurfaceRow,
    parse_surface,
    surface_lines,
)

VERSION = 1
BYTES_MAX = 2**20
"""Four times as much as the 246 trials of the largest recorded surface take."""
DIGEST_LENGTH = 12

Package = Annotated[str, AfterValidator(partial(known_key, known=PACKAGES))]
_RELEASE = (
    r"\d{1,6}(\.\d{1,8}){0,4}((a|b|rc|\.post|\.dev)\d{1,8})?"
    r"(\+(cpu|(cu|rocm)\d{1,4}(\.\d{1,4}){0,2}))?"
)
_DRIVER = r"\d[\d.]{0,19}"
_IS_DAY = AfterValidator(lambda text: str(date.fromisoformat(text)))
Release = Annotated[str, Field(pattern=rf"^{_RELEASE}$")]
"""A version without the local part that a build of one's own has."""


class ContributionHeader(Header):
    """The first line of a contribution."""

    model_config = ConfigDict(extra="forbid")

    contribution: Annotated[int, Field(ge=1, strict=True)]
    date: Annotated[str, Field(pattern=r"^20\d\d-[01]\d-[0-3]\d$"), _IS_DAY]
    versions: dict[Package, Release] = Field(default={})
    driver: Annotated[str, Field(pattern=f"^{_DRIVER}$")] | None = None
    gpu_memory_bytes: Bytes | None = None
    power_limit_watts: Number | None = None


class ContributedRow(SurfaceRow):
    """Any other line."""

    model_config = ConfigDict(extra="forbid")

    needed: ClassVar = ("tokens_per_second", "step_seconds", "peak_allocated_bytes")


@dataclass(frozen=True)
class Contribution:
    """A contribution as it was read."""

    surface: Surface
    header: ContributionHeader
    digest: str
    """Of the file's bytes: what it is called where it is kept."""
    text: str

    @property
    def measured(self) -> tuple[SurfaceRow, ...]:
        """The trials that ran to their end."""
        return tuple(row for row in self.surface.rows if row.verdict == "fits")


def contribution_of(snapshot: StudySnapshot) -> Contribution:
    """Return what a study measured as a contribution: of the GPU that ran, not of the target.

    Left out are trials that shared their GPU, that have no interval, that several GPUs ran, and
    those that another study measured.

    Raises:
        InputError: nothing of it may be contributed; the message says why.
        NothingFits: nothing was measured.
    """
    name, target = f"study '{snapshot.name}'", snapshot.definition.target
    if not target.is_on_gpu:
        raise InputError(f"{name} ran on a CPU: only what a GPU measured is contributed")
    model = ModelSpec.from_json(snapshot.definition.model)
    told = [record for record in snapshot.records if _is_told(record, model)]
    header, *rows = surface_lines(snapshot, told)
    if not any(row["verdict"] == "fits" for row in rows):
        raise NothingFits(f"{name} has no trial of its own to contribute")
    gpu, environment = find_gpu(header["measured_on"]), snapshot.environment
    # The newest run may have been on another machine.
    here = match_product(environment.get("gpu") or "", environment.get("gpu_memory_bytes"))
    is_here = here == gpu
    driver = re.fullmatch(_DRIVER, environment.get("driver") or "") if is_here else None
    limits = ("gpu_memory_bytes", "power_limit_watts")
    versions = environment.get("versions") or {}
    releases = {p: re.match(_RELEASE, str(versions.get(p) or "")) for p in PACKAGES}
    header |= {
        "model": _public_name(model, name),
        "model_config": {k: v for k, v in model.config.items() if _is_public({k: v})},
        "gpu": gpu.name,
        "measured_on": gpu.product,
        "contribution": VERSION,
        "versions": {package: match[0] for package, match in releases.items() if match},
        "driver": driver and driver[0],
        **{key: environment.get(key) if is_here else None for key in limits},
    }
    for row in rows:
        row.pop("predicted_peak_allocated_bytes", None)
    text = "".join(json.dumps(line) + "\n" for line in (header, *rows))
    return parse_contribution(text, name)


def _is_told(record: TrialRecord, model: ModelSpec) -> bool:
    config, measured = record.config, record.measurement
    is_alone = config.data_parallel == 1 and not config.is_sharded and record.carried is None
    is_own = measured is None or (
        measured.step_seconds_ci95 is not None
        and {NEIGHBOUR, SPEED_REUSED}.isdisjoint(measured.flags)
    )
    return is_alone and is_own and _has_known_targets(config, model)


def _public_name(model: ModelSpec, study: str) -> str:
    """Return the shipped architecture's name, or the architecture's type where none is the same."""
    shipped = next((s for s in shipped_models() if s.fingerprint == model.fingerprint), None)
    if shipped is None and not _is_public(model.model_type):
        raise InputError(
            f"{study}: no shipped architecture is of model type '{model.model_type}', so nothing "
            "could be learned of its speed"
        )
    return model.model_type if shipped is None else shipped.name


def _words(value: object) -> Iterator[str]:
    """Yield every key and text in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        for inner in inside:
            yield from _words(inner)


@cache
def _public_words() -> frozenset[str]:
    shipped = shipped_models()
    return frozenset(w for model in shipped for w in (model.name, *_words(model.config)))


def _is_public(value: object) -> bool:
    """Whether all text in a value stands in the shipped architectures as well."""
    return set(_words(value)) <= _public_words()


def read_contribution(path: Path) -> Contribution:
    """Read a contribution from a file.

    Raises:
        EnvironmentFault: the file is there and cannot be read.
        InputError: it cannot be read either, or as `parse_contribution` raises it.
    """
    return parse_contribution(read_text(path, label=str(path)), str(path))


def parse_contribution(text: str, label: str) -> Contribution:
    """Return the contribution that a text is.

    Raises:
        InputError: it is none, or holds what a contribution does not hold; the message names line
            and key after the label.
    """
    data = text.encode()
    if len(data) > BYTES_MAX:
        raise InputError(f"{label}: larger than a contribution's {BYTES_MAX:,} bytes")
    line = f"{label}: line 1"
    version = parse_object(text.partition("\n")[0], where=line).get("contribution")
    if version is None:
        raise InputError(f"{line}: contribution is missing: `sweep contribute` writes one")
    if version != VERSION:
        of = f"{line}: contribution is of version {quote(version)}"
        raise InputError(f"{of}, and this sweep reads {VERSION}")
    surface = parse_surface(text, label, header_type=ContributionHeader, row_type=ContributedRow)
    header = surface.header
    assert isinstance(header, ContributionHeader), "it was read as one"
    if not _is_public([header.model, header.config]):
        raise InputError(f"{line}: model: holds words that no shipped architecture has")
    for row in surface.rows:
        if not _has_known_targets(row.config, surface.model):
            modules = quote(row.config.target_modules)
            raise InputError(f"{label}: target_modules {modules}: the architecture has none such")
    if surface.card.name != surface.gpu:
        raise InputError(f"{line}: gpu and measured_on are two GPUs")
    return Contribution(surface, header, hashlib.sha256(data).hexdigest()[:DIGEST_LENGTH], text)


def _has_known_targets(config: TrialConfig, model: ModelSpec) -> bool:
    modules = config.target_modules
    return isinstance(modules, str) or set(modules) <= set(known_linear_modules(model) or ())
