"""Studies of recorded trials: a surface's rows as a space, as records, and as what runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any, cast

from reports import units
from search_spaces.config import CONFIG_KEYS, TrialConfig
from search_spaces.documents import Document
from search_spaces.errors import InputError
from search_spaces.gpus import find_gpu
from search_spaces.linears import lora_parameters
from search_spaces.loading import parse_space, shipped_presets
from search_spaces.rules import Violation
from search_spaces.space import SearchSpace
from search_spaces.starting import starting_text
from search_spaces.validation import validate
from storage.definition import StudyDefinition, StudySnapshot, Target
from storage.records import Measured, Measurement, Outcome, OutOfMemory, TrialRecord
from storage.surfaces import Surface, SurfaceRow, read_surface
from sweep.predict.memory.arrays import OneByOne, WholeMemory
from sweep.predict.memory.prediction import AllocatedPeak, MemoryPrediction, stated_uncertainty
from sweep.predict.memory.profile_store import OnProgress, tell_nobody
from sweep.running.device_info import Card
from sweep.running.replay import ReplayRunner
from sweep.running.runner import Observer, keep_going
from sweep.running.wire import TrialRequest
from sweep.sampling.encoding import identity

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
    known = {
        key: list(dict.fromkeys(getattr(row.config, key) for row in surface.rows))
        for key in CONFIG_KEYS
    }
    free = {key: values for key, values in known.items() if len(values) > 1}
    values = space.model_dump() | {
        "name": f"{space.name}-recorded",
        "confirm": None,
        "leave_out": [],
        "dimensions": {key: {"choices": _ordered(values)} for key, values in free.items()},
        "fixed": {key: values[0] for key, values in known.items() if key not in free},
    }
    return validate(SearchSpace, values, Document(surface.name))


def _ordered(values: list[Any]) -> list[Any]:
    is_number = all(isinstance(value, int | float) for value in values)
    return sorted(values) if is_number else values


def target_of(surface: Surface, target: Target) -> Target:
    """Return a target whose trials are a surface's."""
    product = units.with_article(surface.card.product)
    return target.model_copy(update={"recorded": ", ".join(filter(None, (product, surface.date)))})


def card_of(surface: Surface) -> Card:
    """Return the GPU that a surface was measured on, as if it were here."""
    spec = surface.card
    return Card(
        product=spec.product,
        memory_bytes=spec.memory_bytes,
        free_bytes=spec.memory_bytes,
        compute_capability=spec.compute_capability,
        driver=None,
        cuda=None,
    )


def within(surface: Surface, space: SearchSpace, *, budget_bytes: int) -> Surface:
    """Return what of a surface says something of a space under a budget.

    Raises:
        InputError: nothing does.
    """
    # What ran out of a smaller budget may fit this one.
    is_known = surface.budget_bytes is None or budget_bytes <= surface.budget_bytes
    rows = tuple(
        row
        for row in surface.rows
        if space.holds(row.config) and (is_known or row.verdict != "oom")
    )
    if not rows:
        fixed = ", ".join(f"{key} {value}" for key, value in space.fixed.items())
        raise InputError(f"{surface.name}: no recorded trial has {fixed}")
    return replace(surface, rows=rows)


