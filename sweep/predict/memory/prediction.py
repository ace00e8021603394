"""The predicted memory of configurations: their peaks, how sure that is, and what they fit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.trainers import trainer_of
from qlora_sweep.sweep.predict.memory.allocator import paged
from qlora_sweep.sweep.predict.memory.peaks import KNOWN_PARTS, StepPeaks, alike, find_peaks
from qlora_sweep.sweep.predict.memory.profile_store import OnProgress, ignore_progress
from qlora_sweep.sweep.predict.memory.profiles import Untraceable
from qlora_sweep.sweep.predict.memory.replay import (
    Step,
    Uncapped,
    replay_all,
    replay_uncapped,
    runs_under,
)


@dataclass(frozen=True)
class Uncertainty:
    """How far a truth may be from its prediction.

    Weights, adapters and optimizer states are counted, and so known exactly: that of the allocated
    peak is relative to all else in it. Each is the worst error of the rows that it is claimed for,
    widened by 3 / rows (of so many that stayed within it, that share may pass it, at 95 %
    confidence) and rounded up to half a percent.
    `tests/sweep/predict/memory/test_stated_uncertainty.py` derives them from the committed rows
    again, and fails where one is too small or far too large.
    """

    allocated: float
    """Relative to the part of the peak that is not known exactly."""
    reserved: float
    """Relative to the reserved peak, where nothing caps it."""


EAGER = Uncertainty(allocated=0.015, reserved=0.10)
"""Of 189 rows of eleven models: 1.5 % and 9.6 % at worst."""
COMPILED = Uncertainty(allocated=0.025, reserved=0.105)
"""Where some layers keep what they made: of 29 rows of three models, 2.1 % and 9.5 % at worst."""
COMPILED_8_BIT = Uncertainty(allocated=0.01, reserved=0.03)
"""The same of 8-bit compute: of ten rows of three models, 0.6 % and 2.2 % at worst."""
COMPILED_UPCAST = Uncertainty(allocated=0.525, reserved=0.295)
"""The same with norms and activations in fp32: of one row, 13.1 % and 7.3 %."""
COMPILED_RECOMPUTED = Uncertainty(allocated=0.095, reserved=0.245)
"""Where all are recomputed: of eight rows, 6.6 % and 17.8 % at worst. The graph that a layer goes
back through is then all that is alive, and the compiler decides what is alive in it. Of three peaks
with checkpoints on the host, in 4 bits, 5.7 % at worst (`small_and_long_h200.jsonl`)."""
SHARDED = Uncertainty(allocated=0.03, reserved=0.10)
"""Of a model that two GPUs share, in NF4 or 16 bits: of 17 rows of three models, 2.5 % and 8.4 % at
worst, eight of them compiled. What is gathered when is derived from FSDP2's code."""
IN_TRL = Uncertainty(allocated=0.025, reserved=0.185)
"""Of the steps of TRL's trainers on one GPU: of ten rows of its GRPOTrainer, of two models, and one
of its SFTTrainer 1.8 % and 14 % at worst."""
UNSEEN = Uncertainty(allocated=0.15, reserved=0.3)
"""Of a model that more GPUs share, or in other types, of compiled convolutions (LFM2), of steps of
axolotl and LLaMA-Factory: derived, and measured on no GPU. Of Unsloth's too: its factors are of one
model alone. And of images: of fourteen peaks of two models 11.5 % at worst."""
CAPPED = 0.015
"""How far the least cap that a step runs under may be from the replay's, where its peak is known.

1.2 % at worst of the 29 configurations that were tried at the edge of a budget.
"""
CAPPED_SHARDED = 0.1
"""The same of a model that several GPUs share: what is received there is of a stream of its own,
whose memory the replay never gives back, and no step was tried at the edge."""
CAPPED_EXPANDABLE = 0.03
"""The same where segments are expandable, whose least cap is the peak in whole pages.

Of one step alone is it known, which had reserved 2.8 % more than it allocated and ran.
"""
FRAGMENTATION = 1.4
"""More than is ever reserved for a byte allocated; what fits even so is not replayed.

1.29 was measured and 1.32 is replayed at most.
"""
SHARDED_FRAGMENTATION = 2.7
"""The same of a model that several GPUs share: what is received comes on top, and is no more than
the peak has of it."""
_NEED_GRAIN = 0.01
"""How closely the least cap is looked for."""


