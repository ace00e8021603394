"""A search space as Optuna's distributions and as candidates, and which of them were not tried."""

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

from qlora_sweep.search_spaces.config import BATCH_KEYS, TrialConfig, canonical
from qlora_sweep.search_spaces.dimensions import Choices, Dimension, FloatRange, IntRange
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.sweep.predict.forecast import Forecaster, Progress, silent
from qlora_sweep.sweep.predict.shortlist import Shortlist

IDENTITIES_KEPT = 32_768
"""Identities that are not worked out again; one takes a kilobyte with its configuration."""
LISTED_MAX = 50_000
"""Combinations up to which a space is listed whole, every preset among them.

20,000 take two seconds of one core, once, and a choice among them takes less than one among the
samples of a larger space, of which all is worked out anew each time.
"""
SHORTLISTED = 3_000
"""The fastest configurations that bounds leave of a space."""
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
        self.distributions: dict[str, BaseDistribution] = {}
        self.free: dict[str, BaseDistribution] = {}
        """The dimensions that have more than one value: Optuna samples these alone."""
        self._first: dict[str, Any] = {}
        for name, dimension in space.dimensions.items():
            distribution = _distribution(dimension)
            self.distributions[name] = distribution
            if not distribution.single():
                self.free[name] = distribution
            self._first[name] = dimension.first

    def encode(self, values: Mapping[str, Any]) -> Params:
        """Return the space's values of some dimensions as Optuna keeps them."""
        return {name: _encode(value) for name, value in values.items()}

    def decode(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the space's own values: the declared choice, the exact step of a range."""
        return {name: _decode(value, self.space.dimensions[name]) for name, value in params.items()}

    def free_of(self, params: Params) -> Params:
        """Return the parameters of the free dimensions."""
        return {name: params[name] for name in self.free}

    def config(self, params: Mapping[str, Any]) -> TrialConfig:
        """Return the configuration for a value of each free dimension."""
        return self.space.config(self._first | self.decode(params))

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
        columns: list[list[tuple[Params, Params]]] = []
        for column in self._columns:
            parts: list[tuple[Params, Params]] = []
            for part in column:
                config = self.config(first | part)
                parts.append((part, {key: getattr(config, key) for key in part}))
            columns.append(parts)
        for row in itertools.product(*columns):
            params: Params = {}
            known: Params = {}
            for part, values in row:
                params |= part
                known |= values
            yield params, parsed.changed(**known)

    def with_whole_batches(self, params: Params, *, draw: random.Random) -> Params:
        """Return ``params`` with other batches where these do not go into each other, and with
        others of what `leave_out` names where these are left out.

        A sampler draws them one by one, and only some of them together are in the space. The
        micro-batch stays, and so do the GPUs where any effective batch goes with both.
        """
        params = dict(params)
        if self.space.leaves_out(self.decode(params)):
            self._change(params, self.encode(draw.choice(self.space.together)))
        if self.space.holds_batches_of(params):
            return params
        for kept in (BATCH_KEYS[:2], BATCH_KEYS[:1]):
            possible: list[Params] = []
            for values in self.space.batches:
                batches = dict(zip(BATCH_KEYS, values, strict=True))
                if all(params.get(key, batches[key]) == batches[key] for key in kept):
                    possible.append(batches)
            if possible:
                break
        self._change(params, draw.choice(possible))
        return params

    def _change(self, params: Params, others: Params) -> None:
        """Put other values in the place of those of free dimensions."""
        for key in self.free.keys() & others.keys():
            params[key] = others[key]

    @cached_property
    def _columns(self) -> tuple[tuple[Params, ...], ...]:
        columns = self.space.columns
        assert columns is not None, "combinations of a continuous dimension are not counted"
        return tuple(tuple(map(self.encode, column)) for column in columns)


class Frontier:
    """What of a space was not tried and may be; each combination is passed once over a study."""

    def __init__(
        self, encoding: Encoding, *, is_asked_for: Callable[[TrialConfig], bool] | None = None
    ) -> None:
        self._encoding = encoding
        self._is_asked_for = is_asked_for or (lambda _: True)
        self._passed = 0
        """Combinations that were tried or are never asked for, from the first on: they stay so."""

    def is_exhausted(self, tried: Container[str]) -> bool:
        """Return whether nothing is left besides what was tried, by its identities; a continuous
        dimension always leaves something."""
        size = self._encoding.size
        while size is not None and self._passed < size:
            config = self._encoding.config(self._encoding.combination(self._passed))
            if identity(config) not in tried and self._is_asked_for(config):
                return False
            self._passed += 1
        return size is not None


@lru_cache(maxsize=IDENTITIES_KEPT)
def identity(config: TrialConfig) -> str:
    """Return a text that is equal for configurations that train the same way.

    Alpha 32 and no alpha at rank 16 are one configuration, for example.
    """
    return canonical(config).key()


def _distribution(dimension: Dimension) -> BaseDistribution:
    match dimension:
        case Choices(choices=choices):
            return CategoricalDistribution(list(map(_encode, choices)))
        case IntRange(low=low, step=step, log=log):
            return IntDistribution(low, dimension.values()[-1], step=step, log=log)
        case FloatRange(low=low, high=high, step=None, log=log):
            return FloatDistribution(low, high, log=log)
        case FloatRange(low=low, step=step):
            # The last value without the binary noise that Optuna warns of.
            steps = len(dimension.values() or ()) - 1
            high = float(Decimal(str(low)) + steps * Decimal(str(step)))
            return FloatDistribution(low, high, step=step)


def _encode(value: Any) -> Any:
    return json.dumps(list(value)) if isinstance(value, list | tuple) else value


def _decode(value: Any, dimension: Dimension) -> Any:
    match dimension:
        case Choices(choices=choices):
            return choices[list(map(_encode, choices)).index(value)]
        case IntRange():
            return int(value)
        case FloatRange():
            return min(dimension.values() or (value,), key=lambda known: abs(known - value))


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
    """Whether `near` returns the same at every choice."""
    is_whole: bool
    """Whether it returns everything there is."""
    free: dict[str, BaseDistribution]
    """The dimensions that Optuna samples."""

    def prepare(self, progress: Progress) -> None:
        """Do once what `near` takes first, and tell how far it is."""
        return

    def near(self, best: Sequence[Params]) -> tuple[Candidate, ...]:
        """Return what to choose from, with more of what is like ``best`` where not all is."""

    def config(self, params: Params) -> TrialConfig | None:
        """Return the configuration of a trial's parameters; None where they are not to be had."""

    def repaired(self, params: Params) -> Params:
        """Return drawn parameters with others where they do not go together."""
        return params

    def instead_of(self, params: Params) -> Iterator[Params]:
        """Yield what may be asked for instead of drawn parameters."""


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
        self.is_whole = self.is_listed

    def prepare(self, progress: Progress) -> None:
        """See `Candidates.prepare`: nothing takes long."""

    def near(self, best: Sequence[Params]) -> tuple[Candidate, ...]:
        """See `Candidates.near`."""
        if self.is_listed:
            return self._all
        drawn: list[tuple[Params, TrialConfig]] = []
        spread = map(self._spread, range(SAMPLED))
        for params in itertools.chain(spread, *map(self._beside, best)):
            repaired = self.repaired(params)
            drawn.append((repaired, self.config(repaired)))
        return self._valid(drawn)

    def repaired(self, params: Params) -> Params:
        """See `Candidates.repaired`."""
        return self.with_whole_batches(params, draw=self._random)

    def instead_of(self, params: Params) -> Iterator[Params]:
        """Yield combinations in random order."""
        size = self.size or 0
        drawn: set[int] = set()
        while len(drawn) < min(size, UNTRIED_MAX):
            index = self._random.randrange(size)
            if index in drawn:
                continue
            drawn.add(index)
            yield self.free_of(self.combination(index))

    @cached_property
    def _all(self) -> tuple[Candidate, ...]:
        return self._valid(self.every())

    def _valid(self, drawn: Iterable[tuple[Params, TrialConfig]]) -> tuple[Candidate, ...]:
        """Return each configuration once, without those that a rule forbids."""
        found: dict[str, Candidate] = {}
        for params, config in drawn:
            key = identity(config)
            if key not in found and self._is_valid(config):
                found[key] = Candidate(self.free_of(params), config, key)
        return tuple(found.values())

    def _spread(self, _: int) -> Params:
        """Return one combination from anywhere."""
        return {name: self._drawn(name) for name in self.free}

    def _drawn(self, name: str) -> Any:
        dimension = self.space.dimensions[name]
        if isinstance(dimension, FloatRange) and dimension.step is None:
            return dimension.at(self._random.random())
        return _encode(self._random.choice(dimension.values() or ()))

    def _beside(self, params: Params) -> Iterator[Params]:
        """Yield combinations that differ in one dimension, by little where it has an order."""
        for name in self.free:
            dimension = self.space.dimensions[name]
            if isinstance(dimension, FloatRange) and dimension.step is None:
                here = dimension.share_of(params[name])
                near = []
                for step in STEPS_ASIDE:
                    near += [dimension.at(here - step), dimension.at(here + step)]
            else:
                near = list(map(_encode, dimension.values() or ()))
                if all(isinstance(value, int | float) for value in near):
                    at = 0
                    if params[name] in near:
                        at = near.index(params[name])
                    near = near[max(0, at - 2) : at + 3]
                else:
                    near = near[:8]
            for value in near:
                yield params | {name: value}


class ShortlistedCandidates(SpaceCandidates):
    """Of a space too large to be listed, what bounds leave of it: where speed alone is asked for,
    nothing else can be the fastest of its class. See `Candidates`.

    Args:
        space: what may be tried.
        forecaster: what bounds it.
        seed: of what is drawn beside it.
    """

    def __init__(self, space: SearchSpace, *, forecaster: Forecaster, seed: int) -> None:
        super().__init__(space, is_valid=forecaster.is_valid, seed=seed)
        self._forecaster = forecaster
        self._progress: Progress = silent
        self.is_listed = True
        self.is_whole = False

    def prepare(self, progress: Progress) -> None:
        """See `Candidates.prepare`."""
        self._progress = progress

    @cached_property
    def _all(self) -> tuple[Candidate, ...]:
        shortlist = Shortlist(self.space, self._forecaster, progress=self._progress)
        shortlist.look_beside_fastest()
        candidates = shortlist.candidates(SHORTLISTED)
        return self._valid((self.encode(own), config) for own, config in candidates)
