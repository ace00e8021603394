"""`plan`, `tune` and `best` as functions with typed results: what `import qlora_sweep` offers.

Each returns what the command of its name prints with ``--json``, and raises an error of
`search_spaces.errors`. Heavy libraries are imported when needed.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from qlora_sweep.reports.view import StudyView, view_of
from qlora_sweep.reports.view_parts import Gain, Gpu
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault, InputError, NothingFits, SweepError
from qlora_sweep.storage.records import Measurement

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import TrainingArguments
    from trl import DPOConfig, SFTConfig

    from qlora_sweep.sweep.data.prepared_dataset import DatasetRequest, PreparedDataset
    from qlora_sweep.sweep.export.record import Record
    from qlora_sweep.sweep.hugging_face import ThroughputCallback
    from qlora_sweep.sweep.planning.plan import GpuPlan
    from qlora_sweep.sweep.study.events import Listener

__all__ = ["Plan", "Study", "Winner", "best", "plan", "tune"]
__all__ += ["EnvironmentFault", "InputError", "NothingFits", "SweepError"]

Data = str | os.PathLike[str] | Mapping[str, Any] | None
"""A dataset: a file, a directory or a hub id; or the keys of a space's section ``data``."""


class Plan(BaseModel):
    """What `sweep plan --json` prints: a configuration, and what is predicted of it.

    A number is None if it is unknown.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    gpu: Gpu
    model: str
    config: TrialConfig | None = None
    """The recommended configuration, or with ``exact`` the given one; None if nothing fits."""
    fits: bool | None = False
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_range: tuple[float | None, float | None] | None = None
    """The lowest and highest speed expected; None if unbounded."""
    bottleneck: str | None = None
    notes: tuple[str, ...]
    printed: dict[str, Any] = Field(repr=False)

    def document(self) -> dict[str, Any]:
        """Return all of it, as plain JSON values."""
        return self.printed


class Study(StudyView):
    """What `sweep run --json` and `sweep best --json` print."""

    storage: str | None = Field(default=None, exclude=True, repr=False)
    """URL of the database, perhaps with a password; None for the default."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.study


@dataclass(frozen=True)
class Winner:
    """The best configuration of a study, as arguments for transformers, PEFT and TRL.

    A method warns of settings that its library does not support.
    """

    study: Study = field(repr=False)
    number: int
    config: TrialConfig
    measurement: Measurement
    gain: Gain | None
    record: Record = field(repr=False)
    """What exports are made of."""

    def model_kwargs(self) -> dict[str, Any]:
        """Return keyword arguments of `AutoModelForCausalLM.from_pretrained`."""
        from qlora_sweep.sweep.hugging_face import model_kwargs

        return model_kwargs(self.record)

    def peft_config(self) -> LoraConfig:
        """Return the adapters, for `peft.get_peft_model` or ``SFTTrainer(peft_config=...)``."""
        from qlora_sweep.sweep.hugging_face import peft_config

        return peft_config(self.record)

    def training_arguments(self, **changes: Any) -> TrainingArguments:
        """Return the arguments of `transformers.Trainer`; ``changes`` replace or add some."""
        from qlora_sweep.sweep.hugging_face import training_arguments

        return training_arguments(self.record, **changes)

    def trl_args(self, **changes: Any) -> SFTConfig | DPOConfig:
        """Return the arguments of `trl.SFTTrainer`, on pairs of `trl.DPOTrainer`; ``changes``
        replace or add some."""
        from qlora_sweep.sweep.hugging_face import trl_args

        return trl_args(self.record, **changes)

    def load_model(self, model: str, *, seed: int = 0) -> PeftModel:
        """Return a model with fresh adapters, built by the code of the trials.

        It applies what `model_kwargs` cannot: the fp32 upcast, the adapters' dtype, the share of
        checkpointed layers, compiled layers, Liger's kernels, expandable segments.

        Args:
            model: a directory, a hub id, or a shipped architecture, whose weights are random.
            seed: of the adapters, and of random weights.

        Raises:
            InputError: there is no such model, or the configuration is sharded.
            EnvironmentFault: the hub cannot be reached.
        """
        from qlora_sweep.sweep.hugging_face import load_model

        return load_model(self.record, model, seed=seed)

    def callback(self, say: Callable[[str], object] | None = None) -> ThroughputCallback:
        """Return a `TrainerCallback` that reports promised and reached speed and memory.

        Args:
            say: is given each line; by default they go to stderr.
        """
        from qlora_sweep.sweep.hugging_face import ThroughputCallback

        return ThroughputCallback(self.record, say)


