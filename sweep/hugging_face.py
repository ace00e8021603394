"""A record as objects of transformers, PEFT and TRL, and a callback that says what it promised."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import TrainerCallback, TrainingArguments

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.config import SETTINGS, allocator_settings
from qlora_sweep.search_spaces.errors import InputError, quote
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.linears import parameters
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.space import Weights
from qlora_sweep.storage.files import replace
from qlora_sweep.sweep.data.collation import IGNORED
from qlora_sweep.sweep.export.formats import lora_options
from qlora_sweep.sweep.export.record import Record
from qlora_sweep.sweep.export.trainers import options, unsupported
from qlora_sweep.sweep.finetuning import course
from qlora_sweep.sweep.finetuning.results import compared
from qlora_sweep.sweep.paths import cache_directory
from qlora_sweep.sweep.running.device_info import environment_with, read_gpu
from qlora_sweep.sweep.training.adapters import compile_each, recompute, with_adapters
from qlora_sweep.sweep.training.device import open_device
from qlora_sweep.sweep.training.model import (
    build_base,
    decoder_layers,
    loading_arguments,
    name_quantizer,
)
from qlora_sweep.sweep.training.recomputing import CheckpointsOnHost, as_nodes

_NOT_LOADED = (
    "compute_dtype",
    "upcast_fp32",
    "checkpoint_fraction",
    "checkpoint_offload",
    "compile",
    "sharding",
)
"""Settings that `from_pretrained`, `get_peft_model` and `Trainer` lose as TRL does."""
_LOST_IN_FILES = ("quantization", "compute_dtype", "quantized_fraction", "lora_alpha")
"""Settings that a file of TRL's cannot say, and a model that is handed to it has."""
_patched: list[contextlib.ExitStack] = []
"""What would undo Liger's patches of modules, which models still need."""


def model_kwargs(record: Record) -> dict[str, Any]:
    """See `sweep.api.Winner.model_kwargs`."""
    if record.config.weight_bits == 8:
        kind = record.config.quantization
        raise InputError(f"from_pretrained has no base in {kind} as measured: use load_model")
    if record.config.is_4bit and record.model.has_experts:
        raise InputError("from_pretrained leaves experts in 16 bits: use load_model")
    more = [unsupported(record, "llama-factory").get("adapter_dtype")]
    if record.config.expandable_segments:
        more.append(f"expandable_segments: start Python with {allocator_settings(True)} set.")
    _warn("from_pretrained and get_peft_model, where load_model does", record, _NOT_LOADED, *more)
    options = loading_arguments(record.config, spec=record.model.spec, device=_device())
    return {**options, "use_cache": False}


def peft_config(record: Record) -> LoraConfig:
    """See `sweep.api.Winner.peft_config`."""
    return LoraConfig(**lora_options(record))


def training_arguments(record: Record, **changes: Any) -> TrainingArguments:
    """See `sweep.api.Winner.training_arguments`."""
    liger = record.config.kernels_kind.in_liger
    kernels = {"use_liger_kernel": liger is not None, "liger_kernel_config": liger}
    return _arguments(TrainingArguments, record, {**kernels, **changes})


def trl_args(record: Record, **changes: Any) -> Any:
    """See `sweep.api.Winner.trl_args`."""
    from trl import DPOConfig, SFTConfig

    kind: Any = SFTConfig
    if record.config.is_on_pairs:
        kind = DPOConfig
    keys = set(SETTINGS).difference(_LOST_IN_FILES)
    _warn(kind.__name__.replace("Config", "Trainer"), record, keys)
    return _arguments(kind, record, changes)


def _arguments(kind: Any, record: Record, changes: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    # Evaluating needs a dataset for it, which is the caller's to choose.
    spelled = {k: v for k, v in options(record, "trl").items() if k in known - {"eval_strategy"}}
    if record.texts is not None and "chat_template_path" in spelled:
        spelled["chat_template_path"] = str(_kept(record.texts.summary.marked_template or ""))
    has_gpu = torch.cuda.is_available()
    here = {
        "output_dir": replaced(record, format="python").output_dir,
        "use_cpu": not has_gpu,
        "dataloader_pin_memory": has_gpu,
        "accelerator_config": {"non_blocking": has_gpu},
    }
    return kind(**{**spelled, **here, **changes})


def _kept(template: str) -> Path:
    """Return the file of a chat template, which a `SFTConfig` names, in the cache."""
    content = template.encode("utf-8")
    name = f"{hashlib.sha256(content).hexdigest()[:16]}.jinja"
    path = cache_directory() / "chat_templates" / name
    replace(path, content, is_durable=False)
    return path


def _warn(what: str, record: Record, keys: Collection[str], *more: str | None) -> None:
    """Warn of what TRL loses of these settings, and of more."""
    lost = [sentence for key, sentence in unsupported(record, "trl").items() if key in keys]
    lost += filter(None, more)
    if lost:
        lost.insert(0, f"Not done by {what}:")
        warnings.warn("\n- ".join(lost), stacklevel=4)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))


