"""Owns the memory prediction of one configuration: its structure's profile, scaled and walked through a step.

Knows nothing of Optuna, processes or files. Liger's kernels, bitsandbytes' and attention's are Triton and CUDA programs
that cannot be traced: what they keep and take is modelled (`sweep.predict.tracing.liger`, `.fourbit`, `.attention`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from search_spaces.config import TrialConfig
from search_spaces.models import ModelSpec
from sweep.predict.child import TracingChild
from sweep.predict.polynomials import Values, evaluate
from sweep.predict.profiles import Account, Profile, ProfileStore, Structure, Tracer
from sweep.predict.states import optimizer_bytes, rounded

MIB = 2**20
_WORKSPACE_BYTES = 64 * MIB
_PADDED_LENGTH = 128
"""Rows that an attention kernel's backward pass works on at once."""
_UNCERTAINTY = 0.01
_COMPILE_UNCERTAINTY = 0.1
_RESERVED_FACTOR = 1.05
_FREE = ("activations", "gradients", "loss")


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
    peak_reserved_bytes: int
    """What `torch.cuda.max_memory_reserved` would read where nothing caps it."""
    breakdown: dict[str, int]
    """The peak's parts: ``weights``, ``adapters``, ``gradients``, ``optimizer``, ``activations``, ``loss``.

    The libraries' workspaces count as activations.
    """
    moment: str
    """When the peak is reached: ``forward``, ``loss``, ``backward`` or ``optimizer``."""
    uncertainty: float
    """Relative; the truth is expected within this much of the peak."""

    def fits(self, budget_bytes: int) -> Fit:
        """Return whether it fits: surely, surely not, or too close to say.

        Between the allocated peak and the reserved one the allocator gives cached blocks back before it fails.
        """
        if self.peak_allocated_bytes * (1 - self.uncertainty) > budget_bytes:
            return Fit.NO
        if self.peak_reserved_bytes * (1 + self.uncertainty) <= budget_bytes:
            return Fit.YES
        return Fit.UNCERTAIN


class MemoryPredictor:
    """Predicts any configuration of one model.

    Args:
        model: the model.
        cache_dir: where structures that were traced once are kept.
        tracer: traces structures; a child process of this predictor's own by default.
    """

    def __init__(self, model: ModelSpec, *, cache_dir: Path, tracer: Tracer | None = None) -> None:
        self._model = model
        self._profiles = ProfileStore(model, cache_dir=cache_dir, tracer=tracer or TracingChild())

    def predict(self, config: TrialConfig) -> MemoryPrediction:
        """Return the prediction.

        Raises:
            Untraceable: the model's code cannot be walked; the message names the module and why.
            InputError: the model's config contradicts itself, or has no such target modules.
            EnvironmentFault: the tracing process does not answer.
        """
        step = self._step(config)
        peak = max(step.states(), key=lambda state: state.total)
        breakdown = {**step.resident(), **peak.parts}
        breakdown["activations"] += _WORKSPACE_BYTES
        allocated = sum(breakdown.values())
        return MemoryPrediction(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=int(allocated * _RESERVED_FACTOR),
            breakdown=breakdown,
            moment=peak.moment,
            uncertainty=_COMPILE_UNCERTAINTY if config.compile else _UNCERTAINTY,
        )

    def _step(self, config: TrialConfig) -> Step:
        some = config.checkpoint_fraction > 0
        profile = self._profile(config, is_checkpointed=some)
        layers = len(profile.positions)
        chosen = config.checkpointed_layers(layers)
        flags = tuple(index in chosen for index in range(layers))
        profiles = {
            flag: profile if flag == some else self._profile(config, is_checkpointed=flag)
            for flag in {*flags, some}
        }
        return Step(config, profiles, flags, _values(config, self._model))

    def _profile(self, config: TrialConfig, *, is_checkpointed: bool) -> Profile:
        structure = Structure.of(config, is_checkpointed=is_checkpointed)
        profile = self._profiles.get(structure)
        if profile.window is None or config.seq_len < profile.window:
            return profile
        return self._profiles.get(
            Structure.of(config, is_checkpointed=is_checkpointed, is_long=True)
        )
