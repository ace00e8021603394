"""Owns one trial on a resident base: attach, warm up, measure, detach, and what came of it.

Knows nothing of processes or pipes: signs of life go to a callback.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.space import MICRO_STEPS_TIMED, StepBudget
from storage.records import (
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
    Stage,
    over_budget,
)
from sweep.training.adapters import Attached, attached
from sweep.training.device import Device
from sweep.training.faithful import compared, unfaithful
from sweep.training.flops import flops_per_step
from sweep.training.meter import CardReader, Meter, NeighbourWatch, StepWork, fastest_median
from sweep.training.model import BaseModel
from sweep.training.proof import KernelWatch, ProductWatch, ineffective
from sweep.training.queued import SILENCE_SECONDS, StepQueue
from sweep.training.soak import INTERLUDE_BATCHES, Interlude
from sweep.training.step import TrainingLoop
from sweep.training.team import ALONE, Look, Team
from sweep.training.texts import Texts, TextsRound, are_apart, is_packed
from sweep.training.trial_texts import looks_ahead, round_of, with_texts
from sweep.training.verdicts import verdict_of

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
        is_soak: whether it trains until its budget is spent, and does on the way what a training
            does now and then.
        compared: what is known by now of configurations' 8-bit compute.
        team: who trains it together with this process; None where nobody does.
        phase: where the trial is.
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
    team: Team | None = None
    silence_seconds: float = SILENCE_SECONDS
    phase: Phase = "build"
    report: Callable[[Beat], bool] = lambda _: False
    started: float = field(default_factory=time.perf_counter)
    """When the trial began, its build included."""
    _meter: Meter = field(init=False)
    _loop: TrainingLoop | None = None
    _queued: StepQueue = field(init=False)
    _loss: float = 0.0
    """Of the newest step that is done."""
    _is_slow: bool = False
    _interlude: Interlude | None = None
    _round: TextsRound | None = None
    _documents_apart: bool | None = None
    _is_team_done: bool = False
    """Whether the others took off what was attached, as this process does."""
    _looks: tuple[Look, ...] = ()
    """What each of the others showed last."""
    _waited: float = 0.0
    """Seconds in which the host got its micro-batches before the measured steps."""

    def __post_init__(self) -> None:
        neighbours = NeighbourWatch(
            self.device,
            self.card,
            self.budget_bytes,
            has_paged_memory=self.config.is_paged,
        )
        self._meter = Meter(self.config, self.steps, self.device, neighbours, self.is_soak)
        self._interlude = Interlude(self.device) if self.is_soak else None
        self._queued = StepQueue(self.device, silence_seconds=self.silence_seconds)

    def run(self) -> Outcome:
        """Return how it ended. On return the base is as it was before, whatever happened.

        Raises:
            Exception: what is neither memory nor the compiler nor a rule.
        """
        try:
            self.device.reset_peak()
            self._meter.neighbours.start()
            self._enter("attach")
            outcome = self._excess() or self._unfit_texts() or self._attach_and_train()
        except InputError as error:
            outcome = Invalid(rule="target_modules", detail=str(error))
        except Exception as error:
            verdict = self._verdict(error)
            if verdict is None:
                raise
            outcome = verdict
        finally:
            if self.team is not None and not self._is_team_done:
                # They wait in the middle of a step for what will not come.
                self.team.abandon()
        # Outside the except blocks: a caught exception keeps the frames, and so the tensors, alive.
        self._enter("detach")
        self._loop = None
        self._queued.clear()
        self.device.release()
        return _with_setup(outcome, time.perf_counter() - self.started)

    def _unfit_texts(self) -> Invalid | Ineffective | None:
        """Make the micro-batches of the texts; return why they cannot be trained on."""
        if self.texts is None:
            return None
        micro_steps = min(self.config.accumulation_steps, self.micro_steps_max)
        made = round_of(self.texts, self.config, self.base.model, micro_steps=micro_steps)
        if not isinstance(made, TextsRound):
            return made
        self._round = made
        each = made.loss_tokens_per_step / made.pace
        self._meter.work = StepWork(each, each / self.config.accumulation_steps)
        return None

    def _vocab_size(self) -> int:
        return int(self.base.model.get_input_embeddings().num_embeddings)

    def _attach_and_train(self) -> Outcome:
        device = self.device.torch_device
        with attached(self.base, self.config, device=device, seed=self.seed) as attachment:
            outcome = self._train(attachment)
            self._enter("detach")
            if self.team is not None:
                self.team.end()
                self._is_team_done = True
            return outcome

    def _enter(self, phase: Phase) -> None:
        """Say that a phase begins, so that its own deadline holds and a failure is laid to it."""
        if phase != self.phase:
            self.phase = phase
            self.report(Beat(phase=phase, step=0))

    def _verdict(self, error: Exception) -> Outcome | None:
        """Return what an exception means; None for the unknown."""
        return verdict_of(
            error,
            self.config,
            device=self.device,
            loop=self._loop,
            was_robbed=self._meter.neighbours.have_robbed(),
            doing=self._doing(),
        )

    def _doing(self) -> str:
        """Return what else than a training step was being done, to begin a sentence with."""
        doing = None if self._interlude is None else self._interlude.doing
        return "" if doing is None else f"in {doing}: "

    def _excess(self) -> OutOfMemory | None:
        """Return out of memory where the peak so far is not within budget and device.

        The allocator's cap is on what it reserves, and the CPU's on more than tensors: only the
        peak itself, read back, says that a trial was within its budget to the byte.
        """
        return self._beyond(
            self.device.peak_allocated_bytes(),
            stage=self.device.peak_stage(),
            spilled=self.device.spilled_bytes(),
        )

    def _beyond(self, peak: int, *, stage: Stage, spilled: int) -> OutOfMemory | None:
        over = None
        if self.budget_bytes is not None:
            over = over_budget(peak, budget_bytes=self.budget_bytes, stage=stage)
        if over is None and spilled:
            over = OutOfMemory(
                stage=stage,
                peak_allocated_bytes=peak,
                detail=f"the driver put {spilled:,} bytes into the host's memory",
            )
        return over

    def _fault_of_others(self) -> Outcome | None:
        """Have each of the others show itself; return what is the matter with one of them."""
        self._looks = () if self.team is None else tuple(self.team.look())
        for look in self._looks:
            over = self._beyond(
                look.peak_allocated_bytes, stage=look.peak_stage, spilled=look.spilled_bytes
            )
            if over is not None:
                return over.model_copy(update={"detail": f"card {look.rank}: {over.detail}"})
            if look.loss is None:
                return Diverged(step=self._meter.steps_done, detail=f"loss of card {look.rank}")
        return None

    def _train(self, attachment: Attached) -> Outcome:
        loop = TrainingLoop(
            attachment,
            self.config,
            vocab_size=self._vocab_size(),
            seed=self.seed,
            micro_steps=min(self.config.accumulation_steps, self.micro_steps_max),
            texts=self._round,
            on_stage=self.device.enter,
            place=ALONE if self.team is None else self.team.place,
        )
        self._loop = loop
        if self.team is not None:
            # What was sent to make all adapters alike is not a step's.
            self.device.mark().wait()
        self._enter("warmup")
        return self._warm_up(attachment, loop) or self._measure(attachment, loop)

    def _warm_up(self, attachment: Attached, loop: TrainingLoop) -> Outcome | None:
        """Do the steps that are not the steady rate; return an outcome only where they end the
        trial."""
        watch: KernelWatch | ProductWatch | None = None if self.config.compile else KernelWatch()
        if self.config.compile and self.config.is_8bit_compute:
            watch = ProductWatch()
        # Of compiled layers the second step, without what the compiler itself tries out.
        watched = int(self.config.compile)
        with self.device.observed():
            for index in range(_OBSERVED_STEPS):
                with watch if watch and index == watched else contextlib.nullcontext():
                    self._queue(loop, steps=1)
                    diverged = self._take_in()
                if diverged is not None:
                    return diverged
        fault: Outcome | None = self._excess() or self._fault_of_others()
        fault = fault or ineffective(
            self.config, attached=attachment, loop=loop, watch=watch, others=self._looks
        )
        fault = fault or self._looks_ahead(attachment, loop)
        if fault is None and is_packed(self.config):
            self._documents_apart = self._keeps_documents_apart(attachment, loop)
        loop.leave_largest()
        while fault is None and not self._meter.is_warm():
            fault = self._advance(loop)
        return fault

    def _looks_ahead(self, attachment: Attached, loop: TrainingLoop) -> Invalid | None:
        """Return why rows of texts cannot be padded for this model; None where they can."""
        if self.texts is None:
            return None
        with loop.as_trained():
            return looks_ahead(attachment.model.get_base_model())

    def _keeps_documents_apart(self, attachment: Attached, loop: TrainingLoop) -> bool | None:
        with loop.as_trained():
            return are_apart(
                attachment.model.get_base_model(),
                loop.largest_batch(),
                vocab_size=self._vocab_size(),
            )

    def _measure(self, attachment: Attached, loop: TrainingLoop) -> Outcome:
        self._meter.neighbours.start_measuring()
        self._enter("measure")
        fault: Outcome | None = None
        begun, self._waited = time.perf_counter(), loop.wait_seconds
        self._meter.energy.begin()
        while fault is None and not self._is_over(begun):
            fault = self._pause(loop, begun) or self._advance(loop)
        # Of what is queued by now the device does every step, whether anybody asks or not.
        fault = fault or self._drain()
        self._meter.energy.end()
        fault = fault or self._excess() or self._fault_of_others()
        if fault is not None:
            return fault
        elapsed = time.perf_counter() - begun
        measurement = self._of_texts(
            self._measurement(attachment, elapsed), loop, elapsed_seconds=elapsed
        )
        if self._is_slow:
            return PrunedSlow(measurement=measurement)
        return self._faithful(measurement, attachment, loop)

    def _faithful(
        self, measurement: Measurement, attachment: Attached, loop: TrainingLoop
    ) -> Measured | Ineffective:
        """Return what was measured, where 8 bits compute nearly what 16 do; once for each
        configuration that this process trains."""
        if not self.config.is_8bit_compute:
            return Measured(measurement=measurement)
        if self.config not in self.compared:
            self._enter("compare")
            self.compared[self.config] = compared(attachment, loop)
        found = self.compared[self.config]
        detail = unfaithful(found)
        if detail is not None:
            return Ineffective(knob="compute_dtype", detail=detail)
        return Measured(measurement=measurement.model_copy(update={"faithfulness": found}))

    def _is_over(self, begun: float) -> bool:
        """Whether no further step is needed; a soak goes on until its interlude was played."""
        if self._is_slow or (self._interlude is not None and not self._interlude.is_over):
            return self._is_slow
        return self._meter.is_enough(time.perf_counter() - begun)

    def _pause(self, loop: TrainingLoop, begun: float) -> Outcome | None:
        """Play a soak's interlude half-way through it, with nothing queued in the meantime."""
        interlude, done = self._interlude, len(self._meter.measured)
        if interlude is None or interlude.is_over:
            return None
        is_late = time.perf_counter() - begun >= self.steps.seconds_max / 2
        if not is_late and done < self.steps.measured_max // 2:
            return None
        fault = self._drain()
        if fault is None:
            self._meter.energy.end()
            if self.team is not None and self.config.is_sharded:
                # No card has all that a pass takes.
                self.team.evaluate(batches=INTERLUDE_BATCHES)
            interlude.play(loop, beat=lambda: self.report(Beat("measure", done)))
            self._meter.energy.begin()
        return fault

    def _drain(self) -> Outcome | None:
        """Take in all that is queued; return an outcome only where it ends the trial."""
        fault: Outcome | None = None
        while fault is None and self._queued:
            fault = self._take_in()
        return fault

    def _advance(self, loop: TrainingLoop) -> Outcome | None:
        """Queue a step and take in those before it, so that the device is never without work;
        return an outcome only where they end the trial."""
        is_last = len(self._meter.measured) + len(self._queued) >= self.steps.measured_max
        if not is_last:
            self._queue(loop, steps=self._steps_in_row)
        left = 0 if is_last else 1
        while len(self._queued) > left or self._queued.is_first_done:
            diverged = self._take_in()
            if diverged is not None:
                return diverged
        return None

    @property
    def _steps_in_row(self) -> int:
        """Optimizer steps that are timed as one."""
        return 1 if self._round is None else self._round.steps

    def _queue(self, loop: TrainingLoop, *, steps: int) -> None:
        """Queue optimizer steps; where that takes long, each micro-step is a sign of life."""

        def beat() -> None:
            self.report(Beat(phase=self.phase, step=self._steps_of_phase()))

        if self.team is not None:
            self.team.step()
        self._queued.add(loop, steps=steps, beat=beat)

    def _take_in(self) -> Diverged | None:
        """Wait for the oldest step that is queued, and take in its seconds and its loss."""
        step = self._queued.take()
        is_warmup = self.phase == "warmup"
        done = self._steps_of_phase()
        for mark in step.ended:
            mark.wait()
            self.report(Beat(phase=self.phase, step=done))
        self._loss = step.loss
        if not math.isfinite(self._loss):
            return Diverged(step=self._meter.steps_done, detail=f"loss {self._loss}")
        seconds = step.seconds_until(step.ended)
        if step.is_round:
            gradients = step.seconds_until(step.gradients)
            self._meter.add(seconds, is_warmup=is_warmup, gradients=gradients)
        elif self._round is not None:
            self._meter.add_other(seconds)
        else:
            self._meter.add(seconds, is_warmup=is_warmup)
        if not is_warmup:
            self._is_slow = self._report_rate() or self._is_slow
        return None

    def _steps_of_phase(self) -> int:
        return len(self._meter.warmup if self.phase == "warmup" else self._meter.measured)

    def _report_rate(self) -> bool:
        measured = self._meter.measured
        return self.report(
            Beat(
                phase=self.phase,
                step=len(measured),
                median_seconds=self._meter.median_seconds,
                fastest_median_seconds=fastest_median(measured),
                tokens_per_step=None if self._meter.work is None else self._meter.work.tokens,
            )
        )

    def _measurement(self, attachment: Attached, elapsed_seconds: float) -> Measurement:
        compilation = attachment.compilation
        measured = self._meter.measurement(
            final_loss=self._loss,
            trainable_parameters=sum(p.numel() for p in attachment.trainable_parameters()),
            flops_utilization=self._utilization(attachment),
            quantized_share=self.base.quantized_share,
            compile_seconds=None if compilation is None else compilation.seconds,
            is_emulated=self.is_emulated,
            is_extrapolated=self.config.accumulation_steps > self.micro_steps_max,
        )
        measured = of_all(measured, self._looks)
        if self._interlude is None:
            return measured
        soak = self._interlude.report(steps=self._meter.steps_done, seconds=elapsed_seconds)
        return measured.model_copy(update={"soak": soak})

    def _of_texts(
        self, measured: Measurement, loop: TrainingLoop, *, elapsed_seconds: float
    ) -> Measurement:
        """Return a measurement with what is known of its texts, where it is of any."""
        if self._round is None:
            return measured
        return with_texts(
            measured,
            self._round,
            documents_apart=self._documents_apart,
            batch_wait_share=(loop.wait_seconds - self._waited) / elapsed_seconds,
        )

    def _utilization(self, attachment: Attached) -> float | None:
        """Model FLOP/s over the peak; recomputation is not counted as work, pads are."""
        if self.peak_flops is None:
            return None
        shapes = None if self._round is None else self._round.shapes
        work = flops_per_step(attachment, self.base.model.config, self.config, shapes=shapes)
        return work / self._meter.median_seconds / self.peak_flops


