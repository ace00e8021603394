"""A search space as Optuna's distributions and as candidates, and what of it was not tried."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any, Protocol

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from search_spaces.config import TrialConfig, canonical
from search_spaces.dimensions import Choices, Dimension, FloatRange, IntRange
from search_spaces.space import BATCHES, SearchSpace

IDENTITIES_KEPT = 32_768
"""Identities that are not worked out again; one takes a kilobyte with its configuration."""
LISTED_MAX = 50_000
"""Combinations up to which a space is listed whole, every preset among them.

20,000 take two seconds of one core, once, and a choice among them takes less than one among the
samples of a larger space, of which all is worked out anew each time.
"""
SAMPLED = 2048
"""Combinations of a larger space that are looked at for each choice."""
STEPS_ASIDE = (0.02, 0.1)
"""Shares of a continuous dimension's range by which one goes from what looked best."""
UNTRIED_MAX = 50_000
"""Combinations that are gone through for one that was not tried."""

Params = dict[str, Any]
"""One value per dimension, as Optuna keeps it."""


class Encoding:
    """A search space as Optuna sees it: lists of module names as JSON text, all else as it is."""

    def __init__(self, space: SearchSpace) -> None:
        self.space = space
        self.distributions: dict[str, BaseDistribution] = {
            name: _distribution(dimension) for name, dimension in space.dimensions.items()
        }
        self.free: dict[str, BaseDistribution] = {
            name: distribution
            for name, distribution in self.distributions.items()
            if not distribution.single()
        }
        """The dimensions that have more than one value: Optuna samples these alone."""

    def encode(self, values: Mapping[str, Any]) -> Params:
        """Return the space's values of some dimensions as Optuna keeps them."""
        return {name: _encode(value) for name, value in values.items()}

    def decode(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the space's own values: the declared choice, the exact step of a range."""
        return {name: _decode(value, self.space.dimensions[name]) for name, value in params.items()}

    def config(self, params: Mapping[str, Any]) -> TrialConfig:
        """Return the configuration for a value of each free dimension."""
        return self.space.config(self.decode({**self._single_values, **params}))

    def params_of(self, config: TrialConfig) -> Params | None:
        """Return the parameters that give ``config``; None where the space does not hold it."""
        values = self.space.params_of(config)
        return None if values is None else self.encode(values)

    @cached_property
    def size(self) -> int | None:
        """Number of combinations; None where a dimension is continuous."""
        return self.space.size()

    def combination(self, index: int) -> Params:
        """Return combination ``index`` of ``size``, counted as the digits of a number are."""
        params: Params = {}
        for column in self._columns:
            index, position = divmod(index, len(column))
            params |= column[position]
        return params

    def every(self) -> Iterator[tuple[Params, TrialConfig]]:
        """Yield each combination with its configuration, each value validated once.

        The same as `config` of every `combination`, several times as fast.
        """
        first = self.combination(0)
        parsed = self.config(first)
        columns: list[list[tuple[Params, dict[str, Any]]]] = []
        for column in self._columns:
            configs = [self.config(first | part) for part in column]
            parts = [{key: getattr(config, key) for key in column[0]} for config in configs]
            columns.append(list(zip(column, parts, strict=True)))
        for row in itertools.product(*columns):
            params: Params = {}
            values: dict[str, Any] = {}
            for part, known in row:
                params |= part
                values |= known
            yield params, parsed.model_copy(update=values)

    def with_whole_batches(self, params: Params, *, draw: random.Random) -> Params:
        """Return ``params`` with other batches where these do not go into each other, and with
        others of what `leave_out` names where these are left out.

        A sampler draws them one by one, and only some of them together are in the space. The
        micro-batch stays, and so do the cards where any effective batch goes with both.
        """
        if self.space.leaves_out(self.decode(params)):
            others = self.encode(draw.choice(self.space.together))
            params = params | {key: value for key, value in others.items() if key in self.free}
        if self.space.holds_batches_of(params):
            return params
        whole = [dict(zip(BATCHES, values, strict=True)) for values in self.space.batches]
        for kept in (BATCHES[:2], BATCHES[:1]):
            possible = [one for one in whole if _agree(one, params, kept)]
            if possible:
                break
        chosen = draw.choice(possible)
        return params | {key: value for key, value in chosen.items() if key in self.free}

    @cached_property
    def _single_values(self) -> Params:
        return {
            name: _encode(dimension.first)
            for name, dimension in self.space.dimensions.items()
            if name not in self.free
        }

    @cached_property
    def _columns(self) -> tuple[tuple[Params, ...], ...]:
        columns = self.space.columns
        assert columns is not None, "combinations of a continuous dimension are not counted"
        return tuple(tuple(self.encode(part) for part in column) for column in columns)


class Frontier:
    """The first combination of a space that was not tried; each is passed once over a study.

    Args:
        encoding: of the space.
        order: of its combinations, by their indices.
    """

    def __init__(self, encoding: Encoding, *, order: Sequence[int] | None = None) -> None:
        self._encoding = encoding
        self._order = range(encoding.size or 0) if order is None else order
        self._passed = 0
        """Combinations that were tried from the first on: they stay so."""

    def first(self, tried: Container[str], running: Container[str] = ()) -> Params | None:
        """Return the first combination that is neither tried nor running, by their identities."""
        for place in range(self._passed, len(self._order)):
            params = self._encoding.combination(self._order[place])
            key = identity(self._encoding.config(params))
            if key in tried:
                self._passed += place == self._passed
            elif key not in running:
                return params
        return None

    def is_exhausted(self, tried: Container[str], running: Container[str] = ()) -> bool:
        """Return whether nothing is left; a continuous dimension always leaves something."""
        return self._encoding.size is not None and self.first(tried, running) is None


@lru_cache(maxsize=IDENTITIES_KEPT)
def identity(config: TrialConfig) -> str:
    """Return a text that is equal for configurations that train the same way.

    Alpha 32 and no alpha at rank 16 are one configuration, for example.
    """
    return canonical(config).key()


def _agree(batches: Params, params: Params, keys: Iterable[str]) -> bool:
    return all(batches[key] == params[key] for key in keys if key in params)


def _distribution(dimension: Dimension) -> BaseDistribution:
    match dimension:
        case Choices(choices=choices):
            return CategoricalDistribution([_encode(choice) for choice in choices])
        case IntRange(low=low, step=step, log=log):
            return IntDistribution(low, dimension.values()[-1], step=step, log=log)
        case FloatRange(low=low, high=high, step=None, log=log):
            return FloatDistribution(low, high, log=log)
        case FloatRange(low=low, step=step):
            return FloatDistribution(low, _last_step(dimension), step=step)


def _last_step(dimension: FloatRange) -> float:
    """Return the last value of a stepped range, without the binary noise that Optuna warns of."""
    values = dimension.values()
    assert values is not None
    return float(Decimal(str(dimension.low)) + (len(values) - 1) * Decimal(str(dimension.step)))


def _encode(value: Any) -> Any:
    return json.dumps(list(value)) if isinstance(value, list | tuple) else value


def _decode(value: Any, dimension: Dimension) -> Any:
    match dimension:
        case Choices(choices=choices):
            return next(choice for choice in choices if _encode(choice) == value)
        case IntRange():
            return int(value)
        case FloatRange():
            values = dimension.values()
            return value if values is None else min(values, key=lambda known: abs(known - value))


@dataclass(frozen=True)
class Candidate:
    """One configuration, as Optuna keeps it and as it is trained."""

    params: Params
    config: TrialConfig
    key: str
    """Equal for configurations that train the same way."""


class Candidates(Protocol):
    """What may be chosen."""

    is_listed: bool
    """Whether `near` returns everything there is, and the same at every choice."""
    free: dict[str, BaseDistribution]
    """The dimensions that Optuna samples."""

    def near(self, best: Sequence[Params]) -> tuple[Candidate, ...]:
        """Return what to choose from, with more of what is like ``best`` where not all is."""
        ...

    def config(self, params: Params) -> TrialConfig | None:
        """Return the configuration of a trial's parameters; None where they are not to be had."""
        ...

    def repaired(self, params: Params) -> Params:
        """Return drawn parameters with others where they do not go together."""
        ...

    def instead_of(self, params: Params) -> Iterator[Params]:
        """Yield what may be asked for instead of drawn parameters."""
        ...


class SpaceCandidates(Encoding):
    """The valid configurations of a search space, once each; see `Candidates`.

    A space that is continuous or too large to be listed is sampled anew for each choice, and more
    closely around what looked best.
    """

    def __init__(
        self, space: SearchSpace, *, is_valid: Callable[[TrialConfig], bool], seed: int
    ) -> None:
        super().__init__(space)
        self._is_valid = is_valid
        self._random = random.Random(seed)
        self.is_listed = self.size is not None and self.size <= LISTED_MAX

    def near(self, best: Sequence[Params]) -> tuple[Candidate, ...]:
        """See `Candidates.near`."""
        if self.is_listed:
            return self._all
        drawn = [*self._spread(), *(p for near in best for p in self._beside(near))]
        whole = map(self.repaired, drawn)
        return self._valid((params, self.config(params)) for params in whole)

    def repaired(self, params: Params) -> Params:
        """See `Candidates.repaired`."""
        return self.with_whole_batches(params, draw=self._random)

    def instead_of(self, params: Params) -> Iterator[Params]:
        """Yield combinations in random order."""
        size = self.size or 0
        for index in self._random.sample(range(size), min(size, UNTRIED_MAX)):
            combination = self.combination(index)
            yield {name: combination[name] for name in self.free}

    @cached_property
    def _all(self) -> tuple[Candidate, ...]:
        return self._valid(
            ({name: params[name] for name in self.free}, config) for params, config in self.every()
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
        """Yield random combinations."""
        for _ in range(SAMPLED):
            yield {name: self._at(name, self._random.random()) for name in self.free}

    def _at(self, name: str, share: float) -> Any:
        """Return the value of a dimension at a share of its way, from 0 to 1."""
        dimension = self.space.dimensions[name]
        values = dimension.values()
        if values is None:
            return _continuous(dimension).at(share)
        return _encode(values[min(int(share * len(values)), len(values) - 1)])

    def _beside(self, params: Params) -> Iterator[Params]:
        """Yield combinations that differ in one dimension, by little where it has an order."""
        for name in self.free:
            dimension = self.space.dimensions[name]
            values = dimension.values()
            if values is None:
                line = _continuous(dimension)
                here = line.share_of(params[name])
                near = [line.at(here + sign * step) for step in STEPS_ASIDE for sign in (-1, 1)]
            else:
                encoded = [_encode(value) for value in values]
                at = encoded.index(params[name]) if params[name] in encoded else 0
                is_ordered = all(isinstance(value, int | float) for value in encoded)
                near = encoded[max(0, at - 2) : at + 3] if is_ordered else encoded[:8]
            yield from (params | {name: value} for value in near)


def _continuous(dimension: Dimension) -> FloatRange:
    assert isinstance(dimension, FloatRange), "only a range of numbers has no list of values"
    return dimension