def plan(
    space: str | os.PathLike[str] | None = None,
    *,
    gpu: str | None = None,
    model: str | None = None,
    data: Data = None,
    numerics: str | None = None,
    exact: bool = False,
    study: str | None = None,
    storage: str | None = None,
    **settings: Any,
) -> Plan:
    """Predict what fits, how fast and at what cost; needs no GPU.

    Args:
        space: a preset, a YAML file or a GPU.
        gpu: a name of the catalogue; None for the space's own, or this machine's.
        model: a shipped architecture, a directory or a hub id.
        data: the dataset to plan for; None for random examples, or the space's own.
        numerics: ``16-bit`` excludes 8-bit compute.
        exact: whether to plan one configuration: settings that are not given are the baseline's.
        study: the study whose trials calibrate the predictions.
        storage: URL of that study's database.
        settings: fixed settings of a configuration; the rest of the space is searched.

    Raises:
        InputError: an argument is wrong.
        EnvironmentFault: a file, the hub, the database or the tracing process is not available.
    """
    from qlora_sweep.search_spaces.costs import AskedWork
    from qlora_sweep.sweep.planning.answers import GpuPlans, answer
    from qlora_sweep.sweep.planning.question import PlanRequest

    named = None
    if space is not None:
        named = os.fspath(space)
    gpus: tuple[str, ...] = ()
    if gpu is not None:
        gpus = (gpu,)
    request = PlanRequest(
        space=named,
        gpus=gpus,
        model=model,
        configuration=settings,
        numerics=numerics,
        is_exact=exact,
        work=AskedWork(has_dataset=data is not None),
        data=_data(data),
        study=study,
        storage=storage,
    )
    found = answer(request, read_dataset=_read_dataset, tell=_warn)
    assert isinstance(found, GpuPlans), "nothing else is asked"
    # A space that is named for another GPU has a plan of its own beside that of the one named.
    return _plan_of(found.plans[-1])


def _plan_of(of_gpu: GpuPlan) -> Plan:
    """Return what is planned for a GPU, as it is printed."""
    from qlora_sweep.sweep.planning.documents import gpu_document

    about = Gpu(name=of_gpu.gpu.name, budget_bytes=of_gpu.forecaster.budget_bytes)
    model_name = of_gpu.forecaster.model.name
    printed = gpu_document(of_gpu)
    shown = of_gpu.shown
    if shown is None:
        return Plan(gpu=about, model=model_name, notes=of_gpu.all_notes, printed=printed)
    memory = shown.memory
    speed = shown.speed
    estimate = shown.speed_estimate
    return Plan(
        gpu=about,
        model=model_name,
        config=shown.config,
        fits=shown.fits,
        peak_allocated_bytes=shown.peak_allocated_bytes,
        peak_reserved_bytes=None if memory is None else memory.peak_reserved_bytes,
        step_seconds=shown.step_seconds,
        tokens_per_second=shown.tokens_per_second,
        tokens_per_second_range=None if estimate is None else estimate.ends,
        bottleneck=None if speed is None else speed.bottleneck,
        notes=of_gpu.all_notes,
        printed=printed,
    )


