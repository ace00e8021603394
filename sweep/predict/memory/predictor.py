"""Owns the memory prediction of one configuration: its structure's profile, scaled and walked.

Also how sure it is, which finished trials may only lessen. Knows nothing of Optuna, processes or
files. Liger's kernels, bitsandbytes' and attention's are Triton and CUDA programs that cannot be
traced: what they keep and take is modelled (`sweep.predict.memory.tracing.liger`, `.fourbit`,
`.attention`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.knobs import KNOBS
from search_spaces.models import ModelSpec
from storage.records import TrialRecord
from sweep.predict.memory.allocator import MIB
from sweep.predict.memory.peaks import Peaks, find_peaks
from sweep.predict.memory.polynomials import Values
from sweep.predict.memory.profile_store import (
    OnProgress,
    ProfileStore,
    Tracer,
    TracingChildren,
    tell_nobody,
)
from sweep.predict.memory.profiles import Profile, Structure
from sweep.predict.memory.replay import reserved_bytes, wasted_bytes
from sweep.predict.memory.step import Step

HOPPER = (9, 0)
AMPERE = (8, 0)

_WORKSPACES = 2
"""cuBLAS keeps one for the thread that runs forward, and one for autograd's."""
_HOPPER_WORKSPACE_BYTES = 32 * MIB
_OLDER_WORKSPACE_BYTES = 8 * MIB + 128 * 1024
_TRACED = tuple(key for key, knob in KNOBS.items() if knob.traced)
_PADDED_LENGTH = 128
"""Rows that an attention kernel's backward pass works on at once."""


@dataclass(frozen=True)
class Uncertainty:
    """How far a truth may be from its prediction, relative to that.

    Each is the worst error of the rows that it is claimed for, widened by 3 / rows (of so many that
    stayed within it, that share may pass it, at 95 % confidence) and rounded up to half a percent.
    `tests/sweep/predict/memory/test_stated_uncertainty.py` derives them from the committed rows
    again, and fails where one is too small or far too large.
    """

    allocated: float
    reserved: float
    """Where nothing caps it."""


