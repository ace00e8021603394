"""What `sweep plan` answers: a request is resolved, and answered by one typed value.

The command line and `qlora_sweep.plan` both call `answer`; JSON and screens are made of what it
returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.costs import Bill
from qlora_sweep.search_spaces.errors import InputError, NothingFits
from qlora_sweep.search_spaces.feasibility import refuse_impossible
from qlora_sweep.search_spaces.gpus import GpuSpec
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.rules import Setting
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.sweep.data.choice import ReadDataset
from qlora_sweep.sweep.paths import cache_directory, runs_directory, storage_url
from qlora_sweep.sweep.planning.backwards import (
    Cheapest,
    GpuForJob,
    Longest,
    longest_rows,
    on_gpu,
    ranked,
)
from qlora_sweep.sweep.planning.calibrating import Lessons, lessons
from qlora_sweep.sweep.planning.candidates import PlanOptions
from qlora_sweep.sweep.planning.plan import (
    GpuPlan,
    PlanComparison,
    bill_offers,
    compare_gpus,
    plan_gpu,
)
from qlora_sweep.sweep.planning.question import (
    PlanQuestion,
    PlanRequest,
    Predictor,
    StudyReader,
    read_configurations,
    resolve_request,
)
from qlora_sweep.sweep.planning.survey import Survey, survey
from qlora_sweep.sweep.predict.forecast import UNBUILDABLE, Forecast, Forecaster, Progress, silent
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor, TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import Tracer, TracingChildren

if TYPE_CHECKING:
    from qlora_sweep.sweep.running.device_info import GpuInfo


@dataclass(frozen=True)
class GpuPlans:
    """The plan of each GPU, or of each way to use one."""

    plans: tuple[GpuPlan, ...]
    comparison: PlanComparison | None
    """The same training by each of several; None where fewer than two can do it."""

    @property
    def fits(self) -> bool:
        """Whether anything fits on any of them."""
        return any(plan.fits for plan in self.plans)


@dataclass(frozen=True)
class HostPlans(GpuPlans):
    """The plan of each way in which the GPUs of one host can train: alone, together, in shards."""

    refused: Mapping[str, str]
    """Why other ways are not possible, by name."""
    devices: int
    """GPUs of the host."""


@dataclass(frozen=True)
class CalibrationTrials:
    """For each GPU the trials that would narrow its predicted speed most."""

    of_gpus: tuple[Lessons, ...]
    fits: bool = True
    """Without anything that fits there is no such answer."""


@dataclass(frozen=True)
class LongestSequences:
    """The longest sequences on each GPU."""

    of_gpus: tuple[Longest, ...]

    @property
    def fits(self) -> bool:
        """Whether any length fits on any of them."""
        return any(longest.best is not None for longest in self.of_gpus)


@dataclass(frozen=True)
class PlannedFile:
    """What is predicted of each configuration of a file, in its order."""

    forecasts: tuple[Forecast, ...]
    bills: tuple[tuple[Bill, ...], ...]
    """Of each, the cheapest offer first."""

    @property
    def fits(self) -> bool:
        """Whether any of them fits."""
        return any(forecast.fits for forecast in self.forecasts)


Answer = GpuPlans | HostPlans | CalibrationTrials | LongestSequences | Cheapest | PlannedFile
"""One kind for each question of `sweep plan`."""


def tracing(tracer: Tracer) -> Predictor:
    """Return what makes predictors that trace the model's own code, and keep what was traced."""

    def traced(model: ModelSpec, gpu: GpuSpec) -> MemoryPredictor:
        return TracingPredictor(
            model,
            cache_dir=cache_directory() / "memory",
            compute_capability=gpu.compute_capability,
            tracer=tracer,
        )

    return traced


def stored_study(name: str, storage: str | None) -> StudySnapshot:
    """Return a study whose trials are asked about."""
    # Only a plan with --from needs Optuna, which takes longer to import than to answer.
    from qlora_sweep.storage.reading import read_study

    return read_study(name, url=storage_url(storage), home=runs_directory())


