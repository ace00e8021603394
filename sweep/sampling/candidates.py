"""Owns what a guided sampler chooses from: every valid configuration of a space, once.

A space that is continuous or too large to be listed is sampled anew for each choice, evenly over
every dimension, and more closely around what looked best. Knows nothing of trials or predictions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from search_spaces.config import TrialConfig
from search_spaces.dimensions import Dimension, FloatRange
from sweep.sampling.encoding import Encoding, Params, identity

LISTED_MAX = 50_000
"""Combinations up to which a space is listed whole, every preset among them.

20,000 take two seconds of one core, once, and a choice among them takes less than one among the
samples of a larger space, of which all is worked out anew each time.
"""
SAMPLED = 2048
"""Combinations of a larger space that are looked at for each choice."""
STEPS_ASIDE = (0.02, 0.1)
"""Shares of a continuous dimension's range by which one goes from what looked best."""


@dataclass(frozen=True)
class Candidate:
    """One configuration, as Optuna keeps it and as it is trained."""

    params: Params
    config: TrialConfig
    key: str
    """Equal for configurations that train the same way."""


class Candidates(Protocol):
    """What may be chosen."""

    @property
    def is_listed(self) -> bool:
        """Whether it is everything there is, and the same at every choice."""
        ...

    def near(self, best: Sequence[Params]) -> tuple[Candidate, ...]:
        """Return what to choose from, with more of what is like ``best`` where not all is."""
        ...

    def config(self, params: Params) -> TrialConfig:
        """Return the configuration of a trial's parameters."""
        ...


class SpaceCandidates:
    """The valid configurations of a search space."""

    def __init__(
        self, encoding: Encoding, *, is_valid: Callable[[TrialConfig], bool], seed: int
    ) -> None:
        self._encoding = encoding
        self._is_valid = is_valid
        self._random = random.Random(seed)

    @property
    def is_listed(self) -> bool:
        """See `Candidates.is_listed`."""
        size = self._encoding.size
        return size is not None and size <= LISTED_MAX

    def near(self, best: Sequence[Params]) -> tuple[Candidate, ...]:
        """See `Candidates.near`."""
        if self.is_listed:
            return self._all
        drawn = [*self._spread(), *(p for near in best for p in self._beside(near))]
        whole = (self._encoding.with_whole_batches(p, draw=self._random) for p in drawn)
        return self._valid((params, self._encoding.config(params)) for params in whole)

    def config(self, params: Params) -> TrialConfig:
        """See `Candidates.config`."""
        return self._encoding.config(params)

    @cached_property
    def _all(self) -> tuple[Candidate, ...]:
        free = self._encoding.free
        return self._valid(
            ({name: params[name] for name in free}, config)
            for params, config in self._encoding.every()
        )

    def _valid(self, drawn: Iterable[tuple[Params, TrialConfig]]) -> tuple[Candidate, ...]:
        """Return each configuration once, without those that a rule forbids."""
        found: dict[str, Candidate] = {}
        for params, config in drawn:
            key = identity(config)
            if key not in found and self._is_valid(config):
                found[key] = Candidate(params, config, key)
        return tuple(found.values())

    def _spread(self) -> Iterator[Params]:
        """Yield combinations that, taken together, have every part of each dimension as often."""
        columns = {name: self._strata(name) for name in self._encoding.free}
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))

    def _strata(self, name: str) -> list[Any]:
        shares = [(stratum + self._random.random()) / SAMPLED for stratum in range(SAMPLED)]
        self._random.shuffle(shares)
        return [self._at(name, share) for share in shares]

    def _at(self, name: str, share: float) -> Any:
        """Return the value of a dimension at a share of its way, from 0 to 1."""
        dimension = self._encoding.space.dimensions[name]
        values = dimension.values()
        if values is None:
            return _continuous(dimension).at(share)
        value = values[min(int(share * len(values)), len(values) - 1)]
        return self._encoding.encode({name: value})[name]

    def _beside(self, params: Params) -> Iterator[Params]:
        """Yield combinations that differ in one dimension, by little where it has an order."""
        for name in self._encoding.free:
            dimension = self._encoding.space.dimensions[name]
            values = dimension.values()
            if values is None:
                line = _continuous(dimension)
                here = line.share_of(params[name])
                steps = [sign * step for step in STEPS_ASIDE for sign in (-1, 1)]
                yield from (params | {name: line.at(here + step)} for step in steps)
            else:
                encoded = [self._encoding.encode({name: value})[name] for value in values]
                at = encoded.index(params[name]) if params[name] in encoded else 0
                is_ordered = all(isinstance(value, int | float) for value in encoded)
                near = encoded[max(0, at - 2) : at + 3] if is_ordered else encoded[:8]
                yield from (params | {name: value} for value in near)


def _continuous(dimension: Dimension) -> FloatRange:
    assert isinstance(dimension, FloatRange), "only a range of numbers has no list of values"
    return dimension
