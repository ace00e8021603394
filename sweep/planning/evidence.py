"""Owns what a study's trials say of the numbers of a plan: calibration, known fits, measurements.

Pure: a study's snapshot in, evidence out. Knows nothing of storage URLs or terminals.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec, gpu_catalogue, match_product
from search_spaces.models import ModelSpec
from search_spaces.texts import TextsSummary
from storage.definition import StudySnapshot, Target
from storage.objectives import fitting, rankable
from storage.records import OutOfMemory, TrialRecord
from sweep.predict.memory.predictor import Residuals
from sweep.predict.on_texts import ShapesOnTexts
from sweep.predict.speed.calibration import Calibration, calibrate
from sweep.predict.speed.phases import refusal


@dataclass(frozen=True)
class Evidence:
    """What a study has shown of a model, as far as it holds for one card."""

    study: str | None = None
    """Name of the study; None where nothing was asked."""
    budget_bytes: int = 0
    """Budget that its trials ran under."""
    calibration: Calibration | None = None
    """Of the speed; None where its trials ran on another card."""
    trials: Mapping[TrialConfig, TrialRecord] = field(default_factory=dict)
    """Trials measured to the end, on any card, by canonical configuration."""
    ran_out: frozenset[TrialConfig] = frozenset()
    """Configurations that really ran out of memory."""
    is_same_card: bool = False
    """Whether its trials ran on the card of the plan."""
    memory_errors: tuple[float, ...] = ()
    """Predicted peak over the measured one, less 1, where a trial has both."""
    residuals: Residuals = field(default_factory=Residuals)
    """The worst of those errors, by which predictions are widened as in the study itself."""
    notes: tuple[str, ...] = ()
    """What of the study cannot be used, and why."""

    @property
    def memory_error(self) -> float | None:
        """Median size of the memory prediction's relative error; None where nothing tells."""
        return statistics.median(map(abs, self.memory_errors)) if self.memory_errors else None

    def fits(self, config: TrialConfig, *, budget_bytes: int) -> bool | None:
        """Return whether ``config`` fits, as a trial has shown; None where none has."""
        if self.study is None:
            return None
        known = canonical(config)
        if known in self.trials and self.budget_bytes <= budget_bytes:
            return True
        if known in self.ran_out and self.budget_bytes >= budget_bytes:
            return False
        return None

    def trial(self, config: TrialConfig) -> TrialRecord | None:
        """Return the trial that measured ``config`` on the card of the plan."""
        return self.trials.get(canonical(config)) if self.is_same_card else None


NO_EVIDENCE = Evidence()


def evidence_from(
    snapshot: StudySnapshot,
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    texts: TextsSummary | None = None,
    shapes: ShapesOnTexts | None = None,
) -> Evidence:
    """Return what a study says of ``model`` on ``gpu``.

    Args:
        snapshot: the study.
        model: what would be trained.
        gpu: the card of the plan.
        texts: what the plan is about; None for full rows.
        shapes: what configurations come to on those.

    Raises:
        InputError: the study is about another model or other texts, or ran on a CPU.
    """
    _refuse_other_texts(snapshot, texts)
    definition, target = snapshot.definition, snapshot.definition.target
    if definition.model_fingerprint != model.fingerprint:
        raise InputError(
            f"study '{snapshot.name}' is about model '{definition.model.get('name')}' and says "
            f"nothing of '{model.name}'"
        )
    if target.device == "cpu":
        raise InputError(f"study '{snapshot.name}' ran on a CPU and says nothing of a card")
    host = _host(target)
    is_same_card = host is not None and host.name == gpu.name
    # As everywhere, the last trial of a configuration that came to a conclusion decides.
    measured = {canonical(r.config): r for r in fitting(rankable(snapshot.records))}
    calibration = None
    if is_same_card:
        calibration = _calibration(measured.values(), model=model, gpu=gpu, shapes=shapes)
    ran_on = target.emulated_on or target.gpu
    other = f"study '{snapshot.name}' ran on {ran_on}: its speeds do not calibrate the {gpu.name}'s"
    return Evidence(
        study=snapshot.name,
        budget_bytes=target.budget_bytes,
        calibration=calibration,
        trials=measured,
        ran_out=frozenset(
            canonical(record.config)
            for record in snapshot.records
            if isinstance(record.outcome, OutOfMemory)
        ).difference(measured),
        is_same_card=is_same_card,
        memory_errors=tuple(
            r.prediction.peak_allocated_bytes / r.measurement.peak_allocated_bytes - 1.0
            for r in measured.values()
            if r.prediction is not None and r.measurement is not None
        ),
        residuals=Residuals(snapshot.records),
        notes=() if is_same_card else (other,),
    )


def _refuse_other_texts(snapshot: StudySnapshot, texts: TextsSummary | None) -> None:
    known = snapshot.definition.texts
    if (known and known.fingerprint) == (texts and texts.fingerprint):
        return
    trained = "full rows of random tokens" if known is None else known.source
    asked = "full rows" if texts is None else texts.source
    do = "leave --study out" if known is None else f"name them with --data {known.source}"
    raise InputError(
        f"study '{snapshot.name}' trained on {trained}, and the plan is about {asked}: {do}"
    )


def _host(target: Target) -> GpuSpec | None:
    """Return the catalogue's card that really ran the trials; None where it has none."""
    if target.emulated_on is not None:
        return match_product(target.emulated_on)
    return gpu_catalogue().get(target.gpu)


def _calibration(
    records: Iterable[TrialRecord],
    *,
    model: ModelSpec,
    gpu: GpuSpec,
    shapes: ShapesOnTexts | None,
) -> Calibration | None:
    observations = [
        (record.config, record.measurement.step_seconds)
        for record in records
        if record.measurement is not None
        and not record.measurement.is_noisy
        and refusal(record.config, model=model, gpu=gpu) is None
    ]
    if shapes is not None:
        # What full sequences would take that a step on texts stands for.
        observations = [(shapes.for_speed(c), shapes.full_seconds(c, s)) for c, s in observations]
    return calibrate(observations, model=model, gpu=gpu) if observations else None