class RecordedClock:
    """Seconds of the GPU that the recorded trials took, and nothing of this machine's."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """Return the seconds so far."""
        return self.seconds


class RecordedRunner(ReplayRunner):
    """Answers with a surface's trials, slowly enough to be followed.

    Args:
        surface: what was recorded.
        budget_bytes: what needs more does not fit.
        clock: moved on by what each trial took.
    """

    def __init__(self, surface: Surface, *, budget_bytes: int, clock: RecordedClock) -> None:
        records = records_of(surface, budget_bytes=budget_bytes)
        super().__init__(records, budget_bytes=budget_bytes, pause=lambda: sleep(PAUSE_SECONDS))
        self._seconds = {row.config.key(): row.device_seconds or 0.0 for row in surface.rows}
        self._clock = clock

    def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
        """See `Runner.run`."""
        outcome = super().run(request, observe=observe)
        self._clock.seconds += self._seconds.get(request.config.key(), 0.0)
        return outcome


def recorded_study(name: str) -> StudySnapshot:
    """Return a surface as a study that tried all of it, for the GPU that its file names.

    Its baseline is that of the first preset whose baseline was recorded.

    Raises:
        InputError: as `read_surface` does.
    """
    surface = read_surface(name)
    gpu = find_gpu(surface.gpu)
    own = parse_space(starting_text(gpu.name, None), label=gpu.name)
    own = own.model_copy(update={"model": surface.model.name})
    by_key = {identity(row.config): row.config for row in surface.rows}
    baselines = [space.baseline_config() for space in (own, *shipped_presets())]
    baseline = next((b for b in baselines if identity(b) in by_key), baselines[0])
    values = own.model_dump() | {"baseline": baseline.model_dump()}
    space = space_of(surface, validate(SearchSpace, values, Document(surface.name)))
    budget_bytes = surface.budget_bytes or gpu.budget_bytes
    target = Target(
        gpu=gpu.name,
        device="cuda",
        budget_bytes=budget_bytes,
        emulated_on=None if surface.card == gpu else surface.card.product,
    )
    records = [
        record.model_copy(update={"is_baseline": identity(record.config) == identity(baseline)})
        for record in records_of(surface, budget_bytes=budget_bytes)
    ]
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
        wall_seconds=sum(record.device_seconds for record in records),
    )


def records_of(surface: Surface, *, budget_bytes: int) -> list[TrialRecord]:
    """Return a surface's rows as the trials of a study under a budget."""
    rows = enumerate(surface.rows)
    return [record_of(number, row, surface, budget_bytes=budget_bytes) for number, row in rows]


def record_of(number: int, row: SurfaceRow, surface: Surface, *, budget_bytes: int) -> TrialRecord:
    """Return a recorded row as a trial of a study under a budget."""
    outcome: Outcome = OutOfMemory(stage="forward")
    if row.fits(budget_bytes):
        seconds = row.step_seconds or 0.0
        outcome = Measured(
            measurement=Measurement(
                tokens_per_second=row.tokens_per_second or 0.0,
                samples_per_second=(row.tokens_per_second or 0.0) / row.config.seq_len,
                step_seconds=seconds,
                step_seconds_ci95=None,
                steps_measured=1,
                steps_warmup=1,
                peak_allocated_bytes=row.peak_allocated_bytes or 0,
                peak_reserved_bytes=row.peak_reserved_bytes,
                trainable_parameters=lora_parameters(row.config, surface.model) or 0,
                final_loss=0.0,
                setup_seconds=0.0,
                measured_seconds=seconds,
            )
        )
    return TrialRecord(
        number=number,
        config=row.config,
        outcome=outcome,
        device_seconds=row.device_seconds or 0.0,
    )


def recorded_peaks(surface: Surface) -> dict[str, int]:
    """Return what a surface says was predicted of its rows, bytes by identity."""
    known = ((identity(row.config), row.predicted_peak_allocated_bytes) for row in surface.rows)
    return {key: peak for key, peak in known if peak is not None}


class RecordedPeaks:
    """Answers with peaks that were predicted before; satisfies `MemoryPredictor`.

    Args:
        peaks: bytes, by the identity of a configuration.
    """

    def __init__(self, peaks: Mapping[str, int]) -> None:
        self._peaks = peaks

    def prepare(
        self, configs: Iterable[TrialConfig], *, on_progress: OnProgress = tell_nobody
    ) -> None:
        """Do nothing: all was predicted before."""

    def predict_all(self, configs: Sequence[TrialConfig]) -> WholeMemory:
        """See `MemoryPredictor.predict_all`."""
        return OneByOne(self.predict, configs)

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        """See `MemoryPredictor.predict`."""
        peak = self._peaks.get(identity(config))
        if peak is None:
            raise InputError("of some rows there is no prediction")
        stated = stated_uncertainty(config)
        return AllocatedPeak(
            peak_allocated_bytes=peak,
            breakdown={},
            moment="backward",
            uncertainty=stated.allocated,
            reserved_uncertainty=stated.reserved,
            step=cast(Any, None),
        )


def only_recorded(surface: Surface) -> Callable[[TrialConfig], Violation | None]:
    """Return the rule of a study of recorded trials: nothing is known of any other."""
    known = {identity(row.config) for row in surface.rows}
    return lambda config: (
        None
        if identity(config) in known
        else Violation("not-recorded", "no trial of it was recorded")
    )
