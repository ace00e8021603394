"""Studies of recorded trials: a surface's rows as a space and as the records of a study."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.config import CONFIG_KEYS, TrialConfig
from qlora_sweep.search_spaces.documents import Document, validate
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.linears import lora_parameters
from qlora_sweep.search_spaces.loading import parse_space, shipped_presets
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.presets import starting_text
from qlora_sweep.search_spaces.rules import Violation
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudyDefinition, StudySnapshot, Target
from qlora_sweep.storage.records import Measured, Measurement, Outcome, OutOfMemory, TrialRecord
from qlora_sweep.storage.surfaces import Surface, SurfaceRow, read_surface
from qlora_sweep.sweep.predict.memory.prediction import (
    MemoryPrediction,
    WholeMemory,
    stated_uncertainty,
)
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor
from qlora_sweep.sweep.predict.memory.profile_store import OnProgress, ignore_progress
from qlora_sweep.sweep.sampling.encoding import identity

PAUSE_SECONDS = 0.2
"""Before each thing that a recorded trial is shown to do."""


def space_of(surface: Surface, space: SearchSpace) -> SearchSpace:
    """Return the space of what was recorded, for the GPU, the budget and the baseline of ``space``.

    Nothing is measured again: of each configuration there is one recorded run.

    Raises:
        InputError: the space is of another model, or of a dataset.
    """
    if space.model != surface.model.name or space.data is not None:
        raise InputError(
            f"{surface.name}: its trials are of {surface.model.name} on random examples: say "
            f"--model {surface.model.name}, and leave --data out"
        )
    dimensions: dict[str, Any] = {}
    fixed = {}
    for key in CONFIG_KEYS:
        choices = list(dict.fromkeys(getattr(row.config, key) for row in surface.rows))
        if len(choices) == 1:
            fixed[key] = choices[0]
            continue
        if are_numbers(choices):
            choices.sort()
        dimensions[key] = {"choices": choices}
    values = space.model_dump() | {
        "name": f"{space.name}-recorded",
        "confirm": None,
        "leave_out": [],
        "dimensions": dimensions,
        "fixed": fixed,
    }
    return validate(SearchSpace, values, Document(surface.name))


def are_numbers(values: Iterable[Any]) -> bool:
    """Return whether all values are numbers."""
    return all(isinstance(value, int | float) for value in values)


def target_of(surface: Surface, target: Target) -> Target:
    """Return a target whose trials are a surface's."""
    recorded = units.with_article(surface.measured_on.product)
    if surface.header.date:
        recorded += f", {surface.header.date}"
    return replaced(target, recorded=recorded)


def within(surface: Surface, space: SearchSpace, *, budget_bytes: int) -> Surface:
    """Return the rows of a surface that say something of a space under a budget.

    Raises:
        InputError: nothing does.
    """
    is_larger = budget_bytes > (surface.header.budget_bytes or math.inf)
    rows = []
    for row in surface.rows:
        # What ran out of a smaller budget may fit this one.
        is_open = is_larger and row.verdict == "oom"
        if space.holds(row.config) and not is_open:
            rows.append(row)
    if not rows:
        fixed = ", ".join(f"{key} {value}" for key, value in space.fixed.items())
        raise InputError(f"{surface.name}: no recorded trial has {fixed}")
    return replace(surface, rows=tuple(rows))


