"""One trial on a resident base: attach, warm up, measure, detach, and what came of it."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError, words_of
from qlora_sweep.search_spaces.space import MICRO_STEPS_TIMED, StepBudget
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
from qlora_sweep.sweep.data.batches import Texts, TrialBatches, trial_batches
from qlora_sweep.sweep.data.probing import are_apart, check_is_causal, takes_positions
from qlora_sweep.sweep.scratch import scratch
from qlora_sweep.sweep.training.adapters import attached, held_share, local
from qlora_sweep.sweep.training.device import Device, Mark, Memory
from qlora_sweep.sweep.training.exceptions import DETAIL_LENGTH, knob_at_fault, out_of_memory
from qlora_sweep.sweep.training.faithfulness import compared, unfaithful
from qlora_sweep.sweep.training.fitting import too_many
from qlora_sweep.sweep.training.messages import Progress
from qlora_sweep.sweep.training.meter import (
    CardReader,
    Meter,
    NeighbourWatch,
    fastest_median,
    flops_per_token,
    median_interval,
)
from qlora_sweep.sweep.training.model import BaseModel
from qlora_sweep.sweep.training.proof import KernelWatch, ProductWatch, StepEvidence, ineffective
from qlora_sweep.sweep.training.step import TrainingLoop
from qlora_sweep.sweep.training.team import (
    NO_LIMIT,
    Look,
    TimeLimit,
    agreed,
    fingerprint,
    gathered,
    rank,
    world_size,
)

ROWS_OF_TEXTS = "texts-make-no-micro-batch"
TOKENS_OF_TEXTS = "tokens-beyond-vocabulary"
AHEAD_OF_TEXTS = "texts-need-a-causal-model"
DOCUMENTS_TOGETHER = "documents_together"
"""Flag of packed rows whose texts see each other."""
ROUND_EXTRAPOLATED = "round_extrapolated"
"""Flag of a speed that is derived from micro-batches of other sizes than the epoch's."""
INTERLUDE_BATCHES = 2
"""Micro-batches that a soak evaluates: the second comes while the first one's memory is cached."""
SILENCE_SECONDS = 10.0
"""Of queueing, after which a micro-step that is queued is a sign of life: where one takes so long,
the host is hardly ahead of the device. A beat costs the host what a short step cannot spare."""
_OBSERVED_STEPS = 2
"""The first step makes the optimizer's state, the second has it from the start: the peak is in one
of them."""


class Ended(Exception):  # noqa: N818 - the end of a trial may be an answer
    """The trial is over before it was measured."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.verdict)
        self.outcome = outcome


@dataclass
class _Queued:
    """An optimizer step, or a round of them, that the device may still be busy with."""

    begun: Mark
    is_round: bool
    """Whether it is a pass over what stands for the texts' epoch."""
    ended: list[Mark] = field(default_factory=list)
    """The ends of its micro-steps."""
    gradients: list[Mark] = field(default_factory=list)
    """Where all gradients of a step were there; of a round alone."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Of each step, on their way to the host; there when it is done."""


