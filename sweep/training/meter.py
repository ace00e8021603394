"""How a trial's steps become a measurement: their seconds, steadiness, the interval of the median,
their FLOPs, and what the GPU and other processes did meanwhile."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.linears import attention_width, training_flops_per_token
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.records import NEIGHBOUR
from qlora_sweep.sweep.nvml import NvmlDevice
from qlora_sweep.sweep.training.adapters import Attached
from qlora_sweep.sweep.training.device import Device
from qlora_sweep.sweep.training.experts import shape_of
from qlora_sweep.sweep.training.model import LINEAR, vision_modules, weights_of

NEIGHBOUR_BYTES = 2**30
"""So much taken by others since a trial began is a neighbour's: this process's own libraries load
kernels for some hundred MiB with its first steps."""
NEIGHBOUR_BYTES_MEASURING = 256 * 2**20
"""The same while steps are measured, when everything of this process's own is there."""
_STEPS_TO_JUDGE = 3
_ENERGY_SECONDS_MIN = 1.0
"""The GPU's counter moves some ten times a second: what is shorter is not told to a tenth."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of a layer's experts."""
_ROUTED = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
"""What configs call the number of experts that a token is sent to."""
_LENIENCY = 0.7
"""Share of the fastest of a few steps that the median is surely above, also on a busy machine."""


@cache
def _interval_ranks(most: int) -> tuple[int, ...]:
    """Return by the number of steps the k such that order statistics k and count + 1 - k bound the
    median; 0 where no two of so few do.

    Measuring ends when the interval suits, so 95 % holds of the intervals of all counts at once.
    How many steps are under the median is a random walk, whatever the distribution of their times:
    the chance that any interval missed it is known exactly. By ``count`` steps that may have come
    to 5 % less a rest that falls with the square of the count (alpha spending), so that six steps,
    of which the extremes miss in 1 of 32 cases, have an interval and ten bear one that was held up.
    """
    walk = np.ones(1)
    missed = 0.0
    rank = 0
    ranks = [0]
    for count in range(1, most + 1):
        walk = (np.append(walk, 0.0) + np.append(0.0, walk)) / 2.0
        allowed = 0.05 * (1.0 - 0.375 * (6.0 / count) ** 2) + 1e-12
        while 2 * rank + 2 <= count and missed + 2.0 * walk[rank] <= allowed:
            missed += 2.0 * walk[rank]
            walk[rank] = walk[count - rank] = 0.0
            rank += 1
        ranks.append(rank)
    return tuple(ranks)


def _interval_rank(count: int) -> int:
    return _interval_ranks(1 << max(6, count.bit_length()))[count]