def of_all(measured: Measurement, others: Sequence[Look]) -> Measurement:
    """Return a measurement of one process's card as that of all of them: the largest peaks, the
    mean loss. The steps of one are those of all."""
    if not others:
        return measured
    reserved = [look.peak_reserved_bytes for look in others if look.peak_reserved_bytes is not None]
    retries = measured.allocator_retries + sum(look.allocator_retries for look in others)
    losses = [measured.final_loss, *(look.loss for look in others if look.loss is not None)]
    flags = {*measured.flags, *(("allocator_retries",) if retries else ())}
    changes = {
        "cards": 1 + len(others),
        "peak_allocated_bytes": max(
            measured.peak_allocated_bytes, *(look.peak_allocated_bytes for look in others)
        ),
        "peak_reserved_bytes": max([measured.peak_reserved_bytes or 0, *reserved]) or None,
        "allocator_retries": retries,
        "final_loss": statistics.fmean(losses),
        "flags": tuple(sorted(flags)),
    }
    return measured.model_copy(update=changes)


def _with_setup(outcome: Outcome, total_seconds: float) -> Outcome:
    """Fill in the seconds outside the measured steps, known only after the detach."""
    if not isinstance(outcome, Measured | PrunedSlow):
        return outcome
    measurement = outcome.measurement
    setup = max(0.0, total_seconds - measurement.measured_seconds)
    return outcome.model_copy(
        update={"measurement": measurement.model_copy(update={"setup_seconds": setup})}
    )
