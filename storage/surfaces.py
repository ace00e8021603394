"""Owns a surface: recorded trials of one model on one GPU, as a file that samplers can be tried
on.

Reading is strict, and says file, line and key. Knows nothing of samplers, or of how the trials were
run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from search_spaces.config import TrialConfig, canonical
from search_spaces.documents import ContradictionError, Document, parse_object, read_text, validate
from search_spaces.errors import InputError, NothingFits, quote
from search_spaces.gpus import GpuSpec, find_gpu, gpu_catalogue, match_product
from search_spaces.models import ModelSpec, checked_config
from storage.definition import StudySnapshot
from storage.records import TrialRecord, Verdict

VERSION = 1
SPEED_REPEATS_WITHIN = 0.05
"""Relative: two measurements of one configuration that are further apart contradict each other."""
PEAK_REPEATS_WITHIN = 0.01
"""The same of the allocated peak, which repeats to the byte on one machine."""
LEAST_TOO_LARGE = 1e18
"""No speed, time or amount of memory reaches it."""

Number = Annotated[float, Field(gt=0, lt=LEAST_TOO_LARGE, strict=True)]
Bytes = Annotated[int, Field(gt=0, lt=LEAST_TOO_LARGE)]
Name = Annotated[str, Field(min_length=1)]


class SurfaceRow(BaseModel):
    """One configuration and what came of it; None where an out-of-memory trial has no number."""

    model_config = ConfigDict(frozen=True)

    config: TrialConfig
    verdict: Literal["fits", "oom"]
    tokens_per_second: Number | None = None
    step_seconds: Number | None = None
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    device_seconds: Number | None = None
    predicted_peak_allocated_bytes: Bytes | None = None
    """What was predicted of it before it ran, where that is known."""

    @field_validator("config")
    @classmethod
    def _rows_are_full(cls, config: TrialConfig) -> TrialConfig:
        if config.packing != "none":
            raise ValueError(
                f"packing {config.packing} is of texts, and a surface is of full rows: leave the "
                "line out"
            )
        return config

    @model_validator(mode="after")
    def _what_fits_was_measured(self) -> Self:
        for key in ("tokens_per_second", "step_seconds", "peak_allocated_bytes", "device_seconds"):
            if self.verdict == "fits" and getattr(self, key) is None:
                raise ContradictionError(f"{key} must be a number where the verdict is fits")
        return self

    def fits(self, budget_bytes: int) -> bool:
        """Whether it ran, and its allocated peak is within the budget."""
        peak = self.peak_allocated_bytes
        return self.verdict == "fits" and peak is not None and peak <= budget_bytes


class _Header(BaseModel):
    """What the first line says."""

    surface: Annotated[int, Field(ge=1, strict=True)]
    model: Name
    config: dict[str, Any] = Field(alias="model_config")
    gpu: Name
    measured_on: Name
    date: str | None = None
    budget_bytes: Bytes | None = None


@dataclass(frozen=True)
class Surface:
    """Recorded trials of one model on one GPU, each configuration once."""

    name: str
    """The file as the person named it."""
    model: ModelSpec
    gpu: str
    """Catalogue name of the GPU that the trials were for."""
    card: GpuSpec
    """The GPU that they ran on."""
    rows: tuple[SurfaceRow, ...]
    repeated: int = 0
    """Rows that said again what an earlier one had said."""
    date: str = ""
    """When it was recorded, as its file says; empty where it does not."""
    budget_bytes: int | None = None
    """Under which it was recorded, as its file says: what ran out needs more than this."""

    def fitting(self, budget_bytes: int) -> tuple[SurfaceRow, ...]:
        """Return the rows that fit a budget, the fastest first."""
        rows = (row for row in self.rows if row.fits(budget_bytes))
        return tuple(sorted(rows, key=lambda row: -(row.tokens_per_second or 0.0)))


def read_surface(name: str) -> Surface:
    """Read a surface from a file of JSON lines.

    Raises:
        InputError: not to be read, another version's, of a GPU or model that is not known, or a
            row that is none or that contradicts another; the message names file, line and key.
        EnvironmentFault: the file is there and cannot be read.
    """
    lines = [
        (f"{name}: line {number}", line)
        for number, line in enumerate(read_text(Path(name), label=name).split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise InputError(f"{name}: the file is empty; its first line says what the surface is of")
    header = _header(*lines[0])
    known: dict[TrialConfig, tuple[str, SurfaceRow]] = {}
    for where, line in lines[1:]:
        row = validate(SurfaceRow, parse_object(line, where=where), Document(where))
        first, other = known.setdefault(canonical(row.config), (where, row))
        _check_agreement(first, other, where, row)
    if not known:
        raise InputError(f"{name}: no trial in it; each line after the first is one")
    rows = tuple(row for _, row in known.values())
    return Surface(name, rows=rows, repeated=len(lines) - 1 - len(rows), **header)


def _header(where: str, line: str) -> dict[str, Any]:
    """Return what the first line says, by the names of `Surface`."""
    values = parse_object(line, where=where)
    if "surface" not in values:
        raise InputError(
            f"{where}: surface is missing: the first line says what the surface is of, "
            f'{{"surface": {VERSION}, "model": ..., "model_config": ..., "gpu": ..., '
            '"measured_on": ...}'
        )
    header = validate(_Header, values, Document(where))
    if header.surface > VERSION:
        raise InputError(
            f"{where}: surface is of version {header.surface}, and this sweep reads {VERSION}: use "
            "the one that wrote it, or a newer one"
        )
    config = checked_config(header.config, label=f"{where}: model_config")
    return {
        # Its config stands here, so nothing is looked for anywhere.
        "model": ModelSpec(header.model, "directory", config),
        "gpu": _card(header.gpu, f"{where}: gpu").name,
        "card": _card(header.measured_on, f"{where}: measured_on"),
        "date": header.date or "",
        "budget_bytes": header.budget_bytes,
    }


def _card(name: str, where: str) -> GpuSpec:
    """Return the GPU of a name, the catalogue's or the product's."""
    try:
        return match_product(name) or find_gpu(name)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _check_agreement(first: str, row: SurfaceRow, where: str, other: SurfaceRow) -> None:
    within = {
        "verdict": 0.0,
        "tokens_per_second": SPEED_REPEATS_WITHIN,
        "peak_allocated_bytes": PEAK_REPEATS_WITHIN,
    }
    for key, share in within.items():
        old, new = getattr(row, key), getattr(other, key)
        if old == new or (
            share and (not old or not new or abs(old - new) <= share * max(old, new))
        ):
            continue
        number = first.rpartition("line ")[2]
        raise InputError(
            f"{where}: {key} {quote(new)} contradicts line {number}, which says {quote(old)} "
            "of the same configuration: keep one of them"
        )


def surface_text(snapshot: StudySnapshot) -> str:
    """Return a study as a surface: its trials that fit or ran out of memory, each configuration
    once, by the last of them.

    Raises:
        InputError: it was measured on texts, whose lengths a surface has no place for, or on a GPU
            that the catalogue does not have.
        NothingFits: nothing was measured.
    """
    definition, name = snapshot.definition, f"study '{snapshot.name}'"
    texts = definition.texts
    if texts is not None:
        raise InputError(
            f"{name}: a surface is of full rows, and its trials trained on {texts.source}, whose "
            "lengths decide what is fast; a study without texts makes one"
        )
    target = definition.target
    if target.recorded is not None:
        raise InputError(f"{name}: its trials are those of a surface; nothing of it was measured")
    card = gpu_catalogue().get(target.gpu)
    product = target.emulated_on or (card.product if card else target.gpu)
    if match_product(product) is None or target.device != "cuda":
        raise InputError(f"{name}: a surface is of a GPU of the catalogue, and this is '{product}'")
    rows = {canonical(r.config): row for r in snapshot.records if (row := _row_of(r))}
    if not rows:
        raise NothingFits(f"{name} has nothing to export: no trial of it fits or ran out of memory")
    header = {
        "surface": VERSION,
        "model": definition.model["name"],
        "model_config": definition.model["config"],
        "gpu": target.gpu,
        "measured_on": product,
        "date": max(r.started_at or "" for r in snapshot.records)[:10],
        "budget_bytes": target.budget_bytes,
    }
    lines = (row.model_dump(mode="json", exclude=_unpredicted(row)) for row in rows.values())
    return "".join(json.dumps(line) + "\n" for line in (header, *lines))


def _unpredicted(row: SurfaceRow) -> set[str]:
    """Return the key that a row has only where something was predicted of it."""
    key = "predicted_peak_allocated_bytes"
    return {key} if row.predicted_peak_allocated_bytes is None else set()


def _seconds(record: TrialRecord) -> float | None:
    """Return the device's time; the whole trial's where it is not kept apart.

    What another study ran took none here: a measurement knows its own, running out does not.
    """
    if record.carried is None:
        return max(record.device_seconds or record.wall_seconds, 1e-3)
    measured = record.measurement
    return None if measured is None else measured.setup_seconds + measured.measured_seconds


def _row_of(record: TrialRecord) -> SurfaceRow | None:
    prediction, measured = record.prediction, record.measurement
    known = {
        "config": record.config,
        "device_seconds": _seconds(record),
        "predicted_peak_allocated_bytes": prediction and prediction.peak_allocated_bytes,
    }
    if record.verdict is Verdict.OOM:
        # What it had allocated when it failed is no peak of its own.
        return SurfaceRow(verdict="oom", **known)
    if record.verdict is not Verdict.FITS or measured is None:
        return None
    numbers = ("tokens_per_second", "step_seconds", "peak_allocated_bytes", "peak_reserved_bytes")
    return SurfaceRow(verdict="fits", **{key: getattr(measured, key) for key in numbers}, **known)
