"""transformers' Trainer as a trial trains: what it is told, what it may leave out, what it is asked
for on the way.

Nothing in a step waits for the device: losses are read steps later (`course`), nothing is logged by
Trainer itself, and what it would work out for each micro-batch and nobody reads is left out.
Checkpoints have Trainer's own files, under a name that they get when they are whole.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Subset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.quantizers import AutoHfQuantizer

from search_spaces.config import MAX_GRAD_NORM, SCHEDULE, SCHEDULE_WARMUP_STEPS
from sweep.data.collating import IGNORED
from sweep.finetuning import checkpoints
from sweep.finetuning.course import Course
from sweep.finetuning.rows import EpochOrder, Rows
from sweep.finetuning.wire import TrainingJob
from sweep.training.model import compute_type
from sweep.training.step import evaluating, make_optimizer

EVALUATED_ON_THE_WAY = 64
"""Held-out rows, the same for every micro-batch: the end evaluates all of them."""


def arguments(job: TrainingJob) -> TrainingArguments:
    """Return what Trainer is told: the settings that were measured."""
    config, is_on_cpu = job.config, job.device == "cpu"
    dtype = compute_type(config)
    return TrainingArguments(
        output_dir=job.output,
        max_steps=job.max_steps or -1,
        num_train_epochs=job.epochs,
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.accumulation_steps,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        max_grad_norm=MAX_GRAD_NORM,
        lr_scheduler_type=SCHEDULE,
        warmup_steps=SCHEDULE_WARMUP_STEPS,
        remove_unused_columns=False,
        dataloader_pin_memory=not is_on_cpu,
        accelerator_config={"non_blocking": not is_on_cpu},
        # What is not finite is seen, and ends the training; it is read when it is there.
        logging_nan_inf_filter=False,
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job.seed,
        use_cpu=is_on_cpu,
    )


class MeasuredTrainer(Trainer):
    """Trainer on an attached model, whose steps a `Course` follows.

    Args:
        job: what is trained.
        model: with its adapters, as a trial has it.
        rows: what it is trained and evaluated on.
        course: told of each step.
        beat: called where a micro-batch is queued.
    """

    def __init__(
        self,
        job: TrainingJob,
        model: PeftModel,
        rows: Rows,
        *,
        course: Course,
        beat: Callable[[], None],
        callback: TrainerCallback,
    ) -> None:
        self._job, self._rows, self._course, self._beat = job, rows, course, beat
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._loaders: dict[int | None, Any] = {}
        """Of so many held-out rows."""
        spare_walks(model, self._trained)
        name_quantizer(model)
        super().__init__(
            model=model,
            args=arguments(job),
            data_collator=rows.collate,
            train_dataset=rows.training,
            optimizers=(make_optimizer(job.config, self._trained), None),
            callbacks=[callback],
        )
        self.remove_callback(PrinterCallback)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | None]:
        """Return the micro-batches of a step, and how many of their tokens carry loss."""
        begun = time.perf_counter()
        batches = list(itertools.islice(epoch_iterator, num_batches))
        self._course.steps.data_wait_seconds += time.perf_counter() - begun
        if not batches:
            return batches, None
        # The first token of a row is predicted from nothing.
        counts = [(batch["labels"][..., 1:] != IGNORED).sum() for batch in batches]
        carrying = torch.stack(counts).sum()
        computed = sum(batch["input_ids"].numel() for batch in batches)
        # Of full random rows a trial counts all tokens.
        counted = carrying if self._job.texts is not None else torch.tensor(computed)
        self._course.add_batches(counted, computed=computed)
        return batches, carrying if self.model_accepts_loss_kwargs else None

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Queue one micro-batch; its share of the loss goes to the course."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._course.add_loss(loss)
        self._beat()
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: to count them it would walk all parameters for each micro-batch."""
        return 0

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip the adapters' gradients, as a trial does; the frozen base has none."""
        norm = self.accelerator.clip_grad_norm_(self._trained, self.args.max_grad_norm)
        if norm is not None:
            self._course.add_gradient_norm(norm)
        return norm

    def _get_train_sampler(self, train_dataset: Any = None) -> EpochOrder:
        config = self._job.config
        is_grouped = config.packing == "grouped"
        return EpochOrder(
            len(self._rows.training),
            batch_size=config.samples_per_step,
            seed=self._job.seed,
            widths=self._rows.widths,
            is_grouped=is_grouped,
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the adapter alone."""
        # PEFT would otherwise ask the hub whether the vocabulary is still the base's.
        self.model.save_pretrained(output_dir or self.args.output_dir, save_embedding_layers=False)

    def save_checkpoint(self) -> Path:
        """Write a whole checkpoint of this step, and remove all but the newest two.

        Raises:
            OSError: it cannot be written; nothing of it is left.
        """
        output = Path(self._job.output)
        with checkpoints.being_written(output, step=self.state.global_step) as directory:
            self.args.output_dir = str(directory.parent)
            try:
                self._save_checkpoint(self.model, None)
            finally:
                self.args.output_dir = self._job.output
            course = json.dumps(self._course.steps.to_json())
            (directory / checkpoints.COURSE).write_text(course, encoding="utf-8")
        checkpoints.remove_old(output)
        return checkpoints.path_of(output, self.state.global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Put a checkpoint's adapter into the one that is attached, in the type that it has."""
        load_adapter(self.model, Path(resume_from_checkpoint))

    def load_finished(self, checkpoint: Path) -> None:
        """Put the adapter of a training that has no step left into the model, ready to evaluate."""
        load_adapter(self.model, checkpoint)
        # Training prepares it too: precision is then the same.
        self.model_wrapped = self.accelerator.prepare_model(self.model, evaluation_mode=True)

    def held_out_loss(self, *, rows: int | None = None) -> tuple[float, int]:
        """Return the loss over held-out rows, the mean over their tokens, and how many they are.

        The order of everything random in the training is as if nothing had been evaluated. A
        compiled layer runs as it is written: evaluated rows have shapes of their own.

        Args:
            rows: the first so many of them; None for all.
        """
        devices = [] if self._job.device == "cpu" else [torch.cuda.current_device()]
        with (
            torch.random.fork_rng(devices=devices),
            torch.compiler.set_stance("force_eager"),
            evaluating(self.model),
        ):
            totals = [self._batch_loss(batch) for batch in self._held_out(rows)]
        tokens = int(sum(count for _, count in totals))
        return float(sum(loss for loss, _ in totals)) / tokens, tokens

    def _held_out(self, count: int | None) -> Any:
        """Return the first held-out rows, text by text also where training packs them."""
        if count not in self._loaders:
            rows, size = self._rows, self._job.config.micro_batch_size
            assert rows.held_out is not None
            chosen = Subset(rows.held_out, range(min(count or sys.maxsize, len(rows.held_out))))
            collate = rows.collate_held_out or rows.collate
            loader: Any = DataLoader(chosen, batch_size=size, collate_fn=collate)
            self._loaders[count] = self.accelerator.prepare(loader)
        return self._loaders[count]

    def _batch_loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of a micro-batch's tokens, and their number."""
        count = (batch["labels"][..., 1:] != IGNORED).sum()
        self._beat()
        # Liger's loss holds the logits in evaluation mode unless it is told not to.
        told = {} if self._job.config.kernels == "hf" else {"skip_logits": True}
        with self.compute_loss_context_manager():
            loss = self.model_wrapped(**batch, **told).loss
        return loss.detach().float() * count, count


def load_adapter(model: PeftModel, checkpoint: Path) -> None:
    """Put a checkpoint's adapter into the one that a model has."""
    set_peft_model_state_dict(model, load_file(checkpoint / checkpoints.ADAPTER))


def name_quantizer(model: PeftModel) -> None:
    """Give a base that was built in 4 bits what `from_pretrained` gives one, and Trainer reads."""
    base = model.get_base_model()
    if getattr(base, "is_quantized", False) and getattr(base, "hf_quantizer", None) is None:
        base.hf_quantizer = AutoHfQuantizer.from_config(base.config.quantization_config)


def spare_walks(model: torch.nn.Module, trained: Sequence[torch.nn.Parameter]) -> None:
    """Let nothing walk a model's thousands of modules for each step, as Trainer does twice.

    It puts a model into the mode that it is in, and takes the gradients of parameters that have
    none.
    """
    change = model.train

    def train(mode: bool = True) -> torch.nn.Module:
        return model if model.training == mode else change(mode)

    def zero_grad(set_to_none: bool = True) -> None:
        for parameter in trained:
            parameter.grad = None

    model.train = train  # type: ignore[method-assign]
    model.zero_grad = zero_grad  # type: ignore[method-assign]
