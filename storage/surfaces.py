"""Surfaces: recorded trials of one model on one GPU, as JSON lines that samplers are tried on.

Reading is strict, and says file, line and key.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.documents import (
    ContradictionError,
    Document,
    parse_object,
    read_text,
    validate,
)
from qlora_sweep.search_spaces.errors import InputError, NothingFits, quote
from qlora_sweep.search_spaces.gpus import (
    GpuSpec,
    find_gpu,
    gpu_catalogue,
    match_product,
    product_of,
)
from qlora_sweep.search_spaces.models import ModelSpec, checked_config
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.records import TrialRecord, Verdict

VERSION = 1
_REPEATS_WITHIN = {"verdict": 0.0, "tokens_per_second": 0.05, "peak_allocated_bytes": 0.01}
"""Relative: two rows of one configuration that are further apart contradict each other."""
_TOO_LARGE = 1e18
"""No speed, time or amount of memory reaches it."""

Number = Annotated[float, Field(gt=0, lt=_TOO_LARGE, strict=True)]
Bytes = Annotated[int, Field(gt=0, lt=_TOO_LARGE)]
Name = Annotated[str, Field(min_length=1)]


class SurfaceRow(BaseModel):
    """One configuration and what came of it; None where an out-of-memory trial has no number."""

    model_config = ConfigDict(frozen=True)

    needed: ClassVar[tuple[str, ...]] = (
        "tokens_per_second",
        "step_seconds",
        "peak_allocated_bytes",
        "device_seconds",
    )
    """Numbers that what fits has."""

    config: TrialConfig
    verdict: Literal["fits", "oom"]
    tokens_per_second: Number | None = None
    step_seconds: Number | None = None
    peak_allocated_bytes: Bytes | None = None
    peak_reserved_bytes: Bytes | None = None
    device_seconds: Number | None = None
    step_seconds_ci95: tuple[Number, Number] | None = None
    """Of the median step; None where too few steps were measured, or the file does not say."""
    predicted_peak_allocated_bytes: Bytes | None = None
    """What was predicted of it before it ran, where that is known."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.config.packing != "none":
            packing = f"config packing {self.config.packing} is of texts"
            raise ContradictionError(f"{packing}, and a surface of full rows: leave the line out")
        for key in self.needed:
            if self.verdict == "fits" and getattr(self, key) is None:
                raise ContradictionError(f"{key} must be a number where the verdict is fits")
        return self

    def fits(self, budget_bytes: int) -> bool:
        """Whether it ran, and its allocated peak is within the budget."""
        peak = self.peak_allocated_bytes
        return self.verdict == "fits" and peak is not None and peak <= budget_bytes


class Header(BaseModel):
    """What the first line says."""

    surface: Annotated[int, Field(ge=1, strict=True)]
    model: Name
    config: dict[str, Any] = Field(alias="model_config")
    gpu: Name
    measured_on: Name
    date: str = ""
    """When it was recorded; empty where that is not said."""
    budget_bytes: Bytes | None = None
    """Under which it was recorded: what ran out needs more than this."""


@dataclass(frozen=True)
class Surface:
    """Recorded trials of one model on one GPU, each configuration once."""

    name: str
    """The file as the person named it."""
    model: ModelSpec
    gpu: str
    """Catalogue name of the GPU that the trials were for."""
    measured_on: GpuSpec
    """The GPU that they ran on."""
    rows: tuple[SurfaceRow, ...]
    header: Header
    repeated: int = 0
    """Rows that said again what an earlier one had said."""

    def fitting(self, budget_bytes: int) -> tuple[SurfaceRow, ...]:
        """Return the rows that fit a budget, the fastest first."""
        rows = (row for row in self.rows if row.fits(budget_bytes))
        return tuple(sorted(rows, key=lambda row: -(row.tokens_per_second or 0.0)))


def read_surface(name: str) -> Surface:
    """Read a surface from a file of JSON lines.

    Raises:
        EnvironmentFault: the file is there and cannot be read.
        InputError: it cannot be read either, or as `parse_surface` raises it.
    """
    return parse_surface(read_text(Path(name), label=name), name)


