"""What a plan is asked about: each name that was typed becomes what it names."""

from __future__ import annotations

import itertools
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from pydantic import Field, StrictInt

from qlora_sweep.search_spaces.config import (
    Number,
    TrialConfig,
    as_options,
    needed_by,
    parse_config,
)
from qlora_sweep.search_spaces.costs import AskedWork
from qlora_sweep.search_spaces.documents import Document, Strict, parse_object, read_text, validate
from qlora_sweep.search_spaces.errors import InputError, did_you_mean
from qlora_sweep.search_spaces.feasibility import refuse_impossible, refuse_without_dataset
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.gpus import (
    GpuSpec,
    asked_bytes,
    find_gpu,
    gpu_catalogue,
    gpu_names,
    match_product,
)
from qlora_sweep.search_spaces.loading import (
    Offered,
    load_space,
    missing_length,
    preset_name,
    shipped_presets,
    with_fixed,
    with_own_settings,
    with_room_for_images,
)
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.presets import preset_space
from qlora_sweep.search_spaces.prices import Offer, load_prices
from qlora_sweep.search_spaces.rules import Setting, own_settings
from qlora_sweep.search_spaces.sizes import with_offered_batches
from qlora_sweep.search_spaces.space import SearchSpace, largest_whole
from qlora_sweep.search_spaces.trainer_spaces import for_trainer
from qlora_sweep.storage.definition import StudySnapshot, Target
from qlora_sweep.sweep.data.choice import ReadDataset, space_with_dataset, typed_dataset
from qlora_sweep.sweep.data.prepared_dataset import DatasetRequest, PreparedDataset, prepare_dataset
from qlora_sweep.sweep.paths import own_price_file
from qlora_sweep.sweep.planning.backwards import job, whole_step
from qlora_sweep.sweep.planning.candidates import PlanOptions, SpaceKind, own_space
from qlora_sweep.sweep.planning.evidence import evidence_from
from qlora_sweep.sweep.predict.building import build_forecaster, shapes_of_dataset
from qlora_sweep.sweep.predict.forecast import NO_EVIDENCE, Evidence, Forecaster
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor
from qlora_sweep.sweep.predict.on_dataset import ShapesOnDataset

if TYPE_CHECKING:
    from qlora_sweep.sweep.running.device_info import GpuInfo

PROMPTS = 4
"""In a step of GRPO where nothing is said, with all their completions."""
STDIN = "-"
"""Name of standard input."""

Predictor = Callable[[ModelSpec, GpuSpec], MemoryPredictor]
"""Makes what predicts the memory of a model on a GPU."""
StudyReader = Callable[[str, str | None], StudySnapshot]
"""Reads a study by its name and the storage that was typed.

Handed in, as it needs Optuna, which takes longer to import than most plans take to make.
"""


class Grpo(Strict):
    """Settings of TRL's `GRPOConfig` that are none of a configuration, with its defaults."""

    num_generations: Annotated[StrictInt, Field(ge=2)] = 8
    """Completions of each prompt."""
    beta: Annotated[Number, Field(ge=0)] = 0.0
    """Above 0 a reference is asked too, before the step and with nothing kept."""
    max_completion_length: Annotated[StrictInt, Field(ge=1)] | None = None
    """Tokens; half of a sequence where nothing is said."""