def stated_uncertainty(config: TrialConfig, *, is_unseen: bool = False) -> Uncertainty:
    """Return how far predictions of configurations like this one may be off.

    Args:
        config: a configuration.
        is_unseen: whether it runs layers in a way in which no peak was measured.
    """
    if is_unseen or config.image_size is not None:
        return UNSEEN
    if config.is_sharded:
        is_measured = config.base_kind.sharded == "measured"
        if is_measured and config.data_parallel == 2:
            return SHARDED
        return UNSEEN
    if config.has_head_of_trl:
        return IN_TRL
    if not trainer_of(config).has_measured_peaks:
        return UNSEEN
    if not config.compile:
        return UNSEEN if config.waits_on_host else EAGER
    if config.checkpoint_fraction == 1:
        return COMPILED_RECOMPUTED
    if config.upcast_fp32:
        return COMPILED_UPCAST
    if config.waits_on_host:
        return COMPILED_RECOMPUTED
    if config.is_8bit_compute:
        return COMPILED_8_BIT
    return COMPILED


class Fit(StrEnum):
    """Whether a configuration fits a budget."""

    YES = "yes"
    NO = "no"
    UNCERTAIN = "uncertain"


@dataclass(frozen=True)
class MemoryPrediction:
    """What a configuration would need. Bytes."""

    peak_allocated_bytes: int
    """What `torch.cuda.max_memory_allocated` would read over the first steps."""
    breakdown: dict[str, int]
    """The peak's parts: ``weights``, ``adapters``, ``gradients``, ``optimizer``, ``activations``,
    ``loss``.

    The libraries' workspaces count as activations, and so does what is gathered of a base that
    several GPUs share.
    """
    moment: str
    """When the peak is reached: ``forward``, ``loss``, ``backward`` or ``optimizer``."""
    uncertainty: float
    """Relative: the truth is within the peak times 1 - this and times 1 + this."""
    reserved_uncertainty: float
    """The same of the reserved peak."""
    step: Step | None = field(default=None, repr=False)
    """What was walked; None where the allocated peak alone decides what fits: on a CPU, where
    nothing is reserved beside it, and where no more is known."""
    uncapped: Uncapped | None = field(default=None, repr=False)
    """Its replay, where it has been replayed already."""

    @property
    def quantized_share(self) -> float | None:
        """Of the weights that are meant to be in 4 bits, how many are; None for a 16-bit base."""
        if self.step is None:
            return None
        return self.step.profile.quantized_share

    @property
    def host_bytes(self) -> int:
        """What lies pinned in the host's memory."""
        if self.step is None:
            return 0
        return self.step.profile.base.host_bytes + self.step.checkpoint_host_bytes

    @cached_property
    def peak_reserved_bytes(self) -> int:
        """What `torch.cuda.max_memory_reserved` would read where nothing caps it.

        Takes some milliseconds, once.
        """
        if self.step is None:
            return self.peak_allocated_bytes
        if self.step.config.expandable_segments:
            return int(paged(self.peak_allocated_bytes))
        return (self.uncapped or replay_uncapped(self.step)).reserved_bytes

    def widened(self, uncertainty: float) -> Self:
        """Return the same prediction, at least so uncertain."""
        if uncertainty <= self.uncertainty:
            return self
        return replace(self, uncertainty=uncertainty)

    def scaled(self, activations: float) -> MemoryPrediction:
        """Return the prediction for kernels that need so many times the activations and the loss,
        of which no step is known."""
        parts = dict(self.breakdown)
        for part in ("activations", "loss"):
            parts[part] = round(parts[part] * activations)
        peak = sum(parts.values())
        known_bytes = sum(parts[part] for part in KNOWN_PARTS)
        return MemoryPrediction(
            peak_allocated_bytes=peak,
            breakdown=parts,
            moment=self.moment,
            uncertainty=UNSEEN.allocated * (1.0 - known_bytes / peak),
            reserved_uncertainty=UNSEEN.reserved,
        )

    def fits(self, budget_bytes: int) -> Fit:
        """Return whether it runs where no more than the budget may be reserved.

        This is the one meaning of "fits": plans, surveys and pre-flight all ask here. Between the
        allocated peak and the reserved one the allocator gives cached blocks back before it fails;
        what that is worth depends on how memory is cut up, so the step is replayed under the cap.
        What passes or fails only within the uncertainty is uncertain.
        """
        if self.peak_allocated_bytes * (1 - self.uncertainty) > budget_bytes:
            return Fit.NO
        most = FRAGMENTATION
        if self.step is not None and self.step.config.is_sharded:
            most = SHARDED_FRAGMENTATION
        if self.peak_allocated_bytes * (1 + self.uncertainty) * most <= budget_bytes:
            return Fit.YES
        if self._runs_under(int(budget_bytes / (1 + self._slack))):
            return Fit.YES
        if self._slack < 1 and not self._runs_under(int(budget_bytes / (1 - self._slack))):
            return Fit.NO
        return Fit.UNCERTAIN

    def is_likely(self, budget_bytes: int) -> bool:
        """Return the best guess: whether it fits if everything is exactly as predicted."""
        return self.peak_allocated_bytes <= budget_bytes and self._runs_under(budget_bytes)

    def needed_bytes(self, budget_bytes: int) -> int:
        """Return the least budget that it runs under, where it does not run under this one.

        That is its peak where the peak is larger; else what the allocator needs around it, to a
        percent, which takes some dozens of milliseconds.
        """
        if self.peak_allocated_bytes > budget_bytes:
            return self.peak_allocated_bytes
        low = budget_bytes
        high = self.peak_reserved_bytes
        while high - low > _NEED_GRAIN * low:
            middle = (low + high) // 2
            if self._runs_under(middle):
                high = middle
            else:
                low = middle
        return max(low, high)

    @property
    def _slack(self) -> float:
        """How far the least cap may be from the replay's.

        Its own error and that of the peak have nothing to do with each other.
        """
        if self.step is None:
            return self.uncertainty
        config = self.step.config
        capped = CAPPED
        if config.is_sharded:
            capped = CAPPED_SHARDED
        if config.expandable_segments:
            capped = CAPPED_EXPANDABLE
        return math.hypot(self.uncertainty, capped)

    def _runs_under(self, limit_bytes: int) -> bool:
        # The replay is of a later step than the one whose kernels are tried out.
        if limit_bytes < self.peak_allocated_bytes:
            return False
        if self.step is None or self.step.config.expandable_segments:
            return self.peak_reserved_bytes <= limit_bytes
        if self.uncapped is not None:
            if limit_bytes < self.uncapped.least_bytes:
                return False
            if (twice := self.uncapped.twice_bytes) is not None and twice <= limit_bytes:
                return True
        return runs_under(self.step, limit_bytes=limit_bytes)


