"""Predicting memory: configurations become steps of the profiles of their structures.

Liger's kernels, bitsandbytes' and attention's are Triton and CUDA programs that cannot be traced:
what they keep and take is modelled (`sweep.predict.memory.tracing.fused`, `.fourbit`, `.cuda`).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.config import (
    BATCH_KEYS,
    LOGITS_AT_ONCE,
    SETTINGS,
    TRL_TILE,
    TrialConfig,
)
from qlora_sweep.search_spaces.dimensions import Dimension, FloatRange
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.kinds import AMPERE, HOST_SLOTS
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.recurrent import plain_loop, recurrent_kind
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.storage.records import TrialRecord
from qlora_sweep.sweep.predict.memory.allocator import MIB
from qlora_sweep.sweep.predict.memory.prediction import Fit, Known, MemoryPrediction, WholeMemory
from qlora_sweep.sweep.predict.memory.profile_store import (
    OnProgress,
    ProfileStore,
    Tracer,
    TracingChildren,
    ignore_progress,
)
from qlora_sweep.sweep.predict.memory.profiles import (
    TRACED_KEYS,
    Profile,
    Structure,
    Untraceable,
    Values,
    as_nodes,
    offloaded,
    sharded,
)
from qlora_sweep.sweep.predict.memory.replay import Step
from qlora_sweep.sweep.predict.memory.shipped import ShippedProfiles

__all__ = ["Fit", "MemoryPrediction", "MemoryPredictor", "Residuals", "TracingPredictor"]

HOPPER = (9, 0)

_WORKSPACES = 2
"""cuBLAS keeps one for the thread that runs forward, and one for autograd's."""
_HOPPER_WORKSPACE_BYTES = 32 * MIB
_OLDER_WORKSPACE_BYTES = 8 * MIB + 128 * 1024
_BENCHMARK_BYTES = {
    (8, 0): 40 * MIB,
    HOPPER: 60 * MIB,
    (8, 9): 72 * MIB,
    (10, 0): 126 * MIB,
    (12, 0): 96 * MIB,
}
"""By compute capability. The compiler tries kernels out with a cleared second-level cache, and
allocates a buffer of that cache's size for it (torch's ``benchmarking.py``). 60 MiB were read off
an H200's allocator; the others are published sizes, and GPUs of one capability differ: an H100 is
said to have 50 MB, an L4 48, an RTX 4090 72, an L40S 96. Kernels that are kept on the disk from an
earlier training are not tried out again."""
_OLDER_BENCHMARK_BYTES = 6 * MIB
_PADDED_LENGTH = 128
"""Rows that an attention kernel's backward pass works on at once."""
_CHUNK_LENGTH = 64
"""Tokens that the kernels of linear attention take together (flash-linear-attention 0.6.0)."""
CPU_UNCERTAINTY = 0.2
"""Relative, of the allocated peak. Of 46 configurations of the demo model predictions were 2 % too
low to 1 % too high, and up to 18 % too high where fp32 activations are kept: a GPU has no fused
attention in fp32 with grouped-query heads, and keeps the scores; a CPU has one. It grows with the
length: 24 % at 256 tokens, 38 % at 512 (`tests/data/cpu/peaks.jsonl`)."""
TRL_ON_CPU_UNCERTAINTY = 0.9
"""The same with TRL's head, whose kernel needs Triton: without it each tile of logits is folded by
operators that copy it in fp32. Twelve configurations of the demo model took 18 to 86 % more than
predicted (4 sequences of 64 to 512 tokens, fp32 and bf16, TRL 1.16, 2026-11-28)."""
RESIDUAL_MARGIN = 0.01
"""Kept on top of the worst error of a study, where that is worse than what predictions state."""


class MemoryPredictor(ABC):
    """Predicts the peak memory of any configuration of one model. Real: `TracingPredictor`."""

    @abstractmethod
    def predict_all(
        self, configs: Sequence[TrialConfig], *, on_progress: OnProgress = ignore_progress
    ) -> WholeMemory:
        """Return what is predicted of many configurations, worked out together.

        Args:
            configs: of a whole space, say.
            on_progress: told how much is done of what has to be done once, of how much, before it
                begins and after each part; of nothing where there is nothing to do.

        Raises:
            EnvironmentFault: the tracing process has never answered.
        """

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        """Return what is predicted of one.

        Raises:
            Untraceable: the model's code cannot be walked; the message names the module and why.
            InputError: the model's config contradicts itself, or has no such target modules.
            EnvironmentFault: the tracing process has never answered.
        """
        return self.predict_all([config]).prediction(0)


