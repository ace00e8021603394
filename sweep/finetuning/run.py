"""The process that trains: transformers' Trainer on adapters that are attached as a trial's are.

Run as ``python -P -m qlora_sweep.sweep.finetuning FD PARENT``, and served as a trial's worker is
(`sweep.running.worker`). One callback holds a training's events, losses and learning rate; it says,
judges, evaluates and saves what is due after each step.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Subset
from transformers import Trainer, TrainerCallback, TrainingArguments

from qlora_sweep.search_spaces.checkpoints import ADAPTER
from qlora_sweep.search_spaces.config import MAX_GRAD_NORM, SCHEDULE, SCHEDULE_WARMUP_STEPS
from qlora_sweep.search_spaces.errors import InputError, words_of
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.storage import records
from qlora_sweep.sweep.data.batches import loss_tokens
from qlora_sweep.sweep.finetuning import checkpoints, protocol
from qlora_sweep.sweep.finetuning.course import RunTracker, Steps
from qlora_sweep.sweep.finetuning.protocol import TrainingJob, TrainingOutcome
from qlora_sweep.sweep.finetuning.rows import is_keeping_apart, rows_of
from qlora_sweep.sweep.running import worker
from qlora_sweep.sweep.running.ranks import Ranks
from qlora_sweep.sweep.running.wire import Finished
from qlora_sweep.sweep.training import process_group
from qlora_sweep.sweep.training.adapters import Attached, attached
from qlora_sweep.sweep.training.device import Device, open_device
from qlora_sweep.sweep.training.eight_bit import tune_products
from qlora_sweep.sweep.training.exceptions import setting_at_fault
from qlora_sweep.sweep.training.faithfulness import products_of
from qlora_sweep.sweep.training.fitting import first_examples, fit, too_many
from qlora_sweep.sweep.training.in_trl import trained
from qlora_sweep.sweep.training.model import Unavailable, build_base, compute_type, name_quantizer
from qlora_sweep.sweep.training.preference import REFERENCE, Preference
from qlora_sweep.sweep.training.recurrent import called_kind, not_called, tune
from qlora_sweep.sweep.training.step import (
    BUCKETS,
    evaluating,
    keep_from_others,
    make_optimizer,
    out_of_memory,
    rate_of,
    told_in_evaluation,
)

OBSERVED_STEPS = 2
"""The first makes the optimizer's state, the second has it from the start; the widest rows are in
the first micro-batch of both."""
EVALUATED_ON_THE_WAY = 64
"""Held-out examples, the same for every micro-batch: the end evaluates all of them."""
_TELL_SECONDS = 0.25
_SHARE_OF_STEPS = 0.05
"""After so many of all steps a checkpoint is due as well, where it is cheap."""
_FEWEST_SECONDS = 60.0
"""Between two of those."""
_SHARE_OF_TIME = 0.04
"""That checkpoints and evaluations may take by default."""
_RECENT_STEPS = 20
_DOING = {
    "build": "building the base",
    "attach": "attaching the adapters",
    "measure": "a training step",
    "quality": "an evaluation",
}


def arguments(job: TrainingJob) -> TrainingArguments:
    """Return what Trainer is told: the settings that were measured."""
    config = job.config
    is_on_cpu = not job.is_on_gpu
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
        # Rows are in their epoch's order.
        train_sampling_strategy="sequential",
        dataloader_pin_memory=not is_on_cpu,
        accelerator_config={"non_blocking": not is_on_cpu},
        # Losses are read when they are there, and checkpoints written when they are due.
        logging_nan_inf_filter=False,
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        seed=job.seed,
        use_cpu=is_on_cpu,
    )


def random_states(device: Device) -> dict[str, Any]:
    """Return this process's random state, as Trainer keeps one of several processes."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
        # Trainer's key for whatever GPU it is.
        "cuda": device.random_states(),
    }


