"""The process that trains: transformers' Trainer on adapters that are attached as a trial's are.

Run as ``python -P -m sweep.finetuning FD PARENT``, and served as a trial's worker is
(`sweep.running.worker`). One callback holds a training's events, losses and learning rate; it says,
judges, evaluates and saves what is due after each step.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Subset
from transformers import Trainer, TrainerCallback, TrainingArguments

from search_spaces.config import MAX_GRAD_NORM, SCHEDULE, SCHEDULE_WARMUP_STEPS
from search_spaces.errors import InputError, words_of
from storage.records import (
    INTERRUPTED,
    Diverged,
    Ineffective,
    Invalid,
    Phase,
    over_budget,
)
from sweep.finetuning import checkpoints
from sweep.finetuning.course import Course, Steps
from sweep.finetuning.protocol import (
    Evaluated,
    Saved,
    Setup,
    Started,
    TrainingFinished,
    TrainingJob,
    TrainingOutcome,
    TrainingProgress,
    TrainingResult,
)
from sweep.finetuning.rows import EpochOrder, Rows, is_keeping_apart, rows_of
from sweep.running import worker
from sweep.running.wire import Message
from sweep.training.adapters import Attached, attached
from sweep.training.device import Device, open_device
from sweep.training.exceptions import knob_at_fault, out_of_memory
from sweep.training.model import Unavailable, build_base, compute_type, name_quantizer
from sweep.training.step import evaluating, make_optimizer

OBSERVED_STEPS = 2
"""The first makes the optimizer's state, the second has it from the start; the widest rows are in
the first micro-batch of both."""
EVALUATED_ON_THE_WAY = 64
"""Held-out examples, the same for every micro-batch: the end evaluates all of them."""
_TELL_SECONDS = 0.25
_SHARE_OF_STEPS = 0.05
"""After so many of all steps a checkpoint is due as well, where it is cheap."""
_FEWEST_SECONDS = 60.0
_SHARE_OF_TIME = 0.04
"""That checkpoints and evaluations may take, where nobody says how often."""
_RECENT_STEPS = 20
_DOING: dict[Phase, str] = {
    "build": "building the base",
    "attach": "attaching the adapters",
    "measure": "a training step",
    "quality": "an evaluation",
}
_IGNORED = -100

Send = Callable[[Message], object]


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


class Training:
    """One job on one device, from building the base to the last checkpoint; a child serves it.

    Args:
        job: the training.
        send: tells whoever started it.
        rank: 0, as it trains on one GPU.
    """

    def __init__(self, job: TrainingJob, *, send: Send, rank: int = 0) -> None:
        self.job, self.send = job, send
        self.stop = threading.Event()
        self.step = 0
        self.phase: Phase = "start"
        self.device: Device = open_device(job.device)

    def prepare(self) -> None:
        """Put the budget in force on the device."""
        device = self.device
        device.warm_up()
        device.release()
        if self.job.budget_bytes is not None:
            device.cap(self.job.budget_bytes)
        device.expand_segments(self.job.config.expandable_segments)
        device.reset_peak()

    def serve(self, commands: IO[bytes]) -> None:
        """Train, and say how it ended; whatever is commanded meanwhile is to stop."""
        worker.listen(commands, lambda _: self.stop.set())
        self.send(TrainingFinished(outcome=self.run()))

    def enter(self, phase: Phase) -> None:
        """Say what begins."""
        self.phase = phase
        self.send(TrainingProgress(phase=phase, step=self.step))

    def run(self) -> TrainingOutcome:
        """Train, and return how it ended; nothing of it is in memory then."""
        try:
            return self._run()
        except InputError as error:
            return Invalid(rule="training", detail=str(error))
        except Unavailable as error:
            return Ineffective(knob=error.knob, detail=str(error))
        except Exception as error:  # noqa: BLE001 - it is this training's end
            traceback.print_exc()
            if self.device.ran_out(error):
                doing = f"{_DOING.get(self.phase, 'preparing')}: "
                found = out_of_memory(error, self.device, None, doing=doing)
                return found.model_copy(update={"step": self.step})
            knob = knob_at_fault(error, self.job.config)
            if knob is not None:
                return Ineffective(knob=knob, detail=f"does not run here: {words_of(error)}")
            return worker.crashed(self.phase, error)

    def _run(self) -> TrainingOutcome:
        job, device = self.job, self.device
        self.enter("build")
        base = build_base(
            job.config,
            spec=job.spec,
            weights=job.weights,
            device=device.torch_device,
            seed=job.seed,
        )
        device.release()
        device.reset_peak()
        # Adapters of a seed are the same whatever building the base drew.
        torch.manual_seed(job.seed)
        self.enter("attach")
        with attached(base, job.config) as attachment:
            return Run(self, attachment).train()


class AdapterTrainer(Trainer):
    """Trainer on attached adapters, in an order that a resumed training has again.

    Args:
        job: what is trained.
        model: with its adapters, as a trial has it.
        rows: what it is trained on.
        on_loss: is given each micro-batch's share of the step's loss, on the device.
        callback: hears of each step.
    """

    def __init__(
        self,
        job: TrainingJob,
        model: PeftModel,
        rows: Rows,
        *,
        on_loss: Callable[[torch.Tensor], None],
        callback: TrainerCallback,
    ) -> None:
        self._on_loss = on_loss
        self._order = EpochOrder(
            len(rows.training),
            batch_size=job.config.samples_per_step,
            seed=job.seed,
            widths=rows.widths,
            is_grouped=job.config.packing == "grouped",
        )
        name_quantizer(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        super().__init__(
            model=model,
            args=arguments(job),
            data_collator=rows.collate,
            train_dataset=rows.training,
            optimizers=(make_optimizer(job.config, trained), None),
            callbacks=[callback],
        )

    def get_train_dataloader(self) -> Any:
        """Return the micro-batches of an epoch, in our order."""
        return self.accelerator.prepare(
            DataLoader(
                self.train_dataset,
                batch_size=self.args.train_batch_size,
                sampler=self._order,
                collate_fn=self.data_collator,
                pin_memory=self.args.dataloader_pin_memory,
            )
        )

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """Queue one micro-batch; its loss stays on the device."""
        loss: torch.Tensor = super().training_step(*args, **options)
        self._on_loss(loss)
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the adapter alone."""
        # PEFT would otherwise ask the hub whether the vocabulary is still the base's.
        self.model.save_pretrained(output_dir or self.args.output_dir, save_embedding_layers=False)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Put a checkpoint's adapter into the one that is attached, in the type that it has: PEFT's
        `load_adapter`, which Trainer calls, makes bf16 adapters fp32."""
        adapter = load_file(Path(resume_from_checkpoint) / checkpoints.ADAPTER)
        set_peft_model_state_dict(self.model, adapter)

    def save_checkpoint(self, output: Path, steps: Steps) -> None:
        """Write a whole checkpoint of this step. Trainer's own way to save would end the training
        where the disk is full.

        Raises:
            OSError, RuntimeError, SafetensorError: it cannot be written; nothing of it is left.
        """
        with checkpoints.being_written(output, step=self.state.global_step) as directory:
            self.args.output_dir = str(directory.parent)
            self._save_checkpoint(self.model, None)
            text = json.dumps(asdict(steps))
            (directory / checkpoints.COURSE).write_text(text, encoding="utf-8")


class Run(TrainerCallback):
    """The steps of a training on attached adapters."""

    def __init__(self, training: Training, attachment: Attached) -> None:
        self._training, self._job, self._attachment = training, training.job, attachment
        self._device, self._output = training.device, Path(training.job.output)
        self._observing = contextlib.ExitStack()
        self._end: TrainingOutcome | None = None
        self._told = self._saved_at = time.perf_counter()
        self._pause_seconds = 0.0
        self._saved: int | None = None
        self._loaders: dict[int, Any] = {}
        """Of so many held-out examples."""
        self._loss: torch.Tensor | None = None
        self._rate = 0.0
        self._tokens = self._computed = 0
        self._counted: deque[tuple[int, int]] = deque()
        """Of each micro-batch that is made and not yet trained on, its tokens that count."""
        rows = rows_of(self._job, attachment.model)
        self._collate = rows.collate
        self._rows = replace(rows, collate=self._counting)
        steps = Steps()
        if self._job.resume_from is not None:
            course = Path(self._job.resume_from) / checkpoints.COURSE
            steps = Steps(**json.loads(course.read_text(encoding="utf-8")))
            self._saved = steps.done
        self._course = Course(self._device, steps, compilation=attachment.compilation)
        training.step = self._first = self._steps_saved = steps.done
        self._trainer = AdapterTrainer(
            self._job, attachment.model, self._rows, on_loss=self._add_loss, callback=self
        )
        self._steps_per_epoch = -(-len(rows.training) // self._job.config.samples_per_step)
        self._steps = self._job.max_steps or math.ceil(self._job.epochs * self._steps_per_epoch)
        self._setup = Setup(
            device_name="CPU" if self._job.device == "cpu" else torch.cuda.get_device_name(),
            steps=self._steps,
            rows=len(rows.training),
            texts_rows=rows.texts,
            rows_held_out=0 if rows.held_out is None else len(rows.held_out),
            rows_left_out=rows.left_out,
            trainable_parameters=sum(p.numel() for p in attachment.trainable_parameters()),
            documents_apart=self._keeps_apart(),
        )

    def _keeps_apart(self) -> bool | None:
        """Ask the model whether it sees of texts what it should; refuse one that looks ahead."""
        if self._job.texts is None:
            return None
        model: Any = self._attachment.model.get_base_model()
        with self._trainer.accelerator.autocast():
            return is_keeping_apart(model, self._rows.training, self._job.config)

    def train(self) -> TrainingOutcome:
        """Train all that is left, and return how it ended."""
        self._training.send(Started(**self._setup.model_dump(), steps_done=self._first))
        resume = self._job.resume_from
        with self._observing:
            if self._first < self._steps:
                self._training.enter("measure")
                self._trainer.train(resume_from_checkpoint=resume)
            elif resume is not None:
                self._trainer._load_from_checkpoint(resume)
                # Training prepares it too: precision is then the same.
                trainer = self._trainer
                trainer.model_wrapped = trainer.accelerator.prepare_model(
                    trainer.model, evaluation_mode=True
                )
        return self._end or self._finish()

    # What Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Watch the memory of the first steps."""
        self._observing.enter_context(self._device.observed())
        self._course.begin_stretch()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Note the learning rate of the step, before the schedule goes on."""
        self._rate = float(options["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Queue the step's figures, and do what is due."""
        assert self._loss is not None
        self._course.end_step(
            self._loss, tokens=self._tokens, computed=self._computed, learning_rate=self._rate
        )
        self._loss, self._tokens, self._computed = None, 0, 0
        step = self._training.step = state.global_step
        if step in (self._first + OBSERVED_STEPS, self._steps):
            self._stop_observing()
        self._tell()
        is_last, is_asked = step >= self._steps, self._training.stop.is_set()
        if self._end is None and (is_last or is_asked or self._is_due(step)):
            self._pause(evaluates=not (is_last or is_asked))
        if self._course.fault_step is not None:
            loss = self._course.steps.losses[self._course.fault_step - 1]
            self._end = self._end or Diverged(step=self._course.fault_step, detail=f"loss {loss}")
        if is_asked and not is_last:
            self._end = self._end or INTERRUPTED
        control.should_training_stop = control.should_training_stop or self._end is not None

    # What is done on the way

    def _counting(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        """Make a micro-batch, and count its tokens while it is on the host."""
        batch = self._collate(rows)
        computed = tokens = batch["input_ids"].numel()
        if self._job.texts is not None:
            # The first of a row is predicted from nothing; of random ones a trial counts all.
            tokens = int((batch["labels"][..., 1:] != _IGNORED).sum())
        self._counted.append((tokens, computed))
        return batch

    def _add_loss(self, loss: torch.Tensor) -> None:
        self._loss = loss if self._loss is None else self._loss + loss
        tokens, computed = self._counted.popleft()
        self._tokens += tokens
        self._computed += computed
        self._tell()

    def _tell(self) -> None:
        """Say how far it is, so seldom that nobody pays for it; from within long steps too."""
        now, steps = time.perf_counter(), self._course.steps
        if now - self._told < _TELL_SECONDS:
            return
        self._told = now
        tokens, seconds = (sum(all_[-_RECENT_STEPS:]) for all_ in (steps.tokens, steps.seconds))
        loss = steps.losses[-1] if steps.losses else math.nan
        each = seconds / min(_RECENT_STEPS, steps.done) if steps.done else None
        self._training.send(
            TrainingProgress(
                phase=self._training.phase,
                step=self._training.step,
                loss=loss if math.isfinite(loss) else None,
                tokens_per_second=tokens / seconds if seconds else None,
                seconds_left=None if each is None else (self._steps - steps.done) * each,
            )
        )

    def _stop_observing(self) -> None:
        """Take the peak that the first steps had for the training's own, on a CPU that counts."""
        self._course.settle()
        self._observing.close()
        if self._job.device == "cpu":
            # What a long training keeps beside its tensors is no part of the budget.
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        self._course.begin_stretch()
        if self._job.budget_bytes is not None:
            peak = self._device.memory().peak_allocated_bytes
            over = over_budget(peak, budget_bytes=self._job.budget_bytes, stage="forward")
            if over is not None and self._end is None:
                self._end = over.model_copy(update={"step": self._training.step})

    def _is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written now."""
        job, since = self._job, time.perf_counter() - self._saved_at
        if not job.keeps_checkpoints:
            return False
        if job.checkpoint_steps is not None:
            return step % job.checkpoint_steps == 0
        if since < self._pause_seconds / _SHARE_OF_TIME:
            return False
        share = (step - self._steps_saved) / self._steps
        return since >= job.checkpoint_seconds or (
            share >= _SHARE_OF_STEPS and since >= min(_FEWEST_SECONDS, job.checkpoint_seconds)
        )

    def _pause(self, *, evaluates: bool) -> None:
        """Read what is queued, evaluate some held-out examples, and write a checkpoint."""
        # What is queued takes its steps' own time, and none of what interrupts them.
        self._course.settle()
        begun = time.perf_counter()
        if self._course.fault_step is not None or not self._job.keeps_checkpoints:
            return
        step, steps = self._training.step, self._course.steps
        if not all(bool(p.isfinite().all()) for p in self._attachment.trainable_parameters()):
            self._end = Diverged(step=step, detail="adapters that are not finite")
            return
        if self._rows.held_out is not None and evaluates:
            self._training.enter("quality")
            loss, _ = self._held_out_loss(EVALUATED_ON_THE_WAY)
            steps.evaluations.append((step, loss))
            self._training.send(Evaluated(step=step, loss=loss))
        self._save()
        self._pause_seconds = time.perf_counter() - begun
        steps.interrupted_seconds += self._pause_seconds
        self._saved_at, self._steps_saved = time.perf_counter(), step
        self._training.enter("measure")
        self._course.begin_stretch()

    def _save(self) -> None:
        """Write a checkpoint; where the disk does not take it the training goes on without."""
        step, steps = self._training.step, self._course.steps
        self._note_peak()
        steps.checkpoints += 1
        reason = self._refusal_of_the_disk()
        if reason is not None and step >= self._steps:
            # Room was kept for this one.
            checkpoints.release(self._output)
            reason = self._refusal_of_the_disk()
        if reason is None:
            self._saved = step
        else:
            steps.checkpoints -= 1
        self._training.send(Saved(step=step, refusal=reason))

    def _refusal_of_the_disk(self) -> str | None:
        """Write a checkpoint; return why the disk does not take it, None where it does."""
        try:
            self._trainer.save_checkpoint(self._output, self._course.steps)
        except (OSError, RuntimeError, SafetensorError) as error:
            if not checkpoints.is_of_the_disk(error):
                raise
            return words_of(error)
        checkpoints.remove(self._output, keep=checkpoints.steps_of(self._output)[:2])
        return None

    def _note_peak(self) -> None:
        steps, memory = self._course.steps, self._device.memory()
        steps.peak_allocated_bytes = max(steps.peak_allocated_bytes, memory.peak_allocated_bytes)
        reserved = memory.peak_reserved_bytes or 0
        steps.peak_reserved_bytes = max(steps.peak_reserved_bytes, reserved)

    def _held_out_loss(self, count: int) -> tuple[float, int]:
        """Return the loss over the first held-out examples, the mean over their tokens, and how
        many those are.

        Nothing random in the training changes by it. A compiled layer runs as it is written:
        evaluated examples have shapes of their own.
        """
        rows, config, trainer = self._rows, self._job.config, self._trainer
        assert rows.held_out is not None
        if count not in self._loaders:
            chosen = Subset(rows.held_out, range(min(count, len(rows.held_out))))
            loader: Any = DataLoader(
                chosen, batch_size=config.micro_batch_size, collate_fn=rows.collate_held_out
            )
            self._loaders[count] = trainer.accelerator.prepare(loader)
        # Liger's loss holds the logits in evaluation mode unless it is told not to.
        told = {} if config.kernels == "hf" else {"skip_logits": True}
        devices = [] if self._job.device == "cpu" else [torch.cuda.current_device()]
        total, tokens = torch.zeros((), device=self._device.torch_device), 0
        with (
            torch.random.fork_rng(devices=devices),
            torch.compiler.set_stance("force_eager"),
            evaluating(trainer.model),
        ):
            for batch in self._loaders[count]:
                carrying = int((batch["labels"][..., 1:] != _IGNORED).sum())
                with trainer.compute_loss_context_manager():
                    loss = trainer.model_wrapped(**batch, **told).loss
                total, tokens = total + loss.float() * carrying, tokens + carrying
                self._tell()
        return float(total) / tokens, tokens

    def _finish(self) -> TrainingOutcome:
        """Evaluate all that is held out, and return what the training came to."""
        self._note_peak()
        if self._job.keeps_checkpoints and self._saved != self._steps:
            return worker.crashed("measure", OSError("the disk does not take the last checkpoint"))
        loss, tokens = None, 0
        if self._rows.held_out is not None:
            self._training.enter("quality")
            loss, tokens = self._held_out_loss(len(self._rows.held_out))
            self._note_peak()
        steps, job, rows = self._course.steps, self._job, self._setup.rows
        saved = str(checkpoints.path_of(self._output, self._steps))
        whole, further = divmod(self._steps, self._steps_per_epoch)
        return TrainingResult(
            **self._setup.model_dump(),
            tokens=sum(steps.tokens),
            tokens_computed=sum(steps.computed),
            tokens_per_second=steps.median_rate(),
            run_tokens_per_second=sum(steps.tokens) / steps.total_seconds,
            step_seconds=steps.median_seconds(),
            steps_measured=sum(steps.is_warm),
            seconds=steps.total_seconds,
            peak_allocated_bytes=steps.peak_allocated_bytes,
            peak_reserved_bytes=steps.peak_reserved_bytes or None,
            train_loss=sum(steps.losses) / steps.done,
            final_train_loss=steps.final_loss(),
            eval_loss=loss,
            eval_tokens=tokens,
            packed_rows=rows if job.config.packing == "packed" else None,
            # An epoch's last step may have fewer examples.
            epochs=whole + further * job.config.samples_per_step / rows,
            checkpoints=steps.checkpoints,
            checkpoint_seconds=steps.interrupted_seconds,
            checkpoint=saved if job.keeps_checkpoints else None,
        )


def main() -> None:
    """Serve one training."""
    worker.main(Training, TrainingJob)
