"""One trial on a resident base: attach, warm up, measure, detach, and what came of it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.dataset_choice import TOO_FEW_EXAMPLES
from qlora_sweep.search_spaces.errors import InputError, words_of
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.kinds import ComputeDtype
from qlora_sweep.search_spaces.space import MICRO_STEPS_TIMED, StepBudget
from qlora_sweep.search_spaces.vision import tower_flops
from qlora_sweep.storage.records import (
    NEIGHBOUR,
    OUT_OF_TIME,
    Diverged,
    Faithfulness,
    Ineffective,
    Invalid,
    Measured,
    Measurement,
    Outcome,
    OutOfMemory,
    Phase,
    PrunedSlow,
    SoakReport,
    Stage,
    over_budget,
)
from qlora_sweep.sweep.data.batches import TokenizedDataset, TrialBatches, trial_batches
from qlora_sweep.sweep.data.probing import are_apart, check_is_causal, takes_positions
from qlora_sweep.sweep.scratch import scratch
from qlora_sweep.sweep.training.adapters import attached, held_share, local
from qlora_sweep.sweep.training.device import Device, Memory
from qlora_sweep.sweep.training.eight_bit import tune_products
from qlora_sweep.sweep.training.exceptions import DETAIL_LENGTH, TrialEnded, setting_at_fault
from qlora_sweep.sweep.training.faithfulness import compared, products_of, unfaithful
from qlora_sweep.sweep.training.fitting import too_many
from qlora_sweep.sweep.training.messages import Progress
from qlora_sweep.sweep.training.meter import (
    GpuReader,
    Meter,
    NeighbourWatch,
    flops_per_token,
    median_interval,
)
from qlora_sweep.sweep.training.model import BaseModel, Unavailable
from qlora_sweep.sweep.training.process_group import (
    NO_LIMIT,
    Look,
    TimeLimit,
    agreed,
    all_gathered,
    fingerprint,
    rank,
    world_size,
)
from qlora_sweep.sweep.training.proof import KernelWatch, ProductWatch, StepEvidence, ineffective
from qlora_sweep.sweep.training.recurrent import called_kind, tune
from qlora_sweep.sweep.training.step import TrainingLoop, out_of_memory
from qlora_sweep.sweep.training.step_queue import QUIET_SECONDS, StepQueue

UNKNOWN_TOKENS = "tokens-beyond-vocabulary"
NOT_CAUSAL = "texts-need-a-causal-model"
DOCUMENTS_TOGETHER = "documents_together"
"""Flag of packed rows whose texts see each other."""
ROUND_EXTRAPOLATED = "round_extrapolated"
"""Flag of a speed that is derived from micro-batches of other sizes than the epoch's."""
INTERLUDE_BATCHES = 2
"""Micro-batches that a soak evaluates: the second comes while the first one's memory is cached."""
_OBSERVED_STEPS = 2
"""The first step makes the optimizer's state, the second has it from the start: the peak is in one
of them."""


@dataclass(frozen=True)
class TrialDevice:
    """What the trials of a process run on, and are held to.

    Attributes:
        peak_flops: the device's dense FLOP/s by compute dtype, as far as they are known.
        budget_bytes: a measured peak above it does not fit; None for no budget.
        is_emulated: whether the device stands in for another.
        compared: what was found so far of configurations' 8-bit compute.
    """

    device: Device
    gpu: GpuReader
    peak_flops: Mapping[ComputeDtype, float] = field(default_factory=dict)
    budget_bytes: int | None = None
    is_emulated: bool = False
    compared: dict[TrialConfig, Faithfulness] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialTask:
    """What a trial trains, on what, and for how long.

    Attributes:
        dataset: what it trains on; None for full-length random rows.
        is_soak: whether it trains until its budget is spent, and evaluates and saves on the way.
            Both are where a training dies that fitted: in evaluation mode the fused loss holds the
            logits after all, and what was freed between the steps comes back cut up.
        limit: until when it may train. What it measured by then counts if its budget asks for no
            more steps at least; a soak has to have evaluated and saved, too.
        micro_steps_max: most micro-steps of one optimizer step that are really run; the seconds of
            a longer accumulation are derived.
        quiet_seconds: see `StepQueue`.
    """

    config: TrialConfig
    steps: StepBudget
    dataset: TokenizedDataset | None = None
    is_soak: bool = False
    limit: TimeLimit = NO_LIMIT
    micro_steps_max: int = MICRO_STEPS_TIMED
    quiet_seconds: float = QUIET_SECONDS


