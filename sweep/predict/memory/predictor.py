"""Predicting memory: configurations become steps of the profiles of their structures.

Liger's kernels, bitsandbytes' and attention's are Triton and CUDA programs that cannot be traced:
what they keep and take is modelled (`sweep.predict.memory.tracing.fused`, `.fourbit`, `.cuda`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.dimensions import Dimension, FloatRange
from search_spaces.errors import InputError
from search_spaces.knobs import KNOBS
from search_spaces.linears import is_tied
from search_spaces.models import ModelSpec
from search_spaces.space import BATCHES, SearchSpace
from storage.records import TrialRecord
from sweep.predict.memory.allocator import MIB
from sweep.predict.memory.prediction import Fit, MemoryPrediction, PeakMemory, WholeMemory
from sweep.predict.memory.profile_store import (
    OnProgress,
    ProfileStore,
    Tracer,
    TracingChildren,
    tell_nobody,
)
from sweep.predict.memory.profiles import Profile, Structure, Values, sharded
from sweep.predict.memory.replay import Step

__all__ = ["Fit", "MemoryPrediction", "MemoryPredictor", "Residuals", "TracingPredictor"]

HOPPER = (9, 0)
AMPERE = (8, 0)

_WORKSPACES = 2
"""cuBLAS keeps one for the thread that runs forward, and one for autograd's."""
_HOPPER_WORKSPACE_BYTES = 32 * MIB
_OLDER_WORKSPACE_BYTES = 8 * MIB + 128 * 1024
_TRACED = tuple(key for key, knob in KNOBS.items() if knob.traced)
_PADDED_LENGTH = 128
"""Rows that an attention kernel's backward pass works on at once."""
CPU_UNCERTAINTY = 0.2
"""Relative, of the allocated peak. Of 46 configurations of the demo model predictions were 2 % too
low to 1 % too high, and up to 18 % too high where fp32 activations are kept: the CPU's attention
keeps less of those (`tests/data/cpu/peaks.jsonl`)."""
RESIDUAL_MARGIN = 0.01
"""Kept on top of the worst error of a study, where that is worse than what predictions state."""


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

    def predict_all(self, configs: Sequence[TrialConfig]) -> WholeMemory:
        """Return what is predicted of many configurations, worked out together.

        Raises:
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
        workspace_bytes: that libraries take from torch's allocator; None for cuBLAS's.
        tracer: traces structures; by default a child process, started at the first one that is not
            kept.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        cache_dir: Path,
        compute_capability: tuple[int, int] | None = None,
        workspace_bytes: int | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._model = model
        capability = compute_capability or HOPPER
        # What cuBLAS takes from torch's allocator (torch's ``CublasHandlePool.cpp``).
        each = _HOPPER_WORKSPACE_BYTES if capability >= HOPPER else _OLDER_WORKSPACE_BYTES
        self._workspace_bytes = _WORKSPACES * each if workspace_bytes is None else workspace_bytes
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
                longest[structure] = max(known, config, key=attrgetter("seq_len"))
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
        return self.predict_all([config]).prediction(0)

    def predict_all(self, configs: Sequence[TrialConfig]) -> WholeMemory:
        """See `MemoryPredictor.predict_all`."""
        steps: list[Step | InputError] = []
        for config in configs:
            try:
                steps.append(self._step(config))
            except InputError as error:
                steps.append(error.with_traceback(None))
        return PeakMemory(configs, steps)

    def _step(self, config: TrialConfig) -> Step:
        profile = self._profile(config, is_checkpointed=config.checkpoint_fraction > 0)
        flags = _flags(config.checkpoint_fraction, len(profile.positions))
        return Step(
            config=config,
            profiles={f: self._profile(config, is_checkpointed=f) for f in set(flags)},
            flags=flags,
            values=_values(config, self._model),
            workspace_bytes=self._workspace_bytes,
            is_unseen=config.is_sharded and is_tied(self._model),
        )

    def _profile(self, config: TrialConfig, *, is_checkpointed: bool) -> Profile:
        profile = self._traced(config, is_checkpointed=is_checkpointed)
        if _is_long(config, profile):
            profile = self._traced(config, is_checkpointed=is_checkpointed, is_long=True)
        if not config.is_sharded:
            return profile
        # The same one for configurations alike.
        key = id(profile), config.data_parallel, config.lora_rank, config.target_modules
        if key not in self._known:
            self._known[key] = sharded(profile, config, self._model)
        return self._known[key]

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


class CpuMemory(TracingPredictor):
    """Predicts allocated peaks on a CPU, where no library takes a workspace."""

    def __init__(self, model: ModelSpec, *, cache_dir: Path, tracer: Tracer | None = None) -> None:
        super().__init__(model, cache_dir=cache_dir, workspace_bytes=0, tracer=tracer)

    def predict_all(self, configs: Sequence[TrialConfig]) -> WholeMemory:
        """See `MemoryPredictor.predict_all`."""
        return WholeMemory(self.predict, configs)

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        """See `MemoryPredictor.predict`."""
        known = super().predict_all([config]).prediction(0)
        # A peak of which no step is known decides alone what fits.
        return replace(
            known, uncertainty=CPU_UNCERTAINTY, reserved_uncertainty=CPU_UNCERTAINTY, step=None
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

    def widest(
        self, stated: NDArray[np.float64], configs: Sequence[TrialConfig]
    ) -> NDArray[np.float64]:
        """Return how far the peaks of configurations may be off, given what predictions state."""
        worst = np.array([self._worst[config.compile] for config in configs], float)
        return np.where(worst <= stated, stated, worst + RESIDUAL_MARGIN)


def _of_each_kind(configs: Iterable[TrialConfig]) -> Iterable[TrialConfig]:
    """Return the longest of the configurations that have the same tensors, of each kind of them."""
    longest: dict[tuple[Any, ...], TrialConfig] = {}
    for config in configs:
        fraction = config.checkpoint_fraction
        key = (*(getattr(config, name) for name in _TRACED), fraction > 0, fraction < 1)
        longest[key] = max(longest.get(key, config), config, key=attrgetter("seq_len"))
    return longest.values()


def _is_long(config: TrialConfig, profile: Profile) -> bool:
    """Whether the attention window needs a mask; flash-attn's own kernel takes it as a number."""
    if profile.window is None or config.attention == "flash_attention_2":
        return False
    return config.seq_len >= profile.window


