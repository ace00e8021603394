"""What comes of one model type of transformers, tiny: planned, trained, compared, merged, exported.

Each question is asked as the commands ask it: the rules first, then the prediction by tracing, then
a trial. What cannot be done is kept as one sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

# As the supervisor does for a worker on the CPU; torch reads it when it is imported.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch
from peft import PeftModel
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_sweep.search_spaces.config import TARGET_SETS, TrialConfig
from qlora_sweep.search_spaces.errors import InputError, SweepError
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.kinds import DeviceName
from qlora_sweep.search_spaces.linears import resolve_targets
from qlora_sweep.search_spaces.models import ModelSpec, checked_config
from qlora_sweep.search_spaces.recurrent import FLASH_LINEAR_ATTENTION, recurrent_kind
from qlora_sweep.search_spaces.rules import WITHOUT_CHECKPOINTING, attention_of, violation
from qlora_sweep.search_spaces.space import StepBudget, Weights
from qlora_sweep.storage.records import Measured
from qlora_sweep.sweep.data.probing import check_is_causal
from qlora_sweep.sweep.merging.merged import Merge
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import Tracer
from qlora_sweep.sweep.predict.memory.tracing.stand_ins import _POLICIES
from qlora_sweep.sweep.predict.speed.predictor import StepTimes
from qlora_sweep.sweep.training import eight_bit, experts, fitting, grouped, preference
from qlora_sweep.sweep.training.adapters import attached
from qlora_sweep.sweep.training.device import open_device
from qlora_sweep.sweep.training.fitting import without_dropout
from qlora_sweep.sweep.training.meter import GpuReader
from qlora_sweep.sweep.training.model import (
    BaseModel,
    architecture_of,
    build_base,
    decoder_layers,
)
from qlora_sweep.sweep.training.step import TrainingLoop
from qlora_sweep.sweep.training.trial import Trial, TrialDevice, TrialTask
from tests.families import tiny_config_of
from tests.sweep.export.studies import a_study, export, imported
from tests.sweep.export.test_export_script import described
from tests.sweep.merging.made import make_adapter, make_base

YES = "yes"
WINDOW = 128
"""Tokens that attention sees where a type has a window."""
HELD_OUT = ((256, 0.5), (96, 0.0))
"""Tokens of a sequence and share of checkpointed layers of what is measured: longer than the window
and, with adapters on attention, shorter."""
FEW, MANY = 1, 3
"""Sequences of the two micro-batches whose peaks are compared."""
RANK = 4
COMPARED = {"micro_batch_size": 8, "seq_len": 256}
"""What is compared in INT8: two micro-batches have as many tokens as are looked at."""
BUDGET = StepBudget(warmup_min=1, warmup_max=1, measured_min=2, measured_max=2)
"""The peak, and what proves the settings, are in the first two steps."""
SPEED_OF = "h200"
"""The GPU whose seconds are asked for."""
SAME_LOSS = 1e-4
SAME_GRADIENT = 1e-3
"""Relative, in fp32: a fused kernel adds in another order."""
MERGED_OFF = 0.02
"""Of merged logits, relative: merged weights are rounded to bf16."""
ROUNDED_OFF = 2.0**-8
"""Of a tensor that is rounded to bf16, relative to its norm, at most."""


class CastingAsCuda(TorchFunctionMode):
    """Has operators in fp32 that autocast has in fp32 on a GPU, and in 16 bits on a CPU, such as
    powers and softmax: what they keep is predicted of a GPU."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function."""
        options = dict(kwargs or {})
        if torch.is_autocast_enabled("cpu"):
            policy = _POLICIES.get(func)
            if policy == "fp32":
                args = tuple(map(_widened, args))
                options = {name: _widened(value) for name, value in options.items()}
            elif policy == "fp32_result" and _widened(args[0]) is not args[0]:
                options.setdefault("dtype", torch.float32)
        return func(*args, **options)


