"""Owns one trial on a resident base: attach, warm up, measure, detach, and what came of it.

Knows nothing of processes or pipes: signs of life go to a callback.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedConfig

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, words_of
from search_spaces.linears import attention_width, training_flops_per_token
from search_spaces.space import MICRO_STEPS_TIMED, StepBudget
from storage.records import (
    Diverged,
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
from sweep.training.failures import (
    knob_of_kernel,
    lacks_kernel_resources,
    requested_bytes,
)
from sweep.training.meter import (
    NEIGHBOUR_BYTES,
    NEIGHBOUR_BYTES_MEASURING,
    CardReader,
    CardReading,
    is_precise,
    is_steady,
    median_interval,
)
from sweep.training.model import BaseModel
from sweep.training.proof import KernelWatch, ineffective, is_from_the_compiler
from sweep.training.step import TrainingLoop

_OBSERVED_STEPS = 2
"""The first step makes the optimizer's state, the second has it from the start: the peak is in one
of them.
"""
_DETAIL_LENGTH = 600
_STEPS_TO_JUDGE = 3
_LENIENCY = 0.7
"""Share of the fastest of a few steps that the median is surely above, also on a busy machine."""


@dataclass(frozen=True)
class Beat:
    """One sign of life. Seconds are of the step that just ended; None for a micro-batch within a
    step, and where a phase begins.
    """

    phase: Phase
    step: int
    median_seconds: float | None = None
    fastest_median_seconds: float | None = None
    """The least that the median step can still turn out to be."""


@dataclass
class Trial:
    """One configuration on one base, under a step budget.

    Attributes:
        report: called with each `Beat`; True stops the trial as slow.
        peak_flops: the device's dense FLOP/s for the compute dtype; None where unknown.
        budget_bytes: a measured peak above it does not fit; None for no budget.
        micro_steps_max: most micro-steps of one optimizer step that are really run; the seconds of
            a longer accumulation are derived.
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
    micro_steps_max: int = MICRO_STEPS_TIMED
    phase: Phase = "build"
    report: Callable[[Beat], bool] = lambda _: False
    started: float = field(default_factory=time.perf_counter)
    """When the trial began, its build included."""
    _warmup: list[float] = field(default_factory=list)
    _measured: list[float] = field(default_factory=list)
    _spent: dict[Phase, float] = field(default_factory=lambda: {"warmup": 0.0, "measure": 0.0})
    """Seconds really spent in steps, where the step's own are derived."""
    _readings: list[CardReading] = field(default_factory=list)
    _rooms: dict[Phase, int] = field(default_factory=dict)
    """What the device had for this process when a phase began."""
    _is_crowded: bool = False
    """Whether others took a noticeable part of the device since."""
    _loop: TrainingLoop | None = None

    def run(self) -> Outcome:
        """Return how it ended. On return the base is as it was before, whatever happened.

        Raises:
            Exception: what is neither memory nor the compiler nor a rule.
        """
        try:
            self.device.reset_peak()
            self._enter("attach")
            outcome = self._excess() or self._attach_and_train()
        except InputError as error:
            outcome = Invalid(rule="target_modules", detail=str(error))
        except Exception as error:
            verdict = self._verdict(error)
            if verdict is None:
                raise
            outcome = verdict
        # Outside the except blocks: a caught exception keeps the frames, and so the tensors, alive.
        self._enter("detach")
        self._loop = None
        self.device.release()
        return _with_setup(outcome, time.perf_counter() - self.started)

    def _attach_and_train(self) -> Outcome:
        with attached(self.base, self.config) as attachment:
            outcome = self._train(attachment)
            self._enter("detach")
            return outcome

    def _enter(self, phase: Phase) -> None:
        """Say that a phase begins, so that its own deadline holds and a failure is laid to it."""
        if phase == self.phase:
            return
        self.phase = phase
        room = self.device.room_bytes() if phase in ("attach", "measure") else None
        if room is not None:
            self._rooms[phase] = room
        self.report(Beat(phase=phase, step=0))

    def _verdict(self, error: Exception) -> Outcome | None:
        """Return what an exception means, in strings and numbers alone; None for the unknown."""
        detail = words_of(error)[:_DETAIL_LENGTH]
        if lacks_kernel_resources(error):
            return Ineffective(knob=knob_of_kernel(error, self.config), detail=detail)
        if self.device.ran_out(error):
            return OutOfMemory(
                stage=self._stage(),
                step=0 if self._loop is None else self._loop.micro_step,
                requested_bytes=requested_bytes(error),
                peak_allocated_bytes=self.device.peak_allocated_bytes(),
                detail=detail,
                flags=("neighbour",) if self._was_robbed() else (),
            )
        if self.config.compile and is_from_the_compiler(error):
            return Ineffective(knob="compile", detail=detail)
        return None

    def _stage(self) -> Stage:
        """Return the stage of a failure: the base is there, so it is not that of loading it."""
        if self._loop is None or self._loop.stage == "load":
            return "forward"
        return self._loop.stage

    def _excess(self) -> OutOfMemory | None:
        """Return out of memory where the peak so far is not within budget and device."""
        stage = self.device.peak_stage()
        peak = self.device.peak_allocated_bytes()
        spilled = self.device.spilled_bytes()
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

    def _was_robbed(self) -> bool:
        """Whether another process holds what the budget had promised to this one."""
        room = self.device.room_bytes()
        is_short = room is not None and self.budget_bytes is not None and room < self.budget_bytes
        return is_short and (self._has_lost_room() or self.card.read().has_neighbour)

    def _has_lost_room(self) -> bool:
        """Whether others took a noticeable part of the device since the trial, or measuring, began.

        Paged buffers of this process's own count as others': nothing follows from them.
        """
        room = self.device.room_bytes()
        if room is None or self.config.optimizer.startswith("paged"):
            return False
        at_start = self._rooms.get("attach", room)
        at_measuring = self._rooms.get("measure", room)
        return at_start - room > NEIGHBOUR_BYTES or at_measuring - room > NEIGHBOUR_BYTES_MEASURING

    def _train(self, attachment: Attached) -> Outcome:
        vocab_size = int(self.base.model.get_input_embeddings().num_embeddings)
        loop = TrainingLoop(
            attachment,
            self.config,
            vocab_size=vocab_size,
            seed=self.seed,
            micro_steps=min(self.config.accumulation_steps, self.micro_steps_max),
            on_stage=self.device.enter,
        )
        self._loop = loop
        self._enter("warmup")
        outcome = self._warm_up(attachment, loop)
        if outcome is None:
            self._enter("measure")
            outcome = self._measure(attachment, loop)
        return outcome

    def _warm_up(self, attachment: Attached, loop: TrainingLoop) -> Outcome | None:
        """Do the steps that are not the steady rate; return an outcome only where they end the
        trial.
        """
        watch = None if self.config.compile else KernelWatch()
        with self.device.observed():
            for index in range(_OBSERVED_STEPS):
                if index == 0 and watch is not None:
                    with watch:
                        loss = self._timed(loop, self._warmup, "warmup")
                else:
                    loss = self._timed(loop, self._warmup, "warmup")
                if not math.isfinite(loss):
                    return Diverged(step=index, detail=f"loss {loss}")
        fault = self._excess() or ineffective(
            self.config, attached=attachment, loop=loop, watch=watch
        )
        while fault is None and not self._is_warm():
            self._timed(loop, self._warmup, "warmup")
        return fault

    def _is_warm(self) -> bool:
        done = len(self._warmup)
        if done >= self.steps.warmup_max:
            return True
        return done >= self.steps.warmup_min and (
            done <= _OBSERVED_STEPS - 1 or is_steady(self._warmup)
        )

    def _measure(self, attachment: Attached, loop: TrainingLoop) -> Outcome:
        loss, is_slow = 0.0, False
        begun = time.perf_counter()
        while not self._is_enough(time.perf_counter() - begun):
            loss = self._timed(loop, self._measured, "measure")
            if not math.isfinite(loss):
                return Diverged(step=len(self._warmup) + len(self._measured), detail=f"loss {loss}")
            self._readings.append(self.card.read())
            self._is_crowded = self._is_crowded or self._has_lost_room()
            if self._beat("measure"):
                is_slow = True
                break
        excess = self._excess()
        if excess is not None:
            return excess
        measurement = self._measurement(attachment, loss)
        return PrunedSlow(measurement=measurement) if is_slow else Measured(measurement=measurement)

    def _is_enough(self, elapsed: float) -> bool:
        done = len(self._measured)
        if done < self.steps.measured_min:
            return False
        return (
            done >= self.steps.measured_max
            or elapsed >= self.steps.seconds_max
            or is_precise(self._measured, relative=self.steps.relative_interval)
        )

    def _timed(self, loop: TrainingLoop, into: list[float], phase: Phase) -> float:
        ended: list[float] = []

        def note() -> None:
            self.device.synchronize()
            ended.append(time.perf_counter())
            self._tick(phase)

        self.device.synchronize()
        begun = time.perf_counter()
        loss = loop.step(beat=note)
        self._spent[phase] += time.perf_counter() - begun
        into.append(whole_step_seconds(begun, ended, micro_steps=self.config.accumulation_steps))
        return loss

    def _tick(self, phase: Phase) -> None:
        done = self._warmup if phase == "warmup" else self._measured
        self.report(Beat(phase=phase, step=len(done)))

    def _beat(self, phase: Phase) -> bool:
        return self.report(
            Beat(
                phase=phase,
                step=len(self._measured),
                median_seconds=statistics.median(self._measured),
                fastest_median_seconds=_fastest_median(self._measured),
            )
        )

    def _measurement(self, attachment: Attached, loss: float) -> Measurement:
        median = statistics.median(self._measured)
        interval = median_interval(self._measured)
        reasons = sorted(
            {reason for reading in self._readings for reason in reading.throttle_reasons}
        )
        used = [reading.used_bytes for reading in self._readings if reading.used_bytes is not None]
        clocks = [r.sm_clock_mhz for r in self._readings if r.sm_clock_mhz is not None]
        return Measurement(
            tokens_per_second=self.config.tokens_per_step / median,
            samples_per_second=self.config.samples_per_step / median,
            step_seconds=median,
            step_seconds_ci95=interval,
            steps_measured=len(self._measured),
            steps_warmup=len(self._warmup),
            peak_allocated_bytes=self.device.peak_allocated_bytes(),
            peak_reserved_bytes=self.device.peak_reserved_bytes(),
            peak_device_bytes=max(used, default=None),
            trainable_parameters=sum(p.numel() for p in attachment.trainable_parameters()),
            flops_utilization=self._utilization(attachment, median),
            final_loss=loss,
            setup_seconds=0.0,
            measured_seconds=self._spent["measure"],
            training_seconds=sum(self._spent.values()),
            allocator_retries=self.device.allocator_retries(),
            flags=self._flags(reasons),
            sm_clock_mhz=int(statistics.median(clocks)) if clocks else None,
            throttle_reasons=tuple(reasons),
            quantized_share=self.base.quantized_share,
        )

    def _flags(self, throttle_reasons: list[str]) -> tuple[str, ...]:
        flags = {
            "emulated": self.is_emulated,
            "throttled": bool(throttle_reasons),
            "noisy": not is_precise(self._measured, relative=self.steps.relative_interval),
            "neighbour": self._is_crowded or any(r.has_neighbour for r in self._readings),
            "allocator_retries": self.device.allocator_retries() > 0,
            "accumulation_extrapolated": self.config.accumulation_steps > self.micro_steps_max,
        }
        return tuple(name for name, is_set in flags.items() if is_set)

    def _utilization(self, attachment: Attached, step_seconds: float) -> float | None:
        """Model FLOP/s over the peak; recomputation is not counted as work."""
        if self.peak_flops is None:
            return None
        per_token = flops_per_token(attachment, self.base.model.config, self.config.seq_len)
        return per_token * self.config.tokens_per_step / step_seconds / self.peak_flops