_Shape = tuple[Any, ...]
"""A configuration's settings that shape tensors."""
_TRACED_VALUES = attrgetter(*TRACED_KEYS)
_Key = tuple[bool, bool, _Shape]
"""Of a structure: whether its layers are recomputed, whether it is long, and what else shapes it; a
key that is quick to make."""


class TracingPredictor(MemoryPredictor):
    """Predicts by the model's own code, traced once for each structure. See `MemoryPredictor`.

    Args:
        model: the model.
        cache_dir: where structures that were traced once are kept.
        compute_capability: of the GPU; None where it is not known, which is taken for the largest
            need.
        workspace_bytes: that libraries take from torch's allocator; None for cuBLAS's.
        tracer: traces structures; by default a child process, started at the first one that is not
            kept.
        shipped: profiles that travel with the package; None for its own.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        cache_dir: Path,
        compute_capability: tuple[int, int] | None = None,
        workspace_bytes: int | None = None,
        tracer: Tracer | None = None,
        shipped: ShippedProfiles | None = None,
    ) -> None:
        self._model = model
        capability = compute_capability or HOPPER
        if workspace_bytes is None:
            # What cuBLAS takes from torch's allocator (torch's ``CublasHandlePool.cpp``).
            workspace_bytes = _WORKSPACES * _OLDER_WORKSPACE_BYTES
            if capability >= HOPPER:
                workspace_bytes = _WORKSPACES * _HOPPER_WORKSPACE_BYTES
        self._workspace_bytes = workspace_bytes
        self._benchmark_bytes = _BENCHMARK_BYTES.get(capability, _OLDER_BENCHMARK_BYTES)
        self._has_flash = capability >= AMPERE
        self._tracer = tracer or TracingChildren()
        self._profiles = ProfileStore(
            model, cache_dir=cache_dir, tracer=self._tracer, shipped=shipped
        )
        self._known: dict[_Key, Profile | InputError] = {}
        self._made: dict[Hashable, Profile] = {}
        """Of what is traced, what is sharded or has experts on the host."""

    def end_children(self) -> None:
        """End the processes that traced; a later question starts new ones."""
        self._tracer.close()

    def origin(self, config: TrialConfig) -> str | None:
        """Return a digest of the file that ships what a configuration is predicted from; None where
        that was traced here."""
        is_checkpointed = config.checkpoint_fraction > 0
        has_flash = self._has_flash
        one = Structure.of(config, is_checkpointed=is_checkpointed, has_flash=has_flash)
        return self._profiles.origin(one.parts()[0])

    @property
    def other_versions(self) -> str:
        """In words, the libraries of which others traced what is predicted from; empty for none."""
        if not self._profiles.has_borrowed:
            return ""
        return self._profiles.other_versions

    def predict_all(
        self, configs: Sequence[TrialConfig], *, on_progress: OnProgress = ignore_progress
    ) -> WholeMemory:
        """See `MemoryPredictor.predict_all`."""
        shapes: list[_Shape] = list(map(_TRACED_VALUES, configs))
        for is_long in (False, True):
            self._fetch(configs, shapes, is_long=is_long, on_progress=on_progress)
        steps: list[Step | InputError] = []
        for config, shape in zip(configs, shapes, strict=True):
            try:
                steps.append(self._step(config, shape))
            except InputError as error:
                steps.append(error.with_traceback(None))
        return WholeMemory(configs, steps)

    def _fetch(
        self,
        configs: Sequence[TrialConfig],
        shapes: Sequence[_Shape],
        *,
        is_long: bool,
        on_progress: OnProgress,
    ) -> None:
        """Have the profiles of all configurations at hand, or of those beyond their window."""
        wanted: dict[_Key, Structure] = {}
        for config, shape in zip(configs, shapes, strict=True):
            for is_checkpointed in _kinds_of_layers(config):
                key = (is_checkpointed, is_long, shape)
                if key in self._known or key in wanted:
                    continue
                # From which length on masks exist is known of what was traced.
                if not is_long or _is_long(config, self._known[is_checkpointed, False, shape]):
                    wanted[key] = Structure.of(
                        config,
                        is_checkpointed=is_checkpointed,
                        has_flash=self._has_flash,
                        is_long=is_long,
                    )
        found = self._profiles.fetch(wanted.values(), on_progress=on_progress)
        for key, structure in wanted.items():
            self._known[key] = found[structure]

    def _step(self, config: TrialConfig, shape: _Shape) -> Step:
        first = self._profile(config, config.checkpoint_fraction > 0, shape)
        flags = _flags(config.checkpoint_fraction, len(first.positions))
        waiting_bytes = 0
        if config.waits_on_host:
            waiting_bytes = config.hidden_bytes(self._model.hidden_size)
        return Step(
            config=config,
            profiles={flag: self._profile(config, flag, shape) for flag in set(flags)},
            flags=flags,
            values=_values(config, self._model),
            workspace_bytes=self._workspace_bytes + HOST_SLOTS * waiting_bytes,
            benchmark_bytes=self._benchmark_bytes,
            checkpoint_host_bytes=sum(flags) * waiting_bytes,
            is_unseen=config.compile and recurrent_kind(self._model) is not None,
        )

    def _profile(self, config: TrialConfig, is_checkpointed: bool, shape: _Shape) -> Profile:
        known = self._known[is_checkpointed, False, shape]
        if _is_long(config, known):
            known = self._known[is_checkpointed, True, shape]
        if isinstance(known, InputError):
            # A new exception each time, as one that is raised twice keeps the frames of both.
            raise type(known)(*known.args)
        # The same one for configurations alike.
        if config.is_sharded:
            key: Hashable = id(known), config.data_parallel, config.lora_rank, config.target_modules
            if key not in self._made:
                self._made[key] = sharded(known, config, self._model)
            return self._made[key]
        if is_checkpointed and config.recomputes_as_nodes and not config.waits_on_host:
            # What waits on the host was traced as it is.
            if id(known) not in self._made:
                self._made[id(known)] = as_nodes(known)
            known = self._made[id(known)]
        if config.offload_fraction > 0:
            key = id(known), config.offload_fraction
            if key not in self._made:
                self._made[key] = offloaded(known, config)
            return self._made[key]
        return known


class CpuMemory(TracingPredictor):
    """Predicts allocated peaks on a CPU, where no library takes a workspace."""

    def __init__(self, model: ModelSpec, *, cache_dir: Path, tracer: Tracer | None = None) -> None:
        super().__init__(model, cache_dir=cache_dir, workspace_bytes=0, tracer=tracer)

    def predict_all(
        self, configs: Sequence[TrialConfig], *, on_progress: OnProgress = ignore_progress
    ) -> WholeMemory:
        """See `MemoryPredictor.predict_all`."""
        traced = super().predict_all(configs, on_progress=on_progress)
        known: list[Known] = []
        for row, config in enumerate(configs):
            if row in traced.unpredicted:
                known.append(traced.unpredicted[row])
            else:
                known.append(_on_cpu(traced.prediction(row), config))
        return WholeMemory(configs, known)


class Unmodelled(MemoryPredictor):
    """Predicts nothing, as what runs the model's layers is not modelled.

    Args:
        reason: what that is.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def predict_all(
        self, configs: Sequence[TrialConfig], *, on_progress: OnProgress = ignore_progress
    ) -> WholeMemory:
        """See `MemoryPredictor.predict_all`."""
        return WholeMemory(configs, [Untraceable(self.reason) for _ in configs])


