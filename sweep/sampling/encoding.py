"""Owns the way from a search space to Optuna's distributions and back, exactly, and whether a space
has been tried in all.

Knows nothing of samplers, studies or trials.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Container, Iterable, Iterator, Mapping
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any

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
        columns = [
            [(part, self._values_in(self.config(first | part), part)) for part in column]
            for column in self._columns
        ]
        for row in itertools.product(*columns):
            params: Params = {}
            values: dict[str, Any] = {}
            for part, known in row:
                params |= part
                values |= known
            yield params, parsed.model_copy(update=values)

    @staticmethod
    def _values_in(config: TrialConfig, part: Params) -> dict[str, Any]:
        return {key: getattr(config, key) for key in part}

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
    """Whether every combination of a space has been tried; each is looked at once over a study."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._index = 0

    def is_exhausted(self, tried: Container[str]) -> bool:
        """Return whether nothing is left, given the identities of what was tried so far.

        A continuous dimension always leaves something.
        """
        size = self._encoding.size
        if size is None:
            return False
        while self._index < size:
            config = self._encoding.config(self._encoding.combination(self._index))
            if identity(config) not in tried:
                return False
            self._index += 1
        return True


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