@dataclass
class Trial:
    """One configuration on one base, under a step budget.

    Attributes:
        report: called with each `Progress`; True stops the trial as slow.
        peak_flops: the device's dense FLOP/s for the compute dtype; None where unknown.
        budget_bytes: a measured peak above it does not fit; None for no budget.
        micro_steps_max: most micro-steps of one optimizer step that are really run; the seconds of
            a longer accumulation are derived.
        texts: what it trains on; None for full-length random rows.
        is_soak: whether it trains until its budget is spent, and evaluates and saves on the way.
            Both are where a training dies that fitted: in evaluation mode the fused loss holds the
            logits after all, and what was freed between the steps comes back cut up.
        compared: what is known by now of configurations' 8-bit compute.
        limit: until when it may train. What it measured by then counts if its budget asks for no
            more steps at least; a soak has to have evaluated and saved, too.
        phase: where the trial is.
        is_apart: whether it ended where other ranks that train it go on, for good.
    """

    base: BaseModel
    config: TrialConfig
    steps: StepBudget
    device: Device
    card: CardReader
    peak_flops: float | None = None
    is_emulated: bool = False
    budget_bytes: int | None = None
    texts: Texts | None = None
    micro_steps_max: int = MICRO_STEPS_TIMED
    is_soak: bool = False
    compared: dict[TrialConfig, Faithfulness] = field(default_factory=dict)
    limit: TimeLimit = NO_LIMIT
    silence_seconds: float = SILENCE_SECONDS
    phase: Phase = "build"
    report: Callable[[Progress], bool] = lambda _: False
    started: float = field(default_factory=time.perf_counter)
    """When the trial began, its build included."""
    is_apart: bool = False
    _loop: TrainingLoop | None = None
    _queued: deque[_Queued] = field(default_factory=deque)
    """Steps that are not taken in yet, the oldest first."""
    _loss: float = 0.0
    """Of the newest step that is done."""
    _step_seconds: float = 0.0
    """That the newest step took, or the newest round of them."""
    _is_slow: bool = False
    _is_out_of_time: bool = False
    """Whether no further step is begun; the same on every rank."""
    _doing: str = ""
    """What else than a training step is being done, to begin a sentence with."""
    _soak: dict[str, Any] | None = None
    """What was evaluated and saved."""
    _round: TrialBatches | None = None
    _documents_apart: bool | None = None
    _looks: list[Look] = field(default_factory=list)
    """What each rank showed last."""

    def __post_init__(self) -> None:
        neighbours = NeighbourWatch(
            self.device, self.card, self.budget_bytes, has_paged_memory=self.config.is_paged
        )
        self._meter = Meter(self.config, self.steps, neighbours, self.is_soak)
        self._micro_steps = min(self.config.accumulation_steps, self.micro_steps_max)

    def run(self) -> Outcome:
        """Return how it ended. On return the base is as it was before, whatever happened.

        Raises:
            Exception: what is neither memory nor the compiler nor a rule.
        """
        outcome: Outcome
        try:
            self.device.reset_peak()
            self._meter.neighbours.start()
            self._enter("attach")
            self._check_peak(self.device.memory())
            if self.texts is not None:
                self._make_batches(self.texts)
            outcome = self._train()
        except Ended as ended:
            # Before all of them began together.
            outcome, self.is_apart = ended.outcome, world_size() > 1
        except InputError as error:
            outcome = Invalid(rule="target_modules", detail=str(error))
        except Exception as error:
            knob, doing = knob_at_fault(error, self.config), self._doing
            if self.device.ran_out(error):
                flags = (NEIGHBOUR,) if self._meter.neighbours.have_robbed() else ()
                # What is sharded gets its weights with the adapters.
                stage: Stage = "load" if self.config.is_sharded else "forward"
                outcome = out_of_memory(
                    error, self.device, self._loop, stage=stage, doing=doing, flags=flags
                )
            elif knob is not None:
                outcome = Ineffective(knob=knob, detail=(doing + words_of(error))[:DETAIL_LENGTH])
            else:
                raise
            self.is_apart = world_size() > 1
        # Outside the except blocks: a caught exception keeps the frames, and so the tensors, alive.
        self._enter("detach")
        self._loop = None
        self._queued.clear()
        self.device.release()
        if not isinstance(outcome, Measured | PrunedSlow):
            return outcome
        measured = outcome.measurement
        setup = max(0.0, time.perf_counter() - self.started - measured.measured_seconds)
        measured = measured.model_copy(update={"setup_seconds": setup})
        return outcome.model_copy(update={"measurement": measured})

    def _enter(self, phase: Phase) -> None:
        """Say that a phase begins, so that its own deadline holds and a failure is laid to it."""
        if phase != self.phase:
            self.phase = phase
            self._tell()

    def _tell(self, **speeds: float | None) -> bool:
        """Give a sign of life; return whether the trial is to stop."""
        done = {"warmup": self._meter.warmup, "measure": self._meter.measured}
        return self.report(
            Progress(
                phase=self.phase,
                step=len(done.get(self.phase, ())),
                allocated_bytes=self.device.memory().peak_allocated_bytes,
                **speeds,
            )
        )

    def _check_peak(self, memory: Memory, where: str = "") -> None:
        """See that a peak so far is within budget and device.

        The allocator's cap is on what it reserves, and the CPU's on more than tensors: only the
        peak itself, read back, says that a trial was within its budget to the byte.

        Raises:
            Ended: it is not.
        """
        peak, stage, over = memory.peak_allocated_bytes, memory.peak_stage, None
        if self.budget_bytes is not None:
            over = over_budget(peak, budget_bytes=self.budget_bytes, stage=stage)
        if over is None and memory.spilled_bytes:
            detail = f"the driver put {memory.spilled_bytes:,} bytes into the host's memory"
            over = OutOfMemory(stage=stage, peak_allocated_bytes=peak, detail=detail)
        if over is not None:
            raise Ended(over.model_copy(update={"detail": where + over.detail}))

    def _check_all_peaks(self, loop: TrainingLoop) -> None:
        """See that every rank's peak is; each comes to the same.

        Raises:
            Ended: it is not.
        """
        trained, tokens = list[torch.Tensor](), list[torch.Tensor]()
        if world_size() > 1:
            # Nobody compares what a single process has.
            trained = [local(p) for p in loop.attached.trainable_parameters()]
            tokens = [loop.newest]
        look = Look(
            rank=rank(),
            size=world_size(),
            adapters=fingerprint(trained),
            tokens=fingerprint(tokens),
            held_share=held_share(loop.attached),
            memory=self.device.memory(),
            loss=self._loss,
        )
        self._looks = gathered(look)
        for look in self._looks:
            self._check_peak(look.memory, f"GPU {look.rank}: " if look.rank else "")

    def _make_batches(self, texts: Texts) -> None:
        """Make the micro-batches of the texts.

        Raises:
            Ended: they cannot be trained on.
        """
        try:
            steps = self._micro_steps
            made = trial_batches(texts, self.config, micro_steps=steps, rank=rank())
        except InputError as error:
            raise Ended(Invalid(rule=ROWS_OF_TEXTS, detail=str(error))) from None
        tokens = (batch["input_ids"].max() for batch in (*made.largest, *made.round))
        known, largest = self.base.model.get_input_embeddings().num_embeddings, int(max(tokens))
        if largest >= known:
            words = f"the texts hold token {largest:,}, and the model knows {known:,}"
            raise Ended(Invalid(rule=TOKENS_OF_TEXTS, detail=words))
        if self.config.packing == "packed" and not takes_positions(self.base.model):
            words = "the model is told no positions of tokens"
            raise Ended(Ineffective(knob="packing", detail=words))
        self._round = made
        self._meter.tokens_per_step = made.loss_tokens_per_step / made.pace

    def _train(self) -> Outcome:
        made = self._round
        with attached(self.base, self.config) as attachment:
            self._loop = loop = TrainingLoop(
                attachment,
                self.config,
                seed=self.base.seed,
                micro_steps=self._micro_steps,
                batches=None if made is None else [made.largest, made.round],
                on_stage=self.device.enter,
            )
            if world_size() > 1:
                # What was sent to make all adapters alike is not a step's.
                self.device.mark().wait()
            try:
                self._fit_8_bits(loop)
                self._enter("warmup")
                self._prove(loop)
                loop.leave_largest()
                while not agreed(self._meter.is_warm()):
                    self._advance(loop)
                    if self._is_out_of_time:
                        raise Ended(OUT_OF_TIME)
                outcome = self._measure(loop)
            except Ended as ended:
                outcome = ended.outcome
            self._enter("detach")
            return outcome

    def _fit_8_bits(self, loop: TrainingLoop) -> None:
        """Fit 8-bit products to real weights, once for all trials on this base.

        Raises:
            Ended: too few of them are close to 16 bits.
        """
        config, base = self.config, self.base
        if not (config.is_8bit_compute and base.is_pretrained) or config.is_sharded:
            return
        if base.eight_bit is None:
            base.eight_bit = loop.fit_8_bits()
            # What that needed is not what a step needs.
            self.device.release()
            self.device.reset_peak()
        fault = too_many(base.eight_bit, config.compute_dtype)
        if fault is not None:
            raise Ended(Ineffective(knob="compute_dtype", detail=fault))

    def _prove(self, loop: TrainingLoop) -> None:
        """Do the steps that have the peak.

        Raises:
            Ended: they do not fit, or are not what was asked for.
        """
        config = self.config
        watch: KernelWatch | ProductWatch | None = None if config.compile else KernelWatch()
        if config.compile and config.is_8bit_compute:
            watch = ProductWatch()
        with self.device.observed():
            for index in range(_OBSERVED_STEPS):
                # The first step may compile, which says nothing of how long the second takes.
                if self.limit.is_over():
                    raise Ended(OUT_OF_TIME)
                # Of compiled layers the second step, without what the compiler itself tries out.
                is_watched = index == int(config.compile)
                with watch if watch and is_watched else contextlib.nullcontext():
                    self._queue(loop, steps=1)
                    self._take_in()
        self._check_all_peaks(loop)
        fault = ineffective(config, StepEvidence(loop, watch, self._looks, self._round))
        if agreed(fault is not None):
            raise Ended(fault or Ineffective(knob="data_parallel", detail="rank 0 found so"))
        model = loop.attached.model.get_base_model()
        if self.texts is not None:
            try:
                with loop.as_trained():
                    check_is_causal(model)
            except InputError as error:
                raise Ended(Invalid(rule=AHEAD_OF_TEXTS, detail=str(error))) from None
        if config.packing == "packed":
            with loop.as_trained():
                self._documents_apart = are_apart(model, loop.largest_batch())

    def _measure(self, loop: TrainingLoop) -> Outcome:
        meter = self._meter
        meter.neighbours.start_measuring()
        self._enter("measure")
        begun, waited = time.perf_counter(), loop.wait_seconds
        meter.energy.begin()
        if self.is_soak:
            while not self._is_over(self._is_half_way(begun)):
                self._advance(loop)
            if not self._is_over(False):
                # With nothing queued in the meantime.
                self._settle()
                meter.energy.end()
                self.evaluate_and_save(loop)
                meter.energy.begin()
                self._advance(loop)
        while not self._is_over(meter.is_enough(time.perf_counter() - begun)):
            self._advance(loop)
        # Of what is queued by now the device does every step, whether anybody asks or not.
        self._settle()
        meter.energy.end()
        self._check_all_peaks(loop)
        is_slow = agreed(self._is_slow)
        has_steps = len(meter.measured) >= self.steps.measured_min
        is_whole = has_steps and (not self.is_soak or self._soak is not None)
        if self._is_out_of_time and not is_slow and not is_whole:
            return OUT_OF_TIME
        elapsed = time.perf_counter() - begun
        measurement = self._measurement(
            loop, elapsed=elapsed, wait_share=(loop.wait_seconds - waited) / elapsed
        )
        if is_slow:
            return PrunedSlow(measurement=measurement)
        if not self.config.is_8bit_compute:
            return Measured(measurement=measurement)
        # Asked by every rank, whatever each has compared before.
        is_over = self.limit.is_over()
        if self.config not in self.compared:
            if is_over:
                return OUT_OF_TIME
            self._enter("compare")
            self.compared[self.config] = compared(loop)
        found = self.compared[self.config]
        detail = unfaithful(found)
        if detail is not None:
            return Ineffective(knob="compute_dtype", detail=detail)
        return Measured(measurement=measurement.model_copy(update={"faithfulness": found}))

    def _is_over(self, is_enough: bool) -> bool:
        """Return whether measuring ends: rank 0 has enough, or an observer or the time ends it."""
        return self._is_out_of_time or agreed(self._is_slow or is_enough)

    def _is_half_way(self, begun: float) -> bool:
        is_late = time.perf_counter() - begun >= self.steps.seconds_max / 2
        return is_late or len(self._meter.measured) >= self.steps.measured_max // 2

    def evaluate_and_save(self, loop: TrainingLoop) -> None:
        """Do what a training does now and then: evaluate, then save a checkpoint.

        Raises:
            RuntimeError: whatever the device raises.
            OSError: there is no room for the checkpoint.
        """
        self._doing, begun = "in an evaluation pass: ", time.perf_counter()
        with self.device.observed():
            # The loss is read back, so the device is done with it.
            loss = loop.evaluate(batches=INTERLUDE_BATCHES)
        evaluated = time.perf_counter()
        self._tell()
        self._doing, saving = "in saving a checkpoint: ", time.perf_counter()
        with scratch("soak") as directory:
            loop.save(directory)
            files = (path for path in directory.rglob("*") if path.is_file())
            size = sum(path.stat().st_size for path in files)
        self._soak = {
            "evaluation_loss": loss,
            "evaluation_seconds": evaluated - begun,
            "checkpoint_bytes": size,
            "checkpoint_seconds": time.perf_counter() - saving,
        }
        self._tell()
        self._doing = ""

    def _advance(self, loop: TrainingLoop) -> None:
        """Queue a step and take in those before it, so that the device is never without work."""
        done = len(self._meter.measured) + len(self._queued)
        ahead_seconds = (len(self._queued) + 1) * self._step_seconds
        self._is_out_of_time = self.limit.is_over(ahead_seconds=ahead_seconds)
        is_last = self._is_out_of_time or agreed(done >= self.steps.measured_max)
        if not is_last:
            # Those of a round are timed as one.
            of_round = self._round and len(self._round.round) // self._micro_steps
            self._queue(loop, steps=of_round or 1)
        self._settle(ahead=0 if is_last else 1)

    def _settle(self, *, ahead: int = 0) -> None:
        """Take in all steps but the newest, and whatever else the device is done with."""
        queued = self._queued
        while len(queued) > ahead or (queued and queued[0].ended[-1].is_passed()):
            self._take_in()

    def _queue(self, loop: TrainingLoop, *, steps: int) -> None:
        """Queue optimizer steps, with a mark where they begin and where each micro-step ends; where
        that takes long, each micro-step is a sign of life."""
        started = time.perf_counter()
        queued = _Queued(self.device.mark(), is_round=loop.is_on_round)

        def note_end() -> None:
            queued.ended.append(self.device.mark())
            if time.perf_counter() - started >= self.silence_seconds:
                self._tell()

        def note_gradients() -> None:
            if queued.is_round:
                queued.gradients.append(self.device.mark())

        for _ in range(steps):
            queued.losses.append(loop.step(on_micro_step=note_end, on_gradients=note_gradients))
            # The loss is on its way to the host behind the last micro-step.
            queued.ended[-1] = self.device.mark()
        self._queued.append(queued)

    def _take_in(self) -> None:
        """Wait for the oldest step that is queued, and take in its seconds and its loss.

        Raises:
            Ended: the loss is no number.
        """
        queued, meter = self._queued.popleft(), self._meter
        is_warmup = self.phase == "warmup"
        for mark in queued.ended:
            mark.wait()
            self._tell()
        self._loss = sum(map(float, queued.losses)) / len(queued.losses)
        if not math.isfinite(self._loss):
            self.is_apart = world_size() > 1
            step = len(meter.warmup) + len(meter.measured)
            raise Ended(Diverged(step=step, detail=f"loss {self._loss}"))
        seconds = [mark.seconds_since(queued.begun) for mark in queued.ended]
        if queued.is_round or self._round is None:
            self._step_seconds = seconds[-1]
            gradients = [mark.seconds_since(queued.begun) for mark in queued.gradients]
            meter.add(seconds, gradients, is_warmup=is_warmup)
        else:
            # They took their time alone: the measured ones do not train on these.
            meter.warmup_spent += seconds[-1]
        if not is_warmup:
            tokens, fastest = meter.tokens_per_step, fastest_median(meter.measured)
            is_slow = self._tell(
                tokens_per_second=tokens / meter.median_seconds,
                tokens_per_second_high=tokens / fastest if fastest else None,
            )
            self._is_slow = is_slow or self._is_slow

    def _measurement(self, loop: TrainingLoop, *, elapsed: float, wait_share: float) -> Measurement:
        """Return what the steps come to: of several GPUs the largest peaks and the mean loss; on
        texts the seconds of a step of their epoch. Those of setting up are not known yet."""
        meter, made, attachment = self._meter, self._round, loop.attached
        median, interval = meter.median_seconds, median_interval(meter.measured)
        pace = 1.0 if made is None else made.pace
        memories = [look.memory for look in self._looks]
        retries = sum(memory.allocator_retries for memory in memories)
        reserved = [memory.peak_reserved_bytes for memory in memories]
        flags = {
            "emulated": self.is_emulated,
            **meter.flags(),
            "allocator_retries": retries > 0,
            "accumulation_extrapolated": self.config.accumulation_steps > self.micro_steps_max,
            DOCUMENTS_TOGETHER: self._documents_apart is False,
            ROUND_EXTRAPOLATED: made is not None and not made.is_as_its_epoch,
        }
        soak = self._soak and SoakReport(
            **self._soak, steps=len(meter.warmup) + len(meter.measured), seconds=elapsed
        )
        of_texts: dict[str, Any] = {}
        if made is not None:
            of_texts = {
                "loss_tokens_per_step": made.loss_tokens_per_step,
                "padding_waste": made.epoch.waste,
                "batch_wait_share": wait_share,
            }
        return Measurement(
            **meter.figures(),
            **of_texts,
            tokens_per_second=meter.tokens_per_step / median,
            cards=len(memories),
            samples_per_second=self.config.samples_per_step / median / pace,
            step_seconds=median * pace,
            step_seconds_ci95=interval and (interval[0] * pace, interval[1] * pace),
            peak_allocated_bytes=max(memory.peak_allocated_bytes for memory in memories),
            peak_reserved_bytes=max(filter(None, reserved), default=None),
            trainable_parameters=sum(p.numel() for p in attachment.trainable_parameters()),
            flops_utilization=self._utilization(loop),
            final_loss=statistics.fmean(look.loss for look in self._looks),
            setup_seconds=0.0,
            allocator_retries=retries,
            flags=tuple(name for name, is_set in flags.items() if is_set),
            quantized_share=self.base.quantized_share,
            compile_seconds=attachment.compilation and attachment.compilation.seconds,
            eight_bit=self.base.eight_bit if self.config.is_8bit_compute else None,
            soak=soak or None,
            documents_apart=self._documents_apart,
        )

    def _utilization(self, loop: TrainingLoop) -> float | None:
        """Model FLOP/s over the peak; recomputation is not counted as work, padding is."""
        if self.peak_flops is None:
            return None
        config = self.config
        shapes = [(config.micro_batch_size * config.rows_per_sample, config.seq_len)]
        if self._round is not None:
            shapes = [tuple(batch["input_ids"].shape) for batch in self._round.round]
        work = 0.0
        for rows, width in shapes:
            # Flattened rows stay apart: no token has more before it than its own row has.
            before = min(width, config.seq_len)
            each = flops_per_token(loop.attached, self.base.model.config, before, config.references)
            if each is None:
                return None
            work += rows * width * each
        per_step = config.accumulation_steps * work / len(shapes)
        return per_step / self._meter.median_seconds / self.peak_flops