def predictor_here(
    model: ModelSpec,
    *,
    is_on_gpu: bool,
    cache_dir: Path,
    compute_capability: tuple[int, int] | None = None,
    tracer: Tracer | None = None,
) -> MemoryPredictor:
    """Return what predicts the memory of a model on this machine, with what is installed here.

    Args:
        model: the model.
        is_on_gpu: whether it is trained on a GPU.
        cache_dir: see `TracingPredictor`, as for the rest.
        compute_capability: of the GPU.
        tracer: traces structures.
    """
    looping = plain_loop(model, is_on_gpu=is_on_gpu)
    if looping is not None:
        return Unmodelled(f"{looping}, which is not modelled: a trial measures it")
    if not is_on_gpu:
        return CpuMemory(model, cache_dir=cache_dir, tracer=tracer)
    return TracingPredictor(
        model, cache_dir=cache_dir, compute_capability=compute_capability, tracer=tracer
    )


def _on_cpu(traced: MemoryPrediction, config: TrialConfig) -> MemoryPrediction:
    """Return what is traced of a GPU as it is known of a CPU."""
    uncertainty = CPU_UNCERTAINTY
    if config.has_head_of_trl:
        uncertainty = TRL_ON_CPU_UNCERTAINTY
    # A peak of which no step is known decides alone what fits.
    return replace(traced, uncertainty=uncertainty, reserved_uncertainty=uncertainty, step=None)