def median_interval(seconds: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the median, whenever the steps are looked at; None for fewer than
    six."""
    rank = _interval_rank(len(seconds))
    if rank == 0:
        return None
    ordered = sorted(seconds)
    return ordered[rank - 1], ordered[-rank]


def is_steady(seconds: Sequence[float], *, tolerance: float = 0.05) -> bool:
    """Whether the last two steps agree.

    Until they do, a step still pays for the choice of kernels and for the allocator's growth.
    """
    if len(seconds) < 2:
        return False
    before, last = seconds[-2:]
    return abs(last - before) <= tolerance * min(last, before)


def is_precise(seconds: Sequence[float], *, relative: float) -> bool:
    """Whether the 95 % interval of the median lies within ``relative`` of it on both sides."""
    interval = median_interval(seconds)
    if interval is None:
        return False
    median = statistics.median(seconds)
    return max(median - interval[0], interval[1] - median) <= relative * median


def is_in_vain(seconds: Sequence[float], *, relative: float, steps_max: int) -> bool:
    """Whether steps are so uneven that ``steps_max`` of them are not precise either.

    An interval narrows with the root of their number. While its ends are the fastest and the
    slowest step, a single one that was held up would decide.
    """
    if _interval_rank(len(seconds)) < 2:
        return False
    return not is_precise(seconds, relative=relative * math.sqrt(steps_max / len(seconds)))


def fastest_median(seconds: Sequence[float]) -> float | None:
    """Return the least that the median can still turn out to be.

    That is the lower end of its 95 % interval. Before there are steps enough for one, a good deal
    less than the fastest step stands in; before there are three, nothing.
    """
    interval = median_interval(seconds)
    if interval is not None:
        return interval[0]
    if len(seconds) < _STEPS_TO_JUDGE:
        return None
    return _LENIENCY * min(seconds)


def mean_step_seconds(
    ended: Sequence[float], gradients: Sequence[float] = (), *, micro_steps: int
) -> float:
    """Return the mean seconds of an optimizer step of ``micro_steps`` over one or several in a row.

    Where fewer of its micro-steps were run, those stand for the missing, and the optimizer's own
    part, which comes once, is told apart by when a step's last gradients were there.

    Args:
        ended: seconds from the beginning to the end of each micro-step that was run.
        gradients: to the last gradients of each of the steps; none for one step whose micro-steps
            are alike, the last one's gradients taking as long as each before.
        micro_steps: of a whole step.
    """
    steps = len(gradients) or 1
    run = len(ended) // steps
    if run == micro_steps:
        return ended[-1] / steps
    gradients = gradients or [ended[-2] * run / (run - 1)]
    updates = (ended[run * (i + 1) - 1] - there for i, there in enumerate(gradients))
    update = sum(updates) / steps
    return micro_steps * (ended[-1] / len(ended) - update / run) + update


@dataclass(frozen=True)
class GpuReading:
    """One look at the GPU. Bytes count every process."""

    used_bytes: int | None = None
    sm_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    has_neighbour: bool = False


class GpuReader:
    """Reads the GPU while it trains; without one, or without NVML, readings are empty.

    A neighbour is a process that came after `remember`. What was there before is not one, nor is
    this process, which a container's NVML shows under a number that only the host knows.
    """

    def __init__(self, gpu: NvmlDevice | None) -> None:
        self._gpu = gpu
        self.remember()

    def remember(self) -> None:
        """Take the processes of this moment as known; call it when this one is there too."""
        self._known = self._processes() | {os.getpid()}

    def read(self) -> GpuReading:
        """Return what the driver tells now; each figure it refuses is left empty."""
        if self._gpu is None:
            return GpuReading()
        memory = self._gpu.memory()
        return GpuReading(
            used_bytes=None if memory is None else memory.used,
            sm_clock_mhz=self._gpu.sm_clock_mhz(),
            throttle_reasons=self._gpu.throttle_reasons(),
            has_neighbour=not self._processes() <= self._known,
        )

    def energy_joules(self) -> float | None:
        """Return the energy that the GPU has used so far; None where it is not counted."""
        if self._gpu is None:
            return None
        return self._gpu.energy_joules()

    def _processes(self) -> set[int]:
        if self._gpu is None:
            return set()
        return {process.pid for process in self._gpu.processes()}


@dataclass
class NeighbourWatch:
    """What other processes take of the device while this one has it.

    A container hides them from NVML, so what they hold is seen in what is left for this process.

    Attributes:
        budget_bytes: what this process was promised; None where nothing was.
        has_paged_memory: paged buffers of this process's own count as others', so that nothing
            follows from what is left.
    """

    device: Device
    gpu: GpuReader
    budget_bytes: int | None
    has_paged_memory: bool = False
    _least_room: int = 0
    """So much is left while no other process takes memory."""

    def start(self) -> None:
        """Take what the device has for this process now as what it had before anybody came."""
        self._least_room = 0
        self._note_room(NEIGHBOUR_BYTES)

    def start_measuring(self) -> None:
        """Watch more closely from now on: what this process needed itself, it has."""
        self._note_room(NEIGHBOUR_BYTES_MEASURING)

    def _note_room(self, slack: int) -> None:
        room = self.device.room_bytes()
        if room is not None and not self.has_paged_memory:
            self._least_room = max(self._least_room, room - slack)

    def have_taken_memory(self) -> bool:
        """Whether others took a noticeable part of the device since the start, or measuring."""
        room = self.device.room_bytes()
        return room is not None and room < self._least_room

    def have_robbed(self) -> bool:
        """Whether others came and hold what the budget had promised to this process."""
        room = self.device.room_bytes()
        if room is None or self.budget_bytes is None or room >= self.budget_bytes:
            return False
        return room < self._least_room or self.gpu.read().has_neighbour


@dataclass
class EnergyCount:
    """The GPU's energy over the stretches of time that count, and how long those were."""

    gpu: GpuReader
    joules: float | None = 0.0
    """None once the GPU did not tell."""
    seconds: float = 0.0
    _begun: tuple[float, float | None] = 0.0, None

    def begin(self) -> None:
        """Let what the GPU uses count from now on."""
        self._begun = time.perf_counter(), self.gpu.energy_joules()

    def end(self) -> None:
        """Let it not count any more."""
        started, before = self._begun
        now = self.gpu.energy_joules()
        self.seconds += time.perf_counter() - started
        if self.joules is None or before is None or now is None:
            self.joules = None
        else:
            self.joules += now - before

    def per_token(self, tokens: float) -> float | None:
        """Return the joules of a token; None where they are not known, or not well enough."""
        if self.joules is None or self.seconds < _ENERGY_SECONDS_MIN or not tokens:
            return None
        return self.joules / tokens


@dataclass
class Meter:
    """The steps of one trial: what each took, and whether there are enough.

    Attributes:
        is_soak: whether it continues, however precise the steps are, until their budget is spent.
    """

    config: TrialConfig
    steps: StepBudget
    neighbours: NeighbourWatch
    is_soak: bool = False
    tokens_per_step: float = field(init=False)
    """Supervised tokens of a step that is measured, of all GPUs together."""
    warmup: list[float] = field(default_factory=list)
    """Seconds of each warm-up step."""
    measured: list[float] = field(default_factory=list)
    """Seconds of each measured step."""
    warmup_spent: float = 0.0
    measured_spent: float = 0.0
    """Seconds really spent in steps, where the step's own are derived."""
    energy: EnergyCount = field(init=False)
    _micro_steps: int = 0
    """Really measured."""
    _readings: list[GpuReading] = field(default_factory=list)
    _is_crowded: bool = False

    def __post_init__(self) -> None:
        self.tokens_per_step = self.config.tokens_per_step
        self.energy = EnergyCount(self.neighbours.gpu)

    def add(self, ended: Sequence[float], gradients: Sequence[float], *, is_warmup: bool) -> None:
        """Take in a step, or several in a row of which the mean counts; see `mean_step_seconds`."""
        seconds = mean_step_seconds(ended, gradients, micro_steps=self.config.accumulation_steps)
        if is_warmup:
            self.warmup.append(seconds)
            self.warmup_spent += ended[-1]
        else:
            self.measured.append(seconds)
            self.measured_spent += ended[-1]
            self._micro_steps += len(ended)
            self._readings.append(self.neighbours.gpu.read())
            self._is_crowded = self._is_crowded or self.neighbours.have_taken_memory()

    def is_warm(self) -> bool:
        """Whether the steps so far have come to the steady rate, or were given time enough to."""
        done = len(self.warmup)
        return done >= self.steps.warmup_max or (
            done >= self.steps.warmup_min and is_steady(self.warmup)
        )

    def is_enough(self, elapsed_seconds: float) -> bool:
        """Whether the measured steps are precise, will not be, or used up what they may take.

        However that is chosen, `median_interval` holds.
        """
        done = len(self.measured)
        if done < self.steps.measured_min:
            return False
        steps = self.steps
        is_spent = done >= steps.measured_max or elapsed_seconds >= steps.seconds_max
        if is_spent or self.is_soak:
            return is_spent
        return self._is_precise() or is_in_vain(
            self.measured, relative=steps.relative_interval, steps_max=steps.measured_max
        )

    def _is_precise(self) -> bool:
        return is_precise(self.measured, relative=self.steps.relative_interval)

    @property
    def median_seconds(self) -> float:
        """Seconds of the median measured step."""
        return statistics.median(self.measured)

    def figures(self) -> dict[str, Any]:
        """Return what a `Measurement` says of the steps and of the GPU meanwhile."""
        used = [r.used_bytes for r in self._readings if r.used_bytes is not None]
        clocks = [r.sm_clock_mhz for r in self._readings if r.sm_clock_mhz is not None]
        of_one = self.tokens_per_step / self.config.accumulation_steps / self.config.data_parallel
        return {
            "steps_measured": len(self.measured),
            "steps_warmup": len(self.warmup),
            "measured_seconds": self.measured_spent,
            "training_seconds": self.warmup_spent + self.measured_spent,
            "peak_device_bytes": max(used, default=None),
            "sm_clock_mhz": int(statistics.median(clocks)) if clocks else None,
            "throttle_reasons": self._throttle_reasons(),
            "joules_per_token": self.energy.per_token(self._micro_steps * of_one),
        }

    def _throttle_reasons(self) -> tuple[str, ...]:
        reasons: set[str] = set()
        for reading in self._readings:
            reasons.update(reading.throttle_reasons)
        return tuple(sorted(reasons))

    def flags(self) -> dict[str, bool]:
        """Return what makes the measured seconds less sure, by flag."""
        return {
            "throttled": bool(self._throttle_reasons()),
            "noisy": not self._is_precise(),
            NEIGHBOUR: self._is_crowded or any(r.has_neighbour for r in self._readings),
        }


def flops_per_token(
    attachment: Attached, model_config: PreTrainedConfig, seq_len: int, references: int = 0
) -> float | None:
    """Return the FLOPs that a step needs for each token, counted on the model that is there; None
    where its modules do not tell."""
    text = model_config.get_text_config()
    frozen = adapters = 0.0
    for name, weights in _multiplied(attachment, text):
        if weights is None:
            return None
        if ".lora_" in name:
            adapters += weights
        else:
            frozen += weights
    return training_flops_per_token(
        frozen=frozen,
        adapters=adapters,
        layers=len(attachment.layers),
        attention_width=_attention_width(text),
        seq_len=seq_len,
        references=references,
    )


def _attention_width(text: PreTrainedConfig) -> float:
    """Return the width of all heads' queries; of latent attention, whose values have another one,
    the mean of both."""
    heads = getattr(text, "num_attention_heads", None) or 1
    latent = getattr(text, "qk_head_dim", None)
    if isinstance(latent, int):
        return heads * (latent + text.v_head_dim) / 2
    head_dim = getattr(text, "head_dim", None)
    return attention_width(hidden=text.hidden_size, heads=heads, head_dim=head_dim)


def _first_of(text: PreTrainedConfig, keys: Sequence[str]) -> Any:
    """Return what a config has under the first of some keys that it has; None without any."""
    for key in keys:
        if hasattr(text, key):
            return getattr(text, key)
    return None


def _multiplied(attachment: Attached, text: PreTrainedConfig) -> Iterator[tuple[str, float | None]]:
    """Yield of each module with how many weights each token is multiplied; None where it is of a
    kind that is not known. A token meets as many experts as the router sends it to."""
    count = _first_of(text, _EXPERTS)
    routed = _first_of(text, _ROUTED)
    share = None
    if isinstance(count, int) and isinstance(routed, int):
        share = routed / count
    modules = dict(attachment.model.named_modules())
    experts = tuple(f"{name}." for name in modules if name.rpartition(".")[2] == "experts")
    # What sees multiplies patches, and not tokens.
    sees = set(vision_modules(attachment.model.get_base_model()))
    for name, module in modules.items():
        if module in sees:
            continue
        if isinstance(module, LINEAR):
            part = share if name.startswith(experts) else 1
            yield name, None if part is None else weights_of(module) * part
        elif not isinstance(module, torch.nn.Embedding):
            own = module.parameters(recurse=False)
            shapes = [shape_of(p) for p in own if p.ndim > 1]
            is_of_experts = any(len(shape) == 3 for shape in shapes)
            for shape in shapes:
                if share is None or len(shape) > 3 or shape[0] != count:
                    yield name, None
                elif len(shape) == 3:
                    yield name, shape.numel() * share
                elif not is_of_experts:
                    # A router; beside experts it would be their biases.
                    yield name, shape.numel()