class AdapterTrainer(Trainer):
    """Trainer on attached adapters."""

    own_device: Device
    """That it trains on."""
    adapters: PeftModel
    """What trains; the model itself, or within what works out its loss on pairs."""
    on_loss: Callable[[torch.Tensor], None]
    """Is given each micro-batch's share of the step's loss, on the device."""

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        """Have gradients sent as in a trial."""
        return {**super()._build_accelerator_args(**options), "kwargs_handlers": [BUCKETS]}

    def store_flos(self) -> None:
        """Count none: all ranks would have to."""

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        """Queue one micro-batch; its loss stays on the device."""
        loss: torch.Tensor = super().training_step(*args, **options)
        self.on_loss(loss)
        return loss

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the adapter alone."""
        # PEFT would otherwise ask the hub whether the vocabulary is still the base's.
        directory = output_dir or self.args.output_dir
        self.adapters.save_pretrained(directory, save_embedding_layers=False)

    def _save_rng_state(self, output_dir: str) -> None:
        """Write every rank's, as they have gathered them."""
        if process_group.world_size() == 1:
            super()._save_rng_state(output_dir)
            return
        for number, states in enumerate(self._random_states):
            torch.save(states, Path(output_dir) / f"rng_state_{number}.pth")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Put a checkpoint's adapter into the one that is attached, in the type that it has: PEFT's
        `load_adapter`, which Trainer calls, makes bf16 adapters fp32."""
        adapter = load_file(Path(resume_from_checkpoint) / ADAPTER)
        set_peft_model_state_dict(self.adapters, adapter)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load them by way of the host, where several ranks train too; a CPU's ranks can do no
        other."""
        if checkpoint is None:
            return
        for part, name in ((self.optimizer, "optimizer"), (self.lr_scheduler, "scheduler")):
            path = Path(checkpoint) / f"{name}.pt"
            part.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    def save_checkpoint(self, output: Path, steps: Steps) -> str | None:
        """Write a whole checkpoint of this step, on rank 0 for all; return why the disk does not
        take it, None where it does."""
        self._random_states = process_group.all_gathered(random_states(self.own_device))
        refusal = None
        if process_group.rank() == 0:
            refusal = self._write_checkpoint(output, steps)
        return process_group.all_gathered(refusal)[0]

    def _write_checkpoint(self, output: Path, steps: Steps) -> str | None:
        """Write one; Trainer's own way to save would end the training where the disk is full."""
        try:
            with checkpoints.being_written(output, step=self.state.global_step) as directory:
                self.args.output_dir = str(directory.parent)
                self._save_checkpoint(self.model, None)
                text = json.dumps(asdict(steps))
                (directory / checkpoints.COURSE).write_text(text, encoding="utf-8")
        except (OSError, RuntimeError, SafetensorError) as error:
            if not checkpoints.is_of_the_disk(error):
                raise
            return words_of(error)
        checkpoints.remove_old(output)
        return None