def load_model(record: Record, name: str, *, seed: int) -> PeftModel:
    """See `sweep.api.Winner.load_model`."""
    config = record.config
    spec = load_model_spec(name)
    device = _device()
    if config.is_sharded:
        raise InputError("sharding fsdp: nothing here shards a model that is loaded")
    if (spec.model_type, parameters(spec)) != (
        record.model.spec.model_type,
        parameters(record.model.spec),
    ):
        warnings.warn(f"{quote(name)} is no {record.model.name}, which was measured", stacklevel=3)
    is_shipped = spec.source == "shipped"
    if is_shipped:
        warnings.warn(f"{quote(name)} has no weights: random ones take their place", stacklevel=3)
    open_device(device.type).expand_segments(config.expandable_segments)
    weights: Weights = "random" if is_shipped else "pretrained"
    base = build_base(config, spec=spec, weights=weights, device=device, seed=seed)
    _patched.append(base.undo)
    if base.offloaded is not None:
        weakref.finalize(base.model, base.offloaded.close)
    model = with_adapters(base, config)
    layers = decoder_layers(base.model)
    name_quantizer(model)
    if chosen := config.checkpointed_layers(len(layers)):
        recompute(base.model, layers, chosen)
        if config.recomputes_as_nodes:
            host = None
            if config.waits_on_host:
                host = CheckpointsOnHost(device)
                weakref.finalize(base.model, host.close)
            as_nodes(layers, host)
        # Trainer would ask it of every layer.
        model.gradient_checkpointing_enable = lambda *_, **__: None
    if config.compile:
        compile_each(layers)
    return model.train()


class StepClock(TrainerCallback):
    """Marks where each optimizer step ends, without waiting for the GPU."""

    def __init__(self) -> None:
        self._device = open_device(_device().type)
        self._marks: list[Any] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Let the peak be the training's own."""
        self._marks = []
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Mark where the first step begins."""
        if not self._marks:
            self._marks.append(self._device.mark())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Mark where a step ends."""
        self._marks.append(self._device.mark())

    def seconds(self) -> list[float]:
        """Return the seconds of each step."""
        for mark in self._marks[-1:]:
            mark.wait()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [after.seconds_since(before) for before, after in pairs]

    def peak_allocated_bytes(self) -> int | None:
        """Return the most bytes of live tensors; None on a CPU, where nothing counts them."""
        if not torch.cuda.is_available():
            return None
        return torch.cuda.max_memory_allocated()


class ThroughputCallback(StepClock):
    """Says what was promised when a training begins, and what was reached when it ends.

    Labels are counted on the device, so that no step waits for it.

    Args:
        record: what was measured.
        say: is given each line; by default they go to stderr.
    """

    tokens_per_second: float | None = None
    """Supervised, at the median step of the last training, of all processes; None where its
    batches had no labels."""

    def __init__(self, record: Record, say: Callable[[str], object] | None = None) -> None:
        super().__init__()
        self._record = record
        self._say = say or partial(print, file=sys.stderr)
        # Of random examples a trial counts every token, of a dataset those that are predicted.
        self._first = int(record.texts is not None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what was promised, and count labels from now on."""
        super().on_train_begin()
        self._tokens: list[Any] = [0]
        self._hook = kwargs["model"].register_forward_pre_hook(self._count, with_kwargs=True)
        record = self._record
        measured = record.measurement
        if state.is_world_process_zero:
            self._say(
                f"Promised: {units.rate(measured.tokens_per_second)} tokens/s, peak "
                f"{units.gib(measured.peak_allocated_bytes)} allocated (trial {record.number} of "
                f"study {quote(record.study)}, on {record.device})."
            )

    def _count(self, model: Any, _: Any, inputs: dict[str, Any]) -> None:
        # A reference's pass, which has no gradients, trains on nothing.
        is_trained = model.training and torch.is_grad_enabled()
        if is_trained and (labels := inputs.get("labels")) is not None:
            self._tokens[-1] = self._tokens[-1] + (labels[..., self._first :] != IGNORED).sum()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Mark where a step ends; labels are the next one's from here."""
        super().on_step_end()
        self._tokens.append(0)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say what was reached, and what may explain a difference."""
        self._hook.remove()
        tokens = [int(count) for count in self._tokens[:-1]]
        seconds = self.seconds()
        warm = [step >= course.WARMUP_STEPS for step in range(len(seconds))]
        rate = course.Steps(tokens=tokens, seconds=seconds, is_warm=warm).median_rate()
        self.tokens_per_second = args.world_size * rate if rate else None
        if not state.is_world_process_zero:
            return
        here = environment_with(read_gpu() if torch.cuda.is_available() else None)
        found = compared(
            self._record,
            tokens_per_second=self.tokens_per_second,
            peak_allocated_bytes=self.peak_allocated_bytes(),
            environment=here,
        )
        reached = "no tokens/s, as batches have no labels"
        peak = "no peak, which a CPU does not count"
        if (ratio := found.speed.ratio) is not None:
            reached = f"{units.rate(found.speed.reached)} tokens/s ({ratio:.3g} of the promise)"
        if (ratio := found.memory.ratio) is not None:
            peak = f"peak {units.gib(found.memory.reached)} allocated ({ratio:.3g})"
        self._say(f"Reached: {reached}; {peak}.")
        if (words := found.words()) is not None:
            self._say(words)