def _read_gpu() -> GpuInfo | None:
    # Only a plan without a GPU's name needs NVML.
    from qlora_sweep.sweep.running.device_info import read_gpu

    return read_gpu()


def answer(
    request: PlanRequest,
    *,
    read_dataset: ReadDataset,
    tell: Callable[[str], None],
    read_study: StudyReader = stored_study,
    progress: Progress = silent,
    predictor: Predictor | None = None,
    read_gpu: Callable[[], GpuInfo | None] = _read_gpu,
) -> Answer:
    """Return the answer to what was asked.

    Args:
        request: what was typed.
        read_dataset: reads and tokenizes a dataset.
        tell: is told what the dataset made of the space.
        read_study: reads the study whose trials calibrate.
        progress: is told how far it is.
        predictor: makes what predicts memory; by default it traces the model's own code, in
            children that serve all questions of this plan.
        gpu: reads the GPU in this machine, for where none is named.

    Raises:
        InputError: something that was typed, written or named is not right.
        EnvironmentFault: a file, the hub, the database or the tracing process is not available.
    """
    with closing(TracingChildren(outlive=True)) as children:
        question = resolve_request(
            request,
            predictor=predictor or tracing(children),
            read_gpu=read_gpu,
            read_study=read_study,
            read_dataset=read_dataset,
        )
        notes: dict[str, None] = {}
        for gpu in question.gpus:
            notes |= dict.fromkeys(question.text_notes(gpu))
        for note in notes:
            tell(note)
        found = _answered(question, progress)
    versions = set()
    for used in question.predictors.values():
        if isinstance(used, TracingPredictor) and used.other_versions:
            versions.add(used.other_versions)
    for other in versions:
        tell(f"memory is predicted from profiles of {other}")
    return found


def _answered(question: PlanQuestion, progress: Progress) -> Answer:
    request = question.request
    if request.from_file is not None:
        return _of_file(question, request.from_file, progress)
    if request.is_longest:
        return _longest(question, progress)
    if request.is_cheapest:
        return _cheapest(question, progress)
    if request.devices is not None:
        return _of_host(question, request.devices, progress)
    if request.is_calibrating:
        return _calibrating(question, progress)
    return _of_gpus(question, progress)


def _of_gpus(question: PlanQuestion, progress: Progress) -> GpuPlans:
    """Return the plan of each GPU, and their comparison."""
    plans = tuple(_planned(question, gpu, progress) for gpu in question.gpus)
    comparison = None
    if len(plans) > 1:
        comparison = compare_gpus(
            plans,
            work=question.request.work,
            offers=question.offers,
            look=partial(_look, progress=progress),
        )
    return GpuPlans(plans, comparison)


def _planned(question: PlanQuestion, gpu: GpuSpec, progress: Progress) -> GpuPlan:
    about = question.about(gpu)
    forecaster = question.forecaster(gpu)
    looked_at: Survey | Forecast
    if isinstance(about, TrialConfig):
        looked_at = forecaster.forecast([about], progress=progress)[0]
        asked = PlanOptions(grpo=question.grpo)
    else:
        looked_at = _surveyed(about, forecaster, progress)
        asked = question.asked(gpu)
    return plan_gpu(
        looked_at,
        work=question.request.work,
        offers=question.offers.get(gpu.name, ()),
        asked=asked,
        progress=progress,
    )


def _surveyed(space: SearchSpace, forecaster: Forecaster, progress: Progress) -> Survey:
    return survey(space, forecaster, directory=cache_directory() / "surveys", progress=progress)


def _look(
    forecaster: Forecaster, about: SearchSpace | TrialConfig, *, progress: Progress
) -> Forecast | None:
    if isinstance(about, TrialConfig):
        return forecaster.expect(about)
    return _surveyed(about, forecaster, progress).recommended