class Training(TrainerCallback):
    """One job on one device, from building the base to the last checkpoint; a child serves it.

    Args:
        job: the training.
        send: tells the process that started it.
        rank: of those that train together; the first starts the others, and tells for all.
    """

    def __init__(self, job: TrainingJob, *, send: Callable[[Any], object], rank: int = 0) -> None:
        self._job = job
        self._output = Path(job.output)
        self._rank = rank
        self._end_with = send
        self._send: Callable[[Any], object] = lambda _: None
        if rank == 0:
            self._send = send
        self._others = Ranks(job, beat=lambda: self._enter(self._phase), on_failure=self._fail)
        self._is_apart = False
        """Whether it ended where other ranks continue, for good."""
        self._device: Device = open_device(job.device)
        self._observing = contextlib.ExitStack()
        self._end: TrainingOutcome | None = None
        self._reported_at = time.perf_counter()
        self._saved_at = self._reported_at
        self._pause_seconds = 0.0
        self._rate = 0.0
        self._phase: records.Phase = "start"
        self._step = 0
        self._losses: list[torch.Tensor] = []
        self._counted: deque[tuple[int, int]] = deque()
        """Of each micro-batch that is made and in no step that ended, the tokens that count and
        all that are computed."""
        self.stop = threading.Event()

    def prepare(self) -> None:
        """Put the budget in force on the device."""
        device = self._device
        device.warm_up()
        device.release()
        if self._job.budget_bytes is not None:
            device.cap(self._job.budget_bytes)
        device.expand_segments(self._job.config.expandable_segments)
        device.reset_peak()

    def serve(self, commands: IO[bytes]) -> None:
        """Train, and say how it ended; whatever is commanded meanwhile is to stop."""
        worker.listen(commands, lambda _: self.stop.set())
        outcome: Any = self.run()
        if self._rank == 0:
            self._send(protocol.TrainingFinished(outcome=outcome))
            return
        if not self._is_apart:
            # What all come to the first one says.
            outcome = records.INTERRUPTED
        self._end_with(
            Finished(run_id="", config=self._job.config, outcome=outcome, is_apart=self._is_apart)
        )

    def _fail(self, outcome: records.Outcome) -> None:
        """Say what befell another rank, and be gone: the thread that trains may wait for that rank,
        where nothing wakes it."""
        ended: Any = outcome
        self._send(protocol.TrainingFinished(outcome=ended))
        worker.leave_process()

    def run(self) -> TrainingOutcome:
        """Train, and return how it ended."""
        job = self._job
        device = self._device
        size = job.config.data_parallel
        try:
            self._enter("build")
            rendezvous = job.rendezvous
            if size > 1 and self._rank == 0:
                rendezvous = self._others.start(size, "qlora_sweep.sweep.finetuning")
            base = build_base(
                job.config,
                spec=job.spec,
                weights=job.weights,
                device=device.torch_device,
                seed=job.seed,
            )
            device.release()
            device.reset_peak()
            if size > 1:
                self._others.await_ready()
                process_group.join(
                    self._rank, size, rendezvous=Path(rendezvous), device=device.torch_device
                )
            # Adapters of a seed are the same whatever building the base drew.
            torch.manual_seed(job.seed)
            self._enter("attach")
            with attached(base, job.config) as attachment:
                return self._train(attachment)
        except InputError as error:
            return records.Invalid(rule="training", detail=str(error))
        except Unavailable as error:
            return records.Ineffective(setting=error.setting, detail=str(error))
        except Exception as error:  # noqa: BLE001 - it is this training's end
            traceback.print_exc()
            self._is_apart = size > 1
            self._others.hear_out()
            if device.ran_out(error):
                ended = out_of_memory(error, device, None, doing=f"{_DOING[self._phase]}: ")
                return replaced(ended, step=self._step)
            setting = setting_at_fault(error, job.config)
            if setting is not None:
                detail = f"does not run here: {words_of(error)}"
                return records.Ineffective(setting=setting, detail=detail)
            return worker.crashed(self._phase, error)
        finally:
            process_group.leave()

    def _train(self, attachment: Attached) -> TrainingOutcome:
        """Train all that is left on attached adapters, and return how it ended."""
        job = self._job
        model = attachment.model
        self._trained = attachment.trainable_parameters()
        self._rows = rows_of(job, model)
        self._take_up(attachment)
        name_quantizer(model)
        whole = trained(model, job.config)
        self._pairs: Preference | None = None
        if isinstance(whole, Preference):
            self._pairs = whole
        if self._rank:
            # Each drops elements of its own.
            torch.manual_seed(job.seed + self._rank)
        keep_from_others(whole)
        self._trainer = self._make_trainer(model, whole)
        if self._pairs is not None and job.config.reference == "precomputed":
            self._refer(self._pairs)
        self._setup = self._counted_setup()
        if job.config.is_8bit_compute and job.weights == "pretrained":
            self._setup["eight_bit"] = self._fit_8_bits(attachment, whole)
        self._tune(model.get_base_model())
        if job.dataset is not None:
            with self._trainer.accelerator.autocast():
                self._setup["documents_apart"] = is_keeping_apart(
                    model.get_base_model(), self._rows.training.rows, job.config
                )
        self._send(protocol.TrainingStarted(**self._setup, steps_done=self._first))
        with self._observing:
            if self._first < self._steps:
                self._enter("measure")
                self._trainer.train(resume_from_checkpoint=job.resume_from)
            elif job.resume_from is not None:
                self._trainer._load_from_checkpoint(job.resume_from)
                # Training prepares it too: precision is then the same.
                prepare = self._trainer.accelerator.prepare_model
                self._trainer.model_wrapped = prepare(self._trainer.model, evaluation_mode=True)
        return self._end or self._finish()

    def _tune(self, base: Any) -> None:
        """Choose the kernels of a base's recurrent layers and INT8 products, as a trial does.

        Raises:
            Unavailable: those of recurrent layers are installed, and transformers does not call
                them.
        """
        config = self._job.config
        rows = config.micro_batch_size * config.rows_per_sample
        length = config.seq_len
        widths = self._rows.training.widths
        if widths is not None:
            length = min(length, int(max(widths)))
        is_any_tuned = tune_products(base, rows=rows * length)
        if called_kind(base) is not None:
            looping = not_called(base)
            if looping is not None:
                raise Unavailable("attention", looping)
            with self._trainer.accelerator.autocast():
                tune(base, rows=rows, length=length)
            is_any_tuned = True
        if is_any_tuned:
            self._device.release()
            self._device.reset_peak()

    def _take_up(self, attachment: Attached) -> None:
        """Take up the steps that a checkpoint holds, or begin with the first."""
        steps = Steps()
        if self._job.resume_from is not None:
            course = Path(self._job.resume_from) / checkpoints.COURSE
            steps = Steps(**json.loads(course.read_text(encoding="utf-8")))
        self._course = RunTracker(self._device, steps, compilation=attachment.compilation)
        self._step = steps.done
        self._first = steps.done
        self._saved = steps.done

    def _make_trainer(self, model: PeftModel, whole: Any) -> AdapterTrainer:
        """Return the trainer of a model's adapters.

        Args:
            model: whose adapters are trained.
            whole: the model, or what computes the loss of pairs with it.
        """
        config = self._job.config
        optimizer = make_optimizer(config, self._trained, rate=rate_of(config, model))
        trainer = AdapterTrainer(
            model=whole,
            args=arguments(self._job),
            data_collator=self._counting,
            train_dataset=self._rows.training,
            optimizers=(optimizer, None),
            callbacks=[self],
        )
        trainer.own_device = self._device
        trainer.adapters = model
        trainer.on_loss = self._add_loss
        if self._pairs is not None:
            # A mean over pairs is not one over tokens, which Trainer would divide by.
            trainer.model_accepts_loss_kwargs = False
        return trainer

    def _counted_setup(self) -> dict[str, Any]:
        """Return what is known before the first step, as fields of `protocol.TrainingStarted`; note
        how many steps there are."""
        job = self._job
        held_out = self._rows.held_out
        count = len(self._rows.training.rows)
        self._steps_per_epoch = -(-count // job.config.samples_per_step)
        self._steps = job.max_steps or math.ceil(job.epochs * self._steps_per_epoch)
        return {
            "device_name": self._device.product(),
            "steps": self._steps,
            "rows": count,
            "dataset_rows": self._rows.examples,
            "rows_held_out": 0 if held_out is None else len(held_out),
            "rows_left_out": self._rows.left_out,
            "trainable_parameters": sum(p.numel() for p in self._trained),
        }

    def _fit_8_bits(self, attachment: Attached, whole: Any) -> records.EightBitProducts:
        """Fit 8-bit products to the real weights, on the first examples, alike on all ranks.

        Raises:
            InputError: too few of them are close to 16 bits.
        """
        config = self._job.config
        collate = self._rows.collate
        if self._job.dataset is None:
            # Its own counts the micro-batches of the training.
            collate = rows_of(self._job, attachment.model).collate
        # In the dataset's order, which an exported script has too.
        batch = first_examples(
            self._rows.training.rows, collate, tokens=config.tokens_per_micro_batch
        )
        batch = {name: value.to(self._device.torch_device) for name, value in batch.items()}
        with self._trainer.accelerator.autocast():
            fitted = fit(
                attachment.model,
                whole,
                batch,
                kind=config.compute_dtype,
                rows_per_sample=config.rows_per_sample,
            )
        products = products_of(fitted)
        # What that needed is not what a step needs.
        self._device.release()
        self._device.reset_peak()
        fault = too_many(products, config.compute_dtype)
        if fault is not None:
            raise InputError(fault)
        return products

    # What Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Watch the memory of the first steps."""
        self._observing.enter_context(self._device.observed())
        self._course.begin_stretch()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """Note the learning rate of the step, before the schedule takes its own."""
        self._rate = float(options["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Queue the step's figures, and do what is due."""
        course = self._course
        step = state.global_step
        counts = [self._counted.popleft() for _ in self._losses]
        tokens = sum(tokens for tokens, _ in counts)
        computed = sum(computed for _, computed in counts)
        loss = process_group.mean(sum(self._losses[1:], self._losses[0]))
        self._losses = []
        is_due = self._is_due(step) or course.fault_step is not None
        of_ranks = process_group.all_gathered((tokens, computed, self.stop.is_set(), is_due))
        # When to stop and to pause is the first one's to say.
        is_asked, is_due = of_ranks[0][2:]
        course.end_step(
            loss,
            tokens=sum(tokens for tokens, *_ in of_ranks),
            computed=sum(computed for _, computed, *_ in of_ranks),
            learning_rate=self._rate,
        )
        self._step = step
        if step in (self._first + OBSERVED_STEPS, self._steps):
            self._stop_observing()
        self._tell()
        is_last = step >= self._steps
        if self._end is None and (is_last or is_asked or is_due):
            self._pause(evaluates=not (is_last or is_asked))
            if self._end is None and course.fault_step is not None:
                words = f"loss {course.steps.losses[course.fault_step - 1]}"
                self._end = records.Diverged(step=course.fault_step, detail=words)
        if self._end is None and is_asked and not is_last:
            self._end = records.INTERRUPTED
        control.should_training_stop = control.should_training_stop or self._end is not None

    # What is done on the way

    def _enter(self, phase: records.Phase) -> None:
        """Say what begins."""
        self._phase = phase
        self._send(protocol.TrainingProgress(phase=phase, step=self._step))

    def _counting(self, rows: list[Any]) -> dict[str, torch.Tensor]:
        """Make a micro-batch, and count its tokens while it is on the host."""
        batch = self._rows.collate(rows)
        computed = batch["input_ids"].numel()
        # Of random tokens a trial counts all.
        tokens = computed
        if self._job.dataset is not None:
            tokens = loss_tokens(batch)
        self._counted.append((tokens, computed))
        return batch

    def _add_loss(self, loss: torch.Tensor) -> None:
        self._losses.append(loss)
        self._tell()

    def _tell(self) -> None:
        """Say how far it is, so seldom that it costs nothing; from within long steps too."""
        steps = self._course.steps
        now = time.perf_counter()
        if now - self._reported_at < _TELL_SECONDS:
            return
        self._reported_at = now
        recent = protocol.TrainingProgress(phase=self._phase, step=self._step)
        if steps.done and math.isfinite(steps.losses[-1]):
            seconds = steps.seconds[-_RECENT_STEPS:]
            left = (self._steps - steps.done) * sum(seconds) / len(seconds)
            rate = sum(steps.tokens[: steps.done][-_RECENT_STEPS:]) / sum(seconds)
            figures = {"loss": steps.losses[-1], "tokens_per_second": rate, "seconds_left": left}
            recent = replaced(recent, **figures)
        self._send(recent)

    def _stop_observing(self) -> None:
        """Take the peak that the first steps had for the training's own, on a CPU that counts."""
        self._course.settle()
        self._observing.close()
        self._device.stop_limiting_host()
        self._course.begin_stretch()
        budget = self._job.budget_bytes
        if budget is not None and self._end is None:
            memories = process_group.all_gathered(self._device.memory())
            peak = max(memory.peak_allocated_bytes for memory in memories)
            over = records.over_budget(peak, budget_bytes=budget, stage="forward")
            self._end = over and replaced(over, step=self._step)

    def _note_peak(self) -> None:
        for memory in process_group.all_gathered(self._device.memory()):
            self._course.steps.note_peak(memory)

    def _is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written now."""
        job = self._job
        since = time.perf_counter() - self._saved_at
        if not job.keeps_checkpoints:
            return False
        if job.checkpoint_steps is not None:
            return step % job.checkpoint_steps == 0
        is_cheap = since >= max(_FEWEST_SECONDS, self._pause_seconds / _SHARE_OF_TIME)
        is_far = step % max(1, round(_SHARE_OF_STEPS * self._steps)) == 0
        return is_cheap and (is_far or since >= protocol.CHECKPOINT_SECONDS)

    def _pause(self, *, evaluates: bool) -> None:
        """Read what is queued, evaluate some held-out examples, and write a checkpoint."""
        # What is queued takes its steps' own time, and none of what interrupts them.
        self._course.settle()
        begun = time.perf_counter()
        if self._course.fault_step is not None or not self._job.keeps_checkpoints:
            return
        step = self._step
        steps = self._course.steps
        if not all(bool(p.isfinite().all()) for p in self._trained):
            self._end = records.Diverged(step=step, detail="adapters that are not finite")
            return
        eval_loss = None
        if self._rows.held_out is not None and evaluates:
            eval_loss, *_ = self._held_out_loss(EVALUATED_ON_THE_WAY)
            steps.evaluations.append((step, eval_loss))
        self._note_peak()
        steps.checkpoints += 1
        refusal = self._trainer.save_checkpoint(self._output, steps)
        if refusal is not None and step >= self._steps:
            # Room was kept for this one.
            checkpoints.release(self._output)
            refusal = self._trainer.save_checkpoint(self._output, steps)
        if refusal is None:
            self._saved = step
        else:
            steps.checkpoints -= 1
        self._send(protocol.Saved(step=step, eval_loss=eval_loss, refusal=refusal))
        self._enter("measure")
        self._saved_at = time.perf_counter()
        self._pause_seconds = self._saved_at - begun
        steps.interrupted_seconds += self._pause_seconds
        self._course.begin_stretch()

    def _refer(self, pairs: Preference) -> None:
        """Work out the reference's log-probabilities of all that is trained on, or read what an
        earlier run of this training worked out."""
        path = self._output / protocol.REFERENCE
        rows = self._rows.training.rows
        is_known = path.exists() and len(load_file(path)[REFERENCE]) == 2 * len(rows)
        if process_group.agreed(is_known):
            rows.reference = load_file(path)[REFERENCE]
            return
        ranks = process_group.world_size()
        share = DataLoader(
            Subset(rows, range(self._rank, len(rows), ranks)),
            batch_size=self._job.config.micro_batch_size,
            collate_fn=self._rows.collate,
        )

        def batches() -> Iterator[dict[str, torch.Tensor]]:
            for batch in share:
                yield {k: v.to(self._device.torch_device) for k, v in batch.items()}
                self._tell()

        with self._trainer.accelerator.autocast():
            log_probabilities = pairs.references_of(batches())
        whole = torch.empty(len(rows), 2)
        for number, of_rank in enumerate(process_group.all_gathered(log_probabilities)):
            whole[number::ranks] = of_rank.view(-1, 2)
        rows.reference = whole.flatten()
        if self._rank == 0:
            save_file({REFERENCE: rows.reference}, path)

    def _held_out_loss(self, count: int) -> tuple[float, int, int]:
        """Return the loss over the first held-out examples, of which each rank takes a share: the
        mean over their tokens or over pairs; how many those are; and in how many pairs the chosen
        completion gained more.

        Nothing random in the training changes by it. A compiled layer runs as it is written:
        evaluated examples have shapes of their own.
        """
        self._enter("quality")
        rows = self._rows
        config = self._job.config
        trainer = self._trainer
        device = self._device.torch_device
        assert rows.held_out is not None
        share = range(self._rank, min(count, len(rows.held_out)), process_group.world_size())
        batches = DataLoader(
            Subset(rows.held_out, share),
            batch_size=config.micro_batch_size,
            collate_fn=rows.collate_held_out,
        )
        options = told_in_evaluation(config)
        total = 0.0
        weights = 0
        """Supervised tokens, or pairs."""
        wins = 0
        with (
            torch.random.fork_rng(devices=self._device.rng_devices),
            torch.compiler.set_stance("force_eager"),
            evaluating(trainer.model),
        ):
            for batch in batches:
                weight = loss_tokens(batch)
                if self._pairs is not None:
                    weight = len(batch["labels"]) // 2
                on_device = {key: value.to(device) for key, value in batch.items()}
                with trainer.compute_loss_context_manager():
                    loss = trainer.model_wrapped(**on_device, **options).loss
                if self._pairs is not None and self._pairs.newest is not None:
                    wins += int((self._pairs.newest.margins(config) > 0).sum())
                total += float(loss) * weight
                weights += weight
                self._tell()
        totals, counts, won = zip(*process_group.all_gathered((total, weights, wins)), strict=True)
        return sum(totals) / sum(counts), sum(counts), sum(won)

    def _finish(self) -> TrainingOutcome:
        """Evaluate all that is held out, and return what the training came to."""
        job = self._job
        steps = self._course.steps
        rows = self._setup["rows"]
        if job.keeps_checkpoints and self._saved != self._steps:
            return worker.crashed("measure", OSError("the disk does not take the last checkpoint"))
        loss = None
        weights = 0
        wins = 0
        if self._rows.held_out is not None:
            loss, weights, wins = self._held_out_loss(len(self._rows.held_out))
        self._note_peak()
        whole, further = divmod(self._steps, self._steps_per_epoch)
        saved = checkpoints.path_of(self._output, self._steps)
        return protocol.TrainingResult(
            **self._setup,
            **steps.figures(),
            eval_loss=loss,
            eval_tokens=0 if job.config.is_on_pairs else weights,
            eval_pairs=weights if job.config.is_on_pairs else 0,
            eval_wins=wins,
            packed_rows=rows if job.config.packing == "packed" else None,
            # An epoch's last step may have fewer examples.
            epochs=whole + further * job.config.samples_per_step / rows,
            checkpoint=str(saved) if job.keeps_checkpoints else None,
        )


def main() -> None:
    """Serve one training."""
    worker.main(Training, TrainingJob)
