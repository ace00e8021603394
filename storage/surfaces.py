"""Owns a surface: recorded trials of one model on one card, as a file that samplers can be tried
on.

Reading is strict, and says file, line and key. Knows nothing of samplers, or of how the trials were
run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from search_spaces.config import TrialConfig, canonical, parse_config
from search_spaces.documents import parse_object, read_text
from search_spaces.errors import InputError, NothingFits, quote
from search_spaces.gpus import GpuSpec, find_gpu, match_product
from search_spaces.models import ModelSpec, checked_config
from storage.definition import StudySnapshot
from storage.records import Measured, OutOfMemory, TrialRecord

VERSION = 1
SPEED_REPEATS_WITHIN = 0.05
"""Relative: two measurements of one configuration that are further apart contradict each other."""
PEAK_REPEATS_WITHIN = 0.01
"""The same of the allocated peak, which repeats to the byte on one machine."""
LEAST_TOO_LARGE = 1e18
"""No speed, time or amount of memory reaches it."""

_HEADER = ("surface", "model", "model_config", "gpu", "measured_on")
_NUMBERS = ("tokens_per_second", "step_seconds", "peak_allocated_bytes", "device_seconds")
"""What a row that fits has to say; what is reserved is not known everywhere."""
_RESERVED = "peak_reserved_bytes"
_PREDICTED = "predicted_peak_allocated_bytes"
"""What was predicted of a row before it ran, where that is known."""


@dataclass(frozen=True)
class SurfaceRow:
    """One configuration and what came of it; None where an out-of-memory trial has no number."""

    config: TrialConfig
    verdict: Literal["fits", "oom"]
    tokens_per_second: float | None
    step_seconds: float | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_seconds: float | None
    predicted_peak_allocated_bytes: int | None = None

    def fits(self, budget_bytes: int) -> bool:
        """Whether it ran, and its allocated peak is within the budget."""
        peak = self.peak_allocated_bytes
        return self.verdict == "fits" and peak is not None and peak <= budget_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        values = {**vars(self), "config": self.config.model_dump(mode="json")}
        if self.predicted_peak_allocated_bytes is None:
            del values[_PREDICTED]
        return values


@dataclass(frozen=True)
class Surface:
    """Recorded trials of one model on one card, each configuration once."""

    name: str
    """The file as the person named it."""
    model: ModelSpec
    gpu: str
    """Catalogue name of the card that the trials were for."""
    card: GpuSpec
    """The card that they ran on."""
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
        InputError: not to be read, another version's, of a card or model that is not known, or a
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
    known: dict[str, tuple[str, SurfaceRow]] = {}
    for where, line in lines[1:]:
        row = _row(parse_object(line, where=where), where=where)
        first = known.setdefault(canonical(row.config).key(), (where, row))
        _check_agreement(first, (where, row))
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
    version = values["surface"]
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InputError(f"{where}: surface must be its version, {VERSION}, got {quote(version)}")
    if version > VERSION:
        raise InputError(
            f"{where}: surface is of version {version}, and this sweep reads {VERSION}: use the "
            "one that wrote it, or a newer one"
        )
    _check_keys(values, _HEADER, where=where)
    for key in ("model", "gpu", "measured_on"):
        if not isinstance(values[key], str) or not values[key]:
            raise InputError(f"{where}: {key} must be a name, got {quote(values[key])}")
    config = values["model_config"]
    if not isinstance(config, dict):
        raise InputError(
            f"{where}: model_config must be the model's config.json, got {quote(config)}"
        )
    checked = checked_config(config, label=f"{where}: model_config")
    # Its config stands here, so nothing is looked for anywhere.
    model = ModelSpec(values["model"], "directory", checked)
    budget = _number(values.get("budget_bytes"), f"{where}: budget_bytes")
    return {
        "model": model,
        "gpu": _gpu(values["gpu"], where=where),
        "card": _card(values["measured_on"], where=where),
        "date": str(values.get("date") or ""),
        "budget_bytes": None if budget is None else int(budget),
    }


def _gpu(name: str, *, where: str) -> str:
    try:
        return find_gpu(name).name
    except InputError as error:
        # A product's name is as clear as the catalogue's.
        card = match_product(name)
        if card is None:
            raise InputError(f"{where}: gpu: {error}") from error
        return card.name


def _card(product: str, *, where: str) -> GpuSpec:
    card = match_product(product)
    if card is not None:
        return card
    try:
        # A catalogue name is as clear as the product's.
        return find_gpu(product)
    except InputError as error:
        raise InputError(f"{where}: measured_on: {error}") from error


def _row(values: Mapping[str, Any], *, where: str) -> SurfaceRow:
    _check_keys(values, ("config", "verdict"), where=where)
    verdict = values["verdict"]
    if verdict not in ("fits", "oom"):
        raise InputError(f"{where}: verdict must be fits or oom, got {quote(verdict)}")
    if verdict == "fits":
        _check_keys(values, (*_NUMBERS, _RESERVED), where=where)
        unknown = next((key for key in _NUMBERS if values[key] is None), None)
        if unknown is not None:
            raise InputError(f"{where}: {unknown} must be a number where the verdict is fits")
    keys = (*_NUMBERS, _RESERVED, _PREDICTED)
    numbers = {key: _number(values.get(key), f"{where}: {key}") for key in keys}
    for key in ("peak_allocated_bytes", _RESERVED, _PREDICTED):
        numbers[key] = None if numbers[key] is None else int(numbers[key])
    return SurfaceRow(_config(values["config"], where=where), verdict, **numbers)


def _config(values: object, *, where: str) -> TrialConfig:
    if not isinstance(values, dict):
        raise InputError(f"{where}: config must be a JSON object, got {quote(values)}")
    config = parse_config(values, where=f"{where}: config")
    if config.packing != "none":
        raise InputError(
            f"{where}: config: packing {config.packing} is of texts, and a surface is of full "
            "rows: leave the line out"
        )
    return config


def _number(value: object, where: str) -> Any:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"{where} must be a number, got {quote(value)}")
    # NaN, which Python reads as JSON, is not greater than anything; nor is every whole number that
    # it reads small enough to be reckoned with.
    if not 0 < value < LEAST_TOO_LARGE:
        raise InputError(
            f"{where} must be a number greater than 0 and less than {LEAST_TOO_LARGE:g}, got "
            f"{quote(value)}"
        )
    return value


def _check_keys(values: Mapping[str, Any], keys: Iterable[str], *, where: str) -> None:
    missing = next((key for key in keys if key not in values), None)
    if missing is not None:
        raise InputError(f"{where}: {missing} is missing")


def _check_agreement(first: tuple[str, SurfaceRow], again: tuple[str, SurfaceRow]) -> None:
    (where_first, row), (where, other) = first, again
    if row is other:
        return
    pairs = (
        ("verdict", row.verdict, other.verdict, 0.0),
        (
            "tokens_per_second",
            row.tokens_per_second,
            other.tokens_per_second,
            SPEED_REPEATS_WITHIN,
        ),
        (
            "peak_allocated_bytes",
            row.peak_allocated_bytes,
            other.peak_allocated_bytes,
            PEAK_REPEATS_WITHIN,
        ),
    )
    for key, old, new, within in pairs:
        if not _agree(old, new, within=within):
            number = where_first.rpartition("line ")[2]
            raise InputError(
                f"{where}: {key} {quote(new)} contradicts line {number}, which says {quote(old)} "
                "of the same configuration: keep one of them"
            )


def _agree(old: Any, new: Any, *, within: float) -> bool:
    if isinstance(old, int | float) and isinstance(new, int | float):
        return abs(old - new) <= within * max(old, new)
    return bool(old == new or (within and None in (old, new)))


def surface_text(snapshot: StudySnapshot) -> str:
    """Return a study as a surface: its trials that fit or ran out of memory, each configuration
    once, by the last of them.

    Raises:
        InputError: it was measured on texts, whose lengths a surface has no place for, or on a card
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
    product = target.emulated_on or _product_of(target.gpu)
    if match_product(product) is None or target.device != "cuda":
        raise InputError(
            f"{name}: a surface is of a card of the catalogue, and this is '{product}'"
        )
    rows = {canonical(r.config).key(): row for r in snapshot.records if (row := _row_of(r))}
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
    return "".join(
        json.dumps(line) + "\n" for line in (header, *(r.to_json() for r in rows.values()))
    )


def _product_of(gpu: str) -> str:
    try:
        return find_gpu(gpu).product
    except InputError:
        return gpu


def _seconds(record: TrialRecord) -> float | None:
    """Return the device's time; the whole trial's where it is not kept apart.

    What another study ran took none here: a measurement knows its own, running out does not.
    """
    if record.carried is None:
        return max(record.device_seconds or record.wall_seconds, 1e-3)
    measured = record.measurement
    return None if measured is None else measured.setup_seconds + measured.measured_seconds


def _row_of(record: TrialRecord) -> SurfaceRow | None:
    known = None if record.prediction is None else record.prediction.peak_allocated_bytes
    match record.outcome:
        case Measured(measurement=measured):
            return SurfaceRow(
                record.config,
                "fits",
                measured.tokens_per_second,
                measured.step_seconds,
                measured.peak_allocated_bytes,
                measured.peak_reserved_bytes,
                _seconds(record),
                known,
            )
        case OutOfMemory():
            # What it had allocated when it failed is no peak of its own.
            return SurfaceRow(record.config, "oom", None, None, None, None, _seconds(record), known)
        case _:
            return None
