"""One optimizer step, as transformers' Trainer would do it, and the micro-batches that it gets.

Accumulation, mixed precision, clipping, optimizer and schedule go through accelerate. Nothing in a
step waits for the device, so that the host launches the next one meanwhile: losses stay on the
device and batches come from pinned memory, as with Trainer's ``logging_nan_inf_filter`` off and
``non_blocking`` on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pkgutil
import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
)
from peft import PeftModel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import PretrainedConfig, get_linear_schedule_with_warmup

from qlora_sweep.search_spaces.config import MAX_GRAD_NORM, TrialConfig
from qlora_sweep.search_spaces.errors import words_of
from qlora_sweep.search_spaces.learning_rates import MODEL_KEYS, learning_rate_of
from qlora_sweep.storage.records import OutOfMemory, Stage
from qlora_sweep.sweep.data.batches import WEIGHT, Batch
from qlora_sweep.sweep.data.collation import IGNORED
from qlora_sweep.sweep.training.adapters import Attached, local
from qlora_sweep.sweep.training.device import Device
from qlora_sweep.sweep.training.exceptions import DETAIL_LENGTH, requested_bytes
from qlora_sweep.sweep.training.fitting import Fitted, fit
from qlora_sweep.sweep.training.images import SeeingRows, stacked
from qlora_sweep.sweep.training.in_trl import trained
from qlora_sweep.sweep.training.model import compute_type
from qlora_sweep.sweep.training.preference import REFERENCE
from qlora_sweep.sweep.training.process_group import fsdp_plugin, rank, shard_on_cpu, world_size

_DISTINCT_BATCHES = 3
"""accelerate fetches one batch ahead, but at the end of the loader. With two batches every second
micro-step would have one batch less alive than a training has, and always the same one of a step.
"""
BUCKETS = DistributedDataParallelKwargs(
    # Gradients are views of what is sent: no second copy of them.
    gradient_as_bucket_view=True,
    # Every adapter has a gradient in every step.
    find_unused_parameters=False,
)
_MIXED_PRECISION = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "no"}


class TrainingLoop:
    """Steps of one attached configuration, on the device that its adapters are on.

    `stage` and `micro_step` say where a failure happened.

    Args:
        attached: base and adapters.
        config: what they were made from.
        seed: of the tokens.
        micro_steps: that make one optimizer step; None for as many as the configuration says.
        batches: micro-batches, each a dataset of them that is gone through in order, over and over:
            the first until `leave_largest`, then the second; None for full-length random rows.
        schedule: optimizer steps in which the learning rate rises to the configuration's, and in
            which it has fallen to 0; nothing measured depends on it.
        on_stage: told of each stage that begins.
    """

    def __init__(
        self,
        attached: Attached,
        config: TrialConfig,
        *,
        seed: int,
        micro_steps: int | None = None,
        batches: Sequence[Any] | None = None,
        schedule: tuple[int, int] = (0, 1000),
        on_stage: Callable[[Stage], None] = lambda _: None,
    ) -> None:
        torch.manual_seed(seed + rank())
        self.attached = attached
        self._config = config
        self.stage: Stage = "load"
        self.micro_step = 0
        self.rows_per_sample = config.rows_per_sample
        self.micro_steps = micro_steps or config.accumulation_steps
        self.is_on_round = False
        """Whether it trains on what stands for the texts' epoch."""
        self.wait_seconds = 0.0
        """In which the host got its micro-batches, so far."""
        self.newest = torch.empty(0, 0, dtype=torch.int64)
        """The tokens of the newest micro-batch."""
        self._on_stage = on_stage
        self._is_sharded = config.is_sharded
        self._parameters = attached.trainable_parameters()
        # Not whether a GPU is there: a trial for the CPU never goes to it.
        self._is_on_cpu = all(parameter.device.type == "cpu" for parameter in self._parameters)
        self._accelerator = _accelerator(
            config, attached, micro_steps=self.micro_steps, is_on_cpu=self._is_on_cpu
        )
        optimizer = make_optimizer(config, self._parameters, rate=rate_of(config, attached.model))
        warmup, last = schedule
        # accelerate takes one of its steps for each process.
        rates = get_linear_schedule_with_warmup(
            optimizer, warmup * world_size(), last * world_size()
        )
        self.trained: Any = trained(attached.model, config)
        """What a step calls."""
        if world_size() > 1 and not config.is_sharded:
            keep_from_others(self.trained)
        # accelerate puts a model into its precision, but for one that it shards.
        self._precision: Callable[[], contextlib.AbstractContextManager[None]]
        self._precision = contextlib.nullcontext
        if config.is_sharded:
            self._precision = self._accelerator.autocast
        self._model, self.optimizer, self._schedule = self._accelerator.prepare(
            self.trained, optimizer, rates
        )
        self._has_dataset = batches is not None
        if batches is not None:
            self._loaders = self._loaders_of(batches)
        else:
            size = config.micro_batch_size * config.rows_per_sample
            rows = list(random_rows(config, attached.model, seed=seed + rank()))
            kinds = full_rows(config, attached.model.config)
            self._loaders = [self._loader(rows, size, collate) for collate in kinds]
        if config.is_on_pairs and config.reference == "precomputed":
            with_references = [list(map(self._with_reference, loader)) for loader in self._loaders]
            self._loaders = self._loaders_of(with_references)
        self._batches = _endless(self._loaders[0])

    def _loaders_of(self, sources: Sequence[Any]) -> list[Any]:
        """Return what puts the micro-batches of each dataset of them on the device."""
        return [self._loader(source, 1, itemgetter(0)) for source in sources]

    def _loader(self, source: Any, size: int, collate: Callable[[Any], Batch]) -> Any:
        """Return what puts micro-batches on the device, all of them, as each process has rows of
        its own; pinned where a GPU is to fetch them while the host continues."""
        return prepare_data_loader(
            DataLoader(source, batch_size=size, collate_fn=collate, pin_memory=not self._is_on_cpu),
            device=self._accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            non_blocking=self._accelerator.non_blocking,
        )

    def _with_reference(self, batch: Batch) -> Batch:
        """Return a micro-batch on the host, with the reference's log-probabilities in it."""
        self._enter("forward")
        with self.as_trained():
            batch[REFERENCE] = self.trained.reference(batch)
        return {name: value.cpu() for name, value in batch.items()}

    def leave_largest(self) -> None:
        """Go on with what stands for the texts' epoch, or with full rows without a mask; other
        random rows are all alike."""
        if len(self._loaders) > 1:
            self._batches = _endless(self._loaders[1])
            self.is_on_round = self._has_dataset

    def step(
        self,
        *,
        on_micro_step: Callable[[], None] = lambda: None,
        on_gradients: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Queue one optimizer step and return its mean loss, on its way to the host.

        The loss is there once the device has done all that is queued by now.

        Args:
            on_micro_step: called when each micro-batch is queued.
            on_gradients: called when all is queued but the optimizer's own part.

        Raises:
            RuntimeError: whatever the device raises; `stage` says where.
        """
        total = self._micro_step(on_gradients)
        on_micro_step()
        for _ in range(self.micro_steps - 1):
            total = total + self._micro_step(on_gradients)
            on_micro_step()
        return (total / self.micro_steps).to("cpu", non_blocking=True)

    def evaluate(self, *, batches: int) -> float:
        """Return the mean loss of a pass without gradients over some micro-batches, of texts their
        largest.

        As `sweep train` evaluates: in evaluation mode, under the same precision, without logits
        where the loss is fused.
        """
        source = self._batches
        if len(self._loaders) > 1:
            source = _endless(self._loaders[0])
        options = told_in_evaluation(self._config)
        with self.evaluating():
            return sum(self.loss_of(next(source) | options) for _ in range(batches)) / batches

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Be in evaluation mode, without gradients."""
        self._enter("forward")
        with evaluating(self.trained):
            yield

    def loss_of(self, batch: Batch) -> float:
        """Return the mean loss of a micro-batch that is on the device."""
        # What wraps the model is there to train with others.
        with self._precision():
            return float(self.trained(**batch).loss)

    @contextlib.contextmanager
    def as_trained(self) -> Iterator[None]:
        """Let the model, and each part of it, compute as it does in a step."""
        with self._accelerator.autocast():
            if self._is_sharded:
                self.trained.unshard()
            yield
            if self._is_sharded:
                self.trained.reshard()

    def next_batch(self) -> Batch:
        """Return the micro-batch that is next, on the device."""
        batch = next(self._batches)
        batch.pop(WEIGHT, None)
        return batch

    def add_gradients(self, batch: Batch, *, weight: float) -> float:
        """Add a micro-batch's gradients, times a weight, to those of the adapters alone;
        return its loss times the weight."""
        with self._accelerator.no_sync(self._model), self._precision():
            loss = self._model(**batch).loss * weight
        self._accelerator.backward(loss)
        return float(loss.detach())

    def largest_batch(self) -> dict[str, torch.Tensor]:
        """Return one of the largest micro-batches, on the device."""
        return next(_endless(self._loaders[0]))

    def fit_8_bits(self) -> Fitted:
        """Fit 8-bit products to the model's real weights, on one of the largest micro-batches."""
        batch = self.largest_batch()
        batch.pop(WEIGHT, None)
        config = self._config
        with self.as_trained():
            fitted = fit(
                self.attached.model,
                self.trained,
                batch,
                kind=config.compute_dtype,
                rows_per_sample=config.rows_per_sample,
            )
        # What a look recomputed says nothing of a step.
        self.attached.recomputed.clear()
        return fitted

    def save(self, directory: Path) -> None:
        """Write a checkpoint as Trainer does: the adapter, the optimizer's and the schedule's
        state.
        """
        if self._is_sharded:
            # As FSDP does where not all is to be in one file: each process its own share.
            shares = {}
            for name, parameter in self.attached.model.named_parameters():
                if parameter.requires_grad:
                    shares[name] = local(parameter)
            torch.save(shares, directory / "adapter_share.pt")
        else:
            # PEFT would otherwise ask the hub whether the vocabulary is still the base's.
            self.attached.model.save_pretrained(directory, save_embedding_layers=False)
            torch.save(self.optimizer.state_dict(), directory / "optimizer.pt")
        torch.save(self._schedule.state_dict(), directory / "scheduler.pt")

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._on_stage(stage)

    def _micro_step(self, on_gradients: Callable[[], None]) -> torch.Tensor:
        self._enter("forward")
        asked = time.perf_counter()
        batch = next(self._batches)
        self.wait_seconds += time.perf_counter() - asked
        weight = batch.pop(WEIGHT, 1.0)
        self.newest = batch["input_ids"]
        with self._accelerator.accumulate(self._model):
            with self._precision():
                loss = self._model(**batch).loss
            if weight != 1.0:
                loss = loss * weight
            self._enter("backward")
            self._accelerator.backward(loss)
            self._enter("optimizer")
            if self._accelerator.sync_gradients:
                on_gradients()
                self._accelerator.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
            self.optimizer.step()
            self._schedule.step()
            self.optimizer.zero_grad()
        self.micro_step += 1
        return loss.detach()


def random_rows(config: TrialConfig, model: PeftModel, *, seed: int) -> torch.Tensor:
    """Return full-length rows of random tokens, the worst case for memory. A few distinct
    micro-batches are enough: neither memory nor speed depends on the values."""
    embeddings: Any = model.get_input_embeddings()
    rows = _DISTINCT_BATCHES * config.micro_batch_size * config.rows_per_sample
    shape = (rows, config.seq_len)
    tokens = np.random.default_rng(seed).integers(0, embeddings.num_embeddings, shape)
    return torch.from_numpy(tokens)


def full_rows(
    config: TrialConfig, model_config: PretrainedConfig
) -> tuple[Callable[[list[torch.Tensor]], Batch], ...]:
    """Return what makes micro-batches of full rows as the trainer has them, those that need most
    memory first."""
    if config.is_on_pairs:
        return (stacked,)
    if config.image_size is not None:
        return (SeeingRows(config.image_size, model_config),)
    match config.trainer:
        case "trl" if config.micro_batch_size > 1:
            return with_a_shorter_row, stacked
        case "axolotl":
            return (of_two_examples,)
    return (stacked,)


def full_rows_in_turn(
    config: TrialConfig, model_config: PretrainedConfig
) -> Callable[[list[torch.Tensor]], Batch]:
    """Return what makes micro-batches of full rows of a training: those that need most memory come
    in its first steps, as in a trial."""
    kinds = full_rows(config, model_config)
    left = itertools.repeat(kinds[0], config.accumulation_steps)
    return lambda rows: next(left, kinds[-1])(rows)


def with_a_shorter_row(rows: list[torch.Tensor]) -> Batch:
    """Return the same with the last token of the last row padded, and a mask that says so."""
    batch = stacked(rows)
    mask = torch.ones_like(batch["input_ids"])
    mask[-1, -1] = 0
    batch["labels"][-1, -1] = IGNORED
    return {**batch, "attention_mask": mask}


def of_two_examples(rows: list[torch.Tensor]) -> Batch:
    """Return the same with two examples in each row, which positions keep apart."""
    batch = stacked(rows)
    length = batch["input_ids"].shape[1]
    positions = torch.arange(length)
    positions[length // 2 :] -= length // 2
    return {**batch, "position_ids": positions.expand(len(rows), length).clone()}


def _endless(loader: DataLoader[Any]) -> Iterator[Batch]:
    """Yield the loader's batches over and over."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


def told_in_evaluation(config: TrialConfig) -> dict[str, bool]:
    """Return what a forward pass is told in evaluation mode, where Liger's loss holds the logits
    unless it is told not to."""
    has_loss_of_liger = config.kernels_kind.fuses_loss
    if has_loss_of_liger and not config.is_on_pairs and not config.has_head_of_trl:
        return {"skip_logits": True}
    return {}


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients, and back."""
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            # On a CPU with AVX512-BF16 bitsandbytes repacks the weights at their first use in
            # evaluation mode, for good, and there is no backward through what it packs.
            module.support_avx512bf16_for_cpu = False
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def out_of_memory(
    error: Exception,
    device: Device,
    loop: TrainingLoop | None,
    *,
    stage: Stage = "forward",
    doing: str = "",
    flags: tuple[str, ...] = (),
) -> OutOfMemory:
    """Return the outcome of a training that ran out of memory, in strings and numbers alone.

    Args:
        error: still being handled.
        device: on which.
        loop: whose steps were done; None before there is one.
        stage: where that was, if there was no step.
        doing: what else than a training step was being done, to begin a sentence with.
        flags: of the outcome.
    """
    step = 0
    if loop is not None:
        step = loop.micro_step
        if loop.stage != "load":
            stage = loop.stage
    return OutOfMemory(
        stage=stage,
        step=step,
        requested_bytes=requested_bytes(error),
        peak_allocated_bytes=device.memory().peak_allocated_bytes,
        detail=(doing + words_of(error))[:DETAIL_LENGTH],
        flags=flags,
    )


def rate_of(config: TrialConfig, model: Any) -> float:
    """Return the highest learning rate that a model is trained with."""
    decoder = model.config.get_text_config()
    sizes = {key: getattr(decoder, key, None) for key in MODEL_KEYS}
    return learning_rate_of(config, sizes).value


def make_optimizer(
    config: TrialConfig, parameters: list[torch.nn.Parameter], *, rate: float
) -> torch.optim.Optimizer:
    """Return the configuration's optimizer over the adapters.

    Args:
        config: says which optimizer.
        parameters: the adapters'.
        rate: the highest of the schedule.
    """
    kind = config.optimizer_kind
    build = pkgutil.resolve_name(kind.built_by)
    made: torch.optim.Optimizer = build(parameters, lr=rate, **kind.arguments)
    return made


def keep_from_others(model: torch.nn.Module) -> None:
    """Leave out of what is sent to the other processes all that never changes.

    Each has the frozen base from the same seed or file; sending it would take as long as loading.
    """
    frozen = [name for name, _ in model.named_buffers()]
    frozen += [name for name, p in model.named_parameters() if not p.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)


def _accelerator(
    config: TrialConfig, attached: Attached, *, micro_steps: int, is_on_cpu: bool
) -> Accelerator:
    """Return an accelerator for this configuration alone."""
    # accelerate keeps device and precision for the whole process: without this the second trial
    # would train as the first did.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        os.environ.pop(name, None)
    plugin = None
    if config.is_sharded:
        plugin = fsdp_plugin(attached.layers)
    handlers = []
    if world_size() > 1:
        handlers.append(BUCKETS)
    accelerator = Accelerator(
        cpu=is_on_cpu,
        mixed_precision=_MIXED_PRECISION[compute_type(config)],
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=micro_steps,
            # The loader is cycled, so its end says nothing about accumulation.
            sync_with_dataloader=False,
        ),
        dataloader_config=DataLoaderConfiguration(non_blocking=not is_on_cpu),
        kwargs_handlers=handlers,
        fsdp_plugin=plugin,
    )
    if plugin is not None and is_on_cpu:
        shard_on_cpu(accelerator, plugin)
    return accelerator