def whole_step_seconds(begun: float, ended: Sequence[float], *, micro_steps: int) -> float:
    """Return the seconds of an optimizer step of ``micro_steps``, of which only some were run.

    The last micro-step has the optimizer's; those before it are alike and stand for the missing.

    Args:
        begun: when the first one began.
        ended: when each one that was run ended.
        micro_steps: of the whole step.
    """
    if len(ended) == micro_steps:
        return ended[-1] - begun
    before, last = ended[-2] - begun, ended[-1] - ended[-2]
    return (micro_steps - 1) * before / (len(ended) - 1) + last


def _fastest_median(seconds: list[float]) -> float | None:
    """Return the lower end of the 95 % interval of the median.

    Before there are steps enough for one, a good deal less than the fastest step stands in.
    """
    interval = median_interval(seconds)
    if interval is not None:
        return interval[0]
    return _LENIENCY * min(seconds) if len(seconds) >= _STEPS_TO_JUDGE else None


def flops_per_token(attachment: Attached, model_config: PreTrainedConfig, seq_len: int) -> float:
    """Return the FLOPs that a step needs for each token, counted on the model that is there."""
    frozen = adapters = 0
    for name, module in attachment.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if ".lora_" in name:
                adapters += module.in_features * module.out_features
            else:
                frozen += module.in_features * module.out_features
    text = model_config.get_text_config()
    return training_flops_per_token(
        frozen=frozen,
        adapters=adapters,
        layers=len(attachment.layers),
        attention_width=attention_width(
            hidden=text.hidden_size,
            heads=getattr(text, "num_attention_heads", None) or 1,
            head_dim=getattr(text, "head_dim", None),
        ),
        seq_len=seq_len,
    )


def _with_setup(outcome: Outcome, total_seconds: float) -> Outcome:
    """Fill in the seconds outside the measured steps, known only after the detach."""
    if not isinstance(outcome, Measured | PrunedSlow):
        return outcome
    measurement = outcome.measurement
    setup = max(0.0, total_seconds - measurement.measured_seconds)
    return outcome.model_copy(
        update={"measurement": measurement.model_copy(update={"setup_seconds": setup})}
    )
