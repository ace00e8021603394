"""One trial on a resident base: attach, warm up, measure, detach, and what came of it."""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, words_of
from search_spaces.space import MICRO_STEPS_TIMED, StepBudget
from storage.records import (
    NEIGHBOUR,
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
    over_budget,
)
from sweep.data.probing import check_is_causal
from sweep.training.adapters import attached, held_share, local
from sweep.training.device import Device, Mark, Memory
from sweep.training.exceptions import DETAIL_LENGTH, knob_at_fault, out_of_memory
from sweep.training.meter import (
    CardReader,
    Meter,
    NeighbourWatch,
    fastest_median,
    flops_per_step,
    median_interval,
)
from sweep.training.model import BaseModel
from sweep.training.proof import KernelWatch, ProductWatch, compared, ineffective, unfaithful
from sweep.training.step import TrainingLoop
from sweep.training.team import Look, agreed, fingerprint, gathered, here
from sweep.training.texts import Texts, TextsRound, are_apart, is_packed, takes_positions

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


@dataclass(frozen=True)
class Beat:
    """One sign of life. Seconds are there once a measured step has ended; None for a micro-batch
    within a step, and where a phase begins."""

    phase: Phase
    step: int
    median_seconds: float | None = None
    fastest_median_seconds: float | None = None
    """The least that the median step can still turn out to be."""
    tokens_per_step: float | None = None
    """That carry loss; None where a step has as many as the configuration says."""


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
        report: called with each `Beat`; True stops the trial as slow.
        peak_flops: the device's dense FLOP/s for the compute dtype; None where unknown.
        budget_bytes: a measured peak above it does not fit; None for no budget.
        micro_steps_max: most micro-steps of one optimizer step that are really run; the seconds of
            a longer accumulation are derived.
        texts: what it trains on; None for full-length random rows.
        is_soak: whether it trains until its budget is spent, and evaluates and saves on the way.
            Both are where a training dies that fitted: in evaluation mode the fused loss holds the
            logits after all, and what was freed between the steps comes back cut up.
        compared: what is known by now of configurations' 8-bit compute.
        phase: where the trial is.
        is_apart: whether it ended where other ranks that train it go on, for good.
    """

    base: BaseModel
    config: TrialConfig
    steps: StepBudget
    device: Device
    card: CardReader
    seed: int
    peak_flops: float | None = None
    is_emulated: bool = False
    budget_bytes: int | None = None
    texts: Texts | None = None
    micro_steps_max: int = MICRO_STEPS_TIMED
    is_soak: bool = False
    compared: dict[TrialConfig, Faithfulness] = field(default_factory=dict)
    silence_seconds: float = SILENCE_SECONDS
    phase: Phase = "build"
    report: Callable[[Beat], bool] = lambda _: False
    started: float = field(default_factory=time.perf_counter)
    """When the trial began, its build included."""
    is_apart: bool = False
    _loop: TrainingLoop | None = None
    _queued: deque[_Queued] = field(default_factory=deque)
    """Steps that are not taken in yet, the oldest first."""
    _loss: float = 0.0
    """Of the newest step that is done."""
    _is_slow: bool = False
    _doing: str = ""
    """What else than a training step is being done, to begin a sentence with."""
    _soak: dict[str, Any] | None = None
    """What was evaluated and saved."""
    _round: TextsRound | None = None
    _documents_apart: bool | None = None
    _looks: list[Look] = field(default_factory=list)
    """What each rank showed last."""

    def __post_init__(self) -> None:
        neighbours = NeighbourWatch(
            self.device, self.card, self.budget_bytes, has_paged_memory=self.config.is_paged
        )
        self._meter = Meter(self.config, self.steps, neighbours, self.is_soak)
        self._micro_steps = min(self.config.accumulation_steps, self.micro_steps_max)
        self._vocab_size = int(self.base.model.get_input_embeddings().num_embeddings)

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
            outcome, self.is_apart = ended.outcome, not here().is_alone
        except InputError as error:
            outcome = Invalid(rule="target_modules", detail=str(error))
        except Exception as error:
            knob = knob_at_fault(error, self.config)
            if self.device.ran_out(error):
                outcome = out_of_memory(
                    error,
                    self.config,
                    device=self.device,
                    loop=self._loop,
                    doing=self._doing,
                    flags=(NEIGHBOUR,) if self._meter.neighbours.have_robbed() else (),
                )
            elif knob is not None:
                detail = (self._doing + words_of(error))[:DETAIL_LENGTH]
                outcome = Ineffective(knob=knob, detail=detail)
            else:
                raise
            self.is_apart = not here().is_alone
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
            self.report(Beat(phase=phase, step=0))

    def _beat(self) -> None:
        done = self._meter.warmup if self.phase == "warmup" else self._meter.measured
        self.report(Beat(phase=self.phase, step=len(done)))

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
        place, trained, tokens = here(), list[torch.Tensor](), list[torch.Tensor]()
        if not place.is_alone:
            # Nobody compares what a single process has.
            trained = [local(p) for p in loop.attached.trainable_parameters()]
            tokens = [loop.newest]
        look = Look(
            rank=place.rank,
            size=place.size,
            adapters=fingerprint(trained),
            tokens=fingerprint(tokens),
            held_share=held_share(loop.attached),
            memory=self.device.memory(),
            loss=self._loss,
        )
        self._looks = gathered(look)
        for look in self._looks:
            self._check_peak(look.memory, f"card {look.rank}: " if look.rank else "")

    def _make_batches(self, texts: Texts) -> None:
        """Make the micro-batches of the texts.

        Raises:
            Ended: they cannot be trained on.
        """
        try:
            made = TextsRound(texts, self.config, micro_steps=self._micro_steps)
        except InputError as error:
            raise Ended(Invalid(rule=ROWS_OF_TEXTS, detail=str(error))) from None
        largest, known = made.largest_token(), self._vocab_size
        if largest >= known:
            words = f"the texts hold token {largest:,}, and the model knows {known:,}"
            raise Ended(Invalid(rule=TOKENS_OF_TEXTS, detail=words))
        if is_packed(self.config) and not takes_positions(self.base.model):
            words = "the model is told no positions of tokens"
            raise Ended(Ineffective(knob="packing", detail=words))
        self._round = made
        self._meter.tokens_per_step = made.loss_tokens_per_step / made.pace

    def _train(self) -> Outcome:
        place, device = here(), self.device.torch_device
        with attached(self.base, self.config, device=device, seed=self.seed) as attachment:
            self._loop = loop = TrainingLoop(
                attachment,
                self.config,
                vocab_size=self._vocab_size,
                seed=self.seed,
                micro_steps=self._micro_steps,
                texts=self._round,
                on_stage=self.device.enter,
                place=place,
            )
            if not place.is_alone:
                # What was sent to make all adapters alike is not a step's.
                self.device.mark().wait()
            self._enter("warmup")
            try:
                self._prove(loop)
                loop.leave_largest()
                while not agreed(self._meter.is_warm()):
                    self._advance(loop)
                outcome = self._measure(loop)
            except Ended as ended:
                outcome = ended.outcome
            self._enter("detach")
            return outcome

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
                # Of compiled layers the second step, without what the compiler itself tries out.
                is_watched = index == int(config.compile)
                with watch if watch and is_watched else contextlib.nullcontext():
                    self._queue(loop, steps=1)
                    self._take_in()
        self._check_all_peaks(loop)
        others = [look for look in self._looks if look.rank != here().rank]
        fault = ineffective(config, loop=loop, watch=watch, others=others)
        if agreed(fault is not None):
            raise Ended(fault or Ineffective(knob="data_parallel", detail="rank 0 found so"))
        model = loop.attached.model.get_base_model()
        if self.texts is not None:
            try:
                with loop.as_trained():
                    check_is_causal(model)
            except InputError as error:
                raise Ended(Invalid(rule=AHEAD_OF_TEXTS, detail=str(error))) from None
        if is_packed(config):
            with loop.as_trained():
                largest = loop.largest_batch()
                self._documents_apart = are_apart(model, largest, vocab_size=self._vocab_size)

    def _measure(self, loop: TrainingLoop) -> Outcome:
        meter = self._meter
        meter.neighbours.start_measuring()
        self._enter("measure")
        begun, waited = time.perf_counter(), loop.wait_seconds
        meter.energy.begin()
        if self.is_soak:
            while not agreed(self._is_slow or self._is_half_way(begun)):
                self._advance(loop)
            if not agreed(self._is_slow):
                # With nothing queued in the meantime.
                self._drain()
                meter.energy.end()
                self.evaluate_and_save(loop)
                meter.energy.begin()
                self._advance(loop)
        while not agreed(self._is_slow or meter.is_enough(time.perf_counter() - begun)):
            self._advance(loop)
        # Of what is queued by now the device does every step, whether anybody asks or not.
        self._drain()
        meter.energy.end()
        self._check_all_peaks(loop)
        elapsed = time.perf_counter() - begun
        measurement = self._measurement(
            loop, elapsed=elapsed, wait_share=(loop.wait_seconds - waited) / elapsed
        )
        if agreed(self._is_slow):
            return PrunedSlow(measurement=measurement)
        if not self.config.is_8bit_compute:
            return Measured(measurement=measurement)
        if self.config not in self.compared:
            self._enter("compare")
            self.compared[self.config] = compared(loop)
        found = self.compared[self.config]
        detail = unfaithful(found)
        if detail is not None:
            return Ineffective(knob="compute_dtype", detail=detail)
        return Measured(measurement=measurement.model_copy(update={"faithfulness": found}))

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
        self._beat()
        self._doing, saving = "in saving a checkpoint: ", time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="sweep-soak-") as name:
            loop.save(Path(name))
            files = (path for path in Path(name).rglob("*") if path.is_file())
            size = sum(path.stat().st_size for path in files)
        self._soak = {
            "evaluation_loss": loss,
            "evaluation_seconds": evaluated - begun,
            "checkpoint_bytes": size,
            "checkpoint_seconds": time.perf_counter() - saving,
        }
        self._beat()
        self._doing = ""

    def _advance(self, loop: TrainingLoop) -> None:
        """Queue a step and take in those before it, so that the device is never without work."""
        done = len(self._meter.measured) + len(self._queued)
        is_last = agreed(done >= self.steps.measured_max)
        if not is_last:
            # Those of a round are timed as one.
            self._queue(loop, steps=1 if self._round is None else self._round.steps)
        left = 0 if is_last else 1
        while len(self._queued) > left or (self._queued and self._queued[0].ended[-1].is_passed()):
            self._take_in()

    def _drain(self) -> None:
        while self._queued:
            self._take_in()

    def _queue(self, loop: TrainingLoop, *, steps: int) -> None:
        """Queue optimizer steps, with a mark where they begin and where each micro-step ends; where
        that takes long, each micro-step is a sign of life."""
        started = time.perf_counter()
        queued = _Queued(self.device.mark(), is_round=loop.is_on_round)

        def note_end() -> None:
            queued.ended.append(self.device.mark())
            if time.perf_counter() - started >= self.silence_seconds:
                self._beat()

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
            self._beat()
        self._loss = sum(map(float, queued.losses)) / len(queued.losses)
        if not math.isfinite(self._loss):
            self.is_apart = not here().is_alone
            step = len(meter.warmup) + len(meter.measured)
            raise Ended(Diverged(step=step, detail=f"loss {self._loss}"))
        seconds = [mark.seconds_since(queued.begun) for mark in queued.ended]
        if queued.is_round or self._round is None:
            gradients = [mark.seconds_since(queued.begun) for mark in queued.gradients]
            meter.add(seconds, is_warmup=is_warmup, gradients=gradients or None)
        else:
            # They took their time alone: the measured ones do not train on these.
            meter.warmup_spent += seconds[-1]
        if not is_warmup:
            beat = Beat(
                phase=self.phase,
                step=len(meter.measured),
                median_seconds=meter.median_seconds,
                fastest_median_seconds=fastest_median(meter.measured),
                tokens_per_step=None if self._round is None else meter.tokens_per_step,
            )
            self._is_slow = self.report(beat) or self._is_slow

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
                "padding_waste": made.padding_waste,
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
            soak=soak or None,
            documents_apart=self._documents_apart,
        )

    def _utilization(self, loop: TrainingLoop) -> float | None:
        """Model FLOP/s over the peak; recomputation is not counted as work, padding is."""
        if self.peak_flops is None:
            return None
        full = [(self.config.micro_batch_size, self.config.seq_len)]
        shapes = full if self._round is None else self._round.shapes
        model_config = self.base.model.config
        work = flops_per_step(loop.attached, model_config, self.config, shapes=shapes)
        return None if work is None else work / self._meter.median_seconds / self.peak_flops
