"""Owns the memory prediction of one configuration: its structure's profile, scaled and walked.

Knows nothing of Optuna, processes or files. Liger's kernels, bitsandbytes' and attention's are
Triton and CUDA programs that cannot be traced: what they keep and take is modelled
(`sweep.predict.tracing.liger`, `.fourbit`, `.attention`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec
from sweep.predict.allocator import MIB
from sweep.predict.child import TracingChild
from sweep.predict.peak import find_peak
from sweep.predict.polynomials import Values
from sweep.predict.profiles import Profile, ProfileStore, Structure, Tracer
from sweep.predict.reserved import reserved_bytes
from sweep.predict.step import Step

HOPPER = (9, 0)
AMPERE = (8, 0)

_WORKSPACES = 2
"""cuBLAS keeps one for the thread that runs forward, and one for autograd's."""
_HOPPER_WORKSPACE_BYTES = 32 * MIB
_OLDER_WORKSPACE_BYTES = 8 * MIB + 128 * 1024
_PADDED_LENGTH = 128
"""Rows that an attention kernel's backward pass works on at once."""
_UNCERTAINTY = 0.01
_COMPILE_UNCERTAINTY = 0.1
_CAPPED = 2.5
"""How much less sure a replay under a cap is than the allocated peak."""
_WORST_FRAGMENTATION = 1.4
"""Reserved over allocated; the most that was measured is 1.28."""


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
    """Relative: the truth is expected within this much of the peak."""
    step: Step = field(repr=False)
    """What was walked."""

    @cached_property
    def peak_reserved_bytes(self) -> int:
        """What `torch.cuda.max_memory_reserved` would read where nothing caps it; some
        milliseconds, once.
        """
        reserved = reserved_bytes(self.step)
        assert reserved is not None, "an allocator without a limit cannot pass it"
        return reserved

    def fits(self, budget_bytes: int) -> Fit:
        """Return whether it runs where no more than the budget may be reserved.

        Between the allocated peak and the reserved one the allocator gives cached blocks back
        before it fails; what that is worth depends on how memory is cut up, so the step is replayed
        under the cap. The last percents of that are chaotic, and called uncertain.
        """
        if self.peak_allocated_bytes * (1 - self.uncertainty) > budget_bytes:
            return Fit.NO
        if self.peak_allocated_bytes * _WORST_FRAGMENTATION <= budget_bytes:
            return Fit.YES
        slack = int(budget_bytes * self.uncertainty * _CAPPED)
        if reserved_bytes(self.step, limit_bytes=budget_bytes - slack) is not None:
            return Fit.YES
        if reserved_bytes(self.step, limit_bytes=budget_bytes + slack) is None:
            return Fit.NO
        return Fit.UNCERTAIN


class MemoryPredictor:
    """Predicts any configuration of one model.

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
        self._profiles = ProfileStore(model, cache_dir=cache_dir, tracer=tracer or TracingChild())

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        """Return the prediction.

        Raises:
            Untraceable: the model's code cannot be walked; the message names the module and why.
            InputError: the model's config contradicts itself, or has no such target modules.
            EnvironmentFault: the tracing process does not answer.
        """
        step = self._step(config)
        peak = find_peak(step)
        return MemoryPrediction(
            peak_allocated_bytes=peak.total_bytes,
            breakdown=peak.parts,
            moment=peak.moment,
            uncertainty=_COMPILE_UNCERTAINTY if config.compile else _UNCERTAINTY,
            step=step,
        )

    def _step(self, config: TrialConfig) -> Step:
        is_checkpointed = config.checkpoint_fraction > 0
        profile = self._profile(config, is_checkpointed=is_checkpointed)
        layers = len(profile.positions)
        chosen = config.checkpointed_layers(layers)
        flags = tuple(layer in chosen for layer in range(layers))
        return Step(
            config=config,
            profiles={f: self._profile(config, is_checkpointed=f) for f in set(flags)},
            flags=flags,
            values=_values(config, self._model),
            workspace_bytes=self._workspace_bytes,
        )

    def _profile(self, config: TrialConfig, *, is_checkpointed: bool) -> Profile:
        structure = Structure.of(config, is_checkpointed=is_checkpointed, has_flash=self._has_flash)
        profile = self._profiles.get(structure)
        if profile.window is None or config.seq_len < profile.window:
            return profile
        # flash-attn's own kernel takes the window as a number; the others need a mask.
        is_long = config.attention != "flash_attention_2"
        return self._profiles.get(replace(structure, is_long=is_long))


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
    """Return the rows of a chunk of Liger's fused loss: as many logits as there are hidden
    elements, at most.
    """
    chunks = -(-model.vocab_size // model.hidden_size)
    rows = -(-tokens // chunks)
    return min(1 << (rows - 1).bit_length(), tokens)