EAGER = Uncertainty(allocated=0.015, reserved=0.10)
"""Of 152 rows of ten models: 1.2 % and 9.6 % at worst."""
COMPILED = Uncertainty(allocated=0.13, reserved=0.145)
"""Of four rows of one model: 7.4 % and 8.2 % at worst."""
CAPPED = 0.015
"""How far the least cap that a step runs under may be from the replay's, where its peak is known.

1.2 % at worst of the 29 configurations that were tried at the edge of a budget.
"""
FRAGMENTATION = 1.4
"""More than is ever reserved for a byte allocated; what fits even so is not replayed.

1.29 was measured and 1.32 is replayed at most.
"""
_NEED_GRAIN = 0.01
"""How closely the least cap is looked for."""
RESIDUAL_MARGIN = 0.01
"""Kept on top of the worst error of a study, where that is worse than what predictions state."""


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

    The libraries' workspaces count as activations.
    """
    moment: str
    """When the peak is reached: ``forward``, ``loss``, ``backward`` or ``optimizer``."""
    uncertainty: float
    """Relative: the truth is within the peak times 1 - this and times 1 + this."""
    reserved_uncertainty: float
    """The same of the reserved peak."""
    step: Step = field(repr=False)
    """What was walked."""

    @property
    def quantized_share(self) -> float | None:
        """Of the weights that are meant to be in 4 bits, how many are; None for a 16-bit base."""
        return self.step.profile.quantized_share

    @cached_property
    def peak_reserved_bytes(self) -> int:
        """What `torch.cuda.max_memory_reserved` would read where nothing caps it.

        Takes some milliseconds, once.
        """
        reserved = reserved_bytes(self.step)
        assert reserved is not None, "an allocator without a limit cannot pass it"
        return reserved

    def widened(self, uncertainty: float) -> Self:
        """Return the same prediction, at least so uncertain."""
        if uncertainty <= self.uncertainty:
            return self
        return replace(self, uncertainty=uncertainty)

    def exceeds(self, budget_bytes: int) -> bool:
        """Whether the allocated peak alone is surely too large; costs nothing."""
        return self.peak_allocated_bytes * (1 - self.uncertainty) > budget_bytes

    def fits(self, budget_bytes: int) -> Fit:
        """Return whether it runs where no more than the budget may be reserved.

        This is the one meaning of "fits": plans, surveys and pre-flight all ask here. Between the
        allocated peak and the reserved one the allocator gives cached blocks back before it fails;
        what that is worth depends on how memory is cut up, so the step is replayed under the cap.
        What passes or fails only within the uncertainty is uncertain.
        """
        if self.exceeds(budget_bytes):
            return Fit.NO
        if self.peak_allocated_bytes * (1 + self.uncertainty) * FRAGMENTATION <= budget_bytes:
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
        low, high = budget_bytes, self.peak_reserved_bytes
        while high - low > _NEED_GRAIN * low:
            middle = (low + high) // 2
            low, high = (low, middle) if self._runs_under(middle) else (middle, high)
        return max(low, high)

    @property
    def _slack(self) -> float:
        """How far the least cap may be from the replay's.

        Its own error and that of the peak have nothing to do with each other.
        """
        return math.hypot(self.uncertainty, CAPPED)

    def _runs_under(self, limit_bytes: int) -> bool:
        return reserved_bytes(self.step, limit_bytes=limit_bytes) is not None


class MemoryPredictor(Protocol):
    """Predicts the peak memory of any configuration of one model. Real: `TracingPredictor`."""

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        """Return the prediction.

        Raises:
            Untraceable: the model's code cannot be walked; the message names the module and why.
            InputError: the model's config contradicts itself, or has no such target modules.
            EnvironmentFault: the tracing process has never answered.
        """
        ...

    def prepare(
        self, configs: Iterable[TrialConfig], *, on_progress: OnProgress = tell_nobody
    ) -> None:
        """Do once, and faster than one by one, what predicting these configurations takes first.

        Args:
            configs: of a whole space, say.
            on_progress: told how much of it is done, of how much, before it begins and after each
                part; of nothing where there is nothing to do.

        Raises:
            EnvironmentFault: the tracing process has never answered.
        """
        ...


class TracingPredictor:
    """Predicts by the model's own code, traced once for each structure. See `MemoryPredictor`.

    Args:
        model: the model.
        cache_dir: where structures that were traced once are kept.
        compute_capability: of the card; None where it is not known, which is taken for the largest
            need.
        tracer: traces structures; by default a child process, started at the first one that is not
            kept.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        cache_dir: Path,
        compute_capability: tuple[int, int] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._model = model
        capability = compute_capability or HOPPER
        self._workspace_bytes = _workspace_bytes(capability)
        self._has_flash = capability >= AMPERE
        tracer = tracer or TracingChildren()
        self._profiles = ProfileStore(model, cache_dir=cache_dir, tracer=tracer)
        self._known: dict[Hashable, Profile] = {}

    def prepare(
        self, configs: Iterable[TrialConfig], *, on_progress: OnProgress = tell_nobody
    ) -> None:
        """Trace whatever structures are not kept yet, several at once.

        See `MemoryPredictor.prepare`.
        """
        longest: dict[Structure, TrialConfig] = {}
        for config in _of_each_kind(configs):
            for structure in self._structures(config):
                known = longest.setdefault(structure, config)
                longest[structure] = max(known, config, key=_length)
        self._profiles.fetch(longest, on_progress=on_progress)
        # From which length on masks exist is known of what was traced.
        long = [
            replace(structure, is_long=True)
            for structure, config in longest.items()
            if (profile := self._profiles.find(structure)) and _is_long(config, profile)
        ]
        self._profiles.fetch(long, on_progress=on_progress)

    def _structures(self, config: TrialConfig) -> Iterator[Structure]:
        """Yield the structures of a configuration's layers, as those of short sequences."""
        fraction = config.checkpoint_fraction
        for is_checkpointed in {fraction > 0, fraction == 1}:
            yield Structure.of(config, is_checkpointed=is_checkpointed, has_flash=self._has_flash)

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        """See `MemoryPredictor.predict`."""
        (step,) = self.steps([config])
        if isinstance(step, InputError):
            raise step
        peaks = find_peaks([step])
        if step.may_waste:
            peaks = peaks.wasting(np.array([wasted_bytes(step)]))
        return predicted(step, peaks, row=0)

    def steps(self, configs: Sequence[TrialConfig]) -> list[Step | InputError]:
        """Return each configuration's step, or why it has none; structures are traced as needed.

        Raises:
            EnvironmentFault: the tracing process has never answered.
        """
        steps: list[Step | InputError] = []
        for config in configs:
            try:
                steps.append(self._step(config))
            except InputError as error:
                steps.append(error.with_traceback(None))
        return steps

    def _step(self, config: TrialConfig) -> Step:
        profile = self._profile(config, is_checkpointed=config.checkpoint_fraction > 0)
        flags = _flags(config.checkpoint_fraction, len(profile.positions))
        return Step(
            config=config,
            profiles={f: self._profile(config, is_checkpointed=f) for f in set(flags)},
            flags=flags,
            values=_values(config, self._model),
            workspace_bytes=self._workspace_bytes,
        )

    def _profile(self, config: TrialConfig, *, is_checkpointed: bool) -> Profile:
        profile = self._traced(config, is_checkpointed=is_checkpointed)
        if not _is_long(config, profile):
            return profile
        return self._traced(config, is_checkpointed=is_checkpointed, is_long=True)

    def _traced(
        self, config: TrialConfig, *, is_checkpointed: bool, is_long: bool = False
    ) -> Profile:
        """Return the profile of a configuration's structure; quick where it was asked before."""
        shaping = (is_checkpointed, is_long, *(getattr(config, key) for key in _TRACED))
        if shaping not in self._known:
            structure = Structure.of(
                config,
                is_checkpointed=is_checkpointed,
                has_flash=self._has_flash,
                is_long=is_long,
            )
            self._known[shaping] = self._profiles.get(structure)
        return self._known[shaping]


