"""One run of a training, from the model that is built to the last checkpoint: Trainer calls it at
each step, and it says, judges, evaluates and saves what is due.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import SafetensorError
from transformers import TrainerCallback

from search_spaces.errors import words_of
from storage.records import over_budget
from sweep.finetuning import checkpoints, output
from sweep.finetuning.course import Course, Steps
from sweep.finetuning.rows import rows_of
from sweep.finetuning.trainer import EVALUATED_ON_THE_WAY, MeasuredTrainer
from sweep.finetuning.wire import (
    Alive,
    End,
    Evaluated,
    NotFinite,
    NotSaved,
    Progressed,
    RanOut,
    Saved,
    Started,
    Stopped,
    TrainingJob,
    TrainingResult,
    Unable,
)
from sweep.training.adapters import Attached
from sweep.training.device import Device, open_device
from sweep.training.model import BaseModel as Base
from sweep.training.model import compute_type

OBSERVED_STEPS = 2
"""The first makes the optimizer's state, the second has it from the start; the widest rows are in
the first micro-batch of both."""
_TELL_SECONDS = 0.25
_SHARE_OF_STEPS = 0.05
"""After so many of all steps a checkpoint is due as well, where it is cheap."""
_FEWEST_SECONDS = 60.0
_SHARE_OF_TIME = 0.04
"""That checkpoints and evaluations may take, where nobody says how often."""
DETAIL_LENGTH = 1000

Send = Callable[[BaseModel], None]


class Standing:
    """Where a training is: what it is doing and what is kept, for whoever says how it ended."""

    def __init__(self, job: TrainingJob, *, send: Send) -> None:
        self.job = job
        self.stop = threading.Event()
        self.doing = "starting"
        self.step = 0
        self.saved: int | None = None
        self.device: Device = open_device(job.device)
        self._send = send

    def enter(self, doing: str) -> None:
        """Say what begins."""
        self.doing = doing
        self._send(Alive(doing=doing))

    def ran_out(self, detail: str) -> RanOut:
        """Return the end of a training whose memory ran out."""
        return RanOut(
            step=self.step,
            doing=self.doing,
            detail=detail[:DETAIL_LENGTH],
            peak_allocated_bytes=self.device.memory().peak_allocated_bytes,
            checkpoint_step=self.saved,
        )


class Run(TrainerCallback):
    """The steps of a training on an attached model; Trainer calls it on the way."""

    def __init__(self, training: Standing, base: Base, attachment: Attached, *, send: Send) -> None:
        self._training, self._job, self._send = training, training.job, send
        self._device = training.device
        self._attachment = attachment
        self._observing = contextlib.ExitStack()
        self._end: End | None = None
        self._told = self._saved_at = self._beat_at = time.perf_counter()
        self._cost_seconds = 0.0
        self._steps_saved = 0
        training.enter("reading the texts")
        self._rows = rows_of(self._job, attachment.model)
        self._checkpoint = None if self._job.resume_from is None else Path(self._job.resume_from)
        self._course = Course(
            self._device,
            _steps_of(self._checkpoint),
            checks_gradients=compute_type(self._job.config) != torch.float16,
            compilation=attachment.compilation,
        )
        self._trainer = MeasuredTrainer(
            self._job,
            attachment.model,
            self._rows,
            course=self._course,
            beat=self._beat,
            callback=self,
        )
        self._steps = self._count_steps()
        self._documents_apart = self._keep_apart()
        training.step = self._first = self._steps_saved = self._course.steps.done
        training.saved = training.step if self._checkpoint is not None else None

    def _keep_apart(self) -> bool | None:
        """Ask the model whether it sees of a row of texts what it should; refuse one that looks
        ahead."""
        if self._job.texts is None:
            return None
        from sweep.finetuning.texts import is_keeping_apart

        model: Any = self._attachment.model.get_base_model()
        with self._trainer.accelerator.autocast():
            return is_keeping_apart(model, self._rows.training, self._job.config)

    def train(self) -> End:
        """Train all that is left, and return how it ended."""
        self._send(
            Started(
                device_name=_device_name(self._job),
                steps=self._steps,
                steps_done=self._training.step,
                rows=len(self._rows.training),
                texts_rows=self._rows.texts,
                rows_held_out=0 if self._rows.held_out is None else len(self._rows.held_out),
                rows_left_out=self._rows.left_out,
                trainable_parameters=self._trainable(),
                documents_apart=self._documents_apart,
            )
        )
        with self._observing:
            if self._training.step < self._steps:
                self._training.enter("a training step")
                self._trainer.train(resume_from_checkpoint=self._job.resume_from)
            elif self._checkpoint is not None:
                self._trainer.load_finished(self._checkpoint)
        return self._end or self._finish()

    # What Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Watch the memory of the first steps."""
        self._observing.enter_context(self._device.observed())
        self._course.begin_stretch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Queue the step's figures, and do what is due."""
        rate = float(self._trainer.lr_scheduler.get_last_lr()[0])
        self._course.end_step(learning_rate=rate)
        self._training.step = state.global_step
        if state.global_step in (self._first + OBSERVED_STEPS, self._steps):
            self._stop_observing()
        self._tell()
        is_last = state.global_step >= self._steps
        is_asked = self._training.stop.is_set()
        if self._end is None and (is_last or is_asked or self._is_due(state.global_step)):
            self._pause(is_last=is_last)
        if self._end is None and is_asked and not is_last:
            self._end = Stopped(step=state.global_step, checkpoint_step=self._training.saved)
        self._judge()
        control.should_training_stop = control.should_training_stop or self._end is not None

    # What is done on the way

    def _stop_observing(self) -> None:
        """Take the peak that the first steps had for the training's own, on a CPU that counts."""
        self._course.settle()
        self._observing.close()
        if self._job.device == "cpu":
            # They show the peak. What a long training keeps beside its tensors is no part of the
            # budget, and must not end it.
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        self._course.begin_stretch()
        self._end = self._end or self._excess()

    def _excess(self) -> RanOut | None:
        """Return out of memory where the peak so far is above the budget."""
        budget = self._job.budget_bytes
        if budget is None:
            return None
        peak = self._device.memory().peak_allocated_bytes
        over = over_budget(peak, budget_bytes=budget, stage="forward")
        return None if over is None else self._training.ran_out(over.detail)

    def _judge(self) -> None:
        """End a training whose loss or gradients are no numbers."""
        course = self._course
        if self._end is None and course.fault is not None:
            self._end = NotFinite(
                step=course.fault_step, what=course.fault, checkpoint_step=self._training.saved
            )

    def _is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written now."""
        job, since = self._job, time.perf_counter() - self._saved_at
        if not job.keeps_checkpoints:
            return False
        if job.checkpoint_steps is not None:
            return step % job.checkpoint_steps == 0
        if since < self._cost_seconds / _SHARE_OF_TIME:
            return False
        share = (step - self._steps_saved) / self._steps
        return since >= job.checkpoint_seconds or (
            share >= _SHARE_OF_STEPS and since >= min(_FEWEST_SECONDS, job.checkpoint_seconds)
        )

    def _pause(self, *, is_last: bool) -> None:
        """Read what is queued, evaluate some held-out rows, and write a checkpoint."""
        # What is queued takes its steps' own time, and none of what interrupts them.
        self._course.settle()
        begun = time.perf_counter()
        if self._course.fault is not None or not self._job.keeps_checkpoints:
            return
        if self._rows.held_out is not None and not is_last and not self._training.stop.is_set():
            self._evaluate_some()
        self._save()
        self._cost_seconds = time.perf_counter() - begun
        self._course.steps.interrupted_seconds += self._cost_seconds
        self._saved_at, self._steps_saved = time.perf_counter(), self._training.step
        self._training.enter("a training step")
        self._course.begin_stretch()

    def _evaluate_some(self) -> None:
        self._training.enter("an evaluation")
        loss, _ = self._trainer.held_out_loss(rows=EVALUATED_ON_THE_WAY)
        self._course.steps.evaluations.append((self._training.step, loss))
        self._send(Evaluated(step=self._training.step, loss=loss))

    def _save(self) -> None:
        """Write a checkpoint; where the disk does not take it the training goes on without."""
        self._training.enter("writing a checkpoint")
        step, steps = self._training.step, self._course.steps
        self._note_peak()
        steps.checkpoints += 1
        reason = self._refusal_of_the_disk()
        if reason is not None and step >= self._steps:
            # Room was kept for this one.
            output.release(Path(self._job.output))
            reason = self._refusal_of_the_disk()
        if reason is None:
            self._training.saved = step
            self._send(Saved(step=step))
        else:
            steps.checkpoints -= 1
            self._send(NotSaved(step=step, reason=reason))

    def _refusal_of_the_disk(self) -> str | None:
        """Write a checkpoint; return why the disk does not take it, None where it does."""
        try:
            self._trainer.save_checkpoint()
        except (OSError, RuntimeError, SafetensorError) as error:
            if not checkpoints.is_of_the_disk(error):
                raise
            return words_of(error)
        return None

    def _note_peak(self) -> None:
        steps, memory = self._course.steps, self._device.memory()
        steps.peak_allocated_bytes = max(steps.peak_allocated_bytes, memory.peak_allocated_bytes)
        reserved = memory.peak_reserved_bytes or 0
        steps.peak_reserved_bytes = max(steps.peak_reserved_bytes, reserved)

    def _finish(self) -> End:
        """Evaluate all that is held out, and return what the training came to."""
        self._note_peak()
        if self._job.keeps_checkpoints and self._training.saved != self._steps:
            return Unable(
                reason="the disk does not take the last checkpoint",
                checkpoint_step=self._training.saved,
            )
        loss, tokens = None, 0
        if self._rows.held_out is not None:
            self._training.enter("evaluating the held-out rows")
            loss, tokens = self._trainer.held_out_loss()
            self._note_peak()
        return self._result(loss, tokens)

    def _result(self, eval_loss: float | None, eval_tokens: int) -> TrainingResult:
        steps, rows = self._course.steps, self._rows
        saved = checkpoints.path_of(Path(self._job.output), self._steps)
        return TrainingResult(
            steps=steps.done,
            tokens=sum(steps.tokens),
            tokens_computed=sum(steps.computed),
            tokens_per_second=steps.median_rate(),
            run_tokens_per_second=sum(steps.tokens) / steps.total_seconds,
            step_seconds=steps.median_seconds(),
            steps_measured=steps.measured,
            seconds=steps.total_seconds,
            peak_allocated_bytes=steps.peak_allocated_bytes,
            peak_reserved_bytes=steps.peak_reserved_bytes or None,
            trainable_parameters=self._trainable(),
            train_loss=sum(steps.losses) / steps.done,
            final_train_loss=steps.final_loss(),
            eval_loss=eval_loss,
            eval_tokens=eval_tokens,
            rows=len(rows.training),
            texts_rows=rows.texts,
            packed_rows=len(rows.training) if self._job.config.packing == "packed" else None,
            rows_held_out=0 if rows.held_out is None else len(rows.held_out),
            rows_left_out=rows.left_out,
            epochs=self._epochs(),
            checkpoints=steps.checkpoints,
            checkpoint_seconds=steps.interrupted_seconds,
            data_wait_seconds=steps.data_wait_seconds,
            device_name=_device_name(self._job),
            documents_apart=self._documents_apart,
            checkpoint=str(saved) if self._job.keeps_checkpoints else None,
        )

    def _beat(self) -> None:
        """Give a sign of life now and then, from within long steps too."""
        now = time.perf_counter()
        if now - self._beat_at >= 10 * _TELL_SECONDS:
            self._beat_at = now
            self._send(Alive(doing=self._training.doing))

    def _tell(self) -> None:
        """Say how far it is, so seldom that nobody pays for it."""
        now, steps = time.perf_counter(), self._course.steps
        if now - self._told < _TELL_SECONDS or not steps.losses:
            return
        self._told = self._beat_at = now
        recent = steps.seconds[-20:]
        left = (self._steps - steps.done) * sum(recent) / len(recent)
        self._send(
            Progressed(
                step=steps.done,
                loss=steps.losses[-1] if math.isfinite(steps.losses[-1]) else 0.0,
                tokens_per_second=steps.recent_rate(),
                seconds_left=left,
            )
        )

    def _count_steps(self) -> int:
        """Return the optimizer steps of the whole training, as Trainer counts them."""
        if self._job.max_steps is not None:
            return self._job.max_steps
        return math.ceil(self._job.epochs * self._steps_per_epoch())

    def _steps_per_epoch(self) -> int:
        return -(-len(self._rows.training) // self._job.config.samples_per_step)

    def _epochs(self) -> float:
        """Return how often the rows were gone through; an epoch's last step may have fewer."""
        whole, further = divmod(self._steps, self._steps_per_epoch())
        return whole + further * self._job.config.samples_per_step / len(self._rows.training)

    def _trainable(self) -> int:
        return sum(p.numel() for p in self._attachment.trainable_parameters())


def _steps_of(checkpoint: Path | None) -> Steps:
    if checkpoint is None:
        return Steps()
    values = json.loads((checkpoint / checkpoints.COURSE).read_text(encoding="utf-8"))
    return Steps.from_json(values)


def _device_name(job: TrainingJob) -> str:
    return torch.cuda.get_device_name() if job.device == "cuda" else "CPU"
