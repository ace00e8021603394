"""Builds the `Forecaster` of a target: for plans, studies, trainings and reports."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from qlora_sweep.search_spaces import rules
from qlora_sweep.search_spaces.dataset_choice import DatasetChoice
from qlora_sweep.search_spaces.gpus import GpuSpec, match_product
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.storage.definition import StudyDefinition, Target
from qlora_sweep.sweep.data.prepared_dataset import (
    PreparedDataset,
    dataset_directory,
    open_prepared,
)
from qlora_sweep.sweep.data.study_epochs import StudyEpochs
from qlora_sweep.sweep.predict.forecast import (
    NO_EVIDENCE,
    Evidence,
    Forecaster,
    Rule,
    SpeedForecast,
    SpeedModel,
)
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor, Unmodelled
from qlora_sweep.sweep.predict.on_dataset import ShapesOnDataset

STUDIES_KEPT = 8
"""Studies whose datasets are not read again: a page of one asks of each of its trials."""


def build_forecaster(
    model: ModelSpec,
    target: Target,
    *,
    shapes: ShapesOnDataset | None,
    predictor: MemoryPredictor | None,
    violation: Rule | None = None,
    speed: SpeedModel | None = None,
    evidence: Evidence = NO_EVIDENCE,
    is_cut_up: bool = True,
    warn: Callable[[str], None] | None = None,
) -> Forecaster:
    """Return what predicts of a model on a target.

    Args:
        model: what is trained.
        target: the GPU and what a training may take. Where another GPU stands in for it, speeds are
            that one's, and the target's beside them.
        shapes: what configurations come to on the dataset; None where sequences are full.
        predictor: of full sequences' memory; None where nothing is to be predicted of it.
        violation: the rules; by default those of the target and what stands in for it.
        speed: of the GPU that runs; by default its data sheet's and its trials'.
        evidence: what a stored study has shown.
        is_cut_up: whether the allocator may fail below the budget, as free memory is in pieces.
        warn: told once of each reason why memory is not predicted; without it, faults of the
            environment are raised.
    """
    host = _gpu(target, target.emulated_on or target.gpu)
    target_gpu = _gpu(target, target.gpu)
    if violation is None:
        capabilities = [gpu.compute_capability for gpu in (host, target_gpu) if gpu is not None]
        violation = partial(
            rules.violation,
            model=model,
            compute_capability=min(capabilities, default=None),
            device=target.device,
            has_dataset=shapes is not None,
        )
    # What runs layers whose memory is not modelled takes another time than what is modelled.
    unknown = predictor.reason if isinstance(predictor, Unmodelled) else None
    if speed is None and host is not None:
        speed = SpeedForecast(
            model=model,
            gpu=host,
            shapes=shapes,
            calibration=evidence.calibration,
            unknown=unknown,
        )
    target_speed = None
    if target.emulated_on is not None and target_gpu is not None:
        target_speed = SpeedForecast(model=model, gpu=target_gpu, shapes=shapes, unknown=unknown)
    return Forecaster(
        model=model,
        budget_bytes=target.budget_bytes,
        gpu=host,
        violation=violation,
        predictor=predictor,
        speed=speed,
        target_speed=target_speed,
        shapes=shapes,
        evidence=evidence,
        is_cut_up=is_cut_up,
        warn=warn,
    )


def _gpu(target: Target, product: str) -> GpuSpec | None:
    """Return a GPU's data sheet; None on a CPU, and of a GPU that the catalogue does not have."""
    if not target.is_on_gpu:
        return None
    return match_product(product)


def shapes_of_dataset(
    dataset: PreparedDataset, choice: DatasetChoice, *, seed: int
) -> ShapesOnDataset:
    """Return what configurations come to on the rows of a dataset that are trained on."""
    return ShapesOnDataset(StudyEpochs.of(dataset, choice, seed=seed))


def shapes_of_study(definition: StudyDefinition) -> ShapesOnDataset | None:
    """Return the same of a stored study's dataset, as it was prepared for it; None where its
    sequences are full.

    Raises:
        EnvironmentFault: it is not on this machine any more.
    """
    choice = definition.space.data
    if definition.texts is None or choice is None:
        return None
    directory = dataset_directory() / definition.texts.fingerprint
    return _shapes_in(directory, choice, definition.space.seed)


@lru_cache(maxsize=STUDIES_KEPT)
def _shapes_in(directory: Path, choice: DatasetChoice, seed: int) -> ShapesOnDataset:
    return shapes_of_dataset(open_prepared(directory), choice, seed=seed)