def recorded_study(name: str) -> StudySnapshot:
    """Return a surface as a study that tried all of it, for the GPU that its file names.

    Its baseline is that of the first preset whose baseline was recorded.

    Raises:
        InputError: as `read_surface` does.
    """
    surface = read_surface(name)
    gpu = find_gpu(surface.gpu)
    preset = parse_space(starting_text(gpu.name, None), label=gpu.name)
    preset = replaced(preset, model=surface.model.name)
    recorded = _identities(surface)
    baseline = preset.baseline_config()
    for space in itertools.chain([preset], shipped_presets()):
        if identity(space.baseline_config()) in recorded:
            baseline = space.baseline_config()
            break
    values = preset.model_dump() | {"baseline": baseline.model_dump()}
    space = space_of(surface, validate(SearchSpace, values, Document(surface.name)))
    budget_bytes = surface.header.budget_bytes or gpu.budget_bytes
    target = Target(
        gpu=gpu.name,
        device="cuda",
        budget_bytes=budget_bytes,
        emulated_on=None if surface.measured_on == gpu else surface.measured_on.product,
    )
    records = []
    wall_seconds = 0.0
    for record in records_of(surface, budget_bytes=budget_bytes):
        wall_seconds += record.device_seconds
        is_baseline = identity(record.config) == identity(baseline)
        records.append(replaced(record, is_baseline=is_baseline))
    return StudySnapshot(
        name=Path(surface.name).stem,
        definition=StudyDefinition(
            space=space,
            model=surface.model.to_json(),
            model_fingerprint=surface.model.fingerprint,
            target=target_of(surface, target),
        ),
        environment={},
        records=tuple(records),
        wall_seconds=wall_seconds,
    )


def records_of(surface: Surface, *, budget_bytes: int) -> list[TrialRecord]:
    """Return a surface's rows as the trials of a study under a budget."""
    return [
        record_of(row, surface.model, number=number, budget_bytes=budget_bytes)
        for number, row in enumerate(surface.rows)
    ]


def record_of(row: SurfaceRow, model: ModelSpec, *, number: int, budget_bytes: int) -> TrialRecord:
    """Return a row as the trial of a number, of a study under a budget."""
    seconds = row.step_seconds or 0.0
    speed = row.tokens_per_second or 0.0
    outcome: Outcome = OutOfMemory(stage="forward")
    if row.fits(budget_bytes):
        measurement = Measurement(
            tokens_per_second=speed,
            samples_per_second=speed / row.config.seq_len,
            step_seconds=seconds,
            step_seconds_ci95=row.step_seconds_ci95,
            steps_measured=1,
            steps_warmup=1,
            peak_allocated_bytes=row.peak_allocated_bytes or 0,
            peak_reserved_bytes=row.peak_reserved_bytes,
            trainable_parameters=lora_parameters(row.config, model) or 0,
            final_loss=0.0,
            setup_seconds=0.0,
            measured_seconds=seconds,
        )
        outcome = Measured(measurement=measurement)
    device_seconds = row.device_seconds or 0.0
    return TrialRecord(
        number=number, config=row.config, outcome=outcome, device_seconds=device_seconds
    )


def recorded_peaks(surface: Surface) -> dict[str, int]:
    """Return what a surface says was predicted of its rows, bytes by identity."""
    peaks = {}
    for row in surface.rows:
        if row.predicted_peak_allocated_bytes is not None:
            peaks[identity(row.config)] = row.predicted_peak_allocated_bytes
    return peaks


class RecordedPeaks(MemoryPredictor):
    """Answers with peaks that were predicted before.

    Args:
        peaks: bytes, by the identity of a configuration.
    """

    def __init__(self, peaks: Mapping[str, int]) -> None:
        self._peaks = peaks

    def predict_all(
        self, configs: Sequence[TrialConfig], *, on_progress: OnProgress = ignore_progress
    ) -> WholeMemory:
        """See `MemoryPredictor.predict_all`."""
        return WholeMemory(configs, list(map(self._known, configs)))

    def _known(self, config: TrialConfig) -> MemoryPrediction | InputError:
        peak = self._peaks.get(identity(config))
        if peak is None:
            return InputError("of some rows there is no prediction")
        stated = stated_uncertainty(config)
        return MemoryPrediction(
            peak_allocated_bytes=peak,
            breakdown={},
            moment="backward",
            uncertainty=stated.allocated,
            reserved_uncertainty=stated.reserved,
        )


def only_recorded(surface: Surface) -> Callable[[TrialConfig], Violation | None]:
    """Return the rule of a study of recorded trials: nothing is known of any other."""
    recorded = _identities(surface)

    def rule(config: TrialConfig) -> Violation | None:
        if identity(config) in recorded:
            return None
        return Violation("not-recorded", "no trial of it was recorded")

    return rule


def _identities(surface: Surface) -> set[str]:
    return {identity(row.config) for row in surface.rows}