def _of_host(question: PlanQuestion, devices: int, progress: Progress) -> HostPlans:
    """Return what one GPU of a host, all of them and shards come to.

    Raises:
        InputError: none of it is possible.
    """
    (gpu,) = question.gpus
    plans: list[GpuPlan] = []
    refused: dict[str, str] = {}
    for way, asked in question.ways(gpu):
        try:
            plans.append(replace(_planned(asked, gpu, progress), way=way))
        except InputError as error:
            refused[way] = str(error)
    if not plans:
        raise InputError(next(iter(refused.values())))
    look = partial(_look, progress=progress)
    comparison = compare_gpus(plans, work=question.request.work, offers={}, look=look)
    return HostPlans(tuple(plans), comparison, refused, devices)


def _calibrating(question: PlanQuestion, progress: Progress) -> CalibrationTrials:
    """Return the trials that would teach most of each GPU's speed.

    Raises:
        InputError: trials train on several GPUs, which no contribution is of.
        NothingFits: on none is there anything to measure.
    """
    of_gpus: list[Lessons] = []
    for gpu in question.gpus:
        space = question.about(gpu)
        assert isinstance(space, SearchSpace), "one configuration is refused before"
        surveyed = _surveyed(space, question.forecaster(gpu), progress)
        found = lessons(surveyed, offers=question.offers.get(gpu.name, ()))
        if found is None:
            continue
        if found.answer.config.data_parallel > 1:
            raise InputError("--calibrate: a contribution is of one GPU: leave data_parallel out")
        of_gpus.append(found)
    if not of_gpus:
        raise NothingFits("nothing surely fits whose speed is predicted, so no trial is worth it")
    return CalibrationTrials(tuple(of_gpus))


def _longest(question: PlanQuestion, progress: Progress) -> LongestSequences:
    """Return the longest sequences on each GPU."""
    of_gpus = [
        longest_rows(
            question.about(gpu),
            question.forecaster(gpu),
            asked=question.asked(gpu),
            progress=progress,
        )
        for gpu in question.gpus
    ]
    return LongestSequences(tuple(of_gpus))


def _cheapest(question: PlanQuestion, progress: Progress) -> Cheapest:
    """Return what a job costs on each GPU."""
    request = question.request
    tell = progress("GPUs looked at")
    gpus: list[GpuForJob] = []
    bills: list[Bill] = []
    faults: list[InputError] = []
    for done, gpu in enumerate(question.gpus):
        tell(done, len(question.gpus))
        for_job = on_gpu(
            question.about(gpu),
            question.forecaster(gpu),
            work=request.work,
            offers=question.offers.get(gpu.name, ()),
            deadline_seconds=request.within_seconds,
            progress=progress,
        )
        gpus.append(for_job)
        bills += for_job.bills
        if for_job.fault is not None:
            faults.append(for_job.fault)
    if len(faults) == len(gpus):
        raise faults[0]
    return Cheapest(
        model=question.model,
        workload=bills[0].workload if bills else None,
        fixed_settings=question.fixed_settings,
        deadline_seconds=request.within_seconds,
        gpus=ranked(gpus),
    )


def _of_file(question: PlanQuestion, name: str, progress: Progress) -> PlannedFile:
    """Return the answer for each configuration of a file.

    Raises:
        InputError: a line is impossible, or names modules that the model does not have.
    """
    (gpu,) = question.gpus
    offers = question.offers.get(gpu.name, ())
    trainer = question.request.configuration.get("trainer", "sweep")
    lines = read_configurations(name, own={**question.own_settings, "trainer": trainer})
    for where, config in lines:
        try:
            refuse_impossible(config, Setting(question.model, "cuda", None))
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    known = question.forecaster(gpu).forecast([config for _, config in lines], progress=progress)
    forecasts = tuple(known)
    for (where, _), forecast in zip(lines, forecasts, strict=True):
        if forecast.violation is not None and forecast.violation.rule == UNBUILDABLE:
            raise InputError(f"{where}: {forecast.violation.reason}")
    bills: dict[int, tuple[Bill, ...]] = {}
    for row in known.replay(progress):
        bills[row] = bill_offers(forecasts[row], work=question.request.work, offers=offers)
    return PlannedFile(forecasts, tuple(bills[row] for row in range(len(lines))))