def parse_surface(
    text: str,
    name: str,
    *,
    header_type: type[Header] = Header,
    row_type: type[SurfaceRow] = SurfaceRow,
) -> Surface:
    """Return the surface that JSON lines are.

    Args:
        text: the lines.
        name: where they came from, for messages.
        header_type: what the first line must be.
        row_type: what each further line must be.

    Raises:
        InputError: another version's, of a GPU or model that is not known, or a row that is none
            or that contradicts another; the message names file, line and key.
    """
    numbered = enumerate(text.split("\n"), start=1)
    lines = [(f"{name}: line {number}", line) for number, line in numbered if line.strip()]
    if not lines:
        raise InputError(f"{name}: the file is empty; its first line says what the surface is of")
    (where, first), *others = lines
    values = parse_object(first, where=where)
    if "surface" not in values:
        form = '"model": ..., "model_config": ..., "gpu": ..., "measured_on": ...'
        raise InputError(f'{where}: surface is missing in {{"surface": {VERSION}, {form}}}')
    header = validate(header_type, values, Document(where))
    if header.surface > VERSION:
        of = f"surface is of version {header.surface}, and this sweep reads {VERSION}"
        raise InputError(f"{where}: {of}: use the one that wrote it, or a newer one")
    config = checked_config(header.config, label=f"{where}: model_config")
    known: dict[TrialConfig, tuple[str, SurfaceRow]] = {}
    for at, line in others:
        row = validate(row_type, parse_object(line, where=at), Document(at))
        earlier, other = known.setdefault(canonical(row.config), (at, row))
        for key, share in _REPEATS_WITHIN.items():
            old = getattr(other, key)
            new = getattr(row, key)
            is_near = share and old and new and abs(old - new) <= share * max(old, new)
            if old != new and not is_near and (share == 0.0 or (old and new)):
                raise InputError(
                    f"{at}: {key} {quote(new)} contradicts line {earlier.rpartition('line ')[2]}, "
                    f"which says {quote(old)} of the same configuration: keep one of them"
                )
    if not known:
        raise InputError(f"{name}: no trial in it; each line after the first is one")
    return Surface(
        name,
        # Its config stands here, so nothing is looked for anywhere.
        model=ModelSpec(header.model, "directory", config),
        gpu=_gpu(header.gpu, f"{where}: gpu").name,
        measured_on=_gpu(header.measured_on, f"{where}: measured_on"),
        rows=tuple(row for _, row in known.values()),
        repeated=len(others) - len(known),
        header=header,
    )


def _gpu(name: str, where: str) -> GpuSpec:
    """Return the GPU of a name, the catalogue's or the product's."""
    try:
        return match_product(name) or find_gpu(name)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def surface_text(snapshot: StudySnapshot) -> str:
    """Return a study as a surface: its trials that fit or ran out of memory, each configuration
    once, by the last of them. Raises what `surface_lines` raises."""
    return "".join(json.dumps(line) + "\n" for line in surface_lines(snapshot, snapshot.records))


def surface_lines(
    snapshot: StudySnapshot, records: Sequence[TrialRecord]
) -> tuple[dict[str, Any], ...]:
    """Return the lines of some of a study's trials as a surface.

    Raises:
        InputError: it was measured on texts, whose lengths a surface has no place for, or on a GPU
            that the catalogue does not have.
        NothingFits: nothing was measured.
    """
    name = f"study '{snapshot.name}'"
    definition = snapshot.definition
    dataset = definition.texts
    target = definition.target
    if dataset is not None:
        full = f"{name}: a surface is of full rows"
        trained = f"its trials trained on {dataset.source}, whose lengths decide what is fast"
        raise InputError(f"{full}, and {trained}; a study without a dataset makes one")
    if target.recorded is not None:
        raise InputError(f"{name}: its trials are those of a surface; nothing of it was measured")
    gpu = gpu_catalogue().get(target.gpu)
    product = target.emulated_on or target.gpu
    if gpu is not None and target.emulated_on is None:
        product = product_of(gpu)
    if match_product(product) is None or not target.is_on_gpu:
        raise InputError(f"{name}: a surface is of a GPU of the catalogue, and this is '{product}'")
    rows = {}
    for record in records:
        row = _row_of(record)
        if row is not None:
            rows[canonical(record.config)] = row
    if not rows:
        raise NothingFits(f"{name} has nothing to export: no trial of it fits or ran out of memory")
    header = {
        "surface": VERSION,
        "model": definition.model["name"],
        "model_config": definition.model["config"],
        "gpu": target.gpu,
        "measured_on": product,
        "date": max(r.started_at or "" for r in records)[:10],
        "budget_bytes": target.budget_bytes,
    }
    return (header,) + tuple(rows.values())


def _row_of(record: TrialRecord) -> dict[str, Any] | None:
    """Return a trial as a line; None where it says nothing of speed and memory.

    Its seconds are the device's, or the whole trial's where those are not kept apart; of what
    another study ran those that the measurement knows.
    """
    if record.verdict not in (Verdict.OOM, Verdict.FITS):
        return None
    # What was allocated when memory ran out is no peak of its own.
    measured = record.measurement
    seconds: float | None = max(record.device_seconds or record.wall_seconds, 1e-3)
    if record.carried is not None:
        seconds = None
        if measured is not None:
            seconds = record.run_seconds
    row: dict[str, Any] = {
        "config": record.config.model_dump(mode="json"),
        "verdict": str(record.verdict),
        "tokens_per_second": None,
        "step_seconds": None,
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "device_seconds": seconds,
        "step_seconds_ci95": None,
    }
    if measured is not None:
        row |= {
            "tokens_per_second": measured.tokens_per_second,
            "step_seconds": measured.step_seconds,
            "peak_allocated_bytes": measured.peak_allocated_bytes,
            "peak_reserved_bytes": measured.peak_reserved_bytes,
            "step_seconds_ci95": measured.step_seconds_ci95,
        }
    if record.prediction is not None:
        row["predicted_peak_allocated_bytes"] = record.prediction.peak_allocated_bytes
    return row