def predicted(step: Step, peaks: Peaks, *, row: int) -> MemoryPrediction:
    """Return the prediction of a step whose peak is one of many."""
    stated = COMPILED if step.config.compile else EAGER
    return MemoryPrediction(
        peak_allocated_bytes=int(peaks.total_bytes[row]),
        breakdown=peaks.breakdown(row),
        moment=peaks.moment(row),
        uncertainty=stated.allocated,
        reserved_uncertainty=stated.reserved,
        step=step,
    )


@lru_cache(maxsize=1024)
def _flags(checkpoint_fraction: float, layers: int) -> tuple[bool, ...]:
    """Return for each decoder layer whether it is recomputed."""
    config = TrialConfig(checkpoint_fraction=checkpoint_fraction)
    chosen = config.checkpointed_layers(layers)
    return tuple(layer in chosen for layer in range(layers))


class Residuals:
    """How far a study's trials were off their predictions at worst.

    It only ever widens what a prediction states: that is derived from more rows than a study has
    trials. Compiled layers keep other tensors than eager ones, so each says nothing of the other.
    """

    def __init__(self, records: Iterable[TrialRecord] = ()) -> None:
        self._worst = {False: 0.0, True: 0.0}
        for record in records:
            self.learn(record)

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial; one that was not both predicted and measured says nothing."""
        if record.prediction is None or record.measurement is None:
            return
        predicted = record.prediction.peak_allocated_bytes
        error = abs(record.measurement.peak_allocated_bytes / predicted - 1.0)
        is_compiled = record.config.compile
        self._worst[is_compiled] = max(self._worst[is_compiled], error)

    def widened(self, prediction: MemoryPrediction, config: TrialConfig) -> MemoryPrediction:
        """Return the prediction of ``config``, no surer than the trials so far allow."""
        worst = self._worst[config.compile]
        if worst <= prediction.uncertainty:
            return prediction
        return prediction.widened(worst + RESIDUAL_MARGIN)


def _of_each_kind(configs: Iterable[TrialConfig]) -> Iterable[TrialConfig]:
    """Return the longest of the configurations that have the same tensors, of each kind of them."""
    longest: dict[tuple[Any, ...], TrialConfig] = {}
    for config in configs:
        fraction = config.checkpoint_fraction
        key = (*(getattr(config, name) for name in _TRACED), fraction > 0, fraction < 1)
        longest[key] = max(longest.get(key, config), config, key=_length)
    return longest.values()


def _length(config: TrialConfig) -> int:
    return config.seq_len


def _is_long(config: TrialConfig, profile: Profile) -> bool:
    """Whether the attention window needs a mask; flash-attn's own kernel takes it as a number."""
    if profile.window is None or config.attention == "flash_attention_2":
        return False
    return config.seq_len >= profile.window


def _workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Return what cuBLAS takes from torch's allocator (torch's ``CublasHandlePool.cpp``)."""
    is_hopper = compute_capability >= HOPPER
    return _WORKSPACES * (_HOPPER_WORKSPACE_BYTES if is_hopper else _OLDER_WORKSPACE_BYTES)


def _values(config: TrialConfig, model: ModelSpec) -> Values:
    """Return a configuration's values of the symbols that `polynomials` lists."""
    return {
        "b": config.micro_batch_size,
        "s": config.seq_len,
        "r": config.lora_rank,
        "c": _chunk_tokens(config.tokens_per_micro_batch, model),
        "p": -(-config.seq_len // _PADDED_LENGTH) * _PADDED_LENGTH,
    }


def _chunk_tokens(tokens: int, model: ModelSpec) -> int:
    """Return the rows of a chunk of Liger's fused loss, as its forward pass works them out.

    So many that a chunk's logits are about as large as all hidden states are.
    """
    chunks = -(-model.vocab_size // model.hidden_size)
    rows = -(-tokens // chunks)
    return min(1 << (rows - 1).bit_length(), tokens)