def tune(
    space: str | os.PathLike[str],
    *,
    gpu: str | None = None,
    model: str | None = None,
    data: Data = None,
    on: str = "local",
    devices: int | str | None = None,
    study: str | None = None,
    storage: str | None = None,
    trials: int | None = None,
    time_budget_seconds: float | None = None,
    max_dollars: float | None = None,
    sampler: str | None = None,
    numerics: str | None = None,
    seed: int | None = None,
    confirm: bool = True,
    progress: bool = False,
    **settings: Any,
) -> Study:
    """Start or resume a study, and return it when it has ended.

    Ctrl-C and other stop signals are handled only in the main thread and while the study runs;
    the same call resumes it.

    Args:
        space: a preset or a YAML file.
        gpu: the GPU whose memory is the budget; None for the space's own.
        model: a shipped architecture, a directory or a hub id.
        data: the dataset to train on; None for random examples, or the space's own.
        on: ``local``, ``ray:ADDRESS`` of a cluster (``ray:auto``), or ``recorded:SURFACE.jsonl``,
            which measures nothing.
        devices: how many GPUs of this machine, ``all``, or which (``0,1``).
        study: its name; None derives one from the space.
        storage: URL of the database.
        trials: the most trials, earlier runs included.
        time_budget_seconds: time after which this call ends, confirmation included.
        max_dollars: the most that the study may cost, at the price of the GPU that runs it.
        sampler: ``guided``, ``tpe``, ``gp``, ``random`` or ``grid``.
        numerics: ``16-bit`` excludes 8-bit compute.
        seed: of sampling, weights and tokens.
        confirm: whether the winner is measured again, as the space says.
        progress: whether to print to stderr what `sweep run` prints. Otherwise nothing is printed;
            problems are warnings.
        settings: fixed settings of a configuration; the rest of the space is searched.

    Raises:
        InputError: an argument is wrong.
        EnvironmentFault: the database, GPU or disk is not available.
        KeyboardInterrupt: the study was stopped. All results are stored.
    """
    began_seconds = time.monotonic()
    from qlora_sweep.sweep.paths import storage_url
    from qlora_sweep.sweep.request import RunRequest, Where
    from qlora_sweep.sweep.study.events import StopReason
    from qlora_sweep.sweep.study.run_time import CommandStart
    from qlora_sweep.sweep.terminal import driving

    overrides: dict[str, Any] = {
        "gpu": gpu,
        "model": model,
        "data": _data(data),
        "trials": trials,
        "time_budget_seconds": time_budget_seconds,
        "max_dollars": max_dollars,
        "sampler": sampler,
        "numerics": numerics,
        "seed": seed,
    }
    if not confirm:
        overrides["confirm"] = False
    request = RunRequest(
        space=os.fspath(space),
        overrides=overrides,
        fixed_settings=settings,
        study=study,
        devices=None if devices is None else str(devices),
    )

    run = driving.tune
    if not progress:
        run = partial(run, watch=_unwatched, tell=_warn, warn=_warn, read=_read_dataset)
    prepared, reason = run(
        request, Where.parse(on), url=storage_url(storage), start=CommandStart(began_seconds)
    )
    if reason is StopReason.INTERRUPTED:
        raise KeyboardInterrupt(f"study '{prepared.name}' was stopped; the same call resumes it")
    return _study(prepared.name, storage)


def best(study: str | Study, *, storage: str | None = None) -> Winner:
    """Return the winner of a study.

    Args:
        study: its name, or what `tune` returned.
        storage: URL of its database.

    Raises:
        NothingFits: nothing that was tried was measured to fit.
        InputError: there is no such study.
        EnvironmentFault: the database is not to be had.
    """
    from qlora_sweep.sweep.export.record import record_of

    if isinstance(study, str):
        found = _study(study, storage)
    else:
        found = _study(study.name, study.storage)
    record = record_of(found.snapshot)
    winner = found.winner
    assert winner is not None, "it has a record"
    return Winner(found, winner.number, winner.config, record.measurement, found.gain, record)


def _study(name: str, storage: str | None) -> Study:
    from qlora_sweep.sweep.paths import storage_url
    from qlora_sweep.sweep.terminal.listings import read

    view = view_of(read(name, url=storage_url(storage), warn=_warn))
    return Study(**dict(view), storage=storage)


def _data(data: Data) -> dict[str, Any]:
    if data is None or isinstance(data, Mapping):
        return dict(data or {})
    return {"texts": os.fspath(data)}


def _read_dataset(request: DatasetRequest) -> PreparedDataset:
    from qlora_sweep.sweep.data.prepared_dataset import prepare_dataset

    dataset = prepare_dataset(request)
    for words in dataset.notes(request.model):
        _warn(words)
    return dataset


def _unwatched(*_: object) -> AbstractContextManager[Listener]:
    """Show nothing of a study while it runs."""
    return nullcontext(lambda event: None)


def _warn(words: str) -> None:
    warnings.warn(words, stacklevel=2)