@dataclass(frozen=True)
class PlanRequest:
    """What was typed."""

    space: str | None = None
    """A preset, a YAML file, or a GPU."""
    gpus: tuple[str, ...] = ()
    model: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    """What was typed of texts, by the keys of a space's section about them."""
    configuration: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a configuration: fixed, while the rest of the space is searched."""
    numerics: str | None = None
    """That of the space, where it was typed."""
    is_exact: bool = False
    """Whether one configuration is asked about, by default with the standard recipe's values."""
    from_file: str | None = None
    work: AskedWork = field(default_factory=AskedWork)
    prices: Path | None = None
    typed_prices: tuple[str, ...] = ()
    """``a10=0.75`` each: dollars an hour that take the place of all other prices of a GPU."""
    is_longest: bool = False
    """Whether the longest rows are asked for."""
    is_cheapest: bool = False
    """Whether the GPUs for a job are asked for, of the whole catalogue where none is named."""
    is_calibrating: bool = False
    """Whether the trials are asked for that would narrow the answer's interval."""
    within_seconds: float | None = None
    """The deadline of that job."""
    grpo: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `GRPOConfig` that are none of a configuration."""
    devices: int | None = None
    """GPUs of one host, of which is asked whether one, all or shards train fastest."""
    study: str | None = None
    storage: str | None = None
    as_json: bool = False
    is_detailed: bool = False
    """Whether all of it is printed, and not one screen."""


@dataclass(frozen=True)
class PlanQuestion:
    """What was asked, with every name looked up."""

    request: PlanRequest
    space: SearchSpace | None
    """None where no space was named."""
    kind: SpaceKind
    """Where it comes from."""
    spaces: Mapping[str, tuple[SearchSpace, SpaceKind]]
    """By GPU: what is searched there, and where it comes from."""
    model: ModelSpec
    gpus: tuple[GpuSpec, ...]
    offers: Mapping[str, tuple[Offer, ...]]
    """By GPU."""
    predictor: Predictor
    read_study: StudyReader
    dataset: PreparedDataset | None = None
    """What would be trained on; None for full rows."""
    shapes: ShapesOnDataset | None = None
    """What configurations come to on them."""
    predictors: dict[tuple[int, int], MemoryPredictor] = field(default_factory=dict)
    """By compute capability: GPUs that share one share all that is traced and read."""

    @property
    def own_settings(self) -> dict[str, Any]:
        """Settings that the model's architecture decides."""
        return {key: value for key, (value, _) in own_settings(self.model).items()}

    @cached_property
    def fixed_settings(self) -> Mapping[str, Any]:
        """Settings that are the same on every GPU: what was typed, and what makes jobs the same."""
        typed = self._typed
        if self.is_grpo:
            return self._with_whole_prompts(typed)
        if not self.request.is_cheapest:
            return typed
        fixed = {} if self.space is None else self.space.fixed
        return job(typed, fixed=fixed, spaces=self._searched)

    @property
    def _typed(self) -> Mapping[str, Any]:
        """Settings that were typed, but for a trainer that is there where nothing is said."""
        typed = dict(self.request.configuration)
        is_named = self.space is not None and "trainer" in self.space.fixed
        if typed.get("trainer") == "sweep" and not is_named:
            del typed["trainer"]
        return typed

    def _with_whole_prompts(self, typed: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings with an optimizer step of whole prompts, each with all its completions,
        where neither the space nor what was typed says how large it is."""
        is_free = self.space is None or self.space.values_of("effective_batch_size") == (None,)
        if not is_free or "effective_batch_size" in typed:
            return typed
        completions = self.grpo["num_generations"]
        samples = whole_step(PROMPTS * completions, fixed_settings=typed, spaces=self._searched)
        return {"effective_batch_size": math.lcm(samples, completions), **typed}

    @property
    def _searched(self) -> list[SearchSpace]:
        """The space of each GPU; none where one configuration is asked about."""
        if self.request.is_exact:
            return []
        return [space for space, _ in self.spaces.values()]

    @property
    def is_grpo(self) -> bool:
        """Whether GRPO's training step is asked about."""
        method = self.request.configuration.get("method")
        if method is None and self.space is not None:
            (method,) = self.space.values_of("method")
        return method == "grpo"

    @cached_property
    def grpo(self) -> Mapping[str, Any]:
        """Settings of `GRPOConfig`, under method grpo."""
        if not self.is_grpo:
            return {}
        names = {key: f"--set {key}" for key in self.request.grpo}
        return validate(Grpo, dict(self.request.grpo), Document("", names=names)).model_dump()

    def about(self, gpu: GpuSpec) -> SearchSpace | TrialConfig:
        """Return what is asked of a GPU: a space, or one configuration.

        Raises:
            InputError: what was typed is no configuration, does not go with the space, or leaves
                none of it that is valid.
        """
        asked: SearchSpace | TrialConfig
        if self.request.is_exact:
            given = {**self.own_settings, **needed_by(self.fixed_settings), **self.fixed_settings}
            asked = parse_config(_with_micro_batch(given), where="options")
            length = missing_length(asked, self.model)
            if length is not None and "seq_len" not in given:
                asked = asked.changed(seq_len=length)
        else:
            space, kind = self.spaces[gpu.name]
            refuse_without_dataset(space)
            asked = self._of_grpo(self._offered(gpu).space)
            if self.fixed_settings:
                asked = with_fixed(asked, self.fixed_settings)
            if isinstance(asked, SearchSpace):
                asked = with_room_for_images(asked, self.model)
            if isinstance(asked, SearchSpace) and kind != "file":
                asked = with_offered_batches(asked, self.model, gpu.budget_bytes)
        # Of the cheapest GPU's space the answer itself says what is not possible.
        if not self.request.is_cheapest or isinstance(asked, TrialConfig):
            refuse_impossible(asked, Setting(self.model, "cuda", None, self.dataset is not None))
        return asked

    def of_named_space(self) -> PlanQuestion:
        """Return the question with the space that was named on every GPU."""
        assert self.space is not None, "a space was named"
        return replace(self, spaces=dict.fromkeys(self.spaces, (self.space, self.kind)))

    def ways(self, gpu: GpuSpec) -> Iterator[tuple[str, PlanQuestion]]:
        """Yield what a host's GPUs can do, by its name: one alone, all of them, or shards."""
        space, _ = self.spaces[gpu.name]
        count = self.request.devices or 1
        for name, gpus, sharding in (
            ("one GPU", 1, "none"),
            (f"{count} x DDP", count, "none"),
            (f"{count} x FSDP", count, "fsdp"),
        ):
            configuration = dict(self.request.configuration)
            for key, value in {"data_parallel": gpus, "sharding": sharding}.items():
                # What a space says itself is not asked for: the survey is then the space's own.
                if set(space.values_of(key)) != {value}:
                    configuration[key] = value
            yield name, replace(self, request=replace(self.request, configuration=configuration))

    def _of_grpo(self, space: SearchSpace) -> SearchSpace:
        """Return the space without sequences that GRPO's completions do not go into."""
        if not self.is_grpo:
            return space
        longest = self.grpo["max_completion_length"] or 0
        lengths = space.values_of("seq_len")
        short = [length for length in lengths if length <= longest]
        if not short or len(short) == len(lengths):
            return space
        rules: list[Mapping[str, Any]] = list(space.leave_out)
        rules.append({"seq_len": short})
        return space.changed({"leave_out": rules})

    def text_notes(self, gpu: GpuSpec) -> tuple[str, ...]:
        """Return what the dataset makes of a GPU's space, for a person."""
        if not self.request.is_exact:
            return self._offered(gpu).notes
        own = own_settings(self.model)
        return tuple(
            dict.fromkeys(f"{own[key][1]}." for key in own if key not in self.fixed_settings)
        )

    def _offered(self, gpu: GpuSpec) -> Offered:
        """Return the space of a GPU as the trainer, the model and the dataset leave it."""
        space, kind = self.spaces[gpu.name]
        is_preset = kind != "file"
        able = for_trainer(
            space, self.model, is_preset=is_preset, fixed_settings=self.fixed_settings
        )
        own = with_own_settings(
            able.space, self.model, is_preset=is_preset, fixed_settings=self.fixed_settings
        )
        notes = able.notes + own.notes
        if self.dataset is None:
            return Offered(own.space, notes)
        offered = space_with_dataset(
            own.space,
            self.dataset,
            model=self.model,
            is_preset=is_preset,
            fixed_settings=self.fixed_settings,
        )
        return Offered(offered.space, notes + offered.notes)

    def asked(self, gpu: GpuSpec) -> PlanOptions:
        """Return what was asked of a GPU, for the answer to say."""
        if self.request.is_exact:
            return PlanOptions(fixed_settings=self.fixed_settings, grpo=self.grpo)
        _, kind = self.spaces[gpu.name]
        fixed_settings = self._typed if self.is_grpo else self.fixed_settings
        return PlanOptions(kind, fixed_settings, run_command=self._run_command(gpu), grpo=self.grpo)

    def _run_command(self, gpu: GpuSpec) -> str:
        """Return what to type to measure on a GPU what is searched here."""
        space, kind = self.spaces[gpu.name]
        options: dict[str, Any] = {"gpu": gpu.name, "model": self.request.model}
        first = ""
        name = space.name
        if kind == "file":
            name = self.request.space or ""
        if kind == "standard":
            name = f"{gpu.name}.yaml"
            first = f"sweep init {_typed(options)} -o {name} && "
            options = {}
        elif gpu.name == space.gpu:
            del options["gpu"]
        for key, value in self.request.data.items():
            options["data" if key == "texts" else f"data.{key}"] = value
        options |= {"numerics": self.request.numerics, **self._typed}
        return f"{first}sweep run {shlex.quote(name)} {_typed(options)}".rstrip()

    def forecaster(self, gpu: GpuSpec) -> Forecaster:
        """Return what answers for one GPU, within its budget or the tighter one of the space."""
        space, _ = self.spaces[gpu.name]
        budget_bytes = gpu.budget_bytes
        asked_gib = space.budget_gib_on(gpu.name)
        if asked_gib is not None:
            budget_bytes = asked_bytes(asked_gib, available=budget_bytes, gpu=gpu.name)
        if gpu.compute_capability not in self.predictors:
            self.predictors[gpu.compute_capability] = self.predictor(self.model, gpu)
        return build_forecaster(
            self.model,
            Target(gpu=gpu.name, device="cuda", budget_bytes=budget_bytes),
            shapes=self.shapes,
            predictor=self.predictors[gpu.compute_capability],
            evidence=self._evidence(gpu),
        )

    def _evidence(self, gpu: GpuSpec) -> Evidence:
        """Return what the study that was named says of a GPU."""
        if self.request.study is None:
            return NO_EVIDENCE
        snapshot = self.read_study(self.request.study, self.request.storage)
        dataset = None if self.dataset is None else self.dataset.summary
        return evidence_from(
            snapshot, model=self.model, gpu=gpu, dataset=dataset, shapes=self.shapes
        )


def _with_micro_batch(typed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings with the standard recipe's micro-batch lowered until it goes into a typed
    effective batch, where none was typed."""
    effective = typed.get("effective_batch_size")
    gpus = typed.get("data_parallel", 1)
    if effective is None or "micro_batch_size" in typed or effective % gpus:
        return typed
    micro_batch = largest_whole(TrialConfig().micro_batch_size, effective // gpus)
    return {**typed, "micro_batch_size": micro_batch}


def resolve_request(
    request: PlanRequest,
    *,
    predictor: Predictor,
    read_gpu: Callable[[], GpuInfo | None],
    read_study: StudyReader,
    read_dataset: ReadDataset = prepare_dataset,
) -> PlanQuestion:
    """Look up every name that was typed.

    Args:
        request: what was typed.
        predictor: makes what predicts memory.
        gpu: reads the GPU in this machine, for where none is named.
        read_study: reads the study whose trials calibrate, for where one is named.
        read_dataset: reads and tokenizes texts, or finds what did so before.

    Raises:
        InputError: something that was typed or named is not right.
        EnvironmentFault: a file or the hub is not to be had.
    """
    _check(request)
    kind, space, named = _space(request.space, request.model)
    gpus = _gpus(request, space, named, read_gpu)
    if request.from_file is not None and len(gpus) > 1:
        raise InputError(f"--from-file answers for one GPU, got {len(gpus)}: name one --gpu")
    if request.devices and len(gpus) > 1:
        raise InputError(f"--devices is of one GPU's host, got {len(gpus)} GPUs: name one")
    spaces: dict[str, tuple[SearchSpace, SpaceKind]] = {}
    for gpu in gpus:
        if space is None or named is not None:
            # GPUs alone were named: each has a space of its own.
            of_gpu, of_kind = own_space(gpu.name, request.model)
        else:
            of_gpu = space
            of_kind = kind
        if request.numerics is not None:
            of_gpu = of_gpu.changed({"numerics": request.numerics})
        spaces[gpu.name] = (of_gpu, of_kind)
    of_first = space or spaces[gpus[0].name][0]
    model = load_model_spec(request.model or of_first.model)
    choice = typed_dataset(None if space is None else space.data, request.data)
    dataset = None
    shapes = None
    if choice is not None:
        dataset = read_dataset(DatasetRequest.of(choice, model))
        shapes = shapes_of_dataset(dataset, choice, seed=of_first.seed)
    if space is not None:
        space = replaced(space, data=choice)
    question = PlanQuestion(
        dataset=dataset,
        shapes=shapes,
        request=request,
        space=space,
        kind=kind,
        spaces=spaces,
        model=model,
        gpus=gpus,
        offers=load_prices(request.prices or own_price_file(), typed=request.typed_prices),
        predictor=predictor,
        read_study=read_study,
    )
    _check_grpo(question)
    return question


def _check_grpo(question: PlanQuestion) -> None:
    request = question.request
    if request.grpo and not question.is_grpo:
        raise InputError(f"--set {min(request.grpo)} is of GRPO: add --method grpo")
    if not question.is_grpo:
        return
    is_of_trials = request.is_cheapest or request.is_calibrating or request.devices is not None
    is_of_cost = request.work != AskedWork() or bool(request.typed_prices)
    if is_of_trials or is_of_cost or len(question.gpus) > 1:
        raise InputError(
            "method grpo: the memory of one GPU's training step is planned, no cost and no trial: "
            "ask of one GPU alone, without --work and --price"
        )


def _gpus(
    request: PlanRequest,
    space: SearchSpace | None,
    named: GpuSpec | None,
    read_gpu: Callable[[], GpuInfo | None],
) -> tuple[GpuSpec, ...]:
    """Return the GPUs that are asked about: every one that was named, the positional one first.

    The GPU of a space, or the one that is here, counts where none is; the whole catalogue where
    the cheapest is asked for.
    """
    gpus: dict[str, GpuSpec] = {}
    if named is not None:
        gpus[named.name] = named
    for name in request.gpus:
        gpu = _gpu(name, read_gpu)
        gpus[gpu.name] = gpu
    if not gpus and request.is_cheapest:
        return tuple(gpu_catalogue().values())
    if not gpus:
        return (_gpu("auto" if space is None else space.gpu, read_gpu),)
    return tuple(gpus.values())


def _check(request: PlanRequest) -> None:
    has_dataset = request.data.get("texts") is not None
    has_question = request.is_calibrating or request.is_longest or request.is_cheapest
    typed = {
        "--from-file": request.from_file is not None,
        "--longest": request.is_longest,
        "--cheapest": request.is_cheapest,
        "--calibrate": request.is_calibrating,
        "--devices": request.devices is not None,
        "--exact": request.is_exact and has_question,
    }
    given = [option for option, is_typed in typed.items() if is_typed]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are different questions: keep one")
    ways = request.configuration.keys() & {"data_parallel", "sharding"}
    if request.devices is not None and ways:
        raise InputError(f"--devices compares values of {min(ways)}: leave that out")
    if request.from_file is not None:
        for key in request.configuration:
            if key != "trainer":
                raise InputError(f"{key} and --from-file are both given: keep one")
    if request.is_longest and "seq_len" in request.configuration:
        raise InputError("--longest asks for the length: leave --seq-len out")
    if request.is_longest and has_dataset:
        raise InputError("--longest asks for the length, and texts have theirs: leave one out")
    if request.is_calibrating and has_dataset:
        raise InputError("--calibrate plans trials of full sequences: leave --data out")
    if request.within_seconds is not None and not request.is_cheapest:
        raise InputError("--within needs --cheapest: which job has to be done by then")
    if request.storage is not None and request.study is None:
        raise InputError("--storage needs --from: which study to calibrate from")


def _space(
    name: str | None, model: str | None
) -> tuple[SpaceKind, SearchSpace | None, GpuSpec | None]:
    """Return the space that was named and what it is, and the GPU where it is one's name.

    A GPU by any of its names is the preset that is called like it, if one is: how a name is
    written changes no answer.
    """
    if name is None:
        return "standard", None, None
    gpu = match_product(name)
    preset = preset_name(name)
    if preset is None and gpu is not None:
        preset = preset_name(gpu.name)
    if preset is not None:
        return "preset", preset_space(preset, model=model), match_product(preset)
    if gpu is not None and not Path(name).exists():
        return "standard", None, gpu
    try:
        return "file", load_space(name), None
    except InputError:
        if "/" in name or Path(name).suffix or Path(name).exists():
            raise
        presets = (preset.name for preset in shipped_presets())
        near = did_you_mean(name, itertools.chain(gpu_names(), presets))
        near = near or "; `sweep presets` and `sweep gpus` list them"
        raise InputError(f"'{name}' is no preset, no YAML file and no GPU{near}") from None


def _gpu(name: str, read_gpu: Callable[[], GpuInfo | None]) -> GpuSpec:
    """Return the GPU of that name; ``auto`` is the one in this machine."""
    if name == "cpu":
        raise InputError(
            "gpu is cpu, and only GPUs are predicted: name one with --gpu (`sweep gpus`), or "
            "measure on the CPU with `sweep run`"
        )
    if name != "auto":
        return find_gpu(name)
    here = read_gpu()
    if here is None:
        raise InputError("no GPU is named and none is here: name one with --gpu (`sweep gpus`)")
    return here.spec()


def _typed(options: Mapping[str, Any]) -> str:
    given = {key: value for key, value in options.items() if value is not None}
    return shlex.join(as_options(given))


def read_configurations(
    name: str,
    *,
    own: Mapping[str, Any] = MappingProxyType({}),
    stdin: BinaryIO | None = None,
) -> list[tuple[str, TrialConfig]]:
    """Return each line's configuration, with where it stands for messages.

    Blank lines are skipped, missing keys take the recipe's defaults.

    Args:
        name: a file, or ``-`` for standard input.
        own: settings of a line that names no others.
        stdin: read for ``-``; the process's own by default.

    Raises:
        InputError: the file is missing or empty, or a line is no configuration; names file, line
            and key.
        EnvironmentFault: the file is there and cannot be read.
    """
    label = name
    if name != STDIN:
        text = read_text(Path(name), label=name)
    else:
        label = "stdin"
        try:
            text = (stdin or sys.stdin.buffer).read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"stdin: not UTF-8 text, byte {error.start} is wrong") from error
    configurations = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{label}: line {number}"
            values = {**own, **parse_object(line, where=where)}
            configurations.append((where, parse_config(values, where=where)))
    if not configurations:
        raise InputError(f"{label}: no configuration in it; give one JSON object a line")
    return configurations