class Trial:
    """One run of a task on one base.

    Args:
        base: has no adapters yet.
        trial_device: what it runs on.
        task: what it does.
        report: called with each `Progress`; True stops the trial as slow.
        started: when the trial began, its build included; None for now.

    Attributes:
        phase: where the trial is.
        is_apart: whether it ended where other ranks that train it continue, for good.
    """

    def __init__(
        self,
        base: BaseModel,
        trial_device: TrialDevice,
        task: TrialTask,
        *,
        report: Callable[[Progress], bool] = lambda _: False,
        started: float | None = None,
    ) -> None:
        self.phase: Phase = "build"
        self.is_apart = False
        self._started = time.perf_counter() if started is None else started
        self._base = base
        self._trial_device = trial_device
        self._device = trial_device.device
        self._task = task
        self._config = task.config
        self._report = report
        neighbours = NeighbourWatch(
            trial_device.device,
            trial_device.gpu,
            trial_device.budget_bytes,
            has_paged_memory=task.config.is_paged,
        )
        self._meter = Meter(task.config, task.steps, neighbours, task.is_soak)
        self._micro_steps = min(task.config.accumulation_steps, task.micro_steps_max)
        self._loop: TrainingLoop | None = None
        self._batches: TrialBatches | None = None
        """Of the texts."""
        self._doing = ""
        """What else than a training step is being done, to begin a sentence with."""
        self._soak: dict[str, Any] | None = None
        """What was evaluated and saved."""
        self._documents_apart: bool | None = None
        self._looks: list[Look] = []
        """What each rank showed last."""

    def run(self) -> Outcome:
        """Return how it ended. On return the base is as it was before, whatever happened.

        Raises:
            Exception: what is neither memory nor the compiler nor a rule.
        """
        outcome: Outcome
        try:
            self._device.reset_peak()
            self._meter.neighbours.start()
            self._enter("attach")
            self._check_peak(self._device.memory())
            if self._task.dataset is not None:
                self._make_batches(self._task.dataset)
            outcome = self._train()
        except TrialEnded as ended:
            # Before all of them began together.
            outcome = ended.outcome
            self.is_apart = world_size() > 1
        except InputError as error:
            outcome = Invalid(rule="target_modules", detail=str(error))
        except Unavailable as error:
            outcome = Ineffective(setting=error.setting, detail=str(error))
        except Exception as error:
            failed = self._outcome_of(error)
            if failed is None:
                raise
            outcome = failed
            self.is_apart = world_size() > 1
        # Outside the except blocks: a caught exception keeps the frames, and so the tensors, alive.
        self._enter("detach")
        self._loop = None
        self._device.release()
        if not isinstance(outcome, Measured | PrunedSlow):
            return outcome
        measured = outcome.measurement
        setup = max(0.0, time.perf_counter() - self._started - measured.measured_seconds)
        measured = replaced(measured, setup_seconds=setup)
        return replaced(outcome, measurement=measured)

    def _outcome_of(self, error: Exception) -> Outcome | None:
        """Return what an exception, still being handled, means for the trial; None where it is
        neither memory nor the compiler."""
        setting = setting_at_fault(error, self._config)
        if self._device.ran_out(error):
            flags: tuple[str, ...] = ()
            if self._meter.neighbours.have_robbed():
                flags = (NEIGHBOUR,)
            # What is sharded gets its weights with the adapters.
            stage: Stage = "load" if self._config.is_sharded else "forward"
            return out_of_memory(
                error, self._device, self._loop, stage=stage, doing=self._doing, flags=flags
            )
        if setting is not None:
            detail = (self._doing + words_of(error))[:DETAIL_LENGTH]
            return Ineffective(setting=setting, detail=detail)
        return None

    def _enter(self, phase: Phase) -> None:
        """Say that a phase begins, so that its own deadline holds and a failure is laid to it."""
        if phase != self.phase:
            self.phase = phase
            self._tell()

    def _tell(self, **speeds: float | None) -> bool:
        """Give a sign of life; return whether the trial is to stop."""
        done = {"warmup": self._meter.warmup, "measure": self._meter.measured}
        return self._report(
            Progress(
                phase=self.phase,
                step=len(done.get(self.phase, ())),
                allocated_bytes=self._device.memory().peak_allocated_bytes,
                **speeds,
            )
        )

    def _check_peak(self, memory: Memory, where: str = "") -> None:
        """See that a peak so far is within budget and device.

        The allocator's cap is on what it reserves, and the CPU's on more than tensors: only the
        peak itself, read back, says that a trial was within its budget to the byte.

        Raises:
            TrialEnded: it is not.
        """
        peak = memory.peak_allocated_bytes
        stage = memory.peak_stage
        budget_bytes = self._trial_device.budget_bytes
        over = None
        if budget_bytes is not None:
            over = over_budget(peak, budget_bytes=budget_bytes, stage=stage)
        if over is None and memory.spilled_bytes:
            detail = f"the driver put {memory.spilled_bytes:,} bytes into the host's memory"
            over = OutOfMemory(stage=stage, peak_allocated_bytes=peak, detail=detail)
        if over is not None:
            raise TrialEnded(replaced(over, detail=where + over.detail))

    def _check_all_peaks(self, loop: TrainingLoop, *, loss: float) -> None:
        """See that every rank's peak is; each comes to the same.

        Raises:
            TrialEnded: it is not.
        """
        trained: list[torch.Tensor] = []
        tokens: list[torch.Tensor] = []
        if world_size() > 1:
            # What a single process has is compared with nothing.
            trained = [local(p) for p in loop.attached.trainable_parameters()]
            tokens = [loop.newest]
        look = Look(
            rank=rank(),
            size=world_size(),
            adapters=fingerprint(trained),
            tokens=fingerprint(tokens),
            held_share=held_share(loop.attached),
            memory=self._device.memory(),
            loss=loss,
        )
        self._looks = all_gathered(look)
        for look in self._looks:
            where = f"GPU {look.rank}: " if look.rank else ""
            self._check_peak(look.memory, where)

    def _make_batches(self, dataset: TokenizedDataset) -> None:
        """Make the micro-batches of the texts.

        Raises:
            TrialEnded: they cannot be trained on.
        """
        config = self._config
        model = self._base.model
        try:
            made = trial_batches(dataset, config, micro_steps=self._micro_steps, rank=rank())
        except InputError as error:
            raise TrialEnded(Invalid(rule=TOO_FEW_EXAMPLES, detail=str(error))) from None
        batches = list(made.largest)
        batches += made.round
        largest = max(int(batch["input_ids"].max()) for batch in batches)
        vocabulary = model.get_input_embeddings().num_embeddings
        if largest >= vocabulary:
            words = f"the texts hold token {largest:,}, and the model knows {vocabulary:,}"
            raise TrialEnded(Invalid(rule=UNKNOWN_TOKENS, detail=words))
        if config.packing == "packed" and not takes_positions(model):
            words = "the model is told no positions of tokens"
            raise TrialEnded(Ineffective(setting="packing", detail=words))
        self._batches = made
        self._meter.tokens_per_step = made.loss_tokens_per_step / made.pace

    def _train(self) -> Outcome:
        made = self._batches
        with attached(self._base, self._config) as attachment:
            loop = TrainingLoop(
                attachment,
                self._config,
                seed=self._base.seed,
                micro_steps=self._micro_steps,
                batches=None if made is None else [made.largest, made.round],
                on_stage=self._device.enter,
            )
            self._loop = loop
            round_steps = 0
            if made is not None:
                round_steps = max(1, len(made.round) // self._micro_steps)
            steps = StepQueue(
                loop,
                self._device,
                self._meter,
                limit=self._task.limit,
                round_steps=round_steps,
                tell=self._tell,
                quiet_seconds=self._task.quiet_seconds,
            )
            if world_size() > 1:
                # What was sent to make all adapters alike is not a step's.
                self._device.mark().wait()
            try:
                self._fit_8_bits(loop)
                self._enter("warmup")
                self._tune(loop)
                self._prove(loop, steps)
                loop.leave_largest()
                while not agreed(self._meter.is_warm()):
                    steps.advance()
                    if steps.is_out_of_time:
                        raise TrialEnded(OUT_OF_TIME)
                outcome = self._measure(loop, steps)
            except TrialEnded as ended:
                outcome = ended.outcome
                if isinstance(outcome, Diverged):
                    self.is_apart = world_size() > 1
            self._enter("detach")
            return outcome

    def _fit_8_bits(self, loop: TrainingLoop) -> None:
        """Fit 8-bit products to real weights, once for all trials on this base.

        Raises:
            TrialEnded: too few of them are close to 16 bits.
        """
        config = self._config
        base = self._base
        if not config.is_8bit_compute or not base.is_pretrained or config.is_sharded:
            return
        if base.eight_bit is None:
            base.eight_bit = products_of(loop.fit_8_bits())
            # What that needed is not what a step needs.
            self._device.release()
            self._device.reset_peak()
        fault = too_many(base.eight_bit, config.compute_dtype)
        if fault is not None:
            raise TrialEnded(Ineffective(setting="compute_dtype", detail=fault))

    def _tune(self, loop: TrainingLoop) -> None:
        """Choose the kernels of recurrent layers and of INT8 products before memory is full of what
        layers keep; what that needs is not what a step needs."""
        config = self._config
        base: Any = loop.attached.model.get_base_model()
        is_recurrent = not config.is_sharded and called_kind(base) is not None
        if not is_recurrent and config.compute_dtype != "int8":
            return
        rows, length = loop.largest_batch()["input_ids"].shape
        is_any_tuned = tune_products(base, rows=rows * length, on_timed=self._tell)
        if is_recurrent:
            with loop.as_trained():
                tune(base, rows=rows, length=length, on_pass=self._tell)
            is_any_tuned = True
        if is_any_tuned:
            self._device.release()
            self._device.reset_peak()

    def _prove(self, loop: TrainingLoop, steps: StepQueue) -> None:
        """Do the steps that have the peak.

        Raises:
            TrialEnded: they do not fit, or are not what was asked for.
        """
        config = self._config
        watch: KernelWatch | ProductWatch | None = None
        watched_step = 0
        if not config.compile:
            watch = KernelWatch()
        elif config.is_8bit_compute:
            watch = ProductWatch()
            # Without what the compiler itself tries out.
            watched_step = 1
        with self._device.observed():
            for index in range(_OBSERVED_STEPS):
                # The first step may compile, which says nothing of how long the second takes.
                if self._task.limit.is_over():
                    raise TrialEnded(OUT_OF_TIME)
                with contextlib.ExitStack() as watching:
                    if watch is not None and index == watched_step:
                        watching.enter_context(watch)
                    steps.queue()
                    steps.take_in()
        self._check_all_peaks(loop, loss=steps.loss)
        fault = ineffective(config, StepEvidence(loop, watch, self._looks, self._batches))
        if agreed(fault is not None):
            raise TrialEnded(
                fault or Ineffective(setting="data_parallel", detail="rank 0 found so")
            )
        model = loop.attached.model.get_base_model()
        if self._task.dataset is not None:
            try:
                with loop.as_trained():
                    check_is_causal(model)
            except InputError as error:
                raise TrialEnded(Invalid(rule=NOT_CAUSAL, detail=str(error))) from None
        if config.packing == "packed":
            with loop.as_trained():
                self._documents_apart = are_apart(model, loop.largest_batch())

    def _measure(self, loop: TrainingLoop, steps: StepQueue) -> Outcome:
        meter = self._meter
        meter.neighbours.start_measuring()
        self._enter("measure")
        steps.is_measuring = True
        begun = time.perf_counter()
        waited = loop.wait_seconds
        meter.energy.begin()
        if self._task.is_soak:
            while not steps.is_over(self._is_half_way(begun)):
                steps.advance()
            if not steps.is_over(False):
                # With nothing queued in the meantime.
                steps.settle()
                meter.energy.end()
                self.evaluate_and_save(loop)
                meter.energy.begin()
                steps.advance()
        while not steps.is_over(meter.is_enough(time.perf_counter() - begun)):
            steps.advance()
        # Of what is queued by now the device does every step, whether anybody asks or not.
        steps.settle()
        meter.energy.end()
        self._check_all_peaks(loop, loss=steps.loss)
        is_slow = agreed(steps.is_slow)
        is_whole = len(meter.measured) >= self._task.steps.measured_min
        if self._task.is_soak and self._soak is None:
            is_whole = False
        if steps.is_out_of_time and not is_slow and not is_whole:
            return OUT_OF_TIME
        elapsed = time.perf_counter() - begun
        wait_share = (loop.wait_seconds - waited) / elapsed
        measurement = self._measurement(loop, elapsed=elapsed, wait_share=wait_share)
        if is_slow:
            return PrunedSlow(measurement=measurement)
        if not self._config.is_8bit_compute:
            return Measured(measurement=measurement)
        return self._compared(loop, measurement)

    def _compared(self, loop: TrainingLoop, measurement: Measurement) -> Outcome:
        """Return what was measured in 8 bits, if a step in 8 bits stands for one in 16."""
        compared_before = self._trial_device.compared
        # Asked by every rank, whatever each has compared before.
        is_over = self._task.limit.is_over()
        if self._config not in compared_before:
            if is_over:
                return OUT_OF_TIME
            self._enter("compare")
            compared_before[self._config] = compared(loop)
        faithfulness = compared_before[self._config]
        detail = unfaithful(faithfulness)
        if detail is not None:
            return Ineffective(setting="compute_dtype", detail=detail)
        return Measured(measurement=replaced(measurement, faithfulness=faithfulness))

    def _is_half_way(self, begun: float) -> bool:
        budget = self._task.steps
        is_late = time.perf_counter() - begun >= budget.seconds_max / 2
        return is_late or len(self._meter.measured) >= budget.measured_max // 2

    def evaluate_and_save(self, loop: TrainingLoop) -> None:
        """Do what a training does now and then: evaluate, then save a checkpoint.

        Raises:
            RuntimeError: whatever the device raises.
            OSError: there is no room for the checkpoint.
        """
        self._doing = "in an evaluation pass: "
        begun = time.perf_counter()
        with self._device.observed():
            # The loss is read back, so the device is done with it.
            loss = loop.evaluate(batches=INTERLUDE_BATCHES)
        evaluated = time.perf_counter()
        self._tell()
        self._doing = "in saving a checkpoint: "
        saving = time.perf_counter()
        with scratch("soak") as directory:
            loop.save(directory)
            files = filter(lambda path: path.is_file(), directory.rglob("*"))
            size = sum(path.stat().st_size for path in files)
        self._soak = {
            "evaluation_loss": loss,
            "evaluation_seconds": evaluated - begun,
            "checkpoint_bytes": size,
            "checkpoint_seconds": time.perf_counter() - saving,
        }
        self._tell()
        self._doing = ""

    def _measurement(self, loop: TrainingLoop, *, elapsed: float, wait_share: float) -> Measurement:
        """Return what the steps come to: of several GPUs the largest peaks and the mean loss; on
        texts the seconds of a step of their epoch. Those of setting up are not known yet."""
        config = self._config
        meter = self._meter
        made = self._batches
        attachment = loop.attached
        memories = [look.memory for look in self._looks]
        reserved = [memory.peak_reserved_bytes for memory in memories]
        retries = sum(memory.allocator_retries for memory in memories)
        pace = 1.0
        of_dataset: dict[str, Any] = {}
        if made is not None:
            pace = made.pace
            of_dataset = {
                "loss_tokens_per_step": made.loss_tokens_per_step,
                "padding_waste": made.epoch.waste,
                "batch_wait_share": wait_share,
            }
        flags = {
            "emulated": self._trial_device.is_emulated,
            **meter.flags(),
            "allocator_retries": retries > 0,
            "accumulation_extrapolated": config.accumulation_steps > self._task.micro_steps_max,
            DOCUMENTS_TOGETHER: self._documents_apart is False,
            ROUND_EXTRAPOLATED: made is not None and not made.is_as_its_epoch,
        }
        median = meter.median_seconds
        interval = median_interval(meter.measured)
        if interval is not None:
            low, high = interval
            interval = (low * pace, high * pace)
        soak = None
        if self._soak is not None:
            steps = len(meter.warmup) + len(meter.measured)
            soak = SoakReport(**self._soak, steps=steps, seconds=elapsed)
        compile_seconds = None
        if attachment.compilation is not None:
            compile_seconds = attachment.compilation.seconds
        return Measurement(
            **meter.figures(),
            **of_dataset,
            tokens_per_second=meter.tokens_per_step / median,
            gpus=len(memories),
            samples_per_second=config.samples_per_step / median / pace,
            step_seconds=median * pace,
            step_seconds_ci95=interval,
            peak_allocated_bytes=max(memory.peak_allocated_bytes for memory in memories),
            peak_reserved_bytes=max(filter(None, reserved), default=None),
            trainable_parameters=sum(p.numel() for p in attachment.trainable_parameters()),
            flops_utilization=self._utilization(loop),
            final_loss=statistics.fmean(look.loss for look in self._looks),
            setup_seconds=0.0,
            allocator_retries=retries,
            flags=tuple(name for name, is_set in flags.items() if is_set),
            quantized_share=self._base.quantized_share,
            compile_seconds=compile_seconds,
            eight_bit=self._base.eight_bit if config.is_8bit_compute else None,
            soak=soak,
            documents_apart=self._documents_apart,
        )

    def _utilization(self, loop: TrainingLoop) -> float | None:
        """Model FLOP/s over the peak; recomputation is not counted as work, padding is."""
        config = self._config
        peak_flops = self._trial_device.peak_flops.get(config.compute_dtype)
        if peak_flops is None:
            return None
        shapes = [(config.micro_batch_size * config.rows_per_sample, config.seq_len)]
        if self._batches is not None:
            shapes = [tuple(batch["input_ids"].shape) for batch in self._batches.round]
        work = 0.0
        for rows, width in shapes:
            # Flattened rows stay apart: no token has more before it than its own row has.
            before = min(width, config.seq_len)
            of_token = flops_per_token(
                loop.attached, self._base.model.config, before, config.references
            )
            if of_token is None:
                return None
            work += rows * (width * of_token + tower_flops(config, self._base.spec))
        per_step = config.accumulation_steps * work / len(shapes)
        return per_step / self._meter.median_seconds / peak_flops