def cast_where_recomputed(base: BaseModel) -> None:
    """Have layers cast as on a GPU in the backward pass, too, which leaves all modes."""

    def casting(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with CastingAsCuda():
                return forward(*args, **kwargs)

        return run

    for layer in decoder_layers(base.model):
        layer.forward = casting(layer.forward)


def _widened(value: Any) -> Any:
    """Return a tensor of 16 bits in 32, and anything else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        return value.float()
    return value


class NotSoError(Exception):
    """What a type does not do, in one sentence."""


@dataclass(frozen=True)
class OfTargets:
    """What came of one target set."""

    refused: str = ""
    """The rule that forbids it, and why; empty where none does."""
    planned: str = ""
    """``yes``, or why memory is not predicted."""
    error: float | None = None
    """Of what two sequences more take, measured over predicted, less one: the largest."""
    trained: str = ""
    """``yes``, or how the trial ended."""


@dataclass(frozen=True)
class OfType:
    """What came of a type."""

    decoder: str = ""
    """The type that is trained in its place, where it holds a text decoder of another."""
    refused: str = ""
    """Why nothing of it is trained; empty where something is."""
    quantization: str = ""
    """In which it was trained."""
    unquantized: str = ""
    """Why that is not 4 bits; empty where it is."""
    targets: dict[str, OfTargets] = field(default_factory=dict)
    speed: str = ""
    faithful: str = ""
    merged: str = ""
    exported: str = ""
    seconds: float = 0.0

    @property
    def widest(self) -> str | None:
        """The last target set that was trained."""
        trained = [name for name, found in self.targets.items() if found.trained == YES]
        return trained[-1] if trained else None


@dataclass(frozen=True)
class Workplace:
    """What types are tried with."""

    tracer: Tracer
    device: DeviceName
    home: Path
    """For what is kept for a while."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPU; None on a CPU."""
        return torch.cuda.get_device_capability() if self.device == "cuda" else None

    def device_of(self, spec: ModelSpec) -> DeviceName:
        """Return where a model's numbers are compared: a CPU, unless its kernels have none."""
        kind = recurrent_kind(spec)
        if kind is not None and kind.package == FLASH_LINEAR_ATTENTION:
            return self.device
        return "cpu"


def tried(kind: str, place: Workplace) -> OfType:
    """Return what comes of a type."""
    began = time.perf_counter()
    try:
        config = tiny_config_of(kind)
    except Exception as error:  # noqa: BLE001 - whatever it is, the table says it
        found = OfType(refused=f"its class has no default config: {_sentence(error)}")
    else:
        found = _tried(kind, config, place)
    gc.collect()
    return dataclasses.replace(found, seconds=round(time.perf_counter() - began, 1))


def _tried(kind: str, config: dict[str, Any], place: Workplace) -> OfType:
    try:
        spec = ModelSpec(kind, "directory", checked_config(config, label=kind))
    except InputError as error:
        return OfType(refused=str(error).removeprefix(f"{kind}: "))
    if spec.is_part:
        return _of_part(spec)
    spec = _as_on_a_gpu(spec)
    refused = _is_no_decoder(spec, place.device_of(spec))
    if refused:
        return OfType(refused=refused)
    found = of_targets(spec, place)
    if found.widest is None:
        return found
    with tempfile.TemporaryDirectory(dir=place.home) as directory:
        return dataclasses.replace(
            found,
            speed=_without_name(_said(lambda: speed(spec, found.quantization)), spec),
            faithful=_said(lambda: faithful(spec, found, place)),
            merged=_said(lambda: merged(spec, found, place, Path(directory))).replace(
                directory, ""
            ),
            exported=_said(lambda: is_exported(spec, found, place, Path(directory))),
        )


def _of_part(spec: ModelSpec) -> OfType:
    """Return which type's decoder is trained of a model that holds more, where one is."""
    try:
        architecture_of(spec)
    except InputError as error:
        return OfType(refused=str(error))
    return OfType(decoder=spec.model_type)


def _as_on_a_gpu(spec: ModelSpec) -> ModelSpec:
    """Return a model that drops nothing, whose values are as wide as its queries, and whose window,
    where it has one, is shorter than a sequence.

    On a CPU attention is not fused else, and what is dropped is kept in 16 bits.
    """
    values = AutoConfig.for_model(**spec.config).to_dict()
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if "drop" in key and isinstance(value, float):
            changes[key] = 0.0
    if isinstance(values.get("v_head_dim"), int) and "qk_nope_head_dim" in values:
        changes["v_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    window = values.get("sliding_window")
    if isinstance(window, int) and "sliding_window" not in spec.config:
        changes["sliding_window"] = WINDOW
    return dataclasses.replace(spec, config={**spec.config, **changes})


def _is_no_decoder(spec: ModelSpec, device: DeviceName) -> str:
    """Return why a type is not trained on texts at all; empty where it is."""
    config = _config(spec, "attention", "none").changed(compute_dtype="fp32")
    try:
        with _base(config, spec, device) as base:
            check_is_causal(base.model)
    except InputError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the table says it
        return f"it cannot be built: {_sentence(error)}"
    return ""


def of_targets(spec: ModelSpec, place: Workplace) -> OfType:
    """Return what comes of each target set: predicted, measured and trained."""
    quantization = "nf4"
    unquantized = _rule(_config(spec, "attention", "nf4"), spec, place)
    if unquantized.startswith("quantization-leaves-weights"):
        quantization = "none"
    else:
        unquantized = ""
    predictor = TracingPredictor(
        spec, cache_dir=place.home, compute_capability=place.capability, tracer=place.tracer
    )
    targets: dict[str, OfTargets] = {}
    for name in TARGET_SETS:
        config = _config(spec, name, quantization)
        refused = _rule(config, spec, place)
        if refused:
            targets[name] = OfTargets(refused=refused)
        else:
            targets[name] = _of_targets(config, spec, predictor, place)
    return OfType(quantization=quantization, unquantized=unquantized, targets=targets)


def _of_targets(
    config: TrialConfig, spec: ModelSpec, predictor: TracingPredictor, place: Workplace
) -> OfTargets:
    held_out = list(_held_out(config, spec))
    planned = YES
    predicted: list[int] = []
    try:
        predictor.predict(config)
    except SweepError as error:
        planned = _without_name(str(error), spec)
    # Adapters on experts in 16 bits have no prediction, and kernels of linear attention no CPU.
    kind = recurrent_kind(spec)
    has_kernels = kind is None or kind.package is None or place.device == "cuda"
    if planned == YES and has_kernels:
        with contextlib.suppress(SweepError):
            predicted = [predictor.predict(each).peak_allocated_bytes for each in held_out]
    measured: list[int] = []

    def train() -> None:
        _peaks([config], spec, place)
        # What is not predicted may loop over the tokens.
        if predicted:
            measured.extend(_peaks(held_out, spec, place))

    trained = _said(train)
    error_of_growth = None
    if measured:
        error_of_growth = _error(measured, predicted)
    return OfTargets(planned=planned, error=error_of_growth, trained=trained)


def _held_out(config: TrialConfig, spec: ModelSpec) -> Iterator[TrialConfig]:
    """Yield pairs of configurations that differ in their sequences, without quantization: on the
    CPU bitsandbytes keeps tensors that its kernels for GPUs do not."""
    lengths = HELD_OUT if config.target_modules == "attention" else HELD_OUT[:1]
    for length, fraction in lengths:
        if spec.model_type in WITHOUT_CHECKPOINTING:
            fraction = 0.0
        for rows in (FEW, MANY):
            yield config.changed(
                quantization="none",
                seq_len=length,
                checkpoint_fraction=fraction,
                micro_batch_size=rows,
            )


def _error(measured: list[int], predicted: list[int]) -> float:
    """Return how far off the growth of pairs' peaks is predicted: the largest, relative."""
    errors: list[float] = []
    for few in range(0, len(measured), 2):
        growth = measured[few + 1] - measured[few]
        errors.append(growth / (predicted[few + 1] - predicted[few]) - 1.0)
    return round(max(errors, key=abs), 4)


def _peaks(configs: list[TrialConfig], spec: ModelSpec, place: Workplace) -> list[int]:
    """Return the peaks of trials on one base, in bytes.

    Raises:
        NotSoError: one was not measured.
    """
    peaks: list[int] = []
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(_base(configs[0], spec, place.device))
        if place.device == "cpu":
            stack.enter_context(CastingAsCuda())
            cast_where_recomputed(base)
        for config in configs:
            outcome = _outcome(base, config, place)
            peaks.append(outcome.measurement.peak_allocated_bytes)
    return peaks


def _outcome(base: BaseModel, config: TrialConfig, place: Workplace) -> Measured:
    device = TrialDevice(device=open_device(place.device), gpu=GpuReader(None))
    outcome = Trial(base, device, TrialTask(config, BUDGET)).run()
    if isinstance(outcome, Measured):
        return outcome
    detail = getattr(outcome, "detail", "")
    setting = getattr(outcome, "setting", "")
    raise NotSoError(f"{outcome.verdict}: {setting} {detail}".replace("  ", " ").strip())


def speed(spec: ModelSpec, quantization: str) -> None:
    """See that seconds are predicted.

    Raises:
        InputError: they are not.
    """
    config = _config(spec, "attention", quantization)
    times = StepTimes([config], model=spec, gpu=find_gpu(SPEED_OF), evidence=None)
    prediction = times.prediction(0)
    if isinstance(prediction, InputError):
        raise prediction


def faithful(spec: ModelSpec, found: OfType, place: Workplace) -> None:
    """See that loss and gradients in fp32 are those of eager attention without recomputation, and
    that a step in INT8 stands for one in 16 bits where the base is in 4 and has no experts.

    Raises:
        NotSoError: they are not.
    """
    targets = found.widest or ""
    config = _config(spec, targets, "none").changed(compute_dtype="fp32")
    loss, gradient = _gradient(config, spec, place)
    plain = config.changed(attention="eager", checkpoint_fraction=0.0)
    plain_loss, plain_gradient = _gradient(plain, spec, place)
    if abs(loss / plain_loss - 1.0) > SAME_LOSS:
        raise NotSoError(f"the loss is {loss / plain_loss - 1.0:.1%} off eager attention's")
    off = float((gradient - plain_gradient).norm() / plain_gradient.norm())
    if off > SAME_GRADIENT:
        raise NotSoError(f"gradients are {off:.1%} off those of eager attention")
    if found.quantization == "none":
        return
    narrow = _config(spec, targets, found.quantization).changed(compute_dtype="int8")
    if found.targets[targets].planned == YES:
        narrow = narrow.changed(**COMPARED)
    refused = _rule(narrow, spec, place)
    if refused.startswith("experts"):
        return
    if refused:
        raise NotSoError(f"in 16 bits; in INT8 refused: {refused}")
    _peaks([narrow], spec, place)


def _gradient(config: TrialConfig, spec: ModelSpec, place: Workplace) -> tuple[float, torch.Tensor]:
    """Return loss and gradient, (parameters,), of a micro-batch."""
    device = place.device_of(spec)
    with _base(config, spec, device) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        trained = attachment.trainable_parameters()
        torch.manual_seed(1)
        for parameter in trained:
            # Half of them begin with zeros, and then the others have no gradient.
            torch.nn.init.normal_(parameter, std=0.05)
        with without_dropout(attachment.model):
            loss = loop.add_gradients(loop.next_batch(), weight=1.0)
        gradients = [p.grad.flatten() for p in trained if p.grad is not None]
        return loss, torch.cat(gradients).clone()


def merged(spec: ModelSpec, found: OfType, place: Workplace, directory: Path) -> None:
    """See that a merged checkpoint says what base and adapter say.

    Raises:
        NotSoError: it says something else.
    """
    stored = _stored(spec, directory)
    targets = list(resolve_targets(_config(spec, found.widest or "", "none"), spec))
    wanted: Any = targets
    if targets == ["all-linear"]:
        wanted = "all-linear"
    adapter = make_adapter(directory / "adapter", stored, target_modules=wanted)
    output = directory / "merged"
    output.mkdir()
    Merge(adapter, stored).write(output)
    device = place.device_of(spec)
    tokens = torch.arange(3, 50, device=device)[None]
    with torch.no_grad():
        base = _read(stored, device)
        before = base(input_ids=tokens).logits
        adapted: Any = PeftModel.from_pretrained(base, adapter).eval()
        together = adapted(input_ids=tokens).logits
        written = _read(output, device)
        after = written(input_ids=tokens).logits
    changed = float((together - before).norm() / before.norm())
    off = float((after - together).norm() / together.norm())
    # What weights are rounded to sends tokens of a random mixture to other experts.
    is_rounding = _largest_difference(written, adapted.merge_and_unload()) <= ROUNDED_OFF
    if off > max(MERGED_OFF, changed / 10) and not is_rounding:
        of_adapter = f"those of the adapter, which are {changed:.1%} off the base's"
        raise NotSoError(f"merged logits are {off:.1%} off {of_adapter}")


def _largest_difference(written: torch.nn.Module, merged: torch.nn.Module) -> float:
    """Return how far a tensor of a written model is off PEFT's, relative to its norm, at most."""
    own = written.state_dict()
    differences = [0.0]
    for name, tensor in merged.state_dict().items():
        if tensor.is_floating_point():
            off = (own[name].float() - tensor.float()).norm() / tensor.float().norm().clamp(
                min=1e-9
            )
            differences.append(float(off))
    return max(differences)


def _stored(spec: ModelSpec, directory: Path) -> Path:
    """Return where a random base is stored as transformers stores it."""
    path = directory / "base"
    if not path.exists():
        make_base(path, spec.config)
    return path


def _read(path: Path, device: DeviceName) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.to(device).eval()


def is_exported(spec: ModelSpec, found: OfType, place: Workplace, directory: Path) -> None:
    """See that the exported script builds the tensors that the trial trained.

    Raises:
        NotSoError: it builds others.
    """
    stored = dataclasses.replace(spec, path=_stored(spec, directory))
    config = _config(spec, found.widest or "", found.quantization)
    _put_beside_scripts()
    script = imported(
        export(a_study(config, model=stored), format="script"), directory / "train.py"
    )
    built = described(script.load_model(str(stored.path)).get_base_model())
    with (
        _base(config, stored, place.device_of(spec), weights="pretrained") as base,
        attached(base, config) as attachment,
    ):
        trained = described(attachment.model.get_base_model())
    for what, value in trained.items():
        if built[what] != value:
            raise NotSoError(f"the script builds other {what} than the trial trained")


@cache
def _put_beside_scripts() -> None:
    """Let a script find what lies beside it."""
    for module in (eight_bit, experts, fitting, grouped, preference):
        sys.modules[module.__name__.rpartition(".")[2]] = module


@contextlib.contextmanager
def _base(
    config: TrialConfig, spec: ModelSpec, device: str, *, weights: Weights = "random"
) -> Iterator[BaseModel]:
    base = build_base(config, spec=spec, weights=weights, device=torch.device(device), seed=0)
    try:
        yield base
    finally:
        base.close()


def _config(spec: ModelSpec, targets: str, quantization: str) -> TrialConfig:
    fraction = 0.5
    if spec.model_type in WITHOUT_CHECKPOINTING:
        fraction = 0.0
    return TrialConfig(
        attention=attention_of(spec),
        target_modules=targets,
        quantization=quantization,
        micro_batch_size=2,
        seq_len=48,
        lora_rank=RANK,
        checkpoint_fraction=fraction,
    )


def _rule(config: TrialConfig, spec: ModelSpec, place: Workplace) -> str:
    """Return the rule that forbids a configuration, and why; empty where none does."""
    broken = violation(config, model=spec, compute_capability=place.capability, device=place.device)
    if broken is None:
        return ""
    return f"{broken.rule}: {broken.reason}"


def _said(question: Callable[[], object]) -> str:
    """Return ``yes``, or why not in one sentence."""
    try:
        question()
    except (NotSoError, SweepError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the table says it
        return _sentence(error)
    return YES


def _sentence(error: Exception) -> str:
    first = str(error).strip().splitlines()[:1] or [""]
    return f"{type(error).__name__}: {first[0][:160]}"


def _without_name(text: str, spec: ModelSpec) -> str:
    return text.removeprefix(f"model '{spec.name}': ").removeprefix("memory is not predicted: ")