def _kinds_of_layers(config: TrialConfig) -> set[bool]:
    """Return whether layers are recomputed, of some and of others."""
    return {config.checkpoint_fraction > 0, config.checkpoint_fraction == 1}


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


def _is_long(config: TrialConfig, known: Profile | InputError) -> bool:
    """Whether the attention window needs a mask; flash-attn's own kernel takes it as a number."""
    if isinstance(known, InputError) or known.window is None:
        return False
    return config.attention != "flash_attention_2" and config.seq_len >= known.window


def _values(config: TrialConfig, model: ModelSpec) -> Values:
    """Return a configuration's values of the symbols that `profiles` lists."""
    # The tokens of a chunk of Liger's fused loss, as its forward pass works them out: so many that
    # a chunk's logits are about as large as all hidden states are.
    tokens = config.tokens_per_micro_batch
    chunks = -(-model.vocab_size // model.hidden_size)
    chunk = 1 << (-(-tokens // chunks) - 1).bit_length()
    if config.is_on_pairs:
        chunk = max(1, LOGITS_AT_ONCE // model.vocab_size)
    elif config.has_head_of_trl:
        chunk = TRL_TILE[0]
    return {
        "b": config.micro_batch_size,
        "s": config.seq_len,
        "r": config.lora_rank,
        "c": min(chunk, tokens),
        "n": -(-config.seq_len // _CHUNK_LENGTH),
        "p": -(-config.seq_len // _PADDED_LENGTH) * _PADDED_LENGTH,
    }


def one_of_each_kind(space: SearchSpace) -> Iterator[TrialConfig]:
    """Yield a configuration for each set of tensors that a space's configurations can have, and the
    baseline.

    Each is as long as any is, so that one beyond an attention window is among them.
    """
    yield space.baseline_config()
    params = {key: dimension.first for key, dimension in space.dimensions.items()}
    if space.batches:
        for key, value in zip(BATCH_KEYS, space.batches[0], strict=True):
            if key in params:
                params[key] = value
    if "seq_len" in params:
        params["seq_len"] = max(space.values_of("seq_len"))
    kinds: dict[str, list[Any]] = {}
    for key, dimension in space.dimensions.items():
        if key in _KIND_OF:
            kinds[key] = _kinds(dimension, _KIND_OF[key])
    for row in itertools.product(*kinds.values()):
        combination = params | dict(zip(kinds, row, strict=True))
        if space.goes_together(combination):
            yield space.config(combination)


def _kinds_of_layers_in(share: float) -> tuple[bool, bool]:
    """Return whether some layers are of the one kind, and whether some are of the other."""
    return share > 0, share < 1


_KIND_OF: dict[str, Callable[[Any], Any]] = {
    key: setting.traced for key, setting in SETTINGS.items() if setting.traced
}
_KIND_OF["checkpoint_fraction"] = _kinds_of_layers_in
_KIND_OF["quantized_fraction"] = _kinds_of_layers_in


def _kinds(dimension: Dimension, kind_of: Callable[[Any], Any]) -> list[Any]:
    """Return a value of each kind; in a range without steps, of the kinds of its ends."""
    values = dimension.values()
    if values is None:
        assert isinstance(dimension, FloatRange), "only a range of numbers has no list of values"
        values = (dimension.low, dimension.at(0.5), dimension.high)
    last_of_kind = {repr(kind_of(value)): value for value in values}
    return list(last_of_kind.values())