Known = Step | MemoryPrediction | InputError
"""What there is of a configuration: the step that is to be walked, its prediction, or why there is
neither."""


class WholeMemory:
    """What is predicted of many configurations, by row, without the replays that decide nothing.

    Args:
        configs: what is to be trained; one row of every answer each.
        known: of each.

    Attributes:
        unpredicted: why there is no prediction, of the rows that have none.
        steps: the steps of the rows whose prediction is worked out here.
    """

    def __init__(self, configs: Sequence[TrialConfig], known: Sequence[Known]) -> None:
        self._configs = configs
        self.steps: dict[int, Step] = {}
        self.unpredicted: dict[int, InputError] = {}
        self._predicted: dict[int, MemoryPrediction] = {}
        for row, answer in enumerate(known):
            match answer:
                case Step():
                    self.steps[row] = answer
                case InputError():
                    self.unpredicted[row] = answer
                case MemoryPrediction():
                    self._predicted[row] = answer
        self._alike = alike(self.steps)
        self._places: dict[int, tuple[int, int]] = {}
        """Of each step, its group of those alike and its place in that."""
        for group, rows in enumerate(self._alike):
            for place, row in enumerate(rows):
                self._places[row] = (group, place)
        self._peaks: dict[int, StepPeaks] = {}
        self._replays: dict[int, Uncapped] = {}

    @cached_property
    def peak_allocated_bytes(self) -> NDArray[np.int64]:
        """What `torch.cuda.max_memory_allocated` would read; -1 where there is no prediction. Some
        milliseconds for each whose blocks may hold too much."""
        wasted: dict[int, int] = {}
        for row, step in self.steps.items():
            if step.may_waste:
                wasted[row] = self._uncapped(row).wasted_bytes
        return self._totals(wasted)

    @cached_property
    def least_allocated_bytes(self) -> NDArray[np.int64]:
        """No more than that, for nothing: without what blocks hold beyond what was asked for."""
        return self._totals({})

    @cached_property
    def uncertainty(self) -> NDArray[np.float64]:
        """How far each peak may be off, relative to it, as predictions state it."""
        stated = np.zeros(len(self._configs))
        for row, step in self.steps.items():
            stated[row] = stated_uncertainty(step.config, is_unseen=step.is_unseen).allocated
        least = self.least_allocated_bytes.astype(float)  # (configurations,), as is stated
        for group, rows in enumerate(self._alike):
            known_bytes = self._peaks_of(group).known_bytes.astype(float)
            stated[rows] *= 1.0 - known_bytes / least[rows]
        for row, known in self._predicted.items():
            stated[row] = known.uncertainty
        return stated

    def prediction(self, row: int) -> MemoryPrediction:
        """Return what is predicted of one configuration.

        Raises:
            InputError: there is no prediction.
        """
        if row in self.unpredicted:
            # A new exception each time, as one that is raised twice keeps the frames of both.
            raise type(self.unpredicted[row])(*self.unpredicted[row].args)
        if row in self._predicted:
            return self._predicted[row]
        step = self.steps[row]
        (group, place) = self._places[row]
        uncapped = self._replays.get(row)
        wasted_bytes = 0
        if step.may_waste:
            uncapped = self._uncapped(row)
            wasted_bytes = uncapped.wasted_bytes
        parts, moment = self._peaks_of(group).of(place, wasted_bytes=wasted_bytes)
        stated = stated_uncertainty(step.config, is_unseen=step.is_unseen)
        peak = sum(parts.values())
        known_bytes = sum(parts[part] for part in KNOWN_PARTS)
        return MemoryPrediction(
            peak_allocated_bytes=peak,
            breakdown=parts,
            moment=moment,
            uncertainty=stated.allocated * (1.0 - known_bytes / peak),
            reserved_uncertainty=stated.reserved,
            step=step,
            uncapped=uncapped,
        )

    def replay(
        self, near: Collection[int] = (), *, on_progress: OnProgress = ignore_progress
    ) -> Iterator[int]:
        """Replay every step whose reserved peak takes that, on all processors; yield each row as
        soon as it needs no more replay.

        Where all of them are going to be looked at; one by one they are replayed when they are.

        Args:
            near: rows of which only a replay tells whether they fit.
            on_progress: told how many have been replayed, of how many.
        """
        missing: list[int] = []
        for row, step in self.steps.items():
            if not step.config.expandable_segments and row not in self._replays:
                missing.append(row)
        yield from sorted(set(range(len(self._configs))).difference(missing))
        is_near = set(near)
        replays = replay_all(
            [self.steps[row] for row in missing],
            near=[at for at, row in enumerate(missing) if row in is_near],
            on_progress=on_progress,
        )
        for rows, found in replays:
            for row in map(missing.__getitem__, rows):
                self._replays[row] = found
                yield row

    def _uncapped(self, row: int) -> Uncapped:
        if row not in self._replays:
            self._replays[row] = replay_uncapped(self.steps[row])
        return self._replays[row]

    def quick_fits(
        self, budget_bytes: int, *, uncertainty: NDArray[np.float64] | None = None
    ) -> list[Fit | None]:
        """Return whether each runs where no more than the budget may be reserved; None where only a
        replay tells. Uncertain where there is no prediction.

        Args:
            budget_bytes: what a training may take.
            uncertainty: how far each peak may be off where trials have shown more than is stated.
        """
        unsure = uncertainty
        if unsure is None:
            unsure = self.uncertainty
        # Arrays are (configurations,).
        least = self.least_allocated_bytes.astype(float)
        is_sharded = np.array([config.is_sharded for config in self._configs], np.bool_)
        most = (least + self._most_wasted) * (1 + unsure)
        most *= np.where(is_sharded, SHARDED_FRAGMENTATION, FRAGMENTATION)
        fits = np.full(len(self._configs), None, object)
        fits[most <= budget_bytes] = Fit.YES
        fits[least * (1 - unsure) > budget_bytes] = Fit.NO
        fits[list(self.unpredicted)] = Fit.UNCERTAIN
        # Whole pages take no replay, nor does what was predicted elsewhere.
        near: list[int] = []
        for row, step in self.steps.items():
            if fits[row] is None and step.config.expandable_segments:
                near.append(row)
        reserved = paged(self.least_allocated_bytes[near])
        slack = np.hypot(unsure[near], CAPPED_EXPANDABLE)
        fits[near] = _fits_in_pages(reserved, slack, budget_bytes)
        for row, known in self._predicted.items():
            fits[row] = known.widened(float(unsure[row])).fits(budget_bytes)
        return list(fits)

    @cached_property
    def _most_wasted(self) -> NDArray[np.float64]:
        wasted = np.zeros(len(self._configs))
        known: dict[Any, int] = {}
        for row, step in self.steps.items():
            if step.may_waste:
                key = (tuple(map(id, step.profiles.values())), step.flags)
                if key not in known:
                    known[key] = step.most_wasted_bytes
                wasted[row] = known[key]
        return wasted

    def _peaks_of(self, group: int) -> StepPeaks:
        if group not in self._peaks:
            self._peaks[group] = find_peaks([self.steps[row] for row in self._alike[group]])
        return self._peaks[group]

    def _totals(self, wasted: Mapping[int, int]) -> NDArray[np.int64]:
        """Return the peaks of those that have a prediction, in an array over all rows.

        Args:
            wasted: bytes that blocks hold beyond what was asked for, by row; of others none.
        """
        result = np.full(len(self._configs), -1, np.int64)
        for group, rows in enumerate(self._alike):
            more = np.array([wasted.get(row, 0) for row in rows])
            totals = self._peaks_of(group).total_bytes(more)
            result[rows] = np.minimum(totals, np.iinfo(np.int64).max)
        for row, known in self._predicted.items():
            result[row] = known.peak_allocated_bytes
        return result


def _fits_in_pages(
    reserved_bytes: NDArray[np.int64], slack: NDArray[np.float64], budget_bytes: int
) -> NDArray[np.object_]:
    """Return whether steps run under a budget whose least caps are their reserved peaks, each
    known but for its slack: `MemoryPrediction.fits` of many."""
    # `np.full` would make texts of them.
    fits = np.empty(len(slack), object)
    fits[:] = Fit.UNCERTAIN
    surely = (budget_bytes / (1.0 + slack)).astype(np.int64)
    fits[reserved_bytes <= surely] = Fit.YES
    is_bounded = slack < 1.0
    possibly = (budget_bytes / np.where(is_bounded, 1.0 - slack, 1.0)).astype(np.int64)
    fits[is_bounded & (reserved_bytes > possibly)] = Fit.NO
    return fits


def predict_nothing(configs: Sequence[TrialConfig] = ()) -> WholeMemory:
    """Return predictions that refuse every one of some configurations."""
    return WholeMemory(configs, [Untraceable("nothing is predicted")] * len(configs))