def _values(config: TrialConfig, model: ModelSpec) -> Values:
    """Return a configuration's values of the symbols that `profiles` lists."""
    # The rows of a chunk of Liger's fused loss, as its forward pass works them out: so many that a
    # chunk's logits are about as large as all hidden states are.
    tokens = config.tokens_per_micro_batch
    chunks = -(-model.vocab_size // model.hidden_size)
    rows = -(-tokens // chunks)
    return {
        "b": config.micro_batch_size,
        "s": config.seq_len,
        "r": config.lora_rank,
        "c": min(1 << (rows - 1).bit_length(), tokens),
        "p": -(-config.seq_len // _PADDED_LENGTH) * _PADDED_LENGTH,
    }


def one_of_each_kind(space: SearchSpace) -> Iterator[TrialConfig]:
    """Yield a configuration for each set of tensors that a space's configurations can have, and the
    baseline.

    Each is as long as any is, so that one beyond an attention window is among them.
    """
    yield space.baseline_config()
    params = {key: dimension.first for key, dimension in space.dimensions.items()}
    batches = zip(BATCHES, space.batches[0], strict=True) if space.batches else ()
    params |= {key: value for key, value in batches if key in params}
    if "seq_len" in params:
        params["seq_len"] = max(space.values_of("seq_len"))
    kinds = {
        key: _kinds(dimension, _KIND_OF[key])
        for key, dimension in space.dimensions.items()
        if key in _KIND_OF
    }
    for row in itertools.product(*kinds.values()):
        each = {**params, **dict(zip(kinds, row, strict=True))}
        if space.goes_together(each):
            yield space.config(each)


_KIND_OF: dict[str, Callable[[Any], Any]] = {
    **{key: knob.traced for key, knob in KNOBS.items() if knob.traced},
    # Whether some layers are of the one kind, and whether some are of the other.
    **dict.fromkeys(
        ("checkpoint_fraction", "quantized_fraction"), lambda share: (share > 0, share < 1)
    ),
}


def _kinds(dimension: Dimension, kind_of: Callable[[Any], Any]) -> list[Any]:
    """Return a value of each kind; in a range without steps, of the kinds of its ends."""
    values = dimension.values()
    if values is None:
        assert isinstance(dimension, FloatRange), "only a range of numbers has no list of values"
        values = (dimension.low, dimension.at(0.5), dimension.high)
    return list({repr(kind_of(value)): value for value in values}.values())
